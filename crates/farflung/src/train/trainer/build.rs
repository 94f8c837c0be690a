//! Construction of a trainer: the parts, communicators and samplers of one rank, made from the job's plan.

use std::collections::BTreeMap;
use std::sync::Arc;

use farflung_base::{Axis, Nanos, Rank, StageId};
use farflung_comm::Communicator;
use farflung_optim::sync::{SyncSettings, Synchroniser};
use farflung_optim::transform::SyncSchedule;
use farflung_optim::{AverageConfig, Chain, Shard, Shards};
use farflung_parallel::pipeline::{Placement, ResumedStep, TiedWeights};
use farflung_parallel::step::{Moment, StepOp, Vote};
use farflung_parallel::{Coordinates, ParallelError};
use farflung_tensor::{Device, Interrupt, MemoryKind, Tensor};
use farflung_zoo::exchange::Alone;
use farflung_zoo::{ActivationPolicy, Exchange, ModelSpec, Stage};

use super::agree::{StepRequests, Voters};
use super::gather::Givers;
use super::replica_samples::ReplicaSamples;
use super::speed::{Measures, Speedometer};
use super::token_weights::TokenWeights;
use super::undecided::Undecided;
use super::{Told, Trainer};
use crate::config::choice::StatePlace;
use crate::train::activations::within_budget;
use crate::train::apart::{self, HeldApart, Holders};
use crate::train::averages;
use crate::train::bind::ReplicaSchedule;
use crate::train::bound_plan::BoundPlan;
use crate::train::boundary::{Boundaries, Stores};
use crate::train::disk_state::DiskState;
use crate::train::divided_weights::DividedWeights;
use crate::train::division::{self, Division};
use crate::train::exchange::{self, Between};
use crate::train::executor::{Components, Executor, Routers, Source, Wires};
use crate::train::job::Job;
use crate::train::kept_pass::KeptPass;
use crate::train::part::{Part, Parts};
use crate::train::repeat;
use crate::train::resync::Resync;
use crate::train::tied::{TableExchange, TiedGroup, TiedTable};
use crate::train::zero::{self, PartShards};
use crate::{Result, RunSettings};

impl Trainer {
    /// Makes the trainer of one rank at step 0 of a job.
    pub fn new(job: &Job, comm: Communicator, threads: usize) -> Result<Self> {
        Self::resumed(job, comm, threads, None)
    }

    /// Makes the trainer of a rank, as [`Trainer::new`] does. With `resumed`, its first step is the rest of a
    /// step of which other ranks have done a part.
    ///
    /// Errors: as [`Trainer::new`].
    pub(in crate::train) fn resumed(
        job: &Job,
        comm: Communicator,
        threads: usize,
        resumed: Option<&ResumedStep>,
    ) -> Result<Self> {
        let plain = job.device(comm.rank().index(), threads)?;
        Self::on(job, comm, (plain, Interrupt::default()), resumed)
    }

