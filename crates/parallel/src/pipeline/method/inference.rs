//! Inference: only forwards. Each microbatch is done after its last forward.

use super::row::Row;
use crate::pipeline::{Action, Op};

/// This method's entry in the table of pipeline methods.
pub(super) const ROW: Row = Row {
    name: "inference",
    summary: "forwards only",
    trains: false,
    lists: |asked| Ok(lists(asked.ranks, asked.microbatches)),
    peak: |_, _| 1,
    ..Row::PLAIN
};

/// Generates the ranks' lists of computations: every rank runs the microbatches in order and keeps nothing for
/// a backward.
pub(super) fn lists(p: u32, m: u32) -> Vec<Vec<Op>> {
    (0..p).map(|s| (0..m).map(|i| Action::forward(s, i).into()).collect()).collect()
}
