//! Varuna: a rank runs a backward as soon as its gradient has arrived, and forwards until then.

use farflung_base::{Nanos, StageId};

use super::greedy::{Even, Greedy, lists as greedy};
use super::row::{Row, Sizes, Unsupported, UsedSetting};
use super::{Lists, Settings};
use crate::pipeline::{ArrivalRule, Placement};

/// This method's entry in the table of pipeline methods.
pub(super) const ROW: Row = Row {
    name: "varuna",
    summary: "backward as soon as a gradient has arrived, otherwise forward",
    reads: &[UsedSetting::Costs, UsedSetting::Memory],
    needs: |settings| {
        let none = settings.memory == Some(0);
        none.then(|| Unsupported {
            field: "memory",
            given: 0,
            needs: "room for the activations of one microbatch".to_owned(),
        })
    },
    lists: |asked| Ok(lists(asked.settings)),
    peak: |settings, Sizes { p, m, .. }| m.min(settings.memory.map_or(p, u64::from)),
    arrivals: Some(arrivals),
    ..Row::PLAIN
};

/// Returns the rule, with at most `memory` microbatches in flight. By default, the number of ranks.
pub(super) fn arrivals(settings: &Settings) -> ArrivalRule {
    ArrivalRule { in_flight: settings.memory.unwrap_or(settings.ranks) }
}

/// Generates the ranks' lists of computations that the rule gives for the costs and the hop in the settings.
///
/// Source: Athlur et al. 2022, "Varuna", section 3.2. Differs: recomputation is added by
/// [`with_recompute`](crate::pipeline::ComputeOrder::with_recompute), as for every other method.
pub(super) fn lists(settings: &Settings) -> Lists {
    let placement = Placement::looped(settings.ranks, 1);
    let times = |stage: StageId| {
        let cost = settings.cost(stage.0);
        (cost.forward, cost.backward())
    };
    let rule =
        Greedy { placement: &placement, microbatches: settings.microbatches, arrivals: arrivals(settings) };
    let free = vec![Nanos::ZERO; settings.ranks as usize];
    greedy(&rule, &mut Even { times: &times, hop: settings.hop, free })
}
