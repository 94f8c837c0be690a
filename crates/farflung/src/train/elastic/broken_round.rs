//! Pipelines with local steps whose members change in the middle of a round. Each pipeline then has its own
//! parameters. Those that have lost no member finish the round and average without the others; the remaining
//! members of a pipeline that has lost one wait without a part until the round is over. If no pipeline is
//! whole, all members return to the last average.

use std::sync::Arc;

use farflung_parallel::plan::{Assignment, PlanPosition, Replica};
use farflung_parallel::{Axis, Plan};
use serde::{Deserialize, Serialize};

use super::lost_sequences::unaveraged;
use crate::Result;
use crate::events::LostSequences;
use crate::train::job::Job;
use crate::train::plan_start::PlanStart;
use crate::train::round_plan::RoundPlan;
use crate::train::trainer::Trainer;

/// How far a member of a pipeline with local steps is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct RoundPosition {
    /// Number of the view in which its plan was made.
    pub(super) made: u64,
    pub(super) replica: u32,
    /// Number of steps done.
    pub(super) step: u64,
    /// Number of steps after which all replicas last had the same parameters.
    pub(super) agreed: u64,
}

impl RoundPosition {
    /// Returns the position of a member with the plan of the view `made`; `None` if replicas agree at each
    /// step.
    pub(super) fn new(trainer: &Trainer, job: &Job, made: u64) -> Option<Self> {
        let (replica, step, agreed) = (trainer.replica(), trainer.steps_done(), trainer.agreed_step());
        (!job.averages_each_step()).then_some(Self { made, replica, step, agreed })
    }

    /// Returns whether two members take their steps in the same pipeline.
    pub(super) const fn is_with(&self, other: &Self) -> bool {
        self.made == other.made && self.replica == other.replica
    }

    const fn is_at_average(&self) -> bool {
        self.step == self.agreed
    }
}

/// The pipelines that finish a round of local steps.
pub(super) struct BrokenRound {
    pub(super) assignment: Assignment,
    /// Their numbers in the plan so far.
    stays: Vec<u32>,
    /// Numbers of the pipelines that were lost.
    lost: Vec<u32>,
    /// The round's last step.
    until: u64,
}

impl BrokenRound {
    /// Returns the pipelines that finish the round. `None` if replicas agree at each step, if all members have
    /// the same parameters now, or if no pipeline is whole. `stood` has the positions of the members in the
    /// plan `before`, and `rounds` says how far each of them is.
    pub(super) fn new(
        job: &Job,
        before: &Plan,
        stood: &[Option<PlanPosition>],
        rounds: &[Option<RoundPosition>],
    ) -> Option<Self> {
        let working = || stood.iter().zip(rounds).filter_map(|(stood, round)| stood.zip(*round));
        let agreed = working().map(|(_, round)| round.agreed).max()?;
        if working().all(|(_, round)| round.is_at_average() && round.agreed == agreed) {
            return None;
        }
        // A member at another step cannot take the pipeline's next step, so its pipeline counts as lost.
        let first = |replica: u32| {
            working().find(|(stood, _)| stood.replica == replica).map(|(_, round)| (round.step, round.agreed))
        };
        let usable = |(stood, round): (&Option<PlanPosition>, &Option<RoundPosition>)| {
            let (stood, round) = stood.zip(*round)?;
            (first(stood.replica) == Some((round.step, agreed)) && round.agreed == agreed).then_some(stood)
        };
        let usable: Vec<Option<PlanPosition>> = stood.iter().zip(rounds).map(usable).collect();
        let assignment = Assignment::unbroken(&usable, before.stages())?;
        let replicas = assignment.ranks.iter().filter_map(|&member| Some(usable[member]?.replica));
        let mut stays: Vec<u32> = replicas.collect();
        stays.dedup();
        let lost = (0..before.replicas()).filter(|replica| !stays.contains(replica)).collect();
        let until = before.outermost().round_of(agreed.saturating_add(1)).end.min(job.config.steps);
        Some(Self { assignment, stays, lost, until })
    }

    /// Returns the plan after the round, in which each of these pipelines has `each` microbatches in a step.
    ///
    /// Errors: those of the plan.
    pub(super) fn plan(&self, before: &Plan, each: u32) -> Result<Plan> {
        let replicas: Vec<Replica> = self.stays.iter().map(|&replica| Replica::Stays(replica)).collect();
        let mut plan = before.with_replicas(&replicas)?;
        plan.microbatches = vec![each; replicas.len()];
        Ok(plan)
    }

    /// Returns the job of the members that finish the round, whose plan so far is that of `job`. `plan` begins
    /// after the round: up to there they train on the microbatches that they have had so far.
    ///
    /// Errors: those of the plan.
    pub(super) fn job(&self, job: &Job, plan: Plan) -> Result<Job> {
        let (stays, until) = (&self.stays[..], self.until);
        let since = plan.outermost().round_of(until).start;
        let old: Vec<Option<u32>> = stays.iter().copied().map(Some).collect();
        let local = plan.local_steps().after(until, &job.local_steps(), &old, since);
        let round = match job.round_plan.as_deref().filter(|round| round.has(until)) {
            Some(round) => round.of(stays),
            None => RoundPlan::new(&job.plan, job.plan_start, stays, until),
        };
        Ok(Job {
            plan_start: PlanStart { step: until, microbatches: job.microbatches_after(until) },
            since_members_changed: Some(local),
            round_plan: Some(Arc::new(round)),
            // Failures and departures for tests are given by rank, and the ranks have changed.
            failure: None,
            departure: None,
            ..job.with_plan(plan)?
        })
    }

