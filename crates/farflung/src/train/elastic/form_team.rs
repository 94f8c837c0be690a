//! The agreement of a new view's members in pipelines: the plan for them, the step to continue from, and the
//! tensors that each of them still needs for its part.
//!
//! All members of a new view send each other a description of the tensors that they hold. From these
//! descriptions pure functions compute the places ([`Assignment::new`]), the step ([`newest_whole`]) and the
//! tensors to be moved ([`moves`]). If a pipeline has lost a rank and there is no replacement, each stage
//! becomes the pool of all members that hold its part ([`Assignment::rerouted`]). With `pooled`, stages are
//! always pools ([`Assignment::pooled`]).

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::Path;

use farflung_base::Rank;
use farflung_comm::Communicator;
use farflung_parallel::Plan;
use farflung_parallel::membership::{Member, View};
use farflung_parallel::pipeline::Pools;
use farflung_parallel::plan::{Assignment, Holding, Needed, PlanPosition, moves, newest_whole};
use serde::{Deserialize, Serialize};

use super::all_gather::all_gather;
use super::broken_round::{BrokenRound, RoundPosition};
use super::fetching::ChunkStore;
use super::held_tensors::HeldTensors;
use super::layers::ranges;
use super::needed_tensors::needs;
use super::pieces::{exchange, moved_bytes, offered};
use super::pool_speeds::{self, Moving, PoolSpeeds};
use super::saved::{self, Whole};
use super::state_transfer::chunk_fault;
use super::team::{Team, assigned, grown, pooling, reroutes, wished, wrong};
use super::{rank_speeds, shares};
use crate::config::pools::Numbers;
use crate::events::LostSequences;
use crate::train::bound_plan::BoundPlan;
use crate::train::combination;
use crate::train::job::Job;
use crate::train::pieces::StateKind;
use crate::train::plan_start::PlanStart;
use crate::train::planned;
use crate::train::run_state::{RunCounters, RunState};
use crate::train::steps::LastDone;
use crate::{Error, Result, TrainConfig};
/// Description that each member of a new view sends to the others.
#[derive(Debug, Serialize, Deserialize)]
struct MemberDescription {
    /// Number of the view in which its plan was made; `None` for a member without a part.
    made: Option<u64>,
    plan: String,
    /// Endpoints of that plan's ranks.
    ranks: Vec<u32>,
    /// Steps at which that plan's ranks last evaluated, saved and checked.
    last: LastDone,
    /// Sets of tensors that it holds, of one or more steps.
    held: Vec<HeldTensors>,
    /// Speeds of the members; with pools, the member that moves to another stage.
    speeds: BTreeMap<u32, f64>,
    moving: Option<Moving>,
    /// Number of layers of each stage, if the layers are to be divided anew.
    layers: Vec<u32>,
    /// Whether it is ready to be in a further pipeline, if it has no part.
    grows: bool,
    /// Whether it leaves: it gets no part, and hands over the one that it holds.
    leaves: bool,
    /// How far it is, if steps are local and it takes any.
    round: Option<RoundPosition>,
}

/// Data of a member that enters a view.
pub(super) struct EnteringMember<'a> {
    pub(super) job: &'a Job,
    pub(super) last: LastDone,
    /// Its team so far, if it has one.
    pub(super) team: Option<&'a Team>,
    /// Its tensors: copies of earlier steps, and the newest last.
    pub(super) held: Vec<RunState>,
    /// How far it is, if steps are local and it takes any.
    pub(super) round: Option<RoundPosition>,
    /// Folder of its checkpoints.
    pub(super) folder: Option<&'a Path>,
    /// Speeds of the members.
    pub(super) pools: &'a PoolSpeeds,
    /// Number of layers of each stage, if the layers are to be divided anew.
    pub(super) layers: &'a [u32],
    /// Chunks of a state that were received earlier.
    pub(super) store: &'a mut ChunkStore,
    /// Whether it is ready to be in a further pipeline, if it has no part.
    pub(super) grows: bool,
    /// Whether it leaves.
    pub(super) leaves: bool,
}

