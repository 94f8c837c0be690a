//! Inference: forwards alone, each microbatch leaving as soon as it is through.

use super::row::Row;
use crate::pipeline::{Action, Op};

/// The table's row.
pub(super) const ROW: Row = Row {
    name: "inference",
    summary: "forwards alone",
    trains: false,
    lists: |asked| Ok(lists(asked.ranks, asked.microbatches)),
    peak: |_, _| 1,
    ..Row::PLAIN
};

/// Every rank runs the microbatches in order; nothing is kept for a backward.
pub(super) fn lists(p: u32, m: u32) -> Vec<Vec<Op>> {
    (0..p).map(|s| (0..m).map(|i| Action::forward(s, i).into()).collect()).collect()
}
