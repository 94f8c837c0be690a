//! Floating-point numbers of four and eight bits with a scale for each block: fp8 in both formats, and E3M0.

use crate::CompressError;
use crate::block::{Block, DEFAULT_BLOCK, Quantizer};
use crate::chunked::Chunked;
use crate::scale::Scale;
use crate::wire::CodecId;

/// Numbers of one sign bit, `E` exponent bits and `M` fraction bits, with a scale of two bytes for each block.
///
/// The scale is the block's largest magnitude divided by the format's largest number, rounded up to a bfloat16.
/// Elements are divided by it and rounded to nearest, ties to even; subnormals and the sign of zero are kept. A
/// block whose largest magnitude is below `2^-100` becomes zeros.
///
/// `4 + n BITS / 8 + 2 ceil(n / block)` bytes for `n` elements, if a block's codes fill whole bytes. The error
/// is at most `2^-(M+1)` of the element, or half of the format's smallest number times the scale. For E3M0 it
/// is at most a third of the element plus a rounding, and 0.337 of it if the largest magnitude is above
/// `0.996 f32::MAX`, where scales are a little too small. NaN and infinity are rejected. The decoder accepts
/// any block size.
pub type MinifloatBlock<const E: u32, const M: u32, const BITS: u32> = Chunked<Block<Minifloat<E, M>, BITS>>;
/// fp8 E4M3 (OCP, "FN"): numbers from `2^-9` to 448 times the scale.
///
/// Source: Micikevicius et al. 2022, "FP8 Formats for Deep Learning".
pub type E4M3 = MinifloatBlock<4, 3, 8>;
/// fp8 E5M2 (OCP): numbers from `2^-16` to 57344 times the scale.
pub type E5M2 = MinifloatBlock<5, 2, 8>;
/// E3M0 in four bits: zero and seven powers of two, from `2^-6` to 1 times the scale.
///
/// Source: Douillard et al. 2025, "Streaming `DiLoCo`", section 3.3. The paper gives only the format's name;
/// the definition is ours.
pub type E3M0 = MinifloatBlock<3, 0, 4>;

/// The arithmetic of [`MinifloatBlock`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Minifloat<const E: u32, const M: u32>;

impl<const E: u32, const M: u32, const BITS: u32> MinifloatBlock<E, M, BITS> {
    /// Creates the codec with one scale for every `block` elements.
    ///
    /// Errors: [`CompressError::BlockSize`] unless `block` is in `1..=MAX_BLOCK`.
    pub fn new(block: u32) -> Result<Self, CompressError> {
        Self::blocks(Minifloat, block)
    }
}

impl<const E: u32, const M: u32, const BITS: u32> Default for MinifloatBlock<E, M, BITS> {
    fn default() -> Self {
        Self::new(DEFAULT_BLOCK).expect("the default block is allowed")
    }
}

impl<const E: u32, const M: u32> Minifloat<E, M> {
    /// The exponent's bias. E3M0's is chosen so that its largest number is 1.
    const BIAS: u32 = if M == 0 { (1 << E) - 1 } else { (1 << (E - 1)) - 1 };
    /// Code of the largest finite number. E4M3 reserves one code for NaN, E5M2 a whole exponent, E3M0 none.
    const LARGEST: u32 = match (E, M) {
        (4, 3) => 0x7e,
        (5, 2) => 0x7b,
        _ => (1 << (E + M)) - 1,
    };
    /// Bits of the f32 that equals the format's smallest normal number.
    const MIN_NORMAL: u32 = (128 - Self::BIAS) << 23;
    /// Bits of the f32 that rounds a magnitude to the format's subnormals when it is added. Their spacing is
    /// `2^(1 - BIAS - M)`.
    const SUBNORMAL_MAGIC: u32 = (128 - Self::BIAS + 23 - M) << 23;

    #[expect(clippy::inline_always, reason = "part of kernels")]
    #[inline(always)]
    fn round(x: f32) -> u32 {
        let bits = x.to_bits();
        let magnitude = bits & 0x7fff_ffff;
        let magic = f32::from_bits(Self::SUBNORMAL_MAGIC);
        let subnormal = (f32::from_bits(magnitude) + magic).to_bits().wrapping_sub(Self::SUBNORMAL_MAGIC);
        let drop = 23 - M;
        let odd = (magnitude >> drop) & 1;
        let rounded = magnitude + ((1 << (drop - 1)) - 1) + odd;
        let normal = rounded.wrapping_sub((127 - Self::BIAS) << 23) >> drop;
        let code = if magnitude < Self::MIN_NORMAL { subnormal } else { normal };
        code.min(Self::LARGEST) | (bits >> 31) << (E + M)
    }

