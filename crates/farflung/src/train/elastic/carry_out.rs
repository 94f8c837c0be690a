//! Carries out the changes on which a member agrees with the others, and reports them to the user and in the
//! run's files.

use farflung_base::{Bytes, Nanos, PeerId};
use farflung_parallel::plan::PoolAdvice;

use super::addresses;
use super::balance::Reshared;
use super::change::Member;
use super::changed::Changed;
use super::decide::Agreement;
use super::former_checkpoints;
use super::layers::Division;
use super::leaving::{Leaving, parted, save_alone, save_together};
use super::nonsense::Report;
use super::place::Place;
use super::pool_speeds::Moving;
use super::pools;
use super::ready::Admission;
use super::too_long::{Refusal, TooLong};
use crate::events::{EventKind, EventLog, causes};
use crate::train::callbacks::{RunObserver, tell};
use crate::train::steps::Steps;
use crate::train::trainer::{StateBytes, Trainer};
use crate::{Error, Result, RunDir, heap, run_dir};

/// Reports what other members and newcomers have announced that cannot be true.
pub(super) fn tell_nonsense(
    member: &mut Member<'_>,
    trainer: &Trainer,
    steps: &mut Steps<'_, '_>,
    events: &mut EventLog,
) {
    let announced = member.place.membership().nonsense();
    for (id, reason) in announced {
        if let Some(peer) = member.place.peer_of(&id) {
            member.nonsense.note(peer.0, reason);
        }
    }
    for Report { member, reason } in member.nonsense.take() {
        let text = format!("member {member} has reported {reason}: this is not used");
        tracing::warn!("{text}");
        if let Some(watch) = steps.record.watch.as_deref_mut() {
            watch.note(&text);
        }
        events.time_s = steps.clock.totals(trainer.comm()).time_s;
        events.write(trainer.steps_done(), EventKind::Nonsense { member, reason });
    }
}

/// Reports the newcomers that were refused.
pub(super) fn tell_refused(
    member: &mut Member<'_>,
    trainer: &Trainer,
    steps: &mut Steps<'_, '_>,
    events: &mut EventLog,
) {
    for Refusal { peer, why } in member.place.refused.take() {
        tell(steps.record.watch.as_deref_mut(), &format!("member {} is refused: {why}", peer.0));
        let TooLong { state, takes, limit } = why;
        let millis = |time: Nanos| time.0 / 1_000_000;
        let (member, takes_ms, limit_ms) = (peer.0, millis(takes), millis(limit));
        events.time_s = steps.clock.totals(trainer.comm()).time_s;
        events.write(trainer.steps_done(), EventKind::Unadmitted { member, state, takes_ms, limit_ms });
    }
}

/// Agrees with the others on a change of members after a step that all have done, and carries it out. All
/// members that take steps call it together.
///
/// Errors: the reason for which this member leaves, with what it has saved; as [`Member::between_steps`].
pub(super) fn change_members(
    member: &mut Member<'_>,
    trainer: &mut Trainer,
    steps: &mut Steps<'_, '_>,
    events: &mut EventLog,
    leaving: Option<Leaving>,
) -> Result<()> {
    match change(member, trainer, steps, events, leaving.is_some()) {
        Ok(Change::None) => Ok(()),
        Ok(Change::Done(changed)) => note(member, trainer, steps, events, &changed),
        Ok(Change::AllLeave) => {
            let left = save_together(member, trainer, steps, events)?;
            // Another member may have reported what is not true.
            Err(leaving.map_or_else(
                || Error::Message {
                    message: "the members' agreement to leave".to_owned(),
                    problem: "has a member that has not asked to leave",
                },
                |leaving| leaving.into_error(&steps.job, left),
            ))
        }
        Err(error @ Error::Removed { .. }) => {
            let Some(leaving) = leaving else { return Err(parted(member, trainer, steps, events, error)) };
            let left = save_alone(member, trainer, steps, events, true)?;
            Err(leaving.into_error(&steps.job, left))
        }
        Err(error) => Err(parted(member, trainer, steps, events, error)),
    }
}

/// What members have done after they have agreed on a change.
enum Change {
    /// Nothing.
    None,
    /// They have changed to a new view.
    Done(Box<Changed>),
    /// All members leave: they are to save together.
    AllLeave,
}

impl From<Option<Changed>> for Change {
    fn from(changed: Option<Changed>) -> Self {
        changed.map_or(Self::None, |changed| Self::Done(Box::new(changed)))
    }
}

/// Changes to the view on which the members agree after a step.
///
/// Errors: as [`Member::between_steps`].
fn change(
    member: &mut Member<'_>,
    trainer: &mut Trainer,
    steps: &mut Steps<'_, '_>,
    events: &mut EventLog,
    leaves: bool,
) -> Result<Change> {
    let begun = trainer.comm().now();
    let agreed = member.agree(trainer, leaves);
    let job = (&mut steps.job, &mut steps.last);
    let changed = match agreed {
        Ok(Agreement::GoOn) => Ok(None),
        Ok(Agreement::End) => return Ok(Change::AllLeave),
        Ok(Agreement::HandOver) => {
            let done = member.hand_over(job, trainer, (leaves, begun));
            go_over_again(member, trainer, steps, done)
        }
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
            let done = member.grow((&mut steps.job, &mut steps.last), trainer, begun);
            go_over_again(member, trainer, steps, done)
        }
        Err(error) => go_over_again(member, trainer, steps, Err(error)),
    }?;
    Ok(changed.into())
}

