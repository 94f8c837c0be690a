//! Members in pipelines: which member of a view takes which place. The remaining members are spares: members
//! without a part.

use std::collections::BTreeSet;

use farflung_base::{Bandwidth, Bytes, Link, Nanos, PeerId, Rank};
use farflung_comm::Communicator;
use farflung_parallel::membership::{MemberId, View};
use farflung_parallel::pipeline::Pools;
use farflung_parallel::plan::{Assignment, PlanPosition, Pooling};

use super::pool_speeds::PoolSpeeds;
use super::rank_speeds;
use crate::train::job::Job;
use crate::train::planned;
use crate::{Error, Result, TrainConfig};
/// The slowest link for which the others wait while tensors are moved: 1 Mbit/s.
const SLOWEST: Link = Link { bandwidth: Bandwidth(1_000_000), latency: Nanos::ZERO };

/// The members of a view, and the rank of each in the plan.
#[derive(Debug, Clone)]
pub(super) struct Team {
    /// Number of the view.
    pub(super) epoch: u64,
    /// Communicator of all members, in the view's order.
    pub(super) all: Communicator,
    pub(super) assignment: Assignment,
    /// Members that have handed over their parts and leave next.
    pub(super) departing: Vec<MemberId>,
    ids: Vec<MemberId>,
    slots: Vec<u32>,
}

impl Team {
    /// Creates the team of a view with these places.
    pub(super) fn new(view: &View, all: Communicator, assignment: Assignment) -> Self {
        let ids = view.members.iter().map(|member| member.id).collect();
        let slots = view.members.iter().map(|member| member.slot).collect();
        Self { epoch: view.epoch, all, assignment, departing: Vec::new(), ids, slots }
    }

    /// Sets the members that have handed over their parts and leave next.
    pub(super) fn letting_go(self, departing: Vec<MemberId>) -> Self {
        Self { departing, ..self }
    }

    /// Creates the team with which a run begins: member `n` has rank `n`.
    pub(super) fn founded(view: &View, all: Communicator, job: &Job) -> Self {
        let ranks = (0..view.members.len()).collect();
        let pools = job.plan.pools().map_or_else(Vec::new, |pools| pools.sizes.clone());
        let stages = job.plan.pools().map_or(job.plan.stages(), Pools::stages);
        Self::new(view, all, Assignment { stages, pools, ranks, spares: Vec::new() })
    }

    /// Returns this member's rank in the plan; `None` for a spare.
    pub(super) fn rank(&self) -> Option<u32> {
        self.assignment.rank_of(self.all.rank().index())
    }

    /// Returns this member's position in its pipeline; `None` for a spare.
    pub(super) fn position(&self) -> Option<u32> {
        Some(self.assignment.position_of(self.all.rank().index())?.position)
    }

    /// Returns the position of a rank of the plan in its pipeline.
    pub(super) fn position_of_rank(&self, rank: u32) -> Option<u32> {
        let &member = self.assignment.ranks.get(rank as usize)?;
        Some(self.assignment.position_of(member)?.position)
    }

    /// Returns the place that a newcomer would take if it joined now; `None` without pipelines. If stages are
    /// pools, `speeds` are those of the members. A pure function, so all members predict the same.
    ///
    /// Errors: those of the settings from which pools are planned.
    pub(super) fn place_of_newcomer(&self, job: &Job, speeds: &PoolSpeeds) -> Result<Option<FuturePlace>> {
        let Some(wished) = job.pipelines.as_deref() else { return Ok(None) };
        let now = &self.assignment;
        let mut stood = self.positions();
        stood.push(None);
        let next = if wished.is_pooled() {
            let slots: Vec<Option<u32>> = self.slots.iter().map(|&slot| Some(slot)).chain([None]).collect();
            Assignment::pooled(&stood, now.stages, &pooling(job, &slots, speeds)?)
        } else {
            let most = if job.barrier { None } else { pipelines_of(now) };
            assigned(wished, &stood, (now.stages, most), reroutes(job, wished))
        };
        let position = |of: &Assignment, member| of.position_of(member).map(|at: PlanPosition| at.position);
        let keeps = |member| match position(now, member) {
            Some(held) => position(&next, member).is_none_or(|then| then == held),
            None => position(&next, member).is_none(),
        };
        let others_keep = next.stages == now.stages && (0..self.ids.len()).all(keeps);
        Ok(Some(match position(&next, self.ids.len()) {
            None => FuturePlace::Spare,
            Some(position) if others_keep => FuturePlace::Position(position),
            Some(_) => FuturePlace::Others,
        }))
    }

