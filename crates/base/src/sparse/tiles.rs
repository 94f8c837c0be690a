//! The pairs of queries and keys of a pattern as lists of the tiles that have some of them.

use std::collections::HashMap;
use std::ops::Range;

use super::pattern::AttentionPattern;
use super::rows::PatternHead;

/// The pairs of a tile: one bit for each key, in rows of words, one row for each query.
pub type TileBits = Vec<u64>;

/// A tile of a list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tile {
    /// The tile of keys in a list by queries, and of queries in a list by keys.
    pub at: u32,
    /// Number of its pairs in [`TileLists::bits`]; `None` if it has all pairs.
    pub partial: Option<u32>,
}

/// The tiles of a head, in lists by tiles of queries, and the same by tiles of keys.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeadTiles {
    by_queries: Lists,
    by_keys: Lists,
}

/// Lists of tiles, one after another.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Lists {
    /// Where each list begins, and the end of the last.
    starts: Vec<u32>,
    tiles: Vec<Tile>,
}

impl Lists {
    fn of(&self, list: usize) -> &[Tile] {
        &self.tiles[self.starts[list] as usize..self.starts[list + 1] as usize]
    }
}

/// The tiles of a layer's heads. Memory and time are proportional to the tiles that have pairs, and never to
/// the square of the number of tokens.
///
/// Source: `FlexAttention`'s block masks (Dong et al. 2024), with the pairs of partial tiles as bits, each
/// kind of tile once.
///
/// ```
/// use farflung_base::{AttentionPattern, TileLists};
///
/// let pattern = AttentionPattern::windowed(256).unwrap();
/// let tiles = TileLists::new(pattern, 0, 0..1, 16_384, 64);
/// assert_eq!((tiles.head(0).touched(), tiles.head(0).full()), (1_270, 762));
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TileLists {
    tokens: usize,
    tile: usize,
    /// Of each head, which of `layouts` it has.
    heads: Vec<u32>,
    layouts: Vec<HeadTiles>,
    bits: Vec<TileBits>,
    /// Number of pairs of the queries before each, of all heads together; then of all.
    pairs: Vec<u64>,
    /// Likewise of the pairs up to each query's own in tiles that have some: those that kernels compute.
    computed: Vec<u64>,
}

impl HeadTiles {
    /// Returns the tiles of keys of a tile of queries, ascending.
    #[must_use]
    pub fn of_queries(&self, tile: usize) -> &[Tile] {
        self.by_queries.of(tile)
    }

    /// Returns the tiles of queries of a tile of keys, ascending.
    #[must_use]
    pub fn of_keys(&self, tile: usize) -> &[Tile] {
        self.by_keys.of(tile)
    }

    /// Returns the number of tiles that have some pair.
    #[must_use]
    pub const fn touched(&self) -> usize {
        self.by_queries.tiles.len()
    }

    /// Returns the number of tiles that have all pairs.
    #[must_use]
    pub fn full(&self) -> usize {
        self.by_queries.tiles.iter().filter(|tile| tile.partial.is_none()).count()
    }
}

impl TileLists {
    /// Makes those of some heads of a layer, for up to `tokens` tokens, in tiles of `tile` queries and keys.
    ///
    /// # Panics
    /// If `tile` is 0, or there are 2^32 tokens or more.
    #[must_use]
    pub fn new(pattern: AttentionPattern, layer: u32, heads: Range<u32>, tokens: usize, tile: usize) -> Self {
        let kept = |head: u32| {
            let of = pattern.head(layer, head);
            let mut keys = Vec::new();
            move |query: u64, mark: &mut dyn FnMut(Range<u64>)| mark_keys(of, query, &mut keys, mark)
        };
        Self::of_rule(heads, |head| pattern.same_as_head(head), kept, tokens, tile)
    }

