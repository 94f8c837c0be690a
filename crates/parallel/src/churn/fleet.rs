//! A model on equal machines, and the time of a training step for any number of pipelines and stages.

use std::collections::BTreeMap;
use std::ops::Range;

use farflung_base::{Bytes, Link, Nanos};

use crate::ParallelError;
use crate::pipeline::{
    Boundary, ComputeOrder, Method, PipelineCost, Settings, StageCost, StageMemory, simulate,
};
use crate::planner::regional::ring_time;
use crate::planner::uneven::{ChainLayer, ChainMachine};

/// A model and the machines that train it. All machines are equal.
#[derive(Debug, Clone)]
pub struct Fleet {
    /// The layers, with costs for one microbatch. The forward pass takes a third of a layer's operations.
    pub layers: Vec<ChainLayer>,
    /// Speed and memory of each machine.
    pub machine: ChainMachine,
    /// Link between any two machines.
    pub link: Link,
    /// Bytes that the first and the last stage exchange in each step: the gradients of a shared embedding
    /// table.
    pub tied: Bytes,
    /// Number of microbatches in a step, over all pipelines.
    pub microbatches: u32,
}

/// A number of pipelines side by side, all with the same number of stages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Shape {
    /// Number of stages of each pipeline.
    pub stages: u32,
    /// Number of pipelines.
    pub pipelines: u32,
}

impl Shape {
    /// Returns the number of machines that the shape uses.
    #[must_use]
    pub const fn machines(self) -> u32 {
        self.stages * self.pipelines
    }
}

/// The layers of a model, divided into stages.
#[derive(Debug, Clone)]
pub(super) struct Division {
    pub(super) layers: Vec<Range<usize>>,
    pub(super) cost: PipelineCost,
    /// Bytes of state of the stage with the most state.
    pub(super) state: Bytes,
}

/// Times of a fleet's steps. Each is computed once and cached.
#[derive(Debug)]
pub struct StepTimes<'a> {
    fleet: &'a Fleet,
    divisions: BTreeMap<u32, Option<Division>>,
    passes: BTreeMap<(u32, u32), Option<Nanos>>,
}

impl<'a> StepTimes<'a> {
    /// Creates an empty cache for `fleet`.
    ///
    /// Errors: [`ParallelError::Zero`] if the fleet has no layers, no microbatches, or a speed or a bandwidth
    /// of zero.
    pub fn new(fleet: &'a Fleet) -> Result<Self, ParallelError> {
        let zero = |field| Err(ParallelError::Zero { of: "the fleet".to_owned(), field });
        if fleet.layers.is_empty() {
            return zero("layers");
        }
        if fleet.microbatches == 0 {
            return zero("microbatches");
        }
        if fleet.machine.flops == 0 {
            return zero("flops");
        }
        if fleet.link.bandwidth.0 == 0 {
            return zero("bandwidth");
        }
        Ok(Self { fleet, divisions: BTreeMap::new(), passes: BTreeMap::new() })
    }

