//! Computes the peak memory of each rank of a plan in a training step: runs the step's list with the trainer's
//! own executor on a device without memory ([`Device::sizes`]), which counts the buffers. Nothing is computed
//! or sent.
//!
//! Formulas add what this run does not allocate: messages, buckets of averages, and the state of codecs and of
//! the method of synchronisation.

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::sync::Arc;

use farflung_base::{Bytes, MemoryByKind, MemoryKind, Rank, StageId};
use farflung_comm::{Communicator, memory};
use farflung_optim::Prepared;
use farflung_parallel::step::{Moment, StepOp, StepWorker as _};
use farflung_parallel::{Cluster, Coordinates, Plan};
use farflung_tensor::{Device, Interrupt};
use farflung_zoo::exchange::{Counted, CountedExchange};
use farflung_zoo::{Exchange, ModelSpec};

use super::apart::{self, ApartParams};
use super::bind::ReplicaSchedule;
use super::bound_plan::BoundPlan;
use super::boundary::{Boundaries, SamplesSeen, coded_bytes};
use super::costs::Machines;
use super::division::Division;
use super::exchange;
use super::executor::{Components, Counts, Executor, Pass, Routers, Source, Wires};
use super::job::Job;
use super::kept_pass::KeptPass;
use super::part::{Part, Parts};
use super::sizes::{averaging, scattering, sharing};
use super::tied::TiedTable;
use super::trainer::{BuiltChain, chain, divided_weights, stage_of};
use super::zero;
use crate::config::choice::StoreKind;
use crate::{Result, RunSettings, StepMemory, TrainConfig};

/// Bytes per f32.
const F32: u64 = size_of::<f32>() as u64;

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
    let mut known: BTreeMap<(u32, u32, u32), Vec<StepMemory>> = BTreeMap::new();
    for (replica, &microbatches) in (0..).zip(&plan.microbatches) {
        // Replicas with the same number of microbatches, and of experts, hold the same, except for shards of
        // different lengths: the effect of different speeds on a schedule is small.
        let shard = if plan.divides_state() { replica } else { 0 };
        let kind = (microbatches, plan.expert_rank(replica), shard);
        if let Some(same) = known.get(&kind) {
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
            StoreKind::Memory => {
                SamplesSeen { held: seen, changed: if seen < all { of_step } else { 0 }, in_files: 0 }
            }
            StoreKind::File | StoreKind::Mapped => {
                SamplesSeen { held: 0, changed: of_step, in_files: windows.unwrap_or(0) }
            }
        };
        let of_rank = |rank| of_rank(plan, model, config, &schedule, plan.at(rank), seen);
        let found: Vec<_> = plan.ranks_of(replica).into_iter().map(of_rank).collect::<Result<_>>()?;
        ranks.extend(&found);
        known.insert(kind, found);
    }
    Ok(ranks)
}

