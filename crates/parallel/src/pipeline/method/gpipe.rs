//! `GPipe`: all forwards, then all backwards.

use super::row::Row;
use crate::pipeline::{Action, Op};

/// This method's entry in the table of pipeline methods.
pub(super) const ROW: Row = Row {
    name: "gpipe",
    summary: "all forwards, then all backwards",
    lists: |asked| Ok(lists(asked.ranks, asked.microbatches, asked.settings.backward)),
    ..Row::PLAIN
};

/// Order of the backwards after a rank has done all forwards.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum BackwardOrder {
    /// The last microbatch first, because its activations may still be in the cache: Huang et al. 2019.
    #[default]
    Descending,
    /// The first microbatch first: `PyTorch`'s `ScheduleGPipe`.
    Ascending,
}

/// Generates the ranks' lists of computations. Source: Huang et al. 2019, "`GPipe`", figure 2c.
pub(super) fn lists(p: u32, m: u32, backward: BackwardOrder) -> Vec<Vec<Op>> {
    let list = |s| {
        let forward = (0..m).map(move |i| Action::forward(s, i));
        let backward = (0..m).map(move |i| match backward {
            BackwardOrder::Descending => Action::backward(s, m - 1 - i),
            BackwardOrder::Ascending => Action::backward(s, i),
        });
        forward.chain(backward).map(Op::Run).collect()
    };
    (0..p).map(list).collect()
}
