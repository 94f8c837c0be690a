//! Simulation in virtual time of any number of concurrent operations.
//!
//! Events are ordered by (time, class, sender, piece number), and the results are those of a simulation with
//! one event per piece and link. Most of these events are not created, where that changes no result: the pieces
//! of a step depart in one event, links without a limit have no events, only the first piece of each queue is
//! in the heap, and a message arrives with its last piece.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, VecDeque};

use super::burst::{for_each_piece, pieces_of};
use super::stream::{Moving, Stream};
use super::{Operation, RankPart};
use crate::network::Network;
use crate::{Nanos, Rank, Topology};

/// A rank has finished its part of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Completion {
    /// Index of the operation.
    pub operation: usize,
    /// The rank that finished.
    pub rank: Rank,
    /// Time of the end; never before the rank began.
    pub at: Nanos,
}

/// Kind of an event. Events of the same time are processed in this order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Class {
    /// The messages of a step enter the sender's uplink.
    Departs,
    /// A piece reaches the uplink of the sender's region.
    Crosses,
    /// A piece reaches the downlink of the receiver's region.
    Enters,
    /// A piece reaches the receiver's downlink.
    Lands,
    /// A message has arrived completely.
    Arrives,
}

/// An event of the simulation. The derived order is the order of processing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Event {
    at: Nanos,
    class: Class,
    sender: Rank,
    /// Number of the piece; for `Departs`, of the first piece that departs.
    number: u64,
    /// Index of the burst (`Departs`), of the stream's sender (`Crosses`) or route (`Enters`, `Lands`), or of
    /// the message (`Arrives`).
    of: u32,
}

/// Priority queue of events.
///
/// `pop` leaves a hole at the top of the heap, which the next `push` fills. Most events cause one other event;
/// a pop and a push then cost one descent of the heap instead of two.
#[derive(Debug, Default)]
struct Queue {
    heap: BinaryHeap<Reverse<Event>>,
    has_hole: bool,
}

impl Queue {
    fn push(&mut self, event: Event) {
        if !std::mem::take(&mut self.has_hole) {
            self.heap.push(Reverse(event));
        } else if let Some(mut top) = self.heap.peek_mut() {
            *top = Reverse(event);
        }
    }

    fn first(&mut self) -> Option<Event> {
        if std::mem::take(&mut self.has_hole) {
            self.heap.pop();
        }
        self.heap.peek().map(|Reverse(event)| *event)
    }

    fn pop(&mut self) -> Option<Event> {
        let first = self.first();
        self.has_hole = first.is_some();
        first
    }
}

/// Progress of one lane (list of steps) of one rank.
#[derive(Debug, Clone, Copy, Default)]
struct Cursor {
    step: usize,
    /// Whether the step's sends have been queued.
    sent: bool,
    /// Number of the step's completed receives, and number of pieces received of the next one.
    received: (usize, u64),
    clock: Nanos,
    stage: Stage,
}

/// State of a lane.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Stage {
    /// The lane waits for another lane to end.
    #[default]
    Waits,
    Runs,
    Ended,
}

/// The part of one rank in one operation.
#[derive(Debug)]
struct Slot<'a> {
    operation: usize,
    rank: Rank,
    part: &'a RankPart,
    /// Index of the cursor of the rank's first lane.
    first_cursor: usize,
    /// Number of lanes that have not ended.
    left: usize,
    /// Arrived messages that are not yet received: time and remaining pieces, by lane, sender and order of
    /// arrival.
    arrived: BTreeMap<(usize, Rank, u64), (Nanos, u64)>,
}

/// The messages of one step of a lane, which depart together.
#[derive(Debug, Clone, Copy)]
struct Burst {
    slot: usize,
    lane: usize,
    step: usize,
}

/// A message that is being sent.
#[derive(Debug, Clone, Copy)]
struct Message {
    /// Slot of the receiver; `None` if the receiver has no part in the operation.
    slot: Option<usize>,
    lane: usize,
    from: Rank,
    pieces: u64,
    route: u32,
}

/// The links from one rank to another, and the pieces that are on their way over them.
#[derive(Debug)]
struct Route {
    from: Rank,
    to: Rank,
    /// Whether these links are shared with other senders and have a finite rate: the uplink of the sender's
    /// region, the downlink of the receiver's region, the receiver's downlink.
    out: bool,
    into: bool,
    down: bool,
    /// Pieces on their way to the downlink of the receiver's region, and to the receiver's downlink.
    entering: Stream,
    landing: Stream,
}