fn of_rank(
    plan: &BoundPlan,
    model: &ModelSpec,
    config: &RunSettings,
    schedule: &ReplicaSchedule,
    at: Coordinates,
    seen: SamplesSeen,
) -> Result<StepMemory> {
    let (replica, position) = (at.data, Rank(at.pipeline));
    let device = Device::sizes().with_precision(plan.precision);
    let exchange = Arc::new(Division::of(plan).counted(at)?);
    let mut executor = counting(plan, model, config, schedule, at, (&device, &exchange))?;
    let parts = || executor.parts.values().map(|part| part.stage.layout());
    let elements: u64 = parts().map(|layout| layout.count() as u64).sum();
    let placement = schedule.placement();
    device.reset_peak();
    run(schedule, position, plan, &mut executor)?;
    let mut counted = device.memory_by_kind();
    let files: u64 =
        executor.parts.values().filter_map(|part| part.disk.as_ref()).map(|disk| disk.sizes().file).sum();

    let model_bytes = elements * F32;
    let of_part = |stage| placement.holders(placement.part(stage)).len();
    let holders = plan.replicas() as usize * placement.homes_of(position).map(of_part).max().unwrap_or(1);
    let apart: Vec<ApartParams> =
        executor.parts.values().flat_map(|part| ApartParams::of(plan, &part.stage, replica)).collect();
    let averaged_bytes = match holders {
        // Without replicas, the ranks along the tensor axis average what they do not divide.
        1 => F32 * apart::whole(&apart) as u64,
        _ => model_bytes.saturating_sub(apart::alone(&apart) as u64 * F32),
    };
    let operands = device.operands();
    let operands = (operands.packed * config.threads.max(1) + operands.rounded) as u64;
    let slices = Division::of(plan).positions(at.tensor, &schedule.slices)?;
    let coded = coded_bytes(plan, schedule.placement(), position, &slices, model.dim, seen);
    // One message that is being sent or received, as numbers and as bytes. Messages that are in flight are
    // buffered by the transport and are not counted.
    let largest = if let Wires::Counted(largest) = executor.wires { largest } else { 0 };
    let exchanged = exchange.take_exchanges().iter().map(exchange_bytes).max().unwrap_or(0);
    let mut messages = 2 * largest + coded.memory + exchanged;
    if averaged_bytes > 0 && (holders > 1 || plan.averages_each_step()) {
        let level = plan.outermost();
        let buffers = config.buffer_settings(level.method, level.codec, level.every.into());
        counted.optimizer += Bytes((level.method.buffers)(&buffers).held as u64 * model_bytes);
        let bucket = usize::try_from(level.bucket_bytes).unwrap_or(usize::MAX);
        let own: u64 = executor.parts.values().map(|part| part.chain.shard().len() as u64 * F32).sum();
        let sharing =
            plan.divides_state().then(|| sharing(averaged_bytes.into(), own.into(), holders, bucket));
        // The windows of shards are sent when gradients no longer are.
        let windows = sharing.filter(|_| !plan.divides_weights()).map_or(0, |bytes| bytes.windows);
        let bytes = if plan.divides_gradients() {
            let units = executor.parts.values().flat_map(|part| part.stage.backward_ranges());
            let largest = units.map(|unit| unit.len() as u64 * F32).max().unwrap_or(0);
            scattering(largest.into(), (own.into(), averaged_bytes.into()), holders, bucket).max(windows)
        } else {
            let holders = holders.max(plan.tensor_ranks() as usize);
            let averages = averaging(&level.codec, averaged_bytes.into(), holders, bucket);
            // What a rank has alone is in buckets, too.
            let alone = u128::from(model_bytes - averaged_bytes);
            let sums = sharing.map_or(0, |bytes| bytes.sums);
            alone + averages.buckets + averages.residuals + sums + averages.messages.max(windows)
        };
        messages += u64::try_from(bytes).unwrap_or(u64::MAX);
        if plan.divides_weights() {
            // A unit that has arrived, before it is a tensor.
            let units = executor.parts.values().flat_map(|part| part.stage.backward_ranges());
            messages += units.map(|unit| unit.len() as u64 * F32).max().unwrap_or(0);
        }
    }
    if schedule.is_tied_across() && placement.end_of(position).is_some() {
        let tables = executor.parts.values().map(|part| part.table_in_grads().len() as u64 * F32);
        messages += exchange::held(tables.max().unwrap_or(0), exchange::ahead(config.state));
    }
    Ok(StepMemory {
        device: counted,
        host: MemoryByKind {
            operands: Bytes(operands),
            messages: Bytes(messages),
            ..MemoryByKind::default()
        },
        disk: MemoryByKind {
            optimizer: Bytes(files),
            messages: Bytes(coded.files),
            ..MemoryByKind::default()
        },
    })
}

