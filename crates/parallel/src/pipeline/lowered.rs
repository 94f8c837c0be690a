//! The lists that ranks carry out: computations, and between them what is sent, received, reduced, gathered and
//! moved.

use std::fmt;
use std::str::FromStr;

use farflung_base::{Rank, StageId};

use super::action::{microbatch, split};
use super::{Action, ComputeKind, Op, Placement};
use crate::ParallelError;

/// What lowering puts between computations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum LoweredKind {
    /// `SEND_F`: a stage's output leaves for the next stage's rank.
    SendForward,
    /// `RECV_F`: a stage's input is awaited from now on.
    ReceiveForward,
    /// `SEND_B`: the gradient of a stage's input leaves for the rank of the stage before.
    SendBackward,
    /// `RECV_B`: the gradient of a stage's output is awaited from now on.
    ReceiveBackward,
    /// `REDUCE_GRAD`: a stage's gradients are complete here and are averaged with those of its replicas from
    /// now on.
    Reduce,
    /// `REDUCE_TIED`: the gradients that the first and the last stage share are summed from now on.
    ReduceTied,
    /// `UNSHARD`: a stage's weights are gathered for the computations that follow.
    Gather,
    /// `RESHARD`: gathered weights are given up.
    Free,
    /// `OFFLOAD`: a microbatch's activations leave for slower memory.
    Offload,
    /// `LOAD`: they come back.
    Load,
}

impl LoweredKind {
    const ALL: [Self; 10] = [
        Self::SendForward,
        Self::ReceiveForward,
        Self::SendBackward,
        Self::ReceiveBackward,
        Self::Reduce,
        Self::ReduceTied,
        Self::Gather,
        Self::Free,
        Self::Offload,
        Self::Load,
    ];

    /// How the kind is written; where `PyTorch` has it, as there.
    #[must_use]
    pub const fn text(self) -> &'static str {
        match self {
            Self::SendForward => "SEND_F",
            Self::ReceiveForward => "RECV_F",
            Self::SendBackward => "SEND_B",
            Self::ReceiveBackward => "RECV_B",
            Self::Reduce => "REDUCE_GRAD",
            Self::ReduceTied => "REDUCE_TIED",
            Self::Gather => "UNSHARD",
            Self::Free => "RESHARD",
            Self::Offload => "OFFLOAD",
            Self::Load => "LOAD",
        }
    }

    /// Whether it is about one microbatch.
    const fn has_microbatch(self) -> bool {
        !matches!(self, Self::Reduce | Self::ReduceTied | Self::Gather | Self::Free)
    }
}

/// An entry of a rank's lowered list.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Lowered {
    /// A computation.
    Compute(Op),
    /// Anything else. Only a [`LoweredKind::SendForward`] and the like have a microbatch and slice; for others
    /// they are 0.
    Move {
        /// What.
        kind: LoweredKind,
        /// Of which stage: of a message, the one on this rank.
        stage: StageId,
        /// Of which microbatch.
        microbatch: u32,
        /// Of which slice of its tokens.
        slice: u16,
    },
}

impl Lowered {
    pub(super) const fn of_action(kind: LoweredKind, action: Action) -> Self {
        let Action { stage, microbatch, slice, .. } = action;
        Self::Move { kind, stage, microbatch, slice }
    }

    pub(super) const fn of_stage(kind: LoweredKind, stage: StageId) -> Self {
        Self::Move { kind, stage, microbatch: 0, slice: 0 }
    }

    /// What it sends or awaits, if it is a message between two stages of `placement`.
    #[must_use]
    pub fn message(&self, placement: &Placement) -> Option<(Way, Message)> {
        let Self::Move { kind, stage, microbatch, slice } = *self else { return None };
        let action = |kind| Action { stage, microbatch, slice, kind };
        let (forward, backward) = (action(ComputeKind::Forward), action(ComputeKind::Backward));
        let (way, message) = match kind {
            LoweredKind::SendForward => (Way::Send, Message::made_by(forward, placement)),
            LoweredKind::ReceiveForward => (Way::Receive, Message::taken_by(forward, placement)),
            LoweredKind::SendBackward => (Way::Send, Message::made_by(backward, placement)),
            LoweredKind::ReceiveBackward => (Way::Receive, Message::taken_by(backward, placement)),
            _ => return None,
        };
        Some((way, message?))
    }

