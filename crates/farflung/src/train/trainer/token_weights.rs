//! The factor of each token's loss, so that means are over the tokens that count.

use farflung_optim::token_weight;
use farflung_parallel::pipeline::Updates;
use farflung_zoo::ZooError;

use crate::Result;
use crate::train::bind::ReplicaSchedule;
use crate::train::job::Job;
use crate::train::step_tokens::{StepTokens, no_targets};

/// Computes the factors of a replica's tokens in each step.
#[derive(Debug)]
pub(super) struct TokenWeights {
    tokens: StepTokens,
    replica: u32,
    /// Number of ranks over which gradients are averaged.
    group: u32,
    updates: Updates,
    /// Whether gradients are averaged over all replicas in each step.
    each_step: bool,
    /// Microbatches of the replica in a step, and in an update.
    own: u64,
    per_update: u64,
}

impl TokenWeights {
    /// Errors: those of the samplers.
    pub(super) fn new(job: &Job, schedule: &ReplicaSchedule, replica: u32, group: u32) -> Result<Self> {
        Ok(Self {
            tokens: StepTokens::new(job)?,
            replica,
            group,
            updates: schedule.updates(),
            each_step: job.averages_each_step(),
            own: u64::from(schedule.microbatches()),
            per_update: u64::from(schedule.per_update()),
        })
    }

    /// Returns the number of the replica's first microbatch in the plan's first step.
    pub(super) fn first_of_plan(&self) -> u64 {
        self.tokens.first_microbatch(self.replica)
    }

    /// Returns the weights if they change from step to step.
    pub(super) fn if_varying(self, job: &Job) -> Option<Self> {
        StepTokens::vary(job).then_some(self)
    }

    /// Returns the number of sequences of a step of the ranks that vote on its loss.
    pub(super) fn sequences(&self) -> u64 {
        let microbatches = if self.each_step { self.tokens.microbatches() } else { self.own };
        microbatches * self.tokens.batch()
    }

    /// Returns the weight of each sequence, so that the mean over the ranks that average gradients is the mean
    /// over the sequences of an update.
    pub(super) fn of_sequence(&self) -> f32 {
        let microbatches = match (self.updates, self.each_step) {
            (Updates::Flush, true) => self.tokens.microbatches(),
            (Updates::Flush, false) => self.own,
            _ => self.per_update * self.tokens.replicas().len() as u64,
        };
        token_weight(self.group as usize, microbatches * self.tokens.batch())
    }

    /// Returns the factor of each token's loss by microbatch, so that the mean over the ranks that average
    /// gradients is the mean over the tokens of an update that count. `first` is the number of the replica's
    /// first microbatch in the step, counted over all replicas and steps.
    ///
    /// Errors: those of the samplers; a step of all replicas without a target.
    pub(super) fn of_step(&self, first: u64) -> Result<Vec<f32>> {
        let tokens = &self.tokens;
        let base = first - tokens.first_microbatch(self.replica);
        let weight = |counted: f64| {
            if counted > 0.0 { token_weight(self.group as usize, counted as u64) } else { 0.0 }
        };
        let of_step = match (self.updates, self.each_step) {
            (Updates::Flush, true) => {
                let of = |replica| tokens.of_step(replica, base);
                let all: f64 = tokens.of_each_reader().map(of).sum::<std::result::Result<_, _>>()?;
                if all == 0.0 {
                    return Err(no_targets("the text of a step"));
                }
                all
            }
            (Updates::Flush, false) => tokens.of(self.replica, base, 0, self.own)?,
            _ => {
                let of_update = |update: u64| {
                    let of = |replica| tokens.of(replica, base, update * self.per_update, self.per_update);
                    Ok(weight(tokens.of_each_reader().map(of).sum::<std::result::Result<_, ZooError>>()?))
                };
                let updates: Vec<f32> =
                    (0..self.own.div_ceil(self.per_update)).map(of_update).collect::<Result<_>>()?;
                return Ok((0..self.own).map(|m| updates[(m / self.per_update) as usize]).collect());
            }
        };
        Ok(vec![weight(of_step); self.own as usize])
    }
}
