//! Element types.

use std::fmt;

use half::{bf16, f16};

/// The type of a tensor's elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DType {
    /// 32-bit float, used for parameters, gradients and reductions.
    F32,
    /// IEEE half precision.
    F16,
    /// bfloat16: the upper 16 bits of an f32.
    Bf16,
    /// Unsigned 32-bit integer, used for token ids.
    U32,
    /// Unsigned byte.
    U8,
}

impl DType {
    /// Returns the number of bytes per element.
    #[must_use]
    pub const fn size(self) -> usize {
        match self {
            Self::F32 | Self::U32 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::U8 => 1,
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::U32 => "u32",
            Self::U8 => "u8",
        })
    }
}

mod sealed {
    pub trait Sealed {}
}

/// A host type that can be the element of a tensor.
pub trait Element: bytemuck::Pod + sealed::Sealed + Send + Sync {
    /// The element type that matches this host type.
    const DTYPE: DType;
}

macro_rules! element {
    ($($t:ty => $d:ident),*) => {$(
        impl sealed::Sealed for $t {}
        impl Element for $t {
            const DTYPE: DType = DType::$d;
        }
    )*};
}
element!(f32 => F32, f16 => F16, bf16 => Bf16, u32 => U32, u8 => U8);