    /// Whether it is a message at all, between whatever stages.
    pub(super) const fn is_message(&self) -> bool {
        use LoweredKind::{ReceiveBackward, ReceiveForward, SendBackward, SendForward};
        matches!(self, Self::Move { kind: SendForward | ReceiveForward | SendBackward | ReceiveBackward, .. })
    }
}

impl fmt::Display for Lowered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Compute(op) => op.fmt(f),
            Self::Move { kind, stage, microbatch, slice } => {
                write!(f, "{}{}", stage.0, kind.text())?;
                match (kind.has_microbatch(), slice) {
                    (false, _) => Ok(()),
                    (true, 0) => write!(f, "{microbatch}"),
                    (true, slice) => write!(f, "{microbatch}.{slice}"),
                }
            }
        }
    }
}

impl FromStr for Lowered {
    type Err = ParallelError;

    fn from_str(text: &str) -> Result<Self, ParallelError> {
        let parse = || {
            let (stage, name, rest) = split(text)?;
            let kind = LoweredKind::ALL.into_iter().find(|kind| kind.text() == name)?;
            let (microbatch, slice) =
                if kind.has_microbatch() { microbatch(rest)? } else { rest.is_empty().then_some((0, 0))? };
            Some(Self::Move { kind, stage: StageId(stage), microbatch, slice })
        };
        match parse() {
            Some(lowered) => Ok(lowered),
            None => text.parse().map(Self::Compute),
        }
    }
}

/// Which end of a wire a rank is at.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Way {
    /// The message leaves.
    Send,
    /// It is awaited.
    Receive,
}

/// What a message holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Content {
    /// The output of a stage, for the next.
    Activation,
    /// The gradient of a stage's input, for the one before.
    Gradient,
}

/// What one stage makes for another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Message {
    /// The stage that makes it.
    pub from: StageId,
    /// What it is.
    pub content: Content,
    /// Of which microbatch.
    pub microbatch: u32,
    /// Of which slice.
    pub slice: u16,
}

impl Message {
    /// The stage that takes it.
    #[must_use]
    pub const fn to(&self) -> StageId {
        match self.content {
            Content::Activation => StageId(self.from.0 + 1),
            Content::Gradient => StageId(self.from.0 - 1),
        }
    }

    /// What `action` makes for another stage.
    #[must_use]
    pub fn made_by(action: Action, placement: &Placement) -> Option<Self> {
        let Action { kind, stage, microbatch, slice } = action;
        let (content, to) = match kind {
            ComputeKind::Forward => (Content::Activation, placement.next(stage)),
            _ if action.yields_gradient() => (Content::Gradient, placement.previous(stage)),
            _ => return None,
        };
        to.map(|_| Self { from: stage, content, microbatch, slice })
    }

    /// What `action` takes from another stage.
    #[must_use]
    pub fn taken_by(action: Action, placement: &Placement) -> Option<Self> {
        let Action { kind, stage, microbatch, slice } = action;
        let (content, from) = match kind {
            ComputeKind::Forward => (Content::Activation, placement.previous(stage)?),
            _ if action.yields_gradient() => (Content::Gradient, placement.next(stage)?),
            _ => return None,
        };
        Some(Self { from, content, microbatch, slice })
    }

    /// The rank that sends it and the one that takes it, where these are two.
    #[must_use]
    pub fn wire(&self, placement: &Placement) -> Option<(Rank, Rank)> {
        let (from, to) = (placement.rank(self.from), placement.rank(self.to()));
        (from != to).then_some((from, to))
    }

    /// The entry that sends it.
    pub(super) const fn send(&self) -> Lowered {
        let Self { from, microbatch, slice, .. } = *self;
        let kind = match self.content {
            Content::Activation => LoweredKind::SendForward,
            Content::Gradient => LoweredKind::SendBackward,
        };
        Lowered::Move { kind, stage: from, microbatch, slice }
    }

    /// The entry that awaits it.
    pub(super) const fn receive(&self) -> Lowered {
        let kind = match self.content {
            Content::Activation => LoweredKind::ReceiveForward,
            Content::Gradient => LoweredKind::ReceiveBackward,
        };
        Lowered::Move { kind, stage: self.to(), microbatch: self.microbatch, slice: self.slice }
    }
}

impl fmt::Display for Message {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.send().fmt(f)
    }
}
