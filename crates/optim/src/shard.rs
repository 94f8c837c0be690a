//! The part of flat buffers that a rank updates.

use std::ops::Range;

/// Ranges of flat buffers that a rank updates, while other ranks update the rest (Rajbhandari et al. 2020,
/// "ZeRO"). Buffers of the shard's length have the ranges one after another.
///
/// ```
/// use farflung_optim::{Shard, ShardPiece};
///
/// let shard = Shard::new([2..5, 5..5, 8..10]);
/// assert_eq!(shard.len(), 5);
/// let pieces: Vec<_> = shard.within(&(4..9)).collect();
/// assert_eq!(pieces, [ShardPiece { flat: 4..5, at: 2 }, ShardPiece { flat: 8..9, at: 3 }]);
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shard {
    /// Not empty, ascending, and apart from each other.
    ranges: Vec<Range<usize>>,
}

/// What a shard has of a range.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShardPiece {
    /// Its place in the flat buffers.
    pub flat: Range<usize>,
    /// The place of its first element in buffers of the shard's length.
    pub at: usize,
}

impl ShardPiece {
    /// Returns its place in buffers of the shard's length.
    #[must_use]
    pub fn own(&self) -> Range<usize> {
        self.at..self.at + self.flat.len()
    }
}

impl Shard {
    /// Returns a shard of these ranges, of which some may be empty.
    ///
    /// # Panics
    /// If a range begins before the end of the one before it.
    #[must_use]
    pub fn new(ranges: impl IntoIterator<Item = Range<usize>>) -> Self {
        let mut all: Vec<Range<usize>> = Vec::new();
        for range in ranges.into_iter().filter(|range| !range.is_empty()) {
            match all.last_mut() {
                Some(last) if last.end == range.start => last.end = range.end,
                last => {
                    assert!(last.is_none_or(|last| last.end < range.start), "ranges are in order");
                    all.push(range);
                }
            }
        }
        Self { ranges: all }
    }

    /// Returns the ranges.
    #[must_use]
    pub fn ranges(&self) -> &[Range<usize>] {
        &self.ranges
    }

    /// Returns the number of elements.
    #[must_use]
    pub fn len(&self) -> usize {
        self.ranges.iter().map(ExactSizeIterator::len).sum()
    }

    /// Returns whether it has no elements.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// Returns whether it is all of flat buffers of a length.
    #[must_use]
    pub fn is_whole(&self, len: usize) -> bool {
        self.len() == len
    }

    /// Returns its pieces, in order.
    pub fn pieces(&self) -> impl Iterator<Item = ShardPiece> {
        let mut at = 0;
        self.ranges.iter().map(move |range| {
            let piece = ShardPiece { flat: range.clone(), at };
            at += range.len();
            piece
        })
    }

    /// Returns what it has of a range of the flat buffers.
    pub fn within(&self, range: &Range<usize>) -> impl Iterator<Item = ShardPiece> + use<'_> {
        let range = range.clone();
        self.pieces().filter_map(move |ShardPiece { flat, at }| {
            let (start, end) = (flat.start.max(range.start), flat.end.min(range.end));
            (start < end).then(|| ShardPiece { flat: start..end, at: at + start - flat.start })
        })
    }

    /// Returns the shard of a range of its own elements.
    #[must_use]
    pub fn part(&self, own: &Range<usize>) -> Self {
        let cut = |piece: ShardPiece| {
            let (start, end) = (own.start.max(piece.at), own.end.min(piece.at + piece.flat.len()));
            let place = |at: usize| piece.flat.start + at - piece.at;
            if start < end { place(start)..place(end) } else { 0..0 }
        };
        Self { ranges: self.pieces().map(cut).filter(|range| !range.is_empty()).collect() }
    }
}

impl From<Range<usize>> for Shard {
    fn from(range: Range<usize>) -> Self {
        Self::new([range])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_and_parts_have_the_elements_of_the_shard() {
        let shard = Shard::new([3..7, 7..9, 12..12, 20..25]);
        assert_eq!(shard.ranges(), [3..9, 20..25]);
        let elements = |shard: &Shard| shard.ranges().iter().cloned().flatten().collect::<Vec<_>>();
        let all = elements(&shard);
        for start in 0..=shard.len() {
            for end in start..=shard.len() {
                assert_eq!(elements(&shard.part(&(start..end))), all[start..end], "{start}..{end}");
            }
        }
        for start in 0..28 {
            for end in start..28 {
                let pieces: Vec<_> = shard.within(&(start..end)).collect();
                let found: Vec<_> = pieces.iter().flat_map(|piece| piece.flat.clone()).collect();
                let want: Vec<_> = all.iter().copied().filter(|at| (start..end).contains(at)).collect();
                assert_eq!(found, want);
                assert!(
                    pieces.iter().all(|piece| all[piece.own()] == piece.flat.clone().collect::<Vec<_>>())
                );
            }
        }
        assert!(Shard::new([]).is_empty() && Shard::from(0..4).is_whole(4) && !shard.is_whole(25));
    }
}
