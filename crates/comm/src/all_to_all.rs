//! All-to-all: block `j` of a rank's first half is sent to rank `j`; the block received from rank `j` becomes
//! block `j` of the second half.

use farflung_base::Rank;

use crate::steps::{Merge, Program, Step};

/// Returns an all-to-all that sends all blocks at once, so it takes one latency. The program has `2 size`
/// blocks.
#[must_use]
pub fn direct_all_to_all(rank: Rank, size: usize) -> Program {
    let steps = pairwise_all_to_all(rank, size).lanes.swap_remove(0);
    let mut all = Step::default();
    for step in steps {
        all.sends.extend(step.sends);
        all.recvs.extend(step.recvs);
    }
    Program::new(2 * size, vec![all])
}

/// Returns an all-to-all in `n - 1` rounds; in each, a rank sends to one rank and receives from one rank, so no
/// rank is overloaded. Takes `n - 1` latencies; each rank sends `(n-1)/n` of the buffer's first half. The
/// program has `2 size` blocks, and its first step copies the rank's own block.
#[must_use]
pub fn pairwise_all_to_all(rank: Rank, size: usize) -> Program {
    let me = rank.index();
    let round = |s: usize| {
        let (to, from) = ((me + s) % size, (me + size - s) % size);
        Step::send(Rank(to as u32), to..to + 1).and_recv(
            Rank(from as u32),
            size + from..size + from + 1,
            Merge::Copy,
        )
    };
    Program::new(2 * size, (0..size).map(round).collect())
}

/// Returns an all-to-all in `ceil(lg n)` rounds that each send about half of the blocks: for blocks so small
/// that only latency matters. The program has `2 size` blocks.
///
/// In round `k`, each block whose distance to its destination has bit `k` set is sent `2^k` ranks on. A block
/// with distance `i` is kept in slot `me + i`, so no rotation is needed at the start; the last step puts the
/// blocks in order. Source: Bruck et al. 1997, "Efficient algorithms for all-to-all communications in multiport
/// message-passing systems".
#[must_use]
pub fn bruck_all_to_all(rank: Rank, size: usize) -> Program {
    let me = rank.index();
    let slot = |i: usize| (me + i) % size..(me + i) % size + 1;
    let mut steps = Vec::new();
    let mut reach = 1;
    while reach < size {
        let to = Rank(((me + reach) % size) as u32);
        let from = Rank(((me + size - reach) % size) as u32);
        let moved = || (1..size).filter(|i| i & reach != 0);
        steps.push(Step {
            sends: moved().map(|i| (to, slot(i))).collect(),
            recvs: moved().map(|i| (from, slot(i), Merge::Copy)).collect(),
            ..Step::default()
        });
        reach *= 2;
    }
    // Slot `me + i` now holds the block of rank `me - i`.
    let source = |i: usize| size + (me + size - i) % size..size + (me + size - i) % size + 1;
    steps.push(Step {
        sends: (0..size).map(|i| (rank, slot(i))).collect(),
        recvs: (0..size).map(|i| (rank, source(i), Merge::Copy)).collect(),
        ..Step::default()
    });
    Program::new(2 * size, steps)
}
