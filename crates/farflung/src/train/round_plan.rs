//! The rest of a round of local steps in which a pipeline was lost: the other pipelines finish the round with
//! the microbatches that they have had so far, and only then divide the data anew. So the result of the round
//! does not depend on when in the round the loss is noticed.

use std::sync::Arc;

use farflung_parallel::LocalSteps;
use farflung_parallel::plan::Replica;

use super::job::{Job, PlanStart};
use crate::Result;

/// The division of the data with which a round began, for the replicas that finish it.
#[derive(Debug, Clone)]
pub struct RoundPlan {
    /// The round's last step.
    until: u64,
    start: PlanStart,
    local: LocalSteps,
    all_microbatches: u64,
    replicas: Vec<EarlierReplica>,
}

/// A replica of the current plan, under the plan with which the round began.
#[derive(Debug, Clone, Copy)]
struct EarlierReplica {
    number: u32,
    first_microbatch: u64,
}

impl RoundPlan {
    /// Returns whether a step belongs to the round. Steps are counted from 1.
    pub(super) const fn has(&self, step: u64) -> bool {
        step <= self.until
    }

    /// Returns whether a replica takes a local step in this step of the run.
    pub(super) fn takes(&self, replica: u32, step: u64) -> bool {
        self.local.takes(self.replicas[replica as usize].number, step)
    }

    /// Returns the number of the first microbatch of a replica in the step after `step` steps.
    pub(super) fn first_microbatch(&self, replica: u32, step: u64) -> u64 {
        let EarlierReplica { number, first_microbatch } = self.replicas[replica as usize];
        let taken = self.local.taken(number, step) - self.local.taken(number, self.start.step);
        self.start.microbatches + taken * self.all_microbatches + first_microbatch
    }

    /// Returns the number of microbatches of all replicas in the first `steps` steps, the lost replicas
    /// included.
    fn microbatches_after(&self, steps: u64) -> u64 {
        let before = self.local.all_microbatches(self.start.step.min(steps));
        self.start.microbatches + self.local.all_microbatches(steps) - before
    }
}

impl Job {
    /// Returns the job of the replicas `stays` alone, whose plan begins after the round that ends with step
    /// `until`: up to there they train on the microbatches that this job gives them.
    ///
    /// Errors: a replica that the plan does not have.
    pub(super) fn after_round(&self, stays: &[u32], until: u64) -> Result<Self> {
        let replicas: Vec<Replica> = stays.iter().map(|&replica| Replica::Stays(replica)).collect();
        let plan = self.plan.with_replicas(&replicas)?;
        let every = u64::from(plan.outermost().every.max(1));
        let since = until.saturating_sub(1) / every * every;
        let old: Vec<Option<u32>> = stays.iter().copied().map(Some).collect();
        let local = plan.local_steps().after(until, &self.local_steps(), &old, since);
        let before = match self.round_plan.as_deref().filter(|round| round.has(until)) {
            // Another pipeline was lost before, in the same round.
            Some(round) => RoundPlan {
                replicas: stays.iter().map(|&replica| round.replicas[replica as usize]).collect(),
                ..round.clone()
            },
            None => RoundPlan {
                until,
                start: self.plan_start,
                local: self.plan.local_steps(),
                all_microbatches: self.plan.all_microbatches(),
                replicas: stays
                    .iter()
                    .map(|&number| EarlierReplica {
                        number,
                        first_microbatch: self.plan.first_microbatch(number),
                    })
                    .collect(),
            },
        };
        let microbatches = self.microbatches_after(until);
        Ok(Self {
            plan_start: PlanStart { step: until, microbatches },
            since_members_changed: Some(local),
            round_plan: Some(Arc::new(before)),
            ..self.with_plan(plan)?
        })
    }

    /// Returns the microbatches of all replicas in the first `steps` steps, which the plan, or the one with
    /// which its first round began, must have reached.
    #[must_use]
    pub fn microbatches_after(&self, steps: u64) -> u64 {
        if let Some(round) = self.round_plan.as_deref().filter(|round| round.has(steps)) {
            return round.microbatches_after(steps);
        }
        let local = self.plan.local_steps();
        self.plan_start.microbatches + local.all_microbatches(steps)
            - local.all_microbatches(self.plan_start.step.min(steps))
    }
}
