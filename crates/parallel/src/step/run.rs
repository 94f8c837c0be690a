//! Executes the list of a pass with a worker: in its order, or in that of arrivals.

use farflung_base::Rank;

use super::{Moment, RankStep, StepOp};
use crate::ParallelError;
use crate::pipeline::{ArrivalExecutor, ArrivalRule, Executor, Schedule, Worker};

/// A worker that also runs the operations of a step that a schedule does not contain.
pub trait StepWorker: Worker {
    /// Runs an operation of a part or of the tied weights.
    ///
    /// Errors: those of the worker.
    fn run_op(&mut self, op: StepOp) -> Result<(), Self::Error>;
}

impl RankStep {
    /// Executes the list of the pass. `schedule` and `rank` are those that the step was made for.
    ///
    /// Errors: those of the worker.
    ///
    /// # Panics
    /// If the schedule has no such rank.
    pub fn run_pass<W: StepWorker>(
        &self,
        schedule: &Schedule,
        rank: Rank,
        worker: &mut W,
    ) -> Result<(), W::Error> {
        let mut executor = Executor::new(schedule, rank);
        for &op in self.at(Moment::Pass) {
            match op {
                StepOp::Pass(entry) => executor.entry(entry, worker)?,
                op => worker.run_op(op)?,
            }
        }
        Ok(())
    }

    /// Returns an executor of the pass that chooses the next computation by what has arrived.
    ///
    /// Errors: those of [`ArrivalExecutor::new`].
    ///
    /// # Panics
    /// If the schedule has no such rank.
    pub fn by_arrivals<'a>(
        &self,
        schedule: &'a Schedule,
        rank: Rank,
        rule: ArrivalRule,
    ) -> Result<ArrivalExecutor<'a>, ParallelError> {
        let entries = self.at(Moment::Pass).iter().filter_map(|op| match op {
            StepOp::Pass(entry) => Some(*entry),
            _ => None,
        });
        ArrivalExecutor::of_entries(schedule, rank, rule, entries)
    }
}
