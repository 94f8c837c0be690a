//! Runs Alpa on a model and machines: a dynamic program chooses stages and submeshes; for each submesh an
//! integer program chooses how a layer's operators are split.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ops::Range;

use farflung_base::{Bytes, Nanos};
use farflung_parallel::ParallelError;
use farflung_parallel::planner::alpa::{AlpaSize, Submesh, SubmeshPlan, alpa, submeshes};
use farflung_parallel::planner::dapple::PhaseCost;
use farflung_parallel::planner::operators::{
    DeviceMesh, MemoryLimit, MeshAxis, Operator, OperatorGraph, Sharding, block, choose, choose_within,
};

use super::machines::{EqualDevices, Facts, divisors, ring, shared};
use super::{OperatorCut, Planned, PlannedStage};
use crate::Result;

/// Bytes of weights, gradients and two moments per byte of weights.
const STATE_COPIES: u64 = 4;

pub(super) fn planned(facts: &Facts, runnable: bool) -> Result<Planned> {
    let devices = facts.equal();
    let size = AlpaSize {
        layers: facts.layers.len(),
        nodes: facts.machines,
        devices: facts.each,
        microbatches: facts.microbatches,
    };
    if runnable { equal_copies(facts, &devices, &size) } else { cut_operators(facts, &devices, &size) }
}

/// Makes a plan with the best of all submeshes and all splits of operators.
fn cut_operators(facts: &Facts, devices: &EqualDevices, size: &AlpaSize) -> Result<Planned> {
    let meshes = submeshes(size.nodes, size.devices);
    let layers: BTreeMap<Submesh, LayerCuts> = meshes
        .into_iter()
        .map(|mesh| Ok((mesh, LayerCuts::new(facts, devices, mesh)?)))
        .collect::<Result<_>>()?;
    let least = Least::of(facts);
    let failed = RefCell::new(None);
    let stage = |range: Range<usize>, mesh: Submesh, left: usize| {
        let found = stage_cuts(facts, devices, &least, &layers[&mesh], range, mesh, left);
        found.unwrap_or_else(|error| {
            failed.replace(Some(error));
            None
        })
    };
    let time = |range: Range<usize>, mesh: Submesh, left: usize| Some(stage(range, mesh, left)?.time);
    let found = alpa(size, &time);
    if let Some(error) = failed.take() {
        return Err(error.into());
    }
    let found = found?;
    let count = found.stages.len();
    let modelled = found.time;
    let stages = placed(found, |at, planned, mesh| {
        let Some(cuts) = stage(planned.layers.clone(), mesh, count - at) else { return planned };
        let layer = &layers[&mesh];
        let forward = Nanos(cuts.time.0 / 3);
        PlannedStage {
            tensor: layer.tensor(&cuts.sharding),
            operators: layer.named(&cuts.sharding),
            phases: Some(PhaseCost {
                forward,
                backward: cuts.time.saturating_sub(forward),
                all_reduce: Nanos::ZERO,
            }),
            ..planned
        }
    });
    Ok(Planned { stages, modelled })
}

/// Smallest values over all layers. The first and the last layer have larger values: they also contain the
/// tables and the head.
struct Least {
    state: u64,
    activations: u64,
    operations: u64,
}

impl Least {
    fn of(facts: &Facts) -> Self {
        let layers = || facts.layers.iter();
        Self {
            state: layers().map(|layer| layer.state.0).min().unwrap_or(0),
            activations: layers().map(|layer| layer.activations.0).min().unwrap_or(0),
            operations: layers().map(|layer| layer.operations).min().unwrap_or(0),
        }
    }
}

/// The splits of a stage on a submesh.
struct StageCuts {
    sharding: Sharding,
    /// Time per microbatch.
    time: Nanos,
}

/// Returns the fastest splits of a stage's layers that fit into memory with the activations of as many
/// microbatches as there are stages from here to the end; `None` if there are none. The additional tensors of
/// the first and the last layer (tables and the head) are divided equally.
///
/// Errors: as [`choose`].
fn stage_cuts(
    facts: &Facts,
    devices: &EqualDevices,
    least: &Least,
    layer: &LayerCuts,
    range: Range<usize>,
    mesh: Submesh,
    left: usize,
) -> Result<Option<StageCuts>, ParallelError> {
    let (count, all) = (range.len() as u64, mesh.size());
    let (state, activations) = facts.memory(range.clone());
    let besides = |sum: u64, least: u64| sum.saturating_sub(least.saturating_mul(count));
    let under_way = (left as u64).min(u64::from(facts.microbatches));
    let other_state = besides(state.0, least.state);
    let other_activations = besides(activations.0, least.activations);
    let others = other_state.saturating_add(other_activations.saturating_mul(under_way)) / u64::from(all);
    let Some(room) = devices.memory.0.checked_sub(others) else { return Ok(None) };
    let limit =
        MemoryLimit { copies: STATE_COPIES, microbatches: under_way, bytes: Bytes(room / count.max(1)) };
    let Some(sharding) = layer.within(&limit)? else { return Ok(None) };
    let operations = facts.operations(range);
    let rest = shared(besides(operations, least.operations), devices.flops, all);
    let time = Nanos(sharding.cost.0.saturating_mul(count)).saturating_add(rest);
    Ok(Some(StageCuts { sharding, time }))
}

