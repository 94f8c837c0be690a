//! Lion.

use super::{Averages, LocalMethod, LocalSettings, clipped};
use crate::transform::{add_decayed_weights, scale_by_lion, scale_by_schedule};
use crate::{ChainBuilder, LrSchedule};

/// Row of [`METHODS`](super::METHODS) for [`lion`].
pub const LION: LocalMethod = LocalMethod {
    name: "lion",
    summary: "the sign of an interpolated momentum",
    reads: &["beta1", "beta2"],
    defaults: &[("beta2", 0.99)],
    averages: Averages::Gradients,
    buffers: |_| 1,
    per_tensor: false,
    build: |settings| {
        let LocalSettings { beta1, beta2, weight_decay, clip, schedule, .. } = settings;
        lion(Lion { beta1, beta2, weight_decay, clip, schedule })
    },
};

/// Settings of [`lion`]. The defaults are those of the paper, without clipping.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Lion {
    /// Weight of the momentum in the direction.
    pub beta1: f64,
    /// Decay of the momentum.
    pub beta2: f64,
    /// Decoupled weight decay of matrices; vectors do not decay.
    pub weight_decay: f64,
    /// Upper bound of the gradient's global l2 norm; `None` disables clipping.
    pub clip: Option<f64>,
    /// The learning rate.
    pub schedule: LrSchedule,
}

impl Default for Lion {
    fn default() -> Self {
        let schedule = LrSchedule::constant(1e-4);
        Self { beta1: 0.9, beta2: 0.99, weight_decay: 0.0, clip: None, schedule }
    }
}

/// Builds Lion with decoupled weight decay: `p -= lr (sign(b1 m + (1 - b1) g) + decay p)`,
/// `m = b2 m + (1 - b2) g`.
///
/// Source: Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", Alg. 2.
#[must_use]
pub fn lion(settings: Lion) -> ChainBuilder {
    let Lion { beta1, beta2, weight_decay, clip, schedule } = settings;
    let chain = clipped(clip).then(scale_by_lion(beta1, beta2));
    chain.then(add_decayed_weights(weight_decay)).then(scale_by_schedule(schedule))
}
