//! A plan that was simulated, and what it holds and sends.

use farflung_base::{Bytes, Nanos, Rank};
use farflung_parallel::planner::uneven::ChainStage;
use farflung_parallel::{Cluster, Part, Plan, all_reduce_bytes};
use farflung_zoo::GptConfig;

use crate::Result;
use crate::train::Prediction;
use crate::train::chain::chain;

/// What kind of plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// One pipeline.
    Pipeline,
    /// Replicas of one machine each.
    Data,
    /// Replicas that are pipelines.
    Both,
}

/// A plan that was simulated.
#[derive(Debug, Clone)]
pub struct Candidate {
    /// Its kind.
    pub way: Way,
    /// How it was made, for people.
    pub what: String,
    /// The plan.
    pub plan: Plan,
    /// A step.
    pub step: Nanos,
    /// Part of the pass in which ranks stand still, from 0 to 1.
    pub bubble: f64,
    /// What the busiest rank computes in a step.
    pub compute: Nanos,
    /// Whether it is what Megatron would do: equal shares, machines as they are listed.
    pub is_baseline: bool,
}

/// What each rank of a plan holds: its part's state, and the activations of the microbatches that are under
/// way.
///
/// Errors: those of [`chain`].
pub fn held(plan: &Plan, model: &GptConfig, cluster: &Cluster) -> Result<Vec<Bytes>> {
    let names = cluster.rank_names();
    let mut all = Vec::new();
    for (replica, machines) in plan.machines.chunks(plan.stages() as usize).enumerate() {
        let rank =
            |name: &String| Rank(names.iter().position(|known| known == name).unwrap_or(usize::MAX) as u32);
        let order: Vec<Rank> = machines.iter().map(rank).collect();
        let chain = chain(model, cluster, &order, plan.batch, plan.microbatches[replica])?;
        let stage = |(machine, part): (usize, &Part)| ChainStage {
            layers: part.layers.start as usize..part.layers.end as usize,
            machine,
        };
        let stages: Vec<ChainStage> = plan.parts.iter().enumerate().map(stage).collect();
        all.extend(chain.held(&stages));
    }
    Ok(all)
}

/// What all ranks of a plan send in a step: hidden states and their gradients, and gradients of parameters as a
/// ring sends them.
#[must_use]
pub fn sent(plan: &Plan, model: &GptConfig) -> Bytes {
    let hidden = u64::from(plan.batch) * (model.context * model.dim * size_of::<f32>()) as u64;
    let hops = 2 * plan.parts.len().saturating_sub(1) as u64 * plan.all_microbatches();
    let replicas = plan.replicas();
    let averaged = all_reduce_bytes(replicas, Bytes(model.parameters() * 4)).0 * u64::from(replicas);
    // The first and the last stage add up their gradients of the token table.
    let tied =
        if plan.stages() > 1 { 2 * 4 * (model.vocab * model.dim) as u64 * u64::from(replicas) } else { 0 };
    Bytes(hidden * hops + averaged + tied)
}

/// Simulates a plan.
pub(super) fn simulated(
    way: Way,
    what: String,
    plan: Plan,
    model: &GptConfig,
    cluster: &Cluster,
) -> Result<Candidate> {
    let predicted = Prediction::on(&plan, model, cluster)?;
    let (step, bubble, compute) = (predicted.step(), predicted.bubble, predicted.compute);
    Ok(Candidate { way, what, plan, step, bubble, compute, is_baseline: false })
}
