//! Changes from one view of the members to the next: after a step at which a member requested it, and after a
//! loss.

use std::path::PathBuf;

use farflung_base::{Nanos, PeerId};
use farflung_comm::Communicator;
use farflung_parallel::membership::{MemberId, Start, View};
use farflung_parallel::plan::Digest;

use super::all_gather::nonsense_of;
use super::balance::Balance;
use super::changed::Changed;
use super::copies::Copies;
use super::decide::{Agreed, Agreement, Asks, Loss, NextView, suspect};
use super::fetching::ChunkStore;
use super::follow::{Follower, Replayer};
use super::former_checkpoints;
use super::idle::Idle;
use super::lost_sequences::RoundTaken;
use super::measure::measured;
use super::needed_tensors::needs;
use super::nonsense::{Nonsense, Report};
use super::notice_time::NoticeTime;
use super::place::{Logs, Place};
use super::pool_speeds::PoolSpeeds;
use super::repeats::Repeats;
use super::state_transfer::{LocalState, TransferStats, transfer_state};
use super::status_publisher::StatusPublisher;
use super::step_log::StepLog;
use super::stoppable::stoppable;
use super::team::FuturePlace::{self, Position};
use super::team::{FutureRank, Team};
use super::view::{EnteringRank, form_view};
use super::watchdog::Watchdog;
use crate::events::causes;
use crate::train::job::Job;
use crate::train::links;
use crate::train::steps::LastDone;
use crate::train::trainer::{ReplayedParts, Trainer};
use crate::{Error, Result};

/// One rank of a run whose members change.
pub(in crate::train) struct Member<'a> {
    pub(in crate::train) place: &'a mut Place,
    pub(in crate::train) threads: usize,
    /// Whether the transport's clock is virtual.
    pub(in crate::train) simulated: bool,
    /// Publishes the status of the run.
    pub(super) publisher: StatusPublisher,
    /// Speeds of the replicas.
    pub(super) balance: Balance,
    /// Detects silent members before the deadline; `None` on a virtual clock.
    pub(super) watchdog: Option<Watchdog>,
    /// Which member has which rank, where members form pipelines.
    pub(super) team: Option<Team>,
    /// Copies of its own part and of another rank's, of earlier steps.
    pub(super) copies: Copies,
    /// Asks members without a part whether they are reachable.
    pub(super) idle: Idle,
    /// The plan with which the last round before a change was trained, where members hold the whole model.
    round: Option<RoundTaken>,
    /// Folder of its checkpoints.
    pub(super) folder: Option<PathBuf>,
    /// Counts how often the last step was repeated.
    pub(super) repeats: Repeats,
    /// Speeds of the members, if stages are pools.
    pub(super) pools: PoolSpeeds,
    /// In pipelines: number of layers of each stage, while the layers are divided anew.
    pub(super) layers: Vec<u32>,
    /// Chunks received of a state that is not complete yet.
    pub(super) store: ChunkStore,
    /// Records of its steps, if a newcomer follows them.
    pub(super) log: StepLog,
    /// In pipelines: the place that a newcomer would take.
    pub(super) newcomer_place: Option<FuturePlace>,
    /// In pipelines: the spares that can form a further one, while they fetch their parts.
    pub(super) growing: Vec<FutureRank>,
    /// The time since which they do.
    pub(super) grows_since: Nanos,
    /// In pipelines: the parts that this newcomer or spare has followed.
    pub(super) followed: Option<ReplayedParts>,
    /// Whether this spare is ready to be in a further pipeline.
    pub(super) grows: bool,
    /// In pipelines: whether it leaves, and so hands over the part that it holds and takes no other.
    pub(super) departs: bool,
    /// Whether it may wait for the next average before it leaves.
    pub(super) notice: NoticeTime,
    /// Longest time for which members wait for a newcomer's state.
    pub(super) join_wait: Nanos,
    /// The newcomers without which the members continue, after a change that has failed.
    pub(super) given_up: Vec<MemberId>,
    /// Time at which the step in flight began, or else at which the last one ended.
    pub(super) since: Nanos,
    /// What others have reported that cannot be true.
    pub(super) nonsense: Nonsense,
}

