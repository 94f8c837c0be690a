//! The event queue of a simulated network: what happens in which order, and what may happen while some ranks still run.
//!
//! A *strict* queue lets an event happen only when every rank is blocked. That is right, but ranks that really compute
//! take turns as soon as their clocks differ by a nanosecond. This queue also lets an event happen when nothing that
//! the running ranks may still do can come before it. Times and bits are those of the strict queue:
//!
//! 1. What a rank does is a function of its *instants*: when it is woken, and what has arrived by then. Operations are
//!    clocked by the frames that they take, and it is not told anything while it runs.
//! 2. An event belongs to one rank and touches nothing of any other: a departure its sender's uplink, a landing its
//!    receiver's downlink, an arrival, a deadline and a crash the rank itself. So events of different ranks commute,
//!    and those of one rank have to happen in the order of their keys.
//! 3. A running rank `q` causes nothing before its *floor*: the least of its clock (what it starts), the first deadline
//!    of what it has started, and the first arrival that is kept back because it runs (from which what it has started
//!    goes on). What it causes reaches rank `r` over links alone, hence not before its floor plus the *distance* from
//!    `q` to `r`: the least sum of latencies on any way there, and for `r = q` round any cycle.
//! 4. The *bound* of `r` is the least such sum over all running ranks. An event of `r` before it may happen when all
//!    earlier ones have been looked at: no running rank can put one before it, and neither can an event that was
//!    passed over at time `t` at rank `p`. That one was passed over because of a running rank `q` with
//!    `floor(q) + distance(q, p) <= t`, so that `t + distance(p, r) >= floor(q) + distance(q, r) >= bound(r)`. A
//!    departure of a rank that runs must lie before that rank's floor, too.
//! 5. Since distances are positive, everything that arrives at `r` in one instant is known before any of it happens, and
//!    arrives together, as in the strict queue. Where a latency is zero two ranks can wake each other again and again
//!    within one instant, and who sees what in which round is the strict queue's to say: there the bound is zero while
//!    anyone runs.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use farflung_base::{Bytes, Nanos, PeerId, Rank, Topology};

use super::faults::{Fault, Faults};
use super::recording::{Happening, Reached};
use crate::cost::{InFlight, Links};
use crate::endpoint::Wake;
use crate::inbox::Inbox;
use crate::transport::{Channel, Tag};
use crate::wire::HEADER_BYTES;
use crate::{DownReason, Frame, WireError};

/// The order of events.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Key {
    time: Nanos,
    kind: Kind,
    from: usize,
    /// Of what the sender has sent: what departs at one time goes out in the order in which it was sent.
    sequence: u64,
    to: usize,
    tag: Tag,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Crash,
    Depart,
    Land,
    Arrive,
}

/// Behind every frame that departs with it.
const LAST: Tag = Tag { context: u64::MAX, channel: Channel::Abort, number: u32::MAX };

#[derive(Debug)]
enum Event {
    Crash,
    Depart(Cargo),
    Land(Cargo, InFlight),
    Arrive(Cargo),
}

