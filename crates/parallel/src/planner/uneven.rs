//! Divides layers over machines in a given order for one pipeline, within memory. The result is exact.

use std::ops::Range;

use farflung_base::{Bytes, Nanos, Rank, Topology};

use crate::ParallelError;

/// One layer of a chain, with costs for one microbatch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChainLayer {
    /// Operations of forward and backward.
    pub operations: u64,
    /// Bytes of weights, gradients and optimizer state.
    pub state: Bytes,
    /// Bytes that the layer's backward needs, held from its forward on.
    pub activations: Bytes,
    /// Bytes of the layer's output for the next layer, and of the gradient that comes back.
    pub output: Bytes,
}

/// Speed and memory of a machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChainMachine {
    /// Sustained operations per second.
    pub flops: u64,
    /// Memory; `None`: unlimited.
    pub memory: Option<Bytes>,
}

/// Input of the planner.
#[derive(Debug, Clone)]
pub struct Chain {
    /// Layers, first to last.
    pub layers: Vec<ChainLayer>,
    /// Machines, in the order in which they may become stages. Machine `i` is rank `i` of `links`.
    pub machines: Vec<ChainMachine>,
    /// Links between machines.
    pub links: Topology,
    /// Number of microbatches in a step.
    pub microbatches: u32,
}

/// A stage: a machine and its layers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChainStage {
    /// Layers of the stage; at least one.
    pub layers: Range<usize>,
    /// Index of the machine.
    pub machine: usize,
}

/// The stages of a plan, first to last, and the time of a step.
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use]
pub struct ChainPlan {
    /// Stages. Machines without a stage are unused.
    pub stages: Vec<ChainStage>,
    /// Time of a step, as computed by [`Chain::time`].
    pub time: Nanos,
}

impl Chain {
    /// Returns the time of a step: `sum(t) + 2 sum(hops) + (m - 1) max(t, hop)`. The first microbatch passes
    /// all stages and hops once in each direction; each further one takes as long as the slowest stage or
    /// transfer.
    /// `None` if a machine cannot hold its stage.
    ///
    /// The `k`-th stage from the end holds `min(m, k)` microbatches, as under 1F1B. Transfers in the two
    /// directions are independent.
    ///
    /// # Panics
    /// If a stage contains a layer or machine that does not exist.
    #[must_use]
    pub fn time(&self, stages: &[ChainStage]) -> Option<Nanos> {
        let sums = Sums::new(self);
        let (mut once, mut slowest) = (0_u64, 0_u64);
        for (at, stage) in stages.iter().enumerate() {
            if !sums.fits(stage, stages.len() - at) {
                return None;
            }
            let time = sums.time(stage);
            (once, slowest) = (once.saturating_add(time), slowest.max(time));
            if let Some(next) = stages.get(at + 1) {
                let hop = sums.hop(stage.layers.end, stage.machine, next.machine);
                once = once.saturating_add(2 * hop.once);
                slowest = slowest.max(hop.each);
            }
        }
        Some(Nanos(once.saturating_add(slowest.saturating_mul(u64::from(self.microbatches.max(1)) - 1))))
    }

    fn check(&self) -> Result<(), ParallelError> {
        let zero = |of: &str, field| Err(ParallelError::Zero { of: of.to_owned(), field });
        if self.layers.is_empty() {
            return zero("the chain", "layers");
        }
        if self.microbatches == 0 {
            return zero("the chain", "microbatches");
        }
        if self.machines.is_empty() {
            return Err(ParallelError::NoDevices);
        }
        if let Some(at) = self.machines.iter().position(|machine| machine.flops == 0) {
            return zero(&format!("machine {at}"), "flops");
        }
        if self.links.size() != self.machines.len() {
            let (given, ranks) = (self.links.size(), self.machines.len());
            return Err(ParallelError::PerRank { what: "chain.links", given, ranks });
        }
        Ok(())
    }
}

/// Prefix sums over the layers, for sums over ranges.
struct Sums<'a> {
    chain: &'a Chain,
    operations: Vec<u128>,
    state: Vec<u64>,
    activations: Vec<u64>,
}

