//! Asymmetric integers of two to eight bits: each block has its smallest value and a scale, for values that are
//! not centred on zero.

use crate::CompressError;
use crate::block::{Block, DEFAULT_BLOCK, Quantizer};
use crate::chunked::Chunked;
use crate::int::ROUND;
use crate::scale::bf16_above;
use crate::wire::CodecId;

/// Asymmetric quantization to `BITS` bits, with a header of six bytes for each block.
///
/// With `q = 2^BITS - 1`, `low` the block's smallest value and `h` its largest, the scale is `(h - low) / q`
/// rounded up to a bfloat16 (zero if below `2^-110`), and the code is `(x - low) / scale` rounded to an integer
/// in `0 ..= q`. It decodes as `low + code scale`. A block whose largest magnitude is below `2^-100` becomes
/// zeros.
///
/// `4 + n BITS / 8 + 6 ceil(n / block)` bytes for `n` elements, if a block's codes fill whole bytes. The error
/// of an element is at most `0.504 (h - low) / q`, or twice that with stochastic rounding, plus `2^-22` of the
/// block's largest magnitude; it is at most `2^-100` if the scale is zero. If `q` times the scale would be
/// infinite, the scale is `f32::MAX / q` rounded down to a bfloat16; elements more than `q scale` above `low`
/// (at least `0.996 f32::MAX`) then decode as `low + q scale`. With feedback, a value whose compression error
/// overflows f32 is rejected. NaN and infinity are rejected. The decoder accepts any block size.
pub type UintBlock<const BITS: u32> = Chunked<Block<Uint, BITS>>;
/// Eight bits: codes in `0 ..= 255`.
pub type Uint8 = UintBlock<8>;
/// Four bits: codes in `0 ..= 15`.
pub type Uint4 = UintBlock<4>;
/// Three bits: codes in `0 ..= 7`.
pub type Uint3 = UintBlock<3>;
/// Two bits: codes in `0 ..= 3`.
pub type Uint2 = UintBlock<2>;

/// The arithmetic of [`UintBlock`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Uint {
    stochastic: bool,
}

impl<const BITS: u32> UintBlock<BITS> {
    /// Creates the codec that rounds to nearest, ties to even, with one header for every `block` elements.
    ///
    /// Errors: [`CompressError::BlockSize`] unless `block` is in `1..=MAX_BLOCK`.
    pub fn new(block: u32) -> Result<Self, CompressError> {
        Self::blocks(Uint { stochastic: false }, block)
    }

    /// Creates the codec that rounds up or down at random, so that the expected decoded value is the input. The
    /// mean is off by at most `2^-17` of the scale, since the noise has 16 bits, plus `2^-21` of the block's
    /// largest magnitude for roundings. Values that are clipped are biased, and so are all values if the scale
    /// is zero.
    ///
    /// Errors: as [`Self::new`].
    pub fn stochastic(block: u32) -> Result<Self, CompressError> {
        Self::blocks(Uint { stochastic: true }, block)
    }
}

impl<const BITS: u32> Default for UintBlock<BITS> {
    fn default() -> Self {
        Self::new(DEFAULT_BLOCK).expect("the default block is allowed")
    }
}

/// A block's header: the value of code 0, the distance between codes, and the factor that `x - low` is
/// multiplied by.
#[derive(Debug, Clone, Copy)]
pub struct AffineHeader {
    low: f32,
    scale: f32,
    factor: f32,
}

/// Scales below this, `2^-110`, are replaced by zero.
const MIN_SCALE: f32 = f32::from_bits((127 - 110) << 23);

impl<const BITS: u32> Quantizer<BITS> for Uint {
    const ID: CodecId = CodecId::UINT;
    const HEADER: usize = 6;
    const PARAMETER: u8 = BITS as u8;
    const OVERSHOOTS: bool = true;
    type Header = AffineHeader;

    fn noisy(&self) -> bool {
        self.stochastic
    }

