//! Muon for hidden matrices, AdamW for everything else.

use farflung_tensor::Param;

use super::{Averages, LocalMethod, LocalSettings, clipped};
use crate::transform::{
    MuonScale, Outputs, add_decayed_weights, orthogonalize, scale_by_adam, scale_by_schedule, trace,
};
use crate::{ChainBuilder, LrSchedule};

/// [`muon`] with the settings' numbers; matrices are `[inputs, outputs]`, and a step is about as long as
/// AdamW's.
pub const MUON: LocalMethod = LocalMethod {
    name: "muon",
    summary: "momentum with orthogonal steps for hidden matrices, AdamW for the rest",
    reads: &["beta1", "beta2", "eps", "momentum", "nesterov", "muon-scale"],
    defaults: &[("momentum", 0.95), ("nesterov", 1.0)],
    averages: Averages::Gradients,
    buffers: |_| 2,
    per_tensor: true,
    build: |settings| {
        let LocalSettings { momentum, nesterov, muon_scale, beta1, beta2, eps, .. } = settings;
        let LocalSettings { weight_decay, clip, schedule, .. } = settings;
        let (scale, outputs) = (muon_scale, Outputs::Columns);
        muon(Muon { momentum, nesterov, scale, outputs, beta1, beta2, eps, weight_decay, clip, schedule })
    },
};

/// Settings of [`muon`]; PyTorch's defaults of `Muon` and of `AdamW`, but no clipping.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Muon {
    /// Momentum of hidden matrices.
    pub momentum: f64,
    /// Nesterov's look-ahead.
    pub nesterov: bool,
    /// How far hidden matrices move.
    pub scale: MuonScale,
    /// Which dimension of a matrix its outputs are.
    pub outputs: Outputs,
    /// Decay of AdamW's first moment.
    pub beta1: f64,
    /// Decay of AdamW's second moment.
    pub beta2: f64,
    /// Added to the root of AdamW's second moment.
    pub eps: f64,
    /// Decoupled weight decay of matrices; vectors do not decay.
    pub weight_decay: f64,
    /// Global l2 norm that gradients are scaled down to.
    pub clip: Option<f64>,
    /// The learning rate.
    pub schedule: LrSchedule,
}

impl Default for Muon {
    fn default() -> Self {
        Self {
            momentum: 0.95,
            nesterov: true,
            scale: MuonScale::Original,
            outputs: Outputs::Rows,
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-8,
            weight_decay: 0.1,
            clip: None,
            schedule: LrSchedule::constant(1e-3),
        }
    }
}

/// Parts of the names of embeddings and heads in common models: matrices whose rows are looked up or are
/// classes.
const EMBEDDINGS: [&str; 5] = ["wte", "wpe", "embed", "lm_head", "shared"];

/// Whether Muon moves a parameter: a matrix that is neither an embedding nor a head, by its name.
#[must_use]
pub fn is_hidden_matrix(param: &Param) -> bool {
    param.shape.dims().len() == 2 && !EMBEDDINGS.iter().any(|part| param.name.contains(part))
}

/// Muon: hidden matrices move along their momentum `b = mu b + g` (with Nesterov along `g + mu b`) after all
/// its singular values are made 1. Embeddings, heads and vectors have AdamW ([`is_hidden_matrix`]), so that
/// both users of a tied token table take the same step.
///
/// Each matrix has a step of its own. In a pipeline a rank holds whole matrices, so that ranks share nothing.
/// It keeps two buffers of the parameters' length: the momentum, which is AdamW's first moment elsewhere, and
/// AdamW's second moment, which hidden matrices leave at zero.
///
/// Source: Jordan 2024, "Muon: An optimizer for hidden layers in neural networks"; weight decay as in Liu et
/// al. 2025, "Muon is Scalable for LLM Training".
#[must_use]
pub fn muon(settings: Muon) -> ChainBuilder {
    let Muon { momentum, nesterov, scale, outputs, beta1, beta2, eps, weight_decay, clip, schedule } =
        settings;
    clipped(clip)
        .then_for(is_hidden_matrix, trace(momentum, nesterov))
        .otherwise(scale_by_adam(beta1, beta2, eps))
        .then_for(is_hidden_matrix, orthogonalize(scale, outputs))
        .then(add_decayed_weights(weight_decay))
        .then(scale_by_schedule(schedule))
}
