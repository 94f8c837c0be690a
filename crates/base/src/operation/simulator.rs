//! A walk in virtual time over any number of operations at once.
//!
//! The order of events is (time, what happens, sender, number of the piece), as if each piece of each message
//! were an event at each link. Most of these are left out where they change nothing: pieces that leave together
//! are one event, links without a limit are none, of the pieces between two ranks only the first waits in the
//! heap, and a message arrives with its last piece.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, VecDeque};

use super::burst::{for_each_piece, pieces_of};
use super::stream::{Moving, Stream};
use super::{Operation, Side};
use crate::network::Network;
use crate::{Nanos, Rank, Topology};

/// A rank has done its side of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Finished {
    /// The number of the operation.
    pub operation: usize,
    /// Who.
    pub rank: Rank,
    /// When. Not before the rank began.
    pub at: Nanos,
}

/// What happens, in the order of one instant.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Class {
    /// The messages of a step go to the sender's uplink.
    Departs,
    /// A piece comes to the line of the sender's region.
    Crosses,
    /// A piece comes to the line of the receiver's region.
    Enters,
    /// A piece comes to the receiver's downlink.
    Lands,
    /// A message is there.
    Arrives,
}

/// When what happens. The derived order is that in which events happen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Event {
    at: Nanos,
    class: Class,
    sender: Rank,
    /// Of the piece; of the first where several depart.
    number: u64,
    /// The burst, stream or message, by number.
    of: u32,
}

/// Events, the first of which is taken.
///
/// What was taken leaves a hole at the top of the heap, into which the next event goes that is added: most
/// events cause another, and this takes one descent instead of two.
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

/// How far one lane of one rank is.
#[derive(Debug, Clone, Copy, Default)]
struct Cursor {
    step: usize,
    /// The step's sends are on their way.
    sent: bool,
    /// Receives of the step that are done, and pieces of the next that are there.
    received: (usize, u64),
    clock: Nanos,
    stage: Stage,
}

/// Whether a lane is under way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Stage {
    /// Another lane has to end first.
    #[default]
    Waits,
    Runs,
    Ended,
}

/// One rank's side of one operation.
#[derive(Debug)]
struct Slot<'a> {
    operation: usize,
    rank: Rank,
    side: &'a Side,
    /// Of its first lane.
    first_cursor: usize,
    /// Lanes that have not ended.
    left: usize,
    /// When messages came, and pieces that are not yet taken, by lane, sender, and order.
    arrived: BTreeMap<(usize, Rank, u64), (Nanos, u64)>,
}

/// The messages of a step of a lane, which leave together.
#[derive(Debug, Clone, Copy)]
struct Burst {
    slot: usize,
    lane: usize,
    step: usize,
}

/// A message on its way.
#[derive(Debug, Clone, Copy)]
struct Message {
    /// Of the receiver; `None` where it has no side.
    slot: Option<usize>,
    lane: usize,
    from: Rank,
    pieces: u64,
    route: u32,
}

/// From one rank to another.
#[derive(Debug)]
struct Route {
    from: Rank,
    to: Rank,
    /// Which links are shared with other senders and have a limit: the line out of the sender's region, the
    /// line into the receiver's, the receiver's downlink.
    out: bool,
    into: bool,
    down: bool,
    /// Pieces that come to the line into the receiver's region, and to its downlink.
    entering: Stream,
    landing: Stream,
}

/// Exchanges in virtual time over one network.
///
/// Ranks begin their sides at times of their own. [`NetworkSimulator::next_end`] gives the ends, in the order
/// in which they become known. What begins because of an end does not begin before it. The messages that a lane
/// receives from a rank have to be those that it sends, in this order.
#[derive(Debug)]
pub struct NetworkSimulator<'a> {
    network: Network,
    operations: &'a [Operation],
    /// The first slot of each operation; its sides are ordered by rank.
    first_slot: Vec<usize>,
    slots: Vec<Slot<'a>>,
    /// By slot and lane.
    cursors: Vec<Cursor>,
    queue: Queue,
    bursts: Vec<Burst>,
    messages: Vec<Message>,
    routes: Vec<Route>,
    route_of: BTreeMap<(Rank, Rank), u32>,
    /// Pieces that come to the line out of the sender's region, by sender.
    crossing: Vec<Stream>,
    /// Pieces so far.
    pieces: u64,
    /// Messages that have come so far.
    came: u64,
    awake: VecDeque<(usize, usize)>,
    finished: VecDeque<Finished>,
    /// Nothing happens later.
    until: Nanos,
}

