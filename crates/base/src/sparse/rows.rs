//! The keys of one query, as few progressions of ranges.

use std::ops::Range;

use super::pattern::AttentionPattern;
use super::shape::Shape;
use crate::Philox;

/// Ranges of `len` keys that begin at `start`, `start + step`, ..., of which the part before `end` counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Progression {
    start: u64,
    len: u64,
    step: u64,
    end: u64,
}

impl Progression {
    fn one(range: Range<u64>) -> Self {
        Self {
            start: range.start,
            len: range.end.saturating_sub(range.start),
            step: u64::MAX,
            end: range.end,
        }
    }

    /// Returns the first of its keys that is not before `key`.
    pub(super) fn next(self, key: u64) -> Option<u64> {
        let found = if key <= self.start {
            self.start
        } else {
            let (turn, into) = ((key - self.start) / self.step, (key - self.start) % self.step);
            if into < self.len { key } else { self.start.checked_add((turn + 1).checked_mul(self.step)?)? }
        };
        (self.len > 0 && found < self.end).then_some(found)
    }

    /// Returns the end of the keys that follow each other from `key` on, which is one of its keys.
    pub(super) fn end_of_range(self, key: u64) -> u64 {
        if self.len >= self.step {
            return self.end;
        }
        let into = (key - self.start) % self.step;
        (key - into).saturating_add(self.len).min(self.end)
    }
}

/// A head of queries of a layer, and its pattern.
#[derive(Debug, Clone, Copy)]
pub struct PatternHead {
    pub(super) pattern: AttentionPattern,
    pub(super) layer: u32,
    pub(super) head: u32,
}

impl PatternHead {
    /// Replaces `out` by the keys of a query. The progressions may overlap.
    pub(super) fn keys(self, query: u64, out: &mut Vec<Progression>) {
        let AttentionPattern { shape, sinks, block, .. } = self.pattern;
        let (end, block) = (query + 1, u64::from(block));
        let row = query / block;
        // The part of some blocks up to the query.
        let blocks = |of: Range<u64>| {
            Progression::one((of.start.saturating_mul(block)).min(end)..of.end.saturating_mul(block).min(end))
        };
        out.clear();
        out.push(Progression::one(0..u64::from(sinks).min(end)));
        match shape {
            Shape::Full => out.push(Progression::one(0..end)),
            Shape::Window(keys) => out.push(Progression::one(end.saturating_sub(u64::from(keys))..end)),
            Shape::Strided(stride) => {
                let stride = u64::from(stride);
                out.push(Progression::one(end.saturating_sub(stride)..end));
                out.push(Progression { start: query % stride, len: 1, step: stride, end });
            }
            Shape::Fixed { local, global, patterns } => {
                let (local, global) = (u64::from(local), u64::from(global));
                let first = row / local * local;
                out.push(blocks(first..row + 1));
                let own = u64::from(self.head % patterns);
                let start = (local - (1 + own) * global) * block;
                // Those of its own window are local.
                out.push(Progression { start, len: global * block, step: local * block, end: first * block });
            }
            Shape::Variable { windows, global, random } => {
                out.push(blocks(window_of(windows.as_slice(), row)..row + 1));
                out.extend(global.as_slice().iter().map(|&at| blocks(u64::from(at)..u64::from(at) + 1)));
                self.draw(random, row, |at| out.push(blocks(at..at + 1)));
            }
            Shape::BigBird { global, .. } if row < u64::from(global) => out.push(Progression::one(0..end)),
            Shape::BigBird { window, global, random } => {
                out.push(blocks(row.saturating_sub(u64::from(window / 2))..row + 1));
                out.push(blocks(0..u64::from(global)));
                self.draw(random, row, |at| out.push(blocks(at..at + 1)));
            }
        }
        out.retain(|keys| keys.len > 0 && keys.start < keys.end);
    }

    /// Draws up to `count` different blocks, of those up to a block of queries (Floyd's sampling).
    fn draw(self, count: u32, row: u64, mut each: impl FnMut(u64)) {
        let stream = u64::from(self.layer) << 32 | u64::from(self.head);
        let random = Philox::new(u64::from(self.pattern.seed), stream);
        let of = row + 1;
        let count = u64::from(count).min(of);
        let mut drawn: Vec<u64> = Vec::new();
        for (at, last) in (of - count..of).enumerate() {
            // At most 256 for each block of queries.
            let found = random.below(row * 256 + at as u64, last + 1);
            let found = if drawn.contains(&found) { last } else { found };
            drawn.push(found);
            each(found);
        }
    }
}

/// Returns the first block of the window of a block.
fn window_of(windows: &[u32], row: u64) -> u64 {
    let (mut start, mut last) = (0, 1);
    for &window in windows {
        last = u64::from(window);
        if row < start + last {
            return start;
        }
        start += last;
    }
    start + (row - start) / last * last
}

/// Numbers of tiles of keys that tiles of queries do not exceed.
pub(super) struct MostTiles {
    /// Of each tile of queries.
    pub(super) of_each: u64,
    /// Number of tiles of queries that attend to all keys.
    pub(super) whole: u64,
}

impl AttentionPattern {
    /// Returns a head of a layer with this pattern.
    #[must_use]
    pub const fn head(self, layer: u32, head: u32) -> PatternHead {
        PatternHead { pattern: self, layer, head }
    }