    /// Makes the tiles of any rule: `same` is the first head with the same pairs, and `kept` gives ranges of
    /// the keys of a query, each ascending; they may overlap.
    fn of_rule<K: FnMut(u64, &mut dyn FnMut(Range<u64>))>(
        heads: Range<u32>,
        same: impl Fn(u32) -> u32,
        kept: impl Fn(u32) -> K,
        tokens: usize,
        tile: usize,
    ) -> Self {
        assert!(tile > 0 && u32::try_from(tokens).is_ok(), "tokens are numbered by 32 bits");
        let mut known: HashMap<u32, u32> = HashMap::new();
        let mut made = Maker::new(tokens, tile);
        let mut layouts = Vec::new();
        let mut counts: Vec<RowCounts> = Vec::new();
        let mut of_heads = Vec::new();
        for head in heads {
            let at = *known.entry(same(head)).or_insert_with(|| {
                let (layout, count) = made.layout(kept(head));
                layouts.push(layout);
                counts.push(count);
                layouts.len() as u32 - 1
            });
            of_heads.push(at);
        }
        let sums = |of: fn(&RowCounts) -> &[u32]| {
            let mut sums = vec![0; tokens + 1];
            for query in 0..tokens {
                let own: u64 = of_heads.iter().map(|&at| u64::from(of(&counts[at as usize])[query])).sum();
                sums[query + 1] = sums[query] + own;
            }
            sums
        };
        let (pairs, computed) = (sums(|counts| &counts.kept), sums(|counts| &counts.computed));
        Self { tokens, tile, heads: of_heads, layouts, bits: made.bits, pairs, computed }
    }

    /// Makes the tiles of heads whose pairs, of a query and a key up to its own, are given one by one: for
    /// masks that no pattern has. It asks for all pairs, so its time is proportional to the square of `tokens`.
    #[must_use]
    pub fn of_pairs(
        heads: u32,
        keeps: impl Fn(u32, usize, usize) -> bool,
        tokens: usize,
        tile: usize,
    ) -> Self {
        let keeps = &keeps;
        let kept = |head: u32| {
            move |query: u64, mark: &mut dyn FnMut(Range<u64>)| {
                for key in (0..=query).filter(|&key| keeps(head, query as usize, key as usize)) {
                    mark(key..key + 1);
                }
            }
        };
        Self::of_rule(0..heads, |head| head, kept, tokens, tile)
    }

    /// Returns the most tokens of a sequence.
    #[must_use]
    pub const fn tokens(&self) -> usize {
        self.tokens
    }

    /// Returns the number of queries, and of keys, of a tile.
    #[must_use]
    pub const fn tile(&self) -> usize {
        self.tile
    }

    /// Returns the number of heads.
    #[must_use]
    pub const fn heads(&self) -> usize {
        self.heads.len()
    }

    /// Returns the number of tiles of queries, and of keys.
    #[must_use]
    pub const fn side(&self) -> usize {
        self.tokens.div_ceil(self.tile)
    }

    /// Returns, for each head, which of the layouts it has.
    #[must_use]
    pub fn layout_of_heads(&self) -> &[u32] {
        &self.heads
    }

    /// Returns the different layouts.
    #[must_use]
    pub fn layouts(&self) -> &[HeadTiles] {
        &self.layouts
    }

    /// Returns the tiles of a head.
    ///
    /// # Panics
    /// If there is no such head.
    #[must_use]
    pub fn head(&self, head: usize) -> &HeadTiles {
        &self.layouts[self.heads[head] as usize]
    }

    /// Returns the pairs of the different partial tiles.
    #[must_use]
    pub fn bits(&self) -> &[TileBits] {
        &self.bits
    }

    /// Returns the number of words of a row of a partial tile.
    #[must_use]
    pub const fn words(&self) -> usize {
        self.tile.div_ceil(64)
    }

    /// Returns the number of pairs of some queries, of all heads together. Queries beyond the last have none.
    #[must_use]
    pub fn pairs(&self, queries: Range<usize>) -> u64 {
        self.between(&self.pairs, queries)
    }

    /// Returns the number of pairs that kernels compute for some queries, of all heads together: of each tile
    /// that has a pair, all up to the queries' own.
    #[must_use]
    pub fn computed(&self, queries: Range<usize>) -> u64 {
        self.between(&self.computed, queries)
    }

    fn between(&self, sums: &[u64], queries: Range<usize>) -> u64 {
        let before = |query: usize| sums[query.min(self.tokens)];
        before(queries.end).saturating_sub(before(queries.start))
    }
}