/// Makes a rank's executor on a device that only counts. Its parts have no values, and no method that keeps
/// their copies equal: formulas add its memory.
fn counting(
    plan: &BoundPlan,
    model: &ModelSpec,
    config: &RunSettings,
    schedule: &ReplicaSchedule,
    at: Coordinates,
    (device, exchange): (&Device, &Arc<Counted>),
) -> Result<Executor> {
    let (placement, position) = (schedule.placement(), Rank(at.pipeline));
    let part = |stage: StageId| {
        let number = placement.part(stage) as usize;
        let exchange = Arc::clone(exchange) as Arc<dyn Exchange>;
        let built = stage_of(plan, (model, at), schedule, number, (device, exchange))?;
        let shard = zero::own_shard(zero::shards(plan, &built)?.as_ref(), &built, at);
        let held = if plan.divides_weights() { shard.len() } else { built.layout().len() };
        let BuiltChain { chain, disk } =
            chain(config, device, (&built, shard), (1, plan.outermost().every.into()))?;
        let part = Part::new(Parts {
            params: device.counting_for(MemoryKind::Weights).zeros(held)?,
            weights: divided_weights(plan, (&built, at), None)?,
            stage: built,
            chain,
            sync: None,
            costs: schedule.costs_of(stage)?,
            recompute: plan.parts[number].recompute,
            // The device counts the memory of a host, so that moving activations there changes nothing.
            offload: 0,
            weight: 1.0,
            keeps: false,
            shards: None,
            divides_gradients: plan.divides_gradients(),
            disk,
        })?;
        Ok((stage, part))
    };
    Ok(Executor::new(
        schedule,
        Components {
            comm: Communicator::new(memory::cluster(1).remove(0)),
            wires: Wires::Counted(0),
            interrupt: Interrupt::default(),
            pipeline: (0..placement.ranks()).map(Rank).collect(),
            device: device.clone(),
            parts: placement.homes_of(position).map(part).collect::<Result<_>>()?,
            tied: TiedTable::No,
            source: Source::Counted {
                batch: plan.batch as usize,
                context: model.context,
                documents: config.document_mask || config.reads_examples(),
                prefixes: config.objective.has_prefix(),
            },
            dim: model.dim,
            token_weights: Vec::new(),
            routers: Routers::new(model, plan.batch as usize, 0.0),
            kept: KeptPass::new(false, None),
            boundaries: Boundaries::default(),
        },
    ))
}

/// Runs a step, as the trainer does.
fn run(schedule: &ReplicaSchedule, position: Rank, plan: &BoundPlan, executor: &mut Executor) -> Result<()> {
    let step = schedule.step(position, plan)?;
    executor.begin(Pass::Training { first: 0 }, schedule.microbatches());
    step.run_pass(&schedule.schedule, position, executor)?;
    for &op in step.at(Moment::Reduce) {
        match op {
            StepOp::StartVote(_) => drop(executor.squares(Counts::default())?),
            StepOp::FinishVote(_) => {}
            op => executor.run_op(op)?,
        }
    }
    executor.update_all(&step, Prepared::with_norm(1.0)?)
}

/// Returns the bytes of the host's memory in which ranks that divide layers exchange tensors: copies, messages
/// to others, and what arrives.
fn exchange_bytes(exchange: &CountedExchange) -> u64 {
    let values = match exchange {
        // Summed in place.
        CountedExchange::AllReduce(_, values) => *values,
        // The result twice: by rank and joined.
        CountedExchange::Gather(_, pieces) => 3 * pieces.iter().sum::<usize>(),
        CountedExchange::Scatter(_, pieces) => 2 * pieces.iter().sum::<usize>(),
        CountedExchange::PassOn(_, values) => 3 * values,
        CountedExchange::AllToAll(_, values) => 4 * values,
        CountedExchange::Rows(rows) => 4 * rows.cols * rows.rows.iter().sum::<usize>(),
        CountedExchange::Arrived(_) => 0,
    };
    (values * size_of::<f32>()) as u64
}
