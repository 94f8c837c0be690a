//! The event queue of a simulated network: what happens in which order, and what may happen while some ranks
//! still run.
//!
//! A *strict* queue lets an event happen only when every rank is blocked. That is right, but ranks that really
//! compute take turns as soon as their clocks differ by a nanosecond. This queue also lets an event happen when
//! nothing that the running ranks may still do can come before it. Times and bits are those of the strict
//! queue:
//!
//! 1. What a rank does is a function of its *instants*: when it is woken, and what has arrived by then.
//!    Operations are clocked by the frames that they take, and it is not told anything while it runs. It is
//!    woken by frames that one of its operations has looked for in vain, by bad news and by its deadline. At
//!    other arrivals its operations would find nothing new, so it is not woken: only its last instant moves.
//! 2. An event belongs to one rank and touches nothing of any other: a departure its sender's uplink, a landing
//!    its receiver's downlink, an arrival, a deadline and a crash the rank itself. So events of different ranks
//!    commute, and those of one rank have to happen in the order of their keys.
//! 3. A running rank `q` causes nothing before its *floor*: the least of its clock (what it starts), the first
//!    deadline of what it has started, and the first arrival that is kept back because it runs (from which what
//!    it has started goes on). What it causes reaches rank `r` over links alone, hence not before its floor
//!    plus the *distance* from `q` to `r`: the least sum of latencies on any way there, and for `r = q` round
//!    any cycle.
//! 4. The *bound* of `r` is the least such sum over all running ranks. An event of `r` before it may happen
//!    when all earlier ones have been looked at: no running rank can put one before it, and neither can an
//!    event that was passed over at time `t` at rank `p`. That one was passed over because of a running rank
//!    `q` with `floor(q) + distance(q, p) <= t`, so that `t + distance(p, r) >= floor(q) + distance(q, r) >=
//!    bound(r)`. A departure of a rank that runs must lie before that rank's floor, too.
//! 5. Since distances are positive, everything that arrives at `r` in one instant is known before any of it
//!    happens, and arrives together, as in the strict queue. Where a latency is zero two ranks can wake each
//!    other again and again within one instant, and who sees what in which round is the strict queue's to say:
//!    there nothing happens while a rank runs. Nor does anything where regions share lines: there departures of
//!    different ranks do not commute.
//! 6. Ranks with equal links are one *group*, and the bound is taken over groups: the least floor of a group
//!    plus the least distance from any of its ranks. That is at most the bound of 4. And 4 holds for groups as
//!    it does for ranks: the distance from a group to `r` is at most that to `p` plus the distance from `p` to
//!    `r`.
//!
//! Events wait in a [`Queue`], floors are kept in [`Lookahead`]. An event is looked at again only when
//! something has changed for it, so an event costs a time logarithmic in the number of ranks and of events, and
//! linear in the number of groups: one where all links are equal, one for each region, and at worst one for
//! each rank.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use farflung_base::network::{InFlight, Network};
use farflung_base::{Bytes, Nanos, PeerId, Rank, Topology};

use super::bells::Bells;
use super::faults::{Fault, Faults, Rules};
use super::happening::{Happening, Reached};
use super::lookahead::{Distances, Lookahead};
use super::queue::{Key, Kind, Lane, Queue, What};
use crate::endpoint::Wake;
use crate::inbox::{Inbox, Interest};
use crate::sizes::HEADER_BYTES;
use crate::transport::{Channel, Tag};
use crate::{DownReason, Frame, WireError};

/// Behind every frame that departs with it.
const LAST: Tag = Tag { context: u64::MAX, channel: Channel::Abort, number: u32::MAX };

/// What happens to whom: events of one rank's [`Lane`].
#[derive(Debug)]
enum Event {
    Crash,
    Depart(Parcel),
    Cross(Parcel, InFlight),
    Enter(Parcel, InFlight),
    Land(Parcel, InFlight),
    Arrive(Parcel),
    Deadline,
}

/// What is on its way from one rank to another.
#[derive(Debug)]
struct Parcel {
    to: usize,
    tag: Tag,
    cargo: Cargo,
}

