//! Finds out that another member is silent long before the deadline: where a step takes much longer than
//! those before, the others are asked whether they are there. A slow member answers, and is waited for; where
//! one does not, the step is ended. Only real clocks go on while a rank waits: on the virtual clock the
//! deadline alone counts.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use farflung_base::{Nanos, PeerId, Pending};
use farflung_comm::{CommError, Communicator, Transport};
use farflung_parallel::membership::{MemberId, Patience};

use super::decide::ROLL_CALL;
use super::keeper::Keeper;

/// Between two looks at the step under way.
const LOOK: Nanos = Nanos::from_millis(100);
/// How long a member says nothing, at least, before it is given up.
const SILENCE: Nanos = Nanos(2 * ROLL_CALL.0);

/// Asks other members whether they are there.
#[derive(Debug, Clone)]
pub(super) struct Caller {
    /// Among all that are connected.
    pub(super) comm: Communicator,
    pub(super) keeper: Arc<Mutex<Keeper>>,
    /// Number in `comm`, and name.
    pub(super) others: Vec<(farflung_base::Rank, MemberId)>,
    pub(super) tag: u32,
}

type Sent = Pending<Result<(), CommError>>;

impl Caller {
    fn keeper(&self) -> MutexGuard<'_, Keeper> {
        self.keeper.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Asks them all.
    pub(super) fn call(&self) -> Vec<Sent> {
        let ping = self.keeper().ping();
        self.others.iter().map(|&(rank, _)| self.comm.start_send(rank, self.tag, ping.clone())).collect()
    }

    /// Those that have said nothing since.
    fn silent(&self, since: Nanos) -> Vec<MemberId> {
        let keeper = self.keeper();
        self.others.iter().map(|(_, id)| *id).filter(|id| !keeper.has_heard(id, since)).collect()
    }
}

/// A step that is waited for.
#[derive(Debug, Clone)]
struct Step {
    number: u64,
    /// The members of the view, whose operations end where one of them is silent.
    comm: Communicator,
    caller: Caller,
    /// When it is time to ask.
    due: Nanos,
    /// How long a member says nothing before it is given up: as long as a step takes, in which whatever fills
    /// its line has left.
    silence: Nanos,
}

#[derive(Debug, Default)]
struct Watched {
    step: Option<Step>,
    /// Members for whom a step was ended, since this was last asked.
    given_up: Vec<MemberId>,
    is_over: bool,
}

#[derive(Debug)]
struct Shared {
    transport: Arc<dyn Transport>,
    watched: Mutex<Watched>,
    bell: Condvar,
}

/// Watches a rank's steps, as long as it lives.
#[derive(Debug)]
pub(super) struct Watchman {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    patience: Patience,
    steps: u64,
}

/// A step begins to be watched, and when it began.
pub(super) struct Begun(Nanos);

impl Watchman {
    /// For steps whose operations end after `deadline` at the latest.
    pub(super) fn new(transport: &Arc<dyn Transport>, deadline: Nanos) -> Self {
        let shared = Arc::new(Shared {
            transport: Arc::clone(transport),
            watched: Mutex::default(),
            bell: Condvar::new(),
        });
        let watched = Arc::clone(&shared);
        let thread = thread::Builder::new().name("watchman".to_owned()).spawn(move || watched.watch());
        if let Err(error) = &thread {
            tracing::warn!(%error, "silent members are noticed after the deadline only");
        }
        let patience = Patience::new(ROLL_CALL, deadline);
        Self { shared, thread: thread.ok(), patience, steps: 0 }
    }

    /// A step begins among the members of `comm`.
    pub(super) fn begin(&mut self, comm: &Communicator, caller: Caller) -> Begun {
        let now = self.shared.transport.now();
        self.steps += 1;
        let limit = self.patience.limit();
        let (due, silence) = (now.saturating_add(limit), limit.max(SILENCE));
        self.shared.set(Some(Step { number: self.steps, comm: comm.clone(), caller, due, silence }));
        Begun(now)
    }

    /// It is over, one way or another.
    pub(super) fn end(&mut self, Begun(at): Begun, done: bool) {
        self.shared.set(None);
        if done {
            self.patience.observe(self.shared.transport.now().saturating_sub(at));
        }
    }

    /// Members for whom steps were ended since this was last asked.
    pub(super) fn given_up(&self) -> Vec<MemberId> {
        std::mem::take(&mut self.shared.watched().given_up)
    }
}

impl Drop for Watchman {
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
        // The thread looks by itself: short steps need not wake it.
        self.watched().step = step;
    }

    /// Waits for so long. Whether the watchman goes on.
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

    /// The step under way, if it takes too long.
    fn late(&self) -> Option<Step> {
        let watched = self.watched();
        watched.step.as_ref().filter(|step| step.due <= self.transport.now()).cloned()
    }

    fn goes_on(&self, step: &Step) -> bool {
        self.watched().goes_on(step)
    }

    fn watch(&self) {
        while self.pause(LOOK) {
            let Some(step) = self.late() else { continue };
            let Some(silent) = self.ends(&step) else { continue };
            let mut watched = self.watched();
            // The step cannot end while this is held: the next one would be ended in its place.
            if watched.goes_on(&step) {
                step.comm.abort();
                watched.given_up = silent;
                watched.step = None;
            }
        }
    }

    /// Whether a step cannot be done: members are silent, or others have been decided on. Gives the silent
    /// ones.
    fn ends(&self, step: &Step) -> Option<Vec<MemberId>> {
        let begun = self.transport.now();
        let mut silent: Option<Vec<MemberId>> = None;
        loop {
            let since = self.transport.now();
            let _asking = step.caller.call();
            if !self.pause(ROLL_CALL) || !self.goes_on(step) {
                return None;
            }
            if step.caller.keeper().has_outcome() {
                return Some(Vec::new());
            }
            let quiet = step.caller.silent(since);
            let still = |silent: Vec<MemberId>| silent.into_iter().filter(|id| quiet.contains(id)).collect();
            let left = silent.take().map_or_else(|| quiet.clone(), still);
            if left.is_empty() {
                // All are there. One may still fall silent.
                return None;
            }
            if self.transport.now().saturating_sub(begun) >= step.silence {
                for member in &left {
                    tracing::warn!(%member, "a member does not answer: the step is ended");
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

/// The peers among which one calls, by their numbers.
pub(super) fn numbered(
    peers: &[super::arrivals::Newcomer],
    others: &[(PeerId, MemberId)],
) -> Vec<(farflung_base::Rank, MemberId)> {
    let rank = |peer: PeerId| peers.iter().position(|p| p.peer == peer);
    let number = |&(peer, id): &(PeerId, MemberId)| Some((farflung_base::Rank(rank(peer)? as u32), id));
    others.iter().filter_map(number).collect()
}
