//! Plans before and after simulation, with their memory and the bytes that they send.

use std::fmt;

use farflung_base::{Axis, Bytes, Nanos, Rank};
use farflung_parallel::pipeline::Method;
use farflung_parallel::planner::uneven::ChainLayer;
use farflung_parallel::{Coordinates, Plan, ScheduleSource, all_reduce_bytes};
use farflung_zoo::profile::{DividedSequences, ModelProfile};
use farflung_zoo::{AxisShare, ModelSpec};

use crate::StepMemory;
use crate::train::activations::profile;
use crate::train::chain::layers_of;

/// Kind of a plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum PlanKind {
    /// One pipeline.
    Pipeline,
    /// Replicas on one machine each.
    Data,
    /// Replicas that are pipelines.
    Both,
    /// Replicas whose layers are divided among several machines each.
    Tensor,
}

impl fmt::Display for PlanKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Pipeline => "pipeline",
            Self::Data => "data",
            Self::Both => "both",
            Self::Tensor => "tensor",
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
    let pieces: Vec<Vec<ChainLayer>> =
        pieces(plan, model).iter().map(|profile| layers_of(profile, plan.batch)).collect();
    let stages = plan.parts.len();
    let of = |rank: u32| {
        let Coordinates { data, pipeline, tensor, .. } = plan.at(Rank(rank));
        let (replica, stage, layers) = (data as usize, pipeline as usize, &pieces[tensor as usize]);
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

/// Returns what each rank along the tensor axis has of the model's layers; of a division that the plan's check
/// refuses, the whole layers.
fn pieces(plan: &Plan, model: &ModelSpec) -> Vec<ModelProfile> {
    let weights = plan.shares_of_width();
    let by_context = DividedSequences::ByContext(plan.context, 0);
    let sequences = if plan.sequence_parallel { DividedSequences::ByWidth } else { by_context };
    let piece = |rank| {
        let share = AxisShare::new(rank, weights.clone())?;
        ModelProfile::of_pieces(model, [&share, &AxisShare::whole()], sequences)
    };
    (0..weights.len()).map(|rank| piece(rank).unwrap_or_else(|_| profile(model))).collect()
}

/// Returns the bytes that all ranks of a plan send in a step: hidden states and their gradients, what the ranks
/// that divide layers exchange, and gradients of parameters as sent by a ring.
#[must_use]
pub fn sent(plan: &Plan, model: &ModelSpec) -> Bytes {
    let pieces = pieces(plan, model);
    let hops = 2 * plan.parts.len().saturating_sub(1) as u64 * plan.all_microbatches();
    // Each rank sends the hidden states that it has, and what layers exchange.
    let readers = u64::from(plan.context.readers());
    let hidden: u64 = pieces.iter().map(|profile| readers * profile.hidden * u64::from(plan.batch)).sum();
    let along = [Axis::Tensor, Axis::Context, Axis::Ulysses];
    let sent = |profile: &ModelProfile| along.map(|axis| profile.sent_along(axis)).iter().sum::<u64>();
    let layers: u64 = pieces.iter().map(|profile| readers * sent(profile)).sum();
    let exchanged = layers * u64::from(plan.batch) * plan.all_microbatches();
    let replicas = plan.replicas();
    let averaged = all_reduce_bytes(replicas, Bytes(model.parameters() * 4)).0 * u64::from(replicas);
    // The first and the last stage add their gradients of a tied token table.
    let tied = if plan.stages() > 1 { 2 * model.shared_table_bytes() * u64::from(replicas) } else { 0 };
    Bytes(hidden * hops + exchanged + averaged + tied)
}
