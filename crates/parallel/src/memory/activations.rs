//! Which activations of a transformer's layers forward passes keep for backward passes. Their bytes are
//! computed in `transformer.rs`.

/// Which activations are kept, and how tensor-parallel ranks divide them.
///
/// Source: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", table 2:
/// bytes of one layer and one microbatch of `b` sequences in f16, including dropout masks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ActivationMethod {
    /// All activations are kept. Tensor-parallel ranks divide those inside attention and feed-forward.
    Tensor,
    /// All activations are kept. Tensor-parallel ranks divide all of them (sequence parallelism).
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
}
