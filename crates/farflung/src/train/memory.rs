//! Computes the peak memory of each rank of a plan in a training step: runs the schedule's executor and the
//! model's own code on a device without memory ([`Device::sizes`]), which counts the buffers. Nothing is
//! computed or sent.
//!
//! Formulas add what this run does not allocate: messages, buckets of averages, and the state of codecs and of
//! the method of synchronisation.

mod dry;
#[cfg(test)]
mod tests;

use farflung_base::{Bytes, Rank};
use farflung_parallel::pipeline::{TiedWeights, run};
use farflung_parallel::{Cluster, Plan};
use farflung_tensor::Device;
use farflung_zoo::ModelSpec;

use super::bind::ReplicaSchedule;
use super::bound_plan::BoundPlan;
use super::boundary::{SamplesSeen, coded_bytes};
use super::costs::Machines;
use super::job::Job;
use super::sizes::averaging;
use crate::config::choice::StoreKind;
use crate::{Result, RunSettings, TrainConfig};
use dry::DryRun;

/// Bytes per f32.
const F32: u64 = size_of::<f32>() as u64;

/// Peak memory of a rank in a step, by kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StepMemory {
    /// Parameters, in all versions that microbatches still need.
    pub weights: Bytes,
    /// Gradients.
    pub gradients: Bytes,
    /// The optimizer's state, and that of the method of synchronisation.
    pub optimizer: Bytes,
    /// Hidden states, logits, and all other tensors of the passes.
    pub activations: Bytes,
    /// Copies of operands that threads keep between matrix products.
    pub operands: Bytes,
    /// Messages, buckets of averages, and the state of codecs of averages and boundaries.
    pub messages: Bytes,
}

impl StepMemory {
    /// Returns the sum.
    #[must_use]
    pub const fn total(&self) -> Bytes {
        let Self { weights, gradients, optimizer, activations, operands, messages } = self;
        Bytes(weights.0 + gradients.0 + optimizer.0 + activations.0 + operands.0 + messages.0)
    }
}

/// Returns the peak memory of each rank of a job.
///
/// Errors: those of [`ReplicaSchedule::new`].
pub fn step_memory(job: &Job) -> Result<Vec<StepMemory>> {
    let windows = job.sampler(0)?.windows();
    of_plan(&job.plan, &job.model, &job.config, &job.machines()?, windows)
}

/// Returns the peak memory of each rank of a plan on the machines of a topology file, with the default
/// optimizer and number of steps, where each step has new samples.
///
/// Errors: as [`step_memory`]; a machine that the file does not have.
pub fn planned_memory(plan: &Plan, model: &ModelSpec, cluster: &Cluster) -> Result<Vec<StepMemory>> {
    let machines = Machines::of_plan(plan, model, cluster)?;
    of_plan(&BoundPlan::new(plan.clone())?, model, &TrainConfig::default().run_settings(), &machines, None)
}

fn of_plan(
    plan: &BoundPlan,
    model: &ModelSpec,
    config: &RunSettings,
    machines: &Machines,
    windows: Option<u64>,
) -> Result<Vec<StepMemory>> {
    let mut ranks: Vec<StepMemory> = Vec::new();
    let mut before: Option<(u32, Vec<StepMemory>)> = None;
    for (replica, &microbatches) in (0..).zip(&plan.microbatches) {
        // Replicas with the same number of microbatches hold the same: the effect of different speeds on a
        // schedule is small.
        if let Some((_, same)) = before.as_ref().filter(|(count, _)| *count == microbatches) {
            ranks.extend(same);
            continue;
        }
        let schedule = ReplicaSchedule::of(plan, model, machines, replica)?;
        let of_step = u64::from(plan.batch) * u64::from(microbatches);
        let all = config.steps.saturating_mul(of_step);
        // The samples of an epoch are divided among replicas like their microbatches.
        let share = |windows: u64| (windows / plan.sequences().max(1)).saturating_mul(of_step);
        let seen = windows.map_or(all, |windows| share(windows).min(all));
        let seen = match config.boundary_store {
            StoreKind::Memory => SamplesSeen { held: seen, changed: if seen < all { of_step } else { 0 } },
            StoreKind::File | StoreKind::Mapped => SamplesSeen { held: 0, changed: of_step },
        };
        let of_rank = |position| of_rank(plan, model, config, &schedule, position, seen);
        let found: Vec<_> = (0..plan.stages()).map(Rank).map(of_rank).collect::<Result<_>>()?;
        ranks.extend(&found);
        before = Some((microbatches, found));
    }
    Ok(ranks)
}

fn of_rank(
    plan: &BoundPlan,
    model: &ModelSpec,
    config: &RunSettings,
    schedule: &ReplicaSchedule,
    position: Rank,
    seen: SamplesSeen,
) -> Result<StepMemory> {
    let device = Device::sizes().with_precision(plan.precision);
    let held = || device.memory().1 as u64;
    let mut dry = DryRun::new(plan, model, config, schedule, position, &device)?;
    let weights = dry.parameters();
    // The state of earlier steps, which is present while microbatches pass.
    let begun = held();
    run(&schedule.schedule, position, &mut dry)?;
    dry.commit()?;
    let passed = held();

    let model_bytes = dry.elements() * F32;
    let placement = schedule.placement();
    let of_part = |stage| placement.holders(placement.part(stage)).len();
    let holders = plan.replicas() as usize * placement.homes_of(position).map(of_part).max().unwrap_or(1);
    let mut optimizer = begun - 2 * weights;
    let operands = device.operands();
    let operands = (operands.packed * config.threads.max(1) + operands.rounded) as u64;
    let coded = coded_bytes(plan, schedule.placement(), position, &schedule.slices, model.dim, seen);
    let mut messages = dry.messages() + coded;
    if holders > 1 {
        let level = plan.outermost();
        let buffers = config.buffer_settings(level.method, level.codec, level.every.into());
        optimizer += (level.method.buffers)(&buffers).held as u64 * model_bytes;
        let bucket = usize::try_from(level.bucket_bytes).unwrap_or(usize::MAX);
        let averages = averaging(&level.codec, model_bytes.into(), holders, bucket);
        let bytes = averages.buckets + averages.messages + averages.residuals;
        messages += u64::try_from(bytes).unwrap_or(u64::MAX);
    }
    if schedule.tie() == TiedWeights::Across && dry.has_table() {
        // The messages contain this rank's gradient of the token table and that of the other rank with the
        // table.
        messages += 2 * model.shared_table_bytes();
    }
    let versions = dry.versions();
    Ok(StepMemory {
        weights: Bytes(weights + versions),
        gradients: Bytes(weights),
        optimizer: Bytes(optimizer),
        activations: Bytes(passed.saturating_sub(begun + versions)),
        operands: Bytes(operands),
        messages: Bytes(messages),
    })
}