/// Numbers of pairs of each query of a head.
#[derive(Debug)]
struct RowCounts {
    kept: Vec<u32>,
    computed: Vec<u32>,
}

impl AttentionPattern {
    /// Returns a number of words of 32 bits that the lists of some heads do not exceed, without making them:
    /// what a text from elsewhere may ask for is known before.
    #[must_use]
    pub fn most_words(self, heads: u32, tokens: usize, tile: usize) -> u64 {
        let (tile, side) = (tile.max(1) as u64, tokens.div_ceil(tile.max(1)) as u64);
        let layouts = (0..heads).filter(|&head| self.same_as_head(head) == head).count() as u64;
        let most = self.most_tiles(tile);
        let moving = side.saturating_mul(most.of_each).saturating_add(side * most.whole.min(side));
        let tiles = moving.min(side * (side + 1) / 2);
        // Two words in each of both lists; drawn pairs differ from tile to tile.
        let each = if self.differs_by_layer() { 4 + tile * tile.div_ceil(32) } else { 4 };
        layouts.saturating_mul(tiles.saturating_mul(each).saturating_add(4 * side))
    }
}

/// Calls `mark` with ranges of a query's keys.
fn mark_keys(
    of: PatternHead,
    query: u64,
    keys: &mut Vec<super::rows::Progression>,
    mark: &mut dyn FnMut(Range<u64>),
) {
    of.keys(query, keys);
    for progression in &*keys {
        let mut from = progression.next(0);
        while let Some(start) = from {
            let end = progression.end_of_range(start);
            mark(start..end);
            from = progression.next(end);
        }
    }
}

/// Makes layouts whose partial tiles are stored once.
struct Maker {
    tokens: usize,
    tile: usize,
    bits: Vec<TileBits>,
    known: HashMap<TileBits, u32>,
    /// For each tile of keys, its slot among those of the current tile of queries, plus 1; else 0.
    slots: Vec<u32>,
}

impl Maker {
    fn new(tokens: usize, tile: usize) -> Self {
        let slots = vec![0; tokens.div_ceil(tile)];
        Self { tokens, tile, bits: Vec::new(), known: HashMap::new(), slots }
    }

    /// Returns the tiles of a head, and the numbers of pairs of each query.
    fn layout(&mut self, mut kept: impl FnMut(u64, &mut dyn FnMut(Range<u64>))) -> (HeadTiles, RowCounts) {
        let (tile, words) = (self.tile, self.tile.div_ceil(64));
        let mut lists = Lists { starts: vec![0], tiles: Vec::new() };
        let mut counts = RowCounts { kept: vec![0; self.tokens], computed: vec![0; self.tokens] };
        let mut touched: Vec<(u32, TileBits)> = Vec::new();
        for first in (0..self.tokens).step_by(tile) {
            let end = self.tokens.min(first + tile);
            for (query, count) in (first..end).zip(&mut counts.kept[first..end]) {
                let row = (query - first) * words;
                kept(query as u64, &mut |keys| {
                    for at in keys.start as usize / tile..(keys.end as usize).div_ceil(tile) {
                        let slot = &mut self.slots[at];
                        if *slot == 0 {
                            touched.push((at as u32, vec![0; tile * words]));
                            *slot = touched.len() as u32;
                        }
                        let bits = &mut touched[*slot as usize - 1].1[row..row + words];
                        let within = |key: u64| (key as usize).saturating_sub(at * tile).min(tile);
                        set(bits, within(keys.start)..within(keys.end));
                    }
                });
                let of_row = touched.iter().flat_map(|(_, bits)| &bits[row..row + words]);
                *count = of_row.map(|word| word.count_ones()).sum();
            }
            for (query, count) in (first..end).zip(&mut counts.computed[first..end]) {
                let up_to_own =
                    |(at, _): &(u32, TileBits)| (query + 1 - *at as usize * tile).min(tile) as u32;
                *count = touched.iter().map(up_to_own).sum();
            }
            touched.sort_unstable_by_key(|(at, _)| *at);
            for (at, bits) in touched.drain(..) {
                self.slots[at as usize] = 0;
                let partial = if self.is_full(&bits, first, at as usize * tile) {
                    None
                } else {
                    let number = self.bits.len() as u32;
                    let known = self.known.entry(bits).or_insert_with_key(|bits| {
                        self.bits.push(bits.clone());
                        number
                    });
                    Some(*known)
                };
                lists.tiles.push(Tile { at, partial });
            }
            lists.starts.push(lists.tiles.len() as u32);
        }
        let by_keys = self.transpose(&lists);
        (HeadTiles { by_queries: lists, by_keys }, counts)
    }

