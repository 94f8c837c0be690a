//! A coded all-gather: each rank's values go to all others as they were encoded, and all add them up.

use farflung_base::Rank;

use crate::steps::{Code, CodedMessage, Coding, Merge, Phase, Program, Step};

/// All-reduce in one latency: everyone encodes the whole buffer once and sends it to all others; all decode
/// what everyone sent, their own included, and add it up in the order of ranks. So replicas stay equal bit for
/// bit.
///
/// Values are encoded once, where [`coded_exchange`](crate::coded_exchange) encodes the sum once more: what
/// selects few values keeps all that were selected. Each rank sends and receives `n - 1` encoded buffers, where
/// an exchange sends `2 (n - 1) / n`: it is for few ranks and high compression.
///
/// Source: the exchange of `DeMo` (Peng et al. 2024, Alg. 1), `SparseLoCo` and Deep Gradient Compression.
#[must_use]
pub fn coded_all_gather(rank: Rank, size: usize) -> Program {
    let me = rank.index();
    let messages = vec![CodedMessage { block: 0, code: Code::Coded(Phase::Worker) }; size];
    let peer = |r: usize| Rank(r as u32);
    let coding = Coding {
        encode: vec![me],
        // Everyone starts with its neighbour, so that no one is the first target of all.
        sends: (1..size).map(|i| (peer((me + i) % size), me)).collect(),
        recvs: (1..size).map(|i| (me + size - i) % size).map(|r| (peer(r), r)).collect(),
        decode: (0..size).map(|r| (r, if r == 0 { Merge::Copy } else { Merge::Reduce })).collect(),
        complete: vec![0],
    };
    Program { messages, ..Program::new(1, vec![Step { coding, ..Step::default() }]) }
}