/// The splits of a layer's operators on a submesh, by the available memory.
struct LayerCuts {
    graph: OperatorGraph,
    /// The fastest splits without a memory limit.
    free: Sharding,
    /// Results so far, by the number of microbatches in flight and the available memory.
    found: RefCell<BTreeMap<u64, BTreeMap<u64, Option<Sharding>>>>,
}

impl LayerCuts {
    fn new(facts: &Facts, devices: &EqualDevices, mesh: Submesh) -> Result<Self, ParallelError> {
        let axis = |size, link| MeshAxis { size, link };
        let mesh = DeviceMesh {
            axes: [axis(mesh.nodes, devices.across), axis(mesh.devices, devices.inside)],
            flops: devices.flops,
            efficiency: facts.efficiency.clone(),
            microbatches: facts.microbatches,
        };
        let graph = block(&facts.block, &mesh);
        let free = choose(&graph)?;
        Ok(Self { graph, free, found: RefCell::default() })
    }

    /// Returns the fastest splits within a limit. The integer program is solved once per point of the front of
    /// time against memory, rather than once per amount of memory.
    fn within(&self, limit: &MemoryLimit) -> Result<Option<Sharding>, ParallelError> {
        let room = limit.bytes.0;
        let takes = |sharding: &Sharding| self.graph.memory(&sharding.strategies, limit);
        let fits = |sharding: &Sharding| takes(sharding).is_some_and(|bytes| bytes.0 <= room);
        if fits(&self.free) {
            return Ok(Some(self.free.clone()));
        }
        let mut found = self.found.borrow_mut();
        let known = found.entry(limit.microbatches).or_default();
        // If the best splits for the same amount of memory or more fit here, they are also the best splits
        // here. If no splits fit into more memory, none fit here.
        if let Some((_, found)) = known.range(room..).find(|(_, found)| found.as_ref().is_none_or(fits)) {
            return Ok(found.clone());
        }
        let sharding = choose_within(&self.graph, limit)?;
        known.insert(room, sharding.clone());
        Ok(sharding)
    }

    /// Returns the number of devices among which the weights of the widest product are split.
    fn tensor(&self, sharding: &Sharding) -> u32 {
        let operators = self.graph.operators.iter().zip(&sharding.strategies);
        let widest = operators.map(|(operator, &at)| {
            let all = operator.strategies.iter().map(|strategy| strategy.weights.0).max().unwrap_or(0);
            (all, all / operator.strategies[at].weights.0.max(1))
        });
        widest.max().map_or(1, |(_, parts)| parts.max(1) as u32)
    }

    /// Returns a description of the splits.
    fn named(&self, sharding: &Sharding) -> Vec<OperatorCut> {
        let operators = self.graph.operators.iter().zip(&sharding.strategies);
        let cut = |(operator, &at): (&Operator, &usize)| OperatorCut {
            operator: operator.name.clone(),
            cut: operator.strategies[at].name.clone(),
        };
        operators.map(cut).collect()
    }
}

/// Makes a plan with submeshes of one size, whose devices are copies.
fn equal_copies(facts: &Facts, devices: &EqualDevices, size: &AlpaSize) -> Result<Planned> {
    let mut best: Option<SubmeshPlan> = None;
    let mut refused = None;
    for copies in
        divisors(facts.devices.len() as u32).into_iter().filter(|&copies| copies <= facts.microbatches)
    {
        let time = |range: Range<usize>, mesh: Submesh, left: usize| {
            (mesh.size() == copies).then(|| copied_stage(facts, devices, range, mesh, left)).flatten()
        };
        match alpa(size, &time) {
            Ok(found) if best.as_ref().is_none_or(|best| found.time < best.time) => best = Some(found),
            Ok(_) => {}
            Err(error) => refused = Some(error),
        }
    }
    let found = best.ok_or_else(|| refused.unwrap_or(ParallelError::NoDevices))?;
    let modelled = found.time;
    Ok(Planned { stages: placed(found, |_, stage, _| stage), modelled })
}

/// Returns the time of a microbatch on a stage whose devices are copies; `None` if the stage does not fit into
/// memory.
fn copied_stage(
    facts: &Facts,
    devices: &EqualDevices,
    range: Range<usize>,
    mesh: Submesh,
    left: usize,
) -> Option<Nanos> {
    let all = mesh.size();
    let (state, activations) = facts.memory(range.clone());
    let under_way = (left as u64).min(u64::from(facts.microbatches));
    let needs = state.0.saturating_add(activations.0.saturating_mul(under_way) / u64::from(all));
    let link = if mesh.nodes > 1 { devices.across } else { devices.inside };
    let average = ring(facts.gradients(range.clone()), all, link);
    let time = shared(facts.operations(range), devices.flops, all)
        .saturating_add(Nanos(average.0 / u64::from(facts.microbatches)));
    (needs <= devices.memory.0).then_some(time)
}

/// Places submeshes on the devices.
fn placed(plan: SubmeshPlan, of: impl Fn(usize, PlannedStage, Submesh) -> PlannedStage) -> Vec<PlannedStage> {
    let places = plan.places();
    let stages =
        plan.stages.into_iter().zip(places).enumerate().map(|(at, (stage, place))| {
            of(at, PlannedStage::copies(stage.layers, place.collect()), stage.mesh)
        });
    stages.collect()
}
