//! The steps of a run on one rank, and the records after each step: its row, checks, evaluation and checkpoint.
//! It does not depend on how ranks connect.

use farflung_comm::Communicator;
use serde::{Deserialize, Serialize};

use super::checkpoint;
use super::elastic::ViewSteps;
use super::job::Job;
use super::observation::Observation;
use super::record::{AfterStepFindings, Clock, RunRecorder};
use super::stop_in_step::RunProgress;
use super::trainer::{Synced, Thoroughness, Trainer};
use crate::events::{EventKind, EventLog, causes};
use crate::peer_counters::PeerCountersLine;
use crate::{Error, PeerCounters, Result, RunDir, Signal, StepTimes};

/// State of the loop over steps.
pub(super) struct Steps<'a, 'w> {
    /// The current job.
    pub(super) job: Job,
    pub(super) record: RunRecorder<'a, 'w>,
    pub(super) clock: Clock,
    pub(super) run: Option<&'a RunDir>,
    /// Whether this rank records the run's steps.
    pub(super) tells: bool,
    /// The last computed loss on the held-out text.
    pub(super) last_loss: Option<f64>,
    pub(super) last: LastDone,
}

/// The steps after which the model was last evaluated, saved and checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct LastDone {
    evaluated: u64,
    saved: u64,
    checked: u64,
    /// In a run that members join and leave: the steps after which its last views began.
    pub(super) views: ViewSteps,
}

impl LastDone {
    /// Returns the state in which all of it was done after this step.
    pub(super) fn at(step: u64) -> Self {
        Self { evaluated: step, saved: step, checked: step, views: ViewSteps::default() }
    }

    /// Returns the state for a run that goes back to a step.
    pub(super) fn up_to(self, step: u64) -> Self {
        let Self { evaluated, saved, checked, views } = self;
        Self { evaluated: evaluated.min(step), saved: saved.min(step), checked: checked.min(step), views }
    }
}

/// The next action of a run after a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum AfterStep {
    /// The run does another step, or ends.
    Step,
    /// The members change.
    Change,
}

impl Steps<'_, '_> {
    /// Records the last step if it was committed without a call of [`Trainer::step`] that returned it.
    pub(super) fn record_resolved(&mut self, trainer: &mut Trainer) {
        let Some(done) = trainer.take_resolved().filter(|_| self.tells) else { return };
        let totals = self.clock.totals(trainer.comm());
        let found =
            AfterStepFindings { peers: PeerCounters::all(trainer.comm()), ..AfterStepFindings::default() };
        self.record.step(&self.job, &done, found, &totals);
    }

    /// Trains a step, and then checks, evaluates and saves if that is due.
    ///
    /// Errors: [`Error::Stopped`] after a step at which all ranks agreed to stop; the errors of a step.
    pub(super) fn step(
        &mut self,
        trainer: &mut Trainer,
        events: &mut EventLog,
        kept: &mut RunProgress,
    ) -> Result<AfterStep> {
        let stop = &self.job.stop;
        let stops = stop.requested().is_some() && (stop.is_for_all() || !self.job.leaves_alone());
        let (next, rank) = (trainer.steps_done() + 1, trainer.rank().0);
        trainer.set_state_totals(kept.totals);
        trainer.begin_memory();
        let done = tracing::debug_span!("step", step = next, rank).in_scope(|| trainer.step(stops))?;
        let memory = self.tells.then(|| trainer.memory());
        let config = &self.job.config;
        let agreed = done.synced == Synced::Yes;
        if agreed {
            kept.totals = self.clock.totals(trainer.comm());
            self.run.map_or(Ok(()), |_| trainer.set_rollback_point())?;
        }
        let totals = self.clock.totals(trainer.comm());
        events.time_s = totals.time_s;
        let [disk_read, disk_written] = trainer.disk_moved();
        let times = StepTimes {
            step: done.step,
            rank,
            bytes_sent: totals.bytes_sent,
            met: agreed,
            disk_read,
            disk_written,
            ..StepTimes::of(trainer.last_spent())
        };
        kept.times.write(&times);
        let peers = PeerCounters::all(trainer.comm());
        if !self.tells && peers.iter().any(|peer| peer.path.is_some()) {
            let line =
                PeerCountersLine { step: done.step, rank, time_s: totals.time_s, peers: peers.clone() };
            kept.peers.write(&line);
        }
        if let Some(watch) = self.record.watch.as_deref_mut() {
            let tokens = self.job.tokens_after(done.step);
            watch.observe(&Observation {
                times: &times,
                bytes_received: totals.bytes_received,
                tokens,
                tokens_per_s: (tokens - self.job.tokens_after(done.step - 1)) as f64 / times.took_s.max(1e-9),
                lr: trainer.last_rate().unwrap_or(0.0),
                peers: &peers,
                operations: &trainer.comm().counters(),
            });
        }
        if done.skipped > 0 {
            events.write(done.step, EventKind::Skipped { times: done.skipped });
        }
        let end = done.step == config.steps;
        let stop = done.stop && agreed && !end;
        let due = |every: u64, since: u64| every > 0 && done.step - since >= every;
        let saves = self.run.is_some()
            && agreed
            && (end && config.save_end || stop || due(config.checkpoint_every, self.last.saved));
        let wants_digest = config.digest_every > 0 && (end || done.step.is_multiple_of(config.digest_every));
        let looks = StepChecks {
            verify: (agreed && (end || saves || due(config.check_every, self.last.checked)))
                .then_some(if end || saves { Thoroughness::All } else { Thoroughness::Usual }),
            evaluate: agreed && (end || due(config.eval_every, self.last.evaluated)),
            digest: agreed && wants_digest,
            saves,
        };
        let (seen, looked) = tracing::debug_span!("look", step = next, rank).in_scope(|| looks.run(trainer));
        if looks.verify.is_some() {
            self.last.checked = done.step;
        }
        if looks.evaluate {
            self.last_loss = seen.val_loss;
            self.last.evaluated = done.step;
        }
        // A stop or a lost peer may interrupt the checks; the step was done and gets its row all the same. If a
        // check fails, there is no row.
        if self.tells && looked.as_ref().err().is_none_or(Error::is_interruption) {
            let totals = self.clock.totals(trainer.comm());
            let (val_loss, digest) = (seen.val_loss, seen.digest);
            let found = AfterStepFindings { val_loss, digest, memory, peers };
            self.record.step(&self.job, &done, found, &totals);
            self.record.record_losses(&seen.losses);
        }
        looked?;
        if let Some(run) = self.run.filter(|_| saves) {
            let totals = self.clock.totals(trainer.comm());
            let span = tracing::debug_span!("checkpoint", step = next, rank);
            let saved = span.in_scope(|| checkpoint::save(trainer, &self.job, run, totals));
            // After a save that failed, the next one is due as usual.
            self.last.saved = done.step;
            match saved {
                Ok(path) => {
                    kept.saved = Some((done.step, path.clone()));
                    events.write(done.step, EventKind::Saved { path: path.display().to_string() });
                }
                // Members do not end because the disk of one of them fails.
                Err(error) if !end && (error.is_no_room() || self.job.elastic && error.is_of_disk()) => {
                    self.go_on_unsaved((done.step, stop), &error, events, kept);
                }
                Err(error) => return Err(error),
            }
        }
        if stop {
            return Err(Error::Stopped(self.signal(trainer.comm())));
        }
        Ok(if done.change && agreed && !end { AfterStep::Change } else { AfterStep::Step })
    }
}

