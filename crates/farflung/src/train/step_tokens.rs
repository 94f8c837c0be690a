//! The number of tokens that count, by step, replica and microbatch. It is a pure function of the settings, so
//! that every rank computes it for all replicas. With documents that are kept apart, with
//! prefixes, and of examples, it changes from step to step.

use farflung_zoo::{Sampler, ZooError};

use super::job::Job;
use crate::Error;

/// Counts the tokens of all replicas.
#[derive(Debug, Clone)]
pub(super) struct StepTokens {
    /// Training sequences of each replica, or of all replicas if they are the same for all.
    samplers: Vec<Sampler>,
    /// Sequences of a microbatch.
    batch: u64,
    /// Number of neighbouring replicas that read the same sequences.
    readers: u32,
    replicas: Vec<Share>,
}

/// The microbatches of a replica in a step.
#[derive(Debug, Clone, Copy)]
struct Share {
    /// Number of the first one, counted over all replicas.
    first: u64,
    count: u64,
}

impl StepTokens {
    /// Errors: those of the samplers.
    pub(super) fn new(job: &Job) -> Result<Self, ZooError> {
        let plan = &job.plan;
        let samplers = if job.text_parts.shards.is_some() { plan.replicas() as usize } else { 1 };
        let share = |replica: u32| Share {
            first: plan.first_microbatch(replica),
            count: u64::from(plan.microbatches[replica as usize]),
        };
        Ok(Self {
            samplers: (0..samplers).map(|replica| job.sampler(replica)).collect::<Result<_, _>>()?,
            batch: u64::from(plan.batch),
            readers: plan.context.readers(),
            replicas: (0..plan.replicas()).map(share).collect(),
        })
    }

    /// Returns whether the counts change from step to step.
    pub(super) fn vary(job: &Job) -> bool {
        // Each step has all rows.
        let uneven = job.config.document_mask || job.config.objective.has_prefix() || job.examples.is_some();
        uneven && job.training.rows().is_none()
    }

    /// Returns the counts if they change from step to step.
    ///
    /// Errors: those of the samplers.
    pub(super) fn varying(job: &Job) -> Result<Option<Self>, ZooError> {
        Self::vary(job).then(|| Self::new(job)).transpose()
    }

    /// Returns the number of tokens that count in `microbatches` microbatches of a replica, from number `from`
    /// of its own on. `base` is the number of the step's first microbatch over all replicas and steps.
    pub(super) fn of(&self, replica: u32, base: u64, from: u64, microbatches: u64) -> Result<f64, ZooError> {
        let sampler = &self.samplers[replica as usize % self.samplers.len()];
        let first = (base + self.replicas[replica as usize].first + from) * self.batch;
        sampler.counted(first, microbatches * self.batch)
    }

    /// Returns the number of tokens that count in a step of a replica, with `base` as in [`StepTokens::of`].
    pub(super) fn of_step(&self, replica: u32, base: u64) -> Result<f64, ZooError> {
        self.of(replica, base, 0, self.replicas[replica as usize].count)
    }

    /// Returns the numbers of all replicas.
    pub(super) fn replicas(&self) -> std::ops::Range<u32> {
        0..self.replicas.len() as u32
    }

    /// Returns the numbers of the replicas that read different sequences: of those that divide some, the first.
    pub(super) fn of_each_reader(&self) -> impl Iterator<Item = u32> + use<> {
        self.replicas().step_by(self.readers as usize)
    }

    /// Returns the number of microbatches of a step, of all replicas.
    pub(super) fn microbatches(&self) -> u64 {
        self.of_each_reader().map(|replica| self.replicas[replica as usize].count).sum()
    }

    /// Returns the number of sequences of a microbatch.
    pub(super) const fn batch(&self) -> u64 {
        self.batch
    }

    /// Returns the number of a replica's first microbatch within a step.
    pub(super) fn first_microbatch(&self, replica: u32) -> u64 {
        self.replicas[replica as usize].first
    }
}

impl Job {
    /// Returns the number of tokens that count in a step of each replica; `None` if all tokens count, so that
    /// microbatches say it, or if the number changes from step to step.
    ///
    /// Errors: those of the sampler.
    pub(super) fn counted(&self) -> Result<Option<Vec<u64>>, ZooError> {
        if self.training.rows().is_none() {
            return Ok(None);
        }
        let tokens = StepTokens::new(self)?;
        tokens
            .replicas()
            .map(|replica| Ok(tokens.of_step(replica, 0)? as u64))
            .collect::<Result<_, _>>()
            .map(Some)
    }

    /// Returns a replica's weight in a mean over all tokens that count in a step that all replicas take: 1 is
    /// an equal share.
    ///
    /// Errors: as [`Job::counted`].
    pub(super) fn weight(&self, replica: u32) -> Result<f64, ZooError> {
        Ok(match self.counted()? {
            Some(counted) => self.plan.local_steps().weight_of(replica, 0..1, &counted),
            None => self.plan.weight(replica),
        })
    }
}

/// Returns the error of a text none of whose tokens is a target: each is the last one of its document.
#[must_use]
pub fn no_targets(what: &'static str) -> Error {
    let expected = "false for documents of one token each: the last token of a document predicts nothing";
    Error::Setting {
        field: "document_mask",
        value: format!("true, and {what} has no target"),
        expected: expected.to_owned(),
    }
}
