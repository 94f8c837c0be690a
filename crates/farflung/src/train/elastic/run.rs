//! A member's training loop: steps as in any run, and changes of the view between steps or after a loss.

use std::sync::Arc;

use farflung_base::{Bytes, Nanos, PeerId};
use farflung_comm::{Cancel, Communicator, Stats};
use farflung_parallel::plan::{Advice, PoolAdvice};

use super::balance::Reshared;
use super::change::{Changed, Member};
use super::decide::Agreement;
use super::kept;
use super::place::Place;
use super::pool_speeds::Moving;
use super::pools;
use super::ready::Admission;
use super::team::Team;
use super::watchdog::Watchdog;
use crate::events::{EventKind, EventLog, causes};
use crate::train::checkpoint::{self, Totals};
use crate::train::job::Job;
use crate::train::links::{self, WorkerConnection};
use crate::train::record::{Clock, RunRecorder};
use crate::train::report::{Report, sample};
use crate::train::run::{RunObserver, announce};
use crate::train::steps::{AfterStep, LastDone, Steps, evaluated};
use crate::train::stop_in_step::{RunProgress, StopSummary};
use crate::train::trainer::{StateBytes, Trainer, hash};
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
    let mut job = Job { elastic: true, ..job.clone() };
    if job.config.stages > 1 && job.pipelines.is_none() {
        job.pipelines = Some(Arc::new(job.config.clone()));
    }
    let founds = place.view().is_some();
    let run = place.run.take();
    let mut events = EventLog::new(run.as_ref().map(RunDir::path));
    let steps = if job.averages_each_step() { 1 } else { job.plan.outermost().every };
    let round = Nanos(PATIENCE.0.saturating_mul(steps.into())).min(MAX_PATIENCE);
    let patience = job.config.deadline.max(round);
    let watchdog = (!simulated).then(|| Watchdog::new(place.transport(), job.config.deadline));
    let team = founded(&mut job, &place, &comm);
    let folder = run.as_ref().map(|run| run.path().to_owned());
    let mut member = Member::new(&mut place, threads, simulated, watchdog, folder);
    member.team = team;
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
            Err(error) => return Err(error),
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
    let before = resumed.as_ref().map_or(Totals::default(), |resumed| resumed.totals);
    let begun = trainer.steps_done();
    let tokens_before = job.tokens_after(begun);
    if let Some(run) = &run {
        run.write_config(&job.config.to_toml())?;
        run.replace("plan.toml", job.plan.to_string().as_bytes())?;
    }
    let metrics = run.as_ref().map(|run| run.metrics(begun)).transpose()?;
    let clock = Clock::new(trainer.comm(), before, Stats::default());
    let mut kept = RunProgress::at(begun, run.as_ref(), before, clock);
    job.stop.begin();
    events.time_s = before.time_s;
    if let Some(watch) = watch.as_deref_mut() {
        announce(&job, &trainer, simulated, resumed.as_ref(), watch)?;
        if !founds {
            watch.note(&format!("joined at step {begun}, one of {} members", job.world));
        }
    }
    if let Some(resumed) = resumed {
        let from = resumed.from.display().to_string();
        events.write(begun, EventKind::Resumed { from, notes: resumed.notes });
    }
    let record = RunRecorder { link, metrics, watch, rows: Vec::new(), told: 0, time_s: before.time_s };
    let (run, last) = (run.as_ref(), shared_last.unwrap_or(LastDone::at(begun)));
    let mut steps = Steps { job, record, clock, run, tells: true, last_loss: None, last };
    let done = train(&mut member, &mut trainer, &mut steps, &mut events, &mut kept, begun == 0 && founds);
    if matches!(done, Err(Error::OverForSpare)) {
        return Ok(None);
    }
    if let Err(error) = &done
        && run.is_some_and(RunDir::has_begun)
    {
        events.write(trainer.steps_done(), EventKind::ended(error));
    }
    let losses = (done?, steps.last_loss);
    let Steps { job, record, clock, .. } = steps;
    let totals = clock.totals(trainer.comm());
    let Some((stage, params)) = trainer.gathered() else { return Ok(None) };
    let text = sample(&job, stage, params)?;
    let hash = hash(stage, params)?.to_hex().to_string();
    let mut report = Report::new(&job, (simulated, link), losses, record.rows, totals, hash, text)?;
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