    /// Returns the spares that can form further pipelines, each with the position that it will get. Empty if
    /// there are too few, or if all members would wait for their parts anyway. A pure function.
    pub(super) fn growing(&self, job: &Job) -> Vec<FutureRank> {
        let now = &self.assignment;
        let Some(wished) = job.pipelines.as_deref().filter(|wished| !wished.is_pooled()) else {
            return Vec::new();
        };
        if job.barrier || pipelines_of(now).is_none() {
            return Vec::new();
        }
        grown((job, wished), &self.positions(), now.stages)
    }

    /// Returns the id of a member.
    pub(super) fn id(&self, member: usize) -> MemberId {
        self.ids[member]
    }

    /// Returns the endpoint of a member.
    pub(super) fn peer(&self, member: usize) -> PeerId {
        PeerId(self.slots[member])
    }

    /// Returns the ids of the members that hold the part at a position.
    pub(super) fn holders(&self, position: u32) -> Vec<MemberId> {
        let holds = |(rank, _): &(u32, MemberId)| self.position_of_rank(*rank) == Some(position);
        (0..).zip(self.working()).filter(holds).map(|(_, id)| id).collect()
    }

    /// Returns whether without these members no member holds some part of the model.
    pub(super) fn lacks_a_part_without(&self, leaving: &BTreeSet<MemberId>) -> bool {
        let is_leaving = |position| self.holders(position).iter().all(|id| leaving.contains(id));
        (0..self.assignment.stages).any(is_leaving)
    }

    /// Returns the place of each member; `None` for spares.
    fn positions(&self) -> Vec<Option<PlanPosition>> {
        (0..self.ids.len()).map(|member| self.assignment.position_of(member)).collect()
    }

    /// Returns the ids of the members that take steps, by rank.
    pub(super) fn working(&self) -> Vec<MemberId> {
        self.assignment.ranks.iter().map(|&member| self.ids[member]).collect()
    }

    /// Returns the endpoints of the members that take steps, by rank.
    pub(super) fn slots(&self) -> Vec<u32> {
        self.assignment.ranks.iter().map(|&member| self.slots[member]).collect()
    }

    /// Returns the ids of the members without a part.
    pub(super) fn idle(&self) -> impl Iterator<Item = MemberId> + '_ {
        self.assignment.spares.iter().map(|&member| self.ids[member])
    }

    /// Returns the members without a part, by their ranks in [`Team::all`].
    pub(super) fn spares(&self) -> impl Iterator<Item = Rank> + '_ {
        self.assignment.spares.iter().map(|&member| Rank(member as u32))
    }

    /// Returns the member at rank 0 of the plan, by its rank in [`Team::all`].
    pub(super) fn lead(&self) -> Rank {
        Rank(self.assignment.ranks.first().copied().unwrap_or(0) as u32)
    }

    /// Creates a communicator of the members that take steps, in the order of the plan's ranks. All members
    /// call it. They wait for members that are still transferring `bytes` bytes, and so the timeout is longer
    /// than `deadline`; two members that exchange data detect by themselves if the other one falls silent.
    pub(super) fn split(&self, deadline: Nanos, bytes: u64) -> Result<Communicator> {
        let rank = self.rank();
        let patience = deadline.saturating_add(SLOWEST.time(Bytes(bytes)));
        let all = self.all.clone().with_deadline(patience);
        let comm = all.split(u32::from(rank.is_none()), rank.unwrap_or(self.all.rank().0))?;
        Ok(comm.with_deadline(deadline))
    }
}

