//! The windows of held-out text on which a run is evaluated. They depend neither on the number of workers nor
//! on the batch, so that losses can be compared.

use super::{RunSettings, TrainConfig};

/// Number of windows in each of `eval-batches`, as `farflung eval` has by default.
const WINDOWS: u64 = 12;

impl RunSettings {
    /// Returns the number of windows of an evaluation.
    pub(crate) fn eval_windows(&self) -> usize {
        usize::try_from(self.eval_batches.saturating_mul(WINDOWS)).unwrap_or(usize::MAX)
    }
}

impl TrainConfig {
    /// Returns the number of microbatches in which each of these replicas evaluates its share.
    pub(crate) fn eval_passes(&self, replicas: u64) -> u64 {
        let at_once = replicas.saturating_mul(self.batch as u64).max(1);
        self.eval_batches.saturating_mul(WINDOWS).div_ceil(at_once)
    }
}
