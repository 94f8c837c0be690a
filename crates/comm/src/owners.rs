//! Exchanges between all ranks and the owners of parts of a buffer, of which some may be empty: values go to
//! their owners and are added there in rank order, or come from their owners. Each takes one latency.

use farflung_base::operation::{OperationStep, RankPart, SendOrder};
use farflung_base::{Bytes, Operation, Rank};

use crate::FRAME_BYTES;
use crate::butterfly::in_chunks;
use crate::steps::{Merge, Program, Step};

/// Number of elements of the longest part of an owner that is sent at a time. Owners take contributions in rank
/// order: if parts were sent as a whole, all would wait for rank 0, then for rank 1.
const CHUNK: usize = 1 << 16;

/// Number of chunks that are on their way at the same time.
const IN_FLIGHT: usize = 8;

/// Returns the exchange in which each rank sends the part of each owner to it, which adds them up in rank
/// order. Rank `r` owns the `r`-th `counts[r]` elements; behind those of all is room for what the rank itself
/// owns, where its sum is in the end. Parts are sent in chunks.
///
/// # Panics
/// If `counts` has no such rank.
#[must_use]
pub fn scatter_to_owners(rank: Rank, counts: &[usize]) -> Program {
    let (n, me) = (counts.len(), rank.index());
    let chunks = counts.iter().max().map_or(1, |most| most.div_ceil(CHUNK).max(1));
    // Each rank starts with its next neighbour, so that not all send to the same owner first. An owner also
    // sends to itself, for its place in the order of the sum.
    let owners = || (1..=n).map(|i| (me + i) % n).filter(|&r| counts[r] > 0);
    let contributions = || (0..n).filter(|_| counts[me] > 0);
    let merge = |r| if r == 0 { Merge::Copy } else { Merge::Reduce };
    let block = |r: usize, chunk: usize| r * chunks + chunk..r * chunks + chunk + 1;
    let step = |chunk| Step {
        sends: owners().map(|r| (Rank(r as u32), block(r, chunk))).collect(),
        recvs: contributions().map(|r| (Rank(r as u32), block(n, chunk), merge(r))).collect(),
        ..Step::default()
    };
    let lane = |chunk| Some(step(chunk)).filter(|step| !step.is_empty()).into_iter().collect();
    let counts: Vec<usize> = counts.iter().copied().chain([counts[me]]).collect();
    Program::side_by_side((n + 1) * chunks, (0..chunks).map(lane).collect())
        .with_window(IN_FLIGHT)
        .with_counts(&in_chunks(&counts, chunks))
}

/// Returns the most elements of a buffer that an owner of `own` of them holds from each other rank before it
/// can add them, because those of lower ranks come first.
#[must_use]
pub const fn waiting_at_owner(own: usize) -> usize {
    if own < IN_FLIGHT * CHUNK { own } else { IN_FLIGHT * CHUNK }
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

/// Returns the exchange in which each rank sends others `sent[r]` elements and receives `received[r]` of
/// them, of which some may be none, all at once: blocks `0..n` of a buffer are sent, blocks `n..2n` are
/// received.
///
/// # Panics
/// If there are not as many numbers of both.
#[must_use]
pub fn uneven_all_to_all(rank: Rank, sent: &[usize], received: &[usize]) -> Program {
    let (n, me) = (sent.len(), rank.index());
    assert_eq!(received.len(), n, "a number for each rank");
    let to = (0..n).map(|i| (me + 1 + i) % n).filter(|&r| sent[r] > 0);
    let from = (0..n).map(|i| (me + n - 1 - i) % n).filter(|&r| received[r] > 0);
    let step = Step {
        sends: to.map(|r| (Rank(r as u32), r..r + 1)).collect(),
        recvs: from.map(|r| (Rank(r as u32), n + r..n + r + 1, Merge::Copy)).collect(),
        ..Step::default()
    };
    let steps = if step.is_empty() { Vec::new() } else { vec![step] };
    Program::new(2 * n, steps).with_counts(&[sent, received].concat())
}

/// Returns the transfers of such an exchange, in which ranks send each other these bytes.
#[must_use]
pub fn uneven_all_to_all_operation(ranks: usize, bytes: impl Fn(usize, usize) -> Bytes) -> Operation {
    let other = |me: usize| (1..ranks).map(move |i| (me + i) % ranks);
    let moved = |all: Vec<(usize, Bytes)>| {
        all.into_iter()
            .filter(|(_, bytes)| bytes.0 > 0)
            .map(|(rank, bytes)| (Rank(rank as u32), bytes))
            .collect()
    };
    let part = |me: usize| {
        let step = OperationStep {
            sends: moved(other(me).map(|to| (to, bytes(me, to))).collect()),
            order: SendOrder::RoundRobin,
            receives: moved(other(me).map(|from| (from, bytes(from, me))).collect()),
        };
        (Rank(me as u32), RankPart { lanes: vec![vec![step]], window: usize::MAX })
    };
    Operation { parts: (0..ranks).map(part).collect(), frame: Bytes(FRAME_BYTES as u64) }
}

/// Returns the transfers of such exchanges of elements of `size` bytes; `program` makes them for a rank and
/// `counts`.
#[must_use]
pub fn owners_operation(program: fn(Rank, &[usize]) -> Program, counts: &[usize], size: usize) -> Operation {
    let part = |rank: Rank| {
        let program = program(rank, counts);
        let bytes =
            |blocks: &std::ops::Range<usize>| Bytes((program.elements(blocks, 0).len() * size) as u64);
        // What a rank sends to itself takes no time.
        let sends = |step: &Step| step.sends.clone().into_iter().filter(|(to, _)| *to != rank);
        let receives = |step: &Step| step.recvs.clone().into_iter().filter(|(from, _, _)| *from != rank);
        let turn = |step: &Step| OperationStep {
            sends: sends(step).map(|(to, blocks)| (to, bytes(&blocks))).collect(),
            order: SendOrder::RoundRobin,
            receives: receives(step).map(|(from, blocks, _)| (from, bytes(&blocks))).collect(),
        };
        let lanes = program.lanes.iter().map(|lane| lane.iter().map(turn).collect()).collect();
        (rank, RankPart { lanes, window: program.window })
    };
    Operation {
        parts: (0..counts.len() as u32).map(Rank).map(part).collect(),
        frame: Bytes(FRAME_BYTES as u64),
    }
}
