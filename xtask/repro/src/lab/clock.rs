//! Measures step times of an arm on the virtual clock, over any links.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use anyhow::Result;
use farflung::TrainConfig;
use farflung::base::{Link, Nanos};
use farflung::train::{Job, Synced, Trainer};

use super::{Arm, Setting};
use crate::harness::Report;
use crate::workers::{JobTransport, again, on_all};

/// Measured times by command and link.
static TIMES: Mutex<BTreeMap<String, f64>> = Mutex::new(BTreeMap::new());

/// Returns the seconds of a step over a link: the mean over the second period, from one synchronisation of all
/// replicas to the next.
///
/// The seed is that of the bench. It matters only if a payload's size depends on the values.
///
/// Errors: the settings cannot be combined; a run fails.
pub(super) fn step_time(report: &mut Report<'_>, setting: &Setting, arm: &Arm, link: Link) -> Result<f64> {
    let key = format!("{} / {} {link}", setting.pretraining(), setting.command(arm));
    if let Some(&time) = TIMES.lock().unwrap_or_else(PoisonError::into_inner).get(&key) {
        return Ok(time);
    }
    let job = super::kept::arm_job(report, setting, arm, report.seed())?;
    // An arm that sets no codec warm-up uses its codec from the first step, because the times with the codec
    // are measured.
    let codec_warmup = job.config.codec_warmup.or(Some(0));
    let config = TrainConfig { link, codec_warmup, ..TrainConfig::clone(&job.given) };
    let time = period(&again(&job, config, JobTransport::Simulated(link)))?;
    TIMES.lock().unwrap_or_else(PoisonError::into_inner).insert(key, time);
    Ok(time)
}

/// Returns the seconds of a step of a job: the mean from one synchronisation of all replicas to the next.
///
/// Errors: a run fails.
pub(super) fn period(job: &Job) -> Result<f64> {
    let times = on_all(job, |rank| {
        to_meeting(rank)?;
        let before = rank.steps_done();
        Ok((to_meeting(rank)?, rank.steps_done() - before))
    })?;
    let slowest = times.iter().map(|(time, _)| *time).max().unwrap_or(Nanos::ZERO);
    let steps = times.first().map_or(1, |(_, steps)| *steps);
    Ok(slowest.as_secs_f64() / steps as f64)
}

/// Takes steps until all replicas have synchronised, and returns how long this took on this rank.
///
/// Errors: a step fails.
pub(crate) fn to_meeting(rank: &mut Trainer) -> Result<Nanos> {
    let begun = rank.comm().now();
    while rank.step(false)?.synced == Synced::No {}
    Ok(rank.comm().now().saturating_sub(begun))
}
