//! Stages that are pools of the members of a view: what is known of the members' speeds, and what follows from
//! it after a step. All members know the same, and decide the same without another word.

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
use crate::events::What;
use crate::train::costs::Work;
use crate::train::job::Job;
use crate::train::steps::Last;
use crate::train::trainer::Trainer;

/// A member that changes its stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(super) struct Moving {
    /// Its endpoint.
    pub(super) slot: u32,
    /// The stage that it goes to.
    pub(super) to: u32,
}

/// What a member knows of the speeds of all, and what they have decided on.
#[derive(Debug, Clone, Default)]
pub(super) struct PoolSpeeds {
    balance: PoolBalance,
    /// Operations a second of each member that has told what a microbatch takes it, by its endpoint.
    pub(super) known: BTreeMap<u32, f64>,
    pub(super) moving: Option<Moving>,
}

/// Operations of a microbatch in each part of a plan.
pub(super) fn work(plan: &Plan, model: &GptConfig) -> Vec<f64> {
    let (work, all) = (Work { model, batch: plan.batch as usize }, 0..model.context);
    plan.parts.iter().map(|part| work.slice_flops(&part.layers, &all)).collect()
}

impl PoolSpeeds {
    /// Takes over what a member of a view has told: what is no speed is as good as not told.
    pub(super) fn begin_anew(&mut self, known: &BTreeMap<u32, f64>) {
        let known = known.iter().filter(|(_, speed)| speed.is_finite() && **speed > 0.0);
        let known = known.map(|(&slot, &speed)| (slot, speed)).collect();
        *self = Self { known, ..Self::default() };
    }

    /// What follows from the step that was done. The same on all members that take steps.
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

    /// What the pools of a view are made for, whose model is cut into parts of this much work. A member whose
    /// speed is not known counts as the middle one of the others.
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

/// How fast each rank of some pools is beside the others of its pool.
pub(super) fn rates(lineup: &Lineup, pooling: &Pooling) -> Vec<u32> {
    let pools = Pools::equal(lineup.pools.clone());
    let time = |(rank, &member): (u32, &usize)| {
        let stage = pools.stage_of(rank).unwrap_or(0) as usize;
        Nanos::from_secs_f64(pooling.work[stage] / pooling.speeds[member])
    };
    let times: Vec<Nanos> = (0..).zip(&lineup.ranks).map(time).collect();
    rates_of(&pools, &times)
}

/// What `events.jsonl` says of a plan's pools; `None` where it has none.
pub(super) fn event(plan: &Plan, team: Option<&Team>, moved: Option<Moving>) -> Option<What> {
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
    Some(What::Pools { members: of(&slots), rates: of(&pools.rates), moved })
}

/// Microbatches go other ways from now on; no part moves. All members that take steps call it after the
/// same step.
///
/// Errors: a member that is lost meanwhile.
pub(super) fn reroute(job: &mut Job, trainer: &mut Trainer, rates: Vec<u32>) -> Result<()> {
    // Nobody takes another way before all have committed the step.
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
    /// What follows for the pools from the step that was done.
    pub(super) fn pool_advice(&mut self, job: &Job, trainer: &mut Trainer) -> PoolAdvice {
        match &self.team {
            Some(team) => self.pools.advice(job, team, trainer),
            None => PoolAdvice::Stay,
        }
    }

    /// A member changes its stage, under a new view of the same members: it takes the part's state from those
    /// that hold it. All members that take steps call it after the same step. `None` where they did not come to
    /// a view.
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
