//! Inference: forwards alone, each microbatch leaving as soon as it is through.

use crate::pipeline::{Action, Op};

/// Every rank runs the microbatches in order; nothing is kept for a backward.
pub(super) fn lists(p: u32, m: u32) -> Vec<Vec<Op>> {
    (0..p).map(|s| (0..m).map(|i| Action::forward(s, i).into()).collect()).collect()
}
