//! The tiles of a head of a sparse attention.

use std::ops::Range;

use super::super::IN_HOST;
use crate::TileMask;

/// Number of queries, and of keys, of a tile.
const TILE: usize = TileMask::TILE;

/// Most tiles of keys that a kernel packs together.
pub(super) const MOST_TILES: usize = 4;

/// The words of a [`TileMask`].
#[derive(Debug, Clone, Copy)]
pub(in super::super) struct Tiles<'a> {
    words: &'a [u32],
}

/// The tiles of one head, and its queries.
#[derive(Debug, Clone, Copy)]
pub(super) struct TilesOfHead<'a> {
    words: &'a [u32],
    /// Number of tiles of a side.
    side: usize,
    /// Position of the head's layout.
    layout: usize,
    /// Number of keys before that of the first query.
    before: usize,
    queries: usize,
}

/// A tile of keys, or of queries, and the position of its pairs, or 0 if it has all.
type Entry = [u32; 2];

impl<'a> Tiles<'a> {
    pub(in super::super) fn new(mask: &'a TileMask) -> Self {
        Self { words: mask.words().host().expect(IN_HOST) }
    }

    /// Returns the tiles of a head of queries that has `before` keys before that of its first query.
    pub(super) fn of_head(self, head: usize, before: usize, queries: usize) -> TilesOfHead<'a> {
        let Self { words } = self;
        let (side, layout) = (words[0] as usize, words[1 + head] as usize);
        TilesOfHead { words, side, layout, before, queries }
    }
}

impl<'a> TilesOfHead<'a> {
    fn list(self, at: usize) -> &'a [Entry] {
        let [from, to] = [at, at + 1].map(|at| self.words[at] as usize);
        self.words[from..to].as_chunks().0
    }

    /// Returns the tiles of queries of a tile of keys, ascending.
    fn of_keys(self, tile: usize) -> &'a [Entry] {
        self.list(self.layout + self.side + 1 + tile)
    }

    /// Divides queries where tiles begin.
    pub(super) fn pieces(self, queries: Range<usize>) -> impl Iterator<Item = Range<usize>> {
        let before = self.before;
        let tiles = (before + queries.start) / TILE..(before + queries.end).div_ceil(TILE);
        tiles.map(move |tile| {
            let [from, to] = [tile, tile + 1].map(|tile| (tile * TILE).saturating_sub(before));
            from.max(queries.start)..to.min(queries.end)
        })
    }

    /// Returns the number of keys before that of the first query.
    pub(super) const fn before(self) -> usize {
        self.before
    }

    /// Returns the ranges of queries that attend to some of these keys, in whole tiles, ascending and apart
    /// from each other. `keys` begin with a tile and are of at most [`MOST_TILES`].
    pub(super) fn queries_of(self, keys: &Range<usize>) -> QueriesOfKeys<'a> {
        let mut lists: [&[Entry]; MOST_TILES] = Default::default();
        for (list, tile) in lists.iter_mut().zip(keys.start / TILE..keys.end.div_ceil(TILE)) {
            *list = self.of_keys(tile);
        }
        let first = keys.start.saturating_sub(self.before);
        QueriesOfKeys { lists, first, before: self.before, end: self.queries }
    }

    /// Returns the tiles of `keys` that the tiles of a block of queries have, as runs of keys. Of
    /// [`MOST_TILES`] tiles there are at most two runs. For queries of one tile they do not depend on the
    /// block.
    pub(super) fn runs_of_keys(self, block: &Range<usize>, keys: &Range<usize>) -> [Range<usize>; 2] {
        let mut any = [false; MOST_TILES];
        let first = (keys.start / TILE) as u32;
        for tile in (self.before + block.start) / TILE..(self.before + block.end).div_ceil(TILE) {
            let list = self.list(self.layout + tile);
            let from = list.partition_point(|[at, _]| *at < first);
            for &[at, _] in &list[from..] {
                let Some(any) = any.get_mut((at - first) as usize) else { break };
                *any = true;
            }
        }
        let run = |from: usize| {
            let first = (from..MOST_TILES).find(|&at| any[at]).unwrap_or(MOST_TILES);
            let end = (first..MOST_TILES).find(|&at| !any[at]).unwrap_or(MOST_TILES);
            (first, end)
        };
        let (first, second) = (run(0), run(run(0).1));
        [first, second].map(|(from, end)| {
            let of = |tile: usize| (keys.start + tile * TILE).min(keys.end);
            of(from)..of(end)
        })
    }

    /// Returns which of some keys a query attends to, one bit for each, the lowest first.
    pub(super) fn bits(self, query: usize, keys: &Range<usize>) -> [u64; MOST_TILES] {
        let mut bits = [0; MOST_TILES];
        let position = self.before + query;
        let list = self.list(self.layout + position / TILE);
        let tile = (keys.start / TILE) as u32;
        let from = list.partition_point(|[at, _]| *at < tile);
        for &[at, pairs] in &list[from..] {
            let Some(bits) = bits.get_mut((at - tile) as usize) else { break };
            *bits = if pairs == 0 {
                u64::MAX
            } else {
                let row = pairs as usize + position % TILE * 2;
                u64::from(self.words[row]) | u64::from(self.words[row + 1]) << 32
            };
        }
        // A tile that has all of its pairs has none of keys after the query's, or after the last of `keys`.
        let seen = keys.end.min(position + 1).saturating_sub(keys.start);
        for (at, bits) in bits.iter_mut().enumerate() {
            let seen = seen.saturating_sub(at * TILE).min(TILE);
            *bits &= if seen == 0 { 0 } else { u64::MAX >> (TILE - seen) };
        }
        bits
    }
}

/// See [`TilesOfHead::queries_of`].
#[derive(Debug, Clone)]
pub(super) struct QueriesOfKeys<'a> {
    lists: [&'a [Entry]; MOST_TILES],
    /// The first query that may attend to the keys, and the end of all queries.
    first: usize,
    end: usize,
    before: usize,
}

impl Iterator for QueriesOfKeys<'_> {
    type Item = Range<usize>;

    fn next(&mut self) -> Option<Range<usize>> {
        loop {
            let first_of = |list: &&[Entry]| list.first().map(|[at, _]| *at);
            let from = self.lists.iter().filter_map(first_of).min()?;
            let mut end = from;
            while self.lists.iter().filter_map(first_of).any(|at| at == end) {
                for list in &mut self.lists {
                    if first_of(list) == Some(end) {
                        *list = &list[1..];
                    }
                }
                end += 1;
            }
            let of = |tile: u32| (tile as usize * TILE).saturating_sub(self.before);
            let range = of(from).max(self.first)..of(end).min(self.end);
            if !range.is_empty() {
                return Some(range);
            }
        }
    }
}
