//! The codec [`F16`]: IEEE half precision, two bytes for each element, eleven significant bits, magnitudes up
//! to 65504.

use crate::cast::{Cast, Format};
use crate::chunked::Chunked;
use crate::simd::Avx2Token;
use crate::wire::CodecId;

/// IEEE 754 binary16, rounded to nearest, ties to even. `2n` bytes for `n` elements.
///
/// The error is at most `2^-11 |x|` for magnitudes from `2^-14`, and `2^-25` below. Magnitudes of 65520 and
/// more, which IEEE would round to infinity, become 65504 (with error feedback the rest stays in the residual).
/// Subnormals are kept, and a zero keeps its sign. Encoder and decoder reject NaN and infinity.
pub type F16 = Chunked<Cast<Binary16>>;

/// The arithmetic of [`F16`].
#[derive(Debug, Clone, Copy)]
pub struct Binary16;

/// Bits of the exponent. If all are set, the number is NaN or infinity.
const EXPONENT: u16 = 0x7c00;

/// Adding this to a magnitude below `2^-14` rounds it to a multiple of `2^-24`, the spacing of f16's
/// subnormals.
const SUBNORMAL_MAGIC: f32 = 0.5;
/// The smallest normal number of f16, `2^-14`, as bits of f32.
const MIN_NORMAL: u32 = 113 << 23;
/// The bits of 65504, the largest finite f16.
const MAX: u32 = 0x7bff;

impl Format for Binary16 {
    const ID: CodecId = CodecId::F16;
    type Bytes = [u8; 2];

    #[expect(clippy::inline_always, reason = "part of kernels")]
    #[inline(always)]
    fn encode(x: f32) -> [u8; 2] {
        let bits = x.to_bits();
        let magnitude = bits & 0x7fff_ffff;
        let subnormal =
            (f32::from_bits(magnitude) + SUBNORMAL_MAGIC).to_bits().wrapping_sub(SUBNORMAL_MAGIC.to_bits());
        // Changes the exponent's bias from 127 to 15 and rounds away 13 bits of the fraction.
        let odd = (magnitude >> 13) & 1;
        let normal = magnitude.wrapping_sub(112 << 23).wrapping_add(0xfff + odd) >> 13;
        let code = if magnitude < MIN_NORMAL { subnormal } else { normal };
        ((code.min(MAX) | ((bits >> 16) & 0x8000)) as u16).to_le_bytes()
    }

    #[expect(clippy::inline_always, reason = "part of kernels")]
    #[inline(always)]
    fn decode(bytes: [u8; 2]) -> f32 {
        // Moves the fields to where f32 has them. The product with a power of two corrects the exponent's bias
        // and normalizes subnormals; it is exact.
        let wide = u32::from(u16::from_le_bytes(bytes));
        let magnitude = f32::from_bits((wide & 0x7fff) << 13) * f32::from_bits((254 - 15) << 23);
        f32::from_bits(magnitude.to_bits() | (wide & 0x8000) << 16)
    }

    #[expect(clippy::inline_always, reason = "part of kernels")]
    #[inline(always)]
    fn is_invalid(bytes: [u8; 2]) -> bool {
        u16::from_le_bytes(bytes) & EXPONENT == EXPONENT
    }

    fn encode_avx2(token: Avx2Token, x: &[f32], bytes: &mut [u8]) -> (usize, i32) {
        token.encode_f16(x, bytes)
    }

    fn decode_avx2(token: Avx2Token, bytes: &[u8], out: &mut [f32]) -> (usize, bool) {
        token.f16((), bytes, out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn encode(x: f32) -> u16 {
        u16::from_le_bytes(Binary16::encode(x))
    }

    fn decode(bits: u16) -> f32 {
        Binary16::decode(bits.to_le_bytes())
    }

    #[test]
    fn decodes_every_code_as_the_reference() {
        for bits in 0..=u16::MAX {
            if bits & EXPONENT != EXPONENT {
                let reference = half::f16::from_bits(bits).to_f32();
                assert_eq!(decode(bits).to_bits(), reference.to_bits(), "{bits:#x}");
                assert_eq!(encode(reference), bits);
            }
        }
    }

    #[test]
    fn encodes_as_the_reference_and_saturates() {
        // A prime stride covers every exponent with many fractions.
        for bits in (0..=u32::MAX).step_by(9973) {
            let x = f32::from_bits(bits);
            if x.is_finite() {
                let reference = half::f16::from_f32_const(x);
                let wanted =
                    if reference.is_infinite() { half::f16::MAX.copysign(reference) } else { reference };
                assert_eq!(encode(x), wanted.to_bits(), "{x:e}");
            }
        }
        // Ties: the midpoint of every two neighbours.
        for bits in 0..MAX as u16 {
            let (a, b) = (decode(bits), decode(bits + 1));
            let even = if bits % 2 == 0 { bits } else { bits + 1 };
            assert_eq!(encode(f32::midpoint(a, b)), even);
        }
        assert_eq!(encode(65519.996), 0x7bff);
        assert_eq!(encode(65520.0), 0x7bff);
        assert_eq!(encode(-f32::MAX), 0xfbff);
    }
}
