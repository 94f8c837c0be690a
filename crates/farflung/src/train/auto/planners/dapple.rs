//! Runs DAPPLE on a model and machines.

use std::ops::Range;

use farflung_base::Bytes;
use farflung_parallel::Cluster;
use farflung_parallel::planner::dapple::{DappleSize, PhaseCost, PlacedPlan, dapple};
use farflung_zoo::ModelSpec;

use super::machines::Facts;
use super::{Planned, PlannedStage};
use crate::Result;
use crate::train::chain::PipelineSizes;

/// Number of devices up to which all numbers of copies are tried; with more devices, powers of two from an
/// eighth of all devices on.
const EVERY: u32 = 24;

pub(super) fn planned(facts: &Facts, runnable: bool) -> Result<Planned> {
    let all = facts.devices.len() as u32;
    let counts = (1..=all).filter(|&count| all <= EVERY || (count.is_power_of_two() && 8 * count >= all));
    if !runnable {
        return with_counts(facts, counts.collect());
    }
    let mut best: Result<Planned> = with_counts(facts, vec![1]);
    for count in counts.filter(|&count| count > 1 && count <= facts.microbatches) {
        let found = with_counts(facts, vec![count]);
        let slower = |best: &Planned| found.as_ref().is_ok_and(|found| found.modelled < best.modelled);
        if best.as_ref().map_or(true, slower) && found.is_ok() {
            best = found;
        }
    }
    best
}

/// Returns the stages that DAPPLE chooses with `replicas` copies of each, for [`auto`](super::super::auto).
pub(in super::super) fn equal_replicas(
    model: &ModelSpec,
    cluster: &Cluster,
    sizes: PipelineSizes,
    replicas: u32,
) -> Result<Vec<PlannedStage>> {
    Ok(with_counts(&Facts::new(model, cluster, sizes)?, vec![replicas])?.stages)
}

fn with_counts(facts: &Facts, replicas: Vec<u32>) -> Result<Planned> {
    let size = DappleSize {
        layers: facts.layers.len(),
        machines: facts.machines,
        devices: facts.each,
        microbatches: facts.microbatches,
        replicas,
    };
    let stage = |layers: Range<usize>, devices: &[u32]| PlannedStage::copies(layers, devices.to_vec());
    let cost = |layers: Range<usize>, devices: &[u32]| -> Option<PhaseCost> {
        let (state, activations) = facts.memory(layers.clone());
        let needs = Bytes(state.0.saturating_add(activations.0 / devices.len() as u64));
        let fits = |&device: &u32| facts.devices[device as usize].memory.is_none_or(|has| needs <= has);
        devices.iter().all(fits).then(|| facts.phases(&stage(layers, devices)))
    };
    let hop = |_: usize, from: &[u32], to: &[u32]| facts.hop(from, to);
    let PlacedPlan { stages, time } = dapple(&size, &cost, &hop)?;
    let stages = stages.into_iter().map(|placed| stage(placed.layers, &placed.devices)).collect();
    Ok(Planned { stages, modelled: time })
}
