//! Changes of the view where members form pipelines. A member with a place continues with its part of the
//! model; a member without one waits as a spare.

use farflung_base::{Nanos, PeerId};
use farflung_comm::{Cancel, Communicator};
use farflung_parallel::membership::{MemberId, View};
use farflung_parallel::pipeline::{KeptCell, ResumedStep};
use serde::{Deserialize, Serialize};

use super::all_gather::all_gather;
use super::broken_round::RoundPosition;
use super::change::{Member, slots, start};
use super::changed::Changed;
use super::decide::PAUSE;
use super::fetching::ChunkStore;
use super::follow::{Follower, Replayer};
use super::followed_parts::{BeforeCatchUp, CaughtUp, catch_up};
use super::form_team::{EnteringMember, FormedTeam, form_team};
use super::leaving::{Leaving, left_to_others};
use super::measure::measured_speed;
use super::repeats::Repeats;
use super::spare::SpareEvent;
use super::stoppable::stoppable;
use super::team::{FutureRank, Team};
use crate::config::member_name::MemberName;
use crate::events::LostSequences;
use crate::train::job::Job;
use crate::train::links;
use crate::train::run_state::{RunCounters, RunState};
use crate::train::steps::LastDone;
use crate::train::trainer::{Committed, Trainer};
use crate::{Error, Result};

/// What a member of a view tells the others first.
#[derive(Debug, Serialize, Deserialize)]
struct EnteringStep {
    /// The last step that it has committed; `None` on a newcomer.
    committed: Option<Committed>,
    /// The number of steps after which it has followed its parts, if it is a newcomer that has.
    follows: Option<u64>,
    /// Its name, if it has one.
    name: Option<MemberName>,
    /// How far its pipeline is, if steps are local and it takes any.
    round: Option<RoundPosition>,
}

impl EnteringStep {
    /// Returns whether this member and another have voted on the same steps.
    fn votes_with(&self, other: &Self) -> bool {
        match (&self.round, &other.round) {
            (Some(round), Some(other)) => round.is_with(other),
            (own, other) => own.is_none() && other.is_none(),
        }
    }
}

/// A member that has a place in a view, with all that it needs to continue.
struct Placed {
    job: Job,
    trainer: Trainer,
    last: LastDone,
    moved: (u64, usize),
    lost_steps: u64,
    lost: Vec<LostSequences>,
    from_checkpoints: bool,
    /// Percentage of the step in flight that the members keep.
    kept_percent: u32,
}

