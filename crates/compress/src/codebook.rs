//! Codes that index a table of values sent in each block's header: hivemind's mean-and-deviation bins, and
//! quantiles.

use crate::CompressError;
use crate::block::{Block, Quantizer};
use crate::chunked::Chunked;
use crate::int::ROUND;
use crate::norm::{deviation, mean};
use crate::wire::CodecId;

/// Default block size of the codebook codecs, in elements.
pub const CODEBOOK_BLOCK: u32 = 1 << 16;
/// Largest number of a block's elements that quantiles are computed from.
const SAMPLE: usize = 1 << 12;

/// A table of `2^BITS` values in each block's header, and a code of `BITS` bits (2, 4 or 8) for each element.
///
/// A table entry is the mean of the elements in its bin, so decoding keeps the block's mean and stays within
/// its range. `4 + n BITS / 8 + 4 2^BITS ceil(n / block)` bytes for `n` elements, if a block's codes fill whole
/// bytes. A block whose largest magnitude is below `2^-100` becomes zeros. NaN and infinity are rejected; with
/// feedback, a value whose compression error overflows f32 is rejected too. The host averages each bin in f64;
/// the wire format defines only the decoding bit for bit.
pub type Codebook<const BITS: u32> = Chunked<Block<Table, BITS>>;

/// The rule that divides a block's values into bins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Table {
    quantiles: bool,
}

impl<const BITS: u32> Codebook<BITS> {
    /// Creates the codec with bins of equal width over six standard deviations around the mean. Values outside
    /// go to the first or the last bin.
    ///
    /// Source: hivemind's `Uniform8BitQuantization` (8 bits), templar's compressor (2 bits).
    ///
    /// Errors: [`CompressError::BlockSize`] unless `block` is in `1..=MAX_BLOCK`.
    pub fn mean_std(block: u32) -> Result<Self, CompressError> {
        Self::blocks(Table { quantiles: false }, block)
    }

    /// Creates the codec with bins that hold equally many elements of a sample of the block.
    ///
    /// Source: Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization", section 2.1.
    ///
    /// Errors: as [`Self::mean_std`].
    pub fn quantiles(block: u32) -> Result<Self, CompressError> {
        Self::blocks(Table { quantiles: true }, block)
    }
}

/// A table of values, and the boundaries of the bins.
#[derive(Debug, Clone, Copy)]
pub struct Bins {
    values: [f32; 256],
    /// Upper ends of the bins, for quantiles. The last one is infinite.
    ends: [f32; 256],
    /// Centre of the bins of equal width; unused for quantiles.
    middle: f32,
    /// One over the width of the bins, or 0 for quantiles.
    factor: f32,
    grid: Grid,
}

/// Number of cells in the grid that speeds up the search for an element's bin between quantiles.
const CELLS: usize = 1 << 12;

/// A lookup table: for each cell, the bin at which the search begins.
#[derive(Debug, Clone, Copy)]
struct Grid {
    low: f32,
    /// One over the width of a cell.
    factor: f32,
    first: [u8; CELLS],
}

impl Grid {
    /// Builds the grid over ascending `ends`, of which the last is infinite.
    fn new(ends: &[f32]) -> Self {
        let (low, high) = (ends[0], ends[ends.len().saturating_sub(2)]);
        let factor = (CELLS - 1) as f32 / (high - low);
        // The factor is not normal if the ends are equal, or extremely near or far apart.
        let factor = if factor.is_normal() { factor } else { 0.0 };
        let mut grid = Self { low, factor, first: [0; CELLS] };
        let mut bin = 0;
        // A cell's entry is the number of ends in lower cells. The cells of elements are computed by the same
        // function, so the search never begins after an element's bin, whatever the rounding.
        for (cell, first) in grid.first.iter_mut().enumerate() {
            *first = bin as u8;
            while bin + 1 < ends.len() && grid_cell(low, factor, ends[bin]) <= cell {
                bin += 1;
            }
        }
        grid
    }
}

/// Returns the cell of an element. It never decreases as the element increases.
#[expect(clippy::inline_always, reason = "part of kernels")]
#[inline(always)]
fn grid_cell(low: f32, factor: f32, x: f32) -> usize {
    ((x - low) * factor).clamp(0.0, (CELLS - 1) as f32) as usize
}

