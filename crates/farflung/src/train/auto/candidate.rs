//! Plans before and after simulation, with their memory and the bytes that they send.

use std::fmt;

use farflung_base::{Bytes, Nanos, Rank};
use farflung_parallel::pipeline::Method;
use farflung_parallel::{Coordinates, Plan, ScheduleSource, all_reduce_bytes};
use farflung_zoo::ModelSpec;

use crate::train::chain::layers;
use crate::train::memory::StepMemory;

/// Kind of a plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum PlanKind {
    /// One pipeline.
    Pipeline,
    /// Replicas on one machine each.
    Data,
    /// Replicas that are pipelines.
    Both,
}

impl fmt::Display for PlanKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Pipeline => "pipeline",
            Self::Data => "data",
            Self::Both => "both",
        })
    }
}

/// A plan that may be simulated.
#[derive(Debug, Clone)]
pub(super) struct Draft {
    pub(super) kind: PlanKind,
    pub(super) what: String,
    pub(super) plan: Plan,
    pub(super) is_baseline: bool,
}

impl Draft {
    /// Returns whether the draft's schedule is 1F1B, as in Megatron.
    pub(super) fn has_usual_schedule(&self) -> bool {
        self.plan.pipeline.schedule == ScheduleSource::Named(Method::OneFOneB)
    }
}

/// A plan that was simulated.
#[derive(Debug, Clone)]
pub struct Candidate {
    /// The plan's kind.
    pub kind: PlanKind,
    /// Description of how the plan was made.
    pub what: String,
    /// The plan.
    pub plan: Plan,
    /// Time of a step.
    pub step: Nanos,
    /// Fraction of the pass in which ranks are idle, from 0 to 1.
    pub bubble: f64,
    /// Time for which the busiest rank computes in a step.
    pub compute: Nanos,
    /// Peak memory of each rank.
    pub held: Vec<StepMemory>,
    /// Whether the plan is one that Megatron could use: equal shares, machines in the file's order, 1F1B.
    pub is_baseline: bool,
}

/// Returns the memory of each rank of a plan with one part per stage: its state, and the activations of the
/// microbatches in flight.
///
/// Under 1F1B a stage holds as many microbatches as there are stages from it to the end; under ZB-H1 each stage
/// holds as many as there are stages; with any other schedule a stage may hold all.
#[must_use]
pub fn rank_memory(plan: &Plan, model: &ModelSpec) -> Vec<Bytes> {
    let layers = layers(model, plan.batch);
    let stages = plan.parts.len();
    let of = |rank: u32| {
        let Coordinates { data, pipeline, .. } = plan.at(Rank(rank));
        let (replica, stage) = (data as usize, pipeline as usize);
        let most = match plan.pipeline.schedule {
            ScheduleSource::Named(Method::OneFOneB) => stages - stage,
            ScheduleSource::Named(Method::ZbH1) => stages,
            // Replicas of one stage finish a microbatch before they start the next.
            _ if stages == 1 => 1,
            _ => usize::MAX,
        };
        let microbatches = u64::from(plan.microbatches[replica]).min(most as u64);
        let range = &plan.parts[stage].layers;
        let rank_memory = layers[range.start as usize..range.end as usize]
            .iter()
            .map(|layer| layer.state.0.saturating_add(layer.activations.0.saturating_mul(microbatches)));
        Bytes(rank_memory.fold(0, u64::saturating_add))
    };
    (0..plan.ranks()).map(of).collect()
}

/// Returns the bytes that all ranks of a plan send in a step: hidden states and their gradients, and gradients
/// of parameters as sent by a ring.
#[must_use]
pub fn sent(plan: &Plan, model: &ModelSpec) -> Bytes {
    let hidden = model.hidden_bytes(u64::from(plan.batch));
    let hops = 2 * plan.parts.len().saturating_sub(1) as u64 * plan.all_microbatches();
    let replicas = plan.replicas();
    let averaged = all_reduce_bytes(replicas, Bytes(model.parameters() * 4)).0 * u64::from(replicas);
    // The first and the last stage add their gradients of a tied token table.
    let tied = if plan.stages() > 1 { 2 * model.shared_table_bytes() * u64::from(replicas) } else { 0 };
    Bytes(hidden * hops + averaged + tied)
}
