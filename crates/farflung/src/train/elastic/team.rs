//! Members in pipelines: who of a view takes which place, the plan for them, and what each of them lacks of its
//! part.
//!
//! All members of a new view tell each other what they hold: the places follow by [`Lineup::new`], the step by
//! [`newest_whole`], what moves by [`moves`], all of them pure functions of what was told. Where a pipeline has
//! lost a rank that nobody replaces, stages are pools of those that hold their part ([`Lineup::rerouted`]);
//! with `pooled` they always are ([`Lineup::pooled`]).
//! Whoever is left over is a spare: a member without a part.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use farflung_base::{Bandwidth, Bytes, Link, Nanos, Rank};
use farflung_comm::Communicator;
use farflung_parallel::Plan;
use farflung_parallel::membership::{MemberId, View};
use farflung_parallel::pipeline::Pools;
use farflung_parallel::plan::{Holding, Lineup, Needed, Pooling, Stood, moves, newest_whole};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::fetching::Store;
use super::pieces::{exchange, offered};
use super::pools::{self, Moving, PoolSpeeds};
use super::saved::{self, Whole};
use super::share::spoils;
use crate::config::pools::Numbers;
use crate::train::combination;
use crate::train::job::{Base, Job};
use crate::train::planned;
use crate::train::steps::Last;
use crate::train::trainer::{Counted, Pieces, needs};
use crate::{Error, Result, TrainConfig};

/// The slowest link over which the others wait for what moves.
const SLOWEST: Link = Link { bandwidth: Bandwidth(1_000_000), latency: Nanos::ZERO };

/// The members of a view, and who of them works at which rank.
#[derive(Debug, Clone)]
pub(super) struct Team {
    /// The number of the view.
    pub(super) epoch: u64,
    /// All of them, in the view's order.
    pub(super) all: Communicator,
    pub(super) lineup: Lineup,
    ids: Vec<MemberId>,
    slots: Vec<u32>,
}

impl Team {
    /// The members of a view with these places.
    pub(super) fn new(view: &View, all: Communicator, lineup: Lineup) -> Self {
        let ids = view.members.iter().map(|member| member.id).collect();
        let slots = view.members.iter().map(|member| member.slot).collect();
        Self { epoch: view.epoch, all, lineup, ids, slots }
    }

    /// The members with which a run begins: each is the rank of its number.
    pub(super) fn founded(view: &View, all: Communicator, job: &Job) -> Self {
        let ranks = (0..view.members.len()).collect();
        let pools = job.plan.pools().map_or_else(Vec::new, |pools| pools.sizes.clone());
        let stages = job.plan.pools().map_or(job.plan.stages(), Pools::stages);
        Self::new(view, all, Lineup { stages, pools, ranks, spares: Vec::new() })
    }

    /// This member's rank in the plan; none of a spare.
    pub(super) fn rank(&self) -> Option<u32> {
        self.lineup.rank_of(self.all.rank().index())
    }

    /// Who works, by rank.
    pub(super) fn working(&self) -> Vec<MemberId> {
        self.lineup.ranks.iter().map(|&member| self.ids[member]).collect()
    }

    /// Endpoints of those that work, by rank.
    pub(super) fn slots(&self) -> Vec<u32> {
        self.lineup.ranks.iter().map(|&member| self.slots[member]).collect()
    }

    /// Members without a part, by their numbers in [`Team::all`].
    pub(super) fn spares(&self) -> impl Iterator<Item = Rank> + '_ {
        self.lineup.spares.iter().map(|&member| Rank(member as u32))
    }

    /// The member at rank 0 of the plan.
    pub(super) fn lead(&self) -> Rank {
        Rank(self.lineup.ranks.first().copied().unwrap_or(0) as u32)
    }

    /// A communicator of those that work, in the order of the plan's ranks. All members call it, and wait for
    /// those that have so many bytes to give or to get first: whoever has them to itself notices if the other
    /// falls silent.
    pub(super) fn split(&self, deadline: Nanos, bytes: u64) -> Result<Communicator> {
        let rank = self.rank();
        let patience = deadline.saturating_add(SLOWEST.time(Bytes(bytes)));
        let all = self.all.clone().with_deadline(patience);
        let comm = all.split(u32::from(rank.is_none()), rank.unwrap_or(self.all.rank().0))?;
        Ok(comm.with_deadline(deadline))
    }
}

