//! A member's training loop: steps as in any run, and changes of the view between steps or after a loss.

use std::sync::Arc;

use farflung_base::Nanos;
use farflung_comm::{Cancel, Communicator, Stats};
use farflung_parallel::plan::{Advice, PoolAdvice};

use super::carry_out::{
    announce_log, change_members, divide_anew, follow_pools, go_on_without, note_joined, note_shares,
    tell_nonsense, tell_refused,
};
use super::change::Member;
use super::decide::POLL_INTERVAL;
use super::leaving::{Leaving, announce_leave, last_left, leaving, left_at_once, must_go};
use super::own_folder::FolderWatch;
use super::place::Place;
use super::pools;
use super::team::Team;
use super::watchdog::Watchdog;
use crate::events::{EventKind, EventLog};
use crate::train::callbacks::{RunObserver, tell};
use crate::train::checkpoint::{self, Totals};
use crate::train::job::Job;
use crate::train::links::{self, WorkerConnection};
use crate::train::record::{Clock, RunRecorder};
use crate::train::report::{Report, sample};
use crate::train::run::announce;
use crate::train::steps::{AfterStep, LastDone, Steps, evaluated};
use crate::train::stop_in_step::RunProgress;
use crate::train::trainer::{Trainer, hash};
use crate::{Error, Result, RunDir};

/// Minimum time for which a newcomer waits to be admitted before it gives up, for each step of a round. Members
/// admit newcomers between steps only, and with local steps after a round only. A step may take long.
const PATIENCE: Nanos = Nanos::from_millis(600_000);
/// The longest of these times: two hours.
const MAX_PATIENCE: Nanos = Nanos::from_millis(7_200_000);

