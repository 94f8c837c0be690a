//! Sizes, mask and scratch memory that the forward and the backward pass of one head share.

use std::ops::Range;

use super::super::tile::LINE;
use super::super::vector::LANES;
use crate::backend::cpu::simd::Isa;

/// Sizes of one attention head.
#[derive(Debug, Clone, Copy)]
pub(super) struct Head {
    pub(super) isa: Isa,
    pub(super) queries: usize,
    /// Number of keys.
    pub(super) keys: usize,
    /// Number of keys that the first query attends to. Each later query attends to one more, if there is one.
    pub(super) seen_first: usize,
    /// Number of keys, from the first one on, up to which all queries attend at least: more than `seen_first`
    /// if the first queries are of a prefix.
    pub(super) seen_least: usize,
    /// Number of keys up to its own that a query attends to at most.
    pub(super) window: usize,
    /// Whether all queries are of the same token.
    pub(super) is_shared: bool,
    /// Number of floats of a row.
    pub(super) width: usize,
}

impl Head {
    /// Returns the factor from products of queries and keys to scores.
    pub(super) fn score_scale(&self) -> f32 {
        1.0 / (self.width as f32).sqrt()
    }

    /// Returns the factor from products of queries and keys to exponents of 2.
    pub(super) fn exponent_scale(&self) -> f32 {
        std::f32::consts::LOG2_E * self.score_scale()
    }

    /// Returns the first query that attends to `key`, or to a later one.
    pub(super) fn first_query(&self, key: usize) -> usize {
        if key < self.seen_least { 0 } else { key - (self.seen_first - 1) }
    }

    /// Returns whether some queries attend to keys after their own, of those from `key` on.
    pub(super) fn looks_ahead(&self, key: usize) -> bool {
        self.seen_first < self.seen_least && key < self.seen_least
    }

    /// Returns whether some query does not attend to an earlier key.
    pub(super) fn is_windowed(&self) -> bool {
        self.window < self.keys
    }

    /// Returns the end of the queries that attend to `key`, or to a later one.
    pub(super) fn end_of_queries(&self, key: usize) -> usize {
        if !self.is_windowed() {
            return self.queries;
        }
        // A query's window begins at `seen_first + query - window`.
        let end = (key + self.window + 1).saturating_sub(self.seen_first);
        if self.is_shared && end > 0 { self.queries } else { end.min(self.queries) }
    }

    /// Returns which keys of a tile some queries attend to.
    pub(super) fn meeting(&self, queries: &Range<usize>, keys: &Range<usize>) -> Meeting {
        let from = keys.start.cast_signed();
        let first = (queries.start + self.seen_first).cast_signed() - from;
        let least = self.seen_least.cast_signed() - from;
        let hidden = if self.is_windowed() { first.saturating_sub_unsigned(self.window) } else { isize::MIN };
        let step = isize::from(!self.is_shared);
        let mut meeting =
            Meeting { first, least, keys: keys.len(), hidden, step, all: 0, whole: 0, padded: 0 };
        meeting.all = meeting.seen(queries.len() - 1);
        let is_whole = meeting.hidden(queries.len() - 1) == 0;
        meeting.whole = if is_whole { meeting.seen(0) / LANES * LANES } else { 0 };
        meeting.padded = meeting.all.next_multiple_of(LANES);
        meeting
    }
}

/// Which keys of a tile some queries attend to.
#[derive(Clone, Copy)]
pub(super) struct Meeting {
    /// Number of keys of the tile up to the first query's own, not yet clamped: it may be negative or greater
    /// than `keys`.
    first: isize,
    /// Number of keys of the tile up to which all queries attend at least, not yet clamped.
    least: isize,
    /// Number of keys of the tile.
    keys: usize,
    /// Number of keys of the tile before the first query's window, not yet clamped, and how many more there are
    /// for each later query.
    hidden: isize,
    step: isize,
    /// End of the keys that the last query attends to.
    pub(super) all: usize,
    /// Number of keys that all queries attend to, rounded down to whole vectors.
    pub(super) whole: usize,
    /// Number of keys that any query attends to, rounded up to whole vectors.
    pub(super) padded: usize,
}

impl Meeting {
    fn seen(self, row: usize) -> usize {
        (self.first + row.cast_signed()).max(self.least).clamp(0, self.keys.cast_signed()).cast_unsigned()
    }

    fn hidden(self, row: usize) -> usize {
        let hidden = self.hidden.saturating_add(row.cast_signed() * self.step);
        hidden.clamp(0, self.keys.cast_signed()).cast_unsigned()
    }

    /// Returns the same with weights for all keys of the tile: 0 for those that no query attends to.
    pub(super) fn with_all(self) -> Self {
        Self { padded: self.keys.next_multiple_of(LANES), ..self }
    }

    /// Returns whether query `row` attends to a key of the tile.
    pub(super) fn sees_any(self, row: usize) -> bool {
        self.hidden(row) < self.seen(row)
    }

    /// Returns the end of the keys that query `row` attends to, of the vector of keys that begins at `key`.
    pub(super) fn seen_of_vector(self, row: usize, key: usize) -> usize {
        self.seen(row).saturating_sub(key).min(LANES)
    }

    /// Returns how many keys at the start of that vector are before the query's window.
    pub(super) fn hidden_of_vector(self, row: usize, key: usize) -> usize {
        self.hidden(row).saturating_sub(key).min(LANES)
    }
}

/// Divides a range into pieces of length `len`; the last may be shorter.
pub(super) fn pieces(of: Range<usize>, len: usize) -> impl Iterator<Item = Range<usize>> {
    of.clone().step_by(len).map(move |i| i..of.end.min(i + len))
}

/// Divides the scratch memory into panels of the given lengths, each aligned to a cache line. They may contain
/// values of earlier calls.
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