/// What a member of a new view tells the others.
#[derive(Debug, Serialize, Deserialize)]
struct Standing {
    /// The view in which its plan was made; none of a member without a part.
    made: Option<u64>,
    plan: String,
    /// The endpoints of that plan's ranks.
    ranks: Vec<u32>,
    /// When its plan's ranks last evaluated, saved and checked.
    last: Last,
    /// Values that it has.
    held: Vec<Held>,
    /// Where stages are pools: how fast members are, and who of them changes its stage.
    speeds: BTreeMap<u32, f64>,
    moving: Option<Moving>,
}

/// Values that a member has.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Held {
    pub(super) counted: Counted,
    names: BTreeSet<String>,
}

impl Held {
    pub(super) fn of(pieces: &Pieces) -> Self {
        Self { counted: pieces.counted.clone(), names: pieces.names() }
    }

    pub(super) fn holding(&self, member: usize) -> Holding {
        Holding { member, step: self.counted.step, names: self.names.clone() }
    }
}

/// What a member brings into a view.
pub(super) struct Brings<'a> {
    pub(super) job: &'a Job,
    pub(super) last: Last,
    /// Its place so far, if it has one.
    pub(super) team: Option<&'a Team>,
    /// Its values, the newest first, and copies from before.
    pub(super) held: Vec<Pieces>,
    /// Where it keeps its checkpoints.
    pub(super) folder: Option<&'a Path>,
    /// Speeds of the members, if stages are pools.
    pub(super) pools: &'a PoolSpeeds,
    /// Chunks of a state that were received before.
    pub(super) store: &'a mut Store,
}

/// Where a view's members go on.
pub(super) struct Formed {
    pub(super) team: Team,
    /// The run under their plan.
    pub(super) job: Job,
    pub(super) last: Last,
    pub(super) counted: Counted,
    /// What this member needs for its place; nothing of a spare.
    pub(super) tensors: BTreeMap<String, Vec<f32>>,
    /// Bytes that moved, and how many members gave them.
    pub(super) moved: (u64, usize),
    /// Steps that were done and are lost, since nobody is left who has all of the model after them.
    pub(super) lost_steps: u64,
    /// Whether they go on from their checkpoints.
    pub(super) from_checkpoints: bool,
    /// Where stages are pools: what all know of the members' speeds.
    pub(super) speeds: BTreeMap<u32, f64>,
}

/// Tells all members something, and gives what they told.
pub(super) fn tell_all<T: Serialize + DeserializeOwned>(all: &Communicator, mine: &T) -> Result<Vec<T>> {
    let bytes = postcard::to_stdvec(mine).expect("numbers and texts are plain data");
    let told = all.all_gather_bytes(bytes)?;
    told.iter().map(|bytes| postcard::from_bytes(bytes).map_err(|_| wrong("does not read as that"))).collect()
}

fn wrong(problem: &'static str) -> Error {
    Error::Message { message: "where a member stands".to_owned(), problem }
}

/// The settings by which pipelines are planned.
fn wished(job: &Job) -> Result<&TrainConfig> {
    job.pipelines.as_deref().ok_or_else(|| wrong("is a place in a pipeline, and this run has none"))
}

