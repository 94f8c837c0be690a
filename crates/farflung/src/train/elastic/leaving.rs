//! How a member leaves: when, what it saves, and what its user is told. A member that holds the whole model
//! saves a checkpoint. In pipelines, a member hands over its part first if no remaining member holds it. If
//! all members leave after the same step, they save together, as at any other checkpoint.

use std::path::{Path, PathBuf};

use farflung_parallel::membership::Reason;

use super::change::Member;
use crate::checkpoint::folder;
use crate::events::{EventKind, EventLog, causes};
use crate::train::callbacks::tell;
use crate::train::checkpoint;
use crate::train::job::Job;
use crate::train::steps::Steps;
use crate::train::stop_in_step::{RunProgress, StopSummary, resume_line};
use crate::train::trainer::{Thoroughness, Trainer};
use crate::{Error, Result, RunDir, Signal, run_dir};

/// Why a member leaves.
pub(super) enum Leaving {
    /// It was asked to.
    Asked(Signal),
    /// It delays the others, which are faster without it.
    TooSlow(String),
}

impl Leaving {
    /// Returns the error with which a member ends that leaves.
    pub(super) fn into_error(self, job: &Job, mut left: StopSummary) -> Error {
        match self {
            Self::Asked(signal) => {
                left.took = job.stop.since();
                Error::StoppedAt { signal, left: Box::new(left) }
            }
            Self::TooSlow(reason) => Error::TooSlow { reason, left: Box::new(left) },
        }
    }
}

/// Returns the signal by which this member leaves; `None` if it stays, or if no other members would be left.
pub(super) fn leaving(job: &Job, trainer: &Trainer) -> Option<Signal> {
    let (rank, step) = (trainer.comm().rank().0, trainer.steps_done() + 1);
    let placed = job.departure.is_some_and(|d| d.rank == rank && d.step <= step);
    let asked = job.stop.requested().or(placed.then_some(Signal::Terminate));
    asked.filter(|_| job.leaves_alone() && !job.stop.is_for_all())
}

/// Returns the number of steps until members can leave: with local steps, until the next average.
fn steps_left(job: &Job, trainer: &Trainer) -> u64 {
    let (done, round) = (trainer.steps_done(), job.plan.outermost().round_of(trainer.steps_done() + 1));
    if trainer.lacks_average() { 1 } else { round.end.min(job.config.steps).saturating_sub(done) }
}

/// Tells the user, once, when a member that was asked to leave will do so.
pub(super) fn announce_leave(
    member: &mut Member<'_>,
    trainer: &Trainer,
    steps: &mut Steps<'_, '_>,
    signal: Signal,
) {
    let now = trainer.comm().now();
    let since = steps.job.stop.since().unwrap_or_default();
    if !member.notice.ask(now.saturating_sub(since)) {
        return;
    }
    let left = steps_left(&steps.job, trainer);
    let what = if steps.job.averages_each_step() { "step" } else { "round of local steps" };
    let when = member.notice.until(left).map_or_else(String::new, |time| format!(", in about {time}"));
    let text = format!(
        "{signal}: this member leaves after the current {what}{when}; a second signal ends it at once, \
         without what it has done since its last checkpoint"
    );
    tell(steps.record.watch.as_deref_mut(), &text);
}

/// Returns whether the machine of a member that was asked to leave may be taken away before the next average,
/// if the others can finish the round without it.
pub(super) fn must_go(member: &Member<'_>, job: &Job, trainer: &Trainer) -> bool {
    let is_needed = job.averages_each_step() || job.plan.replicas() == 1 || !member.place.can_be_missed();
    let (left, now) = (steps_left(job, trainer), trainer.comm().now());
    !is_needed && member.notice.is_too_short(job.stop.notice(), left, now)
}

/// Returns the error with which a member ends that does not wait for the next average. For the others, it is
/// lost.
pub(super) fn left_at_once(signal: Signal, (job, trainer): (&Job, &Trainer), run: Option<&RunDir>) -> Error {
    let step = trainer.agreed_step();
    let dropped = trainer.steps_done().saturating_sub(step);
    let problem = Some("the notice is too short for that, and the other members have it".to_owned());
    let saved = run.and_then(|run| newest_saved(run.path()));
    let left = StopSummary { step, dropped, saved, problem, goes_on: true, ..StopSummary::default() };
    Leaving::Asked(signal).into_error(job, left)
}

/// Returns what is left of a member whose part of the model the others have: it saves nothing itself.
pub(super) fn left_to_others(run: Option<&Path>, step: u64) -> StopSummary {
    let saved = run.and_then(newest_saved);
    StopSummary { step, saved, goes_on: true, ..StopSummary::default() }
}

