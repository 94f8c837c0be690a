//! A member's run: steps as in any run, and changes of the view between steps or after a loss.

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
use crate::train::checkpoint;
use crate::train::job::Job;
use crate::train::links::{self, WorkerConnection};
use crate::train::report::Report;
use crate::train::run_loop::{BetweenSteps, Next, Start};
use crate::train::steps::{AfterStep, LastDone, Steps};
use crate::train::stop_in_step::RunProgress;
use crate::train::trainer::{Ending, Trainer};
use crate::{Error, Result, RunDir, Signal};

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
        Some(run) => checkpoint::resume(&mut trainer, &job, Some(run))?,
        None => None,
    };
    if let Some(resumed) = &resumed {
        job.plan_start = resumed.plan_start;
        trainer.begin_at(job.plan_start);
    }
    checkpoint::admit_member(&trainer, &job, run.as_ref(), watch.as_deref_mut())?;
    let begun = trainer.steps_done();
    let tokens_before = job.tokens_after(begun);
    if let Some(run) = &run {
        run.write_settings(&job.settings().to_toml(), &job.plan.to_string())?;
        if !founds {
            note_joined(member.place, (run, begun), watch.as_deref_mut())?;
        }
    }
    let mut last = shared_last.unwrap_or(LastDone::at(begun));
    let rows = steps_that_count(&mut last, member.place, (begun, founds));
    let begins_again = resumed.is_none() && has_trained && founds;
    let start = Start {
        job,
        run: run.as_ref(),
        watch,
        simulated,
        link,
        trials: Stats::default(),
        resumed,
        tells: true,
        rows,
        last,
        evaluates: begun == 0 && founds,
        // A newcomer counts only the tokens since it joined.
        tokens_before: if founds { 0 } else { tokens_before },
    };
    let folder = FolderWatch::new(run.as_ref());
    let mut between =
        MemberSteps { member, folder, joined: (!founds).then_some(begun), begins_again, leaves: None };
    match start.run(&mut between, &mut trainer, &mut events, &mut RunProgress::default()) {
        Err(Error::OverForSpare) => Ok(None),
        done => done,
    }
}

/// What a member does between steps.
struct MemberSteps<'p> {
    member: Member<'p>,
    folder: FolderWatch,
    /// The step at which it has joined, unless it was there from the start.
    joined: Option<u64>,
    /// Whether the run begins again although its folder says that it had trained.
    begins_again: bool,
    /// The signal by which it leaves after the step.
    leaves: Option<Signal>,
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

