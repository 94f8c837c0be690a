//! Runs Piper on a model and machines.

use std::ops::Range;

use farflung_base::{Bytes, Nanos};
use farflung_parallel::planner::piper::{PiperSize, ShapedPlan, StageLoad, StageShape, piper};

use super::machines::{EqualDevices, Facts, ring, shared, tensor_degrees};
use super::{Planned, PlannedStage};
use crate::Result;

pub(super) fn planned(facts: &Facts, runnable: bool) -> Result<Planned> {
    let devices = facts.equal();
    let all = facts.devices.len() as u32;
    let again = if runnable { &[false][..] } else { &[false, true] };
    let degrees = tensor_degrees(facts.each, facts.each, false);
    let shapes = |tensor: u32, data: u32| {
        again.iter().map(move |&recompute| StageShape { tensor, data, recompute }).collect::<Vec<_>>()
    };
    let pairs = (1..=all).flat_map(|data| degrees.iter().map(move |&tensor| (tensor, data)));
    let pairs: Vec<(u32, u32)> = pairs.filter(|(tensor, data)| tensor * data <= all).collect();
    if !runnable {
        return with_shapes(facts, &devices, pairs.into_iter().flat_map(|(t, d)| shapes(t, d)).collect());
    }
    // The trainer runs stages that are all divided and copied alike.
    let mut best = with_shapes(facts, &devices, shapes(1, 1));
    for (tensor, data) in pairs.into_iter().skip(1).filter(|&(_, data)| data <= facts.microbatches) {
        let found = with_shapes(facts, &devices, shapes(tensor, data));
        let slower = |best: &Planned| found.as_ref().is_ok_and(|found| found.modelled < best.modelled);
        if best.as_ref().map_or(true, slower) && found.is_ok() {
            best = found;
        }
    }
    best
}

fn with_shapes(facts: &Facts, devices: &EqualDevices, shapes: Vec<StageShape>) -> Result<Planned> {
    let size = PiperSize {
        layers: facts.layers.len(),
        devices: facts.devices.len() as u32,
        memory: devices.memory,
        shapes,
    };
    let ShapedPlan { stages, period } = piper(&size, &|layers, shape| load(facts, devices, layers, shape))?;
    let mut next = 0;
    let stages = stages.into_iter().map(|stage| {
        let count = stage.shape.devices();
        next += count;
        PlannedStage {
            tensor: stage.shape.tensor,
            recompute: stage.shape.recompute,
            ..PlannedStage::copies(stage.layers, (next - count..next).collect())
        }
    });
    let modelled = Nanos(period.0.saturating_mul(u64::from(facts.microbatches)));
    Ok(Planned { stages: stages.collect(), modelled })
}

/// Returns the load of layers in a shape: computation, sums among tensor ranks, the hop to the next stage, and
/// a microbatch's share of the average.
fn load(facts: &Facts, devices: &EqualDevices, layers: Range<usize>, shape: StageShape) -> StageLoad {
    let StageShape { tensor, data, recompute } = shape;
    let (state, activations) = facts.memory(layers.clone());
    let (count, last) = (layers.len() as u64, layers.end == facts.layers.len());
    let operations = facts.operations(layers.clone());
    let operations = facts.cut(if recompute { operations / 3 * 4 } else { operations }, tensor);
    let link = if shape.devices() > facts.each { devices.across } else { devices.inside };
    let share = Bytes(facts.hidden().0 / u64::from(data));
    let sums = ring(share, tensor, devices.inside).0.saturating_mul(4 * count);
    let average = ring(Bytes(facts.gradients(layers).0 / u64::from(tensor)), data, link);
    let hop = if last { Nanos::ZERO } else { devices.across.time(share) };
    let time = shared(operations, devices.flops, shape.devices())
        .saturating_add(Nanos(sums))
        .saturating_add(Nanos(hop.0.saturating_mul(2)))
        .saturating_add(Nanos(average.0 / u64::from(facts.microbatches)));
    let kept = if recompute { facts.hidden() } else { activations };
    StageLoad {
        time,
        fixed: Bytes(state.0 / u64::from(tensor)),
        each: Bytes(kept.0 / u64::from(shape.devices())),
    }
}
