//! Muon for hidden matrices, AdamW for everything else.

use farflung_tensor::Param;

use super::{Averages, LocalMethod, LocalSettings, clipped};
use crate::transform::{
    MuonScale, Outputs, add_decayed_weights, orthogonalize, scale_by_adam, scale_by_schedule, trace,
};
use crate::{ChainBuilder, LrSchedule};

/// Row of [`METHODS`](super::METHODS) for [`muon`]. Matrices are `[inputs, outputs]`.
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

/// Settings of [`muon`]. The defaults are those of PyTorch's `Muon` and `AdamW`, without clipping.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Muon {
    /// Momentum of hidden matrices.
    pub momentum: f64,
    /// Whether momentum is Nesterov's.
    pub nesterov: bool,
    /// Scale of the steps of hidden matrices.
    pub scale: MuonScale,
    /// Dimension of a matrix that holds its outputs.
    pub outputs: Outputs,
    /// Decay of AdamW's first moment.
    pub beta1: f64,
    /// Decay of AdamW's second moment.
    pub beta2: f64,
    /// Added to the root of AdamW's second moment.
    pub eps: f64,
    /// Decoupled weight decay of matrices; vectors do not decay.
    pub weight_decay: f64,
    /// Upper bound of the gradient's global l2 norm; `None` disables clipping.
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

/// Parts of the names of embeddings and output heads in common models. The rows of these matrices are looked
/// up, or stand for classes.
const EMBEDDINGS: [&str; 5] = ["wte", "wpe", "embed", "lm_head", "shared"];

/// Returns whether Muon updates a parameter: a matrix that is neither an embedding nor a head, judged by its
/// name.
#[must_use]
pub fn is_hidden_matrix(param: &Param) -> bool {
    param.shape.dims().len() == 2 && !EMBEDDINGS.iter().any(|part| param.name.contains(part))
}

/// Builds Muon: hidden matrices move along their momentum `b = mu b + g` (with Nesterov along `g + mu b`) after
/// all its singular values are made about 1. Embeddings, heads and vectors are updated by AdamW (see
/// [`is_hidden_matrix`]), so that both users of a tied token table take the same step.
///
/// Each matrix is updated on its own. In a pipeline a rank holds whole matrices, so ranks exchange nothing for
/// it. The chain has two state buffers. The first holds the momentum of hidden matrices and AdamW's first
/// moment of the other parameters. The second holds AdamW's second moment and stays zero for hidden matrices.
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
