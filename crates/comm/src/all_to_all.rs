//! All-to-all: block `j` of a rank's first half goes to rank `j`, and what rank `j` sends here ends as block
//! `j` of the second half.

use farflung_base::Rank;

use crate::steps::{Merge, Program, Step};

/// All at once: one latency. `2 size` blocks.
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

/// In `n - 1` rounds, each with one rank to send to and one to receive from, so that no one is overrun: `n - 1`
/// latencies and `(n-1)/n` buffers. `2 size` blocks; the own one goes round by itself.
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

/// In `ceil(lg n)` rounds with about half of the buffer each: for blocks so small that latency is all. `2 size`
/// blocks.
///
/// In round `k` everything whose way to its destination has bit `k` set goes `2^k` ranks further. What has `i`
/// ranks to go lies in block `me + i`, so that nothing is moved before; the last step turns the order round.
/// Source: Bruck et al. 1997, "Efficient algorithms for all-to-all communications in multiport message-passing
/// systems".
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
    // What lies in slot `i` now came from the rank `i` before.
    let source = |i: usize| size + (me + size - i) % size..size + (me + size - i) % size + 1;
    steps.push(Step {
        sends: (0..size).map(|i| (rank, slot(i))).collect(),
        recvs: (0..size).map(|i| (rank, source(i), Merge::Copy)).collect(),
        ..Step::default()
    });
    Program::new(2 * size, steps)
}
