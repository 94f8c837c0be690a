//! A run that is stopped within a step: the step is dropped, the ranks that answer meet once more, and save
//! what they have all done. It knows no signal's timing; [`Stop`](crate::Stop) does.

use std::fmt;
use std::path::{Path, PathBuf};

use farflung_base::{Nanos, Rank};

use super::checkpoint::{self, Totals};
use super::job::Job;
use super::trainer::{Thoroughness, Trainer};
use crate::events::{EventLog, What, causes};
use crate::peer_counters::PeerCountersLog;
use crate::run_dir::folder;
use crate::step_times::StepTimesLog;
use crate::{Error, Result, RunDir};

/// How long ranks on real links wait for each other's answer. One that is stopped or cut off has none, and the
/// others must be done in 2 s; one that is merely far answers within it, or each saves for itself.
const ANSWER: Nanos = Nanos::from_millis(500);

/// What a rank leaves when it is stopped.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Leftover {
    /// Steps done, which count on all ranks.
    pub step: u64,
    /// Steps of this replica alone that are dropped with them: those since replicas were last the same.
    pub dropped: u64,
    /// This rank's newest checkpoint: its step and folder.
    pub saved: Option<(u64, PathBuf)>,
    /// Why these steps are not saved.
    pub problem: Option<String>,
    /// The command line that goes on.
    pub resume: Option<String>,
}

impl fmt::Display for Leftover {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { step, dropped, saved, problem, resume } = self;
        if *dropped > 0 {
            write!(f, "; {dropped} steps since the last average of all replicas are dropped")?;
        }
        if let Some(problem) = problem {
            write!(f, "; step {step} could not be saved: {problem}")?;
        }
        match saved {
            Some((step, path)) => write!(f, "; step {step} is saved in {}", path.display())?,
            None if step + dropped == 0 => write!(f, " before the first step was done")?,
            None => write!(f, "; there is no checkpoint")?,
        }
        match resume {
            Some(resume) if saved.is_some() => write!(f, "; to go on: {resume}"),
            _ => Ok(()),
        }
    }
}

/// What a run has on disk.
#[derive(Debug, Default)]
pub(super) struct Kept {
    /// The newest checkpoint of this rank.
    pub(super) saved: Option<(u64, PathBuf)>,
    /// Whether steps have begun.
    pub(super) begun: bool,
    /// What the run had used at its newest step.
    pub(super) totals: Totals,
    /// Where the time of its steps went.
    pub(super) times: StepTimesLog,
    /// What its peers and this rank have exchanged, where it tells no rows.
    pub(super) peers: PeerCountersLog,
}

impl Kept {
    /// Of a run that begins, or goes on, after so many steps.
    pub(super) fn at(step: u64, run: Option<&RunDir>, totals: Totals) -> Self {
        let path = run.map(|run| run.path().join(folder(step))).filter(|path| path.exists());
        let folder = run.map(RunDir::path);
        let (times, peers) = (StepTimesLog::new(folder), PeerCountersLog::new(folder));
        Self { saved: path.map(|path| (step, path)), begun: true, totals, times, peers }
    }
}

/// What becomes of a failure that a stop has caused, here or on the rank `stopper` in another process: what was
/// done is saved first. Any other failure stays.
pub(super) fn part(
    job: &Job,
    trainer: &mut Trainer,
    run: Option<&RunDir>,
    events: &mut EventLog,
    mut kept: Kept,
    stopper: Option<Rank>,
    error: Error,
) -> Error {
    // Ranks of one process share their stop: who ends another's step there without it has failed.
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
    let mut problem = None;
    let reached = trainer.steps_done();
    // A second signal asks for the end at once.
    if kept.begun && !matches!(error, Error::Stopped(_)) && job.stop.cancelled().is_none() {
        match save(job, trainer, run, &kept) {
            Ok(Some(path)) => {
                let step = trainer.steps_done();
                events.write(step, What::Saved { path: path.display().to_string() });
                kept.saved = Some((step, path));
            }
            Ok(None) => {}
            Err(error) => problem = Some(causes(&error)),
        }
    }
    let resume = Some(resume_line(job));
    let step = trainer.steps_done();
    let left = Leftover { step, dropped: reached - step, saved: kept.saved, problem, resume };
    let left = Box::new(left);
    match (stops, by) {
        (Some(signal), _) => Error::StoppedAt { signal, left },
        (None, Some(rank)) => Error::StoppedBy { rank, left },
        (None, None) => error,
    }
}

