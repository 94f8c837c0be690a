//! ZB-H1 and ZB-H2: weight gradients run when a rank would otherwise be idle.

use super::Settings;
use super::row::{Row, Sizes, microbatches};
use crate::pipeline::{Action, Op};

/// Entry of ZB-H1 in the table of pipeline methods.
pub(super) const H1: Row = Row {
    name: "zb-h1",
    summary: "split backward, the memory of 1F1B, a third of its bubble",
    lists: |asked| Ok(lists(asked.ranks, asked.microbatches, 1)),
    peak: |_, Sizes { p, m, .. }| m.min(p),
    ..Row::PLAIN
};

/// Entry of ZB-H2 in the table of pipeline methods.
pub(super) const H2: Row = Row {
    name: "zb-h2",
    summary: "split backward, twice the memory, no bubble",
    needs: |&Settings { ranks, microbatches: m, .. }| {
        let least = 2 * u64::from(ranks) - 1;
        microbatches(m, u64::from(m) >= least, || format!("at least {least} for {ranks} stages"))
    },
    lists: |asked| Ok(lists(asked.ranks, asked.microbatches, 2)),
    peak: |_, Sizes { p, m, .. }| m.min(2 * p - 1),
    ..Row::PLAIN
};

/// Generates the ranks' lists of computations. `k` = 1 is H1: every rank holds at most the activations of the
/// first rank under 1F1B. `k` = 2 is H2: twice as many activations, and no bubble inside the schedule.
///
/// Stage s warms up with k (p-1-s) forwards. It runs the W of a microbatch after the I of the microbatch that
/// is k s later. On stage 0 this delay is zero and no other stage needs its input gradient, so its backwards
/// stay whole.
///
/// Source: Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section 2.2.
pub(super) fn lists(p: u32, m: u32, k: u32) -> Vec<Vec<Op>> {
    let list = |s: u32| {
        let warmup = m.min(k * (p - 1 - s));
        let delay = k * s;
        let mut list: Vec<Op> = (0..warmup).map(|i| Action::forward(s, i).into()).collect();
        for i in 0..m {
            if warmup + i < m {
                list.push(Action::forward(s, warmup + i).into());
            }
            if delay == 0 {
                list.push(Action::backward(s, i).into());
                continue;
            }
            list.push(Action::input(s, i).into());
            if i >= delay {
                list.push(Action::weight(s, i - delay).into());
            }
        }
        if delay > 0 {
            list.extend((m.saturating_sub(delay)..m).map(|i| Op::Run(Action::weight(s, i))));
        }
        list
    };
    (0..p).map(list).collect()
}