/// Times of messages over the boundary between two stages.
#[derive(Clone, Copy)]
struct Hop {
    /// Time of the first message, averaged over the two directions.
    once: u64,
    /// Time for which each further message occupies the wire in the slower direction.
    each: u64,
}

impl<'a> Sums<'a> {
    fn new(chain: &'a Chain) -> Self {
        let (mut operations, mut state, mut activations) = (vec![0], vec![0], vec![0]);
        for (at, layer) in chain.layers.iter().enumerate() {
            operations.push(operations[at] + u128::from(layer.operations));
            state.push(u64::saturating_add(state[at], layer.state.0));
            activations.push(u64::saturating_add(activations[at], layer.activations.0));
        }
        Self { chain, operations, state, activations }
    }

    fn time(&self, stage: &ChainStage) -> u64 {
        let operations = self.operations[stage.layers.end] - self.operations[stage.layers.start];
        let time = operations * 1_000_000_000 / u128::from(self.chain.machines[stage.machine].flops);
        u64::try_from(time).unwrap_or(u64::MAX / 4).min(u64::MAX / 4)
    }

    /// Returns whether a machine can hold its stage, the `from_end`-th from the end.
    fn fits(&self, stage: &ChainStage, from_end: usize) -> bool {
        let memory = self.chain.machines[stage.machine].memory;
        memory.is_none_or(|memory| self.held(stage, from_end) <= memory)
    }

    fn held(&self, stage: &ChainStage, from_end: usize) -> Bytes {
        let of = |sums: &[u64]| sums[stage.layers.end] - sums[stage.layers.start];
        let microbatches = from_end.min(self.chain.microbatches as usize) as u64;
        Bytes(of(&self.activations).saturating_mul(microbatches).saturating_add(of(&self.state)))
    }

    /// Returns the times of the boundary between two machines; the first one's layers end before layer `end`.
    fn hop(&self, end: usize, from: usize, to: usize) -> Hop {
        let (from, to) = (Rank(from as u32), Rank(to as u32));
        let bytes = self.chain.layers[end - 1].output;
        let way = |from, to| {
            let each = self.chain.links.rate(from, to).transfer(bytes).0.min(u64::MAX / 8);
            Hop { once: each.saturating_add(self.chain.links.link(from, to).latency.0), each }
        };
        let (there, back) = (way(from, to), way(to, from));
        Hop { once: u64::midpoint(there.once, back.once), each: there.each.max(back.each) }
    }
}

/// Returns the fastest stages of a chain. The result is exact: for each possible bound on the slowest stage or
/// transfer, dynamic programming over the remaining layers, their first machine and the number of stages.
///
/// Machines may be left out, but not reordered. Let `t` be the bound, `F_t` the least sum of stages and hops
/// within it, and `m` the number of microbatches; the result is the minimum of `F_t + (m - 1) t`. Bounds are
/// tried upwards from the least feasible one, until `(m - 1) t` plus the least sum under any bound reaches the
/// best time. Source: the scheme of Alpa (Zheng et al. 2022, section 5.2), with unequal machines and links
/// instead of submeshes.
///
/// Errors: [`ParallelError::Zero`], [`ParallelError::NoDevices`] and [`ParallelError::PerRank`] for an invalid
/// chain; [`ParallelError::TooSmall`] if no division fits, with the memory needed and available.
pub fn uneven(chain: &Chain) -> Result<ChainPlan, ParallelError> {
    chain.check()?;
    let sums = Sums::new(chain);
    let further = u64::from(chain.microbatches) - 1;
    let Some(least) = Division::below(&sums, u64::MAX).best() else { return Err(too_small(chain)) };
    let bounds = bounds(&sums);
    let first = bounds.partition_point(|&bound| Division::below(&sums, bound).best().is_none());
    let mut best: Option<(u64, Vec<ChainStage>)> = None;
    for &bound in &bounds[first..] {
        let floor = least.0.saturating_add(bound.saturating_mul(further));
        if best.as_ref().is_some_and(|(time, _)| floor >= *time) {
            break;
        }
        let Some((_, stages)) = Division::below(&sums, bound).best() else { continue };
        let time = chain.time(&stages).map_or(u64::MAX, |time| time.0);
        if best.as_ref().is_none_or(|(before, _)| time < *before) {
            best = Some((time, stages));
        }
    }
    let (time, stages) = best.ok_or_else(|| too_small(chain))?;
    Ok(ChainPlan { stages, time: Nanos(time) })
}

