//! 1F1B: after a warm-up, each rank alternates between a forward and a backward, so it holds few activations.

use farflung_base::Nanos;

use super::Settings;
use super::row::{Row, Sizes, Unsupported, UsedSetting, Weights};
use crate::pipeline::{Action, Op};

/// Entry of 1F1B in the table of pipeline methods.
pub(super) const ROW: Row = Row {
    name: "1f1b",
    summary: "one forward, one backward, with a flush (Megatron, DAPPLE)",
    lists: |asked| Ok(lists(asked.ranks, asked.microbatches, 1)),
    peak: |_, Sizes { p, m, rank, .. }| m.min(p - rank),
    ..Row::PLAIN
};

/// Entry of 1F1B with a steeper warm-up in the table of pipeline methods.
pub(super) const SLOPE: Row = Row {
    name: "1f1b-mu",
    summary: "1F1B with a steeper warm-up that hides slow links",
    reads: &[UsedSetting::Costs, UsedSetting::Memory],
    needs: |settings| {
        if settings.slope == Some(0) {
            return Some(Unsupported { field: "mu", given: 0, needs: "at least 1".to_owned() });
        }
        // At the minimum slope, the first rank holds as many microbatches as there are ranks.
        let least = settings.ranks.min(settings.microbatches);
        let given = settings.memory.filter(|&memory| settings.slope.is_none() && memory < least)?;
        let needs = format!("room for {least} microbatches on the first stage");
        Some(Unsupported { field: "memory", given, needs })
    },
    lists: |asked| Ok(lists(asked.ranks, asked.microbatches, slope_of(asked.settings))),
    peak: |settings, Sizes { p, m, rank, .. }| {
        m.min(u64::from(slope_of(settings)).saturating_mul(p - 1 - rank) + 1)
    },
    ..Row::PLAIN
};

/// Entry of `PipeDream` in the table of pipeline methods: no flush, stashed weights.
pub(super) const PIPE_DREAM: Row = Row {
    name: "pipedream",
    summary: "1F1B without a flush, a version of the weights per microbatch in flight",
    weights: Weights::Stashed,
    ..ROW
};

/// Entry of `PipeDream`-2BW in the table of pipeline methods: no flush, two versions of the weights.
pub(super) const PIPE_DREAM_2BW: Row = Row {
    name: "pipedream-2bw",
    summary: "1F1B without a flush, two versions of the weights",
    weights: Weights::TwoVersions,
    ..ROW
};

/// Generates the ranks' lists of computations of 1F1B with a warm-up of `slope` (p-1-s) forwards on stage s.
/// Slope 1 is Megatron's and DAPPLE's.
///
/// A microbatch's gradient returns to stage s after 2 (p-1-s) hops over links. With slope 1, there are only
/// enough forwards in flight to cover the computation, so each period also waits for the links. A steeper
/// warm-up puts more forwards in flight.
///
/// Source: Narayanan et al. 2021, "Efficient Large-Scale Language Model Training", section 2.2.1, for slope 1.
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

/// Returns the smallest slope that hides messages of time `hop` behind stages that take `work` for a forward
/// and a backward.
#[must_use]
pub fn slope(work: Nanos, hop: Nanos) -> u32 {
    let hidden = hop.0.saturating_mul(2).div_ceil(work.0.max(1));
    u32::try_from(hidden.saturating_add(1)).unwrap_or(u32::MAX)
}

/// Returns the slope in `settings`, or else the slope that the slowest stage needs, limited by the memory.
pub(super) fn slope_of(settings: &Settings) -> u32 {
    settings.slope.unwrap_or_else(|| {
        let work = settings.cost.iter().map(|c| c.forward + c.backward()).max();
        let needed = slope(work.unwrap_or_default(), settings.hop);
        let most = |memory: u32| memory.saturating_sub(1) / settings.ranks.saturating_sub(1).max(1);
        needed.min(settings.memory.map_or(u32::MAX, most)).max(1)
    })
}
