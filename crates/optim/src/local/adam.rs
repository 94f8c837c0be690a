//! Adam with weight decay as l2 regularisation.

use super::{Averages, LocalMethod, LocalSettings, clipped};
use crate::transform::{add_decayed_weights, scale_by_adam, scale_by_schedule};
use crate::{ChainBuilder, LrSchedule, Transform};

/// Row of [`METHODS`](super::METHODS) for [`adam`].
pub const ADAM: LocalMethod = LocalMethod {
    name: "adam",
    summary: "Adam, with weight decay as l2 regularisation",
    reads: &["beta1", "beta2", "eps"],
    defaults: &[],
    averages: Averages::Gradients,
    buffers: |_| 2,
    per_tensor: false,
    build: |settings| adam(settings.into()),
};

/// Settings of [`adam`], [`amsgrad`](super::amsgrad()) and [`radam`](super::radam()). The defaults are
/// PyTorch's, without clipping.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Adam {
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
    /// l2 regularisation of matrices, added to the gradient; vectors have none.
    pub weight_decay: f64,
    /// Upper bound of the gradient's global l2 norm; `None` disables clipping.
    pub clip: Option<f64>,
    /// The learning rate.
    pub schedule: LrSchedule,
}

impl Default for Adam {
    fn default() -> Self {
        let schedule = LrSchedule::constant(1e-3);
        Self { beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.0, clip: None, schedule }
    }
}

impl From<LocalSettings> for Adam {
    fn from(settings: LocalSettings) -> Self {
        let LocalSettings { beta1, beta2, eps, weight_decay, clip, schedule, .. } = settings;
        Self { beta1, beta2, eps, weight_decay, clip, schedule }
    }
}

impl Adam {
    /// Builds a chain whose direction is made from `beta1`, `beta2` and `eps`.
    pub(super) fn chain<T: Transform + 'static>(
        self,
        direction: impl Fn(f64, f64, f64) -> T,
    ) -> ChainBuilder {
        let Self { beta1, beta2, eps, weight_decay, clip, schedule } = self;
        let chain = clipped(clip).then(add_decayed_weights(weight_decay)).then(direction(beta1, beta2, eps));
        chain.then(scale_by_schedule(schedule))
    }
}

/// Builds Adam: `p -= lr m^ / (sqrt(v^) + eps)`.
///
/// Source: Kingma and Ba 2015, "Adam: A Method for Stochastic Optimization", Alg. 1, in PyTorch's form.
#[must_use]
pub fn adam(settings: Adam) -> ChainBuilder {
    settings.chain(scale_by_adam)
}
