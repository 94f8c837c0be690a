//! Interleaved 1F1B: each rank holds several chunks of the model, which divides the bubble by their number.

use super::Settings;
use super::row::{Chunks, Row, Sizes, microbatches};
use crate::pipeline::{Action, Op};

/// This method's entry in the table of pipeline methods.
pub(super) const ROW: Row = Row {
    name: "interleaved",
    summary: "1F1B over several chunks per rank",
    chunks: Chunks::Any,
    needs: |&Settings { ranks, microbatches: m, .. }| {
        microbatches(m, m.is_multiple_of(ranks), || format!("a multiple of the {ranks} stages"))
    },
    lists: |asked| Ok(lists(asked.ranks, asked.microbatches, asked.chunks)),
    peak: |_, Sizes { p, m, chunks, rank }| (m * chunks).min((chunks - 1) * p + 2 * (p - 1 - rank) + 1),
    ..Row::PLAIN
};

/// Generates the ranks' lists of computations for `v` chunks per rank. `m` is a multiple of `p`; groups of `p`
/// microbatches go through all chunks.
///
/// Source: Narayanan et al. 2021, "Efficient Large-Scale Language Model Training", section 2.2.2, and
/// Megatron-LM.
pub(super) fn lists(p: u32, m: u32, v: u32) -> Vec<Vec<Op>> {
    let total = m * v;
    let chunk = |k: u32| k % (p * v) / p;
    let microbatch = |k: u32| k / (p * v) * p + k % p;
    let list = |s: u32| {
        let forward = |k| Op::Run(Action::forward(chunk(k) * p + s, microbatch(k)));
        let backward = |k| Op::Run(Action::backward((v - 1 - chunk(k)) * p + s, microbatch(k)));
        let warmup = total.min((p - 1 - s) * 2 + (v - 1) * p);
        let mut list = Vec::with_capacity(2 * total as usize);
        list.extend((0..warmup).map(forward));
        for k in 0..total - warmup {
            list.push(forward(warmup + k));
            list.push(backward(k));
        }
        list.extend((total - warmup..total).map(backward));
        list
    };
    (0..p).map(list).collect()
}
