//! Sizes and scratch memory that the forward and the backward pass of one head share.

use std::ops::Range;

use super::super::simd::Isa;
use super::super::tile::LINE;
use super::seen::{Causal, Seen};
use super::tiles::QueriesOfKeys;

/// Sizes of one attention head.
#[derive(Debug, Clone, Copy)]
pub(super) struct Head<'a> {
    pub(super) isa: Isa,
    pub(super) queries: usize,
    /// Number of keys.
    pub(super) keys: usize,
    pub(super) seen: Seen<'a>,
    /// Number of floats of a row.
    pub(super) width: usize,
}

impl<'a> Head<'a> {
    /// Returns the factor from products of queries and keys to scores.
    pub(super) fn score_scale(&self) -> f32 {
        1.0 / (self.width as f32).sqrt()
    }

    /// Returns the factor from products of queries and keys to exponents of 2.
    pub(super) fn exponent_scale(&self) -> f32 {
        std::f32::consts::LOG2_E * self.score_scale()
    }

    /// Returns the queries of `of` from the first to the last one that attends to some of these keys. With
    /// tiles, from the first that may, to the last of `of`.
    pub(super) fn meets(&self, of: &Range<usize>, keys: &Range<usize>) -> Range<usize> {
        match self.seen {
            Seen::Causal(causal) => {
                let start = causal.first_query(keys.start);
                let end = if self.skips_keys() { causal.end_of_queries(keys.end - 1) } else { usize::MAX };
                start.max(of.start)..end.min(of.end)
            }
            Seen::Ranges(ranges) => {
                let meets = |query: &usize| ranges.meets(*query, keys);
                let start = of.clone().find(meets).unwrap_or(of.end);
                start..(start..of.end).rfind(meets).map_or(start, |last| last + 1)
            }
            Seen::Tiles(tiles) => keys.start.saturating_sub(tiles.before()).max(of.start)..of.end,
        }
    }

    /// Returns blocks of at most `rows` of some queries. With tiles, a block has queries of one tile, so that
    /// an output does not depend on the other queries of the op.
    pub(super) fn blocks(
        &self,
        queries: Range<usize>,
        rows: usize,
    ) -> impl Iterator<Item = Range<usize>> + use<'a> {
        let (tiles, one) = match self.seen {
            Seen::Tiles(tiles) => (Some(tiles.pieces(queries)), None),
            Seen::Causal(_) | Seen::Ranges(_) => (None, Some(queries)),
        };
        one.into_iter().chain(tiles.into_iter().flatten()).flat_map(move |queries| pieces(queries, rows))
    }

    /// Returns ranges of queries, ascending, that have all which attend to some of these keys: with tiles,
    /// those of the tiles, else one.
    pub(super) fn queries_of(
        &self,
        keys: &Range<usize>,
    ) -> impl Iterator<Item = Range<usize>> + Clone + use<'a> {
        let (tiles, one) = match self.seen {
            Seen::Tiles(tiles) => (Some(tiles.queries_of(keys)), None),
            Seen::Causal(_) | Seen::Ranges(_) => (None, Some(self.meets(&(0..self.queries), keys))),
        };
        let tiles = tiles.into_iter().flat_map(QueriesOfKeys::into_iter);
        one.into_iter().filter(|range| !range.is_empty()).chain(tiles)
    }

    /// Returns whether some query does not attend to a key that is before one that it attends to.
    pub(super) fn skips_keys(&self) -> bool {
        match self.seen {
            Seen::Causal(causal) => causal.window < self.keys,
            Seen::Ranges(_) | Seen::Tiles(_) => true,
        }
    }

    /// Returns the keys of a tile that a block of queries attends to, in runs without the tiles of a mask that
    /// the queries do not have; all keys if there are no tiles.
    pub(super) fn runs_of_keys(
        &self,
        block: &Range<usize>,
        keys: &Range<usize>,
    ) -> impl Iterator<Item = Range<usize>> + use<> {
        let runs = match self.seen {
            Seen::Tiles(tiles) => tiles.runs_of_keys(block, keys),
            Seen::Causal(_) | Seen::Ranges(_) => [keys.clone(), 0..0],
        };
        runs.into_iter().filter(|run| !run.is_empty())
    }

    /// Returns whether tiles say which keys queries attend to.
    pub(super) fn has_tiles(&self) -> bool {
        matches!(self.seen, Seen::Tiles(_))
    }

    /// Returns whether a query may attend to a key, from `key` on, that an earlier one of its block does not
    /// attend to, other than its own.
    pub(super) fn looks_ahead(&self, key: usize) -> bool {
        match self.seen {
            Seen::Causal(Causal { first, least, .. }) => first < least && key < least,
            Seen::Ranges(_) | Seen::Tiles(_) => true,
        }
    }

    /// Returns the number of keys that are not of the queries' own tokens.
    pub(super) fn common(&self) -> usize {
        match self.seen {
            Seen::Causal(_) | Seen::Tiles(_) => self.keys - self.queries,
            Seen::Ranges(_) => self.keys,
        }
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
