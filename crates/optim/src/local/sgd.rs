//! Gradient descent with momentum.

use super::{Averages, LocalMethod, LocalSettings, clipped};
use crate::transform::{add_decayed_weights, scale_by_schedule, trace_with};
use crate::{ChainBuilder, LrSchedule};

/// Row of [`METHODS`](super::METHODS) for [`sgd`].
pub const SGD: LocalMethod = LocalMethod {
    name: "sgd",
    summary: "gradient descent with momentum",
    reads: &["momentum", "dampening", "nesterov"],
    defaults: &[],
    averages: Averages::Gradients,
    buffers: |settings| usize::from(settings.momentum != 0.0),
    per_tensor: false,
    build: |settings| {
        let LocalSettings { momentum, dampening, nesterov, weight_decay, clip, schedule, .. } = settings;
        sgd(Sgd { momentum, dampening, nesterov, weight_decay, clip, schedule })
    },
};

/// Settings of [`sgd`]. The default is plain gradient descent at PyTorch's rate.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sgd {
    /// Momentum. At 0 there is no momentum buffer.
    pub momentum: f64,
    /// Dampening: the part of each gradient after the first that is not added to the momentum.
    pub dampening: f64,
    /// Whether momentum is Nesterov's.
    pub nesterov: bool,
    /// l2 regularisation of matrices, added to the gradient before momentum.
    pub weight_decay: f64,
    /// Upper bound of the gradient's global l2 norm; `None` disables clipping.
    pub clip: Option<f64>,
    /// The learning rate.
    pub schedule: LrSchedule,
}

impl Default for Sgd {
    fn default() -> Self {
        let schedule = LrSchedule::constant(1e-3);
        Self { momentum: 0.0, dampening: 0.0, nesterov: false, weight_decay: 0.0, clip: None, schedule }
    }
}

/// Builds gradient descent with momentum, as PyTorch's SGD.
///
/// Source: Sutskever et al. 2013, "On the importance of initialization and momentum in deep learning".
#[must_use]
pub fn sgd(settings: Sgd) -> ChainBuilder {
    let Sgd { momentum, dampening, nesterov, weight_decay, clip, schedule } = settings;
    let mut chain = clipped(clip).then(add_decayed_weights(weight_decay));
    if momentum != 0.0 {
        chain = chain.then(trace_with(momentum, dampening, nesterov));
    }
    chain.then(scale_by_schedule(schedule))
}
