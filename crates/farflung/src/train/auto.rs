//! Finds the fastest plan for given machines: makes plans of several kinds (see [`PlanKind`]), and simulates
//! them.

mod plan_request;
mod candidate;
mod cost;
mod divided_state;
mod improve;
mod planners;
mod ranking;
mod regional;
mod side_by_side;
mod drafts;
mod tensor_drafts;
mod what_if;

pub use candidate::{Candidate, PlanKind, rank_memory, sent};
pub use cost::{RunningCosts, running_costs};
pub use improve::{Bottleneck, Improvement, bottleneck, improvements};
pub use planners::{Choice, Instance, NamedPlanner, OperatorCut, PLANNERS, PlannedStage};
pub use ranking::{Ranking, Wanted};
pub use regional::{ByRegion, RegionalCandidate, by_region};
pub use what_if::{Factor, FileChange, renamed};

use farflung_parallel::{Cluster, ParallelError};
use farflung_zoo::ModelSpec;

use plan_request::PlanRequest;

use super::chain::PipelineSizes;
use crate::{Error, Result};

/// Returns the fastest plans that fit.
///
/// The candidates are: one pipeline over machines in order (`planner::uneven`); replicas with shares by speed;
/// several pipelines, placed by DT-FM's search, with layers divided for the slowest machine of each stage; the
/// plans of DAPPLE's planner for every number of copies; and plans in which machines near each other divide the
/// width of layers. Each is tried with the schedules and all-reduce algorithms that fit it. Replicas divide the
/// optimizer's state if machines have no memory for all of it. Replicas average gradients at each step: methods
/// with local steps change the result of training, so only `farflung plan FILE` considers them.
///
/// Errors: the missing memory, if no plan fits into the machines; [`Error::Setting`] if there are only plans of
/// kinds that were not requested; those of [`Prediction::on`](super::prediction::Prediction::on).
pub fn auto(
    name: &str,
    model: &ModelSpec,
    cluster: &Cluster,
    sizes: PipelineSizes,
    wanted: Wanted,
) -> Result<Ranking> {
    let request = PlanRequest { name, model, cluster, sizes };
    let mut drafts = Vec::new();
    let pipelines = request.pipelines(&mut drafts);
    request.data(&mut drafts)?;
    request.both(&mut drafts)?;
    request.dapple(&mut drafts)?;
    request.tensor(&mut drafts)?;
    if drafts.is_empty() {
        pipelines?;
        return Err(ParallelError::NoDevices.into());
    }
    let others = drafts.len();
    drafts.retain(|draft| wanted.only.is_none_or(|only| only == draft.kind));
    if let Some(only) = wanted.only.filter(|_| drafts.is_empty()) {
        return Err(Error::Setting {
            field: "only",
            value: only.to_string(),
            expected: format!("a kind of plan that fits these machines; {others} plans of other kinds fit"),
        });
    }
    ranking::ranked(drafts, model, cluster, wanted)
}
