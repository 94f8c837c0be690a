//! Which plan is fastest on some machines: every kind that the trainer runs is planned, then simulated.

mod candidate;
mod cost;
mod improve;
mod planners;
mod regional;
mod side_by_side;
mod ways;
mod what_if;

pub use candidate::{Candidate, Way, held, sent};
pub use cost::{RunningCosts, running_costs};
pub use improve::{Bottleneck, Improvement, bottleneck, improvements};
pub use planners::{Choice, Instance, NamedPlanner, OperatorCut, PLANNERS, PlannedStage};
pub use regional::{ByRegion, RegionalCandidate, by_region};
pub use what_if::{Factor, FileChange, renamed};

use farflung_parallel::{Cluster, ParallelError, Plan};
use farflung_zoo::GptConfig;

use super::chain::PipelineSizes;
use super::memory::{StepMemory, planned_memory};
use crate::Result;

/// Every plan that was made, the fastest first.
///
/// One pipeline over machines in order (`planner::uneven`); replicas with shares by speed; pipelines side by
/// side, placed by DT-FM's search with layers divided by the slowest machine of each stage. Each under the
/// schedules and all-reduce algorithms that fit it. Beside these, what DAPPLE's planner makes of every number
/// of copies. Replicas average gradients at each step: methods with local steps change what is learned, and
/// are `farflung plan`'s.
///
/// Errors: machines that hold none of the plans, with what is missing; those of
/// [`Prediction::on`](super::prediction::Prediction::on).
pub fn auto(
    name: &str,
    model: &GptConfig,
    cluster: &Cluster,
    sizes: PipelineSizes,
) -> Result<Vec<Candidate>> {
    let asked = ways::Asked { name, model, cluster, sizes };
    let mut candidates = Vec::new();
    let pipelines = asked.pipelines(&mut candidates);
    asked.data(&mut candidates)?;
    asked.both(&mut candidates)?;
    asked.dapple(&mut candidates)?;
    if candidates.is_empty() {
        pipelines?;
        return Err(ParallelError::NoDevices.into());
    }
    candidates.sort_by_key(|candidate| candidate.step);
    Ok(candidates)
}

/// Takes out the fastest plans that some machine does not hold, averages and messages included, until one
/// fits: what each of its ranks holds.
///
/// [`auto`] left out those whose state and activations alone do not fit.
///
/// Errors: [`ParallelError::Memory`] of the fastest where none fits; those of [`planned_memory`].
pub fn first_that_fits(
    candidates: &mut Vec<Candidate>,
    model: &GptConfig,
    cluster: &Cluster,
) -> Result<Vec<StepMemory>> {
    let mut refused = None;
    while !candidates.is_empty() {
        let plan = &candidates[0].plan;
        let held = planned_memory(plan, model, cluster)?;
        let Some(error) = too_small(plan, &held, cluster) else { return Ok(held) };
        refused.get_or_insert(error);
        // The same plan under another schedule may hold less.
        candidates.remove(0);
    }
    Err(refused.unwrap_or(ParallelError::NoDevices).into())
}

/// The machine of a plan that lacks most.
fn too_small(plan: &Plan, held: &[StepMemory], cluster: &Cluster) -> Option<ParallelError> {
    let names = cluster.rank_names();
    let memory = |name: &str| names.iter().zip(cluster.ranks()).find(|(known, _)| *known == name)?.1.memory;
    plan.machines
        .iter()
        .zip(held)
        .filter_map(|(name, held)| Some((name, held.total(), memory(name)?)))
        .filter(|(_, needs, has)| needs > has)
        .max_by_key(|(_, needs, has)| needs.0 - has.0)
        .map(|(device, needs, has)| ParallelError::PartMemory { device: device.clone(), needs, has })
}
