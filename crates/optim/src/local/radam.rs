//! `RAdam`.

use super::{Averages, LocalMethod, LocalSettings, clipped};
use crate::transform::{add_decayed_weights, scale_by_radam, scale_by_schedule};
use crate::{ChainBuilder, LrSchedule};

/// [`radam`] with the settings' numbers.
pub const RADAM: LocalMethod = LocalMethod {
    name: "radam",
    summary: "Adam that warms its second moment up (rectified)",
    reads: &["beta1", "beta2", "eps"],
    defaults: &[],
    averages: Averages::Gradients,
    buffers: |_| 2,
    per_tensor: false,
    build: |settings| {
        let LocalSettings { beta1, beta2, eps, weight_decay, clip, schedule, .. } = settings;
        radam(RAdam { beta1, beta2, eps, weight_decay, clip, schedule })
    },
};

/// Settings of [`radam`]; PyTorch's defaults, but no clipping.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RAdam {
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
    /// l2 regularisation of matrices, added to the gradient; vectors have none.
    pub weight_decay: f64,
    /// Global l2 norm that gradients are scaled down to.
    pub clip: Option<f64>,
    /// The learning rate.
    pub schedule: LrSchedule,
}

impl Default for RAdam {
    fn default() -> Self {
        let schedule = LrSchedule::constant(1e-3);
        Self { beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.0, clip: None, schedule }
    }
}

/// Rectified Adam: momentum alone until the second moment has seen enough steps, then Adam with a factor.
///
/// Source: Liu et al. 2020, "On the Variance of the Adaptive Learning Rate and Beyond", Alg. 2, in PyTorch's
/// form.
#[must_use]
pub fn radam(settings: RAdam) -> ChainBuilder {
    let RAdam { beta1, beta2, eps, weight_decay, clip, schedule } = settings;
    let chain = clipped(clip).then(add_decayed_weights(weight_decay)).then(scale_by_radam(beta1, beta2, eps));
    chain.then(scale_by_schedule(schedule))
}