/// Result of [`form_team`]: the plan, step and tensors with which a view's members continue.
pub(super) struct FormedTeam {
    pub(super) team: Team,
    /// The job under the new plan.
    pub(super) job: Job,
    pub(super) last: LastDone,
    pub(super) counted: RunCounters,
    /// Tensors that this member needs for its place.
    pub(super) tensors: BTreeMap<String, Vec<f32>>,
    /// Bytes moved, and number of members that sent them.
    pub(super) moved: (u64, usize),
    /// Number of steps that were done and must be done again, because the remaining members do not have the
    /// whole model after them.
    pub(super) lost_steps: u64,
    /// Whether the members continue from their checkpoints.
    pub(super) from_checkpoints: bool,
    /// The speeds of the members, the same on all members.
    pub(super) speeds: BTreeMap<u32, f64>,
    /// Whether the members that take steps are in the middle of a round of local steps, which they finish with
    /// the state that they have.
    pub(super) finishes_round: bool,
    /// Sequences of lost pipelines that are in no average.
    pub(super) lost: Vec<LostSequences>,
}

/// Agrees on the places of a view's members and on the step, and transfers the tensors that they need. All
/// members call it.
///
/// Errors: a member that is lost meanwhile; [`Error::PartLost`] if no remaining member has some part of the
/// model.
pub(super) fn form_team(view: &View, all: &Communicator, brings: EnteringMember<'_>) -> Result<FormedTeam> {
    let EnteringMember { job, last, team, held, round, folder, pools, layers, store, grows, leaves } = brings;
    let works = team.filter(|team| team.rank().is_some());
    let mine = MemberDescription {
        made: works.map(|team| team.epoch),
        plan: job.plan.to_string(),
        ranks: works.map_or_else(Vec::new, Team::slots),
        last,
        held: held.iter().map(HeldTensors::of).collect(),
        speeds: pools.known.clone(),
        moving: pools.moving,
        layers: layers.to_vec(),
        grows: grows || job.barrier,
        leaves,
        round,
    };
    let mut told: Vec<MemberDescription> = all_gather(all, &mine)?;
    add_newcomers_speeds(view, &mut told);
    // The plan so far is that of the newest view that any member has reached.
    let newest =
        |told: &&MemberDescription| (told.made, told.held.iter().map(|held| held.counted.step).max());
    let reference = told.iter().filter(|told| told.made.is_some()).max_by_key(newest);
    let reference = reference.ok_or_else(|| wrong("is lost: no member has a part of the model"))?;
    let before: Plan = reference.plan.parse()?;
    let stood: Vec<Option<PlanPosition>> = (view.members.iter().zip(&told))
        .map(|(member, told)| {
            let same = told.made == reference.made;
            let rank = reference.ranks.iter().position(|&slot| slot == member.slot).filter(|_| same)? as u32;
            before.position_of(Rank(rank))
        })
        .collect();
    let rounds: Vec<Option<RoundPosition>> = told.iter().map(|told| told.round).collect();
    if let Some(round) = BrokenRound::new(job, &before, &stood, &rounds) {
        return finished_round((view, all, job), (&before, &round, reference), last, &told);
    }
    let NextTeam { team, plan } = next_team((view, all, job), (&before, reference, &told), stood)?;
    let mut next = job.with_plan(plan.into_plan())?;
    // Failures and departures for tests are given by rank, and the ranks have changed.
    (next.failure, next.departure) = (None, None);

    let holding = |(member, told): (usize, &MemberDescription)| {
        told.held.iter().map(|held| held.holding(member)).collect::<Vec<_>>()
    };
    let holdings: Vec<Holding> = told.iter().enumerate().flat_map(holding).collect();
    let by_position = needs(&next)?;
    let all_counted = || told.iter().flat_map(|told| &told.held).map(|held| &held.counted);
    let most = all_counted().max_by_key(|counted| counted.kinds.len());
    let needed = |tensors: &BTreeMap<String, usize>| most.map_or_else(Vec::new, |most| most.needed(tensors));
    let by_position: Vec<Vec<Needed>> = by_position.iter().map(needed).collect();
    let whole: Vec<Needed> = by_position.concat();
    let local = rounds.iter().flatten().map(|round| round.step).max();
    let done = all_counted().map(|counted| counted.step).max().max(local).unwrap_or(0);
    let in_memory = newest_whole(&holdings, &whole);
    let (from, from_checkpoints) = match in_memory {
        Ok(step) => (in_memory_at(step, &told, (holdings, held))?, false),
        Err(tensor) => {
            let lost = || Error::PartLost { left: None, tensor: tensor.to_owned() };
            (saved::newest(all, (folder, job), &whole, done)?.ok_or_else(lost)?, true)
        }
    };
    let Whole { holdings, held, own } = from;
    let mut counted = held.counted;
    let step = counted.step;
    let place = |(rank, &member): (Rank, &usize)| {
        let position = next.plan.at(rank).pipeline;
        (member, &by_position[position as usize][..])
    };
    let ranks = (0..).map(Rank).zip(&team.assignment.ranks);
    let places: Vec<(usize, &[Needed])> = ranks.map(place).collect();
    let moving = moves(&holdings, step, &places);

    let me = all.rank().index();
    if let Some(own) = own.as_ref().filter(|_| works.is_some())
        && !moving.iter().any(|moving| moving.to == me && StateKind::is_optimizer(&moving.name))
        && !job.averages_each_step()
    {
        // It keeps its optimizer.
        counted.optimizer.updates = own.counted.optimizer.updates;
    }
    let (mut blobs, held) = offered(all, own.as_ref(), &moving, job.averages_each_step())?;
    let bytes = moved_bytes(&held, &moving);
    blobs.fault = chunk_fault(job, all.rank(), step);
    let came = exchange(all, (blobs, &held), &moving, store)?;
    let mut tensors = own.map_or_else(BTreeMap::new, |own| own.tensors);
    tensors.extend(came);
    let donors: BTreeSet<usize> = moving.iter().map(|moving| moving.from).collect();
    let moved = (bytes, donors.len());
    next.plan_start = PlanStart { step, microbatches: counted.microbatches };
    Ok(FormedTeam {
        job: next,
        last: reference.last.up_to(step),
        counted,
        tensors,
        moved,
        lost_steps: done.saturating_sub(step),
        from_checkpoints,
        team,
        speeds: reference.speeds.clone(),
        finishes_round: false,
        lost: Vec::new(),
    })
}

