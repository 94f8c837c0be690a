//! Detection of silent members long before the deadline. If a step takes much longer than those before, a
//! thread pings the other members. A slow member answers, and the step goes on; if a member does not answer,
//! the step is cancelled. This works on real clocks only: a virtual clock stands still while a rank waits, so
//! there only the deadline applies.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use farflung_base::{Nanos, PeerId, Pending};
use farflung_comm::{CommError, Communicator, Transport};
use farflung_parallel::membership::{AdaptiveTimeout, MemberId};

use super::membership_service::MembershipService;
use super::waits::StoppedStep;
use crate::Stop;

/// Least time within which a member must answer a ping; after that it counts as silent. Two round trips around
/// the world. It is longer where two measured round trips are: see [`Place::roll_call`](super::place::Place).
pub(super) const ROLL_CALL: Nanos = Nanos::from_millis(800);
/// Time between two messages of a newcomer that it is there.
const BEAT_INTERVAL: Nanos = Nanos::from_millis(300);
/// Time between two checks of the current step.
const POLL_INTERVAL: Nanos = Nanos::from_millis(100);
/// Minimum time without an answer after which a member is given up, in units of the time to answer a ping.
const SILENCE: u64 = 2;

/// Pings other members.
#[derive(Debug, Clone)]
pub(super) struct Pinger {
    /// Communicator of all connected peers.
    pub(super) comm: Communicator,
    pub(super) membership: Arc<Mutex<MembershipService>>,
    /// Rank in `comm` and id of each member to ping.
    pub(super) others: Vec<(farflung_base::Rank, MemberId)>,
    pub(super) tag: u32,
}

type Sent = Pending<Result<(), CommError>>;

impl Pinger {
    fn membership(&self) -> MutexGuard<'_, MembershipService> {
        self.membership.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts to ping all of them.
    pub(super) fn ping(&self) -> Vec<Sent> {
        if self.others.is_empty() {
            return Vec::new();
        }
        let ping = self.membership().ping(self.comm.now());
        self.others.iter().map(|&(rank, _)| self.comm.start_send(rank, self.tag, ping.clone())).collect()
    }

    /// Returns the members from which no message has arrived since `since`.
    fn silent(&self, since: Nanos) -> Vec<MemberId> {
        let membership = self.membership();
        self.others.iter().map(|(_, id)| *id).filter(|id| !membership.has_heard(id, since)).collect()
    }
}

/// A step that is being watched.
#[derive(Debug, Clone)]
struct Step {
    number: u64,
    /// Communicator of the view's members. Its operations are cancelled if one of them is silent.
    comm: Communicator,
    pinger: Pinger,
    /// Time at which the members are pinged.
    due: Nanos,
    /// Time within which they must answer.
    roll_call: Nanos,
    /// Publishes who waits for members that do not answer.
    stopped: StoppedStep,
    /// Time without an answer after which a member is given up: at least the time limit of a step, so that data
    /// queued on the member's link can leave first.
    silence: Nanos,
    /// In a change of members: what else ends it.
    limit: Option<ChangeLimit>,
    /// Whether this rank is a newcomer, which tells the members that it is there.
    beats: bool,
}

/// What ends a change to a view with newcomers before it is complete.
#[derive(Debug, Clone)]
pub(super) struct ChangeLimit {
    pub(super) newcomers: Vec<MemberId>,
    /// Time up to which the members wait for them.
    pub(super) until: Nanos,
    /// Cancels the change once this member is asked to stop.
    pub(super) stop: Stop,
}

#[derive(Debug, Default)]
struct Watched {
    step: Option<Step>,
    /// Members because of which a step was cancelled, since this was last read.
    given_up: Vec<MemberId>,
    is_over: bool,
}

#[derive(Debug)]
struct Shared {
    transport: Arc<dyn Transport>,
    watched: Mutex<Watched>,
    bell: Condvar,
}

/// Watches a rank's steps from a thread, until it is dropped.
#[derive(Debug)]
pub(super) struct Watchdog {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    patience: AdaptiveTimeout,
    steps: u64,
}

/// Start time of a step that is being watched.
pub(super) struct StepStart(Nanos);

impl StepStart {
    /// Returns the time of the transport's clock.
    pub(super) const fn at(&self) -> Nanos {
        self.0
    }
}