/// Returns the error with which a rank ends that must not continue. If too few members are left, or some part
/// of the model is lost, its state is saved first, since no other rank may have it. So is that of a member that
/// was asked to stop, and is in no view any more before it has left.
pub(super) fn parted(
    member: &mut Member<'_>,
    trainer: &mut Trainer,
    steps: &mut Steps<'_, '_>,
    events: &mut EventLog,
    error: Error,
) -> Error {
    match error {
        Error::NoMajority { reason, left: None } => match save_alone(member, trainer, steps, events, false) {
            Ok(left) => Error::NoMajority { reason, left: Some(Box::new(left)) },
            Err(error) => error,
        },
        Error::PartLost { tensor, left: None } => match save_alone(member, trainer, steps, events, false) {
            Ok(left) => Error::PartLost { tensor, left: Some(Box::new(left)) },
            Err(error) => error,
        },
        Error::Removed { reason } if let Some(signal) = steps.job.stop.requested() => {
            // If it has left as the only member of its view, no other one continues.
            let goes_on = reason != Reason::Left.to_string();
            match save_alone(member, trainer, steps, events, goes_on) {
                Ok(left) => Leaving::Asked(signal).into_error(&steps.job, left),
                Err(error) => error,
            }
        }
        error => error,
    }
}

/// Saves a checkpoint of a member that leaves, or that cannot continue. In pipelines it has only its parts of
/// the model: those of a member that leaves while others go on are not saved, since these have all of it.
pub(super) fn save_alone(
    member: &mut Member<'_>,
    trainer: &mut Trainer,
    steps: &mut Steps<'_, '_>,
    events: &mut EventLog,
    goes_on: bool,
) -> Result<StopSummary> {
    let Some(run) = steps.run else { return Ok(nothing_saved(trainer, goes_on)) };
    let has_parts = steps.job.plan.stages() > 1;
    // A spare holds the parts that it had before.
    let is_spare = member.team.as_ref().is_some_and(|team| team.rank().is_none());
    if is_spare || has_parts && goes_on {
        return Ok(StopSummary { goes_on, ..left_to_others(Some(run.path()), trainer.steps_done()) });
    }
    if !has_parts {
        member.alone(&mut steps.job, trainer)?;
    }
    let before = trainer.steps_done();
    let totals = steps.clock.totals(trainer.comm());
    let save = if has_parts { checkpoint::save_parts } else { checkpoint::save };
    let saved = save(trainer, &steps.job, run, totals);
    Ok(summary((trainer, run, events), &steps.job, (before, goes_on), saved))
}

/// Saves a checkpoint of all members, which leave after the same step. All members that take steps call it.
///
/// Errors: those of [`save_alone`], if another member is lost meanwhile.
pub(super) fn save_together(
    member: &mut Member<'_>,
    trainer: &mut Trainer,
    steps: &mut Steps<'_, '_>,
    events: &mut EventLog,
) -> Result<StopSummary> {
    let step = trainer.steps_done();
    let Some(run) = steps.run.filter(|_| step > 0) else { return Ok(nothing_saved(trainer, false)) };
    let saved = trainer.with_common(|trainer| trainer.verify(Thoroughness::All)).and_then(|()| {
        let totals = steps.clock.totals(trainer.comm());
        checkpoint::save(trainer, &steps.job, run, totals)
    });
    match saved {
        Err(error) if Member::survives(&error) || error.is_of_disk() => {
            tracing::warn!("this member saves alone: {}", causes(&error));
            trainer.comm().abort();
            save_alone(member, trainer, steps, events, false)
        }
        saved => Ok(summary((trainer, run, events), &steps.job, (step, false), saved)),
    }
}

fn nothing_saved(trainer: &Trainer, goes_on: bool) -> StopSummary {
    let step = trainer.steps_done();
    StopSummary { step, goes_on, ..StopSummary::default() }
}

/// Returns what is left of a member that had done `before` steps when it tried to save.
fn summary(
    (trainer, run, events): (&Trainer, &RunDir, &mut EventLog),
    job: &Job,
    (before, goes_on): (u64, bool),
    saved: Result<PathBuf>,
) -> StopSummary {
    let step = trainer.steps_done();
    let (saved, problem) = match saved {
        Ok(path) => {
            events.write(step, EventKind::Saved { path: path.display().to_string() });
            (Some((step, path)), None)
        }
        Err(error) => (newest_saved(run.path()), Some(causes(&error))),
    };
    let resume = (!goes_on).then(|| resume_line(job));
    let dropped = before.saturating_sub(step);
    StopSummary { step, dropped, saved, problem, goes_on, resume, took: None }
}

/// Returns the newest checkpoint in a member's folder.
fn newest_saved(run: &Path) -> Option<(u64, PathBuf)> {
    let step = run_dir::list(run).ok()?.pop()?;
    Some((step, run.join(folder(step))))
}

/// Returns the error of a run that ends with its last member: with what that member has saved.
pub(super) fn last_left(signal: Signal, (job, trainer): (&Job, &Trainer), kept: &RunProgress) -> Error {
    let (saved, problem) = (kept.saved.clone(), kept.problem.clone());
    let step = trainer.agreed_step();
    let dropped = trainer.steps_done().saturating_sub(step);
    let resume = Some(resume_line(job));
    let left = StopSummary { step, dropped, saved, problem, resume, ..StopSummary::default() };
    Leaving::Asked(signal).into_error(job, left)
}
