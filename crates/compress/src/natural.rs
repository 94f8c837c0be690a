//! Natural compression: each magnitude is rounded stochastically to one of the two nearest powers of two.

use crate::block::{Block, Quantizer};
use crate::chunked::Chunked;
use crate::wire::CodecId;

/// Block size of [`Natural`], in elements. Its blocks have no header.
const BLOCK: u32 = 4096;

/// Natural compression: the sign and the exponent of f32, nine bits for each element.
///
/// A magnitude `2^e (1 + f)` becomes `2^(e+1)` with probability `f`, else `2^e`; one below `2^-126` becomes
/// `2^-126` or 0. The mean is the value, to within `2^-17 2^e` (`e` at least -126) since the noise has 16 bits.
/// The variance of normal numbers is at most an eighth of the value's square. Magnitudes above `2^127` become
/// `2^127`, which is biased. Vectors are divided into blocks of 4096, and a block whose largest magnitude is
/// below `2^-100` becomes zeros. `4 + n + ceil(n / 8)` bytes for `n` elements. NaN and infinity are rejected.
///
/// Source: Horváth et al. 2019, "Natural Compression for Distributed Deep Learning", Definition 1.
pub type Natural = Chunked<Block<PowerOfTwo, 9>>;

/// The arithmetic of [`Natural`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PowerOfTwo;

impl Natural {
    /// Creates the codec.
    #[must_use]
    pub fn new() -> Self {
        Self::blocks(PowerOfTwo, BLOCK).expect("the block is allowed")
    }
}

impl Default for Natural {
    fn default() -> Self {
        Self::new()
    }
}

impl Quantizer<9> for PowerOfTwo {
    const ID: CodecId = CodecId::NATURAL;
    const HEADER: usize = 0;
    type Header = ();

    fn noisy(&self) -> bool {
        true
    }

    fn fit(&self, _: f32, _: f32, _: &[f32]) {}

    fn write((): &(), _: &mut [u8]) {}

    fn read(_: &[u8]) -> Result<(), f32> {
        Ok(())
    }

    #[expect(clippy::inline_always, reason = "part of kernels")]
    #[inline(always)]
    fn encode<const NOISY: bool>((): &(), x: f32, offset: f32) -> u32 {
        let bits = x.to_bits();
        // Adds random bits to the mantissa. They carry into the exponent with probability `f`, where the
        // magnitude is `2^e (1 + f)`.
        let noise = ((offset + 0.5) * 8_388_608.0) as i32;
        let exponent = ((bits & 0x7fff_ffff) + noise.cast_unsigned()) >> 23;
        exponent.min(254) | (bits >> 31) << 8
    }

    #[expect(clippy::inline_always, reason = "part of kernels")]
    #[inline(always)]
    fn decode((): &(), code: u32) -> f32 {
        f32::from_bits((code & 0xff) << 23 | (code >> 8 & 1) << 31)
    }

    #[expect(clippy::inline_always, reason = "part of kernels")]
    #[inline(always)]
    fn is_invalid(code: u32) -> bool {
        code & 0xff == 0xff
    }
}