#[derive(Debug)]
enum Cargo {
    Frame(Frame),
    Gone(DownReason),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Status {
    Running,
    Blocked {
        until: Nanos,
    },
    /// Running as soon as its thread looks.
    Woken(Wake),
    Gone,
}

#[derive(Debug, Clone, Copy)]
struct Member {
    clock: Nanos,
    /// Its last instant.
    now: Nanos,
    /// While it runs: nothing of what it causes departs before.
    floor: Nanos,
    sequence: u64,
    status: Status,
    crashed: bool,
}

impl Member {
    const fn runs(&self) -> bool {
        matches!(self.status, Status::Running | Status::Woken(_))
    }
}

/// How early one rank can hear of another; none where the queue has to be strict.
pub(super) type Distances = Option<Vec<Vec<Nanos>>>;

/// The least sum of latencies on any way from one rank to another.
pub(super) fn distances(topology: &Topology) -> Distances {
    let n = topology.size();
    let latency = |a: usize, b: usize| {
        if a == b { Nanos::MAX } else { topology.link(Rank(a as u32), Rank(b as u32)).latency }
    };
    let mut all: Vec<Vec<Nanos>> = (0..n).map(|a| (0..n).map(|b| latency(a, b)).collect()).collect();
    for via in 0..n {
        for a in 0..n {
            for b in 0..n {
                all[a][b] = all[a][b].min(all[a][via].saturating_add(all[via][b]));
            }
        }
    }
    all.iter().flatten().all(|&d| d > Nanos::ZERO).then_some(all)
}

struct State {
    links: Links,
    queue: BTreeMap<Key, Event>,
    ranks: Vec<Member>,
    /// By sender and receiver.
    wires: Vec<Wire>,
    /// Frames that are still to be spoilt: from when on, from whom to whom.
    corruptions: Vec<(Nanos, usize, usize)>,
    /// Senders and receivers between whom nothing passes any more, because something spoilt was sent or has come back.
    /// Each way is its sender's own, as everything is on which its departures depend.
    broken: BTreeSet<(usize, usize)>,
    /// What has reached the ranks, where that is recorded.
    record: Option<Vec<Happening>>,
}

/// What has gone from one rank to another: nothing overtakes.
#[derive(Debug, Clone, Copy, Default)]
struct Wire {
    frames: u64,
    head: Nanos,
    tail: Nanos,
}

/// All endpoints of a simulated network.
pub(super) struct World {
    faults: Faults,
    distances: Distances,
    state: Mutex<State>,
    bells: Vec<Condvar>,
    pub(super) inboxes: Vec<Arc<Inbox>>,
}

impl State {
    fn push(&mut self, from: usize, to: usize, tag: Tag, at: Nanos, cargo: Cargo) {
        let sequence = self.ranks[from].sequence;
        self.ranks[from].sequence += 1;
        let key = Key { time: at, kind: Kind::Depart, from, to, tag, sequence };
        self.queue.insert(key, Event::Depart(cargo));
    }

    /// Wakes a rank that is blocked; returns it then.
    fn wake(&mut self, rank: usize, at: Nanos, wake: Wake) -> Option<usize> {
        let member = &mut self.ranks[rank];
        if !matches!(member.status, Status::Blocked { .. }) {
            return None;
        }
        member.status = Status::Woken(wake);
        member.now = member.now.max(at);
        member.floor = member.now;
        Some(rank)
    }

    /// Tells all others, behind everything that was sent before.
    fn part(&mut self, rank: usize, at: Nanos, reason: &DownReason) {
        for to in (0..self.ranks.len()).filter(|&to| to != rank) {
            self.push(rank, to, LAST, at, Cargo::Gone(reason.clone()));
        }
    }

    /// The last instant of any rank.
    fn latest(&self) -> Nanos {
        self.ranks.iter().map(|member| member.now).max().unwrap_or_default()
    }

    fn deadline(&self, rank: usize) -> Option<Nanos> {
        match self.ranks[rank].status {
            Status::Blocked { until } => Some(until),
            _ => None,
        }
    }

