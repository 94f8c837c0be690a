//! DAPPLE's planner: divides layers into replicated stages of a synchronous pipeline. Minimises the latency of
//! the warm-up, steady and ending phases.

use std::collections::BTreeMap;
use std::ops::Range;

use farflung_base::Nanos;

use crate::ParallelError;

/// Rule that selects the devices of the next stage. Each machine's devices are used in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DevicePolicy {
    /// First from machines that no stage uses, then from others.
    FreshFirst,
    /// First from machines that a stage uses, then from others.
    AppendFirst,
    /// Equally many from each machine in use that has free devices; if there is none, from each unused machine.
    ScatterFirst,
}

impl DevicePolicy {
    /// All policies.
    pub const ALL: [Self; 3] = [Self::FreshFirst, Self::AppendFirst, Self::ScatterFirst];

    /// Returns the numbers of the `count` devices for a stage, machine by machine. `None` if there are not
    /// enough, or they cannot be taken equally. `used` is the number of devices in use on each machine, out of
    /// `each`.
    #[must_use]
    pub fn take(self, used: &[u32], each: u32, count: u32) -> Option<Vec<u32>> {
        let begun: Vec<usize> = (0..used.len()).filter(|&at| used[at] > 0 && used[at] < each).collect();
        let fresh: Vec<usize> = (0..used.len()).filter(|&at| used[at] == 0).collect();
        let mut taken = vec![0; used.len()];
        match self {
            Self::ScatterFirst => {
                let from = if begun.is_empty() { fresh } else { begun };
                let machines = from.len() as u32;
                if machines == 0 || !count.is_multiple_of(machines) {
                    return None;
                }
                for at in from {
                    taken[at] = count / machines;
                    if used[at] + taken[at] > each {
                        return None;
                    }
                }
            }
            Self::FreshFirst | Self::AppendFirst => {
                let order = if self == Self::FreshFirst { [fresh, begun] } else { [begun, fresh] };
                let mut left = count;
                for at in order.into_iter().flatten() {
                    taken[at] = left.min(each - used[at]);
                    left -= taken[at];
                }
                if left > 0 {
                    return None;
                }
            }
        }
        let devices =
            |at: usize| (used[at]..used[at] + taken[at]).map(move |device| at as u32 * each + device);
        Some((0..used.len()).flat_map(devices).collect())
    }
}

/// Times of a stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PhaseCost {
    /// Forward of a microbatch, divided over the stage's devices.
    pub forward: Nanos,
    /// Backward of a microbatch, divided over the stage's devices.
    pub backward: Nanos,
    /// Average of the stage's gradients, after the last backward.
    pub all_reduce: Nanos,
}

/// A stage: layers, and the devices that divide each microbatch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlacedStage {
    /// Layers of the stage.
    pub layers: Range<usize>,
    /// Numbers of the stage's devices.
    pub devices: Vec<u32>,
}

/// The stages of a plan, first to last, and the latency of a step.
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use]
pub struct PlacedPlan {
    /// The stages.
    pub stages: Vec<PlacedStage>,
    /// Latency of a step, as computed by [`latency`].
    pub time: Nanos,
}

/// Sizes of the planning problem.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DappleSize {
    /// Number of layers of the model.
    pub layers: usize,
    /// Number of machines.
    pub machines: u32,
    /// Number of devices of each machine.
    pub devices: u32,
    /// Number of microbatches in a step.
    pub microbatches: u32,
    /// Numbers of devices that a stage may have.
    pub replicas: Vec<u32>,
}

/// Returns the times of some layers on some devices. `None` if the layers do not fit in their memory.
pub type PhaseCosts<'a> = &'a dyn Fn(Range<usize>, &[u32]) -> Option<PhaseCost>;

/// Returns the time to send a microbatch's hidden states, after the given number of layers, from some devices
/// to others, in one direction.
pub type HopTime<'a> = &'a dyn Fn(usize, &[u32], &[u32]) -> Nanos;

/// Returns the latency of a step of a synchronous pipeline: the maximum of warm-up + steady + ending over each
/// pivot `q` and each stage `s <= q` with an average.
///
/// The warm-up is the forward of the stages up to the pivot. The steady phase is `microbatches - 1` rounds of
/// the pivot's forward and backward. The ending is the backward of stages `s` to `q` and the average of stage
/// `s`. Hops between stages count as stages without an average. `hops` has one entry fewer than `stages`.
///
/// The latency is the longest of certain chains of dependent work in 1F1B, so a real run at these costs is
/// never shorter. Source: Fan et al. 2021, "DAPPLE", section 4, equations 1 to 3. Differs: the paper searches
/// for a single pivot from the last stage on and counts the stages after it from there; here, every stage
/// counts as a pivot and the longest chain decides.
#[must_use]
pub fn latency(stages: &[PhaseCost], hops: &[Nanos], microbatches: u32) -> Nanos {
    let mut label = PartialLatency::NO_STAGES;
    for (at, &stage) in stages.iter().enumerate().rev() {
        if at + 1 < stages.len() {
            label = label.prepend_hop(hops[at], microbatches);
        }
        label = label.prepend_stage(stage, microbatches);
    }
    Nanos(label.end)
}

