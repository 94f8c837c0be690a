//! 1F1B: after a warm-up, each rank alternates between a forward and a backward, so it holds few activations.

use farflung_base::Nanos;

use super::Settings;
use crate::pipeline::{Action, Op};

/// 1F1B whose warm-up on stage s is `slope` (p-1-s) forwards; slope 1 is Megatron's and DAPPLE's.
///
/// A microbatch's gradient is back on stage s after 2 (p-1-s) hops; with one forward per stage behind, only as many
/// forwards are under way as computing hides, and each period waits for the links. A steeper warm-up has more.
///
/// Source: Narayanan et al. 2021, "Efficient Large-Scale Language Model Training", section 2.2.1; slope 1.
pub(super) fn lists(p: u32, m: u32, slope: u32) -> Vec<Vec<Op>> {
    let list = |s: u32| {
        let warmup = m.min(slope.saturating_mul(p - 1 - s));
        let mut list = Vec::with_capacity(2 * m as usize);
        list.extend((0..warmup).map(|i| Op::Run(Action::forward(s, i))));
        for i in 0..m - warmup {
            list.push(Action::forward(s, warmup + i).into());
            list.push(Action::backward(s, i).into());
        }
        list.extend((m - warmup..m).map(|i| Op::Run(Action::backward(s, i))));
        list
    };
    (0..p).map(list).collect()
}

/// The least slope that hides links of `hop` behind stages that take `work` for a forward and a backward.
#[must_use]
pub fn slope(work: Nanos, hop: Nanos) -> u32 {
    let hidden = hop.0.saturating_mul(2).div_ceil(work.0.max(1));
    u32::try_from(hidden.saturating_add(1)).unwrap_or(u32::MAX)
}

/// The slope that `settings` ask for, or that their slowest stage needs, as far as their memory goes.
pub(super) fn slope_of(settings: &Settings) -> u32 {
    settings.slope.unwrap_or_else(|| {
        let work = settings.cost.iter().map(|c| c.forward + c.backward()).max();
        let needed = slope(work.unwrap_or_default(), settings.hop);
        let most = |memory: u32| memory.saturating_sub(1) / settings.ranks.saturating_sub(1).max(1);
        needed.min(settings.memory.map_or(u32::MAX, most)).max(1)
    })
}
