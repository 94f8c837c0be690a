//! Shards of flat buffers: the range that each rank updates, after the gradients' means have reached it, and
//! that it then sends to all others (Rajbhandari et al. 2020, "ZeRO").

use std::collections::VecDeque;
use std::ops::Range;

use farflung_base::Pending;
use farflung_comm::{CommError, Communicator, ReduceOp};
use farflung_tensor::Tensor;

use crate::{OptimError, Shard};

/// Values that are on their way.
type PendingValues = Pending<Result<Vec<f32>, CommError>>;

/// What the ranks of a communicator update of flat buffers, in rank order: together it is the whole, and some
/// shards may be empty.
///
/// ```
/// use farflung_optim::Shards;
///
/// let shards = Shards::new([3, 0, 7]);
/// assert_eq!([shards.of(0), shards.of(2)].map(|shard| shard.ranges().to_vec()), [[0..3], [3..10]]);
/// assert!(shards.of(1).is_empty());
/// assert_eq!(shards.counts(&[1..4, 6..8]), [2, 0, 3]);
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shards {
    shards: Vec<Shard>,
    whole: usize,
}

impl Shards {
    /// Returns shards of these lengths, each of one range.
    #[must_use]
    pub fn new(lengths: impl IntoIterator<Item = usize>) -> Self {
        let mut end = 0;
        let shard = |len| {
            let start = end;
            end += len;
            Shard::from(start..end)
        };
        let shards = lengths.into_iter().map(shard).collect();
        Self { shards, whole: end }
    }

    /// Returns these shards, which together have each element of the flat buffers once.
    #[must_use]
    pub fn of_all(shards: Vec<Shard>) -> Self {
        let whole = shards.iter().map(Shard::len).sum();
        Self { shards, whole }
    }

    /// Returns the shard of a rank.
    ///
    /// # Panics
    /// If there is no such rank.
    #[must_use]
    pub fn of(&self, rank: usize) -> &Shard {
        &self.shards[rank]
    }

    /// Returns the number of ranks.
    #[must_use]
    pub const fn ranks(&self) -> usize {
        self.shards.len()
    }

    /// Returns the length of the flat buffers.
    #[must_use]
    pub const fn whole(&self) -> usize {
        self.whole
    }

    /// Returns how many elements of some ranges of the flat buffers each rank has.
    #[must_use]
    pub fn counts(&self, pieces: &[Range<usize>]) -> Vec<usize> {
        let of = |shard: &Shard| {
            pieces.iter().flat_map(|piece| shard.within(piece)).map(|piece| piece.flat.len()).sum()
        };
        self.shards.iter().map(of).collect()
    }

    /// Returns what each rank has of a range of the flat buffers.
    #[must_use]
    pub fn within(&self, range: &Range<usize>) -> Self {
        let of = |shard: &Shard| Shard::new(shard.within(range).map(|piece| piece.flat));
        Self { shards: self.shards.iter().map(of).collect(), whole: self.whole }
    }

    /// Returns the windows in which shards are sent: for each, what it has of the shard of each rank. A window
    /// has a part of each shard, so that all ranks send at the same time, and together at most about `most`
    /// elements.
    #[must_use]
    pub fn windows(&self, most: usize) -> Vec<Self> {
        let count = self.lengths().iter().sum::<usize>().div_ceil(most.max(1));
        let cut =
            |shard: &Shard, i: usize| shard.part(&(shard.len() * i / count..shard.len() * (i + 1) / count));
        let window = |i| self.shards.iter().map(|shard| cut(shard, i)).collect();
        (0..count).map(|i| Self { shards: window(i), whole: self.whole }).collect()
    }

    /// Returns the lengths of the shards.
    #[must_use]
    pub fn lengths(&self) -> Vec<usize> {
        self.shards.iter().map(Shard::len).collect()
    }

    /// Returns the ranges of all shards, in rank order.
    pub(crate) fn ranges(&self) -> impl Iterator<Item = &Range<usize>> {
        self.shards.iter().flat_map(Shard::ranges)
    }

