//! The operations of a rank's training step, as lists. The trainer executes these lists, memory is measured by
//! executing them on a device that only counts, and the time of a step is predicted from them.
//!
//! The list of the pass is the schedule's. The others contain the averages of gradients, the sum of tied
//! tables, the votes, the updates, and what replicas do when they meet.
//!
//! A list is made from a [`Schedule`](crate::pipeline::Schedule) by [`RankStep::new`] and executed by
//! [`RankStep::run_pass`]. It can be printed and read back.

mod lists;
mod pairs;
mod run;

use std::fmt;
use std::str::FromStr;

use farflung_base::StageId;

use crate::ParallelError;
use crate::pipeline::{Action, ComputeKind, Lowered, Op, microbatch, split};

pub use lists::{Moment, NormVote, RankStep, ReplicaSteps, StepSettings};
pub use run::StepWorker;

/// What a vote contains.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Vote {
    /// Losses, requests, step times, and the squares of the averaged gradients of each part.
    Whole,
    /// The same without squares, so that it can start before averages are complete.
    Losses,
    /// The squares of the averaged gradients of each part, among the ranks of one pipeline.
    Norm,
    /// Losses and requests of all replicas since they last met.
    Window,
}

/// One operation of a rank's step. In comments, `0` is a stage and `3` a microbatch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum StepOp {
    /// An entry of the schedule's list: a computation, a message, the start of a reduction, a gather, a free,
    /// or a move of activations.
    Pass(Lowered),
    /// `0OPEN_GRAD`: opens the average of a part. Its gradients then leave while the next backward pass
    /// computes them, as they become final.
    OpenReduce(StageId),
    /// `0WAIT_GRAD`: waits until a part's gradients are the average over its holders. Starts the average if it
    /// was not started.
    FinishReduce(StageId),
    /// `WAIT_TIED`: waits for the sum of the gradients that the first and the last part share. Starts it if it
    /// was not started.
    FinishTied,
    /// `TAKE_TIED`: gives the last part the first one's average of what they share.
    TakeTied,
    /// `0CONTRIBUTE`: puts the optimizer's contribution in the gradients' place, if it averages something else
    /// and nothing was averaged.
    Contribute(StageId),
    /// `0STEP3`: applies an update. The microbatch is the last whose gradients it contains.
    Update {
        /// The stage.
        stage: StageId,
        /// The last microbatch of the update.
        microbatch: u32,
    },
    /// `0GATHER_PARAMS`: fills a part's parameters with the shards that each holder has updated.
    GatherParameters(StageId),
    /// `0DEFER3`: puts off an update until the sum of tied gradients arrives. Starts the sum if it was not
    /// started.
    Defer {
        /// The stage.
        stage: StageId,
        /// The last microbatch of the update.
        microbatch: u32,
    },
    /// `0CATCH_UP`: waits for the sum of the oldest update that was put off, and applies the update.
    CatchUp(StageId),
    /// `VOTE`, `VOTE_LOSSES`, `VOTE_NORM`, `VOTE_WINDOW`: starts a vote.
    StartVote(Vote),
    /// `WAIT_VOTE` and similar: waits for a vote's result.
    FinishVote(Vote),
    /// `0EXCHANGE`: averages what the method of synchronisation averages when replicas meet.
    Exchange(StageId),
    /// `TAKE_EXCHANGED`: gives the last part the first one's average of the tied table.
    TakeExchanged,
    /// `0PREPARE`: computes a part's next parameters from the average.
    Prepare(StageId),
    /// `AGREE`: all ranks tell each other whether they can apply the average.
    Agree,
    /// `0APPLY`: applies the average to a part.
    Apply(StageId),
    /// `0MIX`: applies what neighbours or servers have sent since the last local step.
    Mix(StageId),
    /// `0DEPART`: starts exchanges whose results later steps apply.
    Depart(StageId),
}

