//! `AMSGrad`.

use super::{Averages, LocalMethod, LocalSettings, clipped};
use crate::transform::{add_decayed_weights, scale_by_amsgrad, scale_by_schedule};
use crate::{ChainBuilder, LrSchedule};

/// [`amsgrad`] with the settings' numbers.
pub const AMSGRAD: LocalMethod = LocalMethod {
    name: "amsgrad",
    summary: "Adam with the largest second moment so far",
    reads: &["beta1", "beta2", "eps"],
    defaults: &[],
    averages: Averages::Gradients,
    buffers: |_| 3,
    per_tensor: false,
    build: |settings| {
        let LocalSettings { beta1, beta2, eps, weight_decay, clip, schedule, .. } = settings;
        amsgrad(AmsGrad { beta1, beta2, eps, weight_decay, clip, schedule })
    },
};

/// Settings of [`amsgrad`]; PyTorch's defaults, but no clipping.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AmsGrad {
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

impl Default for AmsGrad {
    fn default() -> Self {
        let schedule = LrSchedule::constant(1e-3);
        Self { beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.0, clip: None, schedule }
    }
}

/// `AMSGrad`: Adam with the largest second moment so far, as PyTorch's `Adam(amsgrad=True)`.
///
/// Source: Reddi et al. 2018, "On the Convergence of Adam and Beyond", Alg. 2.
#[must_use]
pub fn amsgrad(settings: AmsGrad) -> ChainBuilder {
    let AmsGrad { beta1, beta2, eps, weight_decay, clip, schedule } = settings;
    let chain =
        clipped(clip).then(add_decayed_weights(weight_decay)).then(scale_by_amsgrad(beta1, beta2, eps));
    chain.then(scale_by_schedule(schedule))
}
