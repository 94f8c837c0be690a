//! Memory for the activations that forward passes keep for backward passes, per layer of a transformer.

use super::Transformer;

/// Which activations are kept, and how tensor-parallel ranks divide them.
///
/// Source: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", table 2:
/// bytes of one layer and one microbatch of `b` sequences in f16, including dropout masks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ActivationMethod {
    /// All are kept. Tensor-parallel ranks divide those inside attention and feed-forward.
    Tensor,
    /// All are kept. Tensor-parallel ranks divide the others too (sequence parallelism).
    Sequence,
    /// As [`ActivationMethod::Tensor`], but attention scores are not kept; they are recomputed.
    TensorSelective,
    /// As [`ActivationMethod::Sequence`], but attention scores are recomputed.
    SequenceSelective,
    /// Only a layer's input is kept. The whole layer is recomputed.
    Full,
}

impl ActivationMethod {
    /// All methods.
    pub const ALL: [Self; 5] =
        [Self::Tensor, Self::Sequence, Self::TensorSelective, Self::SequenceSelective, Self::Full];

    /// Returns the name used in tables.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Tensor => "tensor",
            Self::Sequence => "tensor + sequence",
            Self::TensorSelective => "tensor, selective",
            Self::SequenceSelective => "tensor + sequence, selective",
            Self::Full => "full recompute",
        }
    }

    /// Returns the bytes that one of `tensor` tensor-parallel ranks keeps of one layer for a microbatch of
    /// `batch` sequences.
    #[must_use]
    pub fn bytes_per_layer(self, model: &Transformer, batch: u64, tensor: u64) -> f64 {
        let (s, h, heads) = (model.sequence as f64, model.hidden as f64, model.heads as f64);
        let (sbh, t) = (s * batch as f64 * h, tensor.max(1) as f64);
        // Attention scores, their softmax and its dropout mask: quadratic in the sequence length.
        let scores = 5.0 * heads * s / h;
        match self {
            Self::Tensor => sbh * (10.0 + 24.0 / t + scores / t),
            Self::Sequence => sbh / t * (34.0 + scores),
            Self::TensorSelective => sbh * (10.0 + 24.0 / t),
            Self::SequenceSelective => sbh * 34.0 / t,
            Self::Full => sbh * 2.0,
        }
    }

    /// Returns the recomputed forward operations as a fraction of the model's forward and backward operations.
    #[must_use]
    pub fn repeated(self, model: &Transformer) -> f64 {
        let all = model.operations(1) as f64;
        match self {
            Self::Tensor | Self::Sequence => 0.0,
            Self::TensorSelective | Self::SequenceSelective => {
                let (s, h) = (model.sequence as f64, model.hidden as f64);
                4.0 * s * s * h * model.layers as f64 / all
            }
            Self::Full => model.forward_of_layers(1) as f64 / all,
        }
    }
}