/// Returns the fastest stages on at most all devices.
///
/// A dynamic program over (first layer, devices in use, devices of the previous stage). For each state it keeps
/// all Pareto-optimal pairs of chain and end, so the result is exact for [`latency`] and the three policies.
///
/// Errors: [`ParallelError::Plan`] if nothing fits, a size is 0, or there are more than 2^20 states.
pub fn dapple(
    size: &DappleSize,
    cost: PhaseCosts<'_>,
    hop: HopTime<'_>,
) -> Result<PlacedPlan, ParallelError> {
    let refused = |expected: &str| ParallelError::Plan {
        field: "stages".to_owned(),
        value: format!("{} layers on {} machines of {} devices", size.layers, size.machines, size.devices),
        expected: expected.to_owned(),
    };
    if size.layers == 0 || size.microbatches == 0 {
        return Err(refused("at least one layer and one microbatch"));
    }
    let mut search = Search { size, cost, hop, known: BTreeMap::new(), nodes: Vec::new() };
    let start = State { layer: 0, used: vec![0; size.machines as usize], before: Vec::new() };
    let found = search
        .frontier(&start)
        .ok_or_else(|| refused("fewer layers or devices, because the search has too many states"))?;
    let best = found
        .min_by_key(|&at| search.nodes[at].latency.end)
        .ok_or_else(|| refused("a model that fits on the devices"))?;
    let time = Nanos(search.nodes[best].latency.end);
    let (mut stages, mut at) = (Vec::new(), Some(best));
    while let Some(found) = at {
        let SearchNode { stage, next, .. } = &search.nodes[found];
        stages.extend(stage.clone());
        at = *next;
    }
    Ok(PlacedPlan { stages, time })
}

/// Latency of a part of the pipeline: of all stages from some stage to the end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct PartialLatency {
    /// Longest chain from the first forward of these stages to their last backward.
    chain: u64,
    /// Time at which the last average ends.
    end: u64,
}

impl PartialLatency {
    /// The label that stands for no stages, after the last one.
    const NO_STAGES: Self = Self { chain: 0, end: 0 };

    /// Returns the label after one more stage is put before these stages.
    fn prepend_stage(self, cost: PhaseCost, microbatches: u32) -> Self {
        let chain = self.longer(cost.forward.saturating_add(cost.backward), microbatches);
        let end = chain.saturating_add(cost.all_reduce.0).max(self.end.saturating_add(cost.forward.0));
        Self { chain, end }
    }

    /// Returns the label after a hop is put before these stages.
    fn prepend_hop(self, time: Nanos, microbatches: u32) -> Self {
        let chain = self.longer(time.saturating_add(time), microbatches);
        Self { chain, end: self.end.saturating_add(time.0) }
    }

    fn longer(self, round: Nanos, microbatches: u32) -> u64 {
        let steady = round.0.saturating_mul(u64::from(microbatches) - 1);
        round.0.saturating_add(steady.max(self.chain))
    }
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct State {
    layer: usize,
    /// Number of devices in use on each machine.
    used: Vec<u32>,
    /// Devices of the previous stage.
    before: Vec<u32>,
}

/// A label (latency of the stages to the end), and the choice that leads to it.
struct SearchNode {
    latency: PartialLatency,
    /// `None` after the last stage.
    stage: Option<PlacedStage>,
    next: Option<usize>,
}

struct Search<'a> {
    size: &'a DappleSize,
    cost: PhaseCosts<'a>,
    hop: HopTime<'a>,
    known: BTreeMap<State, Range<usize>>,
    nodes: Vec<SearchNode>,
}

/// Maximum number of states.
const STATES: usize = 1 << 20;

