//! One computation of a pipeline, and its text form: `2F0` is stage 2's forward of microbatch 0. The rank that
//! runs a stage and the time are not part of it.

use std::fmt;
use std::str::FromStr;

use farflung_base::StageId;

use crate::ParallelError;

/// Kind of a computation in a pipeline schedule.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ComputeKind {
    /// `F`: forward.
    Forward,
    /// `I`: gradient of the stage's input. The previous stage waits for it.
    BackwardInput,
    /// `W`: gradients of the stage's weights. Only the optimizer waits for them.
    BackwardWeight,
    /// `B`: `I` and `W` in one. The gradient is sent after both are done.
    Backward,
    /// `R`: the forward again, to recompute activations that were not kept.
    Recompute,
    /// `STEP`: the optimizer step, with the gradients of the microbatches since the stage's previous step, up
    /// to the action's microbatch.
    Step,
}

impl ComputeKind {
    const ALL: [Self; 6] = [
        Self::Forward,
        Self::BackwardInput,
        Self::BackwardWeight,
        Self::Backward,
        Self::Recompute,
        Self::Step,
    ];

    /// Returns the text form of the kind.
    #[must_use]
    pub const fn text(self) -> &'static str {
        match self {
            Self::Forward => "F",
            Self::BackwardInput => "I",
            Self::BackwardWeight => "W",
            Self::Backward => "B",
            Self::Recompute => "R",
            Self::Step => "STEP",
        }
    }
}

/// One computation of one stage, on one microbatch or on one slice of its tokens.
///
/// ```
/// use farflung_parallel::pipeline::{Action, ComputeKind};
///
/// let action: Action = "2F0".parse()?;
/// assert_eq!(action, Action::forward(2, 0));
/// let sliced: Action = "12I7.3".parse()?;
/// assert_eq!((sliced.kind, sliced.stage.0), (ComputeKind::BackwardInput, 12));
/// assert_eq!((sliced.microbatch, sliced.slice), (7, 3));
/// assert_eq!(sliced.to_string(), "12I7.3");
/// # Ok::<(), farflung_parallel::ParallelError>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Action {
    /// The stage, counted over the whole pipeline.
    pub stage: StageId,
    /// Index of the microbatch.
    pub microbatch: u32,
    /// Index of the slice of the microbatch's tokens; 0 if microbatches are not sliced.
    pub slice: u16,
    /// Kind of the computation.
    pub kind: ComputeKind,
}

impl Action {
    /// Creates an action on a whole microbatch.
    #[must_use]
    pub const fn new(kind: ComputeKind, stage: u32, microbatch: u32) -> Self {
        Self { stage: StageId(stage), microbatch, slice: 0, kind }
    }

    /// Creates a forward, `F`, of a whole microbatch.
    #[must_use]
    pub const fn forward(stage: u32, microbatch: u32) -> Self {
        Self::new(ComputeKind::Forward, stage, microbatch)
    }

    /// Creates an input gradient, `I`, of a whole microbatch.
    #[must_use]
    pub const fn input(stage: u32, microbatch: u32) -> Self {
        Self::new(ComputeKind::BackwardInput, stage, microbatch)
    }

    /// Creates a weight gradient, `W`, of a whole microbatch.
    #[must_use]
    pub const fn weight(stage: u32, microbatch: u32) -> Self {
        Self::new(ComputeKind::BackwardWeight, stage, microbatch)
    }

    /// Creates a whole backward, `B`, of a whole microbatch.
    #[must_use]
    pub const fn backward(stage: u32, microbatch: u32) -> Self {
        Self::new(ComputeKind::Backward, stage, microbatch)
    }

    /// Returns whether the action computes the gradient that the previous stage waits for.
    #[must_use]
    pub const fn yields_gradient(self) -> bool {
        matches!(self.kind, ComputeKind::Backward | ComputeKind::BackwardInput)
    }

    /// Returns whether the activations of the microbatch can be freed after the action.
    #[must_use]
    pub const fn releases(self) -> bool {
        matches!(self.kind, ComputeKind::Backward | ComputeKind::BackwardWeight)
    }
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}{}", self.stage.0, self.kind.text(), self.microbatch)?;
        if self.slice > 0 { write!(f, ".{}", self.slice) } else { Ok(()) }
    }
}

/// Splits `12SEND_F7` into stage, name and the rest.
pub(crate) fn split(text: &str) -> Option<(u32, &str, &str)> {
    let name = text.find(|c: char| !c.is_ascii_digit())?;
    let rest = text[name..].find(|c: char| c.is_ascii_digit()).map_or(text.len(), |i| name + i);
    Some((text[..name].parse().ok()?, &text[name..rest], &text[rest..]))
}

