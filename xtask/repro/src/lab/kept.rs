//! Caches of this process: each run, and the weights that arms start from, are trained once; jobs with the same
//! data share its text.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::{Context, Result};
use farflung::TrainConfig;
use farflung::train::Job;
use tempfile::TempDir;

use super::arms::Arm;
use super::setting::Setting;
use super::sizes::Sizes;
use super::training::Run;
use super::{pretraining, training};
use crate::harness::Report;
use crate::workers::{JobTransport, again};

/// Finished runs, by their command.
static RUNS: Mutex<BTreeMap<String, Arc<Run>>> = Mutex::new(BTreeMap::new());
/// Jobs, by their model, the weights that they start from, and their data.
static JOBS: Mutex<BTreeMap<String, Job>> = Mutex::new(BTreeMap::new());
/// Folders of weights, by the command that trains them. Statics are never dropped, so [`clean`] removes the
/// folders.
static WEIGHTS: Mutex<BTreeMap<String, TempDir>> = Mutex::new(BTreeMap::new());

fn lock<T>(kept: &'static Mutex<T>) -> MutexGuard<'static, T> {
    kept.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Removes all folders of weights from disk.
pub(crate) fn clean() {
    lock(&WEIGHTS).clear();
}

/// Returns the job of some settings. It shares the data of an earlier job of this process if possible.
///
/// Errors: the settings cannot be combined.
fn job(config: &TrainConfig) -> Result<Job> {
    let over = JobTransport::Simulated(config.link);
    let TrainConfig { model, layers, heads, dim, context, vocab, init_from, data, shards, .. } = config;
    // The key has the shards, because the default text is read file by file only if they need its files.
    let shape = format!("{model} {layers:?} {heads:?} {dim:?} {context:?} {vocab:?}");
    let key = format!("{shape} {init_from:?} {data:?} {shards}");
    let mut jobs = lock(&JOBS);
    if let Some(job) = jobs.get(&key) {
        return Ok(again(job, config.clone(), over));
    }
    let job = crate::workers::job(config.clone(), over)?;
    jobs.insert(key, job.clone());
    Ok(job)
}

/// Returns the sizes on which the closed form of an arm's payload depends.
pub(super) fn sizes(setting: &Setting, arm: &Arm) -> Result<Sizes> {
    let config = setting.config(arm, 0)?;
    let model = job(&setting.pretraining_config(0)?)?.model;
    let every = config.period() as f64;
    let (params, ranks) = (model.parameters() as f64, config.workers as f64);
    let shape = |shape: Vec<usize>| shape.into_iter().map(|n| n as f64).collect();
    let tensors = model.tensors().into_iter().map(|tensor| shape(tensor.shape)).collect();
    Ok(Sizes { params, ranks, every, steps: config.steps as f64, tensors })
}

/// Returns the job of an arm, which starts from the setting's weights.
///
/// Errors: those of [`run`].
pub(super) fn arm_job(report: &mut Report<'_>, setting: &Setting, arm: &Arm, seed: u64) -> Result<Job> {
    let config = setting.config(arm, seed)?;
    job(&TrainConfig { init_from: Some(weights(report, setting, seed)?), ..config })
}

/// Returns the folder with the weights that arms of a seed start from. Trains them if this process does not
/// have them yet.
fn weights(report: &mut Report<'_>, setting: &Setting, seed: u64) -> Result<PathBuf> {
    let key = format!("{} --seed {seed}", setting.pretraining());
    if let Some(folder) = lock(&WEIGHTS).get(&key) {
        return Ok(folder.path().to_owned());
    }
    let folder = tempfile::tempdir().context("failed to make a temporary folder")?;
    let job = job(&setting.pretraining_config(seed)?)?;
    let loss = pretraining::train(&job, folder.path())?;
    report.progress(&format!("pretraining, seed {seed}: loss {loss:.4} after {} steps", job.config.steps))?;
    let path = folder.path().to_owned();
    lock(&WEIGHTS).insert(key, folder);
    Ok(path)
}

/// Returns the run of an arm. Trains it if this process does not have it yet.
///
/// Errors: the settings cannot be combined; a run fails; stderr is closed.
pub(super) fn run(report: &mut Report<'_>, setting: &Setting, arm: &Arm, seed: u64) -> Result<Arc<Run>> {
    let key = format!("{} / {} --seed {seed}", setting.pretraining(), setting.command(arm));
    if let Some(run) = lock(&RUNS).get(&key) {
        return Ok(Arc::clone(run));
    }
    let job = arm_job(report, setting, arm, seed)?;
    let begun = now();
    let run = Arc::new(training::run(&job)?);
    let (end, took) = (run.last(), (now() - begun).as_secs_f64());
    let name = arm.name;
    report.progress(&format!(
        "{name}, seed {seed}: loss {:.4} after {} steps, {took:.1} s",
        end.loss, end.step
    ))?;
    lock(&RUNS).insert(key, Arc::clone(&run));
    Ok(run)
}

#[expect(clippy::disallowed_methods, reason = "the user is told how long a run took")]
fn now() -> std::time::Instant {
    std::time::Instant::now()
}