    /// Does the work of [`Trainer::new`] on a device that is already open. `plain` is a handle without an
    /// interrupt; ops of the trainer's other handle are interrupted by `interrupt`.
    pub(super) fn on(
        job: &Job,
        comm: Communicator,
        (plain, interrupt): (Device, Interrupt),
        resumed: Option<&ResumedStep>,
    ) -> Result<Self> {
        let (plan, rank) = (&job.plan, comm.rank());
        let at = plan.at(rank);
        let (position, replica) = (Rank(at.pipeline), at.data);
        let schedule = ReplicaSchedule::of_rest(job, replica, resumed)?;
        check_orders(job, &schedule, replica)?;
        let placement = schedule.placement().clone();
        let each_step = job.averages_each_step();
        let scale = job.config.loss_scale.start(plan.precision);

        let [messages, comm] = tied(job, comm);
        let device = plain.with_interrupt(&interrupt);
        let holders = groups(job, &comm, &placement, at)?;
        let exchanges = division::exchange((plan, job.config.seed), &messages, rank)?;
        let exchange = exchanges.clone().map_or_else(|| Arc::new(Alone) as _, |all| all as Arc<dyn Exchange>);
        let apart = apart::by_part((plan, &job.model, at), &schedule.layers, &holders)?;
        let tied = tie(&comm, &schedule, (at, plan.tensor_ranks()), exchange::ahead(job.config.state))?;
        let voters = Voters::new(plan, &comm, replica)?;
        let list = schedule.step(position, plan)?;
        let has_norm_vote = list.at(Moment::Reduce).contains(&StepOp::StartVote(Vote::Norm));
        let norm_voters = has_norm_vote.then(|| comm.split(replica, rank.0)).transpose()?;
        let copies = !(holders.is_empty() || plan.divides_weights()) || schedule.is_tied_across();
        let resync = Resync::new(job, &comm, device.name(), copies)?;
        let updates = schedule.updates_in_step();
        let mut parts = BTreeMap::new();
        for stage in placement.homes_of(position) {
            let number = placement.part(stage);
            let all = holders.get(&number).map(|holders| &holders.same);
            let holders = PartHolders { all, apart: apart.get(&number) };
            let devices = (&device, &plain);
            let part = build_part(job, &schedule, (stage, at), (devices, &exchange), holders, updates)?;
            parts.insert(stage, part);
        }

        let (sampler, evaluation) = (job.sampler(replica as usize)?, job.evaluation(replica as usize)?);
        let held_out = evaluation.steps().unwrap_or(0).max(1) as u32;
        // Pools have different numbers of ranks, so each part has its own weight: see `build_part`.
        let group =
            if each_step && !placement.is_pooled() { plan.replicas() * placement.copies() } else { 1 };
        let weights = TokenWeights::new(job, &schedule, replica, group)?;
        let token_weights = weights.of_step(weights.first_of_plan())?;
        let boundaries = boundaries(job, &schedule, at)?;
        let executor = Executor::new(
            &schedule,
            Components {
                comm,
                wires: Wires::Linked(messages),
                interrupt,
                pipeline: plan.group(rank, Axis::Pipeline),
                device,
                parts,
                tied,
                source: Source::Text { training: sampler, evaluation },
                dim: job.model.dim,
                token_weights,
                routers: Routers::new(&job.model, plan.batch as usize, weights.of_sequence()),
                kept: KeptPass::new(job.keeps_work(), resumed.cloned()),
                boundaries,
            },
        );
        Ok(Self {
            evaluation: schedule.forwards(held_out)?,
            position,
            replica,
            tensor: at.tensor,
            samples: ReplicaSamples::new(job, replica)?,
            sequences: weights.sequences(),
            token_weights: weights.if_varying(job),
            replicas: plan.replicas(),
            every: plan.outermost().every.into(),
            executor,
            plain,
            voters,
            norm_voters,
            each_step,
            window: Vec::new(),
            voting: None,
            division: Division::of(plan),
            givers: Givers::of(plan, replica),
            exchanges,
            apart,
            holders: holders.into_iter().map(|(part, holders)| (part, holders.same)).collect(),
            resync,
            scale,
            step: 0,
            steps: job.config.steps,
            updates,
            pass: (Nanos::ZERO, Nanos::ZERO),
            fault: job.fault,
            failure: job.failure,
            stop: job.stop.clone(),
            members: (0..job.world as u32).map(Rank).collect(),
            mark: None,
            half_done: false,
            tries: 0,
            told: Told { sound: true, wished: StepRequests::default() },
            unmet: false,
            speed: job.follows_speed().then(|| Speedometer::new(Measures::of(plan))),
            undecided: Undecided::default(),
            state_record: None,
            kept: None,
            list,
            schedule,
        })
    }
}

/// Checks that ranks that meet in each microbatch run the same list: those that divide layers, and all replicas
/// if each keeps a shard of the gradients.
///
/// Errors: [`ParallelError::Plan`], if the order of work depends on the speed of machines, or on arrivals.
fn check_orders(job: &Job, own: &ReplicaSchedule, replica: u32) -> Result<()> {
    let plan = &job.plan;
    if !Division::of(plan).exchanges() && !plan.divides_gradients() {
        return Ok(());
    }
    let mut equal = own.arrivals.is_none();
    let all = if plan.divides_gradients() { 0..plan.replicas() } else { 0..0 };
    let together = plan.expert_group(replica).chain(plan.readers_of(replica)).chain(all);
    for other in together.filter(|&other| other != replica) {
        equal &= ReplicaSchedule::new(job, other)?.schedule.order() == own.schedule.order();
    }
    if equal {
        return Ok(());
    }
    let expected = "one with the same order of work for all ranks that divide layers, experts, sequences or \
                    gradients, whatever their speed: they run each microbatch together";
    let (field, value) = ("pipeline.schedule".to_owned(), plan.pipeline.schedule.to_string());
    Err(ParallelError::Plan { field, value, expected: expected.to_owned() }.into())
}

/// Returns two communicators: for the messages of a pass, and for everything else. A stop or a change of
/// members cancels their pending operations.
fn tied(job: &Job, comm: Communicator) -> [Communicator; 2] {
    [job.stop.tie_messages(comm.clone()), job.stop.tie_step(comm)].map(|comm| match &job.change {
        Some(change) => comm.with_other_cancel(change),
        None => comm,
    })
}

