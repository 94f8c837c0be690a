//! Codecs with the same bytes as the host's. A block codec first computes each block's header; then each unit
//! (thread) writes one word of the body, because a block need not end at a word boundary. Kernels for masks and
//! largest magnitudes compute indices.
#![expect(
    clippy::manual_range_contains,
    clippy::manual_div_ceil,
    clippy::float_cmp,
    reason = "CubeCL kernels support neither ranges nor methods of integers; ties are exact"
)]

mod exact;
mod fit;
mod pack;
mod select;
mod square;
mod top;

use cubecl::prelude::*;

use self::exact::sum;
use super::operand::Operand;
use super::{Cube, u32_of};
use crate::backend::Sum;
use crate::codec::{BlockCodec, BlockMask, Code};
use crate::{Result, View, ViewMut};

/// Compile-time arguments of the block kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Form {
    codec: BlockCodec,
    /// Whether `before` is added to the values.
    adds: bool,
    /// Whether the encoding error is written to `lost`.
    loses: bool,
}

impl Form {
    /// Returns the largest integer code.
    fn most(self) -> f32 {
        ((1 << (self.codec.code().bits() - 1)) - 1) as f32
    }

    /// Returns the bits of the largest scale of an integer codec. All its multiples by codes are finite.
    fn top(self) -> u32 {
        (f32::MAX / self.most()).to_bits() & 0xffff_0000
    }

    fn signs(self) -> bool {
        matches!(self.codec.code(), Code::SignL1 | Code::SignL2)
    }
}

/// Returns the bits of a value to encode.
#[cube]
fn value(x: &[u32], before: &[u32], at: u32, #[comptime] form: Form) -> u32 {
    let mut bits = x[at as usize];
    if comptime!(form.adds) {
        bits = sum(bits, before[at as usize]);
    }
    bits
}

/// Maximum number of elements per tile, unless a chunk would have more than [`MOST_TILES`] tiles. A chunk of at
/// most `TILE` elements is processed by one cube (workgroup), which reads it ten times.
const TILE: usize = 4096;
/// Maximum number of tiles per chunk.
const MOST_TILES: usize = 1024;

fn chunks(len: usize, chunk: usize, kept: usize) -> top::ChunksLaunch {
    top::ChunksLaunch::new(u32_of(len), u32_of(chunk), u32_of(kept), u32_of(len.div_ceil(chunk)))
}

impl Cube {
    /// Implements [`crate::backend::Codecs::largest`] for chunks that are too large for one cube.
    fn largest_in_tiles(&self, x: &Operand, [len, chunk, kept]: [usize; 3], indices: &Operand) -> Result<()> {
        let (client, units) = (&self.client, self.units);
        let count = len.div_ceil(chunk);
        let tiles = chunk.div_ceil(TILE).min(MOST_TILES);
        let tile = chunk.div_ceil(tiles);
        let chunks = || chunks(len, chunk, kept);
        let tiling = || top::TilesLaunch::new(u32_of(tile), u32_of(tiles), u32_of(count * tiles));
        // One entry per chunk for each round, and one for after the last round. An entry holds the prefix of
        // the threshold found so far, and how many elements with this prefix are kept.
        let mut cuts = vec![0; 8 * count * (top::ROUNDS as usize + 1)];
        for (cut, start) in cuts.as_chunks_mut().0.iter_mut().zip((0..len).step_by(chunk)) {
            *cut = (u64::from(u32_of(kept.min(len - start))) << 32).to_le_bytes();
        }
        let cut_buffer = self.upload_scratch(cuts)?;
        let count_buffer = self.scratch(4 * count * tiles * top::DIGITS as usize)?;
        let found_buffer = self.scratch(8 * count * tiles)?;
        let [cuts, counts, found] = [&cut_buffer, &count_buffer, &found_buffer].map(Self::whole);
        for round in 0..top::ROUNDS {
            let (cubes, dim) = self.row_each(count * tiles);
            let (from, to) = (cuts.arg(), counts.arg());
            top::count::launch(client, cubes, dim, x.arg(), from, to, chunks(), tiling(), round, units);
            let (cubes, dim) = self.row_each(count);
            let (from, to) = (counts.arg(), cuts.arg());
            top::pick::launch(client, cubes, dim, from, to, found.arg(), chunks(), tiling(), round, units);
        }
        let (cubes, dim) = self.row_each(count * tiles);
        let (x, cuts, found, to) = (x.arg(), cuts.arg(), found.arg(), indices.arg());
        top::place::launch(client, cubes, dim, x, cuts, found, to, chunks(), tiling(), units);
        for buffer in [cut_buffer, count_buffer, found_buffer] {
            self.pool.give(buffer);
        }
        Ok(())
    }
}