    /// Fills a flat buffer with the shards of all ranks. The input is this rank's own shard, which stays.
    /// Values are sent in [`Shards::windows`] of `most` elements, [`Shards::IN_FLIGHT`] at a time. A
    /// collective, which may be repeated after it failed.
    ///
    /// Errors: a peer that was lost; those of the device.
    ///
    /// # Panics
    /// If the buffer or the communicator has another size than the shards.
    pub fn gather(&self, comm: &Communicator, flat: &mut Tensor, most: usize) -> Result<(), OptimError> {
        let sizes = (flat.shape().len(), comm.size());
        assert_eq!(sizes, (self.whole(), self.ranks()), "shards of this buffer and these ranks");
        let me = comm.rank().index();
        let mut coming: VecDeque<(Self, PendingValues)> = VecDeque::new();
        let mut windows = self.windows(most).into_iter();
        loop {
            while coming.len() < Self::IN_FLIGHT
                && let Some(window) = windows.next()
            {
                let lengths = window.lengths();
                let mut values = vec![0.0; lengths.iter().sum()];
                let first = lengths[..me].iter().sum::<usize>();
                for piece in window.of(me).pieces() {
                    let at = first + piece.at;
                    with_part(flat, piece.flat, |part| values[at..at + part.len()].copy_from_slice(part))?;
                }
                coming.push_back((window, comm.start_gather_from_owners(values, &lengths)));
            }
            let Some((window, values)) = coming.pop_front() else { return Ok(()) };
            let (values, mut at) = (values.wait()?, 0);
            for (rank, shard) in window.shards.iter().enumerate() {
                for range in shard.ranges() {
                    if rank != me {
                        let part = &values[at..at + range.len()];
                        flat.view_mut().part(range.start, range.len())?.write(part)?;
                    }
                    at += range.len();
                }
            }
        }
    }

    /// Number of windows of a gather that are on their way at the same time.
    pub const IN_FLIGHT: usize = 2;
}

/// Calls `work` with a range of a flat buffer.
pub(crate) fn with_part(
    flat: &Tensor,
    range: Range<usize>,
    work: impl FnOnce(&[f32]),
) -> Result<(), OptimError> {
    match flat.host::<f32>() {
        Some(values) => work(&values[range]),
        None if range.is_empty() => {}
        None => work(&flat.view().part(range.start, range.len())?.to_vec::<f32>()?),
    }
    Ok(())
}

/// A bucket whose means each reach only the rank that updates the element.
#[derive(Debug)]
pub(super) struct OwnedBucket {
    /// Number of the bucket's elements that each rank updates.
    counts: Vec<usize>,
    rank: usize,
}

impl OwnedBucket {
    pub(super) fn new(counts: Vec<usize>, comm: &Communicator) -> Self {
        Self { counts, rank: comm.rank().index() }
    }

    /// Returns the bucket's elements that this rank updates.
    pub(super) fn own(&self) -> Range<usize> {
        let start = self.counts[..self.rank].iter().sum::<usize>();
        start..start + self.counts[self.rank]
    }

    pub(super) fn len(&self) -> usize {
        self.counts.iter().sum()
    }

    /// Sends each rank what it updates. The result has the means of this rank's elements; the others are
    /// unspecified. Contributions are added in rank order, so that the sums do not depend on who updates what.
    pub(super) fn start(&self, comm: &Communicator, values: Vec<f32>) -> PendingValues {
        comm.start_reduce_scatter_in_order(values, &self.counts, ReduceOp::Mean)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_cover_each_shard_once_and_all_ranks_send_in_each() {
        let apart = [vec![0..4, 16..22], vec![], vec![4..5, 9..13], vec![5..9, 13..16]].map(Shard::new);
        let all = [Shards::new([10, 0, 5, 7]), Shards::of_all(apart.to_vec())];
        for (shards, most) in all.iter().flat_map(|shards| [1, 3, 8, 22, 100].map(|most| (shards, most))) {
            let windows = shards.windows(most);
            assert_eq!(windows.len(), 22_usize.div_ceil(most));
            for rank in 0..4 {
                let elements =
                    |shards: &Shards| shards.of(rank).ranges().iter().cloned().flatten().collect::<Vec<_>>();
                let covered: Vec<usize> = windows.iter().flat_map(elements).collect();
                assert_eq!(covered, elements(shards));
            }
            assert!(windows.iter().all(|window| window.lengths().iter().sum::<usize>() <= most + 3));
        }
        assert!(Shards::new([0, 0]).windows(4).is_empty());
    }
}
