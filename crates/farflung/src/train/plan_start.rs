//! The point of a run at which a plan begins.

use farflung_parallel::LocalSteps;
use serde::{Deserialize, Serialize};

/// The point at which the steps and microbatches of a plan begin; earlier ones belong to other plans of the
/// same run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlanStart {
    /// Number of steps before that point.
    pub step: u64,
    /// Number of microbatches of all replicas before that point.
    pub microbatches: u64,
}

impl PlanStart {
    /// Returns the number of microbatches of all replicas in the first `steps` steps, if they take these local
    /// steps since this point.
    pub(super) fn microbatches_after(&self, local: &LocalSteps, steps: u64) -> u64 {
        self.microbatches + local.all_microbatches(steps) - local.all_microbatches(self.step.min(steps))
    }
}