    /// Returns whether a tile has all pairs of the queries and keys that there are.
    fn is_full(&self, bits: &[u64], first_query: usize, first_key: usize) -> bool {
        let (tile, words) = (self.tile, self.tile.div_ceil(64));
        let [queries, keys] = [first_query, first_key].map(|first| tile.min(self.tokens - first));
        let mut row = vec![0; words];
        set(&mut row, 0..keys);
        bits.chunks_exact(words).take(queries).all(|bits| bits == row)
    }

    /// Returns the same tiles in lists by keys.
    fn transpose(&self, lists: &Lists) -> Lists {
        let side = self.slots.len();
        let mut starts = vec![0; side + 1];
        for tile in &lists.tiles {
            starts[tile.at as usize + 1] += 1;
        }
        for at in 0..side {
            starts[at + 1] += starts[at];
        }
        let mut next = starts.clone();
        let mut tiles = vec![Tile { at: 0, partial: None }; lists.tiles.len()];
        for queries in 0..side {
            for tile in lists.of(queries) {
                let to = &mut next[tile.at as usize];
                tiles[*to as usize] = Tile { at: queries as u32, partial: tile.partial };
                *to += 1;
            }
        }
        Lists { starts, tiles }
    }
}

/// Sets a range of bits.
fn set(words: &mut [u64], range: Range<usize>) {
    for (at, word) in words.iter_mut().enumerate() {
        let [from, to] = [range.start, range.end].map(|end| end.saturating_sub(at * 64).min(64));
        if from < to {
            *word |= (u64::MAX >> (64 - (to - from))) << from;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(text: &str, tokens: usize, tile: usize) -> (usize, usize) {
        let tiles = TileLists::new(text.parse().unwrap(), 0, 0..1, tokens, tile);
        (tiles.head(0).touched(), tiles.head(0).full())
    }

    #[test]
    fn a_window_has_the_tiles_of_the_facts() {
        for (tile, touched, full, all) in
            [(16, 17_272, 15_240, 524_800), (64, 1_270, 762, 32_896), (128, 381, 127, 8_256)]
        {
            assert_eq!(counts("window:256", 16_384, tile), (touched, full));
            assert_eq!(counts("full", 16_384, tile).0, all);
        }
        let of = |text: &str| TileLists::new(text.parse().unwrap(), 0, 0..1, 16_384, 64).pairs(0..16_384);
        assert_eq!([of("window:256"), of("full")], [4_161_664, 134_225_920]);
        assert_eq!(counts("fixed:4,1", 16_384, 16).0, 133_120);
        let computed =
            |text: &str| TileLists::new(text.parse().unwrap(), 0, 0..1, 16_384, 64).computed(0..16_384);
        // All of four tiles, and half of the own one, of each query but the first ones.
        assert_eq!(
            [computed("window:256"), computed("full")],
            [(1_270 - 256) * 4_096 + 256 * 2_080, 134_225_920]
        );
    }

    /// All lists against the rule, pair by pair.
    #[test]
    fn tiles_have_the_pairs_of_the_rule() {
        for text in [
            "full",
            "window:1",
            "window:37",
            "window:20+sinks:3",
            "strided:7",
            "strided:80",
            "fixed:3,1,3+block:5",
            "fixed:4,2+block:16",
            "variable:1,2,3+global:0,2+random:2+block:9",
            "bigbird:3,1,2+block:8+seed:4",
        ] {
            let pattern: AttentionPattern = text.parse().unwrap();
            for (tokens, tile) in [(1, 4), (130, 16), (150, 64), (200, 70)] {
                let (layer, heads) = (2, 1..4);
                let tiles = TileLists::new(pattern, layer, heads.clone(), tokens, tile);
                let mut pairs = 0;
                for head in heads {
                    let of = tiles.head(head as usize - 1);
                    for query in 0..tokens {
                        for key in 0..tokens {
                            let (q, k) = (query / tile, key / tile);
                            let kept = |list: &[Tile], at: usize| {
                                let Some(found) = list.iter().find(|tile| tile.at as usize == at) else {
                                    return false;
                                };
                                let Some(partial) = found.partial else { return true };
                                let column = key % tile;
                                let row = (query % tile) * tiles.words();
                                tiles.bits()[partial as usize][row + column / 64] >> (column % 64) & 1 == 1
                            };
                            let want = pattern.keeps(layer, head, query as u64, key as u64);
                            assert_eq!(kept(of.of_queries(q), k), want, "{text} {query} {key}");
                            assert_eq!(kept(of.of_keys(k), q), want, "{text} {query} {key}");
                            pairs += u64::from(want);
                        }
                    }
                    assert!(of.of_queries(0).is_sorted_by_key(|tile| tile.at));
                }
                assert_eq!(tiles.pairs(0..tokens), pairs, "{text}");
            }
        }
    }

    /// What lists may need is known without them, and is not far from what they do.
    #[test]
    fn the_most_words_of_lists_are_known() {
        for (text, times) in [
            ("window:256+sinks:4", 2),
            ("strided:64", 3),
            ("fixed:4,1,4", 16),
            ("variable:1,2,3+global:0", 3),
            ("bigbird:3,1,0+block:64", 3),
            ("variable:1+random:256+block:1", 5),
            // Tiles with drawn blocks are often alike.
            ("variable:1,2,3+global:0+random:2", u64::MAX),
            ("bigbird:3,1,3+block:64", u64::MAX),
            ("bigbird:3,1,2+block:9", u64::MAX),
        ] {
            let pattern: AttentionPattern = text.parse().unwrap();
            for (tokens, tile) in [(4096, 64), (1000, 32)] {
                let tiles = TileLists::new(pattern, 0, 0..4, tokens, tile);
                let kinds = tiles.bits().len() * tile * tile.div_ceil(32);
                let of = |layout: &HeadTiles| 4 * layout.touched() + 4 * tiles.side();
                let lists: usize = tiles.layouts().iter().map(of).sum();
                let drawn = if pattern.differs_by_layer() { kinds } else { 0 };
                let (words, most) = ((lists + drawn) as u64, pattern.most_words(4, tokens, tile));
                assert!(words <= most && most / times <= words, "{text}: {words} of {most}");
            }
        }
        let large: AttentionPattern = "variable:1+random:256+block:1".parse().unwrap();
        assert!(large.most_words(4, 1 << 16, 64) > 1 << 27);
        assert_eq!(AttentionPattern::FULL.most_words(u32::MAX, 0, 64), 0);
    }

    /// Nothing grows with the square of the number of tokens: a window has few kinds of partial tiles.
    #[test]
    fn partial_tiles_are_stored_once() {
        let tiles = TileLists::new(AttentionPattern::windowed(256).unwrap(), 0, 0..12, 1 << 17, 64);
        assert_eq!(tiles.bits().len(), 2);
        assert_eq!(tiles.layouts().len(), 1);
        assert_eq!(tiles.head(11).touched(), 5 * 2048 - 10);
        assert!(TileLists::new("strided:128".parse().unwrap(), 0, 0..1, 4096, 64).bits().len() <= 6);
    }

    #[test]
    fn heads_without_tokens_and_rows_without_keys() {
        let none = TileLists::new(AttentionPattern::FULL, 0, 0..2, 0, 64);
        assert_eq!((none.side(), none.head(1).touched(), none.pairs(0..9)), (0, 0, 0));
        let odd = TileLists::of_pairs(1, |_, query, key| query % 2 == 1 && key == 0, 100, 16);
        assert_eq!((odd.head(0).touched(), odd.pairs(0..100)), (7, 50));
        assert!(odd.head(0).of_keys(1).is_empty());
    }
}