impl Watchdog {
    /// Starts the thread. `deadline` is the time after which operations of a step fail.
    pub(super) fn new(transport: &Arc<dyn Transport>, deadline: Nanos) -> Self {
        let shared = Arc::new(Shared {
            transport: Arc::clone(transport),
            watched: Mutex::default(),
            bell: Condvar::new(),
        });
        let watched = Arc::clone(&shared);
        let thread = thread::Builder::new().name("watchdog".to_owned()).spawn(move || watched.watch());
        if let Err(error) = &thread {
            tracing::warn!(%error, "members that do not answer will only be noticed after the deadline");
        }
        let patience = AdaptiveTimeout::new(ROLL_CALL, deadline);
        Self { shared, thread: thread.ok(), patience, steps: 0 }
    }

    /// Starts to watch a step of the members of `comm`, which must answer pings within `roll_call`. `stopped`
    /// publishes who does not answer.
    pub(super) fn begin(
        &mut self,
        comm: &Communicator,
        caller: Pinger,
        roll_call: Nanos,
        stopped: StoppedStep,
    ) -> StepStart {
        let now = self.shared.transport.now();
        let limit = self.patience.limit().max(roll_call);
        let (due, silence) = (now.saturating_add(limit), limit.max(Nanos(SILENCE * roll_call.0)));
        let (comm, limit, beats) = (comm.clone(), None, false);
        self.watch(
            now,
            Step { number: 0, comm, pinger: caller, due, roll_call, stopped, silence, limit, beats },
        )
    }

    /// Starts to watch a change of the members of `comm` to a view with newcomers, which `caller` pings: they
    /// must be heard within `roll_call`. `stopped` publishes who is not.
    pub(super) fn begin_change(
        &mut self,
        comm: &Communicator,
        caller: Pinger,
        (roll_call, stopped): (Nanos, StoppedStep),
        limit: ChangeLimit,
    ) -> StepStart {
        let now = self.shared.transport.now();
        let (comm, due) = (comm.clone(), now);
        let (silence, limit, beats) = (Nanos(SILENCE * roll_call.0), Some(limit), false);
        self.watch(
            now,
            Step { number: 0, comm, pinger: caller, due, roll_call, stopped, silence, limit, beats },
        )
    }

    /// Starts to ping members again and again, without waiting for answers, so that they hear from this
    /// newcomer while it enters the view of `comm`.
    pub(super) fn begin_beats(
        &mut self,
        comm: &Communicator,
        caller: Pinger,
        stopped: StoppedStep,
    ) -> StepStart {
        let now = self.shared.transport.now();
        let (comm, silence, limit) = (comm.clone(), Nanos::MAX, None);
        let (due, roll_call) = (now, ROLL_CALL);
        self.watch(
            now,
            Step { number: 0, comm, pinger: caller, due, roll_call, stopped, silence, limit, beats: true },
        )
    }

    /// Gives a step that begins `now` the next number, and hands it to the thread.
    fn watch(&mut self, now: Nanos, step: Step) -> StepStart {
        self.steps += 1;
        self.shared.set(Some(Step { number: self.steps, ..step }));
        StepStart(now)
    }

    /// Stops watching a step. `done` tells whether it succeeded; if so, its time counts for later limits.
    pub(super) fn end(&mut self, StepStart(at): StepStart, done: bool) {
        self.shared.set(None);
        if done {
            self.patience.observe(self.shared.transport.now().saturating_sub(at));
        }
    }

