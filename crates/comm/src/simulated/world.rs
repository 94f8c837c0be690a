//! The event queue of a simulated network: the order in which events are processed, and which may be processed
//! while some ranks still run.
//!
//! A *strict* queue processes an event only while every rank is blocked. That is correct, but then ranks that
//! really compute take turns as soon as their clocks differ by a nanosecond. This queue also processes an event
//! if no running rank can still cause an earlier one. Times and results are those of the strict queue, bit for
//! bit:
//!
//! 1. What a rank does depends only on its *instants*: the times at which it is woken, and what has arrived by
//!    then. The clocks of operations advance with the frames that they take, and nothing is delivered to a rank
//!    while it runs. A rank is woken by frames for which one of its operations waits, by reports of failures,
//!    and by its deadline. Other arrivals would change nothing for its operations, so they do not wake it; they
//!    only move its last instant.
//! 2. An event belongs to one rank and affects no other: a departure only its sender's uplink, a landing only
//!    its receiver's downlink, an arrival, a deadline or a crash only the rank itself. So events of different
//!    ranks commute; those of one rank must be processed in the order of their keys.
//! 3. A running rank `q` causes nothing before its *floor*: the least of its clock (for operations that it
//!    starts), the first deadline of its started operations, and the first arrival that is held back because
//!    `q` runs (a started operation may proceed on it). Its effects reach rank `r` only over links, thus not
//!    before its floor plus the *distance* from `q` to `r`: the least sum of latencies on any path from `q` to
//!    `r`, or on any cycle if `r = q`.
//! 4. The *bound* of `r` is the least such sum over all running ranks. An event of `r` before its bound may be
//!    processed once all earlier events have been checked. No running rank can cause an earlier event at `r`.
//!    Neither can an event that was held back at time `t` at rank `p`: it was held back because of a running
//!    rank `q` with `floor(q) + distance(q, p) <= t`, so `t + distance(p, r) >= floor(q) + distance(q, r) >=
//!    bound(r)`. A departure of a running rank must also be before that rank's floor.
//! 5. Since distances are positive, everything that arrives at `r` at one instant is known before any of it is
//!    processed, and arrives together, as in the strict queue. If a latency is zero, two ranks can wake each
//!    other repeatedly within one instant, and only the strict queue defines what each of them sees in which
//!    round. In such networks nothing is processed while a rank runs. The same holds if regions share lines,
//!    because then departures of different ranks do not commute.
//! 6. Ranks with equal links form a *group*, and the bound is computed over groups: the least floor of a group
//!    plus the least distance from any of its ranks. That is at most the bound of 4. Point 4 also holds for
//!    groups: the distance from a group to `r` is at most that to `p` plus the distance from `p` to `r`.
//!
//! Events are in a [`Queue`], floors in [`Lookahead`]. An event is checked again only after something relevant
//! has changed. So the time per event is logarithmic in the number of ranks and of events, and linear in the
//! number of groups: one if all links are equal, one per region, and at worst one per rank.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use farflung_base::network::{InFlight, Network};
use farflung_base::{Bytes, Nanos, PeerId, Rank, Topology};

use super::event::{Reached, SimulatedEvent};
use super::faults::{Fault, Faults, Rules};
use super::lookahead::{Distances, Lookahead};
use super::parked_ranks::ParkedRanks;
use super::queue::{Key, Kind, Lane, LaneKind, Queue};
use crate::endpoint::Wake;
use crate::inbox::{Awaited, Inbox};
use crate::sizes::HEADER_BYTES;
use crate::transport::{Channel, Tag};
use crate::{DownReason, Frame, WireError};

/// Placeholder tag of reports that a rank is gone, which have no tag.
const LAST: Tag = Tag { context: u64::MAX, channel: Channel::Abort, number: u32::MAX };

/// An event in the queue, by the part of a rank that it concerns (see [`Lane`]).
#[derive(Debug)]
enum Event {
    Crash,
    Depart(Packet),
    Cross(Packet, InFlight),
    Enter(Packet, InFlight),
    Land(Packet, InFlight),
    Arrive(Packet),
    Deadline,
}

/// A frame or a report on its way from one rank to another.
#[derive(Debug)]
struct Packet {
    to: usize,
    tag: Tag,
    content: PacketContent,
}

