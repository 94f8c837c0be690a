//! Which keys the queries of a head attend to, and the part of them in a tile.

use std::ops::Range;

use super::super::tile::MOST_ROWS;
use super::super::vector::LANES;
use super::tiles::{MOST_TILES, TilesOfHead};

/// Which keys the queries of a head attend to.
#[derive(Debug, Clone, Copy)]
pub(super) enum Seen<'a> {
    /// Those up to its own, and those of its prefix.
    Causal(Causal),
    /// A range of keys for each query.
    Ranges(Ranges<'a>),
    /// The pairs of tiles.
    Tiles(TilesOfHead<'a>),
}

/// Queries of tokens that follow each other.
#[derive(Debug, Clone, Copy)]
pub(super) struct Causal {
    /// Number of keys that the first query attends to. Each later query attends to one more, if there is one.
    pub(super) first: usize,
    /// Number of keys, from the first one on, up to which all queries attend at least: more than `first` if
    /// the first queries are of a prefix.
    pub(super) least: usize,
    /// Number of keys up to its own that a query attends to at most.
    pub(super) window: usize,
    /// Whether all queries are of the same token.
    pub(super) is_shared: bool,
}

impl Causal {
    /// Returns the first query that attends to `key`, or to a later one.
    pub(super) fn first_query(self, key: usize) -> usize {
        if key < self.least { 0 } else { key - (self.first - 1) }
    }

    /// Returns the end of the queries whose window has `key`, or a later one.
    pub(super) fn end_of_queries(self, key: usize) -> usize {
        // A query's window begins at `first + query - window`.
        let end = (key + self.window + 1).saturating_sub(self.first);
        if self.is_shared && end > 0 { usize::MAX } else { end }
    }
}

/// The first key of each query, and the end of its keys. No key if the end is not above the first. The end
/// may be after that of all keys.
#[derive(Debug, Clone, Copy)]
pub(in super::super) struct Ranges<'a> {
    pub(super) from: &'a [u32],
    pub(super) to: &'a [u32],
}

impl Ranges<'_> {
    /// Returns the ranges of some queries.
    pub(super) fn of(self, queries: Range<usize>) -> Self {
        Self { from: &self.from[queries.clone()], to: &self.to[queries] }
    }

    /// Returns whether a query attends to some of these keys.
    pub(super) fn meets(self, query: usize, keys: &Range<usize>) -> bool {
        keys.start.max(self.from[query] as usize) < keys.end.min(self.to[query] as usize)
    }
}

/// Returns the place of the first bit that is set, and the end of the last; twice 0 if none is.
fn ends(bits: &[u64; MOST_TILES]) -> [usize; 2] {
    let width = u64::BITS as usize;
    let first = bits.iter().position(|&word| word != 0);
    let last = bits.iter().rposition(|&word| word != 0);
    let (Some(first), Some(last)) = (first, last) else { return [0; 2] };
    let from = first * width + bits[first].trailing_zeros() as usize;
    [from, (last + 1) * width - bits[last].leading_zeros() as usize]
}

/// Which keys of a tile some queries attend to.
#[derive(Clone, Copy)]
pub(super) struct Meeting {
    /// Of each query, the first key of the tile that it attends to, and the end of those.
    first: [usize; MOST_ROWS],
    end: [usize; MOST_ROWS],
    /// Of each query, the keys between those that it attends to, if `has_holes`: bits that are not set.
    bits: [[u64; MOST_TILES]; MOST_ROWS],
    has_holes: bool,
    /// Number of keys of the tile.
    keys: usize,
    /// End of the keys that any query attends to; 0 if no query attends to any.
    pub(super) all: usize,
    /// Number of keys that all queries attend to, rounded down to whole vectors.
    pub(super) whole: usize,
    /// Number of keys that any query attends to, rounded up to whole vectors.
    pub(super) padded: usize,
}

impl Meeting {
    /// Returns which keys of a tile a block of at most [`MOST_ROWS`] queries attends to.
    pub(super) fn new(seen: Seen<'_>, queries: &Range<usize>, keys: &Range<usize>) -> Self {
        let (rows, mut first, mut end) = (queries.len(), [0; MOST_ROWS], [0; MOST_ROWS]);
        let (mut bits, mut has_holes) = ([[0; MOST_TILES]; MOST_ROWS], false);
        let each = first[..rows].iter_mut().zip(&mut end[..rows]);
        match seen {
            Seen::Causal(causal) => {
                let step = usize::from(!causal.is_shared);
                for (row, (first, end)) in each.enumerate() {
                    let query = queries.start + row;
                    let to = (query + causal.first).max(causal.least);
                    *end = to.clamp(keys.start, keys.end) - keys.start;
                    let own = query * step + causal.first;
                    *first = own.saturating_sub(causal.window).clamp(keys.start, keys.end) - keys.start;
                }
            }
            Seen::Ranges(ranges) => {
                for (query, (first, end)) in queries.clone().zip(each) {
                    if ranges.meets(query, keys) {
                        *first = (ranges.from[query] as usize).max(keys.start) - keys.start;
                        *end = (ranges.to[query] as usize).min(keys.end) - keys.start;
                    }
                }
            }
            Seen::Tiles(tiles) => {
                for ((query, bits), (first, end)) in queries.clone().zip(&mut bits).zip(each) {
                    *bits = tiles.bits(query, keys);
                    [*first, *end] = ends(bits);
                    let count: u32 = bits.iter().map(|word| word.count_ones()).sum();
                    has_holes |= count as usize != *end - *first;
                }
            }
        }
        let all = end[..rows].iter().copied().max().unwrap_or(0);
        let least =
            if first[..rows].iter().all(|&first| first == 0) { end[..rows].iter().min() } else { None };
        let whole = least.map_or(0, |least| least / LANES * LANES);
        let padded = all.next_multiple_of(LANES);
        Self { first, end, bits, has_holes, keys: keys.len(), all, whole, padded }
    }

    /// Returns the same with weights for all keys of the tile: 0 for those that no query attends to.
    pub(super) fn with_all(self) -> Self {
        Self { padded: self.keys.next_multiple_of(LANES), ..self }
    }

    /// Replaces the products of pairs that are left out between others by `value`. Rows of `products` are
    /// `pitch` apart.
    pub(super) fn fill_holes(&self, rows: usize, products: &mut [f32], pitch: usize, value: f32) {
        if !self.has_holes {
            return;
        }
        for (row, bits) in self.bits[..rows].iter().enumerate() {
            let (first, end) = (self.first[row], self.end[row]);
            let products = &mut products[row * pitch..][..end];
            for (at, &word) in bits.iter().enumerate() {
                let mut holes = !word;
                while holes != 0 {
                    let key = at * u64::BITS as usize + holes.trailing_zeros() as usize;
                    if first < key && key < end {
                        products[key] = value;
                    }
                    holes &= holes - 1;
                }
            }
        }
    }

    /// Returns whether query `row` attends to a key of the tile.
    pub(super) fn sees_any(&self, row: usize) -> bool {
        self.first[row] < self.end[row]
    }

    /// Returns the end of the keys that query `row` attends to, of the vector of keys that begins at `key`.
    pub(super) fn seen_of_vector(&self, row: usize, key: usize) -> usize {
        self.end[row].saturating_sub(key).min(LANES)
    }

    /// Returns how many keys at the start of that vector are before those that the query attends to.
    pub(super) fn hidden_of_vector(&self, row: usize, key: usize) -> usize {
        self.first[row].saturating_sub(key).min(LANES)
    }
}