/// The members of a view agree on their places and on the step, and give each other what they lack. All call
/// it.
///
/// Errors: a member that is lost meanwhile; [`Error::PartLost`] where nobody is left who has some of the model.
pub(super) fn form(view: &View, all: &Communicator, brings: Brings<'_>) -> Result<Formed> {
    let Brings { job, last, team, held, folder, pools, store } = brings;
    let works = team.filter(|team| team.rank().is_some());
    let mine = Standing {
        made: works.map(|team| team.epoch),
        plan: job.plan.to_string(),
        ranks: works.map_or_else(Vec::new, Team::slots),
        last,
        held: held.iter().map(Held::of).collect(),
        speeds: pools.known.clone(),
        moving: pools.moving,
    };
    let told: Vec<Standing> = tell_all(all, &mine)?;
    // Plans are those of the newest view that any member has reached.
    let newest = |told: &&Standing| (told.made, told.held.first().map(|held| held.counted.step));
    let reference = told.iter().filter(|told| told.made.is_some()).max_by_key(newest);
    let reference = reference.ok_or_else(|| wrong("is nowhere: no member has a part"))?;
    let before: Plan = reference.plan.parse()?;
    let stood: Vec<Option<Stood>> = (view.members.iter().zip(&told))
        .map(|(member, told)| {
            let same = told.made == reference.made;
            let rank = reference.ranks.iter().position(|&slot| slot == member.slot).filter(|_| same)? as u32;
            stood_in(&before, rank)
        })
        .collect();
    let wished = wished(job)?;
    let stages = u32::try_from(wished.stages).unwrap_or(u32::MAX);
    let cut = before.pools().map_or(before.stages(), Pools::stages);
    let whole = || Lineup::new(&stood, cut, stages);
    let pooling = wished.is_pooled().then(|| pooling(job, view, reference)).transpose()?;
    let lineup = match &pooling {
        Some(pooling) => Lineup::pooled(&stood, cut, pooling),
        None if can_be_rerouted(wished) => Lineup::rerouted(&stood, cut, stages),
        None => whole(),
    };
    let rates = pooling.as_ref().map(|pooling| pools::rates(&lineup, pooling));
    let mut team = Team::new(view, all.clone(), lineup);
    let mut plan = plan_for(job, &team, (&before, &reference.ranks), rates)?;
    if pooling.is_none() && plan.pools().is_some() && combination::check(wished, &plan).is_err() {
        // What does not go with pools trains in whole pipelines alone.
        team = Team::new(view, all.clone(), whole());
        plan = plan_for(job, &team, (&before, &reference.ranks), None)?;
    }
    let mut next = job.with_plan(plan)?;
    // Placed failures and departures are of ranks as they were.
    (next.failure, next.departure) = (None, None);

    let holding = |(member, told): (usize, &Standing)| {
        told.held.iter().map(|held| held.holding(member)).collect::<Vec<_>>()
    };
    let holdings: Vec<Holding> = told.iter().enumerate().flat_map(holding).collect();
    let by_position = needs(&next)?;
    let all_counted = || told.iter().flat_map(|told| &told.held).map(|held| &held.counted);
    let states = all_counted().map(|counted| counted.states).max().unwrap_or(0);
    let bytes = |elements: usize| (elements * (1 + states) * size_of::<f32>()) as u64;
    let needed = |tensors: &BTreeMap<String, usize>| -> Vec<Needed> {
        tensors.iter().map(|(name, &len)| Needed { name: name.clone(), bytes: bytes(len) }).collect()
    };
    let by_position: Vec<Vec<Needed>> = by_position.iter().map(needed).collect();
    let whole: Vec<Needed> = by_position.concat();
    let done = all_counted().map(|counted| counted.step).max().unwrap_or(0);
    let in_memory = newest_whole(&holdings, &whole);
    let (from, from_checkpoints) = match in_memory {
        Ok(step) => (in_memory_at(step, &told, (holdings, held))?, false),
        Err(tensor) => {
            let lost = || Error::PartLost { tensor: tensor.to_owned() };
            (saved::newest(all, (folder, job), &whole, done)?.ok_or_else(lost)?, true)
        }
    };
    let Whole { holdings, held: Held { counted, .. }, own } = from;
    let step = counted.step;
    let place = |(rank, &member): (usize, &usize)| (member, &by_position[rank % by_position.len()][..]);
    let places: Vec<(usize, &[Needed])> = team.lineup.ranks.iter().enumerate().map(place).collect();
    let moving = moves(&holdings, step, &places);

    let (mut shelf, held) = offered(all, own.as_ref(), &moving)?;
    shelf.spoils = spoils(job, all.rank(), step);
    let came = exchange(all, (shelf, &held), &moving, store)?;
    let mut tensors = own.map_or_else(BTreeMap::new, |own| own.tensors);
    tensors.extend(came);
    let donors: BTreeSet<usize> = moving.iter().map(|moving| moving.from).collect();
    let moved = (moving.iter().map(|moving| moving.bytes).sum(), donors.len());
    next.base = Base { step, microbatches: counted.microbatches };
    Ok(Formed {
        job: next,
        last: reference.last.up_to(step),
        counted,
        tensors,
        moved,
        lost_steps: done.saturating_sub(step),
        from_checkpoints,
        team,
        speeds: reference.speeds.clone(),
    })
}

