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

/// Returns the seconds of a step over a link after the warm-up: the mean over the second period, from one
/// synchronisation of all replicas to the next.
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

/// Largest relative difference between the mean of a run and that of its second period, up to which a period is
/// measured for the run.
const ALIKE: f64 = 0.01;

/// Returns the seconds of a step over a link: the mean over the whole run, with its warm-up and its last
/// averages, as bytes and losses have them. `mean` is that of the runs over the setting's own link. If the
/// second period took as long there, a period is measured over the other links too; else the whole run.
///
/// Errors: the settings cannot be combined; a run fails.
pub(super) fn mean_step_time(
    report: &mut Report<'_>,
    (setting, arm): (&Setting, &Arm),
    link: Link,
    mean: f64,
) -> Result<f64> {
    let job = super::kept::arm_job(report, setting, arm, report.seed())?;
    if job.config.topology.is_none() && job.config.link == link {
        return Ok(mean);
    }
    let steady = step_time(report, setting, arm, job.config.link)?;
    if (steady / mean - 1.0).abs() <= ALIKE {
        return step_time(report, setting, arm, link);
    }
    let config = TrainConfig { link, ..TrainConfig::clone(&job.given) };
    whole_run(&again(&job, config, JobTransport::Simulated(link)))
}

/// Returns the seconds of a step of a job: the mean over all its steps.
///
/// Errors: a run fails.
fn whole_run(job: &Job) -> Result<f64> {
    let times = on_all(job, |rank| {
        let begun = rank.comm().now();
        for _ in 0..job.config.steps {
            rank.step(false)?;
        }
        Ok(rank.comm().now().saturating_sub(begun))
    })?;
    let slowest = times.into_iter().max().unwrap_or(Nanos::ZERO);
    Ok(slowest.as_secs_f64() / job.config.steps.max(1) as f64)
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lab::resolved;

    /// Without weights to start from: times do not depend on them.
    fn job(flags: &str) -> Job {
        let base = "--layers 1 --heads 2 --dim 32 --context 32 --batch 2 --workers 4 --steps 20 --warmup 0 \
                    --eval-batches 1 --transport simulated --link 100mbit,1us --codec none --threads 1";
        let config = resolved(flags, base).unwrap();
        let link = config.link;
        crate::workers::job(config, JobTransport::Simulated(link)).unwrap()
    }

    #[test]
    fn the_mean_of_a_run_has_its_warm_up_at_the_price_of_uncoded_steps() {
        let plain = whole_run(&job("")).unwrap();
        let coded = whole_run(&job("--optimizer onebit-adam --codec sign --codec-warmup 0")).unwrap();
        let mean = whole_run(&job("--optimizer onebit-adam --codec sign --codec-warmup 5")).unwrap();
        assert!(coded < 0.5 * plain, "{coded} {plain}");
        let expected = 0.25 * plain + 0.75 * coded;
        assert!((mean / expected - 1.0).abs() < 0.01, "{mean} {expected}");
        // Without one, a period is as long as the run's mean.
        let all = job("--sync diloco --sync-every 5");
        assert!((period(&all).unwrap() / whole_run(&all).unwrap() - 1.0).abs() < 0.01);
    }
}
