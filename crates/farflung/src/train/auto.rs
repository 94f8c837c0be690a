//! Which plan is fastest on some machines: every kind that the trainer runs is planned, then simulated.

mod candidate;
mod improve;
mod regional;
mod ways;

pub use candidate::{Candidate, Way, held, sent};
pub use improve::{Improvement, improvements};
pub use regional::{ByRegion, RegionalCandidate, by_region};

use farflung_parallel::{Cluster, ParallelError};
use farflung_zoo::GptConfig;

use super::chain::PipelineSizes;
use crate::Result;

/// Every plan that was made, the fastest first.
///
/// One pipeline over machines in order (`planner::uneven`); replicas with shares by speed; pipelines side by
/// side, placed by DT-FM's search with layers divided by the slowest machine of each stage. Each under the
/// schedules and all-reduce algorithms that fit it. Replicas average gradients at each step: methods with local
/// steps change what is learned, and are `farflung plan`'s.
///
/// Errors: machines that hold none of the plans, with what is missing; those of [`Prediction::on`].
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
    if candidates.is_empty() {
        pipelines?;
        return Err(ParallelError::NoDevices.into());
    }
    candidates.sort_by_key(|candidate| candidate.step);
    Ok(candidates)
}
