//! Scans: rank `r` ends with the reduction of ranks `0..=r`, or of `0..r` if exclusive. The order of ranks is
//! kept.

use farflung_base::Rank;

use crate::steps::{Merge, Program, Step};

/// Returns a scan by recursive doubling: in round `k` each rank sends its values to the rank `2^k` after it,
/// which reduces them before its own. Takes `ceil(lg n)` rounds, in each of which a rank sends its whole
/// buffer.
///
/// Source: Hillis and Steele 1986, "Data parallel algorithms".
#[must_use]
pub fn doubling_scan(rank: Rank, size: usize) -> Program {
    Program::new(1, doubling(rank, 0, size, &(0..1)))
}

/// Returns a scan along a chain in `blocks` blocks. It takes `(n - 2 + blocks) / blocks` times the transfer
/// time of the buffer.
#[must_use]
pub fn chain_scan(rank: Rank, size: usize, blocks: usize) -> Program {
    Program::new(blocks, chain(rank, 0, size, blocks))
}

/// Returns an exclusive scan: each rank sends its values to the next rank, then ranks `1..n` run
/// [`doubling_scan`] on the values received. The values of rank 0 are unchanged.
#[must_use]
pub fn doubling_exclusive_scan(rank: Rank, size: usize) -> Program {
    let mut steps = shift(rank, size, 1);
    steps.extend(doubling(rank, 1, size, &(0..1)));
    Program::new(1, steps)
}

/// Returns an exclusive scan: each rank sends its values to the next rank, then ranks `1..n` run [`chain_scan`]
/// on the values received.
#[must_use]
pub fn chain_exclusive_scan(rank: Rank, size: usize, blocks: usize) -> Program {
    let mut steps = shift(rank, size, blocks);
    steps.extend(chain(rank, 1, size, blocks));
    Program::new(blocks, steps)
}

/// Returns the step that sends all blocks to the next rank, where they replace its own.
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

/// Returns the steps of recursive doubling among the ranks `first..size`.
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
            step.recvs.push((Rank((me - reach) as u32), blocks.clone(), Merge::ReduceLeft));
        }
        steps.extend(Some(step).filter(|step| !step.is_empty()));
        reach *= 2;
    }
    steps
}

/// Returns the steps of a chain along the ranks `first..size`, block by block.
fn chain(rank: Rank, first: usize, size: usize, blocks: usize) -> Vec<Step> {
    let me = rank.index();
    let next = (me >= first && me + 1 < size).then(|| Rank(rank.0 + 1));
    let last = (me > first).then(|| Rank(rank.0 - 1));
    // A rank that is not the first sends a block while it receives the next one.
    let lag = usize::from(last.is_some());
    let step = |i: usize| Step {
        sends: next.zip(i.checked_sub(lag).map(|b| b..b + 1)).into_iter().collect(),
        recvs: last
            .filter(|_| i < blocks)
            .map(|from| (from, i..i + 1, Merge::ReduceLeft))
            .into_iter()
            .collect(),
        ..Step::default()
    };
    (0..blocks + lag).map(step).filter(|step| !step.is_empty()).collect()
}
