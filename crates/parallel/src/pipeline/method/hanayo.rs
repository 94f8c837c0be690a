//! Hanayo: stages go over the ranks in waves, forth and back. Each rank runs the action that can start first.

use farflung_base::Nanos;

use super::Lists;
use super::greedy::{Even, Greedy, lists as greedy};
use super::row::{Chunks, Row, Sizes};
use crate::pipeline::{ArrivalRule, Placement};

/// This method's entry in the table of pipeline methods.
pub(super) const ROW: Row = Row {
    name: "hanayo",
    summary: "stages in waves, back and forth over the ranks",
    chunks: Chunks::Even,
    lists: |asked| Ok(lists(asked.ranks, asked.microbatches, asked.placement)),
    peak: |_, Sizes { p, chunks, .. }| p * chunks,
    ..Row::VEE
};

/// Generates the ranks' lists of computations of `m` microbatches over a wave placement, with at most `p` of
/// them in flight. A backward counts as two forwards.
///
/// Source: Liu et al. 2023, "Hanayo", section 3.2.
pub(super) fn lists(p: u32, m: u32, placement: &Placement) -> Lists {
    let times = |_| (Nanos(1), Nanos(2));
    let rule = Greedy { placement, microbatches: m, arrivals: ArrivalRule { in_flight: p } };
    greedy(&rule, &mut Even { times: &times, hop: Nanos::ZERO, free: vec![Nanos::ZERO; p as usize] })
}
