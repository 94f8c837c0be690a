//! The lab: trains a small GPT by several methods on the same tokens and compares losses, bytes and time.
//!
//! A method is an [`Arm`]: a name and the flags that `farflung train` would take. [`Lab::outcome`] trains it
//! for each seed and keeps the result for the rest of the process, so an arm that several benches need runs
//! once. Bytes are counted by the transport, and times are those of its virtual clock. The lab depends neither
//! on the benches nor on the expected results.

pub(crate) mod arms;
mod clock;
pub(crate) mod kept;
mod outcome;
pub(crate) mod pretraining;
mod published;
mod setting;
mod sizes;
mod training;
mod unequal;

use std::sync::Arc;

use anyhow::Result;
use farflung::base::Link;

use crate::harness::{Options, Report};

pub(crate) use arms::Arm;
pub(crate) use clock::to_meeting;
pub(crate) use outcome::{Outcome, spread};
pub(crate) use published::Published;
pub(crate) use setting::{Setting, resolved};
pub(crate) use sizes::Sizes;
pub(crate) use training::{Point, Run};
pub(crate) use unequal::{ArmResult, Thresholds, Unequal, rate};

/// The setting and the seeds with which a bench trains its arms.
#[derive(Debug)]
pub(crate) struct Lab {
    setting: Setting,
    seeds: Vec<u64>,
}

/// Links for which step times are measured, with a latency of 1 us as in the common setting.
pub(crate) const LINKS: [&str; 3] = ["100mbit,1us", "1gbit,1us", "10gbit,1us"];

impl Lab {
    /// Returns a lab with the common setting and three seeds. For `--quick` it has one seed and few steps.
    pub(crate) fn new(report: &Report<'_>, options: &Options) -> Self {
        Self::with(Setting::of(options), report, options)
    }

    /// Returns a lab with another setting.
    pub(crate) fn with(setting: Setting, report: &Report<'_>, options: &Options) -> Self {
        let seeds = if options.quick { 1 } else { 3 };
        Self { setting, seeds: (0..seeds).map(|i| report.seed() + i).collect() }
    }

    /// Returns the setting that all arms share.
    pub(crate) const fn setting(&self) -> &Setting {
        &self.setting
    }

    /// Returns the sizes on which the closed form of an arm's payload depends.
    ///
    /// Errors: the flags cannot be combined.
    pub(crate) fn sizes(&self, arm: &Arm) -> Result<Sizes> {
        kept::sizes(&self.setting, arm)
    }

    /// Trains an arm for each seed, unless this process already has the result.
    ///
    /// Errors: the flags cannot be combined; a run fails.
    pub(crate) fn outcome(&self, report: &mut Report<'_>, arm: &Arm) -> Result<Outcome> {
        let mut runs = Vec::new();
        for &seed in &self.seeds {
            runs.push(kept::run(report, &self.setting, arm, seed)?);
        }
        Ok(Outcome { name: arm.name, runs })
    }

    /// Returns the seconds of a step of an arm on the virtual clock, over a link, after the arm's warm-up.
    ///
    /// Errors: those of [`Lab::outcome`].
    pub(crate) fn step_time(&self, report: &mut Report<'_>, arm: &Arm, link: Link) -> Result<f64> {
        clock::step_time(report, &self.setting, arm, link)
    }

    /// Adds the rows of an arm compared with the synchronous f32 arm, and its entry in the bench's record.
    ///
    /// `gap` is the condition on the difference of the losses, in percent.
    ///
    /// Errors: those of [`Lab::outcome`]; stdout is closed.
    pub(crate) fn compare(
        &self,
        report: &mut Report<'_>,
        arm: &Arm,
        reference: &Outcome,
        gap: crate::harness::Threshold,
    ) -> Result<Outcome> {
        let outcome = self.outcome(report, arm)?;
        outcome.rows(report, reference, gap)?;
        let mut step_times = Vec::new();
        for link in LINKS {
            let mean = outcome.seconds();
            step_times.push(clock::mean_step_time(report, (&self.setting, arm), link.parse()?, mean)?);
        }
        if let Some(form) = arm.sent {
            let form = form(&self.sizes(arm)?);
            let off = (outcome.payload() / form - 1.0).abs() * 100.0;
            let metric = format!("{}: payload, difference from the closed form", arm.name);
            report.row(&metric, off, "%", crate::harness::Threshold::AtMost(1.0))?;
        }
        report.add("arms", outcome.record(&self.setting, arm, reference, &step_times));
        Ok(outcome)
    }
}

/// A run that is shared with the cache of runs.
pub(crate) type Shared = Arc<Run>;
