//! Stages that are pools of the members of a view: the members' speeds, and the changes that follow from them
//! after a step. All members have the same measurements, so they reach the same result without further
//! messages.

use std::collections::BTreeMap;

use farflung_base::{Nanos, PeerId};
use farflung_parallel::membership::View;
use farflung_parallel::pipeline::Pools;
use farflung_parallel::plan::{Lineup, PoolAdvice, PoolBalance, Pooling, rates_of};
use farflung_parallel::{Plan, ScheduleSource};
use farflung_zoo::GptConfig;

use super::change::{Changed, Member, start};
use super::team::Team;
use crate::Result;
use crate::events::EventKind;
use crate::train::costs::Work;
use crate::train::job::Job;
use crate::train::steps::Last;
use crate::train::trainer::Trainer;

/// A member that moves to another stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(super) struct Moving {
    /// Its endpoint.
    pub(super) slot: u32,
    /// Index of the stage to which it moves.
    pub(super) to: u32,
}

/// The speeds of all members that a member has received, and the change that they have decided on.
#[derive(Debug, Clone, Default)]
pub(super) struct PoolSpeeds {
    balance: PoolBalance,
    /// Speed of each member that has sent the time of a microbatch, by its endpoint, in operations a second.
    pub(super) known: BTreeMap<u32, f64>,
    pub(super) moving: Option<Moving>,
}

/// Returns the number of operations of a microbatch in each part of a plan.
pub(super) fn work(plan: &Plan, model: &GptConfig) -> Vec<f64> {
    let (work, all) = (Work { model, batch: plan.batch as usize }, 0..model.context);
    plan.parts.iter().map(|part| work.slice_flops(&part.layers, &all)).collect()
}

impl PoolSpeeds {
    /// Starts anew with the speeds that a member has sent in a new view. Values that are not positive and
    /// finite are ignored.
    pub(super) fn begin_anew(&mut self, known: &BTreeMap<u32, f64>) {
        let known = known.iter().filter(|(_, speed)| speed.is_finite() && **speed > 0.0);
        let known = known.map(|(&slot, &speed)| (slot, speed)).collect();
        *self = Self { known, ..Self::default() };
    }

    /// Returns how the pools should change after the step just done. The result is the same on all members that
    /// take steps.
    fn advice(&mut self, job: &Job, team: &Team, trainer: &mut Trainer) -> PoolAdvice {
        let Some(pools) = job.plan.pools().filter(|_| job.is_pooled()) else { return PoolAdvice::Stay };
        let Some(measured) = trainer.measured() else { return PoolAdvice::Stay };
        let work = work(&job.plan, &job.model);
        for ((rank, slot), told) in (0..).zip(team.slots()).zip(&measured) {
            let done = pools.stage_of(rank).and_then(|stage| work.get(stage as usize));
            if let Some(done) = done.filter(|_| told.microbatch > Nanos::ZERO) {
                self.known.insert(slot, done / told.microbatch.as_secs_f64());
            }
        }
        self.balance.observe(pools, job.plan.microbatches[0], &measured, &work)
    }

    /// Returns the input from which the pools of a view are formed. `work` is the operations of a microbatch in
    /// each stage, `most` the maximum members of a pool. A member without a known speed counts as having the
    /// median of the known ones.
    pub(super) fn pooling(&self, view: &View, most: u32, work: Vec<f64>) -> Pooling {
        let speeds = view.members.iter().map(|member| self.known.get(&member.slot).copied());
        let speeds: Vec<Option<f64>> = speeds.collect();
        let mut told: Vec<f64> = speeds.iter().flatten().copied().collect();
        told.sort_by(f64::total_cmp);
        let middle = told.get(told.len() / 2).copied().unwrap_or(1.0);
        let speeds = speeds.into_iter().map(|speed| speed.unwrap_or(middle)).collect();
        let member = |slot| view.members.iter().position(|member| member.slot == slot);
        let moving = self.moving.and_then(|Moving { slot, to }| Some((member(slot)?, to)));
        Pooling { stages: work.len() as u32, most, work, speeds, moving }
    }
}