    /// Whether this event may happen now, where no earlier one of its rank may come any more before `bounds`.
    fn may_happen(&self, key: &Key, bounds: &[Nanos]) -> bool {
        let rank = if key.kind == Kind::Depart { key.from } else { key.to };
        let member = &self.ranks[rank];
        if member.status == Status::Gone {
            return true;
        }
        let in_turn = match key.kind {
            Kind::Land => true,
            Kind::Depart => !member.runs() || key.time < member.floor,
            // What arrives in the same instant arrives before anyone looks.
            Kind::Crash | Kind::Arrive => match member.status {
                Status::Woken(_) => member.now == key.time,
                _ => !member.runs(),
            },
        };
        in_turn && key.time < bounds[rank]
    }
}

impl World {
    pub(super) fn new(topology: &Topology, faults: &Faults, distances: Distances) -> Self {
        let n = topology.size();
        let mut queue = BTreeMap::new();
        let mut corruptions = Vec::new();
        for (i, (time, fault)) in faults.iter().enumerate() {
            match fault {
                Fault::Crash(peer) if peer.index() < n => {
                    let (from, to, sequence) = (peer.index(), peer.index(), i as u64);
                    queue
                        .insert(Key { time, kind: Kind::Crash, from, to, tag: LAST, sequence }, Event::Crash);
                }
                Fault::Corrupt(from, to) => corruptions.push((time, from.index(), to.index())),
                _ => {}
            }
        }
        let zero = Nanos::ZERO;
        let member = Member {
            clock: zero,
            now: zero,
            floor: zero,
            sequence: 0,
            status: Status::Running,
            crashed: false,
        };
        Self {
            faults: faults.clone(),
            distances,
            state: Mutex::new(State {
                links: Links::new(topology),
                queue,
                ranks: vec![member; n],
                wires: vec![Wire::default(); n * n],
                corruptions,
                broken: BTreeSet::new(),
                record: None,
            }),
            bells: (0..n).map(|_| Condvar::new()).collect(),
            inboxes: (0..n).map(|_| Arc::new(Inbox::new(n))).collect(),
        }
    }

    /// From now on what reaches the ranks is recorded.
    pub(super) fn record(&self) {
        self.lock().record = Some(Vec::new());
    }

