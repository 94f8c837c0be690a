//! Ring collectives: in each step every rank sends to the next rank and receives from the previous one. Each
//! half of an all-reduce has `n - 1` steps.
//!
//! Bandwidth-optimal: each rank sends `2 (n-1)/n` of the buffer in an all-reduce, in `2 (n-1)` latencies.
//! Source: Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations".

use std::ops::Range;

use farflung_base::Rank;

use crate::steps::{Merge, Program, Step};

/// Returns an all-reduce: [`ring_reduce_scatter`], then [`ring_all_gather`].
#[must_use]
pub fn ring(rank: Rank, size: usize) -> Program {
    let members = everyone(size);
    Program::new(size, whole(rank.index(), &members, |b| b..b + 1))
}

/// Returns [`ring()`] with each block cut into `chunks` parts, which follow each other around the ring: a rank
/// sends a reduced part on at once, not after the whole block. Sums have the same order, so the results are the
/// same bit for bit.
#[must_use]
pub fn pipelined_ring(rank: Rank, size: usize, chunks: usize) -> Program {
    let members = everyone(size);
    let lane = |chunk| whole(rank.index(), &members, |b| b * chunks + chunk..b * chunks + chunk + 1);
    Program::side_by_side(size * chunks, (0..chunks).map(lane).collect())
}

/// Returns an all-reduce in two rings of opposite directions, each with half of the buffer: twice as fast if
/// the links to the two neighbours are separate, no faster if they share one access link.
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

/// Returns a reduce-scatter: rank `r` ends with the reduction of block `r` of `size`; its other blocks hold
/// partial sums.
///
/// The sum of block `b` starts at rank `b + 1` and goes around the ring to rank `b`.
#[must_use]
pub fn ring_reduce_scatter(rank: Rank, size: usize) -> Program {
    Program::new(size, scattered(rank.index(), &everyone(size), &|b| b..b + 1))
}

/// Returns an all-gather: before it, rank `r` holds block `r` of `size`; after it, every rank holds all blocks.
#[must_use]
pub fn ring_all_gather(rank: Rank, size: usize) -> Program {
    Program::new(size, gathered(rank.index(), &everyone(size), &|b| b..b + 1))
}

pub(crate) fn everyone(size: usize) -> Vec<Rank> {
    (0..size as u32).map(Rank).collect()
}

/// Returns the steps of an all-reduce around `members`, among which this rank has index `me`. `part(b)` is the
/// range of blocks that member `b` reduces.
pub(crate) fn whole(me: usize, members: &[Rank], part: impl Fn(usize) -> Range<usize>) -> Vec<Step> {
    let mut steps = scattered(me, members, &part);
    steps.extend(gathered(me, members, &part));
    steps
}

/// Returns the first half of [`whole`]: the reduce-scatter.
pub(crate) fn scattered(me: usize, members: &[Rank], part: &dyn Fn(usize) -> Range<usize>) -> Vec<Step> {
    around(me, members, 1, Merge::Reduce, part)
}

/// Returns the second half of [`whole`]: the all-gather.
pub(crate) fn gathered(me: usize, members: &[Rank], part: &dyn Fn(usize) -> Range<usize>) -> Vec<Step> {
    around(me, members, 0, Merge::Copy, part)
}

/// Returns steps of which step `s` sends the part `s + lag` positions behind this rank's own, and receives the
/// part one further behind.
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