    #[expect(clippy::inline_always, reason = "part of kernels")]
    #[inline(always)]
    fn widen(code: u32) -> f32 {
        let magnitude = code & ((1 << (E + M)) - 1);
        // Moves the fields to where f32 has them. The product with a power of two corrects the bias; it is
        // exact.
        let value = f32::from_bits(magnitude << (23 - M)) * f32::from_bits((254 - Self::BIAS) << 23);
        f32::from_bits(value.to_bits() | (code >> (E + M) & 1) << 31)
    }

    /// Returns the format's largest number.
    fn largest() -> f32 {
        Self::widen(Self::LARGEST)
    }
}

impl<const E: u32, const M: u32, const BITS: u32> Quantizer<BITS> for Minifloat<E, M> {
    const ID: CodecId = CodecId::MINIFLOAT;
    const HEADER: usize = 2;
    const PARAMETER: u8 = {
        assert!(1 + E + M == BITS);
        (E << 4 | M) as u8
    };
    type Header = Scale;

    #[expect(clippy::inline_always, reason = "part of kernels")]
    #[inline(always)]
    fn fit(&self, max: f32, _: f32, _: &[f32]) -> Scale {
        Scale::up_to(max, Self::largest())
    }

    #[expect(clippy::inline_always, reason = "part of kernels")]
    #[inline(always)]
    fn write(fit: &Scale, header: &mut [u8]) {
        fit.write(header);
    }

    #[expect(clippy::inline_always, reason = "part of kernels")]
    #[inline(always)]
    fn read(header: &[u8]) -> Result<Scale, f32> {
        Scale::read(header, Self::largest())
    }

    #[expect(clippy::inline_always, reason = "part of kernels")]
    #[inline(always)]
    fn encode<const NOISY: bool>(fit: &Scale, x: f32, _: f32) -> u32 {
        Self::round(x * fit.factor())
    }

    #[expect(clippy::inline_always, reason = "part of kernels")]
    #[inline(always)]
    fn decode(fit: &Scale, code: u32) -> f32 {
        Self::widen(code) * fit.get()
    }

    #[expect(clippy::inline_always, reason = "part of kernels")]
    #[inline(always)]
    fn is_invalid(code: u32) -> bool {
        code & ((1 << (E + M)) - 1) > Self::LARGEST
    }
}

#[cfg(test)]
#[expect(clippy::float_cmp, reason = "these laws are equalities")]
mod tests {
    use super::*;

    /// Returns the value of a code, from the definition of the format.
    fn value(code: u32, e: u32, m: u32, bias: i32) -> f64 {
        let (exponent, fraction) =
            ((code >> m).cast_signed(), f64::from(code & ((1 << m) - 1)) / f64::from(1 << m));
        assert!(exponent < 1 << e);
        if exponent == 0 {
            fraction * 2_f64.powi(1 - bias)
        } else {
            (1.0 + fraction) * 2_f64.powi(exponent - bias)
        }
    }

    fn check<const E: u32, const M: u32>(bias: i32, largest: f32) {
        assert_eq!(Minifloat::<E, M>::largest(), largest);
        let last = Minifloat::<E, M>::LARGEST;
        for code in 0..=last {
            let wide = Minifloat::<E, M>::widen(code);
            assert_eq!(f64::from(wide), value(code, E, M, bias), "{code:#x}");
            assert_eq!(Minifloat::<E, M>::round(wide), code);
            assert_eq!(Minifloat::<E, M>::round(-wide), code | 1 << (E + M));
            if code < last {
                // The midpoint of two neighbours goes to the even one, and the floats beside it to the nearer
                // one.
                let next = Minifloat::<E, M>::widen(code + 1);
                let middle = f32::midpoint(wide, next);
                assert_eq!(Minifloat::<E, M>::round(middle), code + code % 2, "{middle}");
                assert_eq!(Minifloat::<E, M>::round(middle.next_down()), code);
                assert_eq!(Minifloat::<E, M>::round(middle.next_up()), code + 1);
            }
        }
        assert_eq!(Minifloat::<E, M>::round(largest * 3.0), last);
    }

    #[test]
    fn the_formats_are_those_of_their_definitions() {
        check::<4, 3>(7, 448.0);
        check::<5, 2>(15, 57344.0);
        check::<3, 0>(7, 1.0);
    }
}
