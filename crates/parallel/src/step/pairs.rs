//! The check that the operations of a step pair.

use std::collections::BTreeMap;

use farflung_base::StageId;

use super::{StepOp, Vote};
use crate::ParallelError;
use crate::pipeline::{Lowered, LoweredKind};

/// What is open of a part.
#[derive(Debug, Default)]
struct PartState {
    /// The operation that opened or started an average that is not waited for yet.
    reducing: Option<StepOp>,
    starts: u32,
    put_off: u32,
    exchanged: Option<StepOp>,
    prepared: bool,
}

const fn refuse(op: StepOp, problem: &'static str) -> Result<(), ParallelError> {
    Err(ParallelError::StepOp { op, problem })
}

/// Checks that what operations open or start is waited for once, after it.
///
/// Errors: [`ParallelError::StepOp`] with the first operation that does not fit.
pub(super) fn check(ops: impl Iterator<Item = StepOp>) -> Result<(), ParallelError> {
    let mut parts: BTreeMap<StageId, PartState> = BTreeMap::new();
    let mut votes: BTreeMap<Vote, StepOp> = BTreeMap::new();
    let mut tied: Option<StepOp> = None;
    for op in ops {
        match op {
            StepOp::Pass(Lowered::Move { kind: LoweredKind::Reduce, stage, .. }) => {
                let part = parts.entry(stage).or_default();
                part.starts += 1;
                if part.starts > 1 {
                    return refuse(op, "the average was started already");
                }
                part.reducing = Some(op);
            }
            StepOp::OpenReduce(stage) => {
                let part = parts.entry(stage).or_default();
                if part.reducing.is_some() {
                    return refuse(op, "the average was opened or started already");
                }
                part.reducing = Some(op);
            }
            StepOp::FinishReduce(stage) => {
                let part = parts.entry(stage).or_default();
                if let Some(open @ StepOp::OpenReduce(_)) = part.reducing {
                    return refuse(
                        open,
                        "the average is opened, but no entry says that all of it is started",
                    );
                }
                (part.reducing, part.starts) = (None, 0);
            }
            StepOp::Pass(Lowered::Move { kind: LoweredKind::ReduceTied, .. }) => {
                if tied.replace(op).is_some() {
                    return refuse(op, "the sum was started already");
                }
            }
            StepOp::FinishTied => tied = None,
            StepOp::Defer { stage, .. } => {
                tied = None;
                parts.entry(stage).or_default().put_off += 1;
            }
            StepOp::CatchUp(stage) => {
                let part = parts.entry(stage).or_default();
                let Some(left) = part.put_off.checked_sub(1) else {
                    return refuse(op, "no update was put off");
                };
                part.put_off = left;
            }
            StepOp::StartVote(vote) => {
                if votes.insert(vote, op).is_some() {
                    return refuse(op, "the vote was started already");
                }
            }
            StepOp::FinishVote(vote) => {
                if votes.remove(&vote).is_none() {
                    return refuse(op, "the vote was not started");
                }
            }
            StepOp::Exchange(stage) => {
                if parts.entry(stage).or_default().exchanged.replace(op).is_some() {
                    return refuse(op, "the part is exchanged already");
                }
            }
            StepOp::Prepare(stage) => {
                let part = parts.entry(stage).or_default();
                if part.exchanged.is_none() {
                    return refuse(op, "the part was not exchanged");
                }
                part.prepared = true;
            }
            StepOp::Apply(stage) => {
                let part = parts.entry(stage).or_default();
                if !std::mem::take(&mut part.prepared) {
                    return refuse(op, "the part was not prepared");
                }
                part.exchanged = None;
            }
            StepOp::Pass(_)
            | StepOp::TakeTied
            | StepOp::TakeExchanged
            | StepOp::Agree
            | StepOp::Contribute(_)
            | StepOp::Update { .. }
            | StepOp::Mix(_)
            | StepOp::Depart(_)
            | StepOp::GatherParameters(_) => {}
        }
    }
    check_ends(parts)?;
    match (tied, votes.into_values().next()) {
        (Some(op), _) => refuse(op, "nothing waits for the sum"),
        (None, Some(op)) => refuse(op, "nothing waits for the vote"),
        (None, None) => Ok(()),
    }
}

/// Checks that nothing of a part is left open.
fn check_ends(parts: BTreeMap<StageId, PartState>) -> Result<(), ParallelError> {
    for (stage, part) in parts {
        if let Some(op) = part.reducing {
            return refuse(op, "nothing waits for the average");
        }
        if part.put_off > 0 {
            return refuse(StepOp::CatchUp(stage), "an update that was put off is not applied");
        }
        if let Some(op) = part.exchanged {
            return refuse(op, "the exchange is not applied");
        }
    }
    Ok(())
}