impl Search<'_> {
    /// Returns the range of labels for the stages from a state on, including the hop to the first of them.
    /// `None` if there are too many states.
    fn frontier(&mut self, state: &State) -> Option<Range<usize>> {
        if let Some(known) = self.known.get(state) {
            return Some(known.clone());
        }
        if self.known.len() >= STATES {
            return None;
        }
        let mut found: Vec<SearchNode> = Vec::new();
        if state.layer == self.size.layers {
            found.push(SearchNode { latency: PartialLatency::NO_STAGES, stage: None, next: None });
        } else {
            let mut tried: Vec<Vec<u32>> = Vec::new();
            for (&count, policy) in
                self.size.replicas.iter().flat_map(|count| DevicePolicy::ALL.map(|policy| (count, policy)))
            {
                let taken = policy.take(&state.used, self.size.devices, count);
                let Some(devices) = taken.filter(|devices| !devices.is_empty() && !tried.contains(devices))
                else {
                    continue;
                };
                for end in state.layer + 1..=self.size.layers {
                    self.extend(state, end, &devices, &mut found)?;
                }
                tried.push(devices);
            }
        }
        let first = self.nodes.len();
        self.nodes.extend(found);
        self.known.insert(state.clone(), first..self.nodes.len());
        Some(first..self.nodes.len())
    }

    /// Adds the labels in which the next stage ends at layer `end`.
    fn extend(
        &mut self,
        state: &State,
        end: usize,
        devices: &[u32],
        found: &mut Vec<SearchNode>,
    ) -> Option<()> {
        let layers = state.layer..end;
        let Some(cost) = (self.cost)(layers.clone(), devices) else { return Some(()) };
        let mut used = state.used.clone();
        for device in devices {
            used[(device / self.size.devices) as usize] += 1;
        }
        let microbatches = self.size.microbatches;
        let hop = (state.layer > 0).then(|| (self.hop)(state.layer, &state.before, devices));
        let next = State {
            layer: end,
            used,
            before: if end < self.size.layers { devices.to_vec() } else { Vec::new() },
        };
        for at in self.frontier(&next)? {
            let mut label = self.nodes[at].latency.prepend_stage(cost, microbatches);
            if let Some(hop) = hop {
                label = label.prepend_hop(hop, microbatches);
            }
            let beats = |a: PartialLatency, b: PartialLatency| a.chain <= b.chain && a.end <= b.end;
            if found.iter().any(|other| beats(other.latency, label)) {
                continue;
            }
            found.retain(|other| !beats(label, other.latency));
            let stage = Some(PlacedStage { layers: layers.clone(), devices: devices.to_vec() });
            found.push(SearchNode { latency: label, stage, next: Some(at) });
        }
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pipeline::{Boundary, Method, PipelineCost, Settings, StageCost, simulate};
    use crate::seeded_rng::SeededRng;

    /// Returns the latency, computed phase by phase for each pivot and each average.
    fn by_phases(stages: &[PhaseCost], hops: &[Nanos], microbatches: u32) -> u64 {
        let mut all = Vec::new();
        for (at, stage) in stages.iter().enumerate() {
            all.push((stage.forward.0, stage.backward.0, Some(stage.all_reduce.0)));
            all.extend(hops.get(at).filter(|_| at + 1 < stages.len()).map(|hop| (hop.0, hop.0, None)));
        }
        let mut longest = 0;
        for (q, pivot) in all.iter().enumerate() {
            let warm_up: u64 = all[..=q].iter().map(|stage| stage.0).sum();
            let steady = (u64::from(microbatches) - 1) * (pivot.0 + pivot.1);
            for s in 0..=q {
                let Some(average) = all[s].2 else { continue };
                let backward: u64 = all[s..=q].iter().map(|stage| stage.1).sum();
                longest = longest.max(warm_up + steady + backward + average);
            }
        }
        longest
    }

    /// Returns every way to place the layers from `layer` to the last as stages, if `used` devices of each
    /// machine are taken already.
    fn all_from(size: &DappleSize, layer: usize, used: &[u32]) -> Vec<Vec<PlacedStage>> {
        if layer == size.layers {
            return vec![Vec::new()];
        }
        let mut found = Vec::new();
        for &count in &size.replicas {
            for policy in DevicePolicy::ALL {
                let Some(devices) = policy.take(used, size.devices, count) else { continue };
                let mut more = used.to_vec();
                for device in &devices {
                    more[(device / size.devices) as usize] += 1;
                }
                for end in layer + 1..=size.layers {
                    for rest in all_from(size, end, &more) {
                        let mut stages = vec![PlacedStage { layers: layer..end, devices: devices.clone() }];
                        stages.extend(rest);
                        found.push(stages);
                    }
                }
            }
        }
        found
    }

    #[test]
    fn no_stages_are_faster() {
        let mut draw = SeededRng::new(8, 0);
        let mut planned = 0;
        for _ in 0..150 {
            let size = DappleSize {
                layers: 1 + draw.below(4),
                machines: 1 + draw.below(2) as u32,
                devices: 1 + draw.below(2) as u32,
                microbatches: 1 + draw.below(6) as u32,
                replicas: (1..=1 + draw.below(4) as u32).collect(),
            };
            let table: Vec<u64> = (0..997).map(|_| draw.below(60) as u64).collect();
            let at = |layers: &Range<usize>, devices: &[u32]| {
                let devices = devices.iter().fold(0, |sum, &device| sum * 5 + device as usize + 1);
                layers.start * 101 + layers.end * 17 + devices * 7
            };
            let value = |at: usize| table[at % table.len()];
            let cost = |layers: Range<usize>, devices: &[u32]| {
                let at = at(&layers, devices);
                (value(at) > 8).then(|| PhaseCost {
                    forward: Nanos(value(at + 1)),
                    backward: Nanos(value(at + 2)),
                    all_reduce: Nanos(4 * value(at + 3)),
                })
            };
            let hop =
                |layer: usize, a: &[u32], b: &[u32]| Nanos(value(at(&(layer..layer), a) + 3 * b.len()) / 3);
            let price = |stages: &Vec<PlacedStage>| {
                let costs: Option<Vec<PhaseCost>> =
                    stages.iter().map(|stage| cost(stage.layers.clone(), &stage.devices)).collect();
                let hops: Vec<Nanos> = stages
                    .windows(2)
                    .map(|pair| hop(pair[1].layers.start, &pair[0].devices, &pair[1].devices))
                    .collect();
                let costs = costs?;
                assert_eq!(
                    latency(&costs, &hops, size.microbatches).0,
                    by_phases(&costs, &hops, size.microbatches)
                );
                Some(by_phases(&costs, &hops, size.microbatches))
            };
            let best = all_from(&size, 0, &vec![0; size.machines as usize]).iter().filter_map(price).min();
            let found = dapple(&size, &cost, &hop).ok();
            assert_eq!(found.as_ref().map(|plan| plan.time.0), best, "{size:?}");
            assert_eq!(found.as_ref().and_then(|plan| price(&plan.stages)), best);
            planned += u32::from(found.is_some());
        }
        assert!((50..150).contains(&planned), "{planned}");
    }

    /// For equal stages, the latency equals the time of 1F1B. For others, it is a lower bound.
    #[test]
    fn the_latency_is_that_of_1f1b_for_equal_stages_and_a_bound_for_others() {
        let mut draw = SeededRng::new(9, 0);
        for round in 0..100 {
            let (stages, microbatches) = (1 + draw.below(5) as u32, 1 + draw.below(9) as u32);
            let one = |draw: &mut SeededRng| (1 + draw.below(20) as u64, 1 + draw.below(20) as u64);
            let first = one(&mut draw);
            let times: Vec<(u64, u64)> =
                (0..stages).map(|_| if round % 2 == 0 { first } else { one(&mut draw) }).collect();
            let order = Method::OneFOneB.order(&Settings::new(stages, microbatches)).unwrap();
            let mut cost = PipelineCost::uniform(&order, StageCost::UNIT, Boundary::latency(Nanos::ZERO));
            for (stage, &(forward, backward)) in cost.stages.iter_mut().zip(&times) {
                *stage = StageCost {
                    forward: Nanos(forward),
                    input: Nanos(backward),
                    weight: Nanos::ZERO,
                    ..StageCost::default()
                };
            }
            let simulated = simulate(&order, &cost).unwrap().makespan();
            let phases: Vec<PhaseCost> = times
                .iter()
                .map(|&(forward, backward)| PhaseCost {
                    forward: Nanos(forward),
                    backward: Nanos(backward),
                    all_reduce: Nanos::ZERO,
                })
                .collect();
            let predicted = latency(&phases, &vec![Nanos::ZERO; stages as usize], microbatches);
            assert!(predicted <= simulated, "{times:?} {microbatches}");
            assert!(round % 2 == 1 || predicted == simulated, "{times:?} {microbatches}");
        }
    }

    #[test]
    fn policies_take_what_they_say() {
        let take = |policy: DevicePolicy, used: &[u32], count| policy.take(used, 4, count);
        assert_eq!(take(DevicePolicy::FreshFirst, &[2, 0], 3), Some(vec![4, 5, 6]));
        assert_eq!(take(DevicePolicy::FreshFirst, &[2, 0], 5), Some(vec![2, 4, 5, 6, 7]));
        assert_eq!(take(DevicePolicy::AppendFirst, &[2, 0], 3), Some(vec![2, 3, 4]));
        assert_eq!(take(DevicePolicy::ScatterFirst, &[0, 0], 4), Some(vec![0, 1, 4, 5]));
        assert_eq!(take(DevicePolicy::ScatterFirst, &[1, 2], 2), Some(vec![1, 6]));
        assert_eq!(take(DevicePolicy::ScatterFirst, &[1, 2], 3), None);
        assert_eq!(take(DevicePolicy::AppendFirst, &[4, 3], 2), None);
    }
}
