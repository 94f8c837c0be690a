//! Endpoints in one process under virtual time over a declared topology. Real bytes move; nobody sleeps.
//!
//! A conservative event queue: an event (departure, arrival, deadline, fault) fires only when every live rank is
//! blocked, in the order (time, kind, from, to, tag, sequence). Times and results do not depend on how threads
//! interleave.
//!
//! Each rank is one thread. A rank that neither waits nor has dropped its endpoint holds time still for all. Results
//! come by `wait`; awaiting a pending value as a future does not let time pass.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use farflung_base::{Bytes, Nanos, PeerId, Rank, Topology};

use crate::cost::{InFlight, Links};
use crate::endpoint::{Driver, Endpoint, Role, Wake};
use crate::inbox::Inbox;
use crate::transport::{Channel, Tag};
use crate::wire::HEADER_BYTES;
use crate::{DownReason, Frame, Pool};

/// An endpoint of a simulated network.
pub type Simulated = Endpoint<SimulatedDriver>;

/// What goes wrong in a simulated network, and when.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Faults(Vec<(Nanos, Fault)>);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    Crash(PeerId),
    Cut(PeerId, PeerId),
}

/// A point in time for which a fault is to be named.
#[derive(Debug)]
#[must_use = "name a fault"]
pub struct At(Faults, Nanos);

impl Faults {
    /// None.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The next fault happens at `time`.
    pub const fn at(self, time: Nanos) -> At {
        At(self, time)
    }
}

impl At {
    /// The peer ends: its operations fail, and the others learn of it behind the last bytes that it has sent.
    #[must_use]
    pub fn crash(mut self, peer: PeerId) -> Faults {
        self.0.0.push((self.1, Fault::Crash(peer)));
        self.0
    }

    /// What departs between the two from then on is lost, both ways, and neither is told.
    #[must_use]
    pub fn cut(mut self, a: PeerId, b: PeerId) -> Faults {
        self.0.0.push((self.1, Fault::Cut(a, b)));
        self.0
    }
}

/// One endpoint per rank of `topology`, `PeerId(0)` first.
#[must_use]
pub fn cluster(topology: &Topology) -> Vec<Arc<Simulated>> {
    cluster_with(topology, &Faults::new())
}

/// A [`cluster`] in which `faults` happen.
#[must_use]
pub fn cluster_with(topology: &Topology, faults: &Faults) -> Vec<Arc<Simulated>> {
    let n = topology.size();
    let mut queue = BTreeMap::new();
    for (i, &(time, fault)) in faults.0.iter().enumerate() {
        let key = Key { time, kind: Kind::Fault, from: 0, to: 0, tag: LAST, sequence: i as u64 };
        queue.insert(key, Event::Fault(fault));
    }
    let state = State {
        links: Links::new(topology),
        queue,
        now: Nanos::ZERO,
        ranks: vec![Member { clock: Nanos::ZERO, sequence: 0, status: Status::Live, crashed: false }; n],
        live: n,
        cuts: BTreeSet::new(),
    };
    let world = Arc::new(World {
        state: Mutex::new(state),
        bells: (0..n).map(|_| Condvar::new()).collect(),
        inboxes: (0..n).map(|_| Arc::new(Inbox::new(n))).collect(),
    });
    let pool = Pool::new();
    (0..n)
        .map(|me| {
            let driver = SimulatedDriver { me, world: Arc::clone(&world) };
            let inbox = Arc::clone(&world.inboxes[me]);
            Arc::new(Endpoint::new(PeerId(me as u32), driver, inbox, Arc::clone(&pool)))
        })
        .collect()
}

/// The order of events.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Key {
    time: Nanos,
    kind: Kind,
    from: usize,
    to: usize,
    tag: Tag,
    sequence: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Fault,
    Depart,
    Land,
    Arrive,
}

/// Behind every frame that departs with it.
const LAST: Tag = Tag { context: u64::MAX, channel: Channel::Abort, number: u32::MAX };

