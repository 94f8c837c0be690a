//! Stopping within a step: the step is dropped, unless another rank has committed it; the ranks that answer
//! form a new group and save the steps that all of them have done. It does not depend on the timing of signals,
//! which is in [`Stop`](crate::Stop).

use std::fmt;
use std::path::{Path, PathBuf};

use farflung_base::{Nanos, Rank};

use super::checkpoint::{self, Totals};
use super::division::Division;
use super::job::Job;
use super::record::{AfterStepFindings, Clock, RunRecorder};
use super::trainer::{Thoroughness, Trainer};
use crate::checkpoint::folder;
use crate::events::{EventKind, EventLog, causes};
use crate::peer_counters::PeerCountersLog;
use crate::shell_word::shell_word;
use crate::step_times::StepTimesLog;
use crate::{Error, PeerCounters, Result, RunDir};

/// Time for which ranks in different processes wait for each other's answer. A rank that is stopped or cut off
/// does not answer, and the others must be done within 2 s. A rank that is only far away answers in time;
/// otherwise each rank saves alone.
const ANSWER: Nanos = Nanos::from_millis(500);

/// State that a stopped rank leaves on disk.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StopSummary {
    /// Number of steps done that count on all ranks.
    pub step: u64,
    /// Number of later steps of this replica alone, since replicas last had the same parameters; they are
    /// dropped.
    pub dropped: u64,
    /// This rank's newest checkpoint: its step and its folder.
    pub saved: Option<(u64, PathBuf)>,
    /// Why these steps could not be saved.
    pub problem: Option<String>,
    /// Whether other members continue the run, with all of the model.
    pub goes_on: bool,
    /// The command line that continues the run.
    pub resume: Option<String>,
    /// Time from the signal to the end of the run on this rank.
    pub took: Option<Nanos>,
}

impl fmt::Display for StopSummary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { step, dropped, saved, problem, goes_on, resume, took } = self;
        if let Some(took) = took {
            write!(f, " after {took}")?;
        }
        if *dropped > 0 {
            write!(f, "; {dropped} steps since the last average of all replicas are dropped")?;
        }
        if let Some(problem) = problem {
            write!(f, "; step {step} could not be saved: {problem}")?;
        }
        match saved {
            Some((step, path)) => write!(f, "; step {step} is saved in {}", path.display())?,
            None if step + dropped == 0 => write!(f, " before the first step was done")?,
            None if *goes_on => {}
            None => write!(f, "; there is no checkpoint")?,
        }
        match resume {
            _ if *goes_on => write!(f, "; the other members continue from step {step}"),
            Some(resume) if saved.is_some() => write!(f, "; to continue: {resume}"),
            _ => Ok(()),
        }
    }
}

/// State of a run on disk, and the resources that the run has used.
#[derive(Debug, Default)]
pub(super) struct RunProgress {
    /// The newest checkpoint of this rank.
    pub(super) saved: Option<(u64, PathBuf)>,
    /// Why the step after which the run stops could not be saved.
    pub(super) problem: Option<String>,
    /// Whether training has begun.
    pub(super) begun: bool,
    /// Resources used up to the newest step.
    pub(super) totals: Totals,
    /// The start of this part of the run. `None` before it has begun.
    clock: Option<Clock>,
    /// Log of the times of the run's steps.
    pub(super) times: StepTimesLog,
    /// Log of the bytes exchanged with peers, on ranks that write no metrics.
    pub(super) peers: PeerCountersLog,
}

impl RunProgress {
    /// Makes the record of a run that begins, or continues, after `step` steps.
    pub(super) fn at(step: u64, run: Option<&RunDir>, totals: Totals, clock: Clock) -> Self {
        let path = run.map(|run| run.path().join(folder(step))).filter(|path| path.exists());
        let folder = run.map(RunDir::path);
        let (times, peers) = (StepTimesLog::new(folder), PeerCountersLog::new(folder));
        let saved = path.map(|path| (step, path));
        Self { saved, problem: None, begun: true, totals, clock: Some(clock), times, peers }
    }
}

/// Handles a failure that was caused by a stop, on this rank or on rank `stopper` in another process: saves the
/// steps done, and returns the error with a summary of the state on disk. Other failures are returned
/// unchanged.
pub(super) fn handle_stop(
    job: &Job,
    trainer: &mut Trainer,
    run: Option<&RunDir>,
    events: &mut EventLog,
    mut kept: RunProgress,
    stopper: Option<Rank>,
    error: Error,
) -> Error {
    // Ranks of one process share their stop request. If a rank cancels another's step without a stop request,
    // it has failed.
    let others = job.processes > 1;
    let by = error.cancelled_by().or(stopper.filter(|_| error.is_interruption())).filter(|_| others);
    let signal = job.stop.requested();
    let stops = match (&error, signal) {
        (Error::Stopped(signal), _) => Some(*signal),
        (error, Some(signal)) if error.is_interruption() => Some(signal),
        _ => None,
    };
    let Some(run) = run.filter(|_| stops.is_some() || by.is_some()) else {
        return stops.map_or(error, Error::Stopped);
    };
    let mut problem = kept.problem.take();
    let reached = trainer.steps_done();
    // A second signal asks for an immediate end.
    if kept.begun && !matches!(error, Error::Stopped(_)) && job.stop.cancelled().is_none() {
        match save(job, trainer, run, &mut kept) {
            Ok(Some(path)) => {
                let step = trainer.steps_done();
                events.write(step, EventKind::Saved { path: path.display().to_string() });
                kept.saved = Some((step, path));
            }
            Ok(None) => {}
            Err(error) => problem = Some(causes(&error)),
        }
    }
    let resume = Some(resume_line(job));
    let step = trainer.steps_done();
    // The retreat may also have committed a step that another rank had committed.
    let dropped = reached.saturating_sub(step);
    let took = job.stop.since();
    let left = StopSummary { step, dropped, saved: kept.saved, problem, goes_on: false, resume, took };
    let left = Box::new(left);
    match (stops, by) {
        (Some(signal), _) => Error::StoppedAt { signal, left },
        (None, Some(rank)) => Error::StoppedBy { rank, left },
        (None, None) => error,
    }
}

