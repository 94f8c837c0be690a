//! Runs PipeDream on a model and machines.

use farflung_base::{Bytes, Nanos};
use farflung_parallel::planner::pipedream::{LinkLevel, ProfiledLayer, pipedream};

use super::machines::{EqualDevices, Facts, shared};
use super::{Planned, PlannedStage};
use crate::Result;

/// PipeDream decides the number of copies of each stage by itself, so they may be unequal even with `runnable`.
pub(super) fn planned(facts: &Facts, _runnable: bool) -> Result<Planned> {
    let EqualDevices { flops, inside, across, .. } = facts.equal();
    let layer = |at: usize| ProfiledLayer {
        time: shared(facts.operations(at..at + 1), flops, 1),
        weights: Bytes(facts.gradients(at..at + 1).0),
        output: facts.layers[at].output,
    };
    let layers: Vec<ProfiledLayer> = (0..facts.layers.len()).map(layer).collect();
    let mut levels = vec![LinkLevel { bandwidth: inside.bandwidth, units: facts.each }];
    if facts.machines > 1 {
        levels.push(LinkLevel { bandwidth: across.bandwidth, units: facts.machines });
    }
    let found = pipedream(&layers, &levels)?;
    let mut next = 0;
    let stages = found.stages.into_iter().map(|stage| {
        next += stage.replicas;
        PlannedStage::copies(stage.layers, (next - stage.replicas..next).collect())
    });
    let modelled = Nanos(found.period.0.saturating_mul(u64::from(facts.microbatches)));
    Ok(Planned { stages: stages.collect(), modelled })
}