/// Simulates operations in virtual time on one network.
///
/// Each rank begins its part of an operation at its own time ([`NetworkSimulator::begin`]).
/// [`NetworkSimulator::next_completion`] returns the ends in the order in which they become known; a caller may
/// begin further parts in response, at or after the time of that end. On each lane, a rank must receive the
/// messages of each sender in the order in which they are sent.
#[derive(Debug)]
pub struct NetworkSimulator<'a> {
    network: Network,
    operations: &'a [Operation],
    /// First slot of each operation. The slots of an operation are ordered by rank.
    first_slot: Vec<usize>,
    slots: Vec<Slot<'a>>,
    /// Cursors by slot and lane.
    cursors: Vec<Cursor>,
    queue: Queue,
    bursts: Vec<Burst>,
    messages: Vec<Message>,
    routes: Vec<Route>,
    route_of: BTreeMap<(Rank, Rank), u32>,
    /// Pieces on their way to the uplink of the sender's region, by sender.
    crossing: Vec<Stream>,
    /// Number of pieces created so far.
    pieces: u64,
    /// Number of messages stored in `arrived` so far.
    came: u64,
    awake: VecDeque<(usize, usize)>,
    finished: VecDeque<Completion>,
    /// Events later than this are not processed.
    until: Nanos,
}

impl<'a> NetworkSimulator<'a> {
    /// Creates a simulator with idle links and no operation begun.
    #[must_use]
    pub fn new(topology: &Topology, operations: &'a [Operation]) -> Self {
        let (mut first_slot, mut slots, mut cursors) = (Vec::with_capacity(operations.len()), Vec::new(), 0);
        for (operation, sides) in operations.iter().map(|operation| &operation.parts).enumerate() {
            first_slot.push(slots.len());
            for (&rank, side) in sides {
                let (first_cursor, left) = (cursors, side.lanes.len());
                slots.push(Slot {
                    operation,
                    rank,
                    part: side,
                    first_cursor,
                    left,
                    arrived: BTreeMap::new(),
                });
                cursors += left;
            }
        }
        Self {
            network: Network::new(topology),
            operations,
            first_slot,
            slots,
            cursors: vec![Cursor::default(); cursors],
            queue: Queue::default(),
            bursts: Vec::new(),
            messages: Vec::new(),
            routes: Vec::new(),
            route_of: BTreeMap::new(),
            crossing: (0..topology.size()).map(|_| Stream::default()).collect(),
            pieces: 0,
            came: 0,
            awake: VecDeque::new(),
            finished: VecDeque::new(),
            until: Nanos::MAX,
        }
    }

    /// Ignores events later than `until`. Ends that depend on them are never returned.
    #[must_use]
    pub fn until(self, until: Nanos) -> Self {
        Self { until, ..self }
    }

    /// Returns the slot of a rank's part in an operation.
    fn slot(&self, operation: usize, rank: Rank) -> Option<usize> {
        let first = self.first_slot[operation];
        let count = self.operations[operation].parts.len();
        let sides = &self.slots[first..first + count];
        sides.binary_search_by_key(&rank, |slot| slot.rank).ok().map(|at| first + at)
    }

    /// Begins a rank's part of an operation at `at`, once. `at` must not be before the end that
    /// [`NetworkSimulator::next_completion`] returned last.
    ///
    /// # Panics
    /// If there is no such operation, or the rank has no part in it.
    pub fn begin(&mut self, operation: usize, rank: Rank, at: Nanos) {
        let number = self.slot(operation, rank).expect("the rank takes part in the operation");
        let &Slot { part: side, first_cursor, left, .. } = &self.slots[number];
        for (lane, cursor) in self.cursors[first_cursor..][..left].iter_mut().enumerate() {
            cursor.clock = at;
            if lane < side.window {
                cursor.stage = Stage::Runs;
                self.awake.push_back((number, lane));
            }
        }
        if left == 0 {
            self.finished.push_back(Completion { operation, rank, at });
        }
    }

    /// Returns the next end of a rank's part; `None` if nothing more happens.
    pub fn next_completion(&mut self) -> Option<Completion> {
        loop {
            while let Some((slot, lane)) = self.awake.pop_front() {
                self.advance_lane(slot, lane);
            }
            if let Some(finished) = self.finished.pop_front() {
                return Some(finished);
            }
            let event = self.queue.pop().filter(|event| event.at <= self.until)?;
            match event.class {
                Class::Departs => self.depart(event),
                Class::Arrives => self.arrive(event),
                Class::Crosses | Class::Enters | Class::Lands => self.move_stream(event),
            }
        }
    }