    /// What was recorded.
    pub(super) fn recorded(&self) -> Vec<Happening> {
        self.lock().record.take().unwrap_or_default()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A rank's clock.
    pub(super) fn clock(&self, rank: usize) -> Nanos {
        self.lock().ranks[rank].clock
    }

    /// A rank's last instant.
    pub(super) fn instant(&self, rank: usize) -> Nanos {
        self.lock().ranks[rank].now
    }

    /// Takes a frame that departs at `at`.
    pub(super) fn submit(&self, from: usize, to: usize, tag: Tag, at: Nanos, frame: Frame) {
        let mut state = self.lock();
        let member = state.ranks[from];
        if !member.crashed {
            // The others were promised that nothing departs before the floor, and of a blocked rank nothing at all: what
            // a thread from outside sends on its behalf is in nobody's past.
            let earliest = if member.runs() { member.floor } else { state.latest() };
            let at = self.faults.thaw(PeerId(from as u32), at.max(earliest));
            state.push(from, to, tag, at, Cargo::Frame(frame));
        }
    }

    /// Moves a running rank's clock. What it has started does nothing by itself before `idle`.
    pub(super) fn set_clock(&self, rank: usize, idle: Nanos, clock: impl FnOnce(Nanos) -> Nanos) {
        let mut state = self.lock();
        let member = &mut state.ranks[rank];
        member.clock = clock(member.clock);
        member.floor = member.clock.min(idle).max(member.now);
        self.fire(&mut state);
    }

    /// Blocks a rank until something arrives, or `until`. `moved` says whether something has already.
    pub(super) fn block(&self, rank: usize, until: Nanos, moved: impl FnOnce() -> bool) -> Wake {
        let mut state = self.lock();
        if moved() {
            return Wake::Moved;
        }
        if state.ranks[rank].status == Status::Running {
            let until = self.faults.thaw(PeerId(rank as u32), until);
            state.ranks[rank].status = Status::Blocked { until };
            self.fire(&mut state);
        }
        loop {
            match state.ranks[rank].status {
                Status::Woken(wake) => {
                    state.ranks[rank].status = Status::Running;
                    return wake;
                }
                Status::Running | Status::Gone => return Wake::Moved,
                Status::Blocked { .. } => {
                    state = self.bells[rank].wait(state).unwrap_or_else(PoisonError::into_inner);
                }
            }
        }
    }

    /// Makes a blocked rank look about, from outside of the network's own time.
    pub(super) fn rouse(&self, rank: usize) {
        let mut state = self.lock();
        let at = state.latest();
        if state.wake(rank, at, Wake::Moved).is_some() {
            self.bells[rank].notify_all();
        }
    }

    /// A rank leaves.
    pub(super) fn leave(&self, rank: usize) {
        let mut state = self.lock();
        let at = state.ranks[rank].clock.max(state.ranks[rank].now);
        if !state.ranks[rank].crashed {
            state.part(rank, at, &DownReason::Left);
        }
        state.ranks[rank].status = Status::Gone;
        self.fire(&mut state);
    }

    /// Nothing that `rank` causes from `time` on can come before the narrowed bounds.
    fn narrow(&self, bounds: &mut [Nanos], rank: usize, time: Nanos) {
        for (to, bound) in bounds.iter_mut().enumerate() {
            let first = match &self.distances {
                Some(distances) => time.saturating_add(distances[rank][to]),
                None => Nanos::ZERO,
            };
            *bound = first.min(*bound);
        }
    }

    /// Lets everything happen that may.
    fn fire(&self, state: &mut State) {
        let ranks = 0..state.ranks.len();
        if !ranks.clone().any(|rank| state.deadline(rank).is_some()) {
            return;
        }
        let mut bounds = vec![Nanos::MAX; ranks.len()];
        for rank in ranks.clone().filter(|&rank| state.ranks[rank].runs()) {
            self.narrow(&mut bounds, rank, state.ranks[rank].floor);
        }
        // Events up to here have happened or are kept back.
        let mut passed = Bound::Unbounded;
        loop {
            let limit = bounds.iter().copied().max().unwrap_or_default();
            let next = state.queue.range((passed, Bound::Unbounded)).next().map(|(key, _)| key.time);
            let event = next.filter(|&time| time < limit);
            let deadline = |rank: &usize| state.deadline(*rank).filter(|&time| time < bounds[*rank]);
            let timer = ranks.clone().filter_map(|rank| deadline(&rank)).min();
            let (time, woken) = match (event, timer) {
                (Some(time), timer) if timer.is_none_or(|timer| time <= timer) => {
                    (time, self.instant_of(state, time, &mut passed, &mut bounds))
                }
                (_, Some(time)) => {
                    let late: Vec<_> = ranks.clone().filter(|rank| deadline(rank) == Some(time)).collect();
                    for &rank in &late {
                        state.wake(rank, time, Wake::Moved);
                    }
                    (time, late)
                }
                _ => break,
            };
            for rank in woken {
                self.narrow(&mut bounds, rank, time);
            }
        }
        if !state.ranks.iter().any(Member::runs) {
            // Only ranks without a deadline are left, and nothing is on its way.
            for rank in ranks.clone() {
                state.wake(rank, Nanos::ZERO, Wake::Deadlock);
            }
        }
        for (member, bell) in state.ranks.iter().zip(&self.bells) {
            if matches!(member.status, Status::Woken(_)) {
                bell.notify_all();
            }
        }
    }

    /// The events of one instant: those that may happen do. Returns whom they wake.
    fn instant_of(
        &self,
        state: &mut State,
        time: Nanos,
        passed: &mut Bound<Key>,
        bounds: &mut [Nanos],
    ) -> Vec<usize> {
        let mut woken = Vec::new();
        loop {
            let next = state.queue.range((*passed, Bound::Unbounded)).next().map(|(key, _)| *key);
            let Some(key) = next.filter(|key| key.time == time) else { return woken };
            if state.may_happen(&key, bounds) {
                let event = state.queue.remove(&key).expect("it was seen a moment ago");
                woken.extend(self.happen(state, key, event));
                continue;
            }
            *passed = Bound::Excluded(key);
            if matches!(key.kind, Kind::Crash | Kind::Arrive) {
                let member = &mut state.ranks[key.to];
                if member.runs() {
                    member.floor = member.floor.min(time);
                    self.narrow(bounds, key.to, time);
                }
            }
        }
    }

    /// Returns the rank that it wakes.
    fn happen(&self, state: &mut State, key: Key, event: Event) -> Option<usize> {
        let Key { time, from, to, .. } = key;
        let (rank, peer) = (|r: usize| Rank(r as u32), |r: usize| PeerId(r as u32));
        match event {
            Event::Depart(mut cargo) => {
                let size = match &cargo {
                    // Nothing leaves a crashed rank but the news.
                    Cargo::Frame(_) if state.ranks[from].crashed => return None,
                    Cargo::Frame(_) if state.broken.contains(&(from, to)) => return None,
                    Cargo::Frame(frame) => (frame.len() + HEADER_BYTES) as u64,
                    Cargo::Gone(_) => 0,
                };
                if self.faults.cuts(time, peer(from), peer(to)) {
                    return None;
                }
                let spoilt = |&(since, a, b): &(Nanos, usize, usize)| time >= since && (a, b) == (from, to);
                if let Some(at) = state.corruptions.iter().position(spoilt) {
                    state.corruptions.remove(at);
                    state.broken.insert((from, to));
                    cargo = Cargo::Gone(DownReason::Protocol(WireError::Checksum));
                }
                let flight = state.links.depart(rank(from), rank(to), time, Bytes(size));
                let wire = &mut state.wires[from * self.bells.len() + to];
                let late = self.faults.chances().delay(from, to, wire.frames);
                wire.frames += 1;
                wire.head = wire.head.max(flight.head.saturating_add(late));
                wire.tail = wire.tail.max(flight.tail.saturating_add(late));
                let flight = InFlight { head: wire.head, tail: wire.tail, ..flight };
                let key = Key { time: flight.head, kind: Kind::Land, ..key };
                state.queue.insert(key, Event::Land(cargo, flight));
                None
            }
            Event::Land(cargo, flight) => {
                let at = self.faults.thaw(peer(to), state.links.land(rank(to), flight));
                state.queue.insert(Key { time: at, kind: Kind::Arrive, ..key }, Event::Arrive(cargo));
                None
            }
            Event::Arrive(cargo) => {
                // Who has left sees nothing, at whatever time others get round to that.
                if let Some(record) = &mut state.record
                    && state.ranks[to].status != Status::Gone
                {
                    record.push(match &cargo {
                        Cargo::Frame(frame) => {
                            Happening::frame(time, from, key.sequence, to, key.tag, frame.bytes())
                        }
                        Cargo::Gone(_) => Happening::bare(time, from, key.sequence, to, Reached::Gone),
                    });
                }
                match cargo {
                    Cargo::Frame(mut frame) => {
                        frame.arrived = time;
                        self.inboxes[to].deliver(peer(from), key.tag, frame);
                    }
                    Cargo::Gone(reason) => {
                        let there = state.ranks[to].status != Status::Gone;
                        if there && matches!(reason, DownReason::Protocol(_)) {
                            // The receiver hangs up.
                            let at = time.saturating_add(Nanos(1));
                            state.push(to, from, LAST, at, Cargo::Gone(DownReason::Ended));
                            state.broken.insert((to, from));
                        }
                        self.inboxes[to].peer_down(peer(from), reason);
                    }
                }
                state.wake(to, time, Wake::Moved)
            }
            Event::Crash if state.ranks[to].status == Status::Gone => None,
            Event::Crash => {
                if let Some(record) = &mut state.record {
                    record.push(Happening::bare(time, from, key.sequence, to, Reached::Crash));
                }
                state.part(to, time, &DownReason::Crashed);
                state.ranks[to].crashed = true;
                self.inboxes[to].end();
                state.wake(to, time, Wake::Moved)
            }
        }
    }
}