#[derive(Debug)]
enum PacketContent {
    Frame(Frame),
    Gone(DownReason),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Status {
    Running,
    Blocked,
    /// The rank runs as soon as all events of this time are processed.
    Woken(Wake),
    Gone,
}

#[derive(Debug, Clone, Copy)]
struct Member {
    /// Time of the latest event that reached the rank.
    now: Nanos,
    /// While the rank runs: the time before which no frame of an operation that it starts departs, and before
    /// which its started operations continue only when frames arrive.
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
    /// Computes how far events may run ahead of running ranks. `None` if the queue is strict: it processes
    /// events only while all ranks are blocked.
    lookahead: Option<Lookahead>,
    ranks: Vec<Member>,
    /// Number of ranks that run (`running`) and that are blocked (`blocked`).
    running: usize,
    blocked: usize,
    /// Time of the latest event that reached any rank.
    latest: Nanos,
    /// Ranks that are woken by events of the current time.
    woken: Vec<usize>,
    /// Indexed by `sender * number of ranks + receiver`.
    wires: Vec<Wire>,
    /// Times from which the next frame between two ranks is corrupted, by sender and receiver.
    corruptions: BTreeMap<(usize, usize), VecDeque<Nanos>>,
    /// Senders and receivers between which nothing passes any more: a corrupted frame was sent, or its receiver
    /// has closed the connection. Each direction is changed only by events of its sender, because departures
    /// may depend only on the state of their sender.
    broken: BTreeSet<(usize, usize)>,
    /// Events that reached the ranks, if they are recorded.
    record: Option<Vec<SimulatedEvent>>,
}

/// Frames sent so far from one rank to another, and the latest times of their heads and tails. A frame is never
/// earlier than the one before it.
#[derive(Debug, Clone, Copy, Default)]
struct Wire {
    frames: u64,
    head: Nanos,
    tail: Nanos,
}

/// Copies of a rank's times. The rank reads them without the lock; they are written under the lock.
#[derive(Debug, Default)]
struct Times {
    clock: AtomicU64,
    /// Time of the latest event that reached the rank.
    now: AtomicU64,
}

/// All endpoints of a simulated network.
pub(super) struct World {
    rules: Rules,
    state: Mutex<State>,
    times: Vec<Times>,
    parked: ParkedRanks,
    pub(super) inboxes: Vec<Arc<Inbox>>,
}

impl State {
    fn push(&mut self, from: usize, to: usize, tag: Tag, at: Nanos, cargo: PacketContent) {
        let sequence = self.ranks[from].sequence;
        self.ranks[from].sequence += 1;
        let key = Key { time: at, kind: Kind::Depart, from, sequence };
        self.queue.push(
            Lane::new(from, LaneKind::Uplink),
            key,
            Event::Depart(Packet { to, tag, content: cargo }),
        );
    }

    /// Adds an event that concerns the rank itself, not its links: an arrival or a crash.
    fn push_rank_event(&mut self, rank: usize, key: Key, event: Event) {
        self.queue.push(Lane::new(rank, LaneKind::Itself), key, event);
        self.publish_floor(rank);
    }

    /// Returns a running rank's floor: the least of `Member::floor` and the first arrival that is held back.
    fn floor(&self, rank: usize) -> Nanos {
        let kept_back = self.queue.head(Lane::new(rank, LaneKind::Itself));
        kept_back.map_or(Nanos::MAX, |key| key.time).min(self.ranks[rank].floor)
    }

    fn publish_floor(&mut self, rank: usize) {
        let floor = self.ranks[rank].runs().then(|| self.floor(rank));
        if let Some(lookahead) = &mut self.lookahead {
            lookahead.set(rank, floor);
        }
    }