/// Adds the speeds that newcomers have measured to what each member with a part tells about others' speeds.
fn add_newcomers_speeds(view: &View, told: &mut [MemberDescription]) {
    let newcomers = view.members.iter().zip(&*told).filter(|(_, told)| told.made.is_none());
    let own =
        |(member, told): (&Member, &MemberDescription)| Some((member.slot, *told.speeds.get(&member.slot)?));
    let measured: Vec<(u32, f64)> = newcomers.filter_map(own).collect();
    for told in told.iter_mut().filter(|told| told.made.is_some()) {
        for &(slot, speed) in &measured {
            told.speeds.entry(slot).or_insert(speed);
        }
    }
}

/// A team and its plan.
struct NextTeam {
    team: Team,
    plan: BoundPlan,
}

/// Assigns the members of a view to places, and makes the plan for them. `before` is the plan so far, as the
/// member of `reference` has it, and `stood` has the members' places there.
///
/// Errors: settings that make no plan for these members.
fn next_team(
    (view, all, job): (&View, &Communicator, &Job),
    (before, reference, told): (&Plan, &MemberDescription, &[MemberDescription]),
    mut stood: Vec<Option<PlanPosition>>,
) -> Result<NextTeam> {
    let wished = wished(job)?;
    let cut = before.pools().map_or(before.stages(), Pools::stages);
    let (stays, departing) = staying(told);
    let pooling = if wished.is_pooled() {
        followed_stages(job, (before, told), &mut stood)?;
        let slots: Vec<Option<u32>> = stays.iter().map(|&member| Some(view.members[member].slot)).collect();
        let mut speeds = PoolSpeeds::default();
        speeds.begin_anew(&reference.speeds);
        speeds.moving = reference.moving;
        Some(pooling(job, &slots, &speeds)?)
    } else {
        None
    };
    let all = (all, view.members.len());
    let stood: Vec<Option<PlanPosition>> = stays.iter().map(|&member| stood[member]).collect();
    // A further pipeline begins once all its members have fetched their parts, so that no member waits for it.
    let waits = || grown((job, wished), &stood, cut).iter().any(|future| !told[stays[future.member]].grows);
    let most = (pooling.is_none() && before.pools().is_none() && waits()).then(|| before.replicas() as usize);
    let assignment = match &pooling {
        Some(pooling) => Assignment::pooled(&stood, cut, pooling),
        None => assigned(wished, &stood, (cut, most), reroutes(job, wished)),
    };
    let rates = pooling.as_ref().map(|pooling| pool_speeds::rates(&assignment, pooling));
    let team_of = |assignment: Assignment| {
        let assignment = assignment.of_some(&stays, all.1);
        let departing = departing.iter().map(|&member| view.members[member].id).collect();
        Team::new(view, all.0.clone(), assignment).letting_go(departing)
    };
    let mut team = team_of(assignment);
    let layers = own_cut(before, &reference.layers);
    let mut plan = plan_for(job, &team, (before, reference), (rates, layers.clone()))?;
    if pooling.is_none()
        && plan.pools().is_some()
        && combination::check(&wished.run_settings(), &plan).is_err()
    {
        // Settings that do not work with pools: train in whole pipelines only.
        team = team_of(assigned(wished, &stood, (cut, most), false));
        plan = plan_for(job, &team, (before, reference), (None, layers))?;
    }
    Ok(NextTeam { team, plan })
}