impl<'a> Member<'a> {
    /// Creates a member without a team. `simulated` says whether the transport's clock is virtual.
    pub(super) fn new(
        place: &'a mut Place,
        threads: usize,
        simulated: bool,
        watchdog: Option<Watchdog>,
        folder: Option<PathBuf>,
    ) -> Self {
        let since = place.transport().now();
        Self {
            since,
            place,
            threads,
            simulated,
            publisher: StatusPublisher::default(),
            balance: Balance::default(),
            watchdog,
            team: None,
            copies: Copies::default(),
            idle: Idle::default(),
            round: None,
            folder,
            repeats: Repeats::default(),
            pools: PoolSpeeds::default(),
            layers: Vec::new(),
            store: ChunkStore::default(),
            log: StepLog::default(),
            newcomer_place: None,
            growing: Vec::new(),
            grows_since: Nanos::ZERO,
            followed: None,
            grows: false,
            departs: false,
            notice: NoticeTime::default(),
            join_wait: Nanos::MAX,
            given_up: Vec::new(),
            nonsense: Nonsense::default(),
        }
    }
}

impl Member<'_> {
    /// Returns whether this rank sees a reason for a change of members. Called between two steps.
    pub(in crate::train) fn wants_change(&mut self, trainer: &Trainer) -> Result<bool> {
        let wants = self.place.wants_change(self.logs(trainer))? || self.wants_round(trainer);
        let now = self.place.transport().now();
        let wants =
            wants || now >= self.place.pause && (self.can_grow(trainer) || !self.departing().is_empty());
        Ok(wants || !self.idle.check(self.place, self.team.as_ref()).is_empty())
    }

    /// Returns the number of members, this one included.
    pub(super) fn count(&self) -> usize {
        self.place.view().map_or(1, |view| view.members.len())
    }

    /// Returns whether this rank keeps a log of its steps.
    fn logs(&self, trainer: &Trainer) -> Logs {
        match self.log.is_kept() {
            _ if self.makes_newcomers_wait() => Logs::OfSpares,
            _ if !trainer.keeps_averages() => Logs::Never,
            _ if self.team.is_some() && !matches!(self.newcomer_place, Some(Position(_))) => Logs::Never,
            _ if !self.holds_newcomers_part() => Logs::OfOthers,
            true => Logs::Yes,
            false => Logs::No,
        }
    }

    /// Returns whether another member caused an error, so that the remaining ones can continue.
    pub(in crate::train) fn survives(error: &Error) -> bool {
        error.is_interruption()
    }

    /// Agrees with the other members on a change after a step that all have done.
    ///
    /// Errors: a member that is lost meanwhile.
    pub(super) fn agree(&mut self, trainer: &Trainer, leaves: bool) -> Result<Agreement> {
        let working = self.working();
        let silent = self.idle.check(self.place, self.team.as_ref()).to_vec();
        let own = (trainer.steps_done(), trainer.state_bytes(), self.logs(trainer));
        let costs = self.newcomer_place != Some(FuturePlace::Spare);
        let (departing, team) = (self.departing(), self.team.as_ref());
        let (grows, join_wait) = (self.can_grow(trainer), self.join_wait);
        let asks = Asks { leaves, silent: &silent, departing: &departing, team, grows, costs, join_wait };
        self.place.agree((trainer.comm(), &working), &asks, own, &self.spares())
    }

    /// Carries out a change that all members have agreed on; `begun` is the time at which it began. `None` if
    /// the members did not reach a new view.
    ///
    /// Errors: [`Error::Removed`] on a member that leaves.
    pub(super) fn between_steps(
        &mut self,
        (job, last): (&mut Job, &mut LastDone),
        trainer: &mut Trainer,
        (agreed, begun): (Agreed, Nanos),
    ) -> Result<Option<Changed>> {
        let start = start(job, trainer)?;
        match self.place.between_steps(agreed, start) {
            Ok(None) => Ok(None),
            Ok(Some(NextView { view, reason })) => {
                self.repeats = Repeats::default();
                self.go_over((job, last), trainer, view, (begun, reason)).map(Some)
            }
            Err(error) if Self::survives(&error) => self.after_loss((job, last), trainer, &error).map(Some),
            Err(error) => Err(error),
        }
    }

    /// Continues without the lost members. The step in flight is dropped, or in pools resumed.
    ///
    /// Errors: [`Error::Removed`] if this rank must not continue.
    pub(in crate::train) fn after_loss(
        &mut self,
        (job, last): (&mut Job, &mut LastDone),
        trainer: &mut Trainer,
        error: &Error,
    ) -> Result<Changed> {
        // The step in flight is lost as well.
        let begun = self.since;
        let reason = Some(causes(error));
        // Tells the others at once, so that they do not wait for their deadlines.
        let _telling = if job.pipelines.is_some() { self.place.give_up() } else { Vec::new() };
        trainer.comm().abort();
        trainer.drop_step();
        let start = start(job, trainer)?;
        let silent = self.watchdog.as_ref().map_or_else(Vec::new, Watchdog::given_up);
        let view = self.next_view(error, silent, (trainer.steps_done(), Some(start)))?;
        self.go_over((job, last), trainer, view, (begun, reason))
    }

    /// Returns the view on which the members agree after a step has failed on this rank. `step` is the number
    /// of steps done before it.
    ///
    /// Errors: as [`Member::after_loss`].
    pub(super) fn next_view(
        &mut self,
        error: &Error,
        mut silent: Vec<MemberId>,
        (step, start): (u64, Option<Start>),
    ) -> Result<View> {
        let before = self.place.view().cloned();
        let nonsense = nonsense_of(error).and_then(|peer| self.place.name(peer));
        silent.extend(nonsense);
        let again = nonsense.is_none() && self.repeats.may(step);
        let loss = Loss { suspect: suspect(error), silent, again };
        let view = self.place.after_loss(loss, start)?;
        self.repeats.follows(step, before.as_ref(), &view);
        Ok(view)
    }

    /// Returns the ids of the members that take steps, by rank.
    pub(super) fn working(&self) -> Vec<MemberId> {
        let members =
            || self.place.view().iter().flat_map(|view| &view.members).map(|member| member.id).collect();
        self.team.as_ref().map_or_else(members, Team::working)
    }

    /// Brings this rank to the same step as all members of a view. If another member is lost meanwhile,
    /// continues with the next view.
    fn go_over(
        &mut self,
        (job, last): (&mut Job, &mut LastDone),
        trainer: &mut Trainer,
        view: View,
        (begun, reason): (Nanos, Option<String>),
    ) -> Result<Changed> {
        if job.pipelines.is_some() {
            return self.go_over_in_pipelines((job, last), trainer, view, (begun, reason));
        }
        let before = slots(self.place.view());
        let stood = trainer.progress();
        let round = RoundTaken::of(self.round.take(), job, &before, stood.step);
        let mut view = view;
        loop {
            let epoch = view.epoch;
            job.doublings = self.repeats.doublings();
            match self.try_view((&mut *job, &mut *last), trainer, &view, &before) {
                Ok(shared) => {
                    let now = slots(self.place.view());
                    let fresh = |from: &[u32], than: &[u32]| {
                        from.iter().filter(|slot| !than.contains(slot)).map(|&slot| PeerId(slot)).collect()
                    };
                    let went: Vec<PeerId> = fresh(&before, &now);
                    self.balance.begin_anew();
                    // After an average, nothing of the round is lost.
                    let is_open = trainer.agreed_step() < trainer.steps_done() && reason.is_some();
                    let lost: Vec<u32> = went.iter().filter(|_| is_open).map(|peer| peer.0).collect();
                    let round = round.up_to(trainer.steps_done());
                    let lost = round.lost(&lost);
                    self.round = Some(round);
                    return Ok(Changed {
                        epoch,
                        joined: fresh(&now, &before),
                        left: went,
                        names: self.publisher.names.clone(),
                        caught_up: trainer.progress() != stood,
                        lost,
                        repeated: self.repeats.times(stood.step),
                        lost_steps: 0,
                        from_checkpoints: false,
                        pipelines: None,
                        fetching: 0,
                        pools: Vec::new(),
                        rerouted: false,
                        kept_percent: 0,
                        moved: None,
                        members: now.len(),
                        step: trainer.steps_done(),
                        reason,
                        state: shared.state.0,
                        donors: shared.donors,
                        took: trainer.comm().now().saturating_sub(begun),
                    });
                }
                Err(error) if Self::survives(&error) => {
                    trainer.drop_step();
                    let start = start(job, trainer)?;
                    let given_up = std::mem::take(&mut self.given_up);
                    let _telling = self.place.give_up_newcomers(&given_up);
                    view = self.next_view(&error, given_up, (trainer.steps_done(), Some(start)))?;
                }
                Err(error) => return Err(error),
            }
        }
    }

    fn try_view(
        &mut self,
        (job, last): (&mut Job, &mut LastDone),
        trainer: &mut Trainer,
        view: &View,
        before: &[u32],
    ) -> Result<TransferStats> {
        let comm = stoppable(job, self.place.enter(view.clone())?);
        let watch = self.watch_newcomers(job, &comm);
        let done = self.enter_view((job, last), trainer, (view, &comm), before);
        self.given_up = self.end_watch(watch, trainer.state_bytes().shared);
        let done = done.inspect_err(|_| comm.abort())?;
        self.place.membership().settles(view.epoch);
        Ok(done)
    }

    fn enter_view(
        &mut self,
        (job, last): (&mut Job, &mut LastDone),
        trainer: &mut Trainer,
        (view, comm): (&View, &Communicator),
        before: &[u32],
    ) -> Result<TransferStats> {
        let brings = EnteringRank {
            job,
            before: before.to_vec(),
            progress: Some(trainer.progress()),
            last: *last,
            measured: self.balance.measured(),
            speed: None,
        };
        let stood = form_view(view, comm, brings)?;
        self.publisher.names.note(view, stood.names);
        let comm = links::view_communicator(&stood.job, comm.clone(), self.simulated)?;
        // `transfer_state` runs before `carry_over`: the trainer's steps so far belong to the old plan.
        self.log.check(&mut self.place.offered_blobs(), trainer);
        let lent = self.log.lend(&self.place.offered_blobs(), trainer);
        let holds = LocalState::Member(trainer, lent);
        let (shared, taken) = transfer_state(holds, &comm, (job, &stood.exchange), &mut self.store)?;
        if let Some(taken) = taken {
            taken.give(trainer, job)?;
        }
        trainer.catch_up(stood.exchange.progress.step)?;
        trainer.carry_over(&stood.job, comm.clone())?;
        for Report { member, reason } in stood.nonsense {
            self.nonsense.note(member, reason);
        }
        (*job, *last) = (stood.job, stood.last);
        Ok(shared)
    }

    /// Waits until the members admit this newcomer to a view, and receives their state.
    ///
    /// Errors: [`Error::Removed`] if no view has it within `patience`.
    pub(in crate::train) fn come_in(
        &mut self,
        job: &mut Job,
        alone: &Communicator,
        patience: Nanos,
        tell: &mut dyn FnMut(&str),
    ) -> Result<(Trainer, LastDone)> {
        self.place.wait_to_begin();
        let expects = (patience, expected(job)?);
        if job.pipelines.is_some() {
            return self.come_into_pipelines((job, alone), expects, tell);
        }
        let slot = self.place.transport().me().0;
        let speed = measured(job, (alone, slot), self.threads, self.simulated);
        let threads = self.threads;
        let mut follower = (!job.barrier).then(|| Follower::new(Replayer { job, comm: alone, threads }));
        let view = self.place.wait_for_view((expects, &job.stop), follower.as_mut(), tell)?;
        self.put_others_checkpoints_aside(tell)?;
        let followed = follower.and_then(|follower| self.take_followed(follower));
        self.first_place(job, view, speed, followed)
    }

    /// Puts aside the checkpoints of another run, for which this member's folder was used before. Called once
    /// it is a member, before it reads or saves any.
    ///
    /// Errors: [`Error::Io`].
    pub(super) fn put_others_checkpoints_aside(&self, tell: &mut dyn FnMut(&str)) -> Result<()> {
        let Some(folder) = self.folder.as_ref().filter(|_| self.place.membership().holds_another()) else {
            return Ok(());
        };
        if let Some(text) = former_checkpoints::put_checkpoints_aside(folder, None)? {
            tell(&text);
        }
        self.place.membership().holds_no_other()
    }

    /// Returns the state that has been followed. Keeps the chunks received of what is still missing.
    pub(super) fn take_followed(&mut self, follower: Follower<'_>) -> Option<ReplayedParts> {
        let (followed, store) = follower.into_followed();
        self.store = store;
        followed
    }

    /// Receives the state from the members of its first view. If one of them is lost meanwhile, tries again
    /// with the next view.
    fn first_place(
        &mut self,
        job: &mut Job,
        mut view: View,
        speed: Option<Nanos>,
        mut followed: Option<ReplayedParts>,
    ) -> Result<(Trainer, LastDone)> {
        loop {
            let comm = stoppable(job, self.place.enter(view.clone())?);
            let beats = self.watch_newcomers(job, &comm);
            let (before, last) = (Vec::new(), LastDone::at(0));
            let brings = EnteringRank { job, before, progress: None, last, measured: &[], speed };
            let came = form_view(&view, &comm, brings).and_then(|stood| {
                self.publisher.names.note(&view, stood.names);
                let comm = links::view_communicator(&stood.job, comm.clone(), self.simulated)?;
                let holds = LocalState::Newcomer(followed.as_mut());
                let (_, taken) =
                    transfer_state(holds, &comm, (&stood.job, &stood.exchange), &mut self.store)?;
                // Frees the memory of the state that was followed: this rank's trainer needs it.
                followed = None;
                let mut trainer = Trainer::new(&stood.job, comm, self.threads)?;
                if let Some(taken) = taken {
                    taken.give(&mut trainer, &stood.job)?;
                }
                if trainer.steps_done() != stood.exchange.progress.step {
                    // The others have taken local steps since the last average.
                    let reason = "this newcomer joined in the middle of a round of local steps".to_owned();
                    return Err(Error::Removed { reason });
                }
                Ok((stood.job, trainer, stood.last))
            });
            self.end_watch(beats, 0);
            match came {
                Ok((next, trainer, last)) => {
                    self.place.membership().settles(view.epoch);
                    *job = next;
                    return Ok((trainer, last));
                }
                Err(error) if Self::survives(&error) => {
                    comm.abort();
                    view = self.next_view(&error, Vec::new(), (0, None))?;
                    job.doublings = self.repeats.doublings();
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Makes the rank the only one of its run, after it has left. It can then only save its state.
    pub(in crate::train) fn alone(&mut self, job: &mut Job, trainer: &mut Trainer) -> Result<()> {
        let comm = stoppable(job, self.place.alone()?);
        let own = trainer.replica();
        let plan = job.plan.with_replicas(&[farflung_parallel::plan::Replica::Stays(own)])?;
        let next = job.with_plan_after(trainer.steps_done(), plan)?;
        let comm = links::view_communicator(&next, comm, self.simulated)?;
        trainer.carry_over(&next, comm)?;
        *job = next;
        Ok(())
    }
}

/// Returns the hashes of weights and plan with which the next view begins. Each member computes them, because
/// any may be the one that proposes the view: those before it may fall silent meanwhile.
pub(super) fn start(job: &Job, trainer: &Trainer) -> Result<Start> {
    let weights = Digest::new(*trainer.hash()?.as_bytes());
    Ok(Start { weights, plan: job.plan.digest() })
}

/// Returns the approximate bytes of state that a newcomer receives: all parameters of the model, and two
/// optimizer values for each. In pipelines, a newcomer receives only a part of this.
///
/// Errors: a model that cannot be built.
fn expected(job: &Job) -> Result<u64> {
    let elements: usize = needs(job)?.iter().flat_map(std::collections::BTreeMap::values).sum();
    Ok((3 * elements * size_of::<f32>()) as u64)
}

pub(super) fn slots(view: Option<&View>) -> Vec<u32> {
    view.iter().flat_map(|view| &view.members).map(|member| member.slot).collect()
}
