//! An all-reduce in a ring in which each hop encodes the partial sum again.

use farflung_base::Rank;

use crate::steps::{Code, CodedMessage, Coding, Merge, Phase, Program, Step};

/// Returns an all-reduce around a ring. In the first half, each hop decodes a partial sum, adds its own values,
/// and encodes the new sum. The rank that completes a block encodes it once more, and these bytes go around
/// unchanged. Each rank sends only to its next neighbour, one block at a time.
///
/// **Warning.** A lossy codec loses values at each of the `n - 1` hops, and error feedback of one rank cannot
/// correct the loss of another. Unless the loss of the codec is small, use
/// [`coded_exchange`](crate::coded_exchange).
#[must_use]
pub fn coded_ring(rank: Rank, size: usize) -> Program {
    let (n, me) = (size, rank.index());
    let behind = |by: usize| (me + 2 * n - by) % n;
    let (next, last) = (Rank(behind(n - 1) as u32), Rank(behind(1) as u32));
    let code = |block, phase| CodedMessage { block, code: Code::Coded(phase) };
    let hops = n - 1;
    let sent = (0..hops).map(|s| code(behind(s + 1), Phase::Worker));
    let received = (0..hops).map(|s| code(behind(s + 2), Phase::Worker));
    let results = (0..n).map(|k| code(behind(k), Phase::Server));
    let result = |k: usize| 2 * hops + k;

    let sums = (0..hops).map(|s| Coding {
        encode: vec![s],
        sends: vec![(next, s)],
        recvs: vec![(last, hops + s)],
        decode: vec![(hops + s, Merge::Reduce)],
        ..Coding::default()
    });
    let copies = (0..hops.max(1)).map(|k| {
        let own = if k == 0 { vec![result(0)] } else { Vec::new() };
        let came = (n > 1).then(|| result(k + 1));
        Coding {
            sends: came.map(|_| (next, result(k))).into_iter().collect(),
            recvs: came.map(|number| (last, number)).into_iter().collect(),
            decode: own.iter().copied().chain(came).map(|number| (number, Merge::Copy)).collect(),
            encode: own,
            ..Coding::default()
        }
    });
    let steps = sums.chain(copies).map(|coding| Step { coding, ..Step::default() }).collect();
    Program { messages: sent.chain(received).chain(results).collect(), ..Program::new(n, steps) }
}