    /// Returns the members because of which steps were cancelled since the last call.
    pub(super) fn given_up(&self) -> Vec<MemberId> {
        std::mem::take(&mut self.shared.watched().given_up)
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.shared.watched().is_over = true;
        self.shared.bell.notify_all();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn watched(&self) -> MutexGuard<'_, Watched> {
        self.watched.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set(&self, step: Option<Step>) {
        // The thread polls, so that short steps need not wake it.
        self.watched().step = step;
    }

    /// Waits for `time`. Returns false if the watchdog is being dropped.
    fn pause(&self, time: Nanos) -> bool {
        let until = self.transport.now().saturating_add(time);
        let mut watched = self.watched();
        loop {
            let left = until.saturating_sub(self.transport.now());
            if watched.is_over || left == Nanos::ZERO {
                return !watched.is_over;
            }
            let waited = self.bell.wait_timeout(watched, Duration::from(left));
            (watched, _) = waited.unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Returns the current step, if it takes too long.
    fn late(&self) -> Option<Step> {
        let watched = self.watched();
        watched.step.as_ref().filter(|step| step.due <= self.transport.now()).cloned()
    }

    fn goes_on(&self, step: &Step) -> bool {
        self.watched().goes_on(step)
    }

    /// Returns the newcomers of a change that has reached its limit.
    fn beyond_limit(&self, step: &Step) -> Option<Vec<MemberId>> {
        let limit = step.limit.as_ref()?;
        let ends = limit.stop.requested().is_some() || self.transport.now() >= limit.until;
        ends.then(|| limit.newcomers.clone())
    }

    /// Waits until the pinged members must have answered, or until the step is over or has reached its limit.
    /// Returns false if the watchdog is being dropped.
    fn await_answers(&self, step: &Step) -> bool {
        let until = self.transport.now().saturating_add(step.roll_call);
        loop {
            let left = until.saturating_sub(self.transport.now());
            if left == Nanos::ZERO || !self.goes_on(step) || self.beyond_limit(step).is_some() {
                return true;
            }
            if !self.pause(left.min(POLL_INTERVAL)) {
                return false;
            }
        }
    }

    /// Publishes which members do not answer, unless the step is over.
    fn publish(&self, step: &Step, silent: &[MemberId]) {
        // With the lock held, the step cannot end, after which the rank publishes a newer status.
        let watched = self.watched();
        if watched.goes_on(step) {
            step.stopped.publish(silent);
        }
    }

    fn watch(&self) {
        while self.pause(POLL_INTERVAL) {
            let Some(step) = self.late() else { continue };
            if step.beats {
                let _beating = step.pinger.ping();
                if !self.pause(BEAT_INTERVAL) {
                    return;
                }
                continue;
            }
            let Some(silent) = self.ends(&step) else { continue };
            let mut watched = self.watched();
            // With the lock held, the step cannot end and another one begin: that one would be cancelled by
            // mistake.
            if watched.goes_on(&step) {
                step.comm.abort();
                watched.given_up = silent;
                watched.step = None;
            }
        }
    }

    /// Decides whether to cancel a step: if members are silent, or if there is a new outcome about members.
    /// Returns the silent members; `None` if the step goes on or is over.
    fn ends(&self, step: &Step) -> Option<Vec<MemberId>> {
        let begun = self.transport.now();
        let mut silent: Option<Vec<MemberId>> = None;
        loop {
            let since = self.transport.now();
            let _asking = step.pinger.ping();
            if !self.await_answers(step) || !self.goes_on(step) {
                return None;
            }
            if let Some(newcomers) = self.beyond_limit(step) {
                return Some(newcomers);
            }
            if step.pinger.membership().has_outcome() {
                return Some(Vec::new());
            }
            let quiet = step.pinger.silent(since);
            let still = |silent: Vec<MemberId>| silent.into_iter().filter(|id| quiet.contains(id)).collect();
            let silent_before = silent.is_some();
            let left = silent.take().map_or_else(|| quiet.clone(), still);
            if left.is_empty() {
                // All members answer. A member may still fall silent, so the step stays watched.
                if silent_before {
                    self.publish(step, &left);
                }
                return None;
            }
            self.publish(step, &left);
            if self.transport.now().saturating_sub(begun) >= step.silence {
                for member in &left {
                    tracing::warn!(%member, "a member does not answer: the step is stopped");
                }
                return Some(left);
            }
            silent = Some(left);
        }
    }
}

impl Watched {
    fn goes_on(&self, step: &Step) -> bool {
        self.step.as_ref().is_some_and(|now| now.number == step.number)
    }
}

/// Returns the rank among `peers` of each of `others` that is there, with its id.
pub(super) fn numbered(
    peers: &[super::arrivals::Newcomer],
    others: &[(PeerId, MemberId)],
) -> Vec<(farflung_base::Rank, MemberId)> {
    let rank = |peer: PeerId| peers.iter().position(|p| p.peer == peer);
    let number = |&(peer, id): &(PeerId, MemberId)| Some((farflung_base::Rank(rank(peer)? as u32), id));
    others.iter().filter_map(number).collect()
}
