//! Speeds of a plan's ranks, from the times of a microbatch that they report.

use farflung_base::{Nanos, Rank};
use farflung_parallel::Plan;
use farflung_parallel::plan::Measured;
use farflung_zoo::ModelSpec;

use crate::train::costs::Work;

/// What a rank computes of each microbatch.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct RankWork {
    /// Index of its stage.
    pub(super) stage: u32,
    /// Operations of its stage's part, forward and backward.
    pub(super) operations: f64,
}

impl RankWork {
    /// Returns its speed in operations a second, from its times; `None` if it has not told them.
    pub(super) fn speed(&self, told: &Measured) -> Option<f64> {
        let is_known = told.microbatch > Nanos::ZERO && self.operations > 0.0;
        is_known.then(|| self.operations / told.microbatch.as_secs_f64())
    }
}

/// Returns the number of operations of a microbatch in each part of a plan.
pub(super) fn work(plan: &Plan, model: &ModelSpec) -> Vec<f64> {
    let work = Work::new(model, plan.batch as usize);
    plan.parts.iter().map(|part| work.slice_flops(&part.layers, &work.positions())).collect()
}

/// Returns what each rank of a plan computes, where each has one part.
pub(super) fn work_of_ranks(plan: &Plan, model: &ModelSpec) -> Vec<RankWork> {
    let work = work(plan, model);
    let of = |rank| {
        let stage = plan.place(Rank(rank));
        Some(RankWork { stage, operations: *work.get(stage as usize)? })
    };
    (0..plan.ranks()).filter_map(of).collect()
}