/// The place that a newcomer would take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FuturePlace {
    /// It would have no part.
    Spare,
    /// A position in a pipeline, or a stage if stages are pools. All other members keep their parts.
    Position(u32),
    /// A position for which other members would hold other parts than now.
    Others,
}

/// A member without a part, and the position that it gets in a further pipeline.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct FutureRank {
    /// Its index in the view.
    pub(super) member: usize,
    pub(super) position: u32,
}

/// Returns the number of whole pipelines, to which further ones may be added. `None` for pools.
fn pipelines_of(assignment: &Assignment) -> Option<usize> {
    assignment.pools.is_empty().then(|| assignment.replicas())
}

/// Returns the members without a part that can form further pipelines.
pub(super) fn grown(
    (job, wished): (&Job, &TrainConfig),
    stood: &[Option<PlanPosition>],
    before: u32,
) -> Vec<FutureRank> {
    let next = assigned(wished, stood, (before, None), reroutes(job, wished));
    if next.stages != before || !next.pools.is_empty() {
        return Vec::new();
    }
    let free = (0..stood.len()).filter(|&member| stood[member].is_none());
    let future = |member| Some(FutureRank { member, position: next.position_of(member)?.position });
    free.filter_map(future).collect()
}

pub(super) fn wrong(problem: &'static str) -> Error {
    Error::Message { message: "the members' state".to_owned(), problem }
}

/// Returns the settings from which pipelines are planned.
pub(super) fn wished(job: &Job) -> Result<&TrainConfig> {
    job.pipelines.as_deref().ok_or_else(|| wrong("has pipelines, but this run has none"))
}

/// Assigns members to pipelines of these settings, if stages are not pools by choice: to at most `most`
/// pipelines, if it is given. With `reroutes`, a pipeline that lacks a member continues as pools.
pub(super) fn assigned(
    wished: &TrainConfig,
    stood: &[Option<PlanPosition>],
    (before, most): (u32, Option<usize>),
    reroutes: bool,
) -> Assignment {
    let stages = u32::try_from(wished.stages).unwrap_or(u32::MAX);
    let assign = |stood: &[Option<PlanPosition>]| {
        if reroutes {
            Assignment::rerouted(stood, before, stages)
        } else {
            Assignment::new(stood, before, stages)
        }
    };
    match most {
        Some(most) => Assignment::limited(assign, stood, before, most),
        None => assign(stood),
    }
}

/// Returns whether pipelines of these settings can be re-routed: each rank holds one part, and microbatches are
/// not sliced.
fn can_be_rerouted(wished: &TrainConfig) -> bool {
    let method = wished.schedule;
    let parts = wished.chunks.unwrap_or(method.default_chunks() as usize);
    wished.schedule_file.is_none() && method.copies() == 1 && parts == 1 && !method.slices()
}

/// Returns whether a pipeline that lacks a member continues as pools. With local steps it cannot: the members
/// of another pipeline have other parameters.
pub(super) fn reroutes(job: &Job, wished: &TrainConfig) -> bool {
    job.averages_each_step() && can_be_rerouted(wished)
}

/// Returns the input from which pools are formed of the members at these endpoints, according to the speeds
/// that one member has.
pub(super) fn pooling(job: &Job, slots: &[Option<u32>], speeds: &PoolSpeeds) -> Result<Pooling> {
    let wished = wished(job)?;
    let settings = TrainConfig { workers: wished.stages, pools: None, pool_rates: None, ..wished.clone() };
    let cut = planned::from_settings(&settings, &job.model, wished.stages, None)?;
    Ok(speeds.pooling(slots, cut.microbatches[0], rank_speeds::work(&cut, &job.model)))
}
