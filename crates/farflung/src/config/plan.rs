//! Settings beside a plan: a setting that the plan decides must not be given, and is set from the plan.

use farflung_parallel::pipeline::Method;
use farflung_parallel::{Plan, ScheduleSource};

use super::local_steps::LocalStepsKind;
use super::pools::Numbers;
use super::{TrainArgs, TrainConfig, dashed};
use crate::{Error, Result};

/// The settings that a plan decides, by field name.
pub const DECIDED: &[&str] = &[
    "batch",
    "accumulate",
    "workers",
    "recipe",
    "sync",
    "sync_every",
    "local_steps",
    "codec",
    "error_feedback",
    "bucket_mb",
    "overlap",
    "algorithm",
    "stages",
    "pools",
    "pool_rates",
    "schedule",
    "schedule_file",
    "microbatches",
    "chunks",
    "recompute",
    "offload",
    "memory",
    "slice_grain",
    "boundary",
    "boundary_backward",
    "version_sync",
    "precision",
];

impl TrainArgs {
    /// If there is a plan, checks that no setting is given that the plan decides.
    ///
    /// Errors: [`Error::Setting`] with the first setting that the plan decides.
    pub(super) fn beside_plan(&self) -> Result<()> {
        if self.plan.is_none() {
            return Ok(());
        }
        match self.given_values().into_iter().find(|(name, _)| DECIDED.contains(name)) {
            None => Ok(()),
            Some((field, value)) => Err(Error::Setting {
                field,
                value,
                expected: "no value with `plan`, which sets it".to_owned(),
            }),
        }
    }
}

impl TrainConfig {
    /// Returns whether there is a plan that decides this setting.
    pub(super) fn is_decided(&self, name: &str) -> bool {
        self.plan.is_some() && DECIDED.iter().any(|decided| dashed(decided) == dashed(name))
    }

    /// Sets the settings that a plan decides, as far as settings can express them. These settings are only
    /// shown to the user; training reads the plan.
    pub(crate) fn follow(&mut self, plan: &Plan) {
        let level = plan.outermost();
        self.workers = plan.ranks() as usize;
        self.stages = plan.stages() as usize;
        self.batch = plan.batch as usize;
        self.microbatches = plan.microbatches.iter().max().map(|&m| m as usize);
        self.accumulate = 1;
        self.precision = plan.precision;
        self.schedule = match &plan.pipeline.schedule {
            ScheduleSource::Named(method) => *method,
            ScheduleSource::Text(_) | ScheduleSource::Pools(_) => Method::OneFOneB,
        };
        self.pools = plan.pools().map(|pools| Numbers(pools.sizes.clone()));
        self.pool_rates = plan.pools().map(|pools| Numbers(pools.rates.clone()));
        self.schedule_file = None;
        self.version_sync = plan.pipeline.version_sync;
        // If boundaries differ, the first one is shown; the plan's names were checked.
        if let Some(codecs) = plan.boundaries.first() {
            self.boundary = codecs.forward.parse().unwrap_or(self.boundary);
            self.boundary_backward = codecs.backward.parse().unwrap_or(self.boundary_backward);
        }
        self.algorithm = level.algorithm;
        self.sync_every = level.every.into();
        self.local_steps = match &level.steps[..] {
            [] => LocalStepsKind::Equal,
            steps => LocalStepsKind::Each(steps.to_vec()),
        };
        self.bucket_mb = level.bucket_bytes as f64 / 1e6;
        self.overlap = level.overlap;
        // The plan's names were checked.
        self.codec = level.codec.parse().unwrap_or(self.codec);
        self.sync = super::value::Setting::parse(&level.method).unwrap_or(self.sync);
    }
}