    /// Advances a lane as far as the arrived messages allow.
    fn advance_lane(&mut self, number: usize, lane: usize) {
        let slot = &mut self.slots[number];
        let frame = self.operations[slot.operation].frame.0.max(1);
        let side = slot.part;
        let Some(steps) = side.lanes.get(lane) else { return };
        let cursors = &mut self.cursors[slot.first_cursor..][..side.lanes.len()];
        let cursor = &mut cursors[lane];
        if cursor.stage != Stage::Runs {
            return;
        }
        'steps: while let Some(step) = steps.get(cursor.step) {
            if !cursor.sent && !step.sends.is_empty() {
                let first = self.pieces;
                self.pieces += step.sends.iter().map(|&(_, bytes)| pieces_of(bytes, frame)).sum::<u64>();
                self.bursts.push(Burst { slot: number, lane, step: cursor.step });
                let of = (self.bursts.len() - 1) as u32;
                let event =
                    Event { at: cursor.clock, class: Class::Departs, sender: slot.rank, number: first, of };
                self.queue.push(event);
            }
            cursor.sent = true;
            while let Some(&(from, bytes)) = step.receives.get(cursor.received.0) {
                let pieces = pieces_of(bytes, frame);
                while cursor.received.1 < pieces {
                    let mut of_sender = slot.arrived.range_mut((lane, from, 0)..=(lane, from, u64::MAX));
                    let Some((&key, (at, there))) = of_sender.next() else { break 'steps };
                    let taken = (*there).min(pieces - cursor.received.1);
                    cursor.clock = cursor.clock.max(*at);
                    cursor.received.1 += taken;
                    *there -= taken;
                    if *there == 0 {
                        slot.arrived.remove(&key);
                    }
                }
                cursor.received = (cursor.received.0 + 1, 0);
            }
            let Cursor { step, clock, stage, .. } = *cursor;
            *cursor = Cursor { step: step + 1, clock, stage, ..Cursor::default() };
        }
        if cursor.step < steps.len() {
            return;
        }
        cursor.stage = Stage::Ended;
        let (clock, next) = (cursor.clock, lane.saturating_add(side.window));
        slot.left -= 1;
        if let Some(next_cursor) = cursors.get_mut(next) {
            (next_cursor.clock, next_cursor.stage) = (clock, Stage::Runs);
            self.awake.push_back((number, next));
        }
        if slot.left == 0 {
            let at = cursors.iter().map(|cursor| cursor.clock).max().unwrap_or_default();
            self.finished.push_back(Completion { operation: slot.operation, rank: slot.rank, at });
        }
    }

    /// Passes all messages of a step through the sender's uplink.
    fn depart(&mut self, Event { at, sender, number: first, of, .. }: Event) {
        let Burst { slot, lane, step } = self.bursts[of as usize];
        let (operation, side) = (self.slots[slot].operation, self.slots[slot].part);
        let frame = self.operations[operation].frame.0.max(1);
        let step = &side.lanes[lane][step];
        let first_message = self.messages.len() as u32;
        for &(to, bytes) in &step.sends {
            let (slot, pieces) = (self.slot(operation, to), pieces_of(bytes, frame));
            let route = self.route(sender, to);
            self.messages.push(Message { slot, lane, from: sender, pieces, route });
        }
        let mut number = first;
        for_each_piece(step, frame, |piece| {
            let (message, last) = (first_message + piece.send as u32, piece.last);
            if step.sends[piece.send].0 == sender {
                if last {
                    let of = message;
                    self.queue.push(Event { at, class: Class::Arrives, sender, number, of });
                }
            } else {
                let flight = self.network.depart(sender, at, piece.bytes);
                self.departed(sender, Moving { number, flight, message, last });
            }
            number += 1;
        });
    }

    /// Returns the route between two ranks, creating it on first use.
    fn route(&mut self, from: Rank, to: Rank) -> u32 {
        if let Some(&route) = self.route_of.get(&(from, to)) {
            return route;
        }
        let limits = self.network.shared_limits(from, to);
        let route = Route {
            from,
            to,
            out: limits.out,
            into: limits.into,
            down: limits.down,
            entering: Stream::default(),
            landing: Stream::default(),
        };
        self.routes.push(route);
        let number = (self.routes.len() - 1) as u32;
        self.route_of.insert((from, to), number);
        number
    }