/// Makes the codecs of a rank's boundaries, with their samples in memory.
fn boundaries(job: &Job, schedule: &ReplicaSchedule, at: Coordinates) -> Result<Boundaries> {
    let slices = Division::of(&job.plan).positions(at.tensor, &schedule.slices)?;
    Boundaries::new(job, schedule.placement(), Rank(at.pipeline), &slices, &Stores::Memory)
}

/// The ranks that hold a part; `None` if this one alone does.
#[derive(Debug, Clone, Copy)]
struct PartHolders<'a> {
    all: Option<&'a Communicator>,
    /// What it holds apart.
    apart: Option<&'a HeldApart>,
}

/// Makes a part of the model with its optimizer, at step 0. `device` is a handle whose ops a stop interrupts.
/// `plain` is a handle without this interrupt, for averages: other ranks may have received their results
/// already, so they must be completed here too.
fn build_part(
    job: &Job,
    schedule: &ReplicaSchedule,
    (stage, at): (StageId, Coordinates),
    ((device, plain), exchange): ((&Device, &Device), &Arc<dyn Exchange>),
    holders: PartHolders<'_>,
    updates: u64,
) -> Result<Part> {
    let (number, replica) = (schedule.placement().part(stage) as usize, at.data);
    let planned = &job.plan.parts[number];
    let model = stage_of(&job.plan, (&job.model, at), schedule, number, (device, Arc::clone(exchange)))?;
    let shards = zero::shards(&job.plan, &model)?;
    let shard = zero::own_shard(shards.as_ref(), &model, at);
    let whole = (0..model.layout().len()).into();
    if job.config.deterministic {
        repeat::check(&model, &initial(job, &model, &whole)?, job.plan.batch as usize)?;
    }
    let params = initial(job, &model, if job.plan.divides_weights() { &shard } else { &whole })?;
    let every = job.plan.outermost().every.into();
    let BuiltChain { chain, disk } =
        chain(&own_steps(job, replica), device, (&model, shard), (updates, every))?;
    let sync = match holders.all {
        Some(group) if !model.layout().is_empty() && !job.plan.divides_gradients() => {
            let level = job.plan.outermost();
            let rounds = if job.averages_each_step() { updates } else { 1 };
            let rounds_of = |steps: u64| (steps * rounds).div_ceil(u64::from(level.every).max(1));
            let warmup = Warmups {
                plain: rounds_of(job.config.warm_steps()),
                density: rounds_of(job.config.density_warmup),
            };
            let share = job.weight(replica)?;
            let group = averages::in_regions(group.clone(), &job.plan)?;
            let group = (group, holders.apart, shards.clone());
            Some(synchroniser(job, group, (plain, share), &model, (&params, warmup, chain.rounds()))?)
        }
        _ => None,
    };
    let divided = holders.all.zip(shards);
    let divided = divided.map(|(all, shards)| PartShards::new(shards, all.clone(), &job.plan, (&model, at)));
    let divided = divided.transpose()?;
    let weights = divided_weights(&job.plan, (&model, at), divided.clone())?;
    let placement = schedule.placement();
    let offload = if schedule.keeps_by_policy(planned) { 0 } else { planned.offload as usize };
    Part::new(Parts {
        stage: model,
        params,
        chain,
        sync,
        costs: schedule.costs_of(stage)?,
        recompute: planned.recompute,
        offload,
        // If gradients are averaged in each step, the losses are already weighted by the tokens of all
        // replicas. The gradients of a pool's ranks add up to the gradient of the part, but the collective
        // divides by their number: the weight multiplies by it.
        weight: match job.averages_each_step() {
            true if placement.is_pooled() => placement.holders(number as u32).len() as f64,
            true => 1.0,
            false => job.weight(replica)?,
        },
        keeps: job.keeps_work(),
        disk,
        shards: divided,
        divides_gradients: job.plan.divides_gradients(),
        weights,
    })
}

/// Returns how passes of a part get its parameters, if its holders divide them. `shards`: see
/// [`DividedWeights::new`].
pub(in crate::train) fn divided_weights(
    plan: &BoundPlan,
    (model, at): (&Stage, Coordinates),
    shards: Option<PartShards>,
) -> Result<Option<DividedWeights>> {
    if !plan.divides_weights() {
        return Ok(None);
    }
    let number = zero::number_in_group(plan, at);
    let in_group = zero::shards_in_group(plan, model, at)?.map(|shards| shards.of(number).clone());
    DividedWeights::new(model, shards, (in_group, plan.outermost().overlap)).map(Some)
}