/// Returns the rate of each rank of some pools, relative to the others of its pool.
pub(super) fn rates(lineup: &Lineup, pooling: &Pooling) -> Vec<u32> {
    let pools = Pools::equal(lineup.pools.clone());
    let time = |(rank, &member): (u32, &usize)| {
        let stage = pools.stage_of(rank).unwrap_or(0) as usize;
        Nanos::from_secs_f64(pooling.work[stage] / pooling.speeds[member])
    };
    let times: Vec<Nanos> = (0..).zip(&lineup.ranks).map(time).collect();
    rates_of(&pools, &times)
}

/// Returns the entry for `events.jsonl` on a plan's pools; `None` if it has none.
pub(super) fn event(plan: &Plan, team: Option<&Team>, moved: Option<Moving>) -> Option<EventKind> {
    let (pools, slots) = (plan.pools()?, team?.slots());
    let mut at = 0_usize;
    let mut next = |size: &u32| {
        let range = at..at + *size as usize;
        at = range.end;
        range
    };
    let ranges: Vec<_> = pools.sizes.iter().map(&mut next).collect();
    let of = |all: &[u32]| ranges.iter().map(|range| all[range.clone()].to_vec()).collect();
    let moved = moved.map(|moving| moving.slot);
    Some(EventKind::Pools { members: of(&slots), rates: of(&pools.rates), moved })
}

/// Changes the routes of microbatches to new rates. No part moves. All members that take steps call it after
/// the same step.
///
/// Errors: a member that is lost meanwhile.
pub(super) fn reroute(job: &mut Job, trainer: &mut Trainer, rates: Vec<u32>) -> Result<()> {
    // A rank must not use the new routes before all ranks have committed the step.
    trainer.comm().barrier()?;
    let mut plan = job.plan.clone();
    if let ScheduleSource::Pools(pools) = &mut plan.pipeline.schedule {
        pools.rates = rates;
    }
    let next = job.with_plan_after(trainer.steps_done(), plan)?;
    let comm = trainer.comm().clone();
    trainer.carry_over(&next, comm)?;
    *job = next;
    Ok(())
}

impl Member<'_> {
    /// Returns how the pools should change after the step just done.
    pub(super) fn pool_advice(&mut self, job: &Job, trainer: &mut Trainer) -> PoolAdvice {
        match &self.team {
            Some(team) => self.pools.advice(job, team, trainer),
            None => PoolAdvice::Stay,
        }
    }

    /// Moves the member at `rank` to stage `to`, under a new view of the same members. It receives the part's
    /// state from the members that hold it. All members that take steps call it after the same step. `None` if
    /// they did not reach a new view.
    ///
    /// Errors: as [`Member::between_steps`].
    pub(super) fn change_stage(
        &mut self,
        (job, last): (&mut Job, &mut Last),
        trainer: &mut Trainer,
        (rank, to): (u32, u32),
    ) -> Result<Option<Changed>> {
        let begun = trainer.comm().now();
        let slots = self.team.as_ref().map_or_else(Vec::new, Team::slots);
        self.pools.moving = slots.get(rank as usize).map(|&slot| Moving { slot, to });
        let moved = self.pools.moving;
        let start = start(self.place, job, trainer)?;
        let working = self.team.as_ref().map_or_else(Vec::new, Team::working);
        let lead = self.team.as_ref().is_some_and(Team::leads);
        let Some(view) = self.place.once_more(&working, lead, start)? else {
            self.pools.moving = None;
            return Ok(None);
        };
        let changed = self.go_over_in_pipelines((job, last), trainer, view, (begun, None))?;
        let moved = moved.map(|Moving { slot, to }| (PeerId(slot), to));
        Ok(Some(Changed { moved, ..changed }))
    }
}
