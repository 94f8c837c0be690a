//! One bit for each element: its sign, and one scale for each block.

use crate::CompressError;
use crate::block::{Block, Quantizer};
use crate::chunked::Chunked;
use crate::norm::{root_mean_square, survey, surveyed_mean_magnitude};
use crate::simd::{Avx2Token, FiniteValues};
use crate::values::Values;
use crate::wire::CodecId;

/// Block size of [`Sign::default`], in elements. A scale of four bytes then adds 0.8 % to the signs, and the
/// block stays in the first-level cache between the pass that finds the scale and the one that uses it.
pub const SIGN_BLOCK: u32 = 4096;

/// The sign of each element in one bit, with one scale for each block. Use it with error feedback: alone it
/// loses far too much.
///
/// An element decodes as its block's scale with the element's sign; zero keeps its own sign (bit 1 means
/// negative). The scale is the mean magnitude (EF-signSGD), or the root of the mean square (1-bit Adam:
/// `|x| / sqrt(d)`). A block whose largest magnitude is below `2^-100` becomes zeros.
///
/// `4 + n / 8 + 4 ceil(n / block)` bytes for `n` elements, if a block's codes fill whole bytes. NaN and
/// infinity are rejected.
///
/// Sources: Karimireddy et al. 2019, "Error Feedback Fixes `SignSGD`", Alg. 1; Tang et al. 2021, "1-bit Adam",
/// section 3.
pub type Sign = Chunked<Block<SignBit, 1>>;

/// The arithmetic of [`Sign`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SignBit {
    norm: Norm,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Norm {
    L1,
    L2,
}

impl Sign {
    /// Creates the codec with the mean magnitude of every `block` elements as the scale, which minimizes the
    /// squared error.
    ///
    /// Errors: [`CompressError::BlockSize`] unless `block` is in `1..=MAX_BLOCK`.
    pub fn l1(block: u32) -> Result<Self, CompressError> {
        Self::blocks(SignBit { norm: Norm::L1 }, block)
    }

    /// Creates the codec with the root of the mean square of every `block` elements as the scale, which keeps
    /// the norm.
    ///
    /// Errors: as [`Self::l1`].
    pub fn l2(block: u32) -> Result<Self, CompressError> {
        Self::blocks(SignBit { norm: Norm::L2 }, block)
    }
}

impl Default for Sign {
    fn default() -> Self {
        Self::l1(SIGN_BLOCK).expect("the default block is allowed")
    }
}

impl Quantizer<1> for SignBit {
    const ID: CodecId = CodecId::SIGN;
    const HEADER: usize = 4;
    type Header = f32;

    #[expect(clippy::inline_always, reason = "part of kernels")]
    #[inline(always)]
    fn survey(values: Values<'_>) -> (i32, f32) {
        survey(values)
    }

    #[expect(clippy::inline_always, reason = "part of kernels")]
    #[inline(always)]
    fn fit(&self, max: f32, total: f32, x: &[f32]) -> f32 {
        match self.norm {
            Norm::L1 => surveyed_mean_magnitude(max, total, x),
            Norm::L2 => root_mean_square(max, x),
        }
        // Rounding must not make the scale larger than the largest magnitude: near `f32::MAX` it would
        // overflow.
        .min(max)
    }

    #[expect(clippy::inline_always, reason = "part of kernels")]
    #[inline(always)]
    fn write(scale: &f32, header: &mut [u8]) {
        header.copy_from_slice(&scale.to_le_bytes());
    }

    #[expect(clippy::inline_always, reason = "part of kernels")]
    #[inline(always)]
    fn read(header: &[u8]) -> Result<f32, f32> {
        let scale = f32::from_le_bytes(header.try_into().expect("the header has four bytes"));
        if scale.is_finite() && scale >= f32::MIN_POSITIVE { Ok(scale) } else { Err(scale) }
    }

    #[expect(clippy::inline_always, reason = "part of kernels")]
    #[inline(always)]
    fn encode<const NOISY: bool>(_: &f32, x: f32, _: f32) -> u32 {
        x.to_bits() >> 31
    }

    #[expect(clippy::inline_always, reason = "part of kernels")]
    #[inline(always)]
    fn decode(scale: &f32, code: u32) -> f32 {
        f32::from_bits(scale.to_bits() | code << 31)
    }

    #[expect(clippy::inline_always, reason = "part of kernels")]
    #[inline(always)]
    fn is_invalid(_: u32) -> bool {
        false
    }

    #[expect(clippy::inline_always, reason = "part of kernels")]
    #[inline(always)]
    fn encode_avx2(token: Avx2Token, scale: &f32, values: FiniteValues<'_>, bytes: &mut [u8]) -> usize {
        token.encode_sign(*scale, values, bytes)
    }

    #[expect(clippy::inline_always, reason = "part of kernels")]
    #[inline(always)]
    fn decode_avx2(token: Avx2Token, scale: &f32, bytes: &[u8], out: &mut [f32]) -> (usize, bool) {
        token.sign(*scale, bytes, out)
    }
}