/// A step of which members have all of the model in memory.
fn in_memory_at(
    step: u64,
    told: &[Standing],
    (holdings, held): (Vec<Holding>, Vec<Pieces>),
) -> Result<Whole> {
    let at_step = told.iter().flat_map(|told| &told.held).find(|held| held.counted.step == step);
    let at_step = at_step.ok_or_else(|| wrong("is at no step"))?.clone();
    let own = Pieces::together(held.into_iter().filter(|held| held.counted.step == step));
    Ok(Whole { holdings, held: at_step, own })
}

/// Where a rank of a plan stands.
fn stood_in(plan: &Plan, rank: u32) -> Option<Stood> {
    match plan.pools() {
        Some(pools) => Stood::in_pools(&pools.sizes, rank),
        None => Some(Stood { replica: rank / plan.stages(), position: rank % plan.stages() }),
    }
}

/// Whether pipelines of these settings can be re-routed: each rank holds one part, and microbatches pass it
/// whole.
fn can_be_rerouted(wished: &TrainConfig) -> bool {
    let method = wished.schedule;
    let parts = wished.chunks.unwrap_or(method.default_chunks() as usize);
    wished.schedule_file.is_none() && method.copies() == 1 && parts == 1 && !method.slices()
}

/// What the pools of a view are made for, by what one of its members has told.
fn pooling(job: &Job, view: &View, told: &Standing) -> Result<Pooling> {
    let wished = wished(job)?;
    let mut speeds = PoolSpeeds::default();
    speeds.begin_anew(&told.speeds);
    speeds.moving = told.moving;
    let settings = TrainConfig { workers: wished.stages, pools: None, pool_rates: None, ..wished.clone() };
    let cut = planned::from_settings(&settings, &job.model, wished.stages, None)?;
    Ok(speeds.pooling(view, cut.microbatches[0], pools::work(&cut, &job.model)))
}

/// The plan of a team: what the settings give for so many pipelines of so many stages, with the averages and
/// machines of the plan before. Where stages are pools, `rates` are those of its ranks. A pure function.
fn plan_for(
    job: &Job,
    team: &Team,
    (before, ranks): (&Plan, &[u32]),
    rates: Option<Vec<u32>>,
) -> Result<Plan> {
    let wished = wished(job)?;
    let (stages, workers) = (team.lineup.stages as usize, team.lineup.ranks.len());
    let pools = &team.lineup.pools;
    let settings = TrainConfig {
        stages: if pools.is_empty() { stages } else { workers },
        workers,
        pools: (!pools.is_empty()).then(|| Numbers(pools.clone())),
        pool_rates: rates.filter(|_| !pools.is_empty()).map(Numbers),
        // Pools take what the pipelines took together: no sequence of a step is left out.
        microbatches: Some(if pools.is_empty() {
            planned::microbatches(wished)
        } else {
            usize::try_from(before.all_microbatches()).unwrap_or(usize::MAX)
        }),
        accumulate: 1,
        ..wished.clone()
    };
    let machine = |slot: &u32| {
        let old = ranks.iter().position(|old| old == slot).and_then(|rank| before.machines.get(rank));
        old.cloned().unwrap_or_else(|| format!("member.{slot}"))
    };
    let mut plan = planned::from_settings(&settings, &job.model, workers, None)?;
    plan.machines = team.slots().iter().map(machine).collect();
    plan.levels.clone_from(&before.levels);
    Ok(plan)
}
