//! Ring collectives: every rank sends to the next and receives from the one before, `n - 1` times for each
//! half.
//!
//! Bandwidth-optimal: all-reduce moves `2 (n-1)/n` of the buffer through each rank, at `2 (n-1)` latencies.
//! Source: Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations".

use std::ops::Range;

use farflung_base::Rank;

use crate::steps::{Merge, Program, Step};

/// All-reduce: [`ring_reduce_scatter`], then [`ring_all_gather`].
#[must_use]
pub fn ring(rank: Rank, size: usize) -> Program {
    let members = everyone(size);
    Program::new(size, whole(rank.index(), &members, |b| b..b + 1))
}

/// [`ring()`] in `chunks` parts of each block, which follow each other round: what a rank has reduced it
/// passes on at once, not when its whole block has come. The same sums in the same order, so the same bits.
#[must_use]
pub fn pipelined_ring(rank: Rank, size: usize, chunks: usize) -> Program {
    let members = everyone(size);
    let lane = |chunk| whole(rank.index(), &members, |b| b * chunks + chunk..b * chunks + chunk + 1);
    Program::side_by_side(size * chunks, (0..chunks).map(lane).collect())
}

/// All-reduce in two rings at once, one each way round with half of the buffer: twice as fast where the links
/// to both neighbours are separate, and no faster behind one access link.
#[must_use]
pub fn bidirectional_ring(rank: Rank, size: usize) -> Program {
    let forth = everyone(size);
    let back: Vec<Rank> = forth.iter().rev().copied().collect();
    let lanes = vec![
        whole(rank.index(), &forth, |b| b..b + 1),
        whole(size - 1 - rank.index(), &back, |b| size + b..size + b + 1),
    ];
    Program::side_by_side(2 * size, lanes)
}

/// Afterwards rank `r` holds the reduction of block `r` of `size`; its other blocks are spoilt.
///
/// Block `b` is summed along the ring from rank `b + 1` round to rank `b`.
#[must_use]
pub fn ring_reduce_scatter(rank: Rank, size: usize) -> Program {
    Program::new(size, scattered(rank.index(), &everyone(size), &|b| b..b + 1))
}

/// Beforehand rank `r` holds block `r` of `size`, afterwards everyone holds all.
#[must_use]
pub fn ring_all_gather(rank: Rank, size: usize) -> Program {
    Program::new(size, gathered(rank.index(), &everyone(size), &|b| b..b + 1))
}

pub(crate) fn everyone(size: usize) -> Vec<Rank> {
    (0..size as u32).map(Rank).collect()
}

/// All-reduce round `members`, of which this rank is number `me`; `part(b)` are the blocks that member `b`
/// reduces.
pub(crate) fn whole(me: usize, members: &[Rank], part: impl Fn(usize) -> Range<usize>) -> Vec<Step> {
    let mut steps = scattered(me, members, &part);
    steps.extend(gathered(me, members, &part));
    steps
}

/// The first half of [`whole`].
pub(crate) fn scattered(me: usize, members: &[Rank], part: &dyn Fn(usize) -> Range<usize>) -> Vec<Step> {
    around(me, members, 1, Merge::Reduce, part)
}

/// The second half of [`whole`].
pub(crate) fn gathered(me: usize, members: &[Rank], part: &dyn Fn(usize) -> Range<usize>) -> Vec<Step> {
    around(me, members, 0, Merge::Copy, part)
}

/// Step `s` sends the part `s + lag` behind the own one, and receives the part behind that.
fn around(
    me: usize,
    members: &[Rank],
    lag: usize,
    merge: Merge,
    part: &dyn Fn(usize) -> Range<usize>,
) -> Vec<Step> {
    let size = members.len();
    let (next, last) = (members[(me + 1) % size], members[(me + size - 1) % size]);
    let behind = |by: usize| part((me + 2 * size - by) % size);
    let step = |s| Step::send(next, behind(s + lag)).and_recv(last, behind(s + lag + 1), merge);
    (0..size - 1).map(step).collect()
}
