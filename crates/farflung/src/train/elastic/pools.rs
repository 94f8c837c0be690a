//! Stages that are pools of the members of a view: the members' speeds, and the changes that follow from them
//! after a step. All members have the same measurements, so they reach the same result without further
//! messages.

use farflung_base::PeerId;
use farflung_parallel::plan::{Advice, Measured, PoolAdvice};
use farflung_parallel::{Plan, ScheduleSource};

use super::change::{Member, slots, start};
use super::changed::Changed;
use super::nonsense::without_impossible;
use super::pool_speeds::Moving;
use super::rank_speeds::work_of_ranks;
use super::team::Team;
use crate::Result;
use crate::events::EventKind;
use crate::train::job::Job;
use crate::train::steps::LastDone;
use crate::train::trainer::Trainer;

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
    let mut plan = Plan::from(&job.plan);
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
    /// Returns how the pools should change after the step just done. While a newcomer fetches a part, no member
    /// moves to another one: the newcomer's pool may need it no more, and would be another one.
    pub(super) fn pool_advice(&mut self, job: &Job, trainer: &mut Trainer) -> PoolAdvice {
        let has_pools = job.is_pooled() && job.plan.pools().is_some();
        if self.team.is_none() || !has_pools {
            return PoolAdvice::Stay;
        }
        let Some(measured) = self.measured(job, trainer) else { return PoolAdvice::Stay };
        let advice = self.pools.advice(job, &measured);
        if matches!(advice, PoolAdvice::Moves { .. }) && trainer.is_followed() {
            PoolAdvice::Stay
        } else {
            advice
        }
    }

    /// Returns how the replicas' shares should change after the step just done.
    pub(super) fn share_advice(&mut self, job: &Job, trainer: &mut Trainer) -> Advice {
        let Some(measured) = self.measured(job, trainer) else { return Advice::Stay };
        self.balance.advice(job, &measured)
    }

    /// Returns the step times that all ranks have told since the last call, and notes the members' speeds for
    /// the plans of later views. Times that cannot be true count as not known.
    fn measured(&mut self, job: &Job, trainer: &mut Trainer) -> Option<Vec<Measured>> {
        let mut told = trainer.measured()?;
        let work = work_of_ranks(&job.plan, &job.model);
        let found = without_impossible(&work, &mut told);
        let slots = self.team.as_ref().map_or_else(|| slots(self.place.view()), Team::slots);
        if self.team.is_some() {
            self.pools.note(&slots, &work, &told);
        }
        self.publisher.waits.note(&slots, &told);
        for (rank, reason) in found {
            self.nonsense.note(slots.get(rank).copied().unwrap_or_default(), reason);
        }
        Some(told)
    }

    /// Moves the member at `rank` to stage `to`, under a new view of the same members. It receives the part's
    /// state from the members that hold it. All members that take steps call it after the same step. `None` if
    /// they did not reach a new view.
    ///
    /// Errors: as [`Member::between_steps`].
    pub(super) fn change_stage(
        &mut self,
        (job, last): (&mut Job, &mut LastDone),
        trainer: &mut Trainer,
        (rank, to): (u32, u32),
    ) -> Result<Option<Changed>> {
        let begun = trainer.comm().now();
        let slots = self.team.as_ref().map_or_else(Vec::new, Team::slots);
        self.pools.moving = slots.get(rank as usize).map(|&slot| Moving { slot, to });
        let moved = self.pools.moving;
        let start = start(job, trainer)?;
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