/// Logs a line of text and shows it to the user.
fn tell(watch: Option<&mut (dyn RunObserver + '_)>, text: &str) {
    tracing::info!("{text}");
    if let Some(watch) = watch {
        watch.note(text);
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
    // If the average after the last step has failed, it must still be repeated.
    while trainer.steps_done() < steps.job.config.steps || trainer.lacks_average() {
        let leaves = leaving(&steps.job, trainer);
        member.look_at_log(trainer, &steps.job)?;
        trainer.tell_followed(member.log.is_kept());
        trainer.ask_for_change(member.wants_change(trainer)? || leaves.is_some());
        if let Some(newcomer) = member.offer_round(trainer, &steps.job)? {
            announce_log((trainer, trainer.state_bytes()), steps, events, newcomer);
        }
        let done = member.watched(trainer, |trainer| steps.step(trainer, events, kept));
        member.log_step(trainer, &steps.job)?;
        let next = match done {
            Ok(next) => next,
            Err(error) => {
                go_on_without(member, trainer, steps, events, error)?;
                continue;
            }
        };
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
        let advice = member.balance.advice(&steps.job, trainer);
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
                let slow = matches!(advice, Advice::Leave(replica) if replica == trainer.replica());
                let slow = slow.then(|| member.balance.too_slow(trainer.replica()));
                let leaves = leaves.or_else(|| leaving(&steps.job, trainer));
                let goes = leaves.is_some() || slow.is_some();
                match change(member, trainer, steps, events, goes) {
                    Ok(None) => {}
                    Ok(Some(changed)) => note(member, trainer, steps, events, &changed)?,
                    Err(error @ Error::Removed { .. }) => {
                        if !goes {
                            return Err(error);
                        }
                        let left = Box::new(save_alone(member, trainer, steps, events)?);
                        return Err(match (leaves, slow) {
                            (None, Some(reason)) => Error::TooSlow { reason, left },
                            (signal, _) => {
                                Error::StoppedAt { signal: signal.unwrap_or(Signal::Terminate), left }
                            }
                        });
                    }
                    Err(error) => return Err(parted(member, trainer, steps, events, error)),
                }
            }
        }
    }
    // In pipelines, the whole model is gathered on rank 0 at the end.
    while let Err(error) = trainer.gather_whole() {
        go_on_without(member, trainer, steps, events, error)?;
    }
    if let Some(team) = member.team.as_ref().filter(|team| team.leads()) {
        team.tell_over();
    }
    Ok(first_loss)
}

/// Changes to the view on which the members agree after a step; `None` if nothing changes.
///
/// Errors: as [`Member::between_steps`].
fn change(
    member: &mut Member<'_>,
    trainer: &mut Trainer,
    steps: &mut Steps<'_, '_>,
    events: &mut EventLog,
    leaves: bool,
) -> Result<Option<Changed>> {
    let begun = trainer.comm().now();
    match member.agree(trainer, leaves) {
        Ok(Agreement::GoOn) => Ok(None),
        Ok(Agreement::Log { newcomer, sizes }) => {
            member.begin_log(trainer, &steps.job)?;
            let copied = member.copied(&sizes).unwrap_or_else(|| trainer.state_bytes());
            announce_log((trainer, copied), steps, events, newcomer);
            Ok(None)
        }
        Ok(Agreement::Change(agreed)) => {
            if let Some(admission) = &agreed.admission {
                announce_admission(member, trainer, steps, events, admission);
            }
            member.between_steps((&mut steps.job, &mut steps.last), trainer, (agreed, begun))
        }
        Ok(Agreement::Grow(admission)) => {
            if let Some(admission) = &admission {
                announce_admission(member, trainer, steps, events, admission);
            }
            match member.grow((&mut steps.job, &mut steps.last), trainer, begun) {
                Err(error) if Member::survives(&error) => {
                    member.after_loss((&mut steps.job, &mut steps.last), trainer, &error).map(Some)
                }
                grown => grown,
            }
        }
        Err(error) if Member::survives(&error) => {
            member.after_loss((&mut steps.job, &mut steps.last), trainer, &error).map(Some)
        }
        Err(error) => Err(error),
    }
}