/// Runs one member from its first view to the run's last step, or until it leaves.
///
/// Errors: [`Error::Removed`] if it must not continue; [`Error::StoppedAt`] after a signal, with its
/// checkpoint; any error of this rank itself.
pub(in crate::train) fn work(
    job: &Job,
    connection: WorkerConnection,
    local: usize,
    mut watch: Option<&mut (dyn RunObserver + '_)>,
) -> Result<Option<Report>> {
    let WorkerConnection { comm, simulated, link, place } = connection;
    let mut place = place.expect("each seat of a run with members has a place");
    let threads = job.threads(local);
    let mut job = of_member(job);
    let founds = place.view().is_some();
    let run = checkpoint::admit_newcomer(&job, place.run.take())?;
    let mut events = EventLog::new(run.as_ref().map(RunDir::path));
    let has_trained = run.as_ref().is_some_and(RunDir::has_begun);
    let steps = if job.averages_each_step() { 1 } else { job.plan.outermost().every };
    let round = Nanos(PATIENCE.0.saturating_mul(steps.into())).min(MAX_PATIENCE);
    let patience = job.config.deadline.max(round);
    let watchdog = (!simulated).then(|| Watchdog::new(place.transport(), job.config.deadline));
    let own = place.transport().me().0;
    let team = founded(&mut job, &place, &comm);
    let folder = run.as_ref().map(|run| run.path().to_owned());
    let mut member = Member::new(&mut place, threads, simulated, watchdog, folder);
    (member.team, member.join_wait) = (team, job.config.join_wait);
    member.publisher.names.set(own, job.config.name.clone());
    member.predict_newcomer(&job)?;
    let (mut trainer, shared_last) = if founds {
        let comm = match &member.team {
            Some(team) => links::view_communicator(&job, team.split(job.config.deadline, 0)?, simulated)?,
            None => comm,
        };
        (Trainer::new(&job, comm, threads)?, None)
    } else {
        match member.come_in(&mut job, &comm, patience, &mut |text| tell(watch.as_deref_mut(), text)) {
            Ok((trainer, last)) => (trainer, Some(last)),
            // It was a spare for the whole run.
            Err(Error::OverForSpare) => return Ok(None),
            Err(error) => return Err(member.refused_first(error)),
        }
    };
    trainer.check_elastic(&job)?;
    let resumed = match run.as_ref().filter(|_| founds) {
        Some(run) => checkpoint::resume(&mut trainer, &job, run)?,
        None => None,
    };
    if let Some(resumed) = &resumed {
        job.plan_start = resumed.plan_start;
        trainer.begin_at(job.plan_start);
    }
    checkpoint::admit_member(&trainer, &job, run.as_ref(), watch.as_deref_mut())?;
    let before = resumed.as_ref().map_or(Totals::default(), |resumed| resumed.totals);
    let begun = trainer.steps_done();
    let tokens_before = job.tokens_after(begun);
    if let Some(run) = &run {
        run.write_settings(&job.settings().to_toml(), &job.plan.to_string())?;
        if !founds {
            note_joined(member.place, (run, begun), watch.as_deref_mut())?;
        }
    }
    let mut last = shared_last.unwrap_or(LastDone::at(begun));
    let counts = steps_that_count(&mut last, member.place, (begun, founds));
    let metrics = run.as_ref().map(|run| run.metrics(counts)).transpose()?;
    let clock = Clock::new(trainer.comm(), before, Stats::default());
    let mut kept = RunProgress::at(begun, run.as_ref(), before, clock);
    if let Some((_, path)) = &kept.saved {
        job.stop.note_saved(path);
    }
    job.stop.begin();
    events.time_s = before.time_s;
    if let Some(watch) = watch.as_deref_mut() {
        announce(&job, &trainer, simulated, resumed.as_ref(), watch)?;
        if !founds {
            tell_joined(&member, begun, job.world, watch);
        }
    }
    if resumed.is_none() && has_trained && founds {
        let text = "no checkpoint of this run was found here: it begins again at step 0";
        tell(watch.as_deref_mut(), &format!("warning: {text}"));
    }
    if let Some(resumed) = resumed {
        let from = resumed.from.display().to_string();
        events.write(begun, EventKind::Resumed { from, notes: resumed.notes });
    }
    let record = RunRecorder { link, metrics, watch, rows: Vec::new(), told: 0, time_s: before.time_s };
    let run = run.as_ref();
    let mut steps = Steps { job, record, clock, run, tells: true, last_loss: None, last };
    let done = train(&mut member, &mut trainer, &mut steps, &mut events, &mut kept, begun == 0 && founds);
    if matches!(done, Err(Error::OverForSpare)) {
        return Ok(None);
    }
    let done = done.map_err(|error| ended((&member, &trainer), &steps, (&kept, &mut events), error));
    let losses = (done?, steps.last_loss);
    let Steps { job, record, clock, .. } = steps;
    let totals = clock.totals(trainer.comm());
    let Some((stage, params)) = trainer.gathered() else { return Ok(None) };
    let text = sample(&job, stage, params)?;
    let hash = hash(stage, params)?.to_hex().to_string();
    let rows = record.into_rows(run, begun);
    let mut report = Report::new(&job, (simulated, link), losses, rows, totals, hash, text)?;
    if !founds {
        // Count only the tokens since it joined.
        let tokens = report.tokens.saturating_sub(tokens_before);
        report.tokens_per_s = tokens as f64 / report.time_s.max(1e-9);
    }
    if let Some(run) = run {
        report.write(run)?;
    }
    Ok(Some(report))
}

/// Tells the spares and the events why this member's run has ended. Returns the error for its user.
fn ended(
    (member, trainer): (&Member<'_>, &Trainer),
    steps: &Steps<'_, '_>,
    (kept, events): (&RunProgress, &mut EventLog),
    error: Error,
) -> Error {
    let error = match error {
        Error::Stopped(signal) => last_left(signal, (&steps.job, trainer), kept),
        error => error,
    };
    if let (Error::StoppedAt { .. }, Some(team)) = (&error, &member.team)
        && team.leads()
    {
        team.tell_over();
    }
    if steps.run.is_some_and(RunDir::has_begun) {
        events.write(trainer.steps_done(), EventKind::ended(&error));
    }
    error
}

/// Notes the view that begins after `begun` steps. Returns the number of steps whose rows in the member's
/// folder count: those of a member that joins again may be of steps that the others have undone.
fn steps_that_count(last: &mut LastDone, place: &Place, (begun, founds): (u64, bool)) -> u64 {
    let counts = last.views.that_count(place.former_view).filter(|_| !founds);
    if let Some(view) = place.view() {
        last.views.note(view.id(), begun);
    }
    counts.map_or(begun, |steps| steps.min(begun))
}

/// Tells the user that this member has joined, and whether another one has its name: both may have joined at
/// the same time.
fn tell_joined(member: &Member<'_>, begun: u64, members: usize, watch: &mut dyn RunObserver) {
    watch.note(&format!("joined at step {begun}, one of {members} members"));
    let own = member.place.transport().me().0;
    let twin = member.place.view().and_then(|view| member.publisher.names.twin(view, own));
    if let Some(twin) = twin {
        watch.note(&format!("warning: member {twin} has the same name as this one"));
    }
}

/// Returns the job of a member, with the settings as they were given.
fn of_member(job: &Job) -> Job {
    let forms_pipelines = job.given.stages > 1 && job.pipelines.is_none();
    Job {
        elastic: true,
        pipelines: if forms_pipelines { Some(Arc::clone(&job.given)) } else { job.pipelines.clone() },
        ..job.clone()
    }
}

/// Returns the members' ranks at the beginning of a run of pipelines; `None` without pipelines.
fn founded(job: &mut Job, place: &Place, comm: &Communicator) -> Option<Team> {
    let view = place.view().filter(|_| job.pipelines.is_some())?;
    let change = Cancel::new();
    place.membership().ends(view.epoch, change.clone());
    let team = Team::founded(view, comm.clone().with_other_cancel(&change), job);
    (job.change, job.view) = (Some(change), Some(view.id()));
    Some(team)
}

/// Trains up to the last step. Returns the loss before the first step, if this rank evaluated it.
fn train(
    member: &mut Member<'_>,
    trainer: &mut Trainer,
    steps: &mut Steps<'_, '_>,
    events: &mut EventLog,
    kept: &mut RunProgress,
    from_the_start: bool,
) -> Result<Option<f64>> {
    let mut first_loss = None;
    if from_the_start {
        match evaluated(trainer) {
            Ok(loss) => first_loss = Some(loss),
            Err(error) => go_on_without(member, trainer, steps, events, error)?,
        }
    }
    steps.last_loss = first_loss;
    let mut folder = FolderWatch::new(steps.run);
    // If the average after the last step has failed, it must still be repeated.
    while trainer.steps_done() < steps.job.config.steps || trainer.lacks_average() {
        gather(member, trainer, steps, events)?;
        let leaves = leaving(&steps.job, trainer);
        if let Some(signal) = leaves {
            announce_leave(member, trainer, steps, signal);
            if must_go(member, &steps.job, trainer) {
                return Err(left_at_once(signal, (&steps.job, trainer), steps.run));
            }
        }
        if member.has_departing() {
            let epoch = member.epoch();
            change_members(member, trainer, steps, events, leaves.map(Leaving::Asked))?;
            member.forget_departing(epoch);
            continue;
        }
        member.look_at_log(trainer, &steps.job)?;
        trainer.tell_followed(member.log.is_kept());
        trainer.ask_for_change(member.wants_change(trainer)? || leaves.is_some());
        if let Some(newcomer) = member.offer_round(trainer, &steps.job)? {
            announce_log((trainer, trainer.state_bytes()), steps, events, newcomer);
        }
        let begun = (trainer.comm().now(), trainer.agreed_step());
        let done = member.watched(trainer, |trainer| steps.step(trainer, events, kept));
        member.since = begun.0;
        if done.is_ok() {
            member.since = trainer.comm().now();
            let took = member.since.saturating_sub(begun.0);
            member.notice.step(took, trainer.agreed_step() != begun.1);
        }
        member.log_step(trainer, &steps.job)?;
        let next = match done {
            Ok(next) => next,
            Err(error) => {
                go_on_without(member, trainer, steps, events, error)?;
                continue;
            }
        };
        tell_nonsense(member, trainer, steps, events);
        tell_refused(member, trainer, steps, events);
        folder.check(steps.record.watch.as_deref_mut());
        if steps.job.pipelines.is_some() {
            member.copies.after_step(trainer, &steps.job)?;
            trainer.tell_copying(member.copies.is_under_way());
        }
        // After the last step no change is worthwhile.
        let is_over = trainer.steps_done() >= steps.job.config.steps;
        if trainer.has_resumed() && matches!(next, AfterStep::Step) && !is_over {
            // The routes of that step went around the lost members' work.
            let rates = steps.job.plan.pools().map_or_else(Vec::new, |pools| pools.rates.clone());
            if let Err(error) = pools::reroute(&mut steps.job, trainer, rates) {
                go_on_without(member, trainer, steps, events, error)?;
            }
            continue;
        }
        let pooled = member.pool_advice(&steps.job, trainer);
        if pooled != PoolAdvice::Stay && matches!(next, AfterStep::Step) && !is_over {
            follow_pools(member, trainer, steps, events, pooled)?;
            continue;
        }
        let advice = member.share_advice(&steps.job, trainer);
        let division = member.balance.division().filter(|_| member.growing.is_empty());
        // A newcomer or spare that fetches a part would have another part than it will need.
        let division = division.filter(|_| matches!(next, AfterStep::Step) && !trainer.is_followed());
        if let Some(division) = division.filter(|_| !is_over) {
            divide_anew(member, trainer, steps, events, division)?;
            continue;
        }
        match (next, if is_over { Advice::Stay } else { advice }) {
            (AfterStep::Step, Advice::Stay) => {
                member.publisher.publish((&mut *member.place, member.team.as_ref()), trainer, steps);
            }
            (AfterStep::Step, Advice::Shares(shares)) => {
                match member.balance.reshare(&mut steps.job, trainer, shares) {
                    Ok(reshared) => note_shares(trainer, steps, events, reshared)?,
                    Err(error) => go_on_without(member, trainer, steps, events, error)?,
                }
            }
            (_, advice) => {
                let (replica, rank) = (trainer.replica(), trainer.rank().0);
                let slow = advice == Advice::Leave(replica) && member.balance.is_slowest(replica, rank);
                let slow = slow.then(|| member.balance.too_slow(replica));
                let leaves = leaves.or_else(|| leaving(&steps.job, trainer));
                let asked = leaves.map(Leaving::Asked);
                let leaving = asked.or_else(|| slow.map(Leaving::TooSlow));
                change_members(member, trainer, steps, events, leaving)?;
            }
        }
    }
    end_of_steps(member, trainer, steps, events)?;
    Ok(first_loss)
}

/// Gathers the whole model on rank 0 in pipelines, and tells spares that the run is over.
fn end_of_steps(
    member: &mut Member<'_>,
    trainer: &mut Trainer,
    steps: &mut Steps<'_, '_>,
    events: &mut EventLog,
) -> Result<()> {
    while let Err(error) = trainer.gather_whole() {
        go_on_without(member, trainer, steps, events, error)?;
    }
    if let Some(team) = member.team.as_ref().filter(|team| team.leads()) {
        team.tell_over();
    }
    Ok(())
}

impl Member<'_> {
    /// Executes a step while the watchdog checks for silent members.
    fn watched<T>(
        &mut self,
        trainer: &mut Trainer,
        step: impl FnOnce(&mut Trainer) -> Result<T>,
    ) -> Result<T> {
        let Some(watchdog) = &mut self.watchdog else { return step(trainer) };
        let caller = self.place.pinger(&self.place.others());
        let stopped = self.publisher.stopped_step(self.place);
        let begun = watchdog.begin(trainer.comm(), caller, self.place.roll_call(), stopped);
        let done = step(trainer);
        watchdog.end(begun, done.is_ok());
        done
    }
}

/// Waits with the first step until there are as many members as the run begins with, and those that form
/// further pipelines have their parts. All members that are here call it; newcomers join meanwhile.
///
/// Errors: as [`change_members`].
fn gather(
    member: &mut Member<'_>,
    trainer: &mut Trainer,
    steps: &mut Steps<'_, '_>,
    events: &mut EventLog,
) -> Result<()> {
    let least = steps.job.config.min_members;
    let mut told = 0;
    let waits = |member: &Member<'_>| member.count() < least || least > 1 && !member.growing.is_empty();
    // Pipelines that finish a round of local steps have done different numbers of them.
    while trainer.steps_done() == 0 && steps.job.round_plan.is_none() && waits(member) {
        if let Some(signal) = steps.job.stop.requested().filter(|_| steps.job.stop.is_for_all()) {
            return Err(Error::Stopped(signal));
        }
        // No step is in flight.
        member.since = trainer.comm().now();
        let leaves = leaving(&steps.job, trainer);
        // One that is alone has nothing to save.
        if let Some(signal) = steps.job.stop.requested().filter(|_| leaves.is_none()) {
            return Err(Error::Stopped(signal));
        }
        if told != member.count() {
            told = member.count();
            let text = format!("{told} of the {least} members with which the run begins are here");
            tell(steps.record.watch.as_deref_mut(), &text);
        }
        member.look_at_log(trainer, &steps.job)?;
        member.wants_change(trainer)?;
        if let Some(newcomer) = member.offer_round(trainer, &steps.job)? {
            announce_log((trainer, trainer.state_bytes()), steps, events, newcomer);
        }
        member.publisher.publish((&mut *member.place, member.team.as_ref()), trainer, steps);
        tell_nonsense(member, trainer, steps, events);
        tell_refused(member, trainer, steps, events);
        change_members(member, trainer, steps, events, leaves.map(Leaving::Asked))?;
        member.place.wait(POLL_INTERVAL)?;
    }
    Ok(())
}