impl crate::backend::Codecs for Cube {
    fn encode(
        &self,
        codec: BlockCodec,
        x: View<'_>,
        before: Option<View<'_>>,
        lost: Option<ViewMut<'_>>,
        out: ViewMut<'_>,
    ) -> Result<()> {
        let (client, units) = (&self.client, self.units);
        let (len, words) = (x.len(), codec.words(x.len()));
        let blocks = len.div_ceil(codec.block() as usize);
        let form = Form { codec, adds: before.is_some(), loses: lost.is_some() };
        let (x, out) = (self.read(&x)?, self.write(&out)?);
        let before = before.map(|before| self.read(&before)).transpose()?;
        let lost = lost.map(|lost| self.write(&lost)).transpose()?;
        let scratch = self.scratch(blocks * 8)?;
        let fits = Self::whole(&scratch);
        // Arguments that the kernel does not use may be any buffer.
        let added = || before.as_ref().unwrap_or(&x).arg();
        let to = lost.as_ref().unwrap_or(&fits).arg();
        // An argument, so that compilers do not know that it is 0.
        let (len, zero) = (u32_of(len), 0);
        let (count, dim) = self.row_each(blocks);
        fit::fit::launch(client, count, dim, x.arg(), added(), fits.arg(), len, zero, form, units);
        let (count, dim) = self.each(words);
        pack::encode::launch(
            client,
            count,
            dim,
            x.arg(),
            added(),
            fits.arg(),
            to,
            out.arg(),
            len,
            zero,
            form,
        );
        let (count, dim) = self.each(blocks);
        pack::refuse::launch(client, count, dim, fits.arg(), out.arg(), u32_of(blocks));
        self.pool.give(scratch);
        self.write_back([x, out].into_iter().chain(before).chain(lost));
        Ok(())
    }

    fn decode(&self, codec: BlockCodec, body: View<'_>, y: ViewMut<'_>, verdict: ViewMut<'_>) -> Result<()> {
        let len = y.len();
        let form = Form { codec, adds: false, loses: false };
        let (body, y, verdict) = (self.read(&body)?, self.write(&y)?, self.write(&verdict)?);
        // Set the verdict to "valid".
        self.fill(&verdict, 1, 0.0);
        let (count, dim) = self.each(len);
        pack::decode::launch(&self.client, count, dim, body.arg(), y.arg(), verdict.arg(), u32_of(len), form);
        self.write_back([body, y, verdict]);
        Ok(())
    }

    fn check_finite(&self, x: View<'_>, sum: Option<Sum<'_>>, verdict: ViewMut<'_>) -> Result<()> {
        let len = x.len();
        let (x, verdict) = (self.read(&x)?, self.write(&verdict)?);
        let minus = matches!(sum, Some(Sum::Minus(..)));
        let bind = |(Sum::Plus(with, y) | Sum::Minus(with, y))| Ok((self.read(&with)?, self.write(&y)?));
        let sum = sum.map(bind).transpose()?;
        // Set the verdict to "finite".
        self.fill(&verdict, 1, 0.0);
        let with = sum.as_ref().map_or(&x, |(with, _)| with).arg();
        let scratch = self.scratch(4)?;
        let unwanted = Self::whole(&scratch);
        let y = sum.as_ref().map_or(&unwanted, |(_, y)| y).arg();
        let (count, dim) = self.each(len);
        let (len, adds) = (u32_of(len), sum.is_some());
        select::sums::launch(&self.client, count, dim, x.arg(), with, y, verdict.arg(), len, adds, minus);
        self.pool.give(scratch);
        self.write_back([x, verdict]);
        self.write_back(sum.into_iter().flat_map(|(with, y)| [with, y]));
        Ok(())
    }

