//! Publishes the status of a run from one of its members.

use std::sync::Arc;

use farflung_base::{Nanos, PeerId};
use farflung_parallel::pipeline::Pools;
use farflung_parallel::plan::PlanPosition;

use super::member_names::MemberNames;
use super::place::Place;
use super::status::{MemberStatus, Status};
use super::team::Team;
use super::waits::{StoppedStep, Waits};
use crate::PeerCounters;
use crate::train::job::Job;
use crate::train::steps::Steps;
use crate::train::trainer::Trainer;

/// Number of changes of members that a status contains.
const CHANGES: usize = 5;
/// Minimum time between two updates of the published status.
const EVERY: Nanos = Nanos::from_millis(500);

/// Data that a member keeps for the status of the run.
#[derive(Debug, Default)]
pub(super) struct StatusPublisher {
    changes: Vec<String>,
    changing: Nanos,
    last_published: Option<Nanos>,
    last: Option<Arc<Status>>,
    /// Names of the members.
    pub(super) names: MemberNames,
    /// Which member waits for which.
    pub(super) waits: Waits,
}

impl StatusPublisher {
    /// Records a change of members, and the time that it took.
    pub(super) fn changed(&mut self, text: String, took: Nanos) {
        self.changing = self.changing.saturating_add(took);
        self.waits.begin_anew();
        self.announce(text);
    }

    /// Records a message about members, and lets the next call of [`StatusPublisher::publish`] publish at once.
    pub(super) fn announce(&mut self, text: String) {
        self.changes.push(text);
        let excess = self.changes.len().saturating_sub(CHANGES);
        self.changes.drain(..excess);
        self.last_published = None;
    }

    /// Publishes the status, unless it was published less than `EVERY` ago.
    pub(super) fn publish(
        &mut self,
        (place, team): (&mut Place, Option<&Team>),
        trainer: &Trainer,
        steps: &Steps<'_, '_>,
    ) {
        let now = place.transport().now();
        if self.last_published.is_some_and(|at| now < at.saturating_add(EVERY)) {
            return;
        }
        self.last_published = Some(now);
        let status = self.status((place, team), trainer, steps);
        self.last = Some(Arc::new(status.clone()));
        place.arrivals.publish_status(status);
    }

    /// Returns what publishes, in the next step, who waits for members that do not answer.
    pub(super) fn stopped_step(&self, place: &Place) -> StoppedStep {
        let members = place.view().into_iter().flat_map(|view| &view.members);
        StoppedStep {
            arrivals: Arc::clone(&place.arrivals),
            before: self.last.clone(),
            members: members.map(|member| (member.id, member.slot)).collect(),
        }
    }

    /// Publishes that this member has no part of the model any more. It then says so when it is asked, and
    /// others are asked instead.
    pub(super) fn publish_as_spare(&mut self, place: &Place) {
        self.last_published = None;
        if let Some(mut status) = self.last.as_deref().cloned() {
            let still_here =
                |slot| place.view().is_some_and(|view| view.members.iter().any(|m| m.slot == slot));
            status.members.retain(|member| still_here(member.slot));
            place.arrivals.publish_status(Status { is_spare: true, ..status });
        }
    }

    fn status(
        &self,
        (place, team): (&mut Place, Option<&Team>),
        trainer: &Trainer,
        steps: &Steps<'_, '_>,
    ) -> Status {
        let waiting = place.newcomers().iter().map(|peer| peer.peer.0).collect();
        let row = steps.record.rows.last();
        let totals = steps.clock.totals(trainer.comm());
        let view = place.view();
        Status {
            model: crate::model_name(&steps.job.model),
            step: trainer.steps_done(),
            steps: steps.job.config.steps,
            epoch: view.map_or(0, |view| view.epoch),
            incarnation: view.map_or(0, |view| view.incarnation),
            members: self.members(place, team, &steps.job),
            left_out: 0,
            waiting,
            coming: place.coming(),
            train_loss: row.map(|row| row.train_loss),
            val_loss: steps.last_loss,
            tokens_per_s: row.map_or(0.0, |row| row.tokens_per_s),
            sent: totals.bytes_sent,
            time_s: totals.time_s,
            changing_s: self.changing.as_secs_f64(),
            changes: self.changes.clone(),
            is_spare: false,
        }
    }

    /// Returns the status of the members of the view in force.
    fn members(&self, place: &Place, team: Option<&Team>, job: &Job) -> Vec<MemberStatus> {
        let mut members = members((place, &self.names), team, job);
        let shares: Vec<(u32, f64)> = members.iter().map(|member| (member.slot, member.share)).collect();
        let waits = self.waits.of(&shares);
        for member in &mut members {
            member.waits_for = waits.get(&member.slot).copied();
        }
        members
    }
}

/// Returns the status of the members of the view in force, without those for which they wait.
fn members((place, names): (&Place, &MemberNames), team: Option<&Team>, job: &Job) -> Vec<MemberStatus> {
    let (transport, me) = (place.transport(), place.transport().me());
    let addresses = place.arrivals.addresses();
    let all: u32 = job.plan.microbatches.iter().sum();
    let members = place.view().into_iter().flat_map(|view| &view.members);
    // Where a member is in its pipeline; `None` for a spare.
    let position = |member| match team {
        Some(team) => team.assignment.position_of(member),
        None => Some(PlanPosition { replica: member as u32, position: 0 }),
    };
    let microbatches = |member| {
        position(member).and_then(|stands| job.plan.microbatches.get(stands.replica as usize).copied())
    };
    let pooled = |member| in_pool(job.plan.pools()?, team?.assignment.rank_of(member)?);
    let share = |member| f64::from(microbatches(member).unwrap_or(0)) / f64::from(all.max(1));
    members
        .enumerate()
        .map(|(number, member)| (member, share(number), pooled(number), position(number)))
        .map(|(member, share, pooled, stands)| MemberStatus {
            slot: member.slot,
            name: names.of(member.slot).map(ToString::to_string),
            address: addresses.get(&PeerId(member.slot)).cloned(),
            joined: member.joined,
            share: pooled.map_or(share, |(_, share)| share),
            replica: stands.filter(|_| job.plan.pools().is_none()).map(|stands| stands.replica),
            stage: match pooled {
                Some((stage, _)) => Some(stage),
                None => stands.filter(|_| team.is_some()).map(|stands| stands.position),
            },
            answers: PeerId(member.slot) == me,
            waits_for: None,
            counters: (PeerId(member.slot) != me)
                .then(|| PeerCounters::of(transport.as_ref(), PeerId(member.slot))),
        })
        .collect()
}

/// Returns the stage of a rank of pools, and its fraction of that stage's microbatches.
fn in_pool(pools: &Pools, rank: u32) -> Option<(u32, f64)> {
    let stage = pools.stage_of(rank)?;
    let first = *pools.firsts().get(stage as usize)? as usize;
    let rates = pools.rates.get(first..first + *pools.sizes.get(stage as usize)? as usize)?;
    let all: f64 = rates.iter().map(|&rate| f64::from(rate)).sum();
    Some((stage, f64::from(*pools.rates.get(rank as usize)?) / all))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_has_its_part_of_its_pool() {
        let pools = Pools { sizes: vec![1, 2], rates: vec![7, 3, 1] };
        assert_eq!(in_pool(&pools, 0), Some((0, 1.0)));
        assert_eq!(in_pool(&pools, 2), Some((1, 0.25)));
        assert_eq!(in_pool(&pools, 3), None);
    }
}
