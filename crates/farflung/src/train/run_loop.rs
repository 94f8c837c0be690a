//! A run on one rank, from its first step to its report: one loop for every run. What happens between steps is
//! a hook's: nothing where the ranks are fixed, changes of the members where machines join and leave.

use farflung_base::Link;
use farflung_comm::Stats;

use super::announce::announce;
use super::callbacks::RunObserver;
use super::checkpoint::{self, Resumed, Totals};
use super::finished;
use super::job::Job;
use super::record::{Clock, RunRecorder};
use super::report::Report;
use super::steps::{AfterStep, LastDone, Steps, evaluated};
use super::stop_in_step::RunProgress;
use super::trainer::{Ending, Trainer};
use crate::events::{EventKind, EventLog};
use crate::{Error, Result, RunDir};

/// What the loop does after it has looked at a hook before a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Next {
    /// It takes a step.
    Step,
    /// It asks the hook again: something has changed.
    AskAgain,
}

/// What is done between the steps of a run. By default nothing, and a failure ends the run.
pub(super) trait BetweenSteps {
    /// Is called once, after the user was told what the run is.
    fn begun(&mut self, _steps: &mut Steps<'_, '_>) {}

    /// Is called before each step.
    ///
    /// Errors: those that end the run.
    fn before(
        &mut self,
        _trainer: &mut Trainer,
        _steps: &mut Steps<'_, '_>,
        _events: &mut EventLog,
    ) -> Result<Next> {
        Ok(Next::Step)
    }

    /// Takes a step. The inner result is that of the step.
    ///
    /// Errors: those that end the run.
    fn step(
        &mut self,
        trainer: &mut Trainer,
        steps: &mut Steps<'_, '_>,
        events: &mut EventLog,
        kept: &mut RunProgress,
    ) -> Result<Result<AfterStep>> {
        Ok(steps.step(trainer, events, kept))
    }

    /// Is called after each step that succeeded.
    ///
    /// Errors: those that end the run.
    fn after(
        &mut self,
        _trainer: &mut Trainer,
        _steps: &mut Steps<'_, '_>,
        _events: &mut EventLog,
        _next: AfterStep,
    ) -> Result<()> {
        Ok(())
    }

    /// Decides about a failure of a step or of an evaluation: the run goes on after `Ok`.
    ///
    /// Errors: those that end the run, mostly this failure.
    fn failed(
        &mut self,
        _trainer: &mut Trainer,
        _steps: &mut Steps<'_, '_>,
        _events: &mut EventLog,
        error: Error,
    ) -> Result<()> {
        Err(error)
    }

    /// Is called after the last step. Returns what the run tells of its model, on a rank that reports it.
    ///
    /// Errors: those that end the run.
    fn over(
        &mut self,
        trainer: &mut Trainer,
        steps: &mut Steps<'_, '_>,
        _events: &mut EventLog,
    ) -> Result<Option<Ending>> {
        let _armed = trainer.armed();
        trainer.ending(&steps.job, steps.tells)
    }

    /// Returns the error with which the run ends.
    fn ended(
        &mut self,
        _trainer: &mut Trainer,
        _steps: &Steps<'_, '_>,
        _kept: &RunProgress,
        _events: &mut EventLog,
        error: Error,
    ) -> Error {
        error
    }
}

/// The hook of a run whose ranks are fixed.
#[derive(Debug)]
pub(super) struct FixedRanks;

impl BetweenSteps for FixedRanks {}

/// What is known of a run before its next step.
pub(super) struct Start<'a, 'w> {
    pub(super) job: Job,
    pub(super) run: Option<&'a RunDir>,
    pub(super) watch: Option<&'a mut (dyn RunObserver + 'w)>,
    pub(super) simulated: bool,
    pub(super) link: Option<Link>,
    /// Bytes of trials, which do not count.
    pub(super) trials: Stats,
    pub(super) resumed: Option<Resumed>,
    /// Whether this rank records the run's steps, and makes its report.
    pub(super) tells: bool,
    /// Number of steps whose rows in the folder count.
    pub(super) rows: u64,
    pub(super) last: LastDone,
    /// Whether the model is evaluated before the first step.
    pub(super) evaluates: bool,
    /// Tokens of the run before this rank took part.
    pub(super) tokens_before: u64,
}

