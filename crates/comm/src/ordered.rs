//! Reductions in the order of ranks, for those that do not commute: whatever is reduced is of neighbouring
//! ranks.

use farflung_base::Rank;

use crate::butterfly::{direct_all_gather, direct_gather, direct_reduce_scatter};
use crate::steps::{Merge, Program, Step};
use crate::tree::binomial_broadcast;

/// Reduce-scatter in one latency: everyone sends each other rank its block, and reduces its own outwards: with
/// those of lower ranks from the nearest down, then with those of higher ranks from the nearest up.
#[must_use]
pub fn ordered_reduce_scatter(rank: Rank, size: usize) -> Program {
    let me = rank.index();
    let mut program = direct_reduce_scatter(rank, size);
    for step in &mut program.lanes[0] {
        let from = |r: usize, merge| (Rank(r as u32), me..me + 1, merge);
        let lower = (0..me).rev().map(|r| from(r, Merge::ReduceBefore));
        step.recvs = lower.chain((me + 1..size).map(|r| from(r, Merge::Reduce))).collect();
    }
    program
}

/// Reduction of whole buffers to rank 0: in round `k` rank `i 2^(k+1)` takes what the `2^k` ranks from
/// `i 2^(k+1) + 2^k` on have. `ceil(lg n)` latencies. The others' buffers are spoilt.
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

/// Reduction to the root in small buffers: [`ordered_tree`], and from rank 0 to the root.
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

/// Reduction to the root in large buffers: [`ordered_reduce_scatter`], and all blocks to the root.
#[must_use]
pub fn ordered_direct_reduce(rank: Rank, size: usize, root: Rank) -> Program {
    ordered_reduce_scatter(rank, size).then(direct_gather(rank, size, root))
}

/// All-reduce in `2 ceil(lg n)` latencies of whole buffers: [`ordered_tree`], and back.
#[must_use]
pub fn ordered_tree_all_reduce(rank: Rank, size: usize) -> Program {
    ordered_tree(rank, size).then(binomial_broadcast(rank, size, Rank(0)))
}

/// All-reduce in two latencies and `2 (n-1)/n` buffers: [`ordered_reduce_scatter`], and everyone's block to
/// all.
#[must_use]
pub fn ordered_direct(rank: Rank, size: usize) -> Program {
    ordered_reduce_scatter(rank, size).then(direct_all_gather(rank, size))
}
