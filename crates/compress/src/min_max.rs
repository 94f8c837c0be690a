//! The eight-bit codec of Bagua's `ByteGrad`, in Bagua's layout: a header of 32 bytes for each block.

use crate::CompressError;
use crate::block::{Block, Quantizer};
use crate::chunked::Chunked;
use crate::int::ROUND;
use crate::uint::extremes;
use crate::wire::CodecId;

/// `MinMaxUInt8`: a block's smallest and largest value in a header of 32 bytes, then one byte for each element.
///
/// With `d = max - min + 1e-7`, but at least `2^-14` of the largest magnitude, `s = 255 / d` and `hi = rint(max
/// s)`, the code is `min(rint(x s), hi) - (hi - 255)`, clamped to `0..=255`. The error is at most `0.51 d /
/// 255` plus `2^-22` of the largest magnitude, which is less than another `d / 255`. `4 + n + 32 ceil(n /
/// block)` bytes. A block whose largest magnitude is below `2^-100` becomes zeros. `d` is at most `f32::MAX`.
/// An element that is more than `f32::MAX` below `max` decodes as about `max - f32::MAX`. NaN and infinity are
/// rejected; with feedback, a value whose compression error overflows f32 is rejected too.
///
/// Source: Gan et al. 2022, "Bagua", section 3; `kernels/bagua_kernels.cu`. Differs: codes are clamped below,
/// where the original can wrap, `d` has a lower bound relative to the largest magnitude, and decoding
/// multiplies by `d / 255`.
pub type MinMaxUint8 = Chunked<Block<MinMax, 8>>;

/// The arithmetic of [`MinMaxUint8`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MinMax;

impl MinMaxUint8 {
    /// Creates the codec with one header for every `block` elements.
    ///
    /// Errors: [`CompressError::BlockSize`] unless `block` is in `1..=MAX_BLOCK`.
    pub fn new(block: u32) -> Result<Self, CompressError> {
        Self::blocks(MinMax, block)
    }
}

/// A header's contents in the form that encoding and decoding use.
#[derive(Debug, Clone, Copy)]
pub struct Levels {
    min: f32,
    max: f32,
    scale: f32,
    step: f32,
    high: f32,
    low: f32,
}

impl Levels {
    fn new(min: f32, max: f32) -> Self {
        // With a smaller span, levels would be above 255 * 2^14 in magnitude, and `rint` needs less than 2^22.
        let least = min.abs().max(max.abs()) * (1.0 / 16_384.0);
        let span = (max - min + 1e-7).max(least).min(f32::MAX);
        let (scale, step) = (255.0 / span, span / 255.0);
        let high = rint(max * scale);
        Self { min, max, scale, step, high, low: high - 255.0 }
    }
}

impl Quantizer<8> for MinMax {
    const ID: CodecId = CodecId::MIN_MAX;
    const HEADER: usize = 32;
    const OVERSHOOTS: bool = true;
    type Header = Levels;

    #[expect(clippy::inline_always, reason = "part of kernels")]
    #[inline(always)]
    fn fit(&self, _: f32, _: f32, x: &[f32]) -> Levels {
        let (min, max) = extremes(x);
        Levels::new(min, max)
    }

    #[expect(clippy::inline_always, reason = "part of kernels")]
    #[inline(always)]
    fn write(fit: &Levels, header: &mut [u8]) {
        header.fill(0);
        header[..4].copy_from_slice(&fit.min.to_le_bytes());
        header[4..8].copy_from_slice(&fit.max.to_le_bytes());
    }

    #[expect(clippy::inline_always, reason = "part of kernels")]
    #[inline(always)]
    fn read(header: &[u8]) -> Result<Levels, f32> {
        let number =
            |at: usize| f32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
        let (min, max) = (number(0), number(4));
        match [min, max].into_iter().find(|n| !n.is_finite()) {
            Some(bad) => Err(bad),
            None if min > max || header[8..].iter().any(|b| *b != 0) => Err(max),
            None => Ok(Levels::new(min, max)),
        }
    }

    #[expect(clippy::inline_always, reason = "part of kernels")]
    #[inline(always)]
    fn encode<const NOISY: bool>(fit: &Levels, x: f32, _: f32) -> u32 {
        let level = rint(x * fit.scale).min(fit.high);
        (level - fit.low).clamp(0.0, 255.0) as i32 as u32
    }

    #[expect(clippy::inline_always, reason = "part of kernels")]
    #[inline(always)]
    fn decode(fit: &Levels, code: u32) -> f32 {
        ((code.cast_signed() as f32 + fit.low) * fit.step).clamp(-f32::MAX, f32::MAX)
    }

    #[expect(clippy::inline_always, reason = "part of kernels")]
    #[inline(always)]
    fn is_invalid(_: u32) -> bool {
        false
    }
}

/// Rounds a number of magnitude below `2^22` to an integer, ties to even.
#[expect(clippy::inline_always, reason = "part of kernels")]
#[inline(always)]
fn rint(x: f32) -> f32 {
    (x + ROUND) - ROUND
}
