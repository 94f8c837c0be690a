//! The lists that ranks execute: computations, and between them sends, receives, reductions, gathers and moves
//! of activations.

use std::fmt;
use std::str::FromStr;

use farflung_base::{Rank, StageId};

use super::action::{microbatch, split};
use super::{Action, ComputeKind, Op, Placement};
use crate::ParallelError;

/// Kind of an entry that lowering adds between computations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum LoweredKind {
    /// `SEND_F`: sends a stage's output to the rank of the next stage.
    SendForward,
    /// `RECV_F`: posts the receive of a stage's input.
    ReceiveForward,
    /// `SEND_B`: sends the gradient of a stage's input to the rank of the previous stage.
    SendBackward,
    /// `RECV_B`: posts the receive of the gradient of a stage's output.
    ReceiveBackward,
    /// `REDUCE_GRAD`: starts averaging a stage's gradients, which are complete on this rank, with those of its
    /// replicas.
    Reduce,
    /// `REDUCE_TIED`: starts summing the gradients that the first and the last stage share.
    ReduceTied,
    /// `UNSHARD`: gathers a stage's weights for the following computations.
    Gather,
    /// `RESHARD`: frees gathered weights.
    Free,
    /// `OFFLOAD`: moves a microbatch's activations to slower memory.
    Offload,
    /// `LOAD`: moves a microbatch's activations back from slower memory.
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

    /// Returns the text form of the kind. It is `PyTorch`'s if `PyTorch` has the kind.
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

    /// Returns whether the entry is for one microbatch.
    const fn has_microbatch(self) -> bool {
        !matches!(self, Self::Reduce | Self::ReduceTied | Self::Gather | Self::Free)
    }
}

/// An entry of a rank's lowered list.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Lowered {
    /// A computation.
    Compute(Op),
    /// A communication or data movement.
    Move {
        /// Kind of the entry.
        kind: LoweredKind,
        /// The stage. For a message, the stage on this rank.
        stage: StageId,
        /// Index of the microbatch; 0 for `Reduce`, `ReduceTied`, `Gather` and `Free`, which have none.
        microbatch: u32,
        /// Index of the slice of the microbatch's tokens; 0 if there is none.
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

    /// Returns the message that the entry sends or receives, if it is a message between two stages of
    /// `placement`.
    #[must_use]
    pub fn message(&self, placement: &Placement) -> Option<(TransferDirection, Message)> {
        let Self::Move { kind, stage, microbatch, slice } = *self else { return None };
        let action = |kind| Action { stage, microbatch, slice, kind };
        let (forward, backward) = (action(ComputeKind::Forward), action(ComputeKind::Backward));
        let (way, message) = match kind {
            LoweredKind::SendForward => (TransferDirection::Send, Message::made_by(forward, placement)),
            LoweredKind::ReceiveForward => {
                (TransferDirection::Receive, Message::taken_by(forward, placement))
            }
            LoweredKind::SendBackward => (TransferDirection::Send, Message::made_by(backward, placement)),
            LoweredKind::ReceiveBackward => {
                (TransferDirection::Receive, Message::taken_by(backward, placement))
            }
            _ => return None,
        };
        Some((way, message?))
    }

    /// Returns whether the entry is a send or a receive, without checking that its stages exist.
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

/// Direction of a message, as seen by one rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TransferDirection {
    /// The rank sends the message.
    Send,
    /// The rank receives the message.
    Receive,
}

/// Content of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Content {
    /// The output of a stage, for the next stage.
    Activation,
    /// The gradient of a stage's input, for the previous stage.
    Gradient,
}

/// Data that one stage produces for another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Message {
    /// The stage that produces the message.
    pub from: StageId,
    /// Content of the message.
    pub content: Content,
    /// Index of the microbatch.
    pub microbatch: u32,
    /// Index of the slice of the microbatch's tokens.
    pub slice: u16,
}

impl Message {
    /// Returns the stage that uses the message.
    #[must_use]
    pub const fn to(&self) -> StageId {
        match self.content {
            Content::Activation => StageId(self.from.0 + 1),
            Content::Gradient => StageId(self.from.0 - 1),
        }
    }

    /// Returns the message that `action` produces for another stage, if any.
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

    /// Returns the message that `action` needs from another stage, if any.
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

    /// Returns the sending and the receiving rank. `None` if both stages are on the same rank.
    #[must_use]
    pub fn wire(&self, placement: &Placement) -> Option<(Rank, Rank)> {
        let (from, to) = (placement.rank(self.from), placement.rank(self.to()));
        (from != to).then_some((from, to))
    }

    /// Returns the entry that sends the message.
    pub(super) const fn send(&self) -> Lowered {
        let Self { from, microbatch, slice, .. } = *self;
        let kind = match self.content {
            Content::Activation => LoweredKind::SendForward,
            Content::Gradient => LoweredKind::SendBackward,
        };
        Lowered::Move { kind, stage: from, microbatch, slice }
    }

    /// Returns the entry that receives the message.
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
