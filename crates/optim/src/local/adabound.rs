//! `AdaBound`.

use super::{Averages, LocalMethod, LocalSettings, clipped};
use crate::transform::{Bound, add_decayed_weights, scale_by_adabound, scale_by_schedule};
use crate::{ChainBuilder, LrSchedule};

/// Row of [`METHODS`](super::METHODS) for [`adabound`].
pub const ADABOUND: LocalMethod = LocalMethod {
    name: "adabound",
    summary: "Adam whose step sizes are kept within bounds that converge to --final-lr",
    reads: &["beta1", "beta2", "eps", "final-lr", "gamma"],
    defaults: &[],
    averages: Averages::Gradients,
    buffers: |_| 2,
    per_tensor: false,
    build: |settings| {
        let LocalSettings { beta1, beta2, eps, final_lr, gamma, weight_decay, clip, schedule, .. } = settings;
        adabound(AdaBound { beta1, beta2, eps, final_lr, gamma, weight_decay, clip, schedule })
    },
};

/// Settings of [`adabound`]. The defaults are those of the authors' package, without clipping.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdaBound {
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Limit of the bounds of an element's rate, at the schedule's highest rate.
    pub final_lr: f64,
    /// Speed at which the bounds approach that limit.
    pub gamma: f64,
    /// l2 regularisation of matrices, added to the gradient; vectors have none.
    pub weight_decay: f64,
    /// Upper bound of the gradient's global l2 norm; `None` disables clipping.
    pub clip: Option<f64>,
    /// The learning rate.
    pub schedule: LrSchedule,
}

impl Default for AdaBound {
    fn default() -> Self {
        let schedule = LrSchedule::constant(1e-3);
        Self {
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-8,
            final_lr: 0.1,
            gamma: 1e-3,
            weight_decay: 0.0,
            clip: None,
            schedule,
        }
    }
}

/// Builds `AdaBound`: Adam with each element's rate clipped between two bounds. Both bounds approach
/// `final_lr`, so that the method ends as SGD. The bounds follow the schedule, as in the authors' package.
///
/// Source: Luo et al. 2019, "Adaptive Gradient Methods with Dynamic Bound of Learning Rate", Alg. 1.
#[must_use]
pub fn adabound(settings: AdaBound) -> ChainBuilder {
    let AdaBound { beta1, beta2, eps, final_lr, gamma, weight_decay, clip, schedule } = settings;
    // The bounds follow the schedule, so they are in multiples of its rate.
    let peak = schedule.peak();
    let last = if peak == 0.0 { 0.0 } else { final_lr / peak };
    let chain = clipped(clip).then(add_decayed_weights(weight_decay));
    let chain = chain.then(scale_by_adabound(beta1, beta2, eps, Bound { last, gamma }));
    chain.then(scale_by_schedule(schedule))
}