/// Returns all times that a stage or a transfer can take, ascending.
fn bounds(sums: &Sums<'_>) -> Vec<u64> {
    let (layers, machines) = (sums.chain.layers.len(), sums.chain.machines.len());
    let mut bounds = Vec::new();
    for start in 0..layers {
        for end in start + 1..=layers {
            for machine in 0..machines {
                bounds.push(sums.time(&ChainStage { layers: start..end, machine }));
            }
        }
    }
    for end in 1..layers {
        for from in 0..machines {
            bounds.extend((from + 1..machines).map(|to| sums.hop(end, from, to).each));
        }
    }
    bounds.sort_unstable();
    bounds.dedup();
    bounds
}

/// Table of the best ways to divide the last layers into stages, by the number of stages, the first layer and
/// the first machine. Best means the least sum of the times of stages and hops.
struct Division<'a> {
    sums: &'a Sums<'a>,
    /// Best first stage, indexed by `[stages][first layer][machine]`: the least sum, the end of the first
    /// stage, the machine of the next one.
    least: Vec<Option<Step>>,
}

#[derive(Clone, Copy)]
struct Step {
    sum: u64,
    end: usize,
    next: usize,
}

impl<'a> Division<'a> {
    fn at(&self, stages: usize, first: usize, machine: usize) -> usize {
        let (layers, machines) = (self.sums.chain.layers.len(), self.sums.chain.machines.len());
        (stages * layers + first) * machines + machine
    }

    fn below(sums: &'a Sums<'a>, bound: u64) -> Self {
        let (layers, machines) = (sums.chain.layers.len(), sums.chain.machines.len());
        let most = machines.min(layers);
        let mut division = Self { sums, least: vec![None; (most + 1) * layers * machines] };
        for stages in 1..=most {
            for first in 0..layers {
                for machine in 0..machines {
                    let at = division.at(stages, first, machine);
                    division.least[at] = division.step(stages, first, machine, bound);
                }
            }
        }
        division
    }

    /// Divides the layers from `first` on into `stages` stages, the first of them on `machine`, and returns the
    /// best first stage.
    fn step(&self, stages: usize, first: usize, machine: usize, bound: u64) -> Option<Step> {
        let (layers, machines) = (self.sums.chain.layers.len(), self.sums.chain.machines.len());
        let mut best: Option<Step> = None;
        let ends = if stages == 1 { layers..=layers } else { first + 1..=layers - 1 };
        for end in ends {
            let stage = ChainStage { layers: first..end, machine };
            let time = self.sums.time(&stage);
            // More layers take more time and more memory, so longer stages cannot fit either.
            if time > bound || !self.sums.fits(&stage, stages) {
                break;
            }
            if stages == 1 {
                return Some(Step { sum: time, end, next: machine });
            }
            for next in machine + 1..machines {
                let Some(rest) = self.least[self.at(stages - 1, end, next)] else { continue };
                let hop = self.sums.hop(end, machine, next);
                let sum = time.saturating_add(2 * hop.once).saturating_add(rest.sum);
                if hop.each <= bound && best.is_none_or(|best| sum < best.sum) {
                    best = Some(Step { sum, end, next });
                }
            }
        }
        best
    }

    /// Returns the least sum over any number of stages and first machine, with its stages.
    fn best(&self) -> Option<(u64, Vec<ChainStage>)> {
        let (layers, machines) = (self.sums.chain.layers.len(), self.sums.chain.machines.len());
        let starts =
            (1..=machines.min(layers)).flat_map(|stages| (0..machines).map(move |machine| (stages, machine)));
        let found = starts.filter_map(|(stages, machine)| {
            Some((self.least[self.at(stages, 0, machine)]?.sum, stages, machine))
        });
        let (sum, stages, mut machine) = found.min()?;
        let (mut first, mut list) = (0, Vec::new());
        for left in (1..=stages).rev() {
            let step = self.least[self.at(left, first, machine)]?;
            list.push(ChainStage { layers: first..step.end, machine });
            (first, machine) = (step.end, step.next);
        }
        Some((sum, list))
    }
}