impl Member<'_> {
    /// Takes a place in the pipelines of a view. If this member is a spare there, waits for a place in a later
    /// view.
    ///
    /// Errors: [`Error::OverForSpare`] if the run ends first; [`Error::PartLost`].
    pub(super) fn go_over_in_pipelines(
        &mut self,
        (job, last): (&mut Job, &mut LastDone),
        trainer: &mut Trainer,
        view: View,
        (begun, reason): (Nanos, Option<String>),
    ) -> Result<Changed> {
        let before: Vec<u32> = slots(self.place.view());
        let stood = (trainer.steps_done(), trainer.agreed_step());
        let placed = self.place_in((&*job, *last), Some(trainer), view)?;
        let now = slots(self.place.view());
        let fresh = |from: &[u32], than: &[u32]| {
            from.iter().filter(|slot| !than.contains(slot)).map(|&slot| PeerId(slot)).collect()
        };
        (*job, *last, *trainer) = (placed.job, placed.last, placed.trainer);
        // A rank that finishes a round has done its local steps itself.
        let caught_up = trainer.agreed_step() != stood.1 || trainer.steps_done() < stood.0;
        let spares = self.team.as_ref().map_or(0, |team| team.spares().count());
        Ok(Changed {
            epoch: self.epoch(),
            joined: fresh(&now, &before),
            left: fresh(&before, &now),
            names: self.publisher.names.clone(),
            members: now.len(),
            step: trainer.steps_done(),
            reason,
            state: placed.moved.0,
            donors: placed.moved.1,
            caught_up,
            lost: placed.lost,
            repeated: self.repeats.times(stood.0),
            lost_steps: placed.lost_steps,
            from_checkpoints: placed.from_checkpoints,
            pipelines: Some((job.plan.replicas(), job.plan.stages(), spares)),
            fetching: self.growing.len(),
            pools: job.plan.pools().map_or_else(Vec::new, |pools| pools.sizes.clone()),
            rerouted: !job.is_pooled(),
            kept_percent: placed.kept_percent,
            moved: None,
            took: trainer.comm().now().saturating_sub(begun),
        })
    }

    /// Forms a further pipeline of the spares that have fetched their parts, under a new view of the same
    /// members. All members that take steps call it after the same step. `None` if they did not reach a new
    /// view.
    ///
    /// Errors: as [`Member::between_steps`].
    pub(super) fn grow(
        &mut self,
        (job, last): (&mut Job, &mut LastDone),
        trainer: &mut Trainer,
        begun: Nanos,
    ) -> Result<Option<Changed>> {
        let start = start(job, trainer)?;
        let working = self.team.as_ref().map_or_else(Vec::new, Team::working);
        let lead = self.team.as_ref().is_some_and(Team::leads);
        match self.place.once_more(&working, lead, start)? {
            None => {
                self.place.pause = trainer.comm().now().saturating_add(PAUSE);
                Ok(None)
            }
            Some(view) => {
                self.repeats = Repeats::default();
                self.go_over_in_pipelines((job, last), trainer, view, (begun, None)).map(Some)
            }
        }
    }

    /// Returns the members without a part that leave: those that have handed over theirs, and spares.
    pub(super) fn departing(&self) -> Vec<MemberId> {
        let Some(team) = &self.team else { return Vec::new() };
        let membership = self.place.membership();
        let leaves = |id: &MemberId| team.departing.contains(id) || membership.is_leaving(id);
        team.idle().filter(leaves).collect()
    }

    /// Returns whether members have handed over their parts in this view and are to leave next.
    pub(super) fn has_departing(&self) -> bool {
        self.team.as_ref().is_some_and(|team| !team.departing.is_empty())
    }

    /// Returns the number of the view in which the members' places were decided.
    pub(super) fn epoch(&self) -> u64 {
        self.team.as_ref().map_or(0, |team| team.epoch)
    }

    /// Forgets which members are to leave next, if they have not left the view of `epoch`: they are asked after
    /// a later step.
    pub(super) fn forget_departing(&mut self, epoch: u64) {
        if let Some(team) = self.team.as_mut().filter(|team| team.epoch == epoch) {
            team.departing.clear();
        }
    }

    /// Hands over the parts of the members that leave, under a new view of the same members: those that remain
    /// divide the model among themselves. All members that take steps call it after the same step; `leaves`
    /// says whether this one leaves. `None` if they did not reach a new view.
    ///
    /// Errors: as [`Member::between_steps`]; on a member that leaves, [`Error::Removed`] once the others
    /// continue without it.
    pub(super) fn hand_over(
        &mut self,
        (job, last): (&mut Job, &mut LastDone),
        trainer: &mut Trainer,
        (leaves, begun): (bool, Nanos),
    ) -> Result<Option<Changed>> {
        self.departs = leaves;
        let handed = self.grow((job, last), trainer, begun);
        if matches!(handed, Ok(None)) {
            self.departs = false;
        }
        handed
    }

    /// Divides the model's layers among the stages anew, under a new view of the same members. Members receive
    /// the state of the layers that are new to them. All members that take steps call it after the same step.
    /// `None` if they did not reach a new view.
    ///
    /// Errors: as [`Member::between_steps`].
    pub(super) fn divide_anew(
        &mut self,
        (job, last): (&mut Job, &mut LastDone),
        trainer: &mut Trainer,
        layers: &[u32],
    ) -> Result<Option<Changed>> {
        self.layers = layers.to_vec();
        let changed = self.grow((job, last), trainer, trainer.comm().now());
        self.layers.clear();
        changed
    }

    /// Takes a newcomer's first place.
    ///
    /// Errors: as [`Member::go_over_in_pipelines`]; [`Error::Removed`] if no view contains it within
    /// `patience`.
    pub(super) fn come_into_pipelines(
        &mut self,
        (job, alone): (&mut Job, &Communicator),
        expects: (Nanos, u64),
        tell: &mut dyn FnMut(&str),
    ) -> Result<(Trainer, LastDone)> {
        let (slot, threads, simulated) = (self.place.transport().me().0, self.threads, self.simulated);
        let speed = measured_speed(job, (alone, slot), threads, simulated);
        self.pools.known.extend(speed.map(|speed| (slot, speed)));
        let replayer = Replayer { job, comm: alone, threads };
        let mut follower = (!job.barrier).then(|| Follower::new(replayer));
        let view = self.place.wait_for_view((expects, &job.stop), follower.as_mut(), tell)?;
        self.put_others_checkpoints_aside(tell)?;
        self.followed = follower.and_then(|follower| self.take_followed(follower));
        let placed = self.place_in((&*job, LastDone::at(0)), None, view)?;
        *job = placed.job;
        Ok((placed.trainer, placed.last))
    }

    fn place_in(
        &mut self,
        (job, last): (&Job, LastDone),
        mut trainer: Option<&mut Trainer>,
        mut view: View,
    ) -> Result<Placed> {
        loop {
            let step = trainer.as_deref().map_or(0, Trainer::steps_done);
            let job = &Job { doublings: self.repeats.doublings(), ..job.clone() };
            let formed = self.try_pipelines((job, last), trainer.as_deref_mut(), &view);
            view = match formed {
                Ok(Some(placed)) => return Ok(placed),
                Ok(None) => {
                    let left = |this: &Self, error| this.left_as_spare((job, step), error);
                    let waited = self.wait_without_part(job).map_err(|error| left(self, error))?;
                    self.repeats = Repeats::default();
                    match waited {
                        SpareEvent::View(view) => view,
                        SpareEvent::Over => return Err(left(self, Error::OverForSpare)),
                    }
                }
                Err(error) if Self::survives(&error) => {
                    // A member may have failed because it cannot hold the layers that it would get.
                    self.layers.clear();
                    let _telling = self.place.give_up();
                    let start = match trainer.as_deref_mut() {
                        Some(trainer) => {
                            trainer.drop_step();
                            Some(start(job, trainer)?)
                        }
                        None => None,
                    };
                    let given_up = std::mem::take(&mut self.given_up);
                    let _giving_up = self.place.give_up_newcomers(&given_up);
                    self.next_view(&error, given_up, (step, start))?
                }
                Err(error) => return Err(error),
            };
        }
    }

    /// Waits as a spare. If it can be in a further pipeline, fetches its part meanwhile.
    ///
    /// Errors: as [`Place::wait_as_spare`](super::place::Place::wait_as_spare).
    fn wait_without_part(&mut self, job: &Job) -> Result<SpareEvent> {
        let team = self.team.clone().expect("it has just been formed");
        if self.departs {
            tracing::info!("this member has no part of the model any more, and leaves");
        } else {
            tracing::warn!(
                "this member is a spare: it has no part of the model until a member is lost or joins"
            );
        }
        self.publisher.publish_as_spare(self.place);
        let own = self.growing.iter().find(|future| future.member == team.all.rank().index());
        let threads = self.threads;
        let alone = self.place.own_communicator()?;
        let replayer = Replayer { job, comm: &alone, threads };
        // If it has measured no link from a member that holds its part, it receives the part while all wait.
        let measured = self.place.measured.as_ref();
        let is_measured = |id: &MemberId| measured.is_some_and(|links| links.rate(id).is_some());
        let measured = |own: &FutureRank| team.holders(own.position).iter().any(is_measured);
        let follows = own.is_some_and(measured);
        let grows = own.is_some();
        let mut follower = follows.then(|| Follower::new(replayer));
        self.place.membership().forget_offers();
        let waited = self.place.wait_as_spare((&team, job), (grows, self.departs), follower.as_mut())?;
        // One that leaves takes no part in the next view.
        (self.grows, self.departs) = (waited.is_ready, self.departs || waited.leaves);
        self.followed = follower.and_then(|follower| self.take_followed(follower));
        Ok(waited.event)
    }

    /// Returns the error with which a spare ends, if a signal has asked it to stop: nothing is lost with it.
    fn left_as_spare(&self, (job, step): (&Job, u64), error: Error) -> Error {
        match (error, job.stop.requested()) {
            (Error::OverForSpare, Some(signal)) => Error::Stopped(signal),
            (Error::Removed { .. }, Some(signal)) => {
                Leaving::Asked(signal).into_error(job, left_to_others(self.folder.as_deref(), step))
            }
            (error, _) => error,
        }
    }

    /// Tries to take a place in a view's pipelines. `None` if this member is a spare.
    fn try_pipelines(
        &mut self,
        (job, last): (&Job, LastDone),
        mut trainer: Option<&mut Trainer>,
        view: &View,
    ) -> Result<Option<Placed>> {
        let change = Cancel::new();
        let all = stoppable(job, self.place.enter(view.clone())?).with_other_cancel(&change);
        self.place.membership().ends(view.epoch, change.clone());
        let state = trainer.as_deref().map_or(0, |trainer| trainer.state_bytes().shared);
        let watch = self.watch_newcomers(job, &all);
        let done = (|| {
            // If one member has committed the step, all that voted on it must commit it, too.
            let made = self.team.as_ref().filter(|team| team.rank().is_some()).map(|team| team.epoch);
            let round = |trainer: &Trainer| RoundPosition::new(trainer, job, made?);
            let followed = self.followed.as_mut();
            let follows = followed.as_ref().map(|parts| parts.step());
            let (committed, at) =
                (trainer.as_deref().map(Trainer::committed), trainer.as_deref().and_then(round));
            let own = EnteringStep { committed, follows, name: job.config.name.clone(), round: at };
            let told: Vec<EnteringStep> = all_gather(&all, &own)?;
            self.publisher.names.note(view, told.iter().map(|told| told.name.clone()));
            let voted = told.iter().filter(|told| told.votes_with(&own));
            let newest = voted.filter_map(|told| told.committed).max_by_key(|committed| committed.step);
            if let (Some(trainer), Some(newest)) = (trainer.as_deref_mut(), newest) {
                trainer.resolve_vote(newest)?;
                let rounds = told.iter().filter_map(|told| told.round);
                trainer.resolve_average(rounds.filter(|r| Some(r.made) == made).map(|round| round.agreed))?;
            }
            let lent = trainer.as_deref().map(|trainer| self.log.lend(&self.place.offered_blobs(), trainer));
            let live = trainer.as_deref().map(|trainer| trainer.state(job)).transpose()?;
            // Only those that have followed their parts compare them.
            let compares = told.iter().any(|told| told.follows.is_some());
            let compared = if compares { live.clone() } else { None };
            let each_step = job.averages_each_step();
            let copy = compared.map(|live| if each_step { live } else { live.without_optimizer() });
            let at: Vec<Option<u64>> = told.iter().map(|told| told.follows).collect();
            let (own, lent) = (copy.as_ref(), lent.unwrap_or_default());
            let before = BeforeCatchUp { at: &at, own, lent, followed };
            let CaughtUp { tensors, taken } = catch_up(&all, before, &mut self.store)?;
            let live = live.into_iter().chain(tensors);
            let held: Vec<RunState> = self.copies.kept().cloned().chain(live).collect();
            let round = trainer.as_deref().and_then(round);
            let folder = self.folder.as_deref();
            let (team, pools, store) = (self.team.as_ref(), &self.pools, &mut self.store);
            let (grows, leaves, layers) = (self.grows, self.departs, &self.layers[..]);
            let brings =
                EnteringMember { job, last, team, held, round, folder, pools, layers, store, grows, leaves };
            let mut formed = form_team(view, &all, brings)?;
            formed.moved = (formed.moved.0 + taken.0, formed.moved.1.max(taken.1));
            let comm = formed.team.split(job.deadline(), formed.moved.0)?;
            Ok((formed, comm))
        })();
        self.given_up = self.end_watch(watch, state);
        let (formed, comm) = done.inspect_err(|_: &Error| all.abort())?;
        // The parts that a newcomer would follow may be others now.
        self.log.drop_log(&mut self.place.offered_blobs());
        self.log.drop_optimizers(&mut self.place.offered_blobs());
        self.tell_dropped();
        (self.followed, self.grows, self.store) = (None, false, ChunkStore::default());
        let FormedTeam { team, job: mut next, last, counted, tensors, moved, lost_steps, .. } = formed;
        let from_checkpoints = formed.from_checkpoints;
        let works = team.rank().is_some();
        if works {
            (next.change, next.view) = (Some(change), Some(view.id()));
        }
        let made = (|| {
            if !works {
                return Ok(None);
            }
            if let Some(trainer) = trainer.as_deref_mut().filter(|_| formed.finishes_round) {
                let comm = links::view_communicator(&next, comm.clone(), self.simulated)?;
                return Ok(Some((trainer.carried(&next, comm)?, 0)));
            }
            let resumed = resumed((job, &next), trainer.as_deref_mut(), &counted, &comm)?;
            let comm = links::view_communicator(&next, comm.clone(), self.simulated)?;
            let get = |name: &str| tensors.get(name).map(Vec::as_slice);
            let percent = |step: &ResumedStep| 100 * step.computations_kept() / step.computations();
            let kept = resumed.as_ref().map_or(0, percent) as u32;
            if let Some(trainer) = trainer.as_deref_mut() {
                return Ok(Some((trainer.moved_to((&next, resumed.as_ref()), comm, &counted, &get)?, kept)));
            }
            let mut trainer = Trainer::resumed(&next, comm, self.threads, resumed.as_ref())?;
            trainer.take_state((&counted, Some(&counted.optimizer)), &get)?;
            Ok(Some((trainer, kept)))
        })();
        // Until all of this has succeeded, the former team and plan are in force.
        let made = made.inspect_err(|_: &Error| comm.abort())?;
        self.place.membership().settles(view.epoch);
        self.pools.begin_anew(&formed.speeds);
        self.balance.begin_anew();
        self.layers.clear();
        self.team = Some(team);
        self.predict_newcomer(&next)?;
        self.copies.begin_anew(counted.step);
        self.idle.begin_anew();
        let placed = |(trainer, kept_percent)| Placed {
            job: next,
            trainer,
            last,
            moved,
            lost_steps,
            lost: formed.lost,
            from_checkpoints,
            kept_percent,
        };
        Ok(made.map(placed))
    }
}

/// Agrees with the other members which work of the step in flight they keep. `None` if the whole step is done
/// again.
/// Frees what this member has computed of it, if it is not needed. All members that take steps call it, with
/// the communicator of these members.
///
/// Errors: a member that is lost meanwhile.
fn resumed(
    (job, next): (&Job, &Job),
    trainer: Option<&mut Trainer>,
    counted: &RunCounters,
    comm: &Communicator,
) -> Result<Option<ResumedStep>> {
    let (mut own, mut step) = (Vec::new(), None);
    if let Some(pools) = next.plan.pools().filter(|_| next.keeps_work()) {
        if let Some(trainer) = &trainer {
            own = trainer.kept_cells((job, next), comm.rank().0, counted);
        }
        let kept: Vec<Vec<KeptCell>> = all_gather(comm, &own)?;
        step = ResumedStep::new(pools, next.plan.microbatches[0], &kept);
    }
    if let Some(trainer) = trainer.filter(|_| step.is_none() || own.is_empty()) {
        trainer.forget_work();
    }
    Ok(step)
}

impl Team {
    /// Returns whether this member notifies the spares when the run is over.
    pub(super) fn leads(&self) -> bool {
        self.rank() == Some(0)
    }
}