/// Parses `7` or `7.3`: a microbatch, and a slice if there is one.
pub(crate) fn microbatch(text: &str) -> Option<(u32, u16)> {
    match text.split_once('.') {
        None => Some((text.parse().ok()?, 0)),
        Some((microbatch, slice)) => Some((microbatch.parse().ok()?, slice.parse().ok().filter(|&s| s > 0)?)),
    }
}

impl FromStr for Action {
    type Err = ParallelError;

    fn from_str(text: &str) -> Result<Self, ParallelError> {
        let parse = || {
            let (stage, name, rest) = split(text)?;
            let kind = ComputeKind::ALL.into_iter().find(|kind| kind.text() == name)?;
            let (microbatch, slice) = microbatch(rest)?;
            Some(Self { stage: StageId(stage), microbatch, slice, kind })
        };
        parse().ok_or_else(|| ParallelError::ActionForm { text: text.to_owned() })
    }
}

/// An entry of a rank's list: one action, or two that the rank runs at the same time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Op {
    /// One action.
    Run(Action),
    /// A forward and a backward of two microbatches, written `(0F7;7B3)`. The communication of one overlaps
    /// with the computation of the other. Both end when the pair ends.
    Overlap {
        /// The forward.
        forward: Action,
        /// The backward: a whole one, or of the input only.
        backward: Action,
    },
}

impl Op {
    /// Returns the actions of the op in the order of the text form.
    pub fn actions(&self) -> impl Iterator<Item = Action> + use<> {
        let (first, second) = match *self {
            Self::Run(action) => (action, None),
            Self::Overlap { forward, backward } => (forward, Some(backward)),
        };
        std::iter::once(first).chain(second)
    }
}

impl From<Action> for Op {
    fn from(action: Action) -> Self {
        Self::Run(action)
    }
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Run(action) => action.fmt(f),
            Self::Overlap { forward, backward } => write!(f, "({forward};{backward})"),
        }
    }
}

impl FromStr for Op {
    type Err = ParallelError;

    fn from_str(text: &str) -> Result<Self, ParallelError> {
        let Some(inner) = text.strip_prefix('(').and_then(|t| t.strip_suffix(')')) else {
            return text.parse().map(Self::Run);
        };
        let form = || ParallelError::ActionForm { text: text.to_owned() };
        let (forward, backward) = inner.split_once(';').ok_or_else(form)?;
        let (forward, backward): (Action, Action) = (forward.parse()?, backward.parse()?);
        if forward.kind != ComputeKind::Forward || !backward.yields_gradient() {
            return Err(form());
        }
        Ok(Self::Overlap { forward, backward })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn an_op_is_small() {
        // `Op` must be small, because a schedule of a thousand stages and thousands of microbatches has
        // millions of ops.
        assert_eq!(size_of::<Op>(), 24);
    }

    #[test]
    fn what_is_no_action_is_refused_with_its_text() {
        for bad in [
            "",
            "F0",
            "0F",
            "0X1",
            "0F1.0",
            "0F1.",
            "-1F0",
            "0F99999999999",
            "0f1",
            "(0F1)",
            "(0F1;1F2)",
            "0F1 ",
        ] {
            let message = bad.parse::<Op>().unwrap_err().to_string();
            assert!(message.contains(&format!("`{bad}`")), "{message}");
        }
    }

    fn any_action() -> impl Strategy<Value = Action> {
        let kind = prop::sample::select(ComputeKind::ALL.to_vec());
        (kind, any::<u32>(), any::<u32>(), any::<u16>()).prop_map(|(kind, stage, microbatch, slice)| Action {
            stage: StageId(stage),
            microbatch,
            slice,
            kind,
        })
    }

    proptest! {
        #[test]
        fn prints_and_parses_back(action in any_action(), other in any_action()) {
            prop_assert_eq!(action.to_string().parse(), Ok(action));
            let forward = Action { kind: ComputeKind::Forward, ..action };
            let backward = Action { kind: ComputeKind::Backward, ..other };
            let pair = Op::Overlap { forward, backward };
            prop_assert_eq!(pair.to_string().parse(), Ok(pair));
        }

        #[test]
        fn no_text_panics(text in "[0-9FIWBRSTEP.;()]{0,12}") {
            let _ = text.parse::<Op>();
        }
    }
}
