//! A coded all-gather: each rank sends its encoded values to all others, and each rank adds them up.

use farflung_base::Rank;

use crate::steps::{Code, CodedMessage, Coding, Merge, Phase, Program, Step};

/// Returns an all-reduce in one latency: each rank encodes the whole buffer once and sends it to all others.
/// Each rank decodes all buffers, its own included, and adds them up in rank order. So replicas stay equal bit
/// for bit.
///
/// Values are encoded once, whereas [`coded_exchange`](crate::coded_exchange) also encodes the sum: a codec
/// that selects few values then loses some of them. Each rank sends and receives `n - 1` encoded buffers, an
/// exchange only `2 (n - 1) / n`; so this is for few ranks and high compression.
///
/// Source: the exchange of `DeMo` (Peng et al. 2024, Alg. 1), `SparseLoCo` and Deep Gradient Compression.
#[must_use]
pub fn coded_all_gather(rank: Rank, size: usize) -> Program {
    let me = rank.index();
    let messages = vec![CodedMessage { block: 0, code: Code::Coded(Phase::Worker) }; size];
    let peer = |r: usize| Rank(r as u32);
    let coding = Coding {
        encode: vec![me],
        // Each rank starts with its next neighbour, so that not all send to the same rank first.
        sends: (1..size).map(|i| (peer((me + i) % size), me)).collect(),
        recvs: (1..size).map(|i| (me + size - i) % size).map(|r| (peer(r), r)).collect(),
        decode: (0..size).map(|r| (r, if r == 0 { Merge::Copy } else { Merge::Reduce })).collect(),
        complete: vec![0],
    };
    Program { messages, ..Program::new(1, vec![Step { coding, ..Step::default() }]) }
}
