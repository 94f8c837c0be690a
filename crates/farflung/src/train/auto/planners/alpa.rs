//! Alpa for a model and machines: stages and submeshes by dynamic program, and for each submesh the cuts of a
//! layer's operators by integer program.

use std::collections::BTreeMap;
use std::ops::Range;

use farflung_base::{Bytes, Nanos};
use farflung_parallel::ParallelError;
use farflung_parallel::planner::alpa::{AlpaSize, Submesh, SubmeshPlan, alpa, submeshes};
use farflung_parallel::planner::dapple::PhaseCost;
use farflung_parallel::planner::operators::{DeviceMesh, MeshAxis, block, choose};

use super::machines::{EqualDevices, Facts, divisors, ring, shared};
use super::{OperatorCut, Planned, PlannedStage};
use crate::Result;

/// A layer on a submesh.
struct CutLayer {
    time: Nanos,
    /// Weights on each device.
    weights: Bytes,
    /// Devices among which the widest product's weights are cut.
    tensor: u32,
    operators: Vec<OperatorCut>,
}

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

/// Any submeshes, with any cuts.
fn cut_operators(facts: &Facts, devices: &EqualDevices, size: &AlpaSize) -> Result<Planned> {
    let mut layers: BTreeMap<Submesh, CutLayer> = BTreeMap::new();
    for mesh in submeshes(size.nodes, size.devices) {
        layers.insert(mesh, cut_layer(facts, devices, mesh)?);
    }
    let time = |range: Range<usize>, mesh: Submesh, left: usize| {
        stage_time(facts, devices, &layers[&mesh], range, mesh, left)
    };
    let found = alpa(size, &time)?;
    let count = found.stages.len();
    let modelled = found.time;
    let stages = placed(found, |at, stage, mesh| {
        let layer = &layers[&mesh];
        let whole = time(stage.layers.clone(), mesh, count - at).unwrap_or_default();
        let forward = Nanos(whole.0 / 3);
        PlannedStage {
            tensor: layer.tensor,
            operators: layer.operators.clone(),
            phases: Some(PhaseCost {
                forward,
                backward: whole.saturating_sub(forward),
                all_reduce: Nanos::ZERO,
            }),
            ..stage
        }
    });
    Ok(Planned { stages, modelled })
}

/// The cuts of a layer's operators on a submesh.
fn cut_layer(facts: &Facts, devices: &EqualDevices, mesh: Submesh) -> Result<CutLayer> {
    let axis = |size, link| MeshAxis { size, link };
    let axes = [axis(mesh.nodes, devices.across), axis(mesh.devices, devices.inside)];
    let mesh = DeviceMesh {
        axes,
        flops: devices.flops,
        efficiency: facts.efficiency.clone(),
        microbatches: facts.microbatches,
    };
    let graph = block(&facts.block, &mesh);
    let found = choose(&graph)?;
    let chosen = || graph.operators.iter().zip(&found.strategies);
    let widest = chosen().map(|(operator, &at)| {
        let all = operator.strategies.iter().map(|strategy| strategy.weights.0).max().unwrap_or(0);
        (all, all / operator.strategies[at].weights.0.max(1))
    });
    Ok(CutLayer {
        time: found.cost,
        weights: chosen().map(|(operator, &at)| operator.strategies[at].weights).sum(),
        tensor: widest.max().map_or(1, |(_, parts)| parts.max(1) as u32),
        operators: chosen()
            .map(|(operator, &at)| OperatorCut {
                operator: operator.name.clone(),
                cut: operator.strategies[at].name.clone(),
            })
            .collect(),
    })
}

/// Time of a microbatch of a stage; `None` where its memory does not hold the microbatches of the stages to
/// the end. What the first and last layer have besides, tables and the head, is cut equally.
fn stage_time(
    facts: &Facts,
    devices: &EqualDevices,
    layer: &CutLayer,
    range: Range<usize>,
    mesh: Submesh,
    left: usize,
) -> Option<Nanos> {
    let (count, all) = (range.len() as u64, mesh.size());
    let (state, activations) = facts.held(range.clone());
    let least_state = facts.layers.iter().map(|layer| layer.state.0).min().unwrap_or(0);
    let least_work = facts.layers.iter().map(|layer| layer.operations).min().unwrap_or(0);
    let under_way = (left as u64).min(u64::from(facts.microbatches));
    let needs = (4 * layer.weights.0)
        .saturating_mul(count)
        .saturating_add(state.0.saturating_sub(least_state * count) / u64::from(all))
        .saturating_add(activations.0.saturating_mul(under_way) / u64::from(all));
    if needs > devices.memory.0 {
        return None;
    }
    let besides = facts.operations(range).saturating_sub(least_work * count);
    let besides = shared(besides, devices.flops, all);
    Some(Nanos(layer.time.0.saturating_mul(count)).saturating_add(besides))
}

/// Submeshes of one size, whose devices are copies.
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

/// Time of a microbatch of a stage whose devices are copies; `None` where its memory does not hold it.
fn copied_stage(
    facts: &Facts,
    devices: &EqualDevices,
    range: Range<usize>,
    mesh: Submesh,
    left: usize,
) -> Option<Nanos> {
    let all = mesh.size();
    let (state, activations) = facts.held(range.clone());
    let under_way = (left as u64).min(u64::from(facts.microbatches));
    let needs = state.0.saturating_add(activations.0.saturating_mul(under_way) / u64::from(all));
    let link = if mesh.nodes > 1 { devices.across } else { devices.inside };
    let average = ring(facts.gradients(range.clone()), all, link);
    let time = shared(facts.operations(range), devices.flops, all)
        .saturating_add(Nanos(average.0 / u64::from(facts.microbatches)));
    (needs <= devices.memory.0).then_some(time)
}

/// Submeshes on devices in their order.
fn placed(plan: SubmeshPlan, of: impl Fn(usize, PlannedStage, Submesh) -> PlannedStage) -> Vec<PlannedStage> {
    let mut next = 0;
    let stages = plan.stages.into_iter().enumerate().map(|(at, stage)| {
        let size = stage.mesh.size();
        next += size;
        of(at, PlannedStage::copies(stage.layers, (next - size..next).collect()), stage.mesh)
    });
    stages.collect()
}