/// Returns the initial values of a shard of a part's parameters.
fn initial(job: &Job, model: &Stage, shard: &Shard) -> Result<Tensor> {
    Ok(match &job.initial {
        Some(initial) => model.load_within(&mut initial.source.open()?, shard.ranges())?,
        None => model.init_within(job.config.seed, shard.ranges())?,
    })
}

/// Makes a rank's part of the model of a number, with what it keeps of its activations. Its layers exchange by
/// `exchange`.
pub(in crate::train) fn stage_of(
    plan: &BoundPlan,
    (spec, at): (&ModelSpec, Coordinates),
    schedule: &ReplicaSchedule,
    number: usize,
    (device, exchange): (&Device, Arc<dyn Exchange>),
) -> Result<Stage> {
    let planned = &plan.parts[number];
    let layers = (spec, schedule.layers[number].clone());
    let mut model = Division::of(plan).stage(layers, at, device, exchange)?;
    if schedule.keeps_by_policy(planned) {
        let count = planned.layers.end - planned.layers.start;
        let (recompute, offload) = (planned.recompute.of(count) as usize, planned.offload as usize);
        let steps =
            within_budget(planned, (spec, plan.context), plan.batch as usize)?.map(|plan| plan.steps.into());
        model.set_activation_policy(ActivationPolicy { recompute, offload, steps });
    }
    Ok(model)
}

/// Lengths of the warm-ups at the beginning of a run, in rounds of averages.
struct Warmups {
    /// Rounds whose values are sent without a lossy codec.
    plain: u64,
    /// Rounds after those, in which a codec that selects values keeps more of them.
    density: u64,
}

/// Makes the plan's method of synchronisation for the holders of a part. `share` is the replica's share of the
/// tokens of a step that all replicas take, where 1 is an equal share; `params` are the initial parameters, and
/// `rounds` are the steps after which an optimizer with a schedule of its own (0/1 Adam) synchronises.
fn synchroniser(
    job: &Job,
    (group, apart, shards): (Communicator, Option<&HeldApart>, Option<Shards>),
    (device, share): (&Device, f64),
    model: &Stage,
    (params, warmup, rounds): (&Tensor, Warmups, Option<SyncSchedule>),
) -> Result<Box<dyn Synchroniser>> {
    let device = &device.counting_for(MemoryKind::Optimizer);
    let level = job.plan.outermost();
    let local = job.plan.local_steps();
    let period = u64::from(local.period());
    let mut average = job.average_config();
    average.apart = apart.map_or_else(Vec::new, |held| apart::ranges(&held.params));
    average.shards = shards;
    if job.plan.pools().is_some() && group.size() == 1 {
        // A pool of one rank counts rounds as the others do, but sends nothing. A lossy codec would only change
        // its values.
        average.codec = AverageConfig::default().codec;
    }
    let counted = job.counted()?;
    let weight = |replica| match &counted {
        Some(counted) => local.weight_of(replica, 0..period, counted),
        None => local.weight(replica, 0..period),
    };
    Ok((level.method.build)(SyncSettings {
        comm: group,
        apart: apart.map_or_else(Vec::new, HeldApart::of_average),
        device,
        layout: model.layout(),
        average: AverageConfig { warmup: warmup.plain, density_warmup: warmup.density, ..average },
        every: level.every.into(),
        moments: job.config.moments(level.every.into()),
        outer_lr: job.config.outer_lr,
        outer_momentum: job.config.outer_momentum,
        fragments: job.config.fragments(level.every.into()),
        delay: job.config.sync_delay,
        mixing: job.config.mixing,
        consensus_rate: job.config.consensus_rate,
        trigger: job.config.trigger,
        asynchronous: job.config.asynchronous(job.plan.replicas(), share),
        theta: job.config.theta,
        bits: job.config.moniqua_bits,
        // One weight per replica. Two copies of the model in one pipeline need no weights: replicas are then
        // equal after each step.
        weights: (0..job.plan.replicas()).map(weight).collect(),
        rounds,
        params,
    })?)
}

/// Makes the plan's method of synchronisation for a part on a rank that replays the averages of others. `alone`
/// contains this rank only.
pub(super) fn replayed_method(
    (job, alone): (&Job, &Communicator),
    device: &Device,
    model: &Stage,
    params: &Tensor,
) -> Result<Box<dyn Synchroniser>> {
    // Nothing goes through a codec here.
    let warmup = Warmups { plain: 0, density: 0 };
    synchroniser(job, (alone.clone(), None, None), (device, 1.0), model, (params, warmup, None))
}