impl Steps<'_, '_> {
    /// Returns the signal by which the ranks stop: this rank's own; else that of another rank, which has had it
    /// first. A collective, except for members.
    fn signal(&self, comm: &Communicator) -> Signal {
        let own = self.job.stop.requested();
        let number = own.map_or(0, |signal| u64::from(signal.number().unsigned_abs()));
        let told = if self.job.elastic { Ok(Vec::new()) } else { checkpoint::all_gather_u64(comm, number) };
        let others = told.into_iter().flatten().filter_map(|number| Signal::of(number.try_into().ok()?));
        own.into_iter().chain(others).next().unwrap_or(Signal::Terminate)
    }

    /// Goes on after a checkpoint for which there is no room, on this rank's disk or on another's. If the run
    /// stops after this step, the problem is in the summary at its end.
    fn go_on_unsaved(
        &mut self,
        (step, stops): (u64, bool),
        error: &Error,
        events: &mut EventLog,
        kept: &mut RunProgress,
    ) {
        let reason = causes(error);
        if stops {
            kept.problem = Some(reason.clone());
        } else if matches!(error, Error::NoRoom(_)) || self.tells {
            let before = match &kept.saved {
                Some((step, path)) => format!("the last checkpoint is {} of step {step}", path.display()),
                None => "there is no checkpoint yet".to_owned(),
            };
            let next = (step + self.job.config.checkpoint_every).min(self.job.config.steps);
            tracing::warn!(
                "{reason}: the run goes on, {before}, and the next one is tried after step {next}"
            );
        }
        events.write(step, EventKind::Unsaved { reason });
    }
}

/// Checks, evaluation and checkpoint that are due after a step.
struct StepChecks {
    verify: Option<Thoroughness>,
    evaluate: bool,
    digest: bool,
    /// Whether a checkpoint follows.
    saves: bool,
}

/// Results of evaluation and checks after a step.
#[derive(Default)]
struct CheckResults {
    val_loss: Option<f64>,
    digest: Option<String>,
    /// Losses of earlier steps that are not in any row yet. They are recorded before a checkpoint, since the
    /// checkpoint does not contain them.
    losses: Vec<f64>,
}

impl StepChecks {
    /// Runs the checks and the evaluation that are due. Returns the results up to the first failure, and that
    /// failure.
    fn run(&self, trainer: &mut Trainer) -> (CheckResults, Result<()>) {
        let mut seen = CheckResults::default();
        let look = |trainer: &mut Trainer| {
            self.verify.map_or(Ok(()), |thoroughness| trainer.verify(thoroughness))?;
            if self.evaluate {
                seen.val_loss = Some(evaluated(trainer)?);
            }
            if self.digest {
                seen.digest = trainer.digest()?;
            }
            if self.saves {
                seen.losses = trainer.tell_losses()?;
            }
            Ok(())
        };
        let any = self.verify.is_some() || self.evaluate || self.digest;
        let looked = if any { trainer.with_common(look) } else { Ok(()) };
        (seen, looked)
    }
}

/// Returns the loss on the held-out text.
///
/// Errors: [`Error::LossNotFinite`], on all ranks.
pub(super) fn evaluated(trainer: &mut Trainer) -> Result<f64> {
    let loss = trainer.evaluate()?;
    if loss.is_finite() { Ok(loss) } else { Err(Error::LossNotFinite { step: trainer.steps_done(), loss }) }
}