/// Reports that a newcomer fetches the state while the members train on. `sizes` are those of a member whose
/// state it fetches.
fn announce_log(
    (trainer, sizes): (&Trainer, StateBytes),
    steps: &mut Steps<'_, '_>,
    events: &mut EventLog,
    newcomer: PeerId,
) {
    let (member, state, record) = (newcomer.0, sizes.shared, sizes.record);
    let unit = if sizes.every > 1 { "round" } else { "step" };
    let text = format!(
        "member {member} fetches {} of state while the others train on, and then {} for each {unit} since",
        Bytes(state),
        Bytes(record)
    );
    tell(steps.record.watch.as_deref_mut(), &text);
    events.time_s = steps.clock.totals(trainer.comm()).time_s;
    events.write(trainer.steps_done(), EventKind::Following { member, state, record });
}

/// Reports the cost of a newcomer's state before the transfer begins.
fn announce_admission(
    member: &mut Member<'_>,
    trainer: &Trainer,
    steps: &mut Steps<'_, '_>,
    events: &mut EventLog,
    admission: &Admission,
) {
    let text = admission.to_string();
    tell(steps.record.watch.as_deref_mut(), &text);
    events.time_s = steps.clock.totals(trainer.comm()).time_s;
    let Admission { peer, cost } = admission;
    let predicted_ms = cost.predicted.map(|time| time.0 / 1_000_000);
    let (member_number, state, at_most) = (peer.0, cost.state, cost.at_most);
    events.write(
        trainer.steps_done(),
        EventKind::Admitting { member: member_number, state, predicted_ms, at_most },
    );
    member.publisher.announce(format!("after step {}: {text}", trainer.steps_done()));
    member.publisher.publish((&mut *member.place, member.team.as_ref()), trainer, steps);
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
        let begun = watchdog.begin(trainer.comm(), caller);
        let done = step(trainer);
        watchdog.end(begun, done.is_ok());
        done
    }
}

/// Applies a change of pools: new routes of microbatches, or a member that moves to another stage.
fn follow_pools(
    member: &mut Member<'_>,
    trainer: &mut Trainer,
    steps: &mut Steps<'_, '_>,
    events: &mut EventLog,
    advice: PoolAdvice,
) -> Result<()> {
    match advice {
        PoolAdvice::Stay => Ok(()),
        PoolAdvice::Rates(rates) => match pools::reroute(&mut steps.job, trainer, rates) {
            Ok(()) => {
                let what = pools::event(&steps.job.plan, member.team.as_ref(), None);
                let text = format!("after step {}: microbatches are routed by speed", trainer.steps_done());
                what.map_or(Ok(()), |what| tell_new_plan(trainer, steps, events, (&text, what)))
            }
            Err(error) => go_on_without(member, trainer, steps, events, error),
        },
        PoolAdvice::Moves { rank, to } => {
            match member.change_stage((&mut steps.job, &mut steps.last), trainer, (rank, to)) {
                Ok(None) => Ok(()),
                Ok(Some(changed)) => note(member, trainer, steps, events, &changed),
                Err(error) if Member::survives(&error) => {
                    go_on_without(member, trainer, steps, events, error)
                }
                Err(error) => Err(parted(member, trainer, steps, events, error)),
            }
        }
    }
}

/// Returns the signal by which this member leaves; `None` if it stays, or if no other members would be left.
fn leaving(job: &Job, trainer: &Trainer) -> Option<Signal> {
    let (rank, step) = (trainer.comm().rank().0, trainer.steps_done() + 1);
    let placed = job.departure.is_some_and(|d| d.rank == rank && d.step <= step);
    let asked = job.stop.requested().or(placed.then_some(Signal::Terminate));
    asked.filter(|_| job.leaves_alone())
}

/// Continues with the remaining members after an error, unless this rank caused it.
fn go_on_without(
    member: &mut Member<'_>,
    trainer: &mut Trainer,
    steps: &mut Steps<'_, '_>,
    events: &mut EventLog,
    error: Error,
) -> Result<()> {
    if !Member::survives(&error) {
        return Err(error);
    }
    tracing::warn!("{}", causes(&error));
    match member.after_loss((&mut steps.job, &mut steps.last), trainer, &error) {
        Ok(changed) => note(member, trainer, steps, events, &changed),
        Err(error) => Err(parted(member, trainer, steps, events, error)),
    }
}

/// Returns the error with which a rank ends that must not continue. If too few members are left, its state is
/// saved first, since no other rank may have it.
fn parted(
    member: &mut Member<'_>,
    trainer: &mut Trainer,
    steps: &mut Steps<'_, '_>,
    events: &mut EventLog,
    error: Error,
) -> Error {
    let Error::NoMajority { reason, left: None } = error else { return error };
    match save_alone(member, trainer, steps, events) {
        Ok(left) => Error::NoMajority { reason, left: Some(Box::new(left)) },
        Err(error) => error,
    }
}

