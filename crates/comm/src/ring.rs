//! Ring collectives: every rank sends to the next and receives from the one before, `n - 1` times for each half.
//!
//! Bandwidth-optimal: all-reduce moves `2 (n-1)/n` of the buffer through each rank, at `2 (n-1)` latencies.
//! Source: Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations".

use farflung_base::Rank;

use crate::steps::{Merge, Program, Step};

/// All-reduce: [`ring_reduce_scatter`], then [`ring_all_gather`].
#[must_use]
pub fn ring(rank: Rank, size: usize) -> Program {
    let mut program = ring_reduce_scatter(rank, size);
    program.steps.extend(ring_all_gather(rank, size).steps);
    program
}

/// Afterwards rank `r` holds the reduction of block `r` of `size`; its other blocks are spoilt.
///
/// Block `b` is summed along the ring from rank `b + 1` round to rank `b`.
#[must_use]
pub fn ring_reduce_scatter(rank: Rank, size: usize) -> Program {
    around(rank, size, 1, Merge::Reduce)
}

/// Beforehand rank `r` holds block `r` of `size`, afterwards everyone holds all.
#[must_use]
pub fn ring_all_gather(rank: Rank, size: usize) -> Program {
    around(rank, size, 0, Merge::Copy)
}

/// Step `s` sends the block `s + lag` behind the own one, and receives the block behind that.
fn around(rank: Rank, size: usize, lag: usize, merge: Merge) -> Program {
    let me = rank.index();
    let next = Rank(((me + 1) % size) as u32);
    let last = Rank(((me + size - 1) % size) as u32);
    let behind = |by: usize| {
        let block = (me + 2 * size - by) % size;
        block..block + 1
    };
    let step =
        |s| Step { send: Some((next, behind(s + lag))), recv: Some((last, behind(s + lag + 1), merge)) };
    Program { blocks: size, steps: (0..size - 1).map(step).collect() }
}