/// Saves the newest step that all answering ranks have done. `None` if it is saved already, or if no step was
/// done.
fn save(job: &Job, trainer: &mut Trainer, run: &RunDir, kept: &mut RunProgress) -> Result<Option<PathBuf>> {
    let deadline = job.config.deadline;
    let answer = if job.processes > 1 { ANSWER.min(deadline) } else { deadline };
    let missing = trainer.retreat(job, answer)?;
    record_resolved(job, trainer, run, kept)?;
    let step = trainer.steps_done();
    if step == 0 || kept.saved.as_ref().is_some_and(|(saved, _)| *saved == step) {
        return Ok(None);
    }
    // If a rank of the first replica is missing, or of those that divide its experts, its part cannot be saved.
    // Any other missing rank gets this step from the ranks that have it, when it returns.
    let gathered = job.plan.stages() > 1 || Division::of(&job.plan).divides();
    let gives = |rank: Rank| {
        let replica = job.plan.at(rank).data;
        job.plan.holders_of_model(replica).contains(&replica)
    };
    if gathered && let Some(rank) = missing.iter().find(|&&rank| gives(rank)) {
        return Err(Error::NoAnswer { rank: *rank });
    }
    // Nor can the path of a rank that alone trains it.
    let places = |ranks: &[Rank]| ranks.iter().map(|&rank| job.plan.place(rank)).collect::<Vec<_>>();
    let lost = places(&missing);
    let all: Vec<Rank> = (0..job.plan.ranks()).map(Rank).filter(|rank| !missing.contains(rank)).collect();
    let held = places(&all);
    if let Some((rank, _)) = missing.iter().zip(lost).find(|(_, place)| !held.contains(place)) {
        return Err(Error::NoAnswer { rank: *rank });
    }
    trainer.with_common(|trainer| trainer.verify(Thoroughness::All))?;
    checkpoint::save_without(trainer, job, run, kept.totals, &missing).map(Some)
}

/// Records a step that the retreat has committed: its row on rank 0, and the resources used up to it.
fn record_resolved(job: &Job, trainer: &mut Trainer, run: &RunDir, kept: &mut RunProgress) -> Result<()> {
    let (Some(done), Some(clock)) = (trainer.take_resolved(), kept.clock) else { return Ok(()) };
    let time_s = kept.totals.time_s;
    kept.totals = clock.totals(trainer.comm());
    if trainer.rank() == Rank(0) {
        let metrics = Some(run.metrics(done.step - 1)?);
        let mut record = RunRecorder { link: None, metrics, watch: None, rows: Vec::new(), told: 0, time_s };
        let found =
            AfterStepFindings { peers: PeerCounters::all(trainer.comm()), ..AfterStepFindings::default() };
        record.step(job, &done, found, &kept.totals);
    }
    Ok(())
}

/// Returns the command line that continues the run. Where members come and go, it is that of a host, which the
/// others join again.
pub(super) fn resume_line(job: &Job) -> String {
    let folder = job.out.as_deref().unwrap_or_else(|| Path::new("."));
    let word = |path: &Path| shell_word(&path.to_string_lossy());
    let (out, config) = (word(folder), word(&folder.join("config.toml")));
    if job.elastic {
        return format!("farflung host --config {config} --out {out} --resume auto");
    }
    let train = format!("train --config {config} --out {out} --resume auto");
    match job.processes {
        0 | 1 => format!("farflung {train}"),
        n => format!("farflung launch -n {n} -- {train}, or each rank as it was started with --resume auto"),
    }
}

/// Returns the ranks below `world` that are not among `members`.
pub(super) fn missing(world: usize, members: &[Rank]) -> Vec<Rank> {
    (0..world as u32).map(Rank).filter(|rank| !members.contains(rank)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_is_told_in_one_line() {
        let path = PathBuf::from("runs/a/step-00000007");
        let left = |step, saved: Option<u64>, problem: Option<&str>| StopSummary {
            step,
            dropped: 0,
            saved: saved.map(|step| (step, path.clone())),
            problem: problem.map(str::to_owned),
            goes_on: false,
            resume: Some("farflung train".to_owned()),
            took: None,
        };
        assert_eq!(
            left(7, Some(7), None).to_string(),
            "; step 7 is saved in runs/a/step-00000007; to continue: farflung train"
        );
        assert_eq!(
            left(9, Some(7), Some("rank 1 is gone")).to_string(),
            "; step 9 could not be saved: rank 1 is gone; step 7 is saved in runs/a/step-00000007; to \
             continue: farflung train"
        );
        assert_eq!(left(0, None, None).to_string(), " before the first step was done");
        let took = Some(Nanos::from_millis(1_200));
        let text = StopSummary { took, ..left(7, Some(7), None) }.to_string();
        assert!(text.starts_with(" after 1.2s; step 7 is saved"), "{text}");
        assert_eq!(
            StopSummary { dropped: 3, ..left(0, None, None) }.to_string(),
            "; 3 steps since the last average of all replicas are dropped; there is no checkpoint"
        );
    }
}