/// Builds the error for layers that do not fit: it has the memory that they need (state, and activations of one
/// microbatch) and the memory of all machines.
fn too_small(chain: &Chain) -> ParallelError {
    let needs = chain.layers.iter().map(|layer| layer.state.0.saturating_add(layer.activations.0));
    let has = chain.machines.iter().map(|machine| machine.memory.map_or(0, |memory| memory.0));
    let (layers, machines) = (chain.layers.len(), chain.machines.len());
    ParallelError::TooSmall {
        layers,
        machines,
        needs: Bytes(needs.fold(0, u64::saturating_add)),
        has: Bytes(has.fold(0, u64::saturating_add)),
    }
}

#[cfg(test)]
mod tests {
    use farflung_base::{Bandwidth, Link};

    use super::*;
    use crate::seeded_rng::SeededRng;

    fn chain(draw: &mut SeededRng, layers: usize, machines: usize) -> Chain {
        let layer = |draw: &mut SeededRng| ChainLayer {
            operations: 1_000_000 * (1 + draw.below(9) as u64),
            state: Bytes(1 + draw.below(5) as u64),
            activations: Bytes(draw.below(4) as u64),
            output: Bytes(1000 * (1 + draw.below(20) as u64)),
        };
        let machine = |draw: &mut SeededRng| ChainMachine {
            flops: 1_000_000_000 * (1 + draw.below(4) as u64),
            memory: (draw.below(4) > 0).then(|| Bytes(3 + draw.below(20) as u64)),
        };
        let mut links = Topology::uniform(machines, Link::FREE);
        for (a, b) in (0..machines).flat_map(|a| (0..machines).map(move |b| (a, b))) {
            let bandwidth = Bandwidth(10_000_000 * (1 + draw.below(20) as u64));
            let latency = Nanos::from_micros(draw.below(3000) as u64);
            links.set_link(Rank(a as u32), Rank(b as u32), Link { bandwidth, latency });
        }
        Chain {
            layers: (0..layers).map(|_| layer(draw)).collect(),
            machines: (0..machines).map(|_| machine(draw)).collect(),
            links,
            microbatches: 1 + draw.below(8) as u32,
        }
    }

    /// Returns all lists of stages for the layers from `first` on, on machines from `machine` on.
    fn all(chain: &Chain, first: usize, machine: usize) -> Vec<Vec<ChainStage>> {
        if first == chain.layers.len() {
            return vec![Vec::new()];
        }
        let mut found = Vec::new();
        for on in machine..chain.machines.len() {
            for end in first + 1..=chain.layers.len() {
                for rest in all(chain, end, on + 1) {
                    let mut stages = vec![ChainStage { layers: first..end, machine: on }];
                    stages.extend(rest);
                    found.push(stages);
                }
            }
        }
        found
    }

    #[test]
    fn no_division_is_faster() {
        let mut draw = SeededRng::new(3, 0);
        let mut planned = 0;
        for _ in 0..300 {
            let (layers, machines) = (1 + draw.below(6), 1 + draw.below(4));
            let chain = chain(&mut draw, layers, machines);
            let best = all(&chain, 0, 0).iter().filter_map(|stages| chain.time(stages)).min();
            let found = uneven(&chain).ok();
            assert_eq!(found.as_ref().map(|plan| plan.time), best, "{chain:?}");
            if let Some(plan) = found {
                assert_eq!(chain.time(&plan.stages), Some(plan.time));
                planned += 1;
            }
        }
        assert!((150..300).contains(&planned), "{planned}");
    }

    #[test]
    fn a_model_that_fits_nowhere_is_refused_with_what_is_missing() {
        let mut chain = chain(&mut SeededRng::new(1, 0), 4, 2);
        chain.layers[2].state = Bytes(1000);
        chain.machines.iter_mut().for_each(|machine| machine.memory = Some(Bytes(100)));
        let error = uneven(&chain).unwrap_err().to_string();
        assert!(error.contains("200 B") && error.contains("4 layers"), "{error}");
        chain.machines[1].flops = 0;
        assert!(uneven(&chain).unwrap_err().to_string().contains("machine 1"));
    }
}
