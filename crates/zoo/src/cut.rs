//! How tensors are cut among the ranks along an axis: in whole units, such as heads or columns, and in
//! proportion to the weights of the ranks.

use std::ops::Range;

use farflung_base::{Axis, ContextCut};

use crate::ZooError;

/// What one rank has of everything that the ranks along an axis divide.
///
/// Cuts are prefixes: of `n` units, the first `k` ranks together have `n w / W` of them, rounded down, where
/// `w` is the sum of their weights and `W` that of all.
///
/// ```
/// use farflung_zoo::AxisShare;
///
/// let heads = |rank| AxisShare::new(rank, vec![2, 1]).unwrap().of(12);
/// assert_eq!([heads(0), heads(1)], [0..8, 8..12]);
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AxisShare {
    rank: usize,
    weights: Vec<u32>,
}

impl AxisShare {
    /// Returns the share of a rank that is alone: everything.
    #[must_use]
    pub fn whole() -> Self {
        Self { rank: 0, weights: vec![1] }
    }

    /// Returns the share of a rank among ranks with these weights.
    ///
    /// Errors: [`ZooError::Config`] if there is no such rank, or no weight above 0.
    pub fn new(rank: usize, weights: Vec<u32>) -> Result<Self, ZooError> {
        let refuse = |field, value, expected| Err(ZooError::Config { field, value, expected });
        if weights.iter().all(|&weight| weight == 0) {
            return refuse("weights", 0, "at least one weight above 0");
        }
        if rank >= weights.len() {
            return refuse("rank", rank, "below the number of ranks along the axis");
        }
        Ok(Self { rank, weights })
    }

    /// Returns the shares of a rank along the views of a division of positions: its group's of the ring, and
    /// its own of the group.
    ///
    /// Errors: [`ZooError::Config`] if there is no such rank.
    pub fn along_context(cut: ContextCut, rank: u32) -> Result<[(Axis, Self); 2], ZooError> {
        let equal = |rank: u32, ranks: u32| Self::new(rank as usize, vec![1; ranks as usize]);
        Ok([
            (Axis::Context, equal(cut.group(rank), cut.ring)?),
            (Axis::Ulysses, equal(rank % cut.ulysses, cut.ulysses)?),
        ])
    }

    /// Returns the rank's number along the axis.
    #[must_use]
    pub const fn rank(&self) -> usize {
        self.rank
    }

    /// Returns the number of ranks along the axis.
    #[must_use]
    pub fn ranks(&self) -> usize {
        self.weights.len()
    }

    /// Returns which of `units` units the rank has.
    #[must_use]
    pub fn of(&self, units: usize) -> Range<usize> {
        let sum = |weights: &[u32]| weights.iter().map(|&weight| u128::from(weight)).sum::<u128>();
        let all = sum(&self.weights);
        let bound = |ranks: usize| (units as u128 * sum(&self.weights[..ranks]) / all) as usize;
        bound(self.rank)..bound(self.rank + 1)
    }

    /// Returns the shares of all ranks along the axis, in order.
    pub fn all(&self) -> impl Iterator<Item = Self> + '_ {
        (0..self.ranks()).map(|rank| Self { rank, weights: self.weights.clone() })
    }
}

/// How a tensor is cut.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Cut {
    /// Every rank has all of it.
    Whole,
    /// The ranks along an axis divide one of its dimensions.
    Along {
        /// The axis.
        axis: Axis,
        /// The dimension.
        dim: usize,
        /// Number of units that are not cut, such as heads.
        units: usize,
        /// Lengths of the parts of the dimension, each of which is cut by itself: queries, keys and values side
        /// by side are three. Each is a multiple of `units`.
        sections: Vec<usize>,
    },
}

impl Cut {
    /// Returns the shape of a rank's piece of a tensor.
    #[must_use]
    pub fn shape(&self, whole: &[usize], share: &AxisShare) -> Vec<usize> {
        let mut shape = whole.to_vec();
        if let Self::Along { dim, units, sections, .. } = self {
            shape[*dim] = share.of(*units).len() * sections.iter().map(|len| len / units).sum::<usize>();
        }
        shape
    }

