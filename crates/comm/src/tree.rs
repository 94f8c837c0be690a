//! Broadcast by a binomial tree (few latencies) or a chain of blocks (full bandwidth), and the dissemination barrier.

use farflung_base::Rank;

use crate::steps::{Merge, Program, Step};

/// Broadcast by a binomial tree: `ceil(lg n)` rounds of the whole buffer.
#[must_use]
pub fn binomial_broadcast(rank: Rank, size: usize, root: Rank) -> Program {
    let turned = (rank.index() + size - root.index()) % size;
    let peer = |t: usize| Rank(((t + root.index()) % size) as u32);
    let mut steps = Vec::new();
    let mut reach = 1;
    while reach < size {
        if turned < reach && turned + reach < size {
            steps.push(Step { send: Some((peer(turned + reach), 0..1)), recv: None });
        } else if (reach..2 * reach).contains(&turned) {
            steps.push(Step { send: None, recv: Some((peer(turned - reach), 0..1, Merge::Copy)) });
        }
        reach *= 2;
    }
    Program { blocks: 1, steps }
}

/// Broadcast along a chain in `blocks` blocks: `(n - 2 + blocks) / blocks` times the whole buffer's transfer time.
#[must_use]
pub fn chain_broadcast(rank: Rank, size: usize, root: Rank, blocks: usize) -> Program {
    let turned = (rank.index() + size - root.index()) % size;
    let next = (turned + 1 < size).then(|| Rank(((rank.index() + 1) % size) as u32));
    let last = (turned > 0).then(|| Rank(((rank.index() + size - 1) % size) as u32));
    // Whoever has someone before it sends a block while it receives the one after.
    let lag = usize::from(last.is_some());
    let steps = (0..blocks + lag)
        .map(|i| Step {
            send: next.zip(i.checked_sub(lag).map(|b| b..b + 1)),
            recv: last.filter(|_| i < blocks).map(|from| (from, i..i + 1, Merge::Copy)),
        })
        .filter(|step| *step != Step::default())
        .collect();
    Program { blocks, steps }
}

/// Barrier by dissemination: in round `k` everyone tells the rank `2^k` further on. Carries no blocks.
///
/// Source: Hensgen, Finkel and Manber 1988, "Two algorithms for barrier synchronization".
#[must_use]
pub fn dissemination_barrier(rank: Rank, size: usize) -> Program {
    let me = rank.index();
    let mut steps = Vec::new();
    let mut reach = 1;
    while reach < size {
        let to = Rank(((me + reach) % size) as u32);
        let from = Rank(((me + size - reach) % size) as u32);
        steps.push(Step { send: Some((to, 0..0)), recv: Some((from, 0..0, Merge::Copy)) });
        reach *= 2;
    }
    Program { blocks: 1, steps }
}
