//! Runs Galvatron on a model and machines: all devices hold all layers, and each layer has a strategy.

use farflung_base::{Bytes, Nanos};
use farflung_parallel::planner::galvatron::{StrategyCost, galvatron};

use super::machines::{EqualDevices, Facts, ring, shared, tensor_degrees};
use super::{Planned, PlannedStage};
use crate::Result;

/// The way in which the devices share a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Strategy {
    tensor: u32,
    /// Whether state is sharded among copies (ZeRO-3).
    sharded: bool,
    recompute: bool,
}

/// Number of units into which a device's memory is divided.
const UNITS: u64 = 4096;

pub(super) fn planned(facts: &Facts, runnable: bool) -> Result<Planned> {
    let devices = facts.equal();
    let all = facts.devices.len() as u32;
    let ways = if runnable { &[false][..] } else { &[false, true] };
    let strategies: Vec<Strategy> = tensor_degrees(all, facts.each, runnable)
        .into_iter()
        .flat_map(|tensor| {
            ways.iter().flat_map(move |&sharded| {
                ways.iter().map(move |&recompute| Strategy { tensor, sharded, recompute })
            })
        })
        .filter(|strategy| !strategy.sharded || strategy.tensor < all)
        .collect();
    let costs: Vec<Vec<StrategyCost>> = (0..facts.layers.len())
        .map(|layer| strategies.iter().map(|&strategy| cost(facts, &devices, layer, strategy)).collect())
        .collect();
    // Between layers with different numbers of tensor ranks, hidden states are gathered, in each direction of
    // each microbatch.
    let change = |a: usize, b: usize| {
        let (a, b) = (strategies[a].tensor, strategies[b].tensor);
        let once = if a == b { Nanos::ZERO } else { ring(facts.hidden(), a.max(b), devices.inside) };
        Nanos(once.0.saturating_mul(u64::from(facts.microbatches)))
    };
    let held: u64 = costs.iter().map(|layer| layer.iter().map(|cost| cost.memory.0).max().unwrap_or(0)).sum();
    // More memory than the largest strategies need makes no difference.
    let memory = Bytes(devices.memory.0.min(held.saturating_add(UNITS * costs.len() as u64)));
    let found = galvatron(&costs, &change, memory, Bytes(memory.0.div_ceil(UNITS).max(1)))?;
    let chosen: Vec<Strategy> = found.strategies.iter().map(|&at| strategies[at]).collect();
    let mut stages: Vec<PlannedStage> = Vec::new();
    for (layer, &Strategy { tensor, sharded, recompute }) in chosen.iter().enumerate() {
        match stages.last_mut() {
            Some(last) if layer > 0 && chosen[layer - 1] == chosen[layer] => last.layers.end = layer + 1,
            _ => stages.push(PlannedStage {
                tensor,
                recompute,
                sharded,
                ..PlannedStage::copies(layer..layer + 1, (0..all).collect())
            }),
        }
    }
    Ok(Planned { stages, modelled: found.time })
}

/// Returns the cost of one layer in a step under a strategy.
fn cost(facts: &Facts, devices: &EqualDevices, layer: usize, strategy: Strategy) -> StrategyCost {
    let Strategy { tensor, sharded, recompute } = strategy;
    let all = facts.devices.len() as u32;
    let copies = all / tensor;
    let range = layer..layer + 1;
    let (state, activations) = facts.memory(range.clone());
    let operations = facts.operations(range.clone());
    let operations = facts.cut(if recompute { operations / 3 * 4 } else { operations }, tensor);
    let sums = ring(Bytes(facts.hidden().0 / u64::from(copies)), tensor, devices.inside);
    let each = shared(operations, devices.flops, all).0 + sums.0.saturating_mul(4);
    let link = if facts.machines > 1 { devices.across } else { devices.inside };
    let average = ring(Bytes(facts.gradients(range).0 / u64::from(tensor)), copies, link).0;
    // Gathering weights twice and scattering gradients costs one and a half averages.
    let average = if sharded { average / 2 * 3 } else { average };
    let state = state.0 / u64::from(tensor) / if sharded { u64::from(copies) } else { 1 };
    let kept = if recompute { facts.hidden().0 } else { activations.0 };
    StrategyCost {
        time: Nanos(each.saturating_mul(u64::from(facts.microbatches)).saturating_add(average)),
        memory: Bytes(state + kept / u64::from(all)),
    }
}
