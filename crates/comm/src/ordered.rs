//! Reductions in rank order, for operations that do not commute: only values of neighbouring ranges of ranks
//! are combined.

use farflung_base::Rank;

use crate::butterfly::{direct_all_gather, direct_gather, direct_reduce_scatter};
use crate::steps::{Merge, Program, Step};
use crate::tree::binomial_broadcast;

/// Returns a reduce-scatter in one latency: each rank sends every other rank's block to that rank, and reduces
/// its own block outwards: first with the lower ranks from the nearest down, then with the higher ranks from
/// the nearest up.
#[must_use]
pub fn ordered_reduce_scatter(rank: Rank, size: usize) -> Program {
    let me = rank.index();
    let mut program = direct_reduce_scatter(rank, size);
    for step in &mut program.lanes[0] {
        let from = |r: usize, merge| (Rank(r as u32), me..me + 1, merge);
        let lower = (0..me).rev().map(|r| from(r, Merge::ReduceLeft));
        step.recvs = lower.chain((me + 1..size).map(|r| from(r, Merge::Reduce))).collect();
    }
    program
}

/// Returns a reduction of whole buffers to rank 0: in round `k`, rank `i 2^(k+1)` receives the reduction of the
/// `2^k` ranks from `i 2^(k+1) + 2^k` on. Takes `ceil(lg n)` latencies. The buffers of other ranks hold partial
/// results afterwards.
#[must_use]
pub fn ordered_tree(rank: Rank, size: usize) -> Program {
    let me = rank.index();
    let mut steps = Vec::new();
    let mut reach = 1;
    while reach < size {
        if me & reach != 0 {
            steps.push(Step::send(Rank((me - reach) as u32), 0..1));
            break;
        }
        if me + reach < size {
            steps.push(Step::recv(Rank((me + reach) as u32), 0..1, Merge::Reduce));
        }
        reach *= 2;
    }
    Program::new(1, steps)
}

/// Returns a reduction to the root for small buffers: [`ordered_tree`], then rank 0 sends the result to the
/// root.
#[must_use]
pub fn ordered_tree_reduce(rank: Rank, size: usize, root: Rank) -> Program {
    let mut program = ordered_tree(rank, size);
    if root != Rank(0) {
        if rank == Rank(0) {
            program.lanes[0].push(Step::send(root, 0..1));
        } else if rank == root {
            program.lanes[0].push(Step::recv(Rank(0), 0..1, Merge::Copy));
        }
    }
    program
}

/// Returns a reduction to the root for large buffers: [`ordered_reduce_scatter`], then each rank sends its
/// block to the root.
#[must_use]
pub fn ordered_direct_reduce(rank: Rank, size: usize, root: Rank) -> Program {
    ordered_reduce_scatter(rank, size).then(direct_gather(rank, size, root))
}

/// Returns an all-reduce in `2 ceil(lg n)` rounds of whole buffers: [`ordered_tree`], then a broadcast from
/// rank 0.
#[must_use]
pub fn ordered_tree_all_reduce(rank: Rank, size: usize) -> Program {
    ordered_tree(rank, size).then(binomial_broadcast(rank, size, Rank(0)))
}

/// Returns an all-reduce in two latencies, in which each rank sends `2 (n-1)/n` of the buffer:
/// [`ordered_reduce_scatter`], then each rank sends its block to all.
#[must_use]
pub fn ordered_direct(rank: Rank, size: usize) -> Program {
    ordered_reduce_scatter(rank, size).then(direct_all_gather(rank, size))
}