    #[expect(clippy::inline_always, reason = "part of kernels")]
    #[inline(always)]
    fn fit(&self, _: f32, _: f32, x: &[f32]) -> AffineHeader {
        let q = const { largest::<BITS>() };
        let (low, high) = extremes(x);
        // `high - low` could overflow, so each is divided by `q` first.
        let scale = bf16_above((high * (1.0 / q) - low * (1.0 / q)).max(0.0));
        if scale < MIN_SCALE {
            return AffineHeader { low, scale: 0.0, factor: 0.0 };
        }
        let scale = if (q * scale).is_finite() { scale } else { bf16_below(f32::MAX / q) };
        AffineHeader { low, scale, factor: 1.0 / scale }
    }

    #[expect(clippy::inline_always, reason = "part of kernels")]
    #[inline(always)]
    fn write(fit: &AffineHeader, header: &mut [u8]) {
        let (low, scale) = header.split_at_mut(4);
        low.copy_from_slice(&fit.low.to_le_bytes());
        scale.copy_from_slice(&fit.scale.to_le_bytes()[2..]);
    }

    #[expect(clippy::inline_always, reason = "part of kernels")]
    #[inline(always)]
    fn read(header: &[u8]) -> Result<AffineHeader, f32> {
        let q = const { largest::<BITS>() };
        let &[a, b, c, d, e, f] = header else { unreachable!("the header has six bytes") };
        let (low, scale) = (f32::from_le_bytes([a, b, c, d]), f32::from_le_bytes([0, 0, e, f]));
        if !low.is_finite() {
            return Err(low);
        }
        let good = scale.to_bits() == 0 || scale >= MIN_SCALE && (q * scale).is_finite();
        if good { Ok(AffineHeader { low, scale, factor: 0.0 }) } else { Err(scale) }
    }

    #[expect(clippy::inline_always, reason = "part of kernels")]
    #[inline(always)]
    fn encode<const NOISY: bool>(fit: &AffineHeader, x: f32, offset: f32) -> u32 {
        let q = const { largest::<BITS>() };
        let y = (x - fit.low) * fit.factor;
        // `x - low` can overflow, and noise can move a value out of `0 ..= q`.
        ((if NOISY { y + offset } else { y }).clamp(0.0, q) + ROUND).to_bits()
    }

    #[expect(clippy::inline_always, reason = "part of kernels")]
    #[inline(always)]
    fn decode(fit: &AffineHeader, code: u32) -> f32 {
        let mask = const { (1 << BITS) - 1 };
        // The scale was rounded up, so the sum can overflow.
        (fit.low + (code & mask).cast_signed() as f32 * fit.scale).min(f32::MAX)
    }

    #[expect(clippy::inline_always, reason = "part of kernels")]
    #[inline(always)]
    fn is_invalid(_: u32) -> bool {
        false
    }
}

const fn largest<const BITS: u32>() -> f32 {
    assert!(2 <= BITS && BITS <= 8);
    ((1 << BITS) - 1) as f32
}

/// Returns the largest bfloat16 that is not above the positive `x`.
fn bf16_below(x: f32) -> f32 {
    f32::from_bits(x.to_bits() & 0xffff_0000)
}

/// Returns the smallest and the largest of finite numbers.
#[expect(clippy::inline_always, reason = "part of kernels")]
#[inline(always)]
pub(crate) fn extremes(x: &[f32]) -> (f32, f32) {
    // Compares the numbers as integers of the same order, because integer minima and maxima are vectorized, and
    // the result does not depend on the order of the elements.
    let ordered = |x: f32| {
        let bits = x.to_bits().cast_signed();
        bits ^ ((bits >> 31) & 0x7fff_ffff)
    };
    let number = |ordered: i32| f32::from_bits((ordered ^ ((ordered >> 31) & 0x7fff_ffff)).cast_unsigned());
    let (mut low, mut high) = (i32::MAX, i32::MIN);
    for x in x {
        let x = ordered(*x);
        (low, high) = (low.min(x), high.max(x));
    }
    (number(low), number(high))
}
