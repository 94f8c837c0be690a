//! The tiles of a sparse attention on a device.

use std::ops::Range;

use farflung_base::{HeadTiles, Tile, TileLists};

use crate::{Device, Result, Tensor, TensorError, View};

/// Which tiles of queries and keys attention computes, and which pairs of them, for each head of queries.
///
/// All of it is one tensor of words, which kernels on every device read; positions in it are counted from its
/// start. Word 0 is the number `n` of tiles of a side, word `1 + h` the position of the layout of head `h`. A
/// layout has `n + 1` positions of lists by tiles of queries, and as many by tiles of keys: a list ends where
/// the next begins. A tile of a list has two words: the tile of keys (or of queries), and the position of its
/// pairs, or 0 if it has all. Pairs have two words for each query, one bit for each key, the lowest first.
#[derive(Debug)]
pub struct TileMask {
    words: Tensor,
    heads: usize,
    tokens: usize,
    /// Number of pairs that are computed for the queries before each, of all heads together; then of all.
    computed: Vec<u64>,
}

impl TileMask {
    /// Number of queries, and of keys, of a tile.
    pub const TILE: usize = 64;

    /// Copies the tiles to a device.
    ///
    /// Errors: those of the device; [`TensorError::Tiles`] if the tiles have another size than
    /// [`TileMask::TILE`], or more words than 32 bits can number.
    pub fn new(device: &Device, lists: &TileLists) -> Result<Self> {
        let refuse = |what, found, bound| Err(TensorError::Tiles { op: "tile_mask", what, found, bound });
        if lists.tile() != Self::TILE {
            return refuse("queries of a tile", lists.tile(), Self::TILE);
        }
        let words = words(lists);
        if u32::try_from(words.len()).is_err() {
            return refuse("words", words.len(), u32::MAX as usize);
        }
        let computed = (0..=lists.tokens()).map(|end| lists.computed(0..end)).collect();
        let words = device.tensor(&words, words.len())?;
        Ok(Self { words, heads: lists.heads(), tokens: lists.tokens(), computed })
    }

    /// Returns the number of heads of queries.
    #[must_use]
    pub const fn heads(&self) -> usize {
        self.heads
    }

    /// Returns the most tokens of a sequence, those of a cache included.
    #[must_use]
    pub const fn tokens(&self) -> usize {
        self.tokens
    }

    /// Returns the number of pairs that are computed for some queries, of all heads together: of each tile that
    /// has a pair, all up to the queries' own.
    #[must_use]
    pub fn computed(&self, queries: Range<usize>) -> u64 {
        let before = |query: usize| self.computed[query.min(self.tokens)];
        before(queries.end).saturating_sub(before(queries.start))
    }

    /// Returns the number of keys that are computed for the average of some queries of a head.
    pub(crate) fn keys_of_each(&self, queries: Range<usize>) -> usize {
        let rows = (self.heads * queries.len()) as u64;
        usize::try_from(self.computed(queries).checked_div(rows).unwrap_or(0)).unwrap_or(usize::MAX)
    }

    pub(crate) fn words(&self) -> View<'_> {
        self.words.view()
    }
}

/// Lays out tiles as words. Positions that do not fit are cut off; the caller refuses so many words.
fn words(lists: &TileLists) -> Vec<u32> {
    let (side, mut words) = (lists.side(), vec![lists.side() as u32]);
    words.resize(1 + lists.heads(), 0);
    let bits = words.len();
    words.extend(lists.bits().iter().flatten().flat_map(|word| [*word as u32, (*word >> 32) as u32]));
    let mut layouts = Vec::new();
    for layout in lists.layouts() {
        let start = words.len();
        layouts.push(start as u32);
        words.resize(start + 2 * (side + 1), 0);
        let of: [fn(&HeadTiles, usize) -> &[Tile]; 2] = [HeadTiles::of_queries, HeadTiles::of_keys];
        for (at, of) in of.into_iter().enumerate() {
            let first = start + at * (side + 1);
            for list in 0..side {
                words[first + list] = words.len() as u32;
                for tile in of(layout, list) {
                    let pairs =
                        tile.partial.map_or(0, |partial| bits + partial as usize * 2 * TileMask::TILE);
                    words.extend([tile.at, pairs as u32]);
                }
            }
            words[first + side] = words.len() as u32;
        }
    }
    for (head, layout) in lists.layout_of_heads().iter().enumerate() {
        words[1 + head] = layouts[*layout as usize];
    }
    words
}