    /// Returns the sequences of the lost pipelines in this round, which are in no average. `job` has the plan
    /// so far, and `slots` the endpoints of its ranks.
    pub(super) fn lost_sequences(&self, job: &Job, slots: &[u32]) -> Vec<LostSequences> {
        let pipelines = job.plan.mesh.groups(Axis::Pipeline);
        let of = |&replica: &u32| {
            let ranks = pipelines.get(replica as usize)?.iter();
            let members = ranks.map(|rank| slots.get(rank.index()).copied()).collect::<Option<Vec<_>>>()?;
            unaveraged(job, (replica, members), self.until)
        };
        self.lost.iter().filter_map(of).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Stop, TrainConfig};

    #[expect(clippy::unnecessary_wraps, reason = "members are given as options")]
    const fn round(replica: u32, step: u64, agreed: u64) -> Option<RoundPosition> {
        Some(RoundPosition { made: 1, replica, step, agreed })
    }

    #[expect(clippy::unnecessary_wraps, reason = "members are given as options")]
    const fn at(replica: u32, position: u32) -> Option<PlanPosition> {
        Some(PlanPosition { replica, position })
    }

    /// Returns a job of two pipelines of two stages with rounds of four steps.
    fn job() -> Job {
        let config = TrainConfig {
            sync: crate::config::choice::SyncKind::of(&farflung_optim::sync::DILOCO),
            sync_every: 4,
            stages: 2,
            workers: 4,
            layers: Some(2),
            microbatches: Some(2),
            steps: 10,
            data: Some(concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml").into()),
            context: Some(8),
            batch: 1,
            ..TrainConfig::default()
        };
        Job { elastic: true, ..Job::new(config, 4, Stop::manual()).unwrap() }
    }

    #[test]
    fn whole_pipelines_finish_the_round_and_others_are_lost() {
        let job = job();
        let stood = [at(0, 0), at(1, 0), at(1, 1), None];
        let rounds = [round(0, 5, 4), round(1, 7, 4), round(1, 7, 4), None];
        let next = BrokenRound::new(&job, &job.plan, &stood, &rounds).unwrap();
        assert_eq!(
            (&next.assignment.ranks[..], &next.stays[..], &next.lost[..]),
            (&[1, 2][..], &[1][..], &[0][..])
        );
        let lost = next.lost_sequences(&job, &[6, 7, 8, 9]);
        assert_eq!((next.until, &lost[0].members[..], lost.len()), (8, &[6, 7][..], 1));
        // Two of the four microbatches of each step of the round.
        assert_eq!(lost[0].ranges().collect::<Vec<_>>(), [16..18, 20..22, 24..26, 28..30]);
        // Up to the end of the round it has the microbatches of the second of two pipelines, and then all.
        // Whatever its share was by speed, alone it takes all that a pipeline takes.
        let unequal = Plan { microbatches: vec![3, 1], ..Plan::from(&job.plan) };
        assert_eq!(next.plan(&unequal, 2).unwrap().microbatches, [2]);
        let plan = next.plan(&job.plan, 2).unwrap();
        let next = next.job(&job, plan).unwrap();
        assert_eq!((next.plan.replicas(), next.plan_start.step, next.plan_start.microbatches), (1, 8, 8 * 4));
        let samples: Vec<u64> = (4..10).map(|step| next.microbatches_after(step)).collect();
        assert_eq!(samples, [16, 20, 24, 28, 32, 34]);
        // The last round of a run may be shorter.
        let rounds = [round(0, 9, 8), round(1, 9, 8), round(1, 9, 8), None];
        assert_eq!(BrokenRound::new(&job, &job.plan, &stood, &rounds).unwrap().until, 10);
    }

    #[test]
    fn members_that_have_averaged_or_have_no_whole_pipeline_continue_from_the_average() {
        let job = job();
        let whole = [at(0, 0), at(0, 1), at(1, 0), at(1, 1)];
        let averaged = [round(0, 4, 4), round(0, 4, 4), round(1, 4, 4), round(1, 4, 4)];
        assert!(BrokenRound::new(&job, &job.plan, &whole, &averaged).is_none());
        let broken = [at(0, 0), None, None, at(1, 1)];
        let rounds = [round(0, 5, 4), None, None, round(1, 5, 4)];
        assert!(BrokenRound::new(&job, &job.plan, &broken, &rounds).is_none());
        // Members of one pipeline that are at different steps are no pipeline.
        let apart = [round(0, 5, 4), round(0, 6, 4), round(1, 5, 4), round(1, 5, 4)];
        assert_eq!(BrokenRound::new(&job, &job.plan, &whole, &apart).unwrap().stays, [1]);
        assert!(BrokenRound::new(&job, &job.plan, &whole, &[None; 4]).is_none());
    }
}
