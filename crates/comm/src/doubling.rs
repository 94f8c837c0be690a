//! All-reduces with partners at distances that are powers of two. In recursive doubling, partners exchange the
//! whole buffer in each of `lg n` rounds; in halving-doubling, parts of it in `2 lg n` rounds.
//!
//! If `n` is not a power of two, let `p` be the largest power of two below it. Ranks `p` and above first send
//! their buffer to a partner, which adds it to its own, and get the result at the end. This takes two more
//! latencies and sends two more whole buffers.

use farflung_base::Rank;

use crate::steps::{Merge, Program, Step};

/// Returns an all-reduce by recursive halving and doubling: as much traffic as a ring, in `2 lg n` latencies.
///
/// Source: Rabenseifner 2004, "Optimization of collective reduction operations"; Thakur et al. 2005.
#[must_use]
pub fn halving_doubling(rank: Rank, size: usize) -> Program {
    let power = 1 << size.ilog2();
    folded(rank, size, power, |me, steps| {
        let mut held = 0..power;
        let mut distance = power / 2;
        while distance > 0 {
            let partner = Rank((me ^ distance) as u32);
            let middle = held.start + distance;
            let (keep, give) = if me & distance == 0 {
                (held.start..middle, middle..held.end)
            } else {
                (middle..held.end, held.start..middle)
            };
            steps.push(Step::send(partner, give).and_recv(partner, keep.clone(), Merge::Reduce));
            held = keep;
            distance /= 2;
        }
        distance = 1;
        while distance < power {
            let partner = Rank((me ^ distance) as u32);
            let theirs = if me & distance == 0 {
                held.end..held.end + distance
            } else {
                held.start - distance..held.start
            };
            steps.push(Step::send(partner, held.clone()).and_recv(partner, theirs.clone(), Merge::Copy));
            held = held.start.min(theirs.start)..held.end.max(theirs.end);
            distance *= 2;
        }
    })
}

/// Returns an all-reduce by recursive doubling: `lg n` rounds of the whole buffer, the least possible number of
/// latencies.
///
/// Both partners add the same two values, so all ranks get the same result bit for bit, except for the payload
/// of a NaN.
#[must_use]
pub fn recursive_doubling(rank: Rank, size: usize) -> Program {
    let power: usize = 1 << size.ilog2();
    folded(rank, size, 1, |me, steps| {
        let partners = (0..power.ilog2()).map(|round| Rank((me ^ (1 << round)) as u32));
        steps.extend(partners.map(|to| Step::send(to, 0..1).and_recv(to, 0..1, Merge::Reduce)));
    })
}

/// Returns a program in which the first ranks, as many as the largest power of two, run `inner`. Before that,
/// each other rank sends its buffer to a partner; afterwards it receives the result.
fn folded(rank: Rank, size: usize, blocks: usize, inner: impl FnOnce(usize, &mut Vec<Step>)) -> Program {
    let power = 1 << size.ilog2();
    let (me, extra) = (rank.index(), size - power);
    let mut steps = Vec::new();
    if me >= power {
        let partner = Rank((me - power) as u32);
        steps.push(Step::send(partner, 0..blocks));
        steps.push(Step::recv(partner, 0..blocks, Merge::Copy));
    } else {
        let partner = Rank((me + power) as u32);
        if me < extra {
            steps.push(Step::recv(partner, 0..blocks, Merge::Reduce));
        }
        inner(me, &mut steps);
        if me < extra {
            steps.push(Step::send(partner, 0..blocks));
        }
    }
    Program::new(blocks, steps)
}
