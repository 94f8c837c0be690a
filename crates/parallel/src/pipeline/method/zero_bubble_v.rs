//! ZB-V: a V-shaped placement of stages. Each rank holds one of the first stages and one of the last, so all
//! ranks hold equally many activations.

use super::Lists;
use super::row::{Row, Sizes};
use crate::pipeline::{Action, ComputeKind, Op};

/// This method's entry in the table of pipeline methods.
pub(super) const ROW: Row = Row {
    name: "zbv",
    summary: "split backward on a V of stages, the memory of 1F1B, no bubble",
    lists: |asked| Ok(lists(asked.ranks, asked.microbatches)),
    peak: |_, Sizes { p, .. }| 2 * p,
    ..Row::VEE
};

/// Counts the actions of one stage by kind. Microbatches from `m` on do not exist and are skipped.
struct Next {
    stage: u32,
    done: [u32; 3],
    m: u32,
}

impl Next {
    fn put(&mut self, kind: ComputeKind, list: &mut Vec<Op>) {
        let done = &mut self.done[match kind {
            ComputeKind::Forward => 0,
            ComputeKind::BackwardInput => 1,
            _ => 2,
        }];
        if *done < self.m {
            list.push(Action::new(kind, self.stage, *done).into());
        }
        *done += 1;
    }
}

/// Generates the ranks' lists of computations. Rank r holds stages r (a, on the way down) and 2p-1-r (z, on the
/// way back).
///
/// The pattern is the one for at least 2p-1 microbatches. With fewer, the missing ones are skipped.
///
/// Source: Qi et al. 2024, "Pipeline Parallelism with Controllable Memory", figure 3, in the order of
/// `PyTorch`'s `ScheduleZBVZeroBubble`.
pub(super) fn lists(p: u32, m: u32) -> Lists {
    use ComputeKind::{BackwardInput as I, BackwardWeight as W, Forward as F};
    let n = m.max(2 * p - 1);
    let list = |r: u32| {
        let mut list = Vec::with_capacity(6 * m as usize);
        let mut a = Next { stage: r, done: [0; 3], m };
        let mut z = Next { stage: 2 * p - 1 - r, done: [0; 3], m };
        for _ in 0..2 * (p - r) - 1 {
            a.put(F, &mut list);
        }
        for _ in 0..r {
            z.put(F, &mut list);
            a.put(F, &mut list);
        }
        for _ in 0..p - r {
            for kind in [F, I, W] {
                z.put(kind, &mut list);
            }
        }
        while z.done[0] < a.done[0] || a.done[0] < n {
            if a.done[0] < n {
                a.put(F, &mut list);
            }
            a.put(I, &mut list);
            a.put(W, &mut list);
            for kind in [F, I, W] {
                z.put(kind, &mut list);
            }
        }
        for _ in 0..r {
            a.put(I, &mut list);
            z.put(I, &mut list);
        }
        for _ in 0..p - r {
            a.put(I, &mut list);
            a.put(W, &mut list);
        }
        for stage in [&mut z, &mut a] {
            while stage.done[2] < n {
                stage.put(W, &mut list);
            }
        }
        list
    };
    (0..p).map(list).collect()
}