impl BetweenSteps for MemberSteps<'_> {
    fn begun(&mut self, steps: &mut Steps<'_, '_>) {
        let world = steps.job.world;
        if let (Some(begun), Some(watch)) = (self.joined, steps.record.watch.as_deref_mut()) {
            tell_joined(&self.member, begun, world, watch);
        }
        if self.begins_again {
            let text = "no checkpoint of this run was found here: it begins again at step 0";
            tell(steps.record.watch.as_deref_mut(), &format!("warning: {text}"));
        }
    }

    fn before(
        &mut self,
        trainer: &mut Trainer,
        steps: &mut Steps<'_, '_>,
        events: &mut EventLog,
    ) -> Result<Next> {
        let member = &mut self.member;
        gather(member, trainer, steps, events)?;
        self.leaves = leaving(&steps.job, trainer);
        if let Some(signal) = self.leaves {
            announce_leave(member, trainer, steps, signal);
            if must_go(member, &steps.job, trainer) {
                return Err(left_at_once(signal, (&steps.job, trainer), steps.run));
            }
        }
        if member.has_departing() {
            let epoch = member.epoch();
            change_members(member, trainer, steps, events, self.leaves.map(Leaving::Asked))?;
            member.forget_departing(epoch);
            return Ok(Next::AskAgain);
        }
        member.look_at_log(trainer, &steps.job)?;
        trainer.tell_followed(member.log.is_kept());
        trainer.ask_for_change(member.wants_change(trainer)? || self.leaves.is_some());
        if let Some(newcomer) = member.offer_round(trainer, &steps.job)? {
            announce_log((trainer, trainer.state_bytes()), steps, events, newcomer);
        }
        Ok(Next::Step)
    }

    fn step(
        &mut self,
        trainer: &mut Trainer,
        steps: &mut Steps<'_, '_>,
        events: &mut EventLog,
        kept: &mut RunProgress,
    ) -> Result<Result<AfterStep>> {
        let member = &mut self.member;
        let begun = (trainer.comm().now(), trainer.agreed_step());
        let done = member.watched(trainer, |trainer| steps.step(trainer, events, kept));
        member.since = begun.0;
        if done.is_ok() {
            member.since = trainer.comm().now();
            let took = member.since.saturating_sub(begun.0);
            member.notice.step(took, trainer.agreed_step() != begun.1);
        }
        member.log_step(trainer, &steps.job)?;
        Ok(done)
    }

    fn failed(
        &mut self,
        trainer: &mut Trainer,
        steps: &mut Steps<'_, '_>,
        events: &mut EventLog,
        error: Error,
    ) -> Result<()> {
        go_on_without(&mut self.member, trainer, steps, events, error)
    }

    fn after(
        &mut self,
        trainer: &mut Trainer,
        steps: &mut Steps<'_, '_>,
        events: &mut EventLog,
        next: AfterStep,
    ) -> Result<()> {
        let member = &mut self.member;
        tell_nonsense(member, trainer, steps, events);
        tell_refused(member, trainer, steps, events);
        self.folder.check(steps.record.watch.as_deref_mut());
        if steps.job.pipelines.is_some() {
            member.copies.after_step(trainer, &steps.job)?;
            trainer.tell_copying(member.copies.is_under_way());
        }
        // After the last step no change is worthwhile.
        let is_over = trainer.steps_done() >= steps.job.config.steps;
        if trainer.has_resumed() && next == AfterStep::Step && !is_over {
            // The routes of that step went around the lost members' work.
            let rates = steps.job.plan.pools().map_or_else(Vec::new, |pools| pools.rates.clone());
            let rerouted = pools::reroute(&mut steps.job, trainer, rates);
            return rerouted.or_else(|error| go_on_without(member, trainer, steps, events, error));
        }
        let pooled = member.pool_advice(&steps.job, trainer);
        if pooled != PoolAdvice::Stay && next == AfterStep::Step && !is_over {
            return follow_pools(member, trainer, steps, events, pooled);
        }
        let advice = member.share_advice(&steps.job, trainer);
        let division = member.balance.division().filter(|_| member.growing.is_empty());
        // A newcomer or spare that fetches a part would have another part than it will need.
        let division = division.filter(|_| next == AfterStep::Step && !trainer.is_followed());
        if let Some(division) = division.filter(|_| !is_over) {
            return divide_anew(member, trainer, steps, events, division);
        }
        match (next, if is_over { Advice::Stay } else { advice }) {
            (AfterStep::Step, Advice::Stay) => {
                member.publisher.publish((&mut *member.place, member.team.as_ref()), trainer, steps);
                Ok(())
            }
            (AfterStep::Step, Advice::Shares(shares)) => {
                match member.balance.reshare(&mut steps.job, trainer, shares) {
                    Ok(reshared) => note_shares(trainer, steps, events, reshared),
                    Err(error) => go_on_without(member, trainer, steps, events, error),
                }
            }
            (_, advice) => {
                let (replica, rank) = (trainer.replica(), trainer.rank().0);
                let slow = advice == Advice::Leave(replica) && member.balance.is_slowest(replica, rank);
                let slow = slow.then(|| member.balance.too_slow(replica));
                let leaves = self.leaves.or_else(|| leaving(&steps.job, trainer));
                let asked = leaves.map(Leaving::Asked);
                let leaving = asked.or_else(|| slow.map(Leaving::TooSlow));
                change_members(member, trainer, steps, events, leaving)
            }
        }
    }

    /// Also tells spares that the run is over.
    fn over(
        &mut self,
        trainer: &mut Trainer,
        steps: &mut Steps<'_, '_>,
        events: &mut EventLog,
    ) -> Result<Option<Ending>> {
        let ending = loop {
            match trainer.ending(&steps.job, steps.tells) {
                Ok(ending) => break ending,
                Err(error) => go_on_without(&mut self.member, trainer, steps, events, error)?,
            }
        };
        if let Some(team) = self.member.team.as_ref().filter(|team| team.leads()) {
            team.tell_over();
        }
        Ok(ending)
    }

    /// Tells the spares and the events why this member's run has ended.
    fn ended(
        &mut self,
        trainer: &mut Trainer,
        steps: &Steps<'_, '_>,
        kept: &RunProgress,
        events: &mut EventLog,
        error: Error,
    ) -> Error {
        let error = match error {
            Error::OverForSpare => return error,
            Error::Stopped(signal) => last_left(signal, (&steps.job, trainer), kept),
            error => error,
        };
        if let (Error::StoppedAt { .. }, Some(team)) = (&error, &self.member.team)
            && team.leads()
        {
            team.tell_over();
        }
        if steps.run.is_some_and(RunDir::has_begun) {
            events.write(trainer.steps_done(), EventKind::ended(&error));
        }
        error
    }
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
