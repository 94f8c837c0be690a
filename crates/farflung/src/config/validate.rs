//! Checks the ranges of settings that depend on neither the model nor the data.

use std::fmt;

use farflung_base::Nanos;
use farflung_comm::tcp;

use super::TrainConfig;
use crate::{Error, Result};

impl TrainConfig {
    /// Checks every range that does not depend on the model or the data.
    ///
    /// Errors: [`Error::Setting`] with the first field that is wrong.
    pub fn validate(&self) -> Result<()> {
        let positive = [
            ("steps", self.steps),
            ("batch", self.batch as u64),
            ("accumulate", self.accumulate as u64),
            ("workers", self.workers as u64),
            ("sync-every", self.sync_every),
            ("eval-batches", self.eval_batches),
            ("stages", self.stages as u64),
        ];
        for (field, value) in positive {
            check(field, &value, value >= 1, "at least 1")?;
        }
        let sizes = [
            ("layers", self.layers),
            ("heads", self.heads),
            ("dim", self.dim),
            ("context", self.context),
            ("vocab", self.vocab),
        ];
        let counts = [
            ("microbatches", self.microbatches),
            ("chunks", self.chunks),
            ("memory", self.memory),
            ("slice-grain", self.slice_grain),
        ];
        for (field, value) in sizes.into_iter().chain(counts) {
            if let Some(value) = value {
                check(field, &value, value >= 1, "at least 1")?;
            }
        }
        let fractions = [
            ("beta1", self.beta1),
            ("beta2", self.beta2),
            ("momentum", self.momentum),
            ("outer-momentum", self.outer_momentum),
            ("rho", self.rho),
        ];
        for (field, value) in fractions {
            check(field, &value, (0.0..1.0).contains(&value), "at least 0 and below 1")?;
        }
        let not_negative = [
            ("lr", self.lr),
            ("min-lr", self.min_lr),
            ("outer-lr", self.outer_lr),
            ("weight-decay", self.weight_decay),
            ("lr-decay", self.lr_decay),
            ("final-lr", self.final_lr),
            ("clip", self.clip),
            ("temperature", self.temperature),
        ];
        for (field, value) in not_negative {
            check(field, &value, value >= 0.0 && value.is_finite(), "0 or more")?;
        }
        for (field, value) in [("bucket-mb", self.bucket_mb), ("compute-rate", self.compute_rate)] {
            check(field, &value, value > 0.0 && value.is_finite(), "more than 0")?;
        }
        if let Some(microbatches) = self.microbatches.filter(|_| self.accumulate > 1) {
            let (good, expected) =
                (microbatches == self.accumulate, "the same as `accumulate`, which is another name for it");
            check("microbatches", &microbatches, good, expected)?;
        }
        self.validate_mesh()?;
        self.validate_zero()?;
        self.validate_pools()?;
        self.validate_sync()?;
        self.validate_optimizer()?;
        self.validate_experts()?;
        self.validate_paths()?;
        check("top-p", &self.top_p, self.top_p > 0.0 && self.top_p <= 1.0, "more than 0 and at most 1")?;
        check(
            "tune",
            &self.tune,
            self.tune <= MOST_TRIALS,
            "at most 1000, because each candidate takes that many steps",
        )?;
        check("min-lr", &self.min_lr, self.min_lr <= self.lr, "at most `lr`")?;
        check("deadline", &self.deadline, self.deadline > Nanos::ZERO, "more than 0")?;
        for (field, rate) in [("up", self.up), ("up-each", self.up_each)] {
            check(field, &rate, rate >= tcp::SLOWEST, "at least 8kbit per second")?;
        }
        Ok(())
    }
}

/// Greatest number of steps that `tune` tries each candidate for.
const MOST_TRIALS: u64 = 1000;

/// Returns [`Error::Setting`] unless `good`.
pub(super) fn check(field: &'static str, value: &dyn fmt::Display, good: bool, expected: &str) -> Result<()> {
    if good {
        return Ok(());
    }
    Err(Error::Setting { field, value: value.to_string(), expected: expected.to_owned() })
}