/// Saves the newest step that the ranks which answer have all done. `None` where that is saved already.
fn save(job: &Job, trainer: &mut Trainer, run: &RunDir, kept: &Kept) -> Result<Option<PathBuf>> {
    let deadline = job.config.deadline;
    let answer = if job.processes > 1 { ANSWER.min(deadline) } else { deadline };
    let missing = trainer.retreat(job, answer)?;
    let step = trainer.steps_done();
    if step == 0 || kept.saved.as_ref().is_some_and(|(saved, _)| *saved == step) {
        return Ok(None);
    }
    // Whoever comes back without this step takes it from those that have it.
    let needed = job.plan.stages();
    if needed > 1
        && let Some(rank) = missing.iter().find(|rank| rank.0 < needed)
    {
        return Err(Error::NoAnswer { rank: *rank });
    }
    trainer.with_common(|trainer| trainer.verify(Thoroughness::All))?;
    checkpoint::save_without(trainer, job, run, kept.totals, &missing).map(Some)
}

/// The command line by which a run goes on.
fn resume_line(job: &Job) -> String {
    let out = quoted(job.out.as_deref().unwrap_or_else(|| Path::new(".")));
    let config = quoted(&job.out.as_deref().unwrap_or_else(|| Path::new(".")).join("config.toml"));
    let train = format!("train --config {config} --out {out} --resume auto");
    match job.processes {
        0 | 1 => format!("farflung {train}"),
        n => format!("farflung launch -n {n} -- {train}, or each rank as it was started with --resume auto"),
    }
}

/// A path as a shell takes it.
fn quoted(path: &Path) -> String {
    let text = path.display().to_string();
    let plain = |c: char| c.is_alphanumeric() || "/._-+=:,@%".contains(c);
    if !text.is_empty() && text.chars().all(plain) {
        text
    } else {
        format!("'{}'", text.replace('\'', r"'\''"))
    }
}

/// Those of `world` ranks that are not among `members`.
pub(super) fn missing(world: usize, members: &[Rank]) -> Vec<Rank> {
    (0..world as u32).map(Rank).filter(|rank| !members.contains(rank)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_is_told_in_one_line() {
        let path = PathBuf::from("runs/a/step-00000007");
        let left = |step, saved: Option<u64>, problem: Option<&str>| Leftover {
            step,
            dropped: 0,
            saved: saved.map(|step| (step, path.clone())),
            problem: problem.map(str::to_owned),
            resume: Some("farflung train".to_owned()),
        };
        assert_eq!(
            left(7, Some(7), None).to_string(),
            "; step 7 is saved in runs/a/step-00000007; to go on: farflung train"
        );
        assert_eq!(
            left(9, Some(7), Some("rank 1 is gone")).to_string(),
            "; step 9 could not be saved: rank 1 is gone; step 7 is saved in runs/a/step-00000007; to go on: \
             farflung train"
        );
        assert_eq!(left(0, None, None).to_string(), " before the first step was done");
        assert_eq!(
            Leftover { dropped: 3, ..left(0, None, None) }.to_string(),
            "; 3 steps since the last average of all replicas are dropped; there is no checkpoint"
        );
    }

    #[test]
    fn paths_are_quoted_where_a_shell_would_cut_them() {
        assert_eq!(quoted(Path::new("runs/a-1")), "runs/a-1");
        assert_eq!(quoted(Path::new("my run's")), r"'my run'\''s'");
    }
}
