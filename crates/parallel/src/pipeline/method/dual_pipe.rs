//! `DualPipe` and `DualPipeV`: forwards and backwards run in overlapping pairs. In `DualPipe`, microbatches
//! enter at both ends of the pipeline.

use std::collections::VecDeque;

use super::Lists;
use super::row::{Chunks, Row, Shape, Sizes, both_ways, twice_the_ranks};
use crate::pipeline::{Action, Op};

/// Entry of `DualPipe` in the table of pipeline methods.
pub(super) const ROW: Row = Row {
    name: "dualpipe",
    summary: "two copies of the model, forwards and backwards in pairs",
    chunks: Chunks::OneOfEach,
    shape: Shape::BothWays,
    needs: |settings| both_ways(settings).or_else(|| twice_the_ranks(settings)),
    lists: |asked| Ok(two_copies(asked.ranks, asked.microbatches)),
    peak: |_, Sizes { p, .. }| p + 1,
    ..Row::PLAIN
};

/// Entry of `DualPipeV` in the table of pipeline methods.
pub(super) const VEE: Row = Row {
    name: "dualpipev",
    summary: "forwards and backwards in pairs on a V of stages",
    needs: twice_the_ranks,
    lists: |asked| Ok(vee(asked.ranks, asked.microbatches)),
    peak: |_, Sizes { p, .. }| 2 * p + 1,
    ..Row::VEE
};

/// One of a rank's two stages, with its next microbatch for forwards and for backwards.
struct Lane {
    stage: u32,
    next_forward: u32,
    next_backward: u32,
}

impl Lane {
    const fn new(stage: u32, first: u32) -> Self {
        Self { stage, next_forward: first, next_backward: first }
    }

    fn forward(&mut self) -> Action {
        self.next_forward += 1;
        Action::forward(self.stage, self.next_forward - 1)
    }

    fn backward(&mut self) -> Action {
        self.next_backward += 1;
        Action::backward(self.stage, self.next_backward - 1)
    }

    /// Returns the first half of a backward. The second half, W, is appended to `weights`.
    fn input(&mut self, weights: &mut VecDeque<Action>) -> Action {
        let Action { stage, microbatch, .. } = self.backward();
        weights.push_back(Action::weight(stage.0, microbatch));
        Action::input(stage.0, microbatch)
    }
}

/// Generates a rank's list: the eight phases that both methods share. The pipeline here is one half of
/// `DualPipe` or all of `DualPipeV`: `span` ranks long, with `before` ranks before this one. `lanes[0]` is the
/// stage whose microbatches enter at the near end.
///
/// Phase 4 runs `pairs + before + 1` times. On the last rank of the span, its first run does not overlap the
/// forward with the backward, so that each output is sent as soon as it is done.
fn steps(mut lanes: [Lane; 2], before: u32, span: u32, pairs: u32) -> Vec<Op> {
    let [near, far] = &mut lanes;
    let mut list: Vec<Op> = Vec::new();
    let mut weights = VecDeque::new();
    let to_middle = span - before - 1;
    let overlap = |forward, backward| Op::Overlap { forward, backward };

    for _ in 0..2 * to_middle {
        list.push(near.forward().into());
    }
    for _ in 0..=before {
        list.push(near.forward().into());
        list.push(far.forward().into());
    }
    for _ in 0..to_middle {
        list.push(far.input(&mut weights).into());
        list.extend(weights.pop_front().map(Op::Run));
        list.push(far.forward().into());
    }
    for i in 0..=pairs + before {
        if i == 0 && to_middle == 0 {
            list.push(near.forward().into());
            list.push(far.backward().into());
        } else {
            list.push(overlap(near.forward(), far.backward()));
        }
        list.push(overlap(far.forward(), near.backward()));
    }
    for _ in 0..to_middle {
        list.push(far.backward().into());
        list.push(overlap(far.forward(), near.backward()));
    }
    // From the middle of the last backwards on, runs only `I`, for which other ranks wait, and postpones `W`.
    let split_from = before + 1;
    for (i, lane) in (0..2 * (before + 1)).map(|i| (i, i % 2)) {
        let lane = if lane == 0 { &mut *far } else { &mut *near };
        let split = i >= split_from;
        list.push(if split { lane.input(&mut weights) } else { lane.backward() }.into());
    }
    for _ in 0..to_middle {
        list.extend(weights.pop_front().map(Op::Run));
        list.push(near.input(&mut weights).into());
    }
    list.extend(weights.into_iter().map(Op::Run));
    list
}

/// Generates the ranks' lists of computations for two copies of the model: stages 0 to p-1 on ranks 0 to p-1,
/// and p to 2p-1 on ranks p-1 to 0. Each copy gets half of the microbatches.
///
/// Source: DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 3.2.1, and its `DualPipe` repository.
pub(super) fn two_copies(p: u32, m: u32) -> Lists {
    let (half, n) = (p / 2, m / 2);
    let list = |r: u32| {
        let down = Lane::new(r, 0);
        let up = Lane::new(p + (p - 1 - r), n);
        let before = r.min(p - 1 - r);
        let lanes = if r < half { [down, up] } else { [up, down] };
        steps(lanes, before, half, n - p)
    };
    (0..p).map(list).collect()
}

/// Generates the ranks' lists of computations for one copy of the model on a V-shaped placement of 2p stages:
/// each rank's other stage belongs to the way back.
///
/// Source: Sea AI Lab 2025, "`DualPipe` could be better without the Dual", and `DeepSeek`'s `DualPipeV`.
pub(super) fn vee(p: u32, m: u32) -> Lists {
    let list = |r: u32| steps([Lane::new(r, 0), Lane::new(2 * p - 1 - r, 0)], r, p, m - 2 * p);
    (0..p).map(list).collect()
}