impl<'a> NetworkSimulator<'a> {
    /// All links are idle, and no operation has begun.
    #[must_use]
    pub fn new(topology: &Topology, operations: &'a [Operation]) -> Self {
        let (mut first_slot, mut slots, mut cursors) = (Vec::with_capacity(operations.len()), Vec::new(), 0);
        for (operation, sides) in operations.iter().map(|operation| &operation.sides).enumerate() {
            first_slot.push(slots.len());
            for (&rank, side) in sides {
                let (first_cursor, left) = (cursors, side.lanes.len());
                slots.push(Slot { operation, rank, side, first_cursor, left, arrived: BTreeMap::new() });
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

    /// Leaves out what happens later than `until`: the ends that depend on it are never told.
    #[must_use]
    pub fn until(self, until: Nanos) -> Self {
        Self { until, ..self }
    }

    /// The side of a rank in an operation.
    fn slot(&self, operation: usize, rank: Rank) -> Option<usize> {
        let first = self.first_slot[operation];
        let count = self.operations[operation].sides.len();
        let sides = &self.slots[first..first + count];
        sides.binary_search_by_key(&rank, |slot| slot.rank).ok().map(|at| first + at)
    }

    /// A rank begins its side of an operation, once. It must not be earlier than the end of which it was told
    /// last.
    ///
    /// # Panics
    /// If there is no such operation, or the rank is not in it.
    pub fn begin(&mut self, operation: usize, rank: Rank, at: Nanos) {
        let number = self.slot(operation, rank).expect("the rank has a side of the operation");
        let &Slot { side, first_cursor, left, .. } = &self.slots[number];
        for (lane, cursor) in self.cursors[first_cursor..][..left].iter_mut().enumerate() {
            cursor.clock = at;
            if lane < side.window {
                cursor.stage = Stage::Runs;
                self.awake.push_back((number, lane));
            }
        }
        if left == 0 {
            self.finished.push_back(Finished { operation, rank, at });
        }
    }

    /// The next end of a side; `None` when nothing more happens.
    pub fn next_end(&mut self) -> Option<Finished> {
        loop {
            while let Some((slot, lane)) = self.awake.pop_front() {
                self.go_on(slot, lane);
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

    /// A lane goes as far as what has come allows.
    fn go_on(&mut self, number: usize, lane: usize) {
        let slot = &mut self.slots[number];
        let frame = self.operations[slot.operation].frame.0.max(1);
        let side = slot.side;
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
            self.finished.push_back(Finished { operation: slot.operation, rank: slot.rank, at });
        }
    }

    /// All messages of a step go to the uplink.
    fn depart(&mut self, Event { at, sender, number: first, of, .. }: Event) {
        let Burst { slot, lane, step } = self.bursts[of as usize];
        let (operation, side) = (self.slots[slot].operation, self.slots[slot].side);
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

    /// What a piece goes over.
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

    /// A piece is behind the sender's uplink.
    fn departed(&mut self, sender: Rank, piece: Moving) {
        let route = self.messages[piece.message as usize].route;
        let stream = &mut self.crossing[sender.index()];
        // A piece of nothing can be at the end of the uplink together with later ones, and the order between
        // pieces of one rank is known only then.
        let waits = self.routes[route as usize].out || piece.flight.bytes.0 == 0 || !stream.is_empty();
        if waits && self.network.has_lines() {
            if stream.put(piece) {
                self.await_piece(Class::Crosses, sender, piece, sender.0);
            }
        } else {
            self.cross(route, piece);
        }
    }

    /// A piece goes over the link between the two ranks.
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

    /// A piece goes over the line into the receiver's region.
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

    /// A piece goes over the receiver's downlink.
    fn land(&mut self, number: u32, piece: Moving) {
        let Route { from: sender, to, .. } = self.routes[number as usize];
        let at = self.network.land(to, piece.flight);
        if piece.last {
            let event = Event { at, class: Class::Arrives, sender, number: piece.number, of: piece.message };
            self.queue.push(event);
        }
    }

    /// The first piece of a stream waits in the heap.
    fn await_piece(&mut self, class: Class, sender: Rank, piece: Moving, of: u32) {
        self.queue.push(Event { at: piece.flight.head, class, sender, number: piece.number, of });
    }

    /// The first piece of a stream goes on, and those behind it as long as nothing else comes before them.
    fn move_stream(&mut self, event: Event) {
        let mut event = event;
        loop {
            let stream = match event.class {
                Class::Crosses => &mut self.crossing[event.of as usize],
                Class::Enters => &mut self.routes[event.of as usize].entering,
                _ => &mut self.routes[event.of as usize].landing,
            };
            // Where a piece came before the first, both wait in the heap, and the first may be gone.
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

    /// A message is there.
    fn arrive(&mut self, Event { at, of, .. }: Event) {
        let Message { slot, lane, from, pieces, .. } = self.messages[of as usize];
        let Some(number) = slot else { return };
        self.awake.push_back((number, lane));
        let slot = &mut self.slots[number];
        // Mostly a lane waits for just this message.
        if let Some(steps) = slot.side.lanes.get(lane) {
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
