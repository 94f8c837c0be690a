//! Chains that have a name, with the arithmetic and the order of PyTorch's optimizers.

use crate::transform::{add_decayed_weights, clip_by_global_norm, scale_by_adam, scale_by_schedule, trace};
use crate::{Chain, ChainBuilder, Schedule};

/// Settings of [`adamw`]; PyTorch's defaults, but no clipping.
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
    /// Global l2 norm that gradients are scaled down to.
    pub clip: Option<f64>,
    /// The learning rate.
    pub schedule: Schedule,
}

impl Default for AdamW {
    fn default() -> Self {
        let schedule = Schedule::constant(1e-3);
        Self { beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.01, clip: None, schedule }
    }
}

/// Adam with decoupled weight decay: `p -= lr (m^ / (sqrt(v^) + eps) + decay p)`.
///
/// Source: Loshchilov and Hutter 2019, "Decoupled Weight Decay Regularization", Alg. 2, with PyTorch's `lr decay`.
#[must_use]
pub fn adamw(settings: AdamW) -> ChainBuilder {
    let AdamW { beta1, beta2, eps, weight_decay, clip, schedule } = settings;
    let chain = clipped(clip).then(scale_by_adam(beta1, beta2, eps));
    decayed(chain, weight_decay).then(scale_by_schedule(schedule))
}

/// Settings of [`sgd`]; the default is plain gradient descent at PyTorch's rate.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sgd {
    /// Momentum; 0 keeps no buffer.
    pub momentum: f64,
    /// Nesterov's look-ahead.
    pub nesterov: bool,
    /// l2 regularisation of matrices, added to the gradient before momentum.
    pub weight_decay: f64,
    /// Global l2 norm that gradients are scaled down to.
    pub clip: Option<f64>,
    /// The learning rate.
    pub schedule: Schedule,
}

impl Default for Sgd {
    fn default() -> Self {
        let schedule = Schedule::constant(1e-3);
        Self { momentum: 0.0, nesterov: false, weight_decay: 0.0, clip: None, schedule }
    }
}

/// Gradient descent with momentum, as PyTorch's SGD without dampening.
///
/// Source: Sutskever et al. 2013, "On the importance of initialization and momentum in deep learning".
#[must_use]
pub fn sgd(settings: Sgd) -> ChainBuilder {
    let Sgd { momentum, nesterov, weight_decay, clip, schedule } = settings;
    with_momentum(decayed(clipped(clip), weight_decay), momentum, nesterov).then(scale_by_schedule(schedule))
}

/// The chain of a DiLoCo [`OuterOptimizer`](crate::OuterOptimizer): Nesterov momentum, no decay, no clipping. The paper's
/// settings are 0.7 and 0.9.
///
/// Source: Douillard et al. 2023, "DiLoCo", section 3.1.
#[must_use]
pub fn diloco_outer(lr: f64, momentum: f64) -> ChainBuilder {
    with_momentum(Chain::new(), momentum, true).then(scale_by_schedule(Schedule::constant(lr)))
}

fn clipped(clip: Option<f64>) -> ChainBuilder {
    match clip {
        Some(max) => Chain::new().then(clip_by_global_norm(max)),
        None => Chain::new(),
    }
}

fn decayed(chain: ChainBuilder, decay: f64) -> ChainBuilder {
    // A decay of 0 would cut the pass for nothing. Not a number goes on, to be refused.
    if decay == 0.0 { chain } else { chain.then(add_decayed_weights(decay)) }
}

fn with_momentum(chain: ChainBuilder, momentum: f64, nesterov: bool) -> ChainBuilder {
    if momentum == 0.0 { chain } else { chain.then(trace(momentum, nesterov)) }
}
