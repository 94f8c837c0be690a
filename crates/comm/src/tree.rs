//! Trees and chains: broadcast, reduction to a root, all-reduce by two trees, and the dissemination barrier.

use farflung_base::Rank;

use crate::steps::{Merge, Program, Step};

/// Returns a broadcast by a binomial tree: `ceil(lg n)` rounds of the whole buffer.
#[must_use]
pub fn binomial_broadcast(rank: Rank, size: usize, root: Rank) -> Program {
    let turned = turned(rank, size, root);
    let peer = |t: usize| Rank(((t + root.index()) % size) as u32);
    let mut steps = Vec::new();
    let mut reach = 1;
    while reach < size {
        if turned < reach && turned + reach < size {
            steps.push(Step::send(peer(turned + reach), 0..1));
        } else if (reach..2 * reach).contains(&turned) {
            steps.push(Step::recv(peer(turned - reach), 0..1, Merge::Copy));
        }
        reach *= 2;
    }
    Program::new(1, steps)
}

/// Returns a reduction to the root by a binomial tree: `ceil(lg n)` rounds of the whole buffer. The buffers of
/// other ranks hold partial results afterwards.
#[must_use]
pub fn binomial_reduce(rank: Rank, size: usize, root: Rank) -> Program {
    let mut program = binomial_broadcast(rank, size, root);
    let lane = &mut program.lanes[0];
    lane.reverse();
    for step in lane {
        let sends = step.recvs.drain(..).map(|(from, blocks, _)| (from, blocks)).collect();
        let recvs = step.sends.drain(..).map(|(to, blocks)| (to, blocks, Merge::Reduce)).collect();
        *step = Step { sends, recvs, ..Step::default() };
    }
    program
}

/// Returns a broadcast along a chain in `blocks` blocks. It takes `(n - 2 + blocks) / blocks` times the
/// transfer time of the buffer.
#[must_use]
pub fn chain_broadcast(rank: Rank, size: usize, root: Rank, blocks: usize) -> Program {
    let turned = turned(rank, size, root);
    let next = (turned + 1 < size).then(|| Rank(((rank.index() + 1) % size) as u32));
    let last = (turned > 0).then(|| Rank(((rank.index() + size - 1) % size) as u32));
    // A rank that is not the first sends a block while it receives the next one.
    let lag = usize::from(last.is_some());
    let steps = (0..blocks + lag)
        .map(|i| Step {
            sends: next.zip(i.checked_sub(lag).map(|b| b..b + 1)).into_iter().collect(),
            recvs: last
                .filter(|_| i < blocks)
                .map(|from| (from, i..i + 1, Merge::Copy))
                .into_iter()
                .collect(),
            ..Step::default()
        })
        .filter(|step| !step.is_empty())
        .collect();
    Program::new(blocks, steps)
}

/// Returns the rank's distance behind the root.
const fn turned(rank: Rank, size: usize, root: Rank) -> usize {
    (rank.index() + size - root.index()) % size
}

/// Returns an all-reduce up and down two binary trees at the same time, each with half of the buffer in
/// `chunks` chunks. An inner node of one tree is a leaf of the other, except for rank 0 if `n` is odd. Takes
/// about `2 lg n` latencies; each rank sends at most about two buffers.
///
/// Source: Sanders, Speck and Träff 2009, "Two-tree algorithms for full bandwidth broadcast, reduction and
/// scan".
#[must_use]
pub fn double_tree(rank: Rank, size: usize, chunks: usize) -> Program {
    let lanes = (0..2 * chunks)
        .map(|block| {
            let first = block % 2 == 0;
            let part = block..block + 1;
            let up = parent(rank.index(), size, first).map(|to| Rank(to as u32));
            let children: Vec<Rank> = (0..size)
                .filter(|&child| parent(child, size, first) == Some(rank.index()))
                .map(|child| Rank(child as u32))
                .collect();
            let mut steps: Vec<Step> =
                children.iter().map(|&from| Step::recv(from, part.clone(), Merge::Reduce)).collect();
            if let Some(up) = up {
                steps.push(Step::send(up, part.clone()));
                steps.push(Step::recv(up, part.clone(), Merge::Copy));
            }
            steps.extend(children.iter().map(|&to| Step::send(to, part.clone())));
            steps
        })
        .collect();
    Program::side_by_side(2 * chunks, lanes)
}

/// Returns the parent of a rank in the first tree, in which odd ranks are leaves, or in the second. The second
/// is the mirror image of the first if `size` is even. If it is odd, a mirror image would have the same leaves;
/// so the second is the first rotated by one rank.
fn parent(rank: usize, size: usize, first: bool) -> Option<usize> {
    if first {
        return in_order_parent(rank, size);
    }
    if size.is_multiple_of(2) {
        in_order_parent(size - 1 - rank, size).map(|p| size - 1 - p)
    } else {
        in_order_parent((rank + size - 1) % size, size).map(|p| (p + 1) % size)
    }
}

/// Returns the parent in the binary tree whose nodes are numbered from 1 by an in-order walk; 0 is above its
/// root.
fn in_order_parent(rank: usize, size: usize) -> Option<usize> {
    if rank == 0 {
        return None;
    }
    let level = 1 << rank.trailing_zeros();
    let right = (rank ^ level) | (level << 1);
    Some(if right < size { right } else { rank ^ level })
}

/// Returns a barrier by dissemination: in round `k` each rank sends an empty message to the rank `2^k` after
/// it.
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
        steps.push(Step::send(to, 0..0).and_recv(from, 0..0, Merge::Copy));
        reach *= 2;
    }
    Program::new(1, steps)
}
