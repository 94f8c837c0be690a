//! All-reduce by recursive halving and doubling: as little traffic as a ring at `2 lg n` latencies.
//!
//! Source: Rabenseifner 2004, "Optimization of collective reduction operations"; Thakur et al. 2005. For `n` not a
//! power of two the ranks beyond fold their buffer into a partner's before and get the result after.

use farflung_base::Rank;

use crate::steps::{Merge, Program, Step};

/// All-reduce of `rank` among `size`.
#[must_use]
pub fn halving_doubling(rank: Rank, size: usize) -> Program {
    let power = 1 << size.ilog2();
    let extra = size - power;
    let me = rank.index();
    let all = 0..power;
    let peer = |r: usize| Rank(r as u32);
    let send = |to, range| Step { send: Some((peer(to), range)), recv: None };
    let recv = |from, range, merge| Step { send: None, recv: Some((peer(from), range, merge)) };
    if me >= power {
        let partner = me - power;
        let steps = vec![send(partner, all.clone()), recv(partner, all, Merge::Copy)];
        return Program { blocks: power, steps };
    }
    let mut steps = Vec::new();
    if me < extra {
        steps.push(recv(me + power, all.clone(), Merge::Reduce));
    }
    let mut held = all.clone();
    let mut distance = power / 2;
    while distance > 0 {
        let partner = peer(me ^ distance);
        let middle = held.start + distance;
        let (keep, give) = if me & distance == 0 {
            (held.start..middle, middle..held.end)
        } else {
            (middle..held.end, held.start..middle)
        };
        steps.push(Step { send: Some((partner, give)), recv: Some((partner, keep.clone(), Merge::Reduce)) });
        held = keep;
        distance /= 2;
    }
    distance = 1;
    while distance < power {
        let partner = peer(me ^ distance);
        let theirs = if me & distance == 0 {
            held.end..held.end + distance
        } else {
            held.start - distance..held.start
        };
        steps.push(Step {
            send: Some((partner, held.clone())),
            recv: Some((partner, theirs.clone(), Merge::Copy)),
        });
        held = held.start.min(theirs.start)..held.end.max(theirs.end);
        distance *= 2;
    }
    if me < extra {
        steps.push(send(me + power, all));
    }
    Program { blocks: power, steps }
}