    /// Returns the fleet that the times are for.
    #[must_use]
    pub const fn fleet(&self) -> &'a Fleet {
        self.fleet
    }

    /// Returns the division into this number of stages whose slowest stage is fastest, within the memory that
    /// 1F1B needs.
    pub(super) fn division(&mut self, stages: u32) -> Option<&Division> {
        let fleet = self.fleet;
        self.divisions.entry(stages).or_insert_with(|| divide(fleet, stages)).as_ref()
    }

    /// Builds the error that says why this number of machines is too small.
    pub(super) fn too_small(&self, machines: u32) -> ParallelError {
        let all = |of: fn(&ChainLayer) -> u64| self.fleet.layers.iter().map(of).fold(0, u64::saturating_add);
        let needs = all(|layer| layer.state.0).saturating_add(all(|layer| layer.activations.0));
        let has = self.fleet.machine.memory.map_or(u64::MAX, |memory| memory.0);
        ParallelError::TooSmall {
            layers: self.fleet.layers.len(),
            machines: machines as usize,
            needs: Bytes(needs),
            has: Bytes(has.saturating_mul(u64::from(machines))),
        }
    }

    /// Returns the bytes of state of the stage with the most state.
    pub fn state(&mut self, stages: u32) -> Option<Bytes> {
        self.division(stages).map(|division| division.state)
    }

    /// Returns the simulated time of one pipeline's pass under 1F1B. `None` if a stage does not fit in memory.
    pub fn pass(&mut self, stages: u32, microbatches: u32) -> Option<Nanos> {
        if let Some(&known) = self.passes.get(&(stages, microbatches)) {
            return known;
        }
        let time = self.division(stages).and_then(|division| {
            let order = Method::OneFOneB.order(&Settings::new(stages, microbatches)).ok()?;
            Some(simulate(&order, &division.cost).ok()?.makespan())
        });
        self.passes.insert((stages, microbatches), time);
        time
    }

    /// Returns the time to average gradients over `copies` of each stage and to exchange those of the shared
    /// table.
    pub fn averages(&mut self, stages: u32, copies: u32) -> Option<Nanos> {
        let link = self.fleet.link;
        let tied = if stages > 1 { link.time(self.fleet.tied) } else { Nanos::ZERO };
        // The state has four equal parts: weights, gradients and two moments.
        let gradients = Bytes(self.state(stages)?.0 / 4);
        let ring = if copies > 1 { ring_time(&vec![link; copies as usize], gradients) } else { Nanos::ZERO };
        Some(ring.saturating_add(tied))
    }

    /// Returns the time of a step of all microbatches. `None` if a stage does not fit in memory or a pipeline
    /// would get no microbatch.
    pub fn step(&mut self, shape: Shape) -> Option<Nanos> {
        if shape.pipelines == 0 || shape.pipelines > self.fleet.microbatches {
            return None;
        }
        let each = self.fleet.microbatches.div_ceil(shape.pipelines);
        let pass = self.pass(shape.stages, each)?;
        Some(pass.saturating_add(self.averages(shape.stages, shape.pipelines)?))
    }

    /// Returns the time of a step in which `order` contains the work of all pipelines. The layers are divided
    /// into as many stages as the order has.
    pub(super) fn ordered(&mut self, order: &ComputeOrder, copies: u32) -> Option<Nanos> {
        let stages = order.placement().depth();
        let pass = simulate(order, &self.division(stages)?.cost).ok()?.makespan();
        Some(pass.saturating_add(self.averages(stages, copies)?))
    }
}