#[derive(Debug)]
enum Event {
    Fault(Fault),
    Depart(Cargo),
    /// With the time for which it occupies the receiver's downlink.
    Land(Cargo, Nanos),
    Arrive(Cargo),
}

#[derive(Debug)]
enum Cargo {
    Frame(Frame),
    Gone(DownReason),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Status {
    Live,
    Blocked { until: Nanos },
    Woken(Wake),
    Gone,
}

#[derive(Debug, Clone, Copy)]
struct Member {
    clock: Nanos,
    sequence: u64,
    status: Status,
    crashed: bool,
}

struct State {
    links: Links,
    queue: BTreeMap<Key, Event>,
    /// Time of the last event.
    now: Nanos,
    ranks: Vec<Member>,
    /// Ranks that are neither blocked nor gone.
    live: usize,
    cuts: BTreeSet<(usize, usize)>,
}

struct World {
    state: Mutex<State>,
    bells: Vec<Condvar>,
    inboxes: Vec<Arc<Inbox>>,
}

/// One rank's view of the simulated network.
pub struct SimulatedDriver {
    me: usize,
    world: Arc<World>,
}

impl fmt::Debug for SimulatedDriver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Simulated(rank {} at {})", self.me, self.now())
    }
}

impl State {
    fn push(&mut self, from: usize, to: usize, tag: Tag, at: Nanos, cargo: Cargo) {
        let sequence = self.ranks[from].sequence;
        self.ranks[from].sequence += 1;
        let key = Key { time: at, kind: Kind::Depart, from, to, tag, sequence };
        self.queue.insert(key, Event::Depart(cargo));
    }

    fn wake(&mut self, rank: usize, wake: Wake) {
        if matches!(self.ranks[rank].status, Status::Blocked { .. }) {
            self.ranks[rank].status = Status::Woken(wake);
            self.live += 1;
        }
    }

    /// Tells all others, behind everything that was sent before.
    fn part(&mut self, rank: usize, at: Nanos, reason: &DownReason) {
        for to in (0..self.ranks.len()).filter(|&to| to != rank) {
            self.push(rank, to, LAST, at, Cargo::Gone(reason.clone()));
        }
    }
}

impl World {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets events happen until somebody is live again.
    fn fire(&self, state: &mut State) {
        while state.live == 0 {
            let event = state.queue.first_key_value().map(|(key, _)| key.time);
            let until = |member: &Member| match member.status {
                Status::Blocked { until } => Some(until),
                _ => None,
            };
            let Some(deadline) = state.ranks.iter().filter_map(until).min() else { return };
            match event {
                // Everything of one instant happens before anyone looks.
                Some(time) if time <= deadline && time < Nanos::MAX => {
                    state.now = time;
                    while let Some(entry) = state.queue.first_entry().filter(|e| e.key().time == time) {
                        let (key, event) = entry.remove_entry();
                        self.happen(state, key, event);
                    }
                }
                _ => {
                    let wake = if deadline == Nanos::MAX { Wake::Deadlock } else { Wake::Moved };
                    state.now = if wake == Wake::Moved { deadline } else { state.now };
                    for rank in 0..state.ranks.len() {
                        if until(&state.ranks[rank]) == Some(deadline) {
                            state.wake(rank, wake);
                        }
                    }
                }
            }
        }
        for (member, bell) in state.ranks.iter().zip(&self.bells) {
            if matches!(member.status, Status::Woken(_)) {
                bell.notify_all();
            }
        }
    }

