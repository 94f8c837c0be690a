//! `AdaBelief`.

use super::{Averages, LocalMethod, LocalSettings, clipped};
use crate::transform::{add_decayed_weights, scale_by_adabelief, scale_by_schedule};
use crate::{ChainBuilder, LrSchedule};

/// Row of [`METHODS`](super::METHODS) for [`adabelief`].
pub const ADABELIEF: LocalMethod = LocalMethod {
    name: "adabelief",
    summary: "Adam with the variance of the gradient around its running average",
    reads: &["beta1", "beta2", "eps"],
    defaults: &[("eps", 1e-16)],
    averages: Averages::Gradients,
    buffers: |_| 2,
    per_tensor: false,
    build: |settings| {
        let LocalSettings { beta1, beta2, eps, weight_decay, clip, schedule, .. } = settings;
        adabelief(AdaBelief { beta1, beta2, eps, weight_decay, clip, schedule })
    },
};

/// Settings of [`adabelief`]. The defaults are those of the authors' package, without clipping.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdaBelief {
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the variance.
    pub beta2: f64,
    /// Added to the variance and to its root.
    pub eps: f64,
    /// Decoupled weight decay of matrices; vectors do not decay.
    pub weight_decay: f64,
    /// Upper bound of the gradient's global l2 norm; `None` disables clipping.
    pub clip: Option<f64>,
    /// The learning rate.
    pub schedule: LrSchedule,
}

impl Default for AdaBelief {
    fn default() -> Self {
        let schedule = LrSchedule::constant(1e-3);
        Self { beta1: 0.9, beta2: 0.999, eps: 1e-16, weight_decay: 0.0, clip: None, schedule }
    }
}

/// Builds `AdaBelief` with decoupled weight decay: `p -= lr (m^ / (sqrt(s^) + eps) + decay p)`.
///
/// Source: Zhuang et al. 2020, "`AdaBelief` Optimizer: Adapting Stepsizes by the Belief in Observed Gradients",
/// Alg. 2. Differs from the authors' package: no rectification, which is optional there.
#[must_use]
pub fn adabelief(settings: AdaBelief) -> ChainBuilder {
    let AdaBelief { beta1, beta2, eps, weight_decay, clip, schedule } = settings;
    let chain = clipped(clip).then(scale_by_adabelief(beta1, beta2, eps));
    chain.then(add_decayed_weights(weight_decay)).then(scale_by_schedule(schedule))
}