/// Reports a change of members.
///
/// Errors: [`Error::Io`].
fn note(
    member: &mut Member<'_>,
    trainer: &mut Trainer,
    steps: &mut Steps<'_, '_>,
    events: &mut EventLog,
    changed: &Changed,
) -> Result<()> {
    steps.record_resolved(trainer)?;
    let behind = || steps.record.rows.last().is_some_and(|row| row.step < changed.step);
    // A step whose average is still missing gets its row after the average.
    if changed.caught_up || !trainer.lacks_average() && behind() {
        // This rank does not know the losses of steps that it received from others.
        steps.record.rows.truncate(steps.record.told);
    }
    if changed.lost_steps > 0 {
        // These steps are done again.
        steps.record.rows.retain(|row| row.step <= changed.step);
        steps.record.told = steps.record.rows.len();
        if let Some(run) = steps.run {
            steps.record.metrics = Some(run.metrics(changed.step)?);
        }
    }
    let text = changed.to_string();
    member.publisher.changed(text.clone(), changed.took);
    tell_new_plan(trainer, steps, events, (&text, changed.event(steps.job.deadline())))?;
    if steps.job.is_pooled()
        && let moved = changed.moved.map(|(peer, to)| Moving { slot: peer.0, to })
        && let Some(what) = pools::event(&steps.job.plan, member.team.as_ref(), moved)
    {
        events.write(trainer.steps_done(), what);
    }
    steps.run.map_or(Ok(()), |run| {
        let addresses = member.place.arrivals.to_reach().into_iter();
        let me = member.place.transport().me();
        let others: Vec<String> = addresses.filter(|(peer, _)| *peer != me).map(|(_, at)| at).collect();
        kept::write_addresses(run.path(), &others)
    })
}

/// Reports why the run continues under another plan, and writes the reason and the plan.
///
/// Errors: [`Error::Io`].
fn tell_new_plan(
    trainer: &Trainer,
    steps: &mut Steps<'_, '_>,
    events: &mut EventLog,
    (text, what): (&str, EventKind),
) -> Result<()> {
    tracing::info!("{text}");
    if let Some(watch) = steps.record.watch.as_deref_mut() {
        watch.note(text);
    }
    events.time_s = steps.clock.totals(trainer.comm()).time_s;
    events.write(trainer.steps_done(), what);
    steps.run.map_or(Ok(()), |run| run.replace("plan.toml", steps.job.plan.to_string().as_bytes()))
}

/// Reports a change of the replicas' shares.
///
/// Errors: [`Error::Io`].
fn note_shares(
    trainer: &Trainer,
    steps: &mut Steps<'_, '_>,
    events: &mut EventLog,
    reshared: Reshared,
) -> Result<()> {
    let Reshared { microbatches, before, now } = reshared;
    let counts: Vec<String> = microbatches.iter().map(u32::to_string).collect();
    let step = trainer.steps_done();
    let text = format!(
        "after step {step}: microbatches by speed are {}: a step takes {now} instead of {before}",
        counts.join(", ")
    );
    let in_us = |time: Nanos| time.0 / 1_000;
    let (before_us, now_us) = (in_us(before), in_us(now));
    tell_new_plan(trainer, steps, events, (&text, EventKind::Shares { microbatches, before_us, now_us }))
}

/// Saves a checkpoint of a member that leaves. In pipelines nothing is saved.
fn save_alone(
    member: &mut Member<'_>,
    trainer: &mut Trainer,
    steps: &mut Steps<'_, '_>,
    events: &mut EventLog,
) -> Result<StopSummary> {
    let step = trainer.steps_done();
    let mut left = StopSummary { step, dropped: 0, saved: None, problem: None, resume: None };
    let Some(run) = steps.run else { return Ok(left) };
    if steps.job.plan.stages() > 1 {
        // This member has only a part of the model. The remaining members have all of it, unless they are too
        // few to continue.
        return Ok(left);
    }
    member.alone(&mut steps.job, trainer)?;
    let totals = steps.clock.totals(trainer.comm());
    match checkpoint::save(trainer, &steps.job, run, totals) {
        Ok(path) => {
            events.write(step, EventKind::Saved { path: path.display().to_string() });
            left.saved = Some((step, path));
        }
        Err(error) => left.problem = Some(causes(&error)),
    }
    Ok(left)
}