    /// Copies a rank's piece out of a whole tensor.
    ///
    /// # Panics
    /// If `whole` and `piece` have not the lengths of their shapes.
    pub fn take(&self, shape: &[usize], share: &AxisShare, whole: &[f32], piece: &mut [f32]) {
        let mut at = 0;
        self.runs(shape, share, |run| {
            piece[at..][..run.len()].copy_from_slice(&whole[run.clone()]);
            at += run.len();
        });
        assert_eq!(at, piece.len(), "a piece has the length of its shape");
    }

    /// Copies a rank's piece into a whole tensor.
    ///
    /// # Panics
    /// If `whole` and `piece` have not the lengths of their shapes.
    pub fn put(&self, shape: &[usize], share: &AxisShare, piece: &[f32], whole: &mut [f32]) {
        let mut at = 0;
        self.runs(shape, share, |run| {
            whole[run.clone()].copy_from_slice(&piece[at..][..run.len()]);
            at += run.len();
        });
        assert_eq!(at, piece.len(), "a piece has the length of its shape");
    }

    /// Calls `run` with the ranges of elements of the whole tensor that the rank has, in order.
    fn runs(&self, shape: &[usize], share: &AxisShare, mut run: impl FnMut(Range<usize>)) {
        let Self::Along { dim, units, sections, .. } = self else {
            return run(0..shape.iter().product());
        };
        let (outer, inner) = (&shape[..*dim], &shape[dim + 1..]);
        let (outer, inner): (usize, usize) = (outer.iter().product(), inner.iter().product());
        let own = share.of(*units);
        for row in 0..outer {
            let mut start = row * shape[*dim];
            for len in sections {
                let unit = len / units;
                run((start + own.start * unit) * inner..(start + own.end * unit) * inner);
                start += len;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn share(rank: usize, weights: &[u32]) -> AxisShare {
        AxisShare::new(rank, weights.to_vec()).unwrap()
    }

    #[test]
    fn cuts_are_prefixes_by_weight() {
        let of = |weights: &[u32], units| {
            (0..weights.len()).map(|rank| share(rank, weights).of(units).len()).collect::<Vec<_>>()
        };
        assert_eq!(of(&[1; 4], 10), [2, 3, 2, 3]);
        assert_eq!(of(&[4, 2, 1, 1], 10), [5, 2, 1, 2]);
        assert_eq!(of(&[1, 0, 1], 3), [1, 0, 2]);
        assert_eq!(
            of(&[u32::MAX; 3], usize::MAX).iter().map(|&n| n as u128).sum::<u128>(),
            usize::MAX as u128
        );
        assert!(AxisShare::new(2, vec![1, 1]).is_err() && AxisShare::new(0, vec![0, 0]).is_err());
        assert!(AxisShare::new(0, Vec::new()).is_err());
    }

    #[test]
    fn pieces_of_each_section_make_the_whole_again() {
        // Two rows of queries, keys and values: four query heads of 2 values on two key heads, cut by key
        // heads.
        let cut = Cut::Along { axis: Axis::Tensor, dim: 1, units: 2, sections: vec![8, 4, 4] };
        let (shape, whole): ([usize; 2], Vec<f32>) = ([2, 16], (0..32_u8).map(f32::from).collect());
        let piece = |rank| {
            let share = share(rank, &[1, 1]);
            let mut piece = vec![0.0; cut.shape(&shape, &share).iter().product()];
            cut.take(&shape, &share, &whole, &mut piece);
            piece
        };
        let first = [0_u8, 1, 2, 3, 8, 9, 12, 13].map(f32::from);
        assert_eq!(piece(0)[..8], first);
        let mut again = vec![f32::NAN; 32];
        for rank in 0..2 {
            cut.put(&shape, &share(rank, &[1, 1]), &piece(rank), &mut again);
        }
        assert_eq!(again, whole);
        assert_eq!(Cut::Whole.shape(&shape, &share(0, &[1, 1])), shape);
    }
}