#[derive(Debug)]
enum Cargo {
    Frame(Frame),
    Gone(DownReason),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Status {
    Running,
    Blocked,
    /// Running as soon as this instant is over.
    Woken(Wake),
    Gone,
}

#[derive(Debug, Clone, Copy)]
struct Member {
    /// Its last instant.
    now: Nanos,
    /// While it runs: nothing of what it starts departs before, and what it has started does nothing by itself
    /// before.
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

struct State {
    links: Network,
    queue: Queue<Event>,
    /// None where the queue is strict.
    lookahead: Option<Lookahead>,
    ranks: Vec<Member>,
    /// How many run, and how many are blocked.
    running: usize,
    blocked: usize,
    /// The last instant of any rank.
    latest: Nanos,
    /// Who was woken in this instant.
    woken: Vec<usize>,
    /// By sender and receiver.
    wires: Vec<Wire>,
    /// From when on the next frame from one rank to another is spoilt, by the two.
    corruptions: BTreeMap<(usize, usize), VecDeque<Nanos>>,
    /// Senders and receivers between whom nothing passes any more, because something spoilt was sent or has
    /// come back. Each way is its sender's own, as everything is on which its departures depend.
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

/// What a rank reads without the lock; written under it.
#[derive(Debug, Default)]
struct Times {
    clock: AtomicU64,
    /// Its last instant.
    now: AtomicU64,
}

/// All endpoints of a simulated network.
pub(super) struct World {
    rules: Rules,
    state: Mutex<State>,
    times: Vec<Times>,
    bells: Bells,
    pub(super) inboxes: Vec<Arc<Inbox>>,
}

impl State {
    fn push(&mut self, from: usize, to: usize, tag: Tag, at: Nanos, cargo: Cargo) {
        let sequence = self.ranks[from].sequence;
        self.ranks[from].sequence += 1;
        let key = Key { time: at, kind: Kind::Depart, from, sequence };
        self.queue.push(Lane::new(from, What::Up), key, Event::Depart(Parcel { to, tag, cargo }));
    }

    /// Something will happen to a rank itself.
    fn await_itself(&mut self, rank: usize, key: Key, event: Event) {
        self.queue.push(Lane::new(rank, What::Itself), key, event);
        self.publish_floor(rank);
    }

    /// A rank's floor: what it does by itself, or goes on with at the first arrival that is kept back.
    fn floor(&self, rank: usize) -> Nanos {
        let kept_back = self.queue.head(Lane::new(rank, What::Itself));
        kept_back.map_or(Nanos::MAX, |key| key.time).min(self.ranks[rank].floor)
    }

    fn publish_floor(&mut self, rank: usize) {
        let floor = self.ranks[rank].runs().then(|| self.floor(rank));
        if let Some(lookahead) = &mut self.lookahead {
            lookahead.set(rank, floor);
        }
    }

    /// What depends on whether a rank runs is looked at anew.
    fn set_status(&mut self, rank: usize, status: Status) {
        let before = std::mem::replace(&mut self.ranks[rank].status, status);
        let counts = |status| match status {
            Status::Running | Status::Woken(_) => (1, 0),
            Status::Blocked => (0, 1),
            Status::Gone => (0, 0),
        };
        let ((ran, was_blocked), (runs, is_blocked)) = (counts(before), counts(status));
        self.running = self.running + runs - ran;
        self.blocked = self.blocked + is_blocked - was_blocked;
        if was_blocked > is_blocked {
            self.queue.clear(Lane::new(rank, What::Deadline));
        }
        if ran != runs || status == Status::Gone {
            self.publish_floor(rank);
            for what in [What::Up, What::Down, What::Itself] {
                self.queue.look(Lane::new(rank, what));
            }
        }
    }

    /// Moves a rank's last instant.
    fn reach(&mut self, rank: usize, at: Nanos) {
        let now = &mut self.ranks[rank].now;
        *now = at.max(*now);
        self.latest = self.latest.max(*now);
    }

    /// Wakes a rank that is blocked.
    fn wake(&mut self, rank: usize, at: Nanos, wake: Wake) {
        if self.ranks[rank].status != Status::Blocked {
            return;
        }
        self.reach(rank, at);
        self.ranks[rank].floor = self.ranks[rank].now;
        self.set_status(rank, Status::Woken(wake));
        self.woken.push(rank);
    }

    /// Tells all others, behind everything that was sent before.
    fn part(&mut self, rank: usize, at: Nanos, reason: &DownReason) {
        for to in (0..self.ranks.len()).filter(|&to| to != rank) {
            self.push(rank, to, LAST, at, Cargo::Gone(reason.clone()));
        }
    }

