//! The microbatches of the data on which a replica trains, by step.

use std::ops::Range;
use std::sync::Arc;

use farflung_parallel::LocalSteps;

use crate::Result;
use crate::train::job::Job;
use crate::train::plan_start::PlanStart;
use crate::train::round_plan::RoundPlan;
use crate::train::step_tokens::StepTokens;

/// The microbatches of one replica.
#[derive(Debug, Clone)]
pub(in crate::train) struct ReplicaSamples {
    replica: u32,
    /// Where the plan's steps and microbatches begin.
    start: PlanStart,
    /// Number of this replica's first microbatch within a step, and number of microbatches of all replicas.
    first_microbatch: u64,
    all_microbatches: u64,
    /// Which replicas take which local steps.
    local: LocalSteps,
    /// The plan with which the current round began, if it differs.
    round: Option<Arc<RoundPlan>>,
    /// The number of tokens that count in a step of each replica, if not all count.
    counted: Option<Vec<u64>>,
    /// The same, if it changes from step to step.
    varying: Option<StepTokens>,
}

impl ReplicaSamples {
    /// Errors: those of the sampler.
    pub(in crate::train) fn new(job: &Job, replica: u32) -> Result<Self> {
        Ok(Self {
            replica,
            start: job.plan_start,
            first_microbatch: job.plan.first_microbatch(replica),
            all_microbatches: job.plan.all_microbatches(),
            local: job.local_steps(),
            round: job.round_plan.clone(),
            counted: job.counted()?,
            varying: StepTokens::varying(job)?,
        })
    }

    /// Sets where the plan's numbers of steps and microbatches begin.
    pub(super) const fn begin_at(&mut self, start: PlanStart) {
        self.start = start;
    }

    fn round_of(&self, step: u64) -> Option<&RoundPlan> {
        self.round.as_deref().filter(|round| round.has(step))
    }

    /// Returns whether the replica takes a local step in this step of the run. Steps are counted from 1.
    pub(in crate::train) fn takes(&self, step: u64) -> bool {
        match self.round_of(step) {
            Some(round) => round.takes(self.replica, step),
            None => self.local.takes(self.replica, step),
        }
    }

    /// Returns the number of the replica's first microbatch in the step after `step` steps.
    pub(in crate::train) fn first(&self, step: u64) -> u64 {
        if let Some(round) = self.round_of(step + 1) {
            return round.first_microbatch(self.replica, step);
        }
        self.base(self.replica, step) + self.first_microbatch
    }

    /// Returns the number of the first microbatch of all replicas in a replica's step after `step` steps.
    fn base(&self, replica: u32, step: u64) -> u64 {
        let taken = self.local.taken(replica, step) - self.local.taken(replica, self.start.step);
        self.start.microbatches + taken * self.all_microbatches
    }

    /// Returns the number of microbatches of all replicas in a step of the round with step `step`.
    pub(in crate::train) fn all_microbatches(&self, step: u64) -> u64 {
        self.round_of(step).map_or(self.all_microbatches, RoundPlan::all_microbatches)
    }

    /// Returns the number of local steps that the replica takes in the first `steps` steps of the plan.
    pub(super) fn taken(&self, steps: u64) -> u64 {
        self.local.taken(self.replica, steps)
    }

    /// Returns the replica's weight in a mean over the tokens of these steps, where 1 is an equal share.
    ///
    /// Errors: those of the sampler.
    pub(super) fn weight(&self, steps: Range<u64>) -> Result<f64> {
        if let Some(tokens) = &self.varying {
            return self.weight_by_steps(tokens, steps);
        }
        Ok(match &self.counted {
            Some(counted) => self.local.weight_of(self.replica, steps, counted),
            None => self.local.weight(self.replica, steps),
        })
    }

    /// Like [`ReplicaSamples::weight`], with the tokens of each step of each replica.
    fn weight_by_steps(&self, tokens: &StepTokens, steps: Range<u64>) -> Result<f64> {
        let (mut all, mut mine) = (0.0, 0.0);
        for replica in tokens.replicas() {
            for step in steps.clone().filter(|step| self.local.takes(replica, step + 1)) {
                let counted = tokens.of_step(replica, self.base(replica, step))?;
                all += counted;
                mine += if replica == self.replica { counted } else { 0.0 };
            }
        }
        let replicas = f64::from(tokens.replicas().end);
        Ok(if all > 0.0 { mine * replicas / all } else { 0.0 })
    }
}
