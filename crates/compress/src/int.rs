//! Symmetric integers of two to eight bits with a scale for each block, rounded to nearest or stochastically.
//! The plain block quantizers, QSGD and `TernGrad` differ only in how they choose the scale.

use crate::CompressError;
use crate::block::{Block, DEFAULT_BLOCK, Quantizer};
use crate::chunked::Chunked;
use crate::norm::root_mean_square;
use crate::scale::Scale;
use crate::simd::{Avx2Token, FiniteValues};
use crate::wire::CodecId;

/// `1.5 * 2^23`: adding it rounds to an integer, ties to even, and leaves the integer in the low bits.
pub(crate) const ROUND: f32 = 12_582_912.0;

/// Symmetric quantization to `BITS` bits, with a scale of two bytes for each block.
///
/// With `q = 2^(BITS-1) - 1` and `m = max |x|` of the block, the scale is `m / q` rounded up to a bfloat16, and
/// the code is `x / scale` rounded to an integer in `-q ..= q`. A code times a scale has at most 16 significant
/// bits, so decoding is exact and the residual is rounded only once. A block with `m < 2^-100` becomes zeros.
///
/// `4 + n BITS / 8 + 2 ceil(n / block)` bytes for `n` elements, if a block's codes fill whole bytes. The error
/// of an element is at most `0.504 m / q` of its block (half of a scale), or `1.008 m / q` with stochastic
/// rounding, and at most `2^-100` in a block of zeros. If `q` times the scale would be infinite (`m` is above
/// `0.996 f32::MAX`), the scale is a little too small, and the bounds are `0.512 m / q` and `1.012 m / q`. NaN
/// and infinity are rejected. The decoder accepts any block size.
pub type IntBlock<const BITS: u32> = Chunked<Block<Int, BITS>>;
/// Eight bits: codes in `-127 ..= 127`.
pub type Int8 = IntBlock<8>;
/// Four bits: codes in `-7 ..= 7`.
pub type Int4 = IntBlock<4>;
/// Three bits: codes in `-3 ..= 3`.
pub type Int3 = IntBlock<3>;
/// Two bits: codes -1, 0, 1.
pub type Int2 = IntBlock<2>;

/// The arithmetic of [`IntBlock`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Int {
    range: Range,
    stochastic: bool,
}

/// The magnitude that the largest code represents.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Range {
    /// The largest magnitude of the block.
    #[default]
    Max,
    /// The Euclidean norm of the block.
    Norm,
    /// The largest magnitude, clipped at 2.5 times the root of the mean square.
    Clipped,
}

impl<const BITS: u32> IntBlock<BITS> {
    /// Creates the codec that rounds to nearest, ties to even, with one scale for every `block` elements.
    ///
    /// Errors: [`CompressError::BlockSize`] unless `block` is in `1..=MAX_BLOCK`.
    pub fn new(block: u32) -> Result<Self, CompressError> {
        Self::blocks(Int::default(), block)
    }

    /// Creates the codec that rounds up or down at random, so that the expected decoded value is the input.
    /// Each rank draws its own noise.
    ///
    /// The mean is off by at most `2^-17` of the scale, since the noise has 16 bits, plus `2^-22` of the
    /// element for roundings. Near `f32::MAX`, where the scale is too small, means are up to 0.4 % smaller than
    /// the element; in a block of zeros they are 0.
    ///
    /// Errors: as [`Self::new`].
    pub fn stochastic(block: u32) -> Result<Self, CompressError> {
        Self::blocks(Int { stochastic: true, ..Int::default() }, block)
    }

    /// Creates QSGD with `q` levels: stochastic rounding, and the largest code represents the block's Euclidean
    /// norm (at most `f32::MAX`) instead of `m`. It is unbiased within the same limits as [`Self::stochastic`].
    /// The variance of a block of `d` elements is at most `min(d / q^2, sqrt(d) / q) |x|^2`.
    ///
    /// Source: Alistarh et al. 2017, "QSGD", section 3.1. Differs: the norm is rounded up to `q` times a
    /// bfloat16.
    ///
    /// Errors: as [`Self::new`].
    pub fn qsgd(block: u32) -> Result<Self, CompressError> {
        Self::blocks(Int { stochastic: true, range: Range::Norm }, block)
    }
}