impl Start<'_, '_> {
    /// Trains up to the last step. Returns the report if this rank makes it.
    ///
    /// Errors: what ends the run, as the hook returns it.
    pub(super) fn run(
        self,
        hook: &mut impl BetweenSteps,
        trainer: &mut Trainer,
        events: &mut EventLog,
        kept: &mut RunProgress,
    ) -> Result<Option<Report>> {
        let Self { job, run, watch, simulated, link, trials, resumed, tells, rows, last, .. } = self;
        let before = resumed.as_ref().map_or(Totals::default(), |resumed| resumed.totals);
        let begun = trainer.steps_done();
        let metrics = run.filter(|_| tells).map(|run| run.metrics(rows)).transpose()?;
        if let (Some(metrics), Some(run), Some(resumed)) = (&metrics, run, &resumed) {
            metrics.tell_missing(rows, resumed.from.starts_with(run.path()));
        }
        let clock = Clock::new(trainer.comm(), before, trials);
        *kept = RunProgress::at(begun, run, before, clock);
        if let Some((_, path)) = &kept.saved {
            job.stop.note_saved(path);
        }
        job.stop.begin();
        let record = RunRecorder { link, metrics, watch, rows: Vec::new(), told: 0, time_s: before.time_s };
        let mut steps = Steps { job, record, clock, run, tells, last_loss: None, last };
        if let Some(watch) = steps.record.watch.as_deref_mut() {
            announce(&steps.job, trainer, simulated, resumed.as_ref(), watch)?;
        }
        hook.begun(&mut steps);
        events.time_s = before.time_s;
        if let Some(Resumed { from, notes, .. }) = resumed {
            events.write(begun, EventKind::Resumed { from: from.display().to_string(), notes });
        }
        save_end(trainer, &mut steps, events, kept)?;
        let done = take_steps(hook, trainer, &mut steps, events, kept, self.evaluates);
        // The time of a run is that of its steps: its sample does not count.
        let mut totals = steps.clock.totals(trainer.comm());
        let done = done.and_then(|loss| Ok((loss, hook.over(trainer, &mut steps, events)?)));
        let (first_loss, ending) = done.map_err(|error| hook.ended(trainer, &steps, kept, events, error))?;
        let Steps { job, record, clock, mut last_loss, .. } = steps;
        let rows = if begun == job.config.steps && !job.elastic {
            // All steps were done before, but the run was interrupted before its report.
            last_loss = Some(evaluated(trainer)?);
            totals = clock.totals(trainer.comm());
            if tells { finished::rows(run) } else { Vec::new() }
        } else {
            record.into_rows(run, begun)
        };
        let _armed = (!job.elastic).then(|| trainer.armed());
        let Some(ending) = ending else { return Ok(None) };
        let losses = (first_loss, last_loss);
        let mut report = Report::new(&job, (simulated, link), losses, rows, totals, ending)?;
        if self.tokens_before > 0 {
            let tokens = report.tokens.saturating_sub(self.tokens_before);
            report.tokens_per_s = tokens as f64 / report.time_s.max(1e-9);
        }
        if let Some(run) = run {
            report.write(run)?;
        }
        Ok(Some(report))
    }
}

/// Saves the last step, if the run continues from a state on disk that has it and no checkpoint does.
fn save_end(
    trainer: &mut Trainer,
    steps: &mut Steps<'_, '_>,
    events: &mut EventLog,
    kept: &mut RunProgress,
) -> Result<()> {
    let (step, job) = (trainer.steps_done(), &steps.job);
    let is_over = step == job.config.steps && job.config.save_end && !job.elastic;
    let Some(run) = steps.run.filter(|_| is_over) else { return Ok(()) };
    let lacks = u64::from(kept.saved.is_none());
    if checkpoint::all_gather_u64(trainer.comm(), lacks)?.iter().all(|&lacks| lacks == 0) {
        return Ok(());
    }
    let path = checkpoint::save(trainer, job, run, steps.clock.totals(trainer.comm()))?;
    kept.saved = Some((step, path.clone()));
    events.write(step, EventKind::Saved { path: path.display().to_string() });
    Ok(())
}

/// Takes all steps. Returns the loss before the first step, if the model was evaluated there.
fn take_steps(
    hook: &mut impl BetweenSteps,
    trainer: &mut Trainer,
    steps: &mut Steps<'_, '_>,
    events: &mut EventLog,
    kept: &mut RunProgress,
    evaluates: bool,
) -> Result<Option<f64>> {
    let mut first_loss = None;
    if evaluates {
        match evaluated(trainer) {
            Ok(loss) => first_loss = Some(loss),
            Err(error) => hook.failed(trainer, steps, events, error)?,
        }
    }
    steps.last_loss = first_loss;
    // If the average after the last step has failed, it must still be repeated.
    while trainer.steps_done() < steps.job.config.steps || trainer.lacks_average() {
        if hook.before(trainer, steps, events)? == Next::AskAgain {
            continue;
        }
        match hook.step(trainer, steps, events, kept)? {
            Ok(next) => hook.after(trainer, steps, events, next)?,
            Err(error) => hook.failed(trainer, steps, events, error)?,
        }
    }
    trainer.wait_for_states()?;
    Ok(first_loss)
}
