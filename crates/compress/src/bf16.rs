//! The codec [`Bf16`]: bfloat16, two bytes for each element, with the range of f32 and eight significant bits.

use crate::cast::{Cast, Format};
use crate::chunked::Chunked;
use crate::simd::Avx2Token;
use crate::wire::CodecId;

/// bfloat16, the upper half of f32, rounded to nearest, ties to even. `2n` bytes for `n` elements.
///
/// The error is at most `2^-8 |x|`, and `2^-134` for subnormals. Values that would round to infinity become the
/// largest finite value, `(2 - 2^-7) 2^127` (with error feedback the rest stays in the residual). A zero keeps
/// its sign. Encoder and decoder reject NaN and infinity.
pub type Bf16 = Chunked<Cast<Brain16>>;

/// The arithmetic of [`Bf16`].
#[derive(Debug, Clone, Copy)]
pub struct Brain16;

/// Bits of the exponent. If all are set, the number is NaN or infinity.
const EXPONENT: u16 = 0x7f80;

impl Format for Brain16 {
    const ID: CodecId = CodecId::BF16;
    type Bytes = [u8; 2];

    #[expect(clippy::inline_always, reason = "part of kernels")]
    #[inline(always)]
    fn encode(x: f32) -> [u8; 2] {
        let bits = x.to_bits();
        let magnitude = bits & 0x7fff_ffff;
        let odd = (magnitude >> 16) & 1;
        let code = ((magnitude + 0x7fff + odd) >> 16).min(0x7f7f);
        ((code | ((bits >> 16) & 0x8000)) as u16).to_le_bytes()
    }

    #[expect(clippy::inline_always, reason = "part of kernels")]
    #[inline(always)]
    fn decode(bytes: [u8; 2]) -> f32 {
        f32::from_bits(u32::from(u16::from_le_bytes(bytes)) << 16)
    }

    #[expect(clippy::inline_always, reason = "part of kernels")]
    #[inline(always)]
    fn is_invalid(bytes: [u8; 2]) -> bool {
        u16::from_le_bytes(bytes) & EXPONENT == EXPONENT
    }

    fn decode_avx2(token: Avx2Token, bytes: &[u8], out: &mut [f32]) -> (usize, bool) {
        token.bf16((), bytes, out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn encode(x: f32) -> u16 {
        u16::from_le_bytes(Brain16::encode(x))
    }

    #[test]
    fn agrees_with_the_reference_and_saturates() {
        for bits in 0..=u16::MAX {
            if bits & EXPONENT != EXPONENT {
                let reference = half::bf16::from_bits(bits).to_f32();
                assert_eq!(Brain16::decode(bits.to_le_bytes()).to_bits(), reference.to_bits(), "{bits:#x}");
                assert_eq!(encode(reference), bits);
            }
        }
        for bits in (0..=u32::MAX).step_by(9973) {
            let x = f32::from_bits(bits);
            if x.is_finite() {
                let reference = half::bf16::from_f32_const(x);
                let wanted =
                    if reference.is_infinite() { half::bf16::MAX.copysign(reference) } else { reference };
                assert_eq!(encode(x), wanted.to_bits(), "{x:e}");
            }
        }
        assert_eq!(encode(f32::MAX), 0x7f7f);
        assert_eq!(encode(f32::from_bits(0x3f80_8000)), 0x3f80, "a tie goes to the even one below");
        assert_eq!(encode(f32::from_bits(0x3f81_8000)), 0x3f82, "a tie goes to the even one above");
    }
}
