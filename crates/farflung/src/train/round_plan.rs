//! The rest of a round of local steps in which a pipeline was lost: the other pipelines finish the round with
//! the microbatches that they have had so far, and only then divide the data anew. So the result of the round
//! does not depend on when in the round the loss is noticed.

use farflung_parallel::{LocalSteps, Plan};

use super::plan_start::PlanStart;

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
    /// Creates the division for the replicas `stays` of a plan that began at `start`, up to step `until`.
    pub(super) fn new(plan: &Plan, start: PlanStart, stays: &[u32], until: u64) -> Self {
        let replica = |&number: &u32| {
            let first_microbatch = plan.first_microbatch(number);
            EarlierReplica { number, first_microbatch }
        };
        let (local, all_microbatches) = (plan.local_steps(), plan.all_microbatches());
        Self { until, start, local, all_microbatches, replicas: stays.iter().map(replica).collect() }
    }

    /// Returns the division for some of these replicas, when another pipeline is lost in the same round.
    pub(super) fn of(&self, stays: &[u32]) -> Self {
        let replicas = stays.iter().map(|&replica| self.replicas[replica as usize]).collect();
        Self { replicas, ..self.clone() }
    }

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

    /// Returns the number of microbatches of all replicas in a step, the lost replicas included.
    pub(super) const fn all_microbatches(&self) -> u64 {
        self.all_microbatches
    }

    /// Returns the number of microbatches of all replicas in the first `steps` steps, the lost replicas
    /// included.
    pub(super) fn microbatches_after(&self, steps: u64) -> u64 {
        self.start.microbatches_after(&self.local, steps)
    }
}