    /// Sets a rank's status. If the rank starts or stops running, the lanes that depend on that are checked
    /// again.
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
            self.queue.clear(Lane::new(rank, LaneKind::Deadline));
        }
        if ran != runs || status == Status::Gone {
            self.publish_floor(rank);
            for what in [LaneKind::Uplink, LaneKind::Downlink, LaneKind::Itself] {
                self.queue.recheck(Lane::new(rank, what));
            }
        }
    }

    /// Records that an event reached a rank at `at`.
    fn reach(&mut self, rank: usize, at: Nanos) {
        let now = &mut self.ranks[rank].now;
        *now = at.max(*now);
        self.latest = self.latest.max(*now);
    }

    /// Wakes a rank if it is blocked.
    fn wake(&mut self, rank: usize, at: Nanos, wake: Wake) {
        if self.ranks[rank].status != Status::Blocked {
            return;
        }
        self.reach(rank, at);
        self.ranks[rank].floor = self.ranks[rank].now;
        self.set_status(rank, Status::Woken(wake));
        self.woken.push(rank);
    }

    /// Sends to all other ranks the report that this rank is gone, after everything that it has sent before.
    fn report_gone(&mut self, rank: usize, at: Nanos, reason: &DownReason) {
        for to in (0..self.ranks.len()).filter(|&to| to != rank) {
            self.push(rank, to, LAST, at, PacketContent::Gone(reason.clone()));
        }
    }

    /// Returns whether the state of the lane's own rank allows the first event of the lane to be processed.
    fn is_in_turn(&self, lane: Lane, key: &Key) -> bool {
        let member = &self.ranks[lane.rank];
        match (lane.kind, member.status) {
            (_, Status::Gone)
            | (LaneKind::Downlink | LaneKind::Deadline, _)
            | (LaneKind::Itself, Status::Blocked) => true,
            (LaneKind::Uplink, _) => !member.runs() || key.time < self.floor(lane.rank),
            // All arrivals of one time are delivered before the woken rank runs.
            (LaneKind::Itself, Status::Woken(_)) => member.now == key.time,
            (LaneKind::Itself, Status::Running) => false,
        }
    }

    /// Returns whether the first event of a lane may be processed now. If not, sets the lane aside.
    fn may_happen(&mut self, lane: Lane, key: &Key) -> bool {
        // Events at `Nanos::MAX` are never processed.
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
                    state.push_rank_event(peer.index(), key, Event::Crash);
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
            parked: ParkedRanks::new(n),
            inboxes: (0..n).map(|_| Arc::new(Inbox::new(n).selective())).collect(),
        }
    }

    /// Starts to record what reaches the ranks.
    pub(super) fn record(&self) {
        self.lock().record = Some(Vec::new());
    }

    /// Returns the recorded events and ends the recording.
    pub(super) fn recorded(&self) -> Vec<SimulatedEvent> {
        self.lock().record.take().unwrap_or_default()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns a rank's clock.
    pub(super) fn clock(&self, rank: usize) -> Nanos {
        Nanos(self.times[rank].clock.load(Ordering::Acquire))
    }

    /// Returns the time of the latest event that reached a rank.
    pub(super) fn instant(&self, rank: usize) -> Nanos {
        Nanos(self.times[rank].now.load(Ordering::Acquire))
    }

    /// Submits a frame that departs at `at`, or later if `at` is no longer possible.
    pub(super) fn submit(&self, from: usize, to: usize, tag: Tag, at: Nanos, frame: Frame) {
        let mut state = self.lock();
        let member = state.ranks[from];
        if !member.crashed {
            // Other ranks' events were processed on the assumption that nothing departs before the floor, and
            // that a blocked rank sends nothing. So a frame that an outside thread sends for a blocked rank
            // departs no earlier than the latest event of any rank.
            let earliest = if member.runs() { state.floor(from) } else { state.latest };
            let at = self.rules.thaw(PeerId(from as u32), at.max(earliest));
            state.push(from, to, tag, at, PacketContent::Frame(frame));
        }
    }

    /// Moves a running rank's clock. Before the time `idle`, its started operations act only on frames.
    pub(super) fn set_clock(&self, rank: usize, idle: Nanos, clock: impl FnOnce(Nanos) -> Nanos) {
        let mut state = self.lock();
        let clock = clock(self.clock(rank));
        self.times[rank].clock.store(clock.0, Ordering::Release);
        let member = &mut state.ranks[rank];
        member.floor = clock.min(idle).max(member.now);
        state.publish_floor(rank);
        state.queue.recheck(Lane::new(rank, LaneKind::Uplink));
        self.process_events(state);
    }

    /// Blocks a rank until a frame or report arrives for which one of its operations waits, or until the time
    /// `until`. Does not block if `moved` returns true: then such a frame has already arrived.
    pub(super) fn block(&self, rank: usize, until: Nanos, moved: impl FnOnce() -> bool) -> Wake {
        let mut state = self.lock();
        if moved() {
            return Wake::Moved;
        }
        let rung = self.parked.count(rank);
        if state.ranks[rank].status == Status::Running {
            let time = self.rules.thaw(PeerId(rank as u32), until);
            state.set_status(rank, Status::Blocked);
            let key = Key { time, kind: Kind::Deadline, from: rank, sequence: 0 };
            state.queue.push(Lane::new(rank, LaneKind::Deadline), key, Event::Deadline);
            self.process_events(state);
        } else if state.ranks[rank].status == Status::Gone {
            return Wake::Moved;
        } else {
            drop(state);
        }
        self.parked.sleep(rank, rung)
    }

    /// Wakes a blocked rank at the time of the latest event of any rank. Has no effect if the rank runs, so
    /// only calls from other threads than the rank's own matter.
    pub(super) fn unblock(&self, rank: usize) {
        let mut state = self.lock();
        let at = state.latest;
        state.wake(rank, at, Wake::Moved);
        self.ring(state);
    }

    /// Marks a rank as gone and reports it to the others.
    pub(super) fn leave(&self, rank: usize) {
        let mut state = self.lock();
        let at = self.clock(rank).max(state.ranks[rank].now);
        if !state.ranks[rank].crashed {
            state.report_gone(rank, at, &DownReason::Left);
        }
        state.set_status(rank, Status::Gone);
        self.process_events(state);
    }

    /// Processes all events that may be processed, and wakes the threads of the ranks that they wake.
    fn process_events(&self, mut state: MutexGuard<'_, State>) {
        // If no rank is blocked, events can wait: no rank would notice them.
        if state.blocked > 0 {
            if state.lookahead.is_some() {
                self.process_ahead(&mut state);
            } else {
                self.process_strictly(&mut state);
            }
            if state.running == 0 {
                // The blocked ranks have no deadline, and no event is left.
                for rank in 0..state.ranks.len() {
                    state.wake(rank, Nanos::ZERO, Wake::Deadlock);
                }
            }
        }
        self.ring(state);
    }

    /// Sets woken ranks to running. Their threads are woken after the lock is released, because they take it
    /// next.
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
        self.parked.ring(&woken);
    }

    fn process_ahead(&self, state: &mut State) {
        loop {
            while let Some((group, floor)) = state.lookahead.as_mut().and_then(Lookahead::next_risen) {
                state.queue.release(group, floor);
            }
            let Some((key, lane)) = state.queue.first() else { return };
            if state.may_happen(lane, &key) {
                self.process_event(state, key, lane);
            }
        }
    }

    /// Processes the events of one time after the other until one of them wakes a rank. Of the events of one
    /// time, deadlines come last.
    fn process_strictly(&self, state: &mut State) {
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
                self.process_event(state, key, lane);
            }
        }
    }

    /// Processes the first event of a lane.
    fn process_event(&self, state: &mut State, key: Key, lane: Lane) {
        let Key { time, from, .. } = key;
        let event = state.queue.pop(lane).expect("the caller has found an event in this lane");
        match event {
            Event::Depart(packet) => self.depart(state, key, packet),
            Event::Cross(packet, flight) => self.cross(state, key, packet, flight),
            Event::Enter(packet, flight) => {
                let to = packet.to;
                let flight = state.links.enter(Rank(from as u32), Rank(to as u32), flight);
                let key = Key { time: flight.head, kind: Kind::Land, ..key };
                state.queue.push(Lane::new(to, LaneKind::Downlink), key, Event::Land(packet, flight));
            }
            Event::Land(packet, flight) => {
                let to = PeerId(packet.to as u32);
                let at = self.rules.thaw(to, state.links.land(Rank(to.0), flight));
                let key = Key { time: at, kind: Kind::Arrive, ..key };
                state.push_rank_event(packet.to, key, Event::Arrive(packet));
            }
            Event::Arrive(packet) => self.arrive(state, key, packet),
            Event::Deadline => state.wake(lane.rank, time, Wake::Moved),
            Event::Crash if state.ranks[from].status == Status::Gone => {}
            Event::Crash => {
                if let Some(record) = &mut state.record {
                    record.push(SimulatedEvent::bare(time, from, key.sequence, from, Reached::Crash));
                }
                state.report_gone(from, time, &DownReason::Crashed);
                state.ranks[from].crashed = true;
                self.inboxes[from].end();
                state.wake(from, time, Wake::Moved);
            }
        }
    }

    fn depart(&self, state: &mut State, key: Key, mut packet: Packet) {
        let Key { time, from, .. } = key;
        let to = packet.to;
        let peer = |r: usize| PeerId(r as u32);
        let size = match &packet.content {
            // A crashed rank sends only the report that it is gone.
            PacketContent::Frame(_) if state.ranks[from].crashed => return,
            PacketContent::Frame(_) if state.broken.contains(&(from, to)) => return,
            PacketContent::Frame(frame) => (frame.len() + HEADER_BYTES) as u64,
            PacketContent::Gone(_) => 0,
        };
        if self.rules.cuts(time, peer(from), peer(to)) {
            return;
        }
        let spoilt =
            state.corruptions.get_mut(&(from, to)).filter(|due| due.front().is_some_and(|&d| d <= time));
        if let Some(due) = spoilt {
            due.pop_front();
            state.broken.insert((from, to));
            packet.content = PacketContent::Gone(DownReason::Protocol(WireError::Checksum));
        }
        let flight = state.links.depart(Rank(from as u32), time, Bytes(size));
        if state.links.has_region_links() {
            let key = Key { time: flight.head, kind: Kind::Cross, ..key };
            state.queue.push(Lane::new(from, LaneKind::Uplink), key, Event::Cross(packet, flight));
        } else {
            self.cross(state, key, packet, flight);
        }
    }

    /// Passes a frame that has left its sender's uplink on to the receiver's side.
    fn cross(&self, state: &mut State, key: Key, packet: Packet, flight: InFlight) {
        let (from, to) = (key.from, packet.to);
        let flight = state.links.cross(Rank(from as u32), Rank(to as u32), flight);
        let wire = &mut state.wires[from * self.times.len() + to];
        let late = self.rules.weather().delay(from, to, wire.frames);
        wire.frames += 1;
        wire.head = wire.head.max(flight.head.saturating_add(late));
        wire.tail = wire.tail.max(flight.tail.saturating_add(late));
        let flight = InFlight { head: wire.head, tail: wire.tail, ..flight };
        if state.links.has_region_links() {
            let key = Key { time: flight.head, kind: Kind::Enter, ..key };
            state.queue.push(Lane::new(to, LaneKind::Downlink), key, Event::Enter(packet, flight));
        } else {
            let key = Key { time: flight.head, kind: Kind::Land, ..key };
            state.queue.push(Lane::new(to, LaneKind::Downlink), key, Event::Land(packet, flight));
        }
    }

    fn arrive(&self, state: &mut State, key: Key, Packet { to, tag, content: cargo }: Packet) {
        let Key { time, from, sequence, .. } = key;
        let (peer, there) = (PeerId(from as u32), state.ranks[to].status != Status::Gone);
        // For a rank that has left, nothing is recorded, no matter when this event is processed.
        if let Some(record) = state.record.as_mut().filter(|_| there) {
            record.push(match &cargo {
                PacketContent::Frame(frame) => {
                    SimulatedEvent::frame(time, from, sequence, to, tag, frame.bytes())
                }
                PacketContent::Gone(_) => SimulatedEvent::bare(time, from, sequence, to, Reached::Gone),
            });
        }
        let interest = match cargo {
            PacketContent::Frame(mut frame) => {
                frame.arrived = time;
                self.inboxes[to].deliver_quietly(peer, tag, frame)
            }
            PacketContent::Gone(reason) => {
                if there && matches!(reason, DownReason::Protocol(_)) {
                    // The checksum does not match, so the receiver closes the connection.
                    let at = time.saturating_add(Nanos(1));
                    state.push(to, from, LAST, at, PacketContent::Gone(DownReason::Ended));
                    state.broken.insert((to, from));
                }
                self.inboxes[to].peer_down_quietly(peer, reason)
            }
        };
        match interest {
            Awaited::Wanted => state.wake(to, time, Wake::Moved),
            Awaited::None if state.ranks[to].status == Status::Blocked => {
                state.reach(to, time);
                self.times[to].now.store(state.ranks[to].now.0, Ordering::Release);
            }
            Awaited::None => {}
        }
    }
}
