//! Adam with decoupled weight decay.

use super::{Averages, LocalMethod, LocalSettings, clipped};
use crate::transform::{add_decayed_weights, scale_by_adam, scale_by_schedule};
use crate::{ChainBuilder, LrSchedule};

/// Row of [`METHODS`](super::METHODS) for [`adamw`].
pub const ADAMW: LocalMethod = LocalMethod {
    name: "adamw",
    summary: "Adam with decoupled weight decay",
    reads: &["beta1", "beta2", "eps"],
    defaults: &[],
    averages: Averages::Gradients,
    buffers: |_| 2,
    per_tensor: false,
    build: |settings| {
        let LocalSettings { beta1, beta2, eps, weight_decay, clip, schedule, .. } = settings;
        adamw(AdamW { beta1, beta2, eps, weight_decay, clip, schedule })
    },
};

/// Settings of [`adamw`]. The defaults are PyTorch's, without clipping.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamW {
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

impl Default for AdamW {
    fn default() -> Self {
        let schedule = LrSchedule::constant(1e-3);
        Self { beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.01, clip: None, schedule }
    }
}

/// Builds Adam with decoupled weight decay: `p -= lr (m^ / (sqrt(v^) + eps) + decay p)`.
///
/// Source: Loshchilov and Hutter 2019, "Decoupled Weight Decay Regularization", Alg. 2, with the decay
/// multiplied by the learning rate, as in PyTorch.
#[must_use]
pub fn adamw(settings: AdamW) -> ChainBuilder {
    let AdamW { beta1, beta2, eps, weight_decay, clip, schedule } = settings;
    let chain = clipped(clip).then(scale_by_adam(beta1, beta2, eps));
    chain.then(add_decayed_weights(weight_decay)).then(scale_by_schedule(schedule))
}
