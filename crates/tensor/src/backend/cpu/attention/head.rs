//! What both directions of one head's attention share: its sizes, its mask and its scratch. It refuses to know
//! batches, threads and who owns the rows that are written.

use std::ops::Range;

use super::super::tile::LINE;
use super::super::vector::LANES;
use crate::backend::cpu::simd::Isa;

/// Sizes of one head.
#[derive(Debug, Clone, Copy)]
pub(super) struct Head {
    pub(super) isa: Isa,
    pub(super) queries: usize,
    /// At least `queries`; query `i` sees the keys up to `keys - queries + i`.
    pub(super) keys: usize,
    /// Floats of a row.
    pub(super) width: usize,
}

impl Head {
    /// What products of queries and keys are multiplied by.
    pub(super) fn score_scale(&self) -> f32 {
        1.0 / (self.width as f32).sqrt()
    }

    /// From products of queries and keys to exponents of 2.
    pub(super) fn exponent_scale(&self) -> f32 {
        std::f32::consts::LOG2_E * self.score_scale()
    }

    /// The first query that sees `key`.
    pub(super) fn first_query(&self, key: usize) -> usize {
        key.saturating_sub(self.keys - self.queries)
    }

    /// What some queries see of a tile of keys.
    pub(super) fn meeting(&self, queries: &Range<usize>, keys: &Range<usize>) -> Meeting {
        let first = (queries.start + self.keys - self.queries + 1).cast_signed() - keys.start.cast_signed();
        let mut meeting = Meeting { first, keys: keys.len(), all: 0, whole: 0, padded: 0 };
        meeting.all = meeting.seen(queries.len() - 1);
        meeting.whole = meeting.seen(0) / LANES * LANES;
        meeting.padded = meeting.all.next_multiple_of(LANES);
        meeting
    }
}

/// Where some queries meet a tile of keys.
#[derive(Clone, Copy)]
pub(super) struct Meeting {
    /// Keys of the tile that the first query sees, if it could be negative or more than the tile has.
    first: isize,
    /// Keys of the tile.
    keys: usize,
    /// Keys that the last query sees.
    pub(super) all: usize,
    /// Keys that all queries see, in whole vectors.
    pub(super) whole: usize,
    /// Keys that any query sees, in whole vectors.
    pub(super) padded: usize,
}

impl Meeting {
    fn seen(self, row: usize) -> usize {
        (self.first + row.cast_signed()).clamp(0, self.keys.cast_signed()).cast_unsigned()
    }

    /// Keys that query `row` sees of the vector of them from `key` on.
    pub(super) fn seen_of_vector(self, row: usize, key: usize) -> usize {
        self.seen(row).saturating_sub(key).min(LANES)
    }
}

/// Cuts a range into pieces of `len`; the last may be shorter.
pub(super) fn pieces(of: Range<usize>, len: usize) -> impl Iterator<Item = Range<usize>> {
    of.clone().step_by(len).map(move |i| i..of.end.min(i + len))
}

/// Cuts the scratch into panels of the given lengths, each beginning with a cache line; what they hold is left
/// over from earlier calls.
pub(super) fn panels<const N: usize>(scratch: &mut Vec<f32>, lengths: [usize; N]) -> [&mut [f32]; N] {
    let lengths = lengths.map(|len| len.next_multiple_of(LINE));
    let total = lengths.iter().sum::<usize>() + LINE;
    if scratch.len() < total {
        scratch.resize(total, 0.0);
    }
    let skip = scratch.as_ptr().align_offset(size_of::<[f32; LINE]>());
    let mut rest = &mut scratch[skip..];
    lengths.map(|len| {
        let (panel, after) = std::mem::take(&mut rest).split_at_mut(len);
        rest = after;
        panel
    })
}
