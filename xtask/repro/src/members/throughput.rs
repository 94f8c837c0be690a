//! Measures how much faster a run trains once a newcomer takes part in it.

use anyhow::{Context, Result, ensure};
use farflung::base::Nanos;
use farflung::train::{Job, Prediction, Report as TrainReport};

use super::Notes;
use crate::harness::{Report, Threshold};

/// Least part of the predicted rise that a newcomer must bring. Each of the two predicted times is within 1% of
/// the time on the virtual clock (bench `predict-vs-run`), and members may be 1% slower than predicted while a
/// newcomer fetches (a row of `join-anywhere`).
const LEAST_PART: f64 = 0.97;
/// Most steps, or rounds of local steps, until a newcomer is ready, where the state is sent in less time than a
/// step takes: one in which it measures its links, one after which the members keep a log of their steps, and
/// one in which it fetches the state.
const UNITS_UNTIL_READY: u64 = 3;
/// Most steps, or rounds of local steps, from the one in which a newcomer is ready to one at the new rate. Also
/// the most from its admission.
const MOST_UNITS: u64 = 3;

/// Returns the tokens per second that the plan of a job predicts.
pub(super) fn predicted_rate(job: &Job) -> Result<f64> {
    Ok(job.tokens_per_step() as f64 / Prediction::of(job)?.step().as_secs_f64())
}

/// A run that a newcomer joins.
#[derive(Debug)]
pub(super) struct JoinedRun<'a> {
    pub(super) report: &'a TrainReport,
    /// Notes of the first member.
    pub(super) notes: &'a Notes,
    /// The time at which the newcomer appeared.
    pub(super) appeared: Nanos,
}

/// The expected effect of a newcomer, and how to find it in a run.
#[derive(Debug)]
pub(super) struct Expected<'a> {
    /// Tokens per second with the newcomer, divided by those without it, as the two plans predict.
    pub(super) rise: f64,
    /// A text in the note that says after which step the newcomer takes part.
    pub(super) joined: &'a str,
    /// Steps at the beginning of the run that are not counted: the first one, and those before a loss.
    pub(super) skipped: u64,
    /// Number of local steps in a round, or 1.
    pub(super) every: u64,
}

/// Throughput after newcomers, in several runs.
#[derive(Debug)]
pub(super) struct RiseTally {
    /// Runs in which no step or round within [`MOST_UNITS`] has the new rate.
    late: u32,
    /// Most steps from the one in which a newcomer appeared to the end of the first step or round at the new
    /// rate.
    slowest: u64,
    /// Most steps allowed for that.
    allowed: u64,
    /// Least and largest rise of tokens per second, from before the newcomer to the steps after [`MOST_UNITS`].
    least: f64,
    largest: f64,
}

/// Returns the tokens per second between two steps of a run.
fn rate(report: &TrainReport, from: u64, to: u64) -> Option<f64> {
    let row = |step: u64| report.rows.iter().find(|row| row.step == step);
    let (from, to) = (row(from)?, row(to)?);
    Some((to.tokens - from.tokens) as f64 / (to.time_s - from.time_s))
}

impl RiseTally {
    /// Creates a tally of runs with rounds of `every` steps.
    pub(super) const fn new(every: u64) -> Self {
        let allowed = (UNITS_UNTIL_READY + MOST_UNITS) * every;
        Self { late: 0, slowest: 0, allowed, least: f64::INFINITY, largest: 0.0 }
    }

    /// Adds a run.
    ///
    /// Errors: the run is too short to have steps before and after the newcomer.
    pub(super) fn add(&mut self, run: &JoinedRun<'_>, expected: &Expected<'_>) -> Result<()> {
        let &JoinedRun { report, notes, appeared } = run;
        let &Expected { rise, joined, skipped, every } = expected;
        let Some(came) = notes.step(joined) else {
            (self.late, self.least) = (self.late + 1, 0.0);
            return Ok(());
        };
        let last = report.rows.last().map_or(0, |row| row.step);
        let from = came + MOST_UNITS * every;
        ensure!(
            skipped + every <= came && from + every <= last,
            "a newcomer after step {came} of {last}, of which the first {skipped} do not count"
        );
        let before = rate(report, skipped, came).context("no metrics before the newcomer")?;
        let after = rate(report, from, last).context("no metrics after the newcomer")?;
        self.least = self.least.min(after / before);
        self.largest = self.largest.max(after / before);
        let has_risen = |end: &u64| {
            rate(report, end - every, *end).is_some_and(|rate| rate >= LEAST_PART * rise * before)
        };
        let risen = (1..=MOST_UNITS).map(|unit| came + unit * every).find(has_risen);
        let appeared = report.rows.iter().find(|row| row.time_s >= appeared.as_secs_f64());
        match (risen, appeared) {
            (Some(risen), Some(appeared)) => {
                self.slowest = self.slowest.max(risen.saturating_sub(appeared.step));
            }
            _ => self.late += 1,
        }
        Ok(())
    }

    /// Writes the rows of runs that are named `name`.
    pub(super) fn rows(&self, report: &mut Report<'_>, name: &str, rise: f64) -> Result<()> {
        let metric = format!("{name}: predicted rise of tokens per second through a newcomer");
        report.row(&metric, rise, "1", Threshold::None)?;
        let metric = format!("{name}: largest rise of tokens per second through a newcomer");
        report.row(&metric, self.largest, "1", Threshold::None)?;
        let metric = format!("{name}: throughput after a newcomer, least part of its share");
        report.row(&metric, self.least / rise, "1", Threshold::AtLeast(LEAST_PART))?;
        let metric = format!("{name}: most steps from a newcomer's appearance to one at the new rate");
        report.row(&metric, self.slowest as f64, "1", Threshold::AtMost(self.allowed as f64))?;
        let metric = format!("{name}: newcomers whose throughput has not risen within three steps");
        report.row(&metric, f64::from(self.late), "1", Threshold::AtMost(0.0))
    }
}