/// Returns the settings of a replica's optimizer. A slower replica takes fewer local steps: its learning-rate
/// schedule and warmup are shortened to this number.
fn own_steps(job: &Job, replica: u32) -> RunSettings {
    let (local, config) = (job.plan.local_steps(), &job.config);
    let own = |steps: u64| if local.are_equal() { steps } else { local.taken(replica, steps).max(1) };
    RunSettings { steps: own(config.steps), warmup: own(config.warmup), ..config.clone() }
}

/// The optimizer of a part.
#[derive(Debug)]
pub(in crate::train) struct BuiltChain {
    pub(in crate::train) chain: Chain,
    /// Its state, if that is on disk.
    pub(in crate::train) disk: Option<DiskState>,
}

/// Makes the optimizer chain of a run whose replicas average every `every` steps, for `updates` updates in a
/// step of a shard of a stage.
pub(in crate::train) fn chain(
    config: &RunSettings,
    device: &Device,
    (stage, shard): (&Stage, Shard),
    (updates, every): (u64, u64),
) -> Result<BuiltChain> {
    let device = &device.counting_for(MemoryKind::Optimizer);
    let local = config.optimizer.chain(config.local(config.schedule(updates)?, updates, every));
    let (local, layout) = (local.groups(config.group.clone().unwrap_or_default()), stage.layout());
    if config.state == StatePlace::Device {
        return Ok(BuiltChain { chain: local.build_shard(device, layout, shard)?, disk: None });
    }
    let disk = DiskState::new(&local, device, layout, &shard)?;
    let chain = local.build_stored(device, layout, shard, disk.stored())?;
    Ok(BuiltChain { chain, disk: Some(disk) })
}

/// Makes communicators of the holders of each part of this rank, by the part's number: ranks of other
/// replicas, of the other copy of the model, of the same pool, or along the tensor axis. Empty if there is only
/// one replica and one copy of the model, except in an elastic run with local steps.
fn groups(
    job: &Job,
    comm: &Communicator,
    placement: &Placement,
    at: Coordinates,
) -> Result<BTreeMap<u32, Holders>> {
    let mut groups = BTreeMap::new();
    // In an elastic run, a method with local steps keeps its state even while there is one replica: others may
    // come.
    let keeps = job.elastic && !job.averages_each_step();
    // What all ranks along the tensor axis have is averaged over them in each step.
    let divides = job.plan.tensor_ranks() > 1;
    let keeps = keeps || divides && job.averages_each_step();
    if job.plan.replicas() == 1 && placement.copies() == 1 && !keeps {
        return Ok(groups);
    }
    if placement.ranks() == 1 && !divides {
        groups.insert(0, Holders { same: comm.clone(), along_tensor: comm.clone() });
        return Ok(groups);
    }
    // A rank may hold several parts: the communicator is split once for each part, into its holders and the
    // rest.
    for part in 0..placement.depth() {
        let holds = placement.stages_of(Rank(at.pipeline)).any(|stage| placement.part(stage) == part);
        let among = |color: u32| comm.split(if holds { 1 + color } else { 0 }, comm.rank().0);
        let same = among(at.tensor)?;
        let along_tensor = if divides { among(0)? } else { same.clone() };
        if holds {
            groups.insert(part, Holders { same, along_tensor });
        }
    }
    Ok(groups)
}

/// Returns how this rank exchanges the gradients of the token table, which the first and the last part use.
fn tie(
    comm: &Communicator,
    schedule: &ReplicaSchedule,
    (at, tensor_ranks): (Coordinates, u32),
    ahead: usize,
) -> Result<TiedTable> {
    let (placement, position) = (schedule.placement(), Rank(at.pipeline));
    let mine = placement.end_of(position);
    Ok(match schedule.tie() {
        TiedWeights::Whole => TiedTable::No,
        TiedWeights::Local => mine.map_or(TiedTable::No, |_| TiedTable::Here),
        TiedWeights::Across => {
            let groups = TiedGroup::of(placement);
            let own = groups.iter().position(|group| group.ranks.contains(&position));
            let pipeline = at.data * tensor_ranks + at.tensor;
            let color = own.map_or(0, |own| 1 + pipeline * groups.len() as u32 + own as u32);
            let group = comm.split(color, comm.rank().0)?;
            match (mine, own) {
                (Some(stage), Some(own)) => {
                    let (to, from) = groups[own].partners(position);
                    let between = Between { group, to, from, round: 0, ahead };
                    TiedTable::Across(TableExchange { between, stage, begun: None })
                }
                _ => TiedTable::No,
            }
        }
    })
}