impl Bins {
    const EMPTY: Self = Self {
        values: [0.0; 256],
        ends: [f32::INFINITY; 256],
        middle: 0.0,
        factor: 0.0,
        grid: Grid { low: 0.0, factor: 0.0, first: [0; CELLS] },
    };

    /// Returns the bin of `x`.
    #[expect(clippy::inline_always, reason = "part of kernels")]
    #[inline(always)]
    fn of<const BITS: u32>(&self, x: f32) -> u32 {
        if self.factor > 0.0 {
            let half = const { (1 << BITS) as f32 / 2.0 };
            return (((x - self.middle) * self.factor).clamp(-half, half - 1.0) + half + ROUND).to_bits()
                & 0xff;
        }
        // Counts the ends at or below `x`.
        let mut bin = usize::from(self.grid.first[grid_cell(self.grid.low, self.grid.factor, x) % CELLS]);
        while self.ends[bin % 256] <= x {
            bin += 1;
        }
        bin as u32
    }
}

impl<const BITS: u32> Quantizer<BITS> for Table {
    const ID: CodecId = CodecId::CODEBOOK;
    const HEADER: usize = {
        assert!(BITS == 2 || BITS == 4 || BITS == 8);
        4 << BITS
    };
    const PARAMETER: u8 = BITS as u8;
    const OVERSHOOTS: bool = true;
    type Header = Bins;

    #[expect(clippy::inline_always, reason = "part of kernels")]
    #[inline(always)]
    fn fit(&self, max: f32, _: f32, x: &[f32]) -> Bins {
        let count = 1 << BITS;
        let mut bins = Bins::EMPTY;
        if self.quantiles {
            let (mut sample, mut taken) = ([0.0; SAMPLE], 0);
            for (slot, x) in sample.iter_mut().zip(x.iter().step_by(x.len().div_ceil(SAMPLE))) {
                (*slot, taken) = (*x, taken + 1);
            }
            let sample = &mut sample[..taken];
            sample.sort_unstable_by(f32::total_cmp);
            for (i, end) in bins.ends[..count - 1].iter_mut().enumerate() {
                *end = sample[(i + 1) * taken / count];
            }
            bins.grid = Grid::new(&bins.ends[..count]);
        } else {
            bins.middle = mean(max, x);
            let width = 6.0 / count as f32 * deviation(max, bins.middle, x);
            // If all values are equal, they share one bin.
            bins.factor = if width > 0.0 { (1.0 / width).clamp(f32::MIN_POSITIVE, f32::MAX) } else { 1.0 };
        }
        let (mut sums, mut counts) = ([0.0_f64; 256], [0_u32; 256]);
        for x in x {
            let bin = bins.of::<BITS>(*x) as usize % 256;
            sums[bin] += f64::from(*x);
            counts[bin] += 1;
        }
        for ((value, sum), count) in bins.values.iter_mut().zip(sums).zip(counts) {
            *value = if count == 0 { 0.0 } else { (sum / f64::from(count)) as f32 };
        }
        bins
    }

    fn write(fit: &Bins, header: &mut [u8]) {
        for (bytes, value) in header.as_chunks_mut().0.iter_mut().zip(fit.values) {
            *bytes = value.to_le_bytes();
        }
    }

    fn read(header: &[u8]) -> Result<Bins, f32> {
        let mut bins = Bins::EMPTY;
        for (value, bytes) in bins.values.iter_mut().zip(header.as_chunks().0) {
            *value = f32::from_le_bytes(*bytes);
        }
        bins.values.into_iter().find(|value| !value.is_finite()).map_or(Ok(bins), Err)
    }

    #[expect(clippy::inline_always, reason = "part of kernels")]
    #[inline(always)]
    fn encode<const NOISY: bool>(fit: &Bins, x: f32, _: f32) -> u32 {
        fit.of::<BITS>(x)
    }

    #[expect(clippy::inline_always, reason = "part of kernels")]
    #[inline(always)]
    fn decode(fit: &Bins, code: u32) -> f32 {
        fit.values[code as usize % (1 << BITS)]
    }

    #[expect(clippy::inline_always, reason = "part of kernels")]
    #[inline(always)]
    fn is_invalid(_: u32) -> bool {
        false
    }
}