type OfStage = fn(StageId) -> StepOp;

/// The text of each operation of a stage without a microbatch.
const OF_STAGE: [(&str, OfStage); 10] = [
    ("OPEN_GRAD", StepOp::OpenReduce),
    ("WAIT_GRAD", StepOp::FinishReduce),
    ("CONTRIBUTE", StepOp::Contribute),
    ("GATHER_PARAMS", StepOp::GatherParameters),
    ("CATCH_UP", StepOp::CatchUp),
    ("EXCHANGE", StepOp::Exchange),
    ("PREPARE", StepOp::Prepare),
    ("APPLY", StepOp::Apply),
    ("MIX", StepOp::Mix),
    ("DEPART", StepOp::Depart),
];

/// The text of each operation of a rank.
const OF_RANK: [(&str, StepOp); 12] = [
    ("WAIT_TIED", StepOp::FinishTied),
    ("TAKE_TIED", StepOp::TakeTied),
    ("VOTE", StepOp::StartVote(Vote::Whole)),
    ("VOTE_LOSSES", StepOp::StartVote(Vote::Losses)),
    ("VOTE_NORM", StepOp::StartVote(Vote::Norm)),
    ("VOTE_WINDOW", StepOp::StartVote(Vote::Window)),
    ("WAIT_VOTE", StepOp::FinishVote(Vote::Whole)),
    ("WAIT_VOTE_LOSSES", StepOp::FinishVote(Vote::Losses)),
    ("WAIT_VOTE_NORM", StepOp::FinishVote(Vote::Norm)),
    ("WAIT_VOTE_WINDOW", StepOp::FinishVote(Vote::Window)),
    ("TAKE_EXCHANGED", StepOp::TakeExchanged),
    ("AGREE", StepOp::Agree),
];

impl fmt::Display for StepOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Pass(entry) => entry.fmt(f),
            Self::Update { stage, microbatch } => Action::new(ComputeKind::Step, stage.0, microbatch).fmt(f),
            Self::Defer { stage, microbatch } => write!(f, "{}DEFER{microbatch}", stage.0),
            Self::OpenReduce(stage)
            | Self::FinishReduce(stage)
            | Self::Contribute(stage)
            | Self::GatherParameters(stage)
            | Self::CatchUp(stage)
            | Self::Exchange(stage)
            | Self::Prepare(stage)
            | Self::Apply(stage)
            | Self::Mix(stage)
            | Self::Depart(stage) => {
                let name = OF_STAGE.iter().find(|(_, make)| make(stage) == *self);
                write!(f, "{}{}", stage.0, name.expect("every operation of a stage has a row").0)
            }
            Self::FinishTied
            | Self::TakeTied
            | Self::StartVote(_)
            | Self::FinishVote(_)
            | Self::TakeExchanged
            | Self::Agree => {
                let name = OF_RANK.iter().find(|(_, op)| op == self);
                f.write_str(name.expect("every operation of a rank has a row").0)
            }
        }
    }
}

impl FromStr for StepOp {
    type Err = ParallelError;

    fn from_str(text: &str) -> Result<Self, ParallelError> {
        if let Some(&(_, op)) = OF_RANK.iter().find(|(name, _)| *name == text) {
            return Ok(op);
        }
        if let Some((stage, name, rest)) = split(text) {
            let stage = StageId(stage);
            if let Some((_, make)) = OF_STAGE.iter().find(|row| row.0 == name && rest.is_empty()) {
                return Ok(make(stage));
            }
            if let ("DEFER", Some((microbatch, 0))) = (name, microbatch(rest)) {
                return Ok(Self::Defer { stage, microbatch });
            }
        }
        Ok(match text.parse()? {
            Lowered::Compute(Op::Run(Action { kind: ComputeKind::Step, stage, microbatch, .. })) => {
                Self::Update { stage, microbatch }
            }
            entry => Self::Pass(entry),
        })
    }
}
