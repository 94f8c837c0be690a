//! Varuna: a rank runs a backward as soon as its gradient is there, and a forward while it is late.

use super::greedy::{Greedy, lists as greedy};
use super::{Lists, Settings};
use crate::pipeline::Placement;

/// What the rule makes of the settings' costs and hop, with at most `memory` microbatches in flight.
///
/// Source: Athlur et al. 2022, "Varuna", section 3.2. Differs: recomputation is put in by
/// [`with_recompute`](crate::pipeline::ComputeOrder::with_recompute), for every method alike.
pub(super) fn lists(settings: &Settings) -> Lists {
    let placement = Placement::looped(settings.ranks, 1);
    let times = |stage: farflung_base::StageId| {
        let cost = settings.cost(stage.0);
        (cost.forward, cost.backward())
    };
    greedy(&Greedy {
        placement: &placement,
        microbatches: settings.microbatches,
        in_flight: settings.memory.unwrap_or(settings.ranks).max(1),
        times: &times,
        hop: settings.hop,
    })
}