/// Finds the exact best division by dynamic programming over the first layer and the number of stages to the
/// end.
fn divide(fleet: &Fleet, stages: u32) -> Option<Division> {
    let (count, stages) = (fleet.layers.len(), stages as usize);
    if stages == 0 || stages > count {
        return None;
    }
    let sum = |layers: &Range<usize>, of: fn(&ChainLayer) -> u64| {
        fleet.layers[layers.clone()].iter().map(of).fold(0, u64::saturating_add)
    };
    let time = |layers: &Range<usize>| {
        let operations = u128::from(sum(layers, |layer| layer.operations)) * 1_000_000_000;
        u64::try_from(operations / u128::from(fleet.machine.flops))
            .unwrap_or(u64::MAX / 64)
            .min(u64::MAX / 64)
    };
    let fits = |layers: &Range<usize>, from_end: usize| {
        let held = from_end.min(fleet.microbatches as usize) as u64;
        let activations = sum(layers, |layer| layer.activations.0).saturating_mul(held);
        let needs = sum(layers, |layer| layer.state.0).saturating_add(activations);
        fleet.machine.memory.is_none_or(|memory| needs <= memory.0)
    };
    // `best[to_end - 1][first]`, for the layers from `first` on in `to_end` stages: time of the slowest stage,
    // and the end of the first stage.
    let mut best: Vec<Vec<Option<(u64, usize)>>> = Vec::with_capacity(stages);
    for to_end in 1..=stages {
        let row = (0..count).map(|first| {
            let ends = if to_end == 1 { count..=count } else { first + 1..=count - 1 };
            let of = |end: usize| {
                let layers = first..end;
                let rest = if to_end == 1 { 0 } else { best[to_end - 2][end]?.0 };
                fits(&layers, to_end).then(|| (time(&layers).max(rest), end))
            };
            ends.filter_map(of).min()
        });
        let row: Vec<_> = row.collect();
        best.push(row);
    }
    let mut layers = Vec::with_capacity(stages);
    let mut first = 0;
    for to_end in (1..=stages).rev() {
        let (_, end) = best[to_end - 1][first]?;
        layers.push(first..end);
        first = end;
    }
    let stage = |layers: &Range<usize>| {
        let third = Nanos(time(layers) / 3);
        let activations = Bytes(sum(layers, |layer| layer.activations.0));
        StageCost {
            forward: third,
            input: third,
            weight: third,
            recompute: third,
            step: Nanos::ZERO,
            memory: StageMemory { activations, for_weight: activations, input: Bytes(0) },
        }
    };
    let boundary = |layers: &Range<usize>| {
        let bytes = fleet.layers[layers.end - 1].output;
        Boundary { link: fleet.link, forward: bytes, backward: bytes }
    };
    let cost = PipelineCost {
        stages: layers.iter().map(stage).collect(),
        boundaries: layers[..stages - 1].iter().map(boundary).collect(),
        slices: Vec::new(),
        overlap_percent: 0,
    };
    let state = layers.iter().map(|layers| sum(layers, |layer| layer.state.0)).max().unwrap_or(0);
    Some(Division { layers, cost, state: Bytes(state) })
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::planner::uneven::{Chain, uneven};
    use farflung_base::{Bandwidth, Topology};

    /// Layers of unequal work, on machines whose memory holds two or three of them.
    pub(in crate::churn) fn fleet() -> Fleet {
        let layer = |at: u64| ChainLayer {
            operations: 3_000_000 * (4 + at % 3),
            state: Bytes(40_000_000),
            activations: Bytes(1_000_000),
            output: Bytes(500_000),
        };
        Fleet {
            layers: (0..8).map(layer).collect(),
            machine: ChainMachine { flops: 1_000_000_000, memory: Some(Bytes(140_000_000)) },
            link: Link { bandwidth: Bandwidth(1_000_000_000), latency: Nanos(1_000_000) },
            tied: Bytes(1_000_000),
            microbatches: 24,
        }
    }

    #[test]
    fn a_division_is_that_of_the_planner_for_unequal_machines() {
        let fleet = fleet();
        let mut prices = StepTimes::new(&fleet).unwrap();
        assert!(prices.division(2).is_none() && prices.division(9).is_none());
        for stages in 3..=8 {
            let chain = Chain {
                layers: fleet.layers.clone(),
                machines: vec![fleet.machine; stages as usize],
                links: Topology::uniform(stages as usize, fleet.link),
                microbatches: fleet.microbatches,
            };
            let slowest = |layers: &Range<usize>| -> u64 {
                chain.layers[layers.clone()].iter().map(|layer| layer.operations).sum()
            };
            let found = prices.division(stages).unwrap();
            let most = found.layers.iter().map(slowest).max().unwrap();
            // The planner `uneven` may leave machines out. If it uses all of them, both functions must find the
            // same slowest stage.
            let planned = uneven(&chain).unwrap();
            if planned.stages.len() == stages as usize {
                let best = planned.stages.iter().map(|stage| slowest(&stage.layers)).max().unwrap();
                assert_eq!(most, best, "{stages}");
            }
            assert_eq!(found.layers.last().unwrap().end, 8);
        }
    }

    #[test]
    fn a_step_is_its_pass_and_averages_and_bad_fleets_are_refused() {
        let fleet = fleet();
        let mut prices = StepTimes::new(&fleet).unwrap();
        let shape = Shape { stages: 4, pipelines: 3 };
        let (pass, averages) = (prices.pass(4, 8).unwrap(), prices.averages(4, 3).unwrap());
        assert_eq!(prices.step(shape), Some(pass.saturating_add(averages)));
        // The slowest stage has two layers that together take at least 30 ms, and processes 8 microbatches.
        assert!(pass.0 >= 8 * 30_000_000, "{pass}");
        assert!(prices.step(Shape { stages: 4, pipelines: 25 }).is_none());
        assert!(StepTimes::new(&Fleet { microbatches: 0, ..fleet.clone() }).is_err());
        let dead = Link { bandwidth: Bandwidth(0), ..fleet.link };
        assert!(StepTimes::new(&Fleet { link: dead, ..fleet }).is_err());
    }
}