impl IntBlock<2> {
    /// Creates `TernGrad`: -1, 0 or 1 times a scale, with stochastic rounding, after clipping at 2.5 times the
    /// root of the mean square. It is unbiased except for clipped elements.
    ///
    /// Source: Wen et al. 2017, "`TernGrad`", section 3. Differs: workers do not share scales, and the mean is
    /// taken as 0 where the paper clips at 2.5 standard deviations.
    ///
    /// Errors: as [`Self::new`].
    pub fn tern_grad(block: u32) -> Result<Self, CompressError> {
        Self::blocks(Int { stochastic: true, range: Range::Clipped }, block)
    }
}

impl<const BITS: u32> Default for IntBlock<BITS> {
    fn default() -> Self {
        Self::new(DEFAULT_BLOCK).expect("the default block is allowed")
    }
}

const fn largest<const BITS: u32>() -> i32 {
    assert!(2 <= BITS && BITS <= 8);
    (1 << (BITS - 1)) - 1
}

impl<const BITS: u32> Quantizer<BITS> for Int {
    const ID: CodecId = CodecId::INT;
    const HEADER: usize = 2;
    const PARAMETER: u8 = BITS as u8;
    type Header = Scale;

    fn noisy(&self) -> bool {
        self.stochastic
    }

    #[expect(clippy::inline_always, reason = "part of kernels")]
    #[inline(always)]
    fn fit(&self, max: f32, _: f32, x: &[f32]) -> Scale {
        let q = const { largest::<BITS>() as f32 };
        let top = match self.range {
            Range::Max => max,
            // Rounding of the sum must not make the norm smaller than the largest magnitude.
            Range::Norm => (root_mean_square(max, x) * (x.len() as f32).sqrt()).clamp(max, f32::MAX),
            Range::Clipped => max.min(2.5 * root_mean_square(max, x)),
        };
        Scale::up_to(top, q)
    }

    #[expect(clippy::inline_always, reason = "part of kernels")]
    #[inline(always)]
    fn write(fit: &Scale, header: &mut [u8]) {
        fit.write(header);
    }

    #[expect(clippy::inline_always, reason = "part of kernels")]
    #[inline(always)]
    fn read(header: &[u8]) -> Result<Scale, f32> {
        Scale::read(header, const { largest::<BITS>() as f32 })
    }

    #[expect(clippy::inline_always, reason = "part of kernels")]
    #[inline(always)]
    fn encode<const NOISY: bool>(fit: &Scale, x: f32, offset: f32) -> u32 {
        let q = const { largest::<BITS>() as f32 };
        // Without noise the code cannot exceed `q`: values are clipped only by stochastic methods.
        let y = if NOISY { (x * fit.factor() + offset).clamp(-q, q) } else { x * fit.factor() };
        (y + ROUND).to_bits()
    }

    #[expect(clippy::inline_always, reason = "part of kernels")]
    #[inline(always)]
    fn decode(fit: &Scale, code: u32) -> f32 {
        let code = (code << (32 - BITS)).cast_signed() >> (32 - BITS);
        code as f32 * fit.get()
    }

    #[expect(clippy::inline_always, reason = "part of kernels")]
    #[inline(always)]
    fn is_invalid(code: u32) -> bool {
        code == 1 << (BITS - 1)
    }

    #[expect(clippy::inline_always, reason = "part of kernels")]
    #[inline(always)]
    fn encode_avx2(token: Avx2Token, fit: &Scale, values: FiniteValues<'_>, bytes: &mut [u8]) -> usize {
        match BITS {
            8 => token.encode_int8(*fit, values, bytes),
            4 => token.encode_int4(*fit, values, bytes),
            _ => 0,
        }
    }

    #[expect(clippy::inline_always, reason = "part of kernels")]
    #[inline(always)]
    fn decode_avx2(token: Avx2Token, fit: &Scale, bytes: &[u8], out: &mut [f32]) -> (usize, bool) {
        match BITS {
            8 => token.int8(*fit, bytes, out),
            4 => token.int4(*fit, bytes, out),
            _ => (0, false),
        }
    }
}

#[cfg(test)]
#[expect(clippy::float_cmp, reason = "these laws are equalities")]
mod tests {
    use super::*;

    #[test]
    fn rounding_by_addition_is_to_nearest_even() {
        for i in -1_270_000..=1_270_000 {
            let y = i as f32 / 10_000.0;
            assert_eq!((y + ROUND) - ROUND, y.round_ties_even(), "{y}");
            assert_eq!(((y + ROUND).to_bits() as u8).cast_signed(), y.round_ties_even() as i8, "{y}");
        }
    }
}