    /// Continues with a piece that has passed the sender's uplink.
    fn departed(&mut self, sender: Rank, piece: Moving) {
        let route = self.messages[piece.message as usize].route;
        let stream = &mut self.crossing[sender.index()];
        // An empty piece can leave the uplink at the same time as later pieces. The order among pieces of one
        // rank is then known only when all of them have departed.
        let waits = self.routes[route as usize].out || piece.flight.bytes.0 == 0 || !stream.is_empty();
        if waits && self.network.has_region_links() {
            if stream.put(piece) {
                self.await_piece(Class::Crosses, sender, piece, sender.0);
            }
        } else {
            self.cross(route, piece);
        }
    }

    /// Passes a piece over the uplink of the sender's region, if it leaves the region, and over the link of the
    /// pair.
    fn cross(&mut self, number: u32, mut piece: Moving) {
        let route = &mut self.routes[number as usize];
        piece.flight = self.network.cross(route.from, route.to, piece.flight);
        if !route.into {
            self.enter(number, piece);
        } else if route.entering.put(piece) {
            let from = route.from;
            self.await_piece(Class::Enters, from, piece, number);
        }
    }

    /// Passes a piece through the downlink of the receiver's region.
    fn enter(&mut self, number: u32, mut piece: Moving) {
        let route = &mut self.routes[number as usize];
        piece.flight = self.network.enter(route.from, route.to, piece.flight);
        if !route.down {
            self.land(number, piece);
        } else if route.landing.put(piece) {
            let from = route.from;
            self.await_piece(Class::Lands, from, piece, number);
        }
    }

    /// Passes a piece through the receiver's downlink.
    fn land(&mut self, number: u32, piece: Moving) {
        let Route { from: sender, to, .. } = self.routes[number as usize];
        let at = self.network.land(to, piece.flight);
        if piece.last {
            let event = Event { at, class: Class::Arrives, sender, number: piece.number, of: piece.message };
            self.queue.push(event);
        }
    }

    /// Adds an event for a piece that is now the first of its stream.
    fn await_piece(&mut self, class: Class, sender: Rank, piece: Moving, of: u32) {
        self.queue.push(Event { at: piece.flight.head, class, sender, number: piece.number, of });
    }

    /// Passes the first piece of a stream on to the next link, and then the following pieces until another
    /// event comes first.
    fn move_stream(&mut self, event: Event) {
        let mut event = event;
        loop {
            let stream = match event.class {
                Class::Crosses => &mut self.crossing[event.of as usize],
                Class::Enters => &mut self.routes[event.of as usize].entering,
                _ => &mut self.routes[event.of as usize].landing,
            };
            // If a piece was inserted before the first, events of both are in the heap, and this event's piece
            // may already have been moved.
            if stream.first().is_none_or(|first| first.number != event.number) {
                return;
            }
            let Some(piece) = stream.take() else { return };
            let next = stream.first().map(|first| (first.flight.head, first.number));
            match event.class {
                Class::Crosses => self.cross(self.messages[piece.message as usize].route, piece),
                Class::Enters => self.enter(event.of, piece),
                _ => self.land(event.of, piece),
            }
            let Some((at, number)) = next else { return };
            event = Event { at, number, ..event };
            if self.queue.first().is_some_and(|first| first < event) {
                self.queue.push(event);
                return;
            }
        }
    }

    /// Handles the complete arrival of a message.
    fn arrive(&mut self, Event { at, of, .. }: Event) {
        let Message { slot, lane, from, pieces, .. } = self.messages[of as usize];
        let Some(number) = slot else { return };
        self.awake.push_back((number, lane));
        let slot = &mut self.slots[number];
        // Fast path: the lane usually waits for exactly this message.
        if let Some(steps) = slot.part.lanes.get(lane) {
            let frame = self.operations[slot.operation].frame.0.max(1);
            let cursor = &mut self.cursors[slot.first_cursor + lane];
            let awaited = steps.get(cursor.step).and_then(|step| step.receives.get(cursor.received.0));
            let fits = awaited.is_some_and(|&(sender, bytes)| {
                sender == from && cursor.received.1 == 0 && pieces == pieces_of(bytes, frame)
            });
            if cursor.stage == Stage::Runs && cursor.sent && fits {
                cursor.clock = cursor.clock.max(at);
                cursor.received.1 = pieces;
                return;
            }
        }
        slot.arrived.insert((lane, from, self.came), (at, pieces));
        self.came += 1;
    }
}