    /// Returns numbers of tiles that lists do not exceed.
    pub(super) fn most_tiles(self, tile: u64) -> MostTiles {
        let block = u64::from(self.block);
        // Those of a range of keys that moves with the queries, and those of a block.
        let moving = |keys: u64| keys.div_ceil(tile) + 2;
        let of_block = if tile.is_multiple_of(block) { 1 } else { moving(block) };
        let rows = tile.div_ceil(block) + u64::from(!tile.is_multiple_of(block));
        let drawn = |random: u32| u64::from(random).saturating_mul(rows).saturating_mul(of_block);
        let sinks = u64::from(self.sinks).div_ceil(tile);
        let (of_each, whole) = match self.shape {
            Shape::Full | Shape::Strided(_) | Shape::Fixed { .. } => (u64::MAX / 2, 0),
            Shape::Window(keys) => (moving(keys.into()), 0),
            Shape::Variable { windows, global, random } => {
                let window = windows.as_slice().iter().copied().max().map_or(0, u64::from);
                (moving(window * block) + global.as_slice().len() as u64 * of_block + drawn(random), 0)
            }
            Shape::BigBird { window, global, random } => {
                let first = (u64::from(global) * block).div_ceil(tile);
                (moving(u64::from(window / 2 + 1) * block) + first + drawn(random), first)
            }
        };
        MostTiles { of_each: of_each.saturating_add(sinks), whole }
    }

    /// Returns the number of the first head that has the same keys as this one.
    #[must_use]
    pub const fn same_as_head(self, head: u32) -> u32 {
        match self.shape {
            Shape::Fixed { patterns, .. } => head % patterns,
            _ if self.differs_by_layer() => head,
            _ => 0,
        }
    }

    /// Returns whether a query of a head attends to a key. Both are numbered from the first of their document.
    #[must_use]
    pub fn keeps(self, layer: u32, head: u32, query: u64, key: u64) -> bool {
        let mut keys = Vec::new();
        self.head(layer, head).keys(query, &mut keys);
        keys.iter().any(|keys| keys.next(key) == Some(key))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn picture(text: &str, head: u32, len: u64) -> Vec<String> {
        let pattern: AttentionPattern = text.parse().unwrap();
        let mark = |q, k| if pattern.keeps(0, head, q, k) { '#' } else { '.' };
        (0..len).map(|q| (0..len).map(|k| mark(q, k)).collect()).collect()
    }

    fn count(picture: &[String]) -> usize {
        picture.iter().flat_map(|row| row.chars()).filter(|&mark| mark == '#').count()
    }

    #[test]
    fn patterns_are_those_of_the_papers() {
        let fixed = picture("fixed:4,1+block:1", 0, 8);
        assert_eq!(
            fixed,
            ["#.......", "##......", "###.....", "####....", "...##...", "...###..", "...####.", "...#####"]
        );
        let second = picture("fixed:4,1,4+block:1", 1, 8);
        assert_eq!(second[4..], ["..#.#...", "..#.##..", "..#.###.", "..#.####"]);
        let short = picture("fixed:4,1+block:1", 0, 10);
        assert_eq!((&short[8][..], &short[9][..], count(&short)), ("...#...##.", "...#...###", 31));
        assert_eq!(
            picture("variable:1,2,3+global:0+block:1", 0, 8),
            ["#.......", "##......", "###.....", "#..#....", "#..##...", "#..###..", "#.....#.", "#.....##"]
        );
        let longformer = picture("bigbird:3,1,0+block:1", 0, 6);
        assert_eq!(longformer, ["#.....", "##....", "###...", "#.##..", "#..##.", "#...##"]);
        let strided = picture("strided:3", 0, 9);
        assert_eq!((count(&strided), &strided[8][..]), (33, "..#..####"));
        let fixed = picture("fixed:3,1+block:1", 0, 9);
        assert_eq!((count(&fixed), &fixed[8][..], &fixed[5][..]), (27, "..#..####", "..####..."));
        assert_eq!(picture("window:2+sinks:1", 0, 5), ["#....", "##...", "###..", "#.##.", "#..##"]);
    }

    #[test]
    fn drawn_blocks_are_different_and_keyed_by_layer_head_and_seed() {
        let drawn = |text: &str, layer, head| -> Vec<Vec<u64>> {
            let pattern: AttentionPattern = text.parse().unwrap();
            let kept = |q| (0..=q).filter(|&k| pattern.keeps(layer, head, q, k)).collect();
            (0..40).map(kept).collect()
        };
        let of = drawn("variable:1+random:3+block:1", 0, 0);
        for (row, keys) in of.iter().enumerate() {
            // Three of them, of which its own may be one.
            assert!((row + 1).min(3) <= keys.len() && keys.len() <= 4, "{row}: {keys:?}");
        }
        assert_eq!(of, drawn("variable:1+random:3+block:1", 0, 0));
        for other in [
            drawn("variable:1+random:3+block:1", 1, 0),
            drawn("variable:1+random:3+block:1", 0, 1),
            drawn("variable:1+random:3+block:1+seed:1", 0, 0),
        ] {
            assert_ne!(of, other);
        }
    }

    #[test]
    fn large_numbers_do_not_overflow() {
        let most = 16_777_216;
        for text in [
            format!("fixed:{most},{most}+block:{most}"),
            format!("variable:{most},{most}+global:{most}+block:{most}"),
            format!("bigbird:{most},{most},256+block:{most}+sinks:{most}"),
            format!("strided:{most}"),
        ] {
            let pattern: AttentionPattern = text.parse().unwrap();
            for query in [0, 5, u64::from(u32::MAX)] {
                assert!(
                    pattern.keeps(3, 9, query, query) && !pattern.keeps(3, 9, query, query + 1),
                    "{text}"
                );
            }
        }
    }
}
