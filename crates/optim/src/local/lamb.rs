//! LAMB.

use super::{Averages, LocalMethod, LocalSettings, clipped};
use crate::transform::{add_decayed_weights, scale_by_adam, scale_by_schedule, scale_by_trust_ratio};
use crate::{ChainBuilder, LrSchedule};

/// Row of [`METHODS`](super::METHODS) for [`lamb`].
pub const LAMB: LocalMethod = LocalMethod {
    name: "lamb",
    summary: "AdamW with the step of each tensor scaled to the norm of its weights",
    reads: &["beta1", "beta2", "eps"],
    defaults: &[("eps", 1e-6)],
    averages: Averages::Gradients,
    buffers: |_| 2,
    per_tensor: true,
    build: |settings| {
        let LocalSettings { beta1, beta2, eps, weight_decay, clip, schedule, .. } = settings;
        lamb(Lamb { beta1, beta2, eps, weight_decay, clip, schedule })
    },
};

/// Settings of [`lamb`]. The defaults are those of the paper, with a rate of 0.001 and without clipping.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Lamb {
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Decoupled weight decay of matrices; vectors do not decay.
    pub weight_decay: f64,
    /// Upper bound of the gradient's global l2 norm; `None` disables clipping.
    pub clip: Option<f64>,
    /// The learning rate.
    pub schedule: LrSchedule,
}

impl Default for Lamb {
    fn default() -> Self {
        let schedule = LrSchedule::constant(1e-3);
        Self { beta1: 0.9, beta2: 0.999, eps: 1e-6, weight_decay: 0.01, clip: None, schedule }
    }
}

/// Builds LAMB: AdamW's update `u` scaled to its tensor, `p -= lr ||p|| / ||u|| u`, or `lr u` where a norm
/// is 0.
///
/// Each tensor has its own ratio. In a pipeline a rank holds whole tensors, so ranks exchange no norms.
///
/// Source: You et al. 2020, "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", Alg. 2,
/// with bias correction.
#[must_use]
pub fn lamb(settings: Lamb) -> ChainBuilder {
    let Lamb { beta1, beta2, eps, weight_decay, clip, schedule } = settings;
    let chain = clipped(clip).then(scale_by_adam(beta1, beta2, eps)).then(add_decayed_weights(weight_decay));
    chain.then(scale_by_trust_ratio()).then(scale_by_schedule(schedule))
}
