//! ZB-H1 and ZB-H2: the weights' gradients wait until a rank would otherwise stand still.

use crate::pipeline::{Action, Op};

/// With `k` 1 (H1) the activations of 1F1B on every rank, with `k` 2 (H2) twice as many and no bubble inside.
///
/// Stage s warms up with k (p-1-s) forwards and runs each W k s microbatches behind its I. Stage 0 delays nothing and
/// has nobody to send to: its backwards stay whole.
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