/// Returns the members that stay and those that leave, by their indices. If all leave, they keep their parts
/// until they have agreed on that.
fn staying(told: &[MemberDescription]) -> (Vec<usize>, Vec<usize>) {
    let (departing, stays): (Vec<usize>, Vec<usize>) =
        (0..told.len()).partition(|&member| told[member].leaves);
    if stays.is_empty() { (departing, Vec::new()) } else { (stays, departing) }
}

/// Returns the team of the pipelines that finish a round of local steps. No tensor moves.
///
/// Errors: those of the plan.
fn finished_round(
    (view, all, job): (&View, &Communicator, &Job),
    (before, round, reference): (&Plan, &BrokenRound, &MemberDescription),
    last: LastDone,
    told: &[MemberDescription],
) -> Result<FormedTeam> {
    // A spare has the plan of another round, and does not report this change.
    let takes_part = *job.plan == *before;
    let lost = if takes_part { round.lost_sequences(job, &reference.ranks) } else { Vec::new() };
    let own = told[all.rank().index()].held.last();
    let any = own.or_else(|| told.iter().find_map(|told| told.held.last()));
    let counted = any.ok_or_else(|| wrong("is lost: no member has a part of the model"))?.counted.clone();
    let team = Team::new(view, all.clone(), round.assignment.clone());
    // A member without a part has another plan, or none.
    let next = if team.rank().is_some() {
        let each = u32::try_from(planned::microbatches(wished(job)?)).unwrap_or(u32::MAX);
        let mut plan = round.plan(before, each)?;
        share_by_speed(&mut plan, job, &team, &reference.speeds);
        round.job(job, plan)?
    } else {
        job.clone()
    };
    Ok(FormedTeam {
        team,
        job: next,
        last,
        counted,
        tensors: BTreeMap::new(),
        moved: (0, 0),
        lost_steps: 0,
        from_checkpoints: false,
        speeds: reference.speeds.clone(),
        finishes_round: true,
        lost,
    })
}

/// Selects the tensors of a step of which the members have the whole model in memory.
fn in_memory_at(
    step: u64,
    told: &[MemberDescription],
    (holdings, held): (Vec<Holding>, Vec<RunState>),
) -> Result<Whole> {
    // With local steps, those that have followed their parts do not count updates.
    let at_step = told.iter().flat_map(|told| &told.held).filter(|held| held.counted.step == step);
    let at_step = at_step.rev().max_by_key(|held| held.counted.optimizer.updates);
    let at_step = at_step.ok_or_else(|| wrong("is lost: no member is at the step to continue from"))?.clone();
    let own = RunState::merge(held.into_iter().filter(|held| held.counted.step == step));
    Ok(Whole { holdings, held: at_step, own })
}

