//! `RMSprop`.

use super::{Averages, LocalMethod, LocalSettings, clipped, with_momentum};
use crate::transform::{add_decayed_weights, scale_by_centered_rms, scale_by_rms, scale_by_schedule};
use crate::{ChainBuilder, LrSchedule};

/// Row of [`METHODS`](super::METHODS) for [`rmsprop`].
pub const RMSPROP: LocalMethod = LocalMethod {
    name: "rmsprop",
    summary: "the gradient divided by the root of an average of its squares",
    reads: &["rho", "eps", "centered", "momentum"],
    defaults: &[("momentum", 0.0)],
    averages: Averages::Gradients,
    buffers: |settings| 1 + usize::from(settings.centered) + usize::from(settings.momentum != 0.0),
    per_tensor: false,
    build: |settings| {
        let LocalSettings { rho, eps, centered, momentum, weight_decay, clip, schedule, .. } = settings;
        rmsprop(RmsProp { rho, eps, centered, momentum, weight_decay, clip, schedule })
    },
};

/// Settings of [`rmsprop`]. The defaults are PyTorch's, without clipping.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RmsProp {
    /// Decay of the average of squares; `alpha` in PyTorch.
    pub rho: f64,
    /// Added to the root of the average of squares.
    pub eps: f64,
    /// Whether to subtract the square of the average gradient from the average of squares.
    pub centered: bool,
    /// Momentum. At 0 there is no momentum buffer.
    pub momentum: f64,
    /// l2 regularisation of matrices, added to the gradient; vectors have none.
    pub weight_decay: f64,
    /// Upper bound of the gradient's global l2 norm; `None` disables clipping.
    pub clip: Option<f64>,
    /// The learning rate.
    pub schedule: LrSchedule,
}

impl Default for RmsProp {
    fn default() -> Self {
        let schedule = LrSchedule::constant(1e-2);
        Self { rho: 0.99, eps: 1e-8, centered: false, momentum: 0.0, weight_decay: 0.0, clip: None, schedule }
    }
}

/// Builds `RMSprop`: `v = rho v + (1 - rho) g^2`, `p -= lr g / (sqrt(v) + eps)`. Momentum, if any, accumulates
/// the quotient.
///
/// Source: Tieleman and Hinton 2012, "Lecture 6.5: `RMSprop`", in PyTorch's form; centred as in Graves 2013.
#[must_use]
pub fn rmsprop(settings: RmsProp) -> ChainBuilder {
    let RmsProp { rho, eps, centered, momentum, weight_decay, clip, schedule } = settings;
    let chain = clipped(clip).then(add_decayed_weights(weight_decay));
    let chain = if centered {
        chain.then(scale_by_centered_rms(rho, eps))
    } else {
        chain.then(scale_by_rms(rho, eps))
    };
    with_momentum(chain, momentum, false).then(scale_by_schedule(schedule))
}
