//! bfloat16: two bytes an element, the range of f32 with eight significant bits.

use crate::cast::{self, Format};
use crate::simd::Level;
use crate::wire::CodecId;
use crate::{CompressError, Compressor, Payload, PayloadRef, RoundKey, State};

/// bfloat16, the upper half of f32, rounded to nearest, ties to even. `2n` bytes for `n` elements.
///
/// The error is at most `2^-8 |x|`, and `2^-134` for subnormals. What would round to infinity becomes the largest finite
/// value, `(2 - 2^-7) 2^127` (feedback keeps the rest). A zero keeps its sign. NaN and infinity are refused, both when
/// encoding and when decoding.
#[derive(Debug, Clone)]
pub struct Bf16 {
    level: Level,
}

impl Bf16 {
    /// The codec.
    #[must_use]
    pub fn new() -> Self {
        Self { level: Level::detect() }
    }

    #[cfg(test)]
    pub(crate) fn portable() -> Self {
        Self { level: Level::PORTABLE }
    }
}

impl Default for Bf16 {
    fn default() -> Self {
        Self::new()
    }
}

impl State for Bf16 {}

impl Compressor for Bf16 {
    fn compress(&mut self, x: &[f32], _: RoundKey, out: &mut Payload) -> Result<(), CompressError> {
        cast::compress::<Brain16>(self.level, x, out)
    }

    fn compress_residual(
        &mut self,
        x: &[f32],
        e: &[f32],
        next: &mut [f32],
        _: RoundKey,
        out: &mut Payload,
    ) -> Result<(), CompressError> {
        cast::compress_residual::<Brain16>(self.level, x, e, next, out)
    }

    fn decompress(&self, p: PayloadRef<'_>, out: &mut [f32]) -> Result<(), CompressError> {
        cast::decompress::<Brain16>(self.level, p, out)
    }

    fn max_payload(&self, len: usize) -> usize {
        cast::max_payload(len)
    }
}

/// The format's arithmetic.
#[derive(Debug, Clone, Copy)]
struct Brain16;

impl Format for Brain16 {
    const ID: CodecId = CodecId::BF16;
    const EXPONENT: u16 = 0x7f80;

    #[expect(clippy::inline_always, reason = "part of kernels")]
    #[inline(always)]
    fn encode(x: f32) -> u16 {
        let bits = x.to_bits();
        let magnitude = bits & 0x7fff_ffff;
        let odd = (magnitude >> 16) & 1;
        let code = ((magnitude + 0x7fff + odd) >> 16).min(0x7f7f);
        (code | ((bits >> 16) & 0x8000)) as u16
    }

    #[expect(clippy::inline_always, reason = "part of kernels")]
    #[inline(always)]
    fn decode(bits: u16) -> f32 {
        f32::from_bits(u32::from(bits) << 16)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn agrees_with_the_reference_and_saturates() {
        for bits in 0..=u16::MAX {
            if bits & Brain16::EXPONENT != Brain16::EXPONENT {
                let reference = half::bf16::from_bits(bits).to_f32();
                assert_eq!(Brain16::decode(bits).to_bits(), reference.to_bits(), "{bits:#x}");
                assert_eq!(Brain16::encode(reference), bits);
            }
        }
        for bits in (0..=u32::MAX).step_by(9973) {
            let x = f32::from_bits(bits);
            if x.is_finite() {
                let reference = half::bf16::from_f32_const(x);
                let wanted =
                    if reference.is_infinite() { half::bf16::MAX.copysign(reference) } else { reference };
                assert_eq!(Brain16::encode(x), wanted.to_bits(), "{x:e}");
            }
        }
        assert_eq!(Brain16::encode(f32::MAX), 0x7f7f);
        assert_eq!(Brain16::encode(f32::from_bits(0x3f80_8000)), 0x3f80, "a tie goes to the even one below");
        assert_eq!(Brain16::encode(f32::from_bits(0x3f81_8000)), 0x3f82, "a tie goes to the even one above");
    }
}