    /// Whether the first event of a lane may happen as far as its own rank goes.
    fn is_in_turn(&self, lane: Lane, key: &Key) -> bool {
        let member = &self.ranks[lane.rank];
        match (lane.what, member.status) {
            (_, Status::Gone) | (What::Down | What::Deadline, _) | (What::Itself, Status::Blocked) => true,
            (What::Up, _) => !member.runs() || key.time < self.floor(lane.rank),
            // What arrives in the same instant arrives before anyone looks.
            (What::Itself, Status::Woken(_)) => member.now == key.time,
            (What::Itself, Status::Running) => false,
        }
    }

    /// Whether the first event of a lane may happen now; puts the lane aside where it may not.
    fn may_happen(&mut self, lane: Lane, key: &Key) -> bool {
        // What would happen at the end of time never does.
        if !self.is_in_turn(lane, key) || key.time == Nanos::MAX {
            self.queue.hold(lane);
            return false;
        }
        let ahead = self.lookahead.as_ref().filter(|_| self.ranks[lane.rank].status != Status::Gone);
        if let Some(obstacle) = ahead.and_then(|lookahead| lookahead.obstacle(lane.rank, key.time)) {
            self.queue.set_behind(lane, obstacle);
            return false;
        }
        true
    }
}

impl World {
    pub(super) fn new(topology: &Topology, faults: &Faults, distances: Distances) -> Self {
        let n = topology.size();
        let lookahead = distances.map(|distances| Lookahead::new(&distances));
        let member = Member {
            now: Nanos::ZERO,
            floor: Nanos::ZERO,
            sequence: 0,
            status: Status::Running,
            crashed: false,
        };
        let mut state = State {
            links: Network::new(topology),
            queue: Queue::new(n, lookahead.as_ref().map_or(0, Lookahead::groups)),
            lookahead,
            ranks: vec![member; n],
            running: n,
            blocked: 0,
            latest: Nanos::ZERO,
            woken: Vec::new(),
            wires: vec![Wire::default(); n * n],
            corruptions: BTreeMap::new(),
            broken: BTreeSet::new(),
            record: None,
        };
        for (i, (time, fault)) in faults.iter().enumerate() {
            match fault {
                Fault::Crash(peer) if peer.index() < n => {
                    let key = Key { time, kind: Kind::Crash, from: peer.index(), sequence: i as u64 };
                    state.await_itself(peer.index(), key, Event::Crash);
                }
                Fault::Corrupt(from, to) => {
                    state.corruptions.entry((from.index(), to.index())).or_default().push_back(time);
                }
                _ => {}
            }
        }
        (0..n).for_each(|rank| state.publish_floor(rank));
        Self {
            rules: Rules::new(faults),
            state: Mutex::new(state),
            times: (0..n).map(|_| Times::default()).collect(),
            bells: Bells::new(n),
            inboxes: (0..n).map(|_| Arc::new(Inbox::new(n).selective())).collect(),
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
        Nanos(self.times[rank].clock.load(Ordering::Acquire))
    }

    /// A rank's last instant.
    pub(super) fn instant(&self, rank: usize) -> Nanos {
        Nanos(self.times[rank].now.load(Ordering::Acquire))
    }

    /// Takes a frame that departs at `at`.
    pub(super) fn submit(&self, from: usize, to: usize, tag: Tag, at: Nanos, frame: Frame) {
        let mut state = self.lock();
        let member = state.ranks[from];
        if !member.crashed {
            // The others were promised that nothing departs before the floor, and of a blocked rank nothing at
            // all: what a thread from outside sends on its behalf is in nobody's past.
            let earliest = if member.runs() { state.floor(from) } else { state.latest };
            let at = self.rules.thaw(PeerId(from as u32), at.max(earliest));
            state.push(from, to, tag, at, Cargo::Frame(frame));
        }
    }

    /// Moves a running rank's clock. What it has started does nothing by itself before `idle`.
    pub(super) fn set_clock(&self, rank: usize, idle: Nanos, clock: impl FnOnce(Nanos) -> Nanos) {
        let mut state = self.lock();
        let clock = clock(self.clock(rank));
        self.times[rank].clock.store(clock.0, Ordering::Release);
        let member = &mut state.ranks[rank];
        member.floor = clock.min(idle).max(member.now);
        state.publish_floor(rank);
        state.queue.look(Lane::new(rank, What::Up));
        self.fire(state);
    }

    /// Blocks a rank until something that it looks for arrives, or `until`. `moved` says whether something has
    /// already.
    pub(super) fn block(&self, rank: usize, until: Nanos, moved: impl FnOnce() -> bool) -> Wake {
        let mut state = self.lock();
        if moved() {
            return Wake::Moved;
        }
        let rung = self.bells.count(rank);
        if state.ranks[rank].status == Status::Running {
            let time = self.rules.thaw(PeerId(rank as u32), until);
            state.set_status(rank, Status::Blocked);
            let key = Key { time, kind: Kind::Deadline, from: rank, sequence: 0 };
            state.queue.push(Lane::new(rank, What::Deadline), key, Event::Deadline);
            self.fire(state);
        } else if state.ranks[rank].status == Status::Gone {
            return Wake::Moved;
        } else {
            drop(state);
        }
        self.bells.sleep(rank, rung)
    }

    /// Makes a blocked rank look about, from outside of the network's own time.
    pub(super) fn rouse(&self, rank: usize) {
        let mut state = self.lock();
        let at = state.latest;
        state.wake(rank, at, Wake::Moved);
        self.ring(state);
    }

    /// A rank leaves.
    pub(super) fn leave(&self, rank: usize) {
        let mut state = self.lock();
        let at = self.clock(rank).max(state.ranks[rank].now);
        if !state.ranks[rank].crashed {
            state.part(rank, at, &DownReason::Left);
        }
        state.set_status(rank, Status::Gone);
        self.fire(state);
    }

    /// Lets everything happen that may, and tells the threads of those that it wakes.
    fn fire(&self, mut state: MutexGuard<'_, State>) {
        // While nobody is blocked nobody would notice.
        if state.blocked > 0 {
            if state.lookahead.is_some() {
                self.fire_ahead(&mut state);
            } else {
                self.fire_strictly(&mut state);
            }
            if state.running == 0 {
                // Only ranks without a deadline are left, and nothing is on its way.
                for rank in 0..state.ranks.len() {
                    state.wake(rank, Nanos::ZERO, Wake::Deadlock);
                }
            }
        }
        self.ring(state);
    }

    /// Ranks that were woken run. Their threads are told without the lock, which they take next.
    fn ring(&self, mut state: MutexGuard<'_, State>) {
        let mut woken = Vec::with_capacity(state.woken.len());
        while let Some(rank) = state.woken.pop() {
            if let Status::Woken(wake) = state.ranks[rank].status {
                state.set_status(rank, Status::Running);
                self.times[rank].now.store(state.ranks[rank].now.0, Ordering::Release);
                woken.push((rank, wake));
            }
        }
        drop(state);
        woken.reverse();
        self.bells.ring(&woken);
    }

    fn fire_ahead(&self, state: &mut State) {
        loop {
            while let Some((group, floor)) = state.lookahead.as_mut().and_then(Lookahead::next_risen) {
                state.queue.release(group, floor);
            }
            let Some((key, lane)) = state.queue.first() else { return };
            if state.may_happen(lane, &key) {
                self.happen(state, key, lane);
            }
        }
    }

    /// One instant after another, until one wakes somebody. Deadlines come behind all that an instant brings.
    fn fire_strictly(&self, state: &mut State) {
        if state.running > 0 {
            return;
        }
        let mut instant = None;
        while let Some((key, lane)) = state.queue.first() {
            let at = (key.time, key.kind == Kind::Deadline);
            if state.running > 0 && instant != Some(at) {
                return;
            }
            if state.may_happen(lane, &key) {
                instant = Some(at);
                self.happen(state, key, lane);
            }
        }
    }

    /// The first event of a lane happens.
    fn happen(&self, state: &mut State, key: Key, lane: Lane) {
        let Key { time, from, .. } = key;
        let event = state.queue.pop(lane).expect("a lane that is looked at has an event");
        match event {
            Event::Depart(parcel) => self.depart(state, key, parcel),
            Event::Cross(parcel, flight) => self.cross(state, key, parcel, flight),
            Event::Enter(parcel, flight) => {
                let to = parcel.to;
                let flight = state.links.enter(Rank(from as u32), Rank(to as u32), flight);
                let key = Key { time: flight.head, kind: Kind::Land, ..key };
                state.queue.push(Lane::new(to, What::Down), key, Event::Land(parcel, flight));
            }
            Event::Land(parcel, flight) => {
                let to = PeerId(parcel.to as u32);
                let at = self.rules.thaw(to, state.links.land(Rank(to.0), flight));
                let key = Key { time: at, kind: Kind::Arrive, ..key };
                state.await_itself(parcel.to, key, Event::Arrive(parcel));
            }
            Event::Arrive(parcel) => self.arrive(state, key, parcel),
            Event::Deadline => state.wake(lane.rank, time, Wake::Moved),
            Event::Crash if state.ranks[from].status == Status::Gone => {}
            Event::Crash => {
                if let Some(record) = &mut state.record {
                    record.push(Happening::bare(time, from, key.sequence, from, Reached::Crash));
                }
                state.part(from, time, &DownReason::Crashed);
                state.ranks[from].crashed = true;
                self.inboxes[from].end();
                state.wake(from, time, Wake::Moved);
            }
        }
    }

    fn depart(&self, state: &mut State, key: Key, mut parcel: Parcel) {
        let Key { time, from, .. } = key;
        let to = parcel.to;
        let peer = |r: usize| PeerId(r as u32);
        let size = match &parcel.cargo {
            // Nothing leaves a crashed rank but the news.
            Cargo::Frame(_) if state.ranks[from].crashed => return,
            Cargo::Frame(_) if state.broken.contains(&(from, to)) => return,
            Cargo::Frame(frame) => (frame.len() + HEADER_BYTES) as u64,
            Cargo::Gone(_) => 0,
        };
        if self.rules.cuts(time, peer(from), peer(to)) {
            return;
        }
        let spoilt =
            state.corruptions.get_mut(&(from, to)).filter(|due| due.front().is_some_and(|&d| d <= time));
        if let Some(due) = spoilt {
            due.pop_front();
            state.broken.insert((from, to));
            parcel.cargo = Cargo::Gone(DownReason::Protocol(WireError::Checksum));
        }
        let flight = state.links.depart(Rank(from as u32), time, Bytes(size));
        if state.links.has_lines() {
            let key = Key { time: flight.head, kind: Kind::Cross, ..key };
            state.queue.push(Lane::new(from, What::Up), key, Event::Cross(parcel, flight));
        } else {
            self.cross(state, key, parcel, flight);
        }
    }

    /// What has left its rank goes over to the other.
    fn cross(&self, state: &mut State, key: Key, parcel: Parcel, flight: InFlight) {
        let (from, to) = (key.from, parcel.to);
        let flight = state.links.cross(Rank(from as u32), Rank(to as u32), flight);
        let wire = &mut state.wires[from * self.times.len() + to];
        let late = self.rules.weather().delay(from, to, wire.frames);
        wire.frames += 1;
        wire.head = wire.head.max(flight.head.saturating_add(late));
        wire.tail = wire.tail.max(flight.tail.saturating_add(late));
        let flight = InFlight { head: wire.head, tail: wire.tail, ..flight };
        if state.links.has_lines() {
            let key = Key { time: flight.head, kind: Kind::Enter, ..key };
            state.queue.push(Lane::new(to, What::Down), key, Event::Enter(parcel, flight));
        } else {
            let key = Key { time: flight.head, kind: Kind::Land, ..key };
            state.queue.push(Lane::new(to, What::Down), key, Event::Land(parcel, flight));
        }
    }

    fn arrive(&self, state: &mut State, key: Key, Parcel { to, tag, cargo }: Parcel) {
        let Key { time, from, sequence, .. } = key;
        let (peer, there) = (PeerId(from as u32), state.ranks[to].status != Status::Gone);
        // Who has left sees nothing, at whatever time others get round to that.
        if let Some(record) = state.record.as_mut().filter(|_| there) {
            record.push(match &cargo {
                Cargo::Frame(frame) => Happening::frame(time, from, sequence, to, tag, frame.bytes()),
                Cargo::Gone(_) => Happening::bare(time, from, sequence, to, Reached::Gone),
            });
        }
        let interest = match cargo {
            Cargo::Frame(mut frame) => {
                frame.arrived = time;
                self.inboxes[to].deliver_quietly(peer, tag, frame)
            }
            Cargo::Gone(reason) => {
                if there && matches!(reason, DownReason::Protocol(_)) {
                    // The receiver hangs up.
                    let at = time.saturating_add(Nanos(1));
                    state.push(to, from, LAST, at, Cargo::Gone(DownReason::Ended));
                    state.broken.insert((to, from));
                }
                self.inboxes[to].peer_down_quietly(peer, reason)
            }
        };
        match interest {
            Interest::Wanted => state.wake(to, time, Wake::Moved),
            Interest::None if state.ranks[to].status == Status::Blocked => {
                state.reach(to, time);
                self.times[to].now.store(state.ranks[to].now.0, Ordering::Release);
            }
            Interest::None => {}
        }
    }
}