    fn largest(&self, x: View<'_>, chunk: usize, kept: usize, indices: ViewMut<'_>) -> Result<()> {
        let (len, chunk) = (x.len(), chunk.min(x.len()));
        let (kept, count) = (kept.min(chunk), len.div_ceil(chunk));
        let (x, indices) = (self.read(&x)?, self.write(&indices)?);
        if chunk <= TILE {
            let (cubes, dim) = self.row_each(count);
            let (to, units) = (indices.arg(), self.units);
            top::small::launch(&self.client, cubes, dim, x.arg(), to, chunks(len, chunk, kept), units);
        } else {
            self.largest_in_tiles(&x, [len, chunk, kept], &indices)?;
        }
        self.write_back([x, indices]);
        Ok(())
    }

    fn squares(&self, x: View<'_>, matrix: View<'_>, inverse: bool, y: ViewMut<'_>) -> Result<()> {
        let (len, side) = (x.len(), u32_of(matrix.shape().cols()));
        let scratch = self.scratch(len * 4)?;
        let half = Self::whole(&scratch);
        let (x, matrix, y) = (self.read(&x)?, self.read(&matrix)?, self.write(&y)?);
        for (from, to, columns) in [(&x, &half, true), (&half, &y, false)] {
            let (count, dim) = self.each(len);
            let (from, matrix, to) = (from.arg(), matrix.arg(), to.arg());
            // An argument, so that compilers do not know that it is 0.
            let (len, zero) = (u32_of(len), 0);
            square::turn::launch(
                &self.client,
                count,
                dim,
                from,
                matrix,
                to,
                len,
                side,
                zero,
                columns,
                inverse,
            );
        }
        self.pool.give(scratch);
        self.write_back([x, matrix, y]);
        Ok(())
    }

    fn mask(&self, mask: BlockMask, indices: ViewMut<'_>) -> Result<()> {
        let BlockMask { pattern, stride, phase, kept, taken, gap, stream: [key, stream] } = mask;
        let (low, high) = (|x: u64| x as u32, |x: u64| (x >> 32) as u32);
        let stream = select::StreamLaunch::new(low(key), high(key), low(stream), high(stream));
        let indices = self.write(&indices)?;
        let (count, dim) = self.each(kept as usize);
        let left_out = taken.saturating_sub(kept);
        let to = indices.arg();
        select::mask::launch(
            &self.client,
            count,
            dim,
            to,
            stream,
            stride,
            phase,
            gap,
            left_out,
            kept,
            pattern,
        );
        self.write_back([indices]);
        Ok(())
    }

    fn gather(&self, x: View<'_>, indices: View<'_>, y: ViewMut<'_>) -> Result<()> {
        let (len, kept) = (u32_of(x.len()), u32_of(y.len()));
        let (x, indices, y) = (self.read(&x)?, self.read(&indices)?, self.write(&y)?);
        let (count, dim) = self.each(kept as usize);
        select::gather::launch(&self.client, count, dim, x.arg(), indices.arg(), y.arg(), len, kept);
        self.write_back([x, indices, y]);
        Ok(())
    }

    fn put(&self, x: View<'_>, indices: View<'_>, y: ViewMut<'_>) -> Result<()> {
        let (len, kept) = (u32_of(y.len()), u32_of(x.len()));
        let (x, indices, y) = (self.read(&x)?, self.read(&indices)?, self.write(&y)?);
        let (count, dim) = self.each(kept as usize);
        select::put::launch(&self.client, count, dim, x.arg(), indices.arg(), y.arg(), len, kept);
        self.write_back([x, indices, y]);
        Ok(())
    }
}
