//! Exchanges between all ranks and the owners of parts of a buffer, of which some may be empty: values go to
//! their owners and are added there in rank order, or come from their owners. Each takes one latency.

use farflung_base::operation::{OperationStep, RankPart, SendOrder};
use farflung_base::{Bytes, Operation, Rank};

use crate::FRAME_BYTES;
use crate::steps::{Merge, Program, Step};

/// Returns the exchange in which each rank sends the part of each owner to it. Rank `r` owns `counts[r]`
/// elements of the first `size` blocks. The next blocks have what an owner receives: its part from each other
/// rank, in rank order; its own of these blocks is empty.
///
/// # Panics
/// If `counts` has no such rank.
#[must_use]
pub fn scatter_to_owners(rank: Rank, counts: &[usize]) -> Program {
    let (n, me) = (counts.len(), rank.index());
    // Each rank starts with its next neighbour, so that not all send to the same owner first.
    let after = (1..n).map(|i| (me + i) % n).filter(|&r| counts[r] > 0);
    let before = (1..n).map(|i| (me + n - i) % n).filter(|_| counts[me] > 0);
    let step = Step {
        sends: after.map(|r| (Rank(r as u32), r..r + 1)).collect(),
        recvs: before.map(|r| (Rank(r as u32), n + r..n + r + 1, Merge::Copy)).collect(),
        ..Step::default()
    };
    let coming = (0..n).map(|r| if r == me { 0 } else { counts[me] });
    let counts: Vec<usize> = counts.iter().copied().chain(coming).collect();
    let steps = if step.is_empty() { Vec::new() } else { vec![step] };
    Program::new(2 * n, steps).with_counts(&counts)
}

/// Returns the exchange in which each owner sends its part to all other ranks: an all-gather of `counts[r]`
/// elements of each rank `r`.
///
/// # Panics
/// If `counts` has no such rank.
#[must_use]
pub fn gather_from_owners(rank: Rank, counts: &[usize]) -> Program {
    let (n, me) = (counts.len(), rank.index());
    let after = (1..n).map(|i| (me + i) % n).filter(|_| counts[me] > 0);
    let before = (1..n).map(|i| (me + n - i) % n).filter(|&r| counts[r] > 0);
    let step = Step {
        sends: after.map(|r| (Rank(r as u32), me..me + 1)).collect(),
        recvs: before.map(|r| (Rank(r as u32), r..r + 1, Merge::Copy)).collect(),
        ..Step::default()
    };
    let steps = if step.is_empty() { Vec::new() } else { vec![step] };
    Program::new(n, steps).with_counts(counts)
}

/// Returns the transfers of such exchanges of f32 values; `program` makes them for a rank and `counts`.
#[must_use]
pub fn owners_operation(program: fn(Rank, &[usize]) -> Program, counts: &[usize]) -> Operation {
    let part = |rank: Rank| {
        let program = program(rank, counts);
        let bytes = |blocks: &std::ops::Range<usize>| {
            Bytes((program.elements(blocks, 0).len() * size_of::<f32>()) as u64)
        };
        let turn = |step: &Step| OperationStep {
            sends: step.sends.iter().map(|(to, blocks)| (*to, bytes(blocks))).collect(),
            order: SendOrder::RoundRobin,
            receives: step.recvs.iter().map(|(from, blocks, _)| (*from, bytes(blocks))).collect(),
        };
        let lanes = program.lanes.iter().map(|lane| lane.iter().map(turn).collect()).collect();
        (rank, RankPart { lanes, window: program.window })
    };
    Operation {
        parts: (0..counts.len() as u32).map(Rank).map(part).collect(),
        frame: Bytes(FRAME_BYTES as u64),
    }
}