/// Sets the stage of each newcomer to pools that has followed one: its pool is that of the part that it holds
/// as it is after the members' last step. Speeds may have changed since it began.
fn followed_stages(
    job: &Job,
    (before, told): (&Plan, &[MemberDescription]),
    stood: &mut [Option<PlanPosition>],
) -> Result<()> {
    let newest = told.iter().flat_map(|told| &told.held).map(|held| held.counted.step).max();
    let newcomers = stood.iter_mut().zip(told).filter(|(stood, _)| stood.is_none());
    let at_newest =
        |told: &'_ MemberDescription| told.held.iter().position(|held| Some(held.counted.step) == newest);
    let follow: Vec<_> =
        newcomers.filter_map(|(stood, told)| Some((stood, &told.held[at_newest(told)?]))).collect();
    let Some(pools) = before.pools().filter(|_| !follow.is_empty()) else { return Ok(()) };
    let by_rank = needs(&job.with_plan(before.clone())?)?;
    for (stood, held) in follow {
        let mut ranks = (0..).zip(&by_rank);
        let rank = ranks.find(|(_, needed)| held.has_all(needed.keys())).map(|(rank, _)| rank);
        *stood = rank
            .and_then(|rank| PlanPosition::in_pools(&pools.sizes, rank))
            .map(|at| PlanPosition { replica: pools.sizes[at.position as usize], ..at });
    }
    Ok(())
}

/// Returns the layers of the stages: those of `asked`, if it divides the model among as many stages as before,
/// or else those that the stages have.
fn own_cut(before: &Plan, asked: &[u32]) -> Vec<Range<u32>> {
    let all = asked.iter().try_fold(0_u32, |all, &layers| all.checked_add(layers));
    let divides =
        asked.len() == before.parts.len() && all == Some(before.model.layers) && !asked.contains(&0);
    if divides { ranges(asked) } else { before.parts.iter().map(|part| part.layers.clone()).collect() }
}

/// Computes the plan of a team from the settings and the number of pipelines and stages. Levels of averaging
/// and machine names are those of the plan `before` of the member `reference`. If stages are pools, `rates` are
/// the new ranks' rates. With as many stages as `cut` has parts, they have these layers. Pipelines have shares
/// by the members' speeds. A pure function.
fn plan_for(
    job: &Job,
    team: &Team,
    (before, reference): (&Plan, &MemberDescription),
    (rates, cut): (Option<Vec<u32>>, Vec<Range<u32>>),
) -> Result<BoundPlan> {
    let wished = wished(job)?;
    let (stages, workers) = (team.assignment.stages as usize, team.assignment.ranks.len());
    let pools = &team.assignment.pools;
    let settings = TrainConfig {
        stages: if pools.is_empty() { stages } else { workers },
        workers,
        pools: (!pools.is_empty()).then(|| Numbers(pools.clone())),
        pool_rates: rates.filter(|_| !pools.is_empty()).map(Numbers),
        // Pools process the microbatches of all former pipelines, so that a step has as many sequences as
        // before.
        microbatches: Some(if pools.is_empty() {
            planned::microbatches(wished)
        } else {
            usize::try_from(before.all_microbatches()).unwrap_or(usize::MAX)
        }),
        accumulate: 1,
        ..wished.clone()
    };
    let machine = |slot: &u32| {
        let old =
            reference.ranks.iter().position(|old| old == slot).and_then(|rank| before.machines.get(rank));
        old.cloned().unwrap_or_else(|| format!("member.{slot}"))
    };
    let mut plan = planned::divided(&settings, &job.model, (workers, None), Some(cut))?.into_plan();
    plan.machines = team.slots().iter().map(machine).collect();
    plan.levels.clone_from(&before.levels);
    share_by_speed(&mut plan, job, team, &reference.speeds);
    BoundPlan::new(plan)
}

/// Divides a step's microbatches among the pipelines of a plan by the speeds of their members, if shares follow
/// speed. The step has as many as before.
fn share_by_speed(plan: &mut Plan, job: &Job, team: &Team, speeds: &BTreeMap<u32, f64>) {
    if plan.pools().is_some() || !job.follows_speed() {
        return;
    }
    let work = rank_speeds::work(plan, &job.model);
    if let Some(shares) = shares::of_pipelines(plan, &team.slots(), (&work, speeds)) {
        plan.microbatches = shares;
    }
}
