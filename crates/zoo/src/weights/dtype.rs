//! Element types of safetensors for parameters, and their conversion to and from `f32`.

use half::{bf16, f16};

/// Element type of stored numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Dtype {
    /// 32-bit float, 4 bytes.
    #[default]
    F32,
    /// IEEE half precision, 2 bytes with 5 bits of exponent.
    F16,
    /// bfloat16, 2 bytes: the upper 16 bits of an `f32`.
    Bf16,
}

impl Dtype {
    /// Returns the name in a safetensors header.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "F32",
            Self::F16 => "F16",
            Self::Bf16 => "BF16",
        }
    }

    /// Returns the type with this name in a safetensors header.
    pub(super) fn from_name(name: &str) -> Option<Self> {
        [Self::F32, Self::F16, Self::Bf16].into_iter().find(|dtype| dtype.name() == name)
    }

    /// Returns the number of bytes per element.
    #[must_use]
    pub const fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }

    /// Converts little-endian elements to `f32`. `bytes` must contain exactly `out.len()` elements.
    pub(super) fn decode(self, bytes: &[u8], out: &mut [f32]) {
        let two = || bytes.as_chunks().0;
        match self {
            Self::F32 => {
                for (x, &b) in out.iter_mut().zip(bytes.as_chunks().0) {
                    *x = f32::from_le_bytes(b);
                }
            }
            Self::F16 => out.iter_mut().zip(two()).for_each(|(x, &b)| *x = f16::from_le_bytes(b).to_f32()),
            Self::Bf16 => out.iter_mut().zip(two()).for_each(|(x, &b)| *x = bf16::from_le_bytes(b).to_f32()),
        }
    }

    /// Appends values as little-endian elements, rounded to nearest even.
    pub(super) fn encode(self, values: &[f32], out: &mut Vec<u8>) {
        match self {
            Self::F32 => out.extend(values.iter().flat_map(|x| x.to_le_bytes())),
            Self::F16 => out.extend(values.iter().flat_map(|&x| f16::from_f32(x).to_le_bytes())),
            Self::Bf16 => out.extend(values.iter().flat_map(|&x| bf16::from_f32(x).to_le_bytes())),
        }
    }
}

/// Returns the bytes per element of any safetensors type with whole bytes; `None` for others.
pub(super) fn element_bytes(name: &str) -> Option<u64> {
    match name {
        "BOOL" | "U8" | "I8" | "F8_E4M3" | "F8_E5M2" | "F8_E8M0" => Some(1),
        "U16" | "I16" | "F16" | "BF16" => Some(2),
        "U32" | "I32" | "F32" => Some(4),
        "U64" | "I64" | "F64" => Some(8),
        _ => None,
    }
}
