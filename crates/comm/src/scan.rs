//! Scans: rank `r` ends with the reduction of ranks `0..=r`, or of those before it. The order of ranks is kept.

use farflung_base::Rank;

use crate::steps::{Merge, Program, Step};

/// Scan by recursive doubling: in round `k` each rank gives what it has to the rank `2^k` further on, which
/// reduces it before its own. `ceil(lg n)` latencies of whole buffers.
///
/// Source: Hillis and Steele 1986, "Data parallel algorithms".
#[must_use]
pub fn doubling_scan(rank: Rank, size: usize) -> Program {
    Program::new(1, doubling(rank, 0, size, &(0..1)))
}

/// Scan along a chain in `blocks` blocks: `(n - 2 + blocks) / blocks` times the whole buffer's transfer time.
#[must_use]
pub fn chain_scan(rank: Rank, size: usize, blocks: usize) -> Program {
    Program::new(blocks, chain(rank, 0, size, blocks))
}

/// Exclusive scan: everyone's own values go one rank on, then ranks `1..n` scan these by [`doubling_scan`].
/// Rank 0 keeps its own.
#[must_use]
pub fn doubling_exclusive_scan(rank: Rank, size: usize) -> Program {
    let mut steps = shift(rank, size, 1);
    steps.extend(doubling(rank, 1, size, &(0..1)));
    Program::new(1, steps)
}

/// Exclusive scan: everyone's own values go one rank on, then ranks `1..n` scan these by [`chain_scan`].
#[must_use]
pub fn chain_exclusive_scan(rank: Rank, size: usize, blocks: usize) -> Program {
    let mut steps = shift(rank, size, blocks);
    steps.extend(chain(rank, 1, size, blocks));
    Program::new(blocks, steps)
}

/// All blocks to the next rank, in whose place they stand then.
fn shift(rank: Rank, size: usize, blocks: usize) -> Vec<Step> {
    let mut step = Step::default();
    if rank.index() + 1 < size {
        step.sends.push((Rank(rank.0 + 1), 0..blocks));
    }
    if rank.0 > 0 {
        step.recvs.push((Rank(rank.0 - 1), 0..blocks, Merge::Copy));
    }
    vec![step].into_iter().filter(|step| !step.is_empty()).collect()
}

/// Recursive doubling among the ranks `first..size`.
fn doubling(rank: Rank, first: usize, size: usize, blocks: &std::ops::Range<usize>) -> Vec<Step> {
    let me = rank.index();
    let mut steps = Vec::new();
    let mut reach = 1;
    while me >= first && reach < size - first {
        let mut step = Step::default();
        if me + reach < size {
            step.sends.push((Rank((me + reach) as u32), blocks.clone()));
        }
        if me >= first + reach {
            step.recvs.push((Rank((me - reach) as u32), blocks.clone(), Merge::ReduceBefore));
        }
        steps.extend(Some(step).filter(|step| !step.is_empty()));
        reach *= 2;
    }
    steps
}

/// Block by block along the ranks `first..size`.
fn chain(rank: Rank, first: usize, size: usize, blocks: usize) -> Vec<Step> {
    let me = rank.index();
    let next = (me >= first && me + 1 < size).then(|| Rank(rank.0 + 1));
    let last = (me > first).then(|| Rank(rank.0 - 1));
    // Whoever has someone before it sends a block while it receives the one after.
    let lag = usize::from(last.is_some());
    let step = |i: usize| Step {
        sends: next.zip(i.checked_sub(lag).map(|b| b..b + 1)).into_iter().collect(),
        recvs: last
            .filter(|_| i < blocks)
            .map(|from| (from, i..i + 1, Merge::ReduceBefore))
            .into_iter()
            .collect(),
        ..Step::default()
    };
    (0..blocks + lag).map(step).filter(|step| !step.is_empty()).collect()
}
