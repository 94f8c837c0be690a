//! Breadth-first: a rank runs all microbatches through one chunk before it starts the next chunk.

use super::row::{Chunks, Row, Sizes};
use crate::pipeline::{Action, Op};

/// This method's entry in the table of pipeline methods.
pub(super) const ROW: Row = Row {
    name: "bfs",
    summary: "all microbatches of one chunk, then of the next",
    chunks: Chunks::Any,
    lists: |asked| Ok(lists(asked.ranks, asked.microbatches, asked.chunks)),
    peak: |_, Sizes { m, chunks, .. }| m * chunks,
    ..Row::PLAIN
};

/// Generates the ranks' lists of computations. Compared with interleaved 1F1B: fewer and larger reductions and
/// gathers, more activations.
///
/// Source: Lamy-Poirier 2022, "Breadth-First Pipeline Parallelism", section 4.
pub(super) fn lists(p: u32, m: u32, v: u32) -> Vec<Vec<Op>> {
    let list = |s: u32| {
        let forward = (0..v).flat_map(|c| (0..m).map(move |i| Action::forward(c * p + s, i)));
        let backward = (0..v).rev().flat_map(|c| (0..m).rev().map(move |i| Action::backward(c * p + s, i)));
        forward.chain(backward).map(Op::Run).collect()
    };
    (0..p).map(list).collect()
}
