//! What matrix products compute with, apart from what tensors hold.

use std::fmt;
use std::str::FromStr;

use crate::TensorError;

/// What the operands of a matrix product are rounded to, to nearest, ties to even. Products add up in f32 and results
/// are f32 whatever it is, and so is all else: parameters, their gradients, norms, softmaxes and optimizer states. This
/// is mixed precision with f32 master weights (Micikevicius et al. 2018), where the rounding belongs to the product and
/// not to the tensor, as PyTorch's `set_float32_matmul_precision` has it.
///
/// A device with tensor cores for the type computes on them; any other gives the same products, without the speed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Precision {
    /// As they are.
    #[default]
    F32,
    /// 8 bits of mantissa and the range of f32.
    Bf16,
    /// 11 bits of mantissa; beyond 65504 it is infinite, and below 6e-8 zero: gradients want a loss scale.
    F16,
}

impl Precision {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::F32, Self::Bf16, Self::F16];
}

impl fmt::Display for Precision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
        })
    }
}

impl FromStr for Precision {
    type Err = TensorError;

    fn from_str(text: &str) -> Result<Self, TensorError> {
        let found = Self::ALL.into_iter().find(|p| p.to_string() == text);
        found.ok_or_else(|| TensorError::NoSuchPrecision { name: text.to_owned() })
    }
}
