//! A coded scatter-gather: each rank reduces one block for all ranks. Blocks are equal, or weighted by access
//! links.

use farflung_base::Rank;

use crate::butterfly::in_chunks;
use crate::steps::{Code, CodedMessage, Coding, Merge, Phase, Program, Step};

/// Returns an all-reduce that takes the time of two messages in sequence. Each rank encodes every other rank's
/// block and sends it to that rank. Each rank then decodes the parts of its own block and adds them up in rank
/// order; its own part is encoded and decoded too. Then it encodes the sum and sends it to all.
///
/// Blocks are the ranks' [shards](crate::Communicator::shard_of). Each rank sends `2 (n - 1)` messages, each
/// the encoding of `1/n` of the buffer.
#[must_use]
pub fn coded_exchange(rank: Rank, size: usize) -> Program {
    exchange(rank, &vec![true; size], 1)
}

/// Returns [`coded_exchange`] with shards of `counts` elements, so that ranks on slow links send and receive
/// less. A rank whose count is 0 reduces nothing, and no block is sent to it for reduction. Each shard is cut
/// into `chunks` blocks: while one is scattered, another is gathered.
///
/// [`shares`](crate::shares) computes the counts.
#[must_use]
pub fn coded_exchange_of(rank: Rank, counts: &[usize], chunks: usize) -> Program {
    let owns: Vec<bool> = counts.iter().map(|&count| count > 0).collect();
    exchange(rank, &owns, chunks).with_counts(&in_chunks(counts, chunks))
}

fn exchange(rank: Rank, owns: &[bool], chunks: usize) -> Program {
    let mut messages = Vec::new();
    let lanes = (0..chunks).map(|chunk| lane(rank, owns, &mut messages, |r| r * chunks + chunk)).collect();
    Program { messages, ..Program::side_by_side(owns.len() * chunks, lanes) }
}

/// Returns the steps that exchange one block of each rank.
fn lane(
    rank: Rank,
    owns: &[bool],
    messages: &mut Vec<CodedMessage>,
    block: impl Fn(usize) -> usize,
) -> Vec<Step> {
    let (n, me, first) = (owns.len(), rank.index(), messages.len());
    let code = |r, phase| CodedMessage { block: block(r), code: Code::Coded(phase) };
    // The messages are, in this order: this rank's part of each block, all parts of its own block, and the
    // results of all blocks.
    messages.extend((0..n).map(|r| code(r, Phase::Worker)));
    messages.extend((0..n).map(|_| code(me, Phase::Worker)));
    messages.extend((0..n).map(|r| code(r, Phase::Server)));
    let (mine, other, result) =
        (|r: usize| first + r, |r: usize| first + n + r, |r: usize| first + 2 * n + r);

    // Each rank starts with its next neighbour, so that not all send to the same rank first.
    let after = |owners: bool| (1..n).map(move |i| (me + i) % n).filter(move |&r| !owners || owns[r]);
    let before = |owners: bool| (1..n).map(move |i| (me + n - i) % n).filter(move |&r| !owners || owns[r]);
    let to = |r: usize| Rank(r as u32);
    let owners = || (0..n).filter(|&r| owns[r]);
    let mut scatter = Coding {
        encode: owners().map(mine).collect(),
        sends: after(true).map(|r| (to(r), mine(r))).collect(),
        ..Coding::default()
    };
    let mut gather = Coding {
        recvs: before(true).map(|r| (to(r), result(r))).collect(),
        decode: owners().map(|r| (result(r), Merge::Copy)).collect(),
        ..Coding::default()
    };
    if owns[me] {
        let merge = |r: usize| if r == 0 { Merge::Copy } else { Merge::Reduce };
        scatter.recvs = before(false).map(|r| (to(r), other(r))).collect();
        scatter.decode = (0..n).map(|r| (if r == me { mine(me) } else { other(r) }, merge(r))).collect();
        gather.encode = vec![result(me)];
        gather.sends = after(false).map(|r| (to(r), result(me))).collect();
    }
    let step = |coding| Step { coding, ..Step::default() };
    [scatter, gather].map(step).into_iter().filter(|step| !step.is_empty()).collect()
}