    fn happen(&self, state: &mut State, key: Key, event: Event) {
        let Key { time, from, to, .. } = key;
        let (rank, peer) = (|r: usize| Rank(r as u32), |r: usize| PeerId(r as u32));
        match event {
            Event::Depart(cargo) => {
                if state.cuts.contains(&(from.min(to), from.max(to))) {
                    return;
                }
                let size = match &cargo {
                    Cargo::Frame(frame) => (frame.len() + HEADER_BYTES) as u64,
                    Cargo::Gone(_) => 0,
                };
                let flight = state.links.depart(rank(from), rank(to), time, Bytes(size));
                let key = Key { time: flight.head, kind: Kind::Land, ..key };
                state.queue.insert(key, Event::Land(cargo, flight.length));
            }
            Event::Land(cargo, length) => {
                let at = state.links.land(rank(to), InFlight { head: time, length });
                state.queue.insert(Key { time: at, kind: Kind::Arrive, ..key }, Event::Arrive(cargo));
            }
            Event::Arrive(cargo) => {
                match cargo {
                    Cargo::Frame(mut frame) => {
                        frame.arrived = time;
                        self.inboxes[to].deliver(peer(from), key.tag, frame);
                    }
                    Cargo::Gone(reason) => self.inboxes[to].peer_down(peer(from), reason),
                }
                state.wake(to, Wake::Moved);
            }
            Event::Fault(Fault::Cut(a, b)) => {
                state.cuts.insert((a.index().min(b.index()), a.index().max(b.index())));
            }
            Event::Fault(Fault::Crash(peer)) => {
                let rank = peer.index();
                if rank < state.ranks.len() && state.ranks[rank].status != Status::Gone {
                    state.part(rank, time, &DownReason::Crashed);
                    state.ranks[rank].crashed = true;
                    self.inboxes[rank].end();
                    state.wake(rank, Wake::Moved);
                }
            }
        }
    }
}

impl Driver for SimulatedDriver {
    fn submit(&self, to: PeerId, tag: Tag, at: Nanos, frame: Frame) {
        let mut state = self.world.lock();
        if !state.ranks[self.me].crashed {
            state.push(self.me, to.index(), tag, at, Cargo::Frame(frame));
        }
    }
    fn has_room(&self, _: PeerId, _: Tag) -> bool {
        true
    }
    fn taken(&self, _: PeerId, _: Tag, _: usize) {}
    fn now(&self) -> Nanos {
        self.world.lock().ranks[self.me].clock
    }
    fn horizon(&self) -> Nanos {
        self.world.lock().now
    }
    fn advance(&self, by: Nanos) {
        let clock = &mut self.world.lock().ranks[self.me].clock;
        *clock = clock.saturating_add(by);
    }
    fn lift(&self, to: Nanos) {
        let clock = &mut self.world.lock().ranks[self.me].clock;
        *clock = (*clock).max(to);
    }
    fn block(&self, inbox: &Inbox, seen: u64, until: Nanos, _: Role) -> Wake {
        let world = &self.world;
        let mut state = world.lock();
        if inbox.seen() != seen {
            return Wake::Moved;
        }
        if state.ranks[self.me].status == Status::Live {
            state.ranks[self.me].status = Status::Blocked { until };
            state.live -= 1;
            world.fire(&mut state);
        }
        loop {
            match state.ranks[self.me].status {
                Status::Woken(wake) => {
                    state.ranks[self.me].status = Status::Live;
                    return wake;
                }
                Status::Live | Status::Gone => return Wake::Moved,
                Status::Blocked { .. } => {
                    state = world.bells[self.me].wait(state).unwrap_or_else(PoisonError::into_inner);
                }
            }
        }
    }
    fn has_background(&self) -> bool {
        false
    }
    fn close(&self, _: &Inbox) {
        let mut state = self.world.lock();
        let at = state.ranks[self.me].clock.max(state.now);
        if !state.ranks[self.me].crashed {
            state.part(self.me, at, &DownReason::Left);
        }
        if matches!(state.ranks[self.me].status, Status::Live | Status::Woken(_)) {
            state.live -= 1;
        }
        state.ranks[self.me].status = Status::Gone;
        self.world.fire(&mut state);
    }
}
