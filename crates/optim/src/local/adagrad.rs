//! `AdaGrad`.

use super::{Averages, LocalMethod, LocalSettings, clipped};
use crate::transform::{add_decayed_weights, scale_by_adagrad, scale_by_schedule};
use crate::{ChainBuilder, LrSchedule};

/// Row of [`METHODS`](super::METHODS) for [`adagrad`].
pub const ADAGRAD: LocalMethod = LocalMethod {
    name: "adagrad",
    summary: "the gradient divided by the root of the sum of its squares",
    reads: &["lr-decay", "eps"],
    defaults: &[("eps", 1e-10)],
    averages: Averages::Gradients,
    buffers: |_| 1,
    per_tensor: false,
    build: |settings| {
        let LocalSettings { lr_decay, eps, weight_decay, clip, schedule, .. } = settings;
        adagrad(AdaGrad { lr_decay, eps, weight_decay, clip, schedule })
    },
};

/// Settings of [`adagrad`]. The defaults are PyTorch's, without clipping.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdaGrad {
    /// Decay of the learning rate: the rate of step `t`, counted from 0, is divided by `1 + t lr_decay`.
    pub lr_decay: f64,
    /// Added to the root of the sum of squares.
    pub eps: f64,
    /// l2 regularisation of matrices, added to the gradient; vectors have none.
    pub weight_decay: f64,
    /// Upper bound of the gradient's global l2 norm; `None` disables clipping.
    pub clip: Option<f64>,
    /// The learning rate.
    pub schedule: LrSchedule,
}

impl Default for AdaGrad {
    fn default() -> Self {
        let schedule = LrSchedule::constant(1e-2);
        Self { lr_decay: 0.0, eps: 1e-10, weight_decay: 0.0, clip: None, schedule }
    }
}

/// Builds `AdaGrad`: `s += g^2`, `p -= lr / (1 + t lr_decay) g / (sqrt(s) + eps)`.
///
/// Source: Duchi et al. 2011, "Adaptive Subgradient Methods for Online Learning and Stochastic Optimization",
/// in PyTorch's form.
#[must_use]
pub fn adagrad(settings: AdaGrad) -> ChainBuilder {
    let AdaGrad { lr_decay, eps, weight_decay, clip, schedule } = settings;
    let chain = clipped(clip).then(add_decayed_weights(weight_decay));
    chain.then(scale_by_adagrad(lr_decay, eps)).then(scale_by_schedule(schedule))
}
