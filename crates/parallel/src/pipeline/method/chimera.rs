//! Chimera: two copies of the model, whose microbatches pass the ranks in opposite directions.

use super::Lists;
use super::row::{Chunks, Row, Shape, Sizes, both_ways};
use crate::pipeline::{Action, Op};

/// This method's entry in the table of pipeline methods.
pub(super) const ROW: Row = Row {
    name: "chimera",
    summary: "two copies of the model, one in each direction",
    chunks: Chunks::OneOfEach,
    shape: Shape::BothWays,
    needs: both_ways,
    lists: |asked| Ok(lists(asked.ranks, asked.microbatches)),
    peak: |_, Sizes { p, .. }| p,
    ..Row::PLAIN
};

/// Generates the ranks' lists of computations. Half of the microbatches go down (stages 0 to p-1 on ranks 0 to
/// p-1), half go up (stages p to 2p-1 on ranks p-1 to 0).
///
/// Microbatches go in units of p, p/2 in each direction. In a unit, every action has its own slot: the forward
/// of stage s on the i-th microbatch of its direction is in slot s+2i, its backward in slot 2p-1-s+2i. The next
/// unit starts 2p slots later.
///
/// Source: Li and Hoefler 2021, "Chimera", section 3.1 and (direct concatenation) 3.5.
pub(super) fn lists(p: u32, m: u32) -> Lists {
    let half = p / 2;
    let list = |r: u32| {
        let mut slots: Vec<(u32, Action)> = Vec::with_capacity(2 * m as usize);
        for (first_stage, first_microbatch, s) in [(0, 0, r), (p, m / 2, p - 1 - r)] {
            for i in 0..m / 2 {
                let start = i / half * 2 * p + i % half * 2;
                let (stage, microbatch) = (first_stage + s, first_microbatch + i);
                slots.push((start + s, Action::forward(stage, microbatch)));
                slots.push((start + 2 * p - 1 - s, Action::backward(stage, microbatch)));
            }
        }
        slots.sort_unstable();
        slots.into_iter().map(|(_, action)| Op::Run(action)).collect()
    };
    (0..p).map(list).collect()
}