/// Continues without those that were lost in a change, if that is why it has failed.
///
/// Errors: as [`Member::after_loss`].
fn go_over_again(
    member: &mut Member<'_>,
    trainer: &mut Trainer,
    steps: &mut Steps<'_, '_>,
    done: Result<Option<Changed>>,
) -> Result<Option<Changed>> {
    match done {
        Err(error) if Member::survives(&error) => {
            member.after_loss((&mut steps.job, &mut steps.last), trainer, &error).map(Some)
        }
        done => done,
    }
}

/// Applies a change of pools: new routes of microbatches, or a member that moves to another stage.
pub(super) fn follow_pools(
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
            let done = member.change_stage((&mut steps.job, &mut steps.last), trainer, (rank, to));
            settle(member, trainer, steps, events, done).map(drop)
        }
    }
}

/// Reports a change under a new view of the same members, or continues without those that were lost in it.
/// Returns whether it was carried out.
///
/// Errors: as [`go_on_without`].
fn settle(
    member: &mut Member<'_>,
    trainer: &mut Trainer,
    steps: &mut Steps<'_, '_>,
    events: &mut EventLog,
    done: Result<Option<Changed>>,
) -> Result<bool> {
    match done {
        Ok(None) => Ok(false),
        Ok(Some(changed)) => note(member, trainer, steps, events, &changed).map(|()| true),
        Err(error) if Member::survives(&error) => {
            go_on_without(member, trainer, steps, events, error).map(|()| false)
        }
        Err(error) => Err(parted(member, trainer, steps, events, error)),
    }
}

/// Reports that a newcomer fetches the state while the members train on. `sizes` are those of a member whose
/// state it fetches.
pub(super) fn announce_log(
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

/// Continues with the remaining members after an error, unless this rank caused it.
pub(super) fn go_on_without(
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
    steps.record_resolved(trainer);
    if let Some(view) = member.place.view() {
        steps.last.views.note(view.id(), changed.step);
    }
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
    heap::give_back();
    let text = changed.to_string();
    member.since = trainer.comm().now();
    member.publisher.changed(text.clone(), changed.took);
    tell_new_plan(trainer, steps, events, (&text, changed.event(steps.job.deadline())))?;
    if steps.job.is_pooled()
        && let moved = changed.moved.map(|(peer, to)| Moving { slot: peer.0, to })
        && let Some(what) = pools::event(&steps.job.plan, member.team.as_ref(), moved)
    {
        events.write(trainer.steps_done(), what);
    }
    steps.run.map_or(Ok(()), |run| run_dir::unless_full(write_addresses(member.place, run)))
}

/// Prepares the folder of a member that has joined after `begun` steps.
///
/// Errors: [`Error::Io`].
pub(super) fn note_joined(
    place: &Place,
    (run, begun): (&RunDir, u64),
    watch: Option<&mut (dyn RunObserver + '_)>,
) -> Result<()> {
    write_addresses(place, run)?;
    if let Some(text) = former_checkpoints::put_checkpoints_aside(run.path(), Some(begun))? {
        tell(watch, &text);
    }
    Ok(())
}

/// Writes the addresses of the other members to the member's folder, so that they can be asked later whether
/// they still train.
///
/// Errors: [`Error::Io`].
fn write_addresses(place: &Place, run: &RunDir) -> Result<()> {
    let me = place.transport().me();
    let known = place.arrivals.to_reach().into_iter();
    let others: Vec<String> = known.filter(|(peer, _)| *peer != me).map(|(_, at)| at).collect();
    addresses::write(run.path(), &others)
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
    tell(steps.record.watch.as_deref_mut(), text);
    events.time_s = steps.clock.totals(trainer.comm()).time_s;
    events.write(trainer.steps_done(), what);
    steps.run.map_or(Ok(()), |run| run.replace_if_room("plan.toml", steps.job.plan.to_string().as_bytes()))
}

/// Returns the text on numbers that follow speed, and the step times before and now.
fn by_speed(step: u64, what: &str, numbers: &[u32], [before, now]: [Nanos; 2]) -> String {
    let numbers: Vec<String> = numbers.iter().map(u32::to_string).collect();
    let numbers = numbers.join(", ");
    format!("after step {step}: {what} by speed are {numbers}: a step takes {now} instead of {before}")
}

/// Reports a change of the replicas' shares.
///
/// Errors: [`Error::Io`].
pub(super) fn note_shares(
    trainer: &Trainer,
    steps: &mut Steps<'_, '_>,
    events: &mut EventLog,
    reshared: Reshared,
) -> Result<()> {
    let Reshared { microbatches, before, now } = reshared;
    let text = by_speed(trainer.steps_done(), "microbatches", &microbatches, [before, now]);
    let (before_us, now_us) = (before.0 / 1_000, now.0 / 1_000);
    tell_new_plan(trainer, steps, events, (&text, EventKind::Shares { microbatches, before_us, now_us }))
}

/// Divides the layers anew among the stages, and reports it.
///
/// Errors: as [`go_on_without`].
pub(super) fn divide_anew(
    member: &mut Member<'_>,
    trainer: &mut Trainer,
    steps: &mut Steps<'_, '_>,
    events: &mut EventLog,
    division: Division,
) -> Result<()> {
    let Division { layers, before, now } = division;
    let done = member.divide_anew((&mut steps.job, &mut steps.last), trainer, &layers);
    if !settle(member, trainer, steps, events, done)? {
        return Ok(());
    }
    let text = by_speed(trainer.steps_done(), "layers of the stages", &layers, [before, now]);
    let (before_us, now_us) = (before.0 / 1_000, now.0 / 1_000);
    tell_new_plan(trainer, steps, events, (&text, EventKind::Layers { layers, before_us, now_us }))
}
