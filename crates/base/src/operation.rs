//! What goes over the links of a topology when ranks talk to each other: who sends what to whom in which order,
//! in bytes; and a walk in virtual time over any number of such operations at once. No data moves.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, VecDeque};

use crate::network::{InFlight, Network};
use crate::{Bytes, Nanos, Rank, Topology};

/// How the messages of a step leave a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum SendOrder {
    /// A piece of each, in turns; of several to one rank the next begins when the one before has left.
    #[default]
    SideBySide,
    /// One message after the other.
    InTurn,
}

/// One step of a rank in an operation: what it receives is taken in the order of the list. The next step starts
/// when all is there.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct OperationStep {
    /// To whom, and how much.
    pub sends: Vec<(Rank, Bytes)>,
    /// How that leaves.
    pub order: SendOrder,
    /// From whom, and how much.
    pub receives: Vec<(Rank, Bytes)>,
}

/// What one rank does in an operation.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Side {
    /// Lists of steps that run side by side. Lane `i` of a rank talks to lane `i` of others.
    pub lanes: Vec<Vec<OperationStep>>,
    /// Lanes under way at a time: lane `i` starts when lane `i - window` is done.
    pub window: usize,
}

/// A message or a collective, as the bytes that its ranks send to each other.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Operation {
    /// By rank.
    pub sides: BTreeMap<Rank, Side>,
    /// Messages travel in pieces of at most so much, at least a byte.
    pub frame: Bytes,
}

impl Operation {
    /// A message from one rank to another.
    #[must_use]
    pub fn message(from: Rank, to: Rank, bytes: Bytes, frame: Bytes) -> Self {
        let side = |turn| Side { lanes: vec![vec![turn]], window: usize::MAX };
        let sent = OperationStep { sends: vec![(to, bytes)], ..OperationStep::default() };
        let received = OperationStep { receives: vec![(from, bytes)], ..OperationStep::default() };
        Self { sides: BTreeMap::from([(from, side(sent)), (to, side(received))]), frame }
    }

    /// The same among other ranks: its rank `i` becomes `ranks[i]`.
    ///
    /// # Panics
    /// If `ranks` is shorter than the operation needs, or names a rank twice.
    #[must_use]
    pub fn among(&self, ranks: &[Rank]) -> Self {
        let place = |rank: Rank| ranks[rank.index()];
        let moved = |list: &[(Rank, Bytes)]| list.iter().map(|&(rank, bytes)| (place(rank), bytes)).collect();
        let step = |step: &OperationStep| OperationStep {
            sends: moved(&step.sends),
            order: step.order,
            receives: moved(&step.receives),
        };
        let lane = |lane: &Vec<OperationStep>| lane.iter().map(step).collect();
        let side = |side: &Side| Side { lanes: side.lanes.iter().map(lane).collect(), window: side.window };
        let sides: BTreeMap<Rank, Side> =
            self.sides.iter().map(|(&rank, of)| (place(rank), side(of))).collect();
        assert_eq!(sides.len(), self.sides.len(), "a rank stands for two");
        Self { sides, frame: self.frame }
    }
}

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

/// What happens to a piece, in the order of one instant.
const DEPARTS: u8 = 0;
const CROSSES: u8 = 1;
const ENTERS: u8 = 2;
const LANDS: u8 = 3;
const ARRIVES: u8 = 4;

/// When what happens: time, class, sender, number of the piece.
type Event = (Nanos, u8, usize, usize);

/// A piece of a message on its way.
#[derive(Debug, Clone, Copy)]
struct Piece {
    operation: usize,
    lane: usize,
    to: Rank,
    transfer: InFlight,
}

/// How far one lane of one rank is.
#[derive(Debug, Clone, Copy, Default)]
struct Cursor {
    turn: usize,
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

/// How far one rank is.
#[derive(Debug, Default)]
struct Progress {
    cursors: Vec<Cursor>,
    /// Lanes that have not ended.
    left: usize,
}

/// Exchanges in virtual time over one network.
///
/// Ranks begin their sides at times of their own. [`NetworkSimulator::next_end`] gives the ends, in the order
/// in which they become known. What begins because of an end does not begin before it.
#[derive(Debug)]
pub struct NetworkSimulator<'a> {
    network: Network,
    operations: &'a [Operation],
    progress: BTreeMap<(usize, Rank), Progress>,
    queue: BinaryHeap<Reverse<Event>>,
    /// By number.
    pieces: Vec<Piece>,
    /// When pieces came, by operation, lane, sender and receiver.
    arrived: BTreeMap<(usize, usize, Rank, Rank), VecDeque<Nanos>>,
    awake: VecDeque<(usize, Rank, usize)>,
    finished: VecDeque<Finished>,
}

impl<'a> NetworkSimulator<'a> {
    /// All links are idle, and no operation has begun.
    #[must_use]
    pub fn new(topology: &Topology, operations: &'a [Operation]) -> Self {
        Self {
            network: Network::new(topology),
            operations,
            progress: BTreeMap::new(),
            queue: BinaryHeap::new(),
            pieces: Vec::new(),
            arrived: BTreeMap::new(),
            awake: VecDeque::new(),
            finished: VecDeque::new(),
        }
    }

    /// A rank begins its side of an operation, once. It must not be earlier than the end of which it was told
    /// last.
    ///
    /// # Panics
    /// If there is no such operation, or the rank is not in it.
    pub fn begin(&mut self, operation: usize, rank: Rank, at: Nanos) {
        let side = &self.operations[operation].sides[&rank];
        let cursors = vec![Cursor { clock: at, ..Cursor::default() }; side.lanes.len()];
        let left = cursors.len();
        let mut progress = Progress { cursors, left };
        for (lane, cursor) in progress.cursors.iter_mut().enumerate().take(side.window) {
            cursor.stage = Stage::Runs;
            self.awake.push_back((operation, rank, lane));
        }
        self.progress.insert((operation, rank), progress);
        if left == 0 {
            self.finished.push_back(Finished { operation, rank, at });
        }
    }

    /// The next end of a side; `None` when nothing more happens.
    pub fn next_end(&mut self) -> Option<Finished> {
        loop {
            while let Some((operation, rank, lane)) = self.awake.pop_front() {
                self.go_on(operation, rank, lane);
            }
            if let Some(finished) = self.finished.pop_front() {
                return Some(finished);
            }
            let Reverse(event) = self.queue.pop()?;
            self.happen(event);
        }
    }

    /// A lane goes as far as what has come allows.
    fn go_on(&mut self, operation: usize, rank: Rank, lane: usize) {
        let Operation { sides, frame } = &self.operations[operation];
        let (side, frame) = (&sides[&rank], frame.0.max(1));
        let Some(progress) = self.progress.get_mut(&(operation, rank)) else { return };
        let (turns, cursor) = (&side.lanes[lane], &mut progress.cursors[lane]);
        if cursor.stage != Stage::Runs {
            return;
        }
        'turns: while let Some(turn) = turns.get(cursor.turn) {
            let sends = if cursor.sent { &[][..] } else { &turn.sends[..] };
            let mut left: Vec<_> = sends.iter().map(|&(to, bytes)| (to, Some(bytes.0))).collect();
            while left.iter().any(|(_, left)| left.is_some()) {
                for i in 0..left.len() {
                    let (to, Some(rest)) = left[i] else { continue };
                    let before = |&(other, rest): &(Rank, Option<u64>)| {
                        rest.is_some() && (other == to || turn.order == SendOrder::InTurn)
                    };
                    if left[..i].iter().any(before) {
                        continue;
                    }
                    let class = if to == rank { ARRIVES } else { DEPARTS };
                    self.queue.push(Reverse((cursor.clock, class, rank.index(), self.pieces.len())));
                    let transfer = InFlight { bytes: Bytes(rest.min(frame)), ..InFlight::default() };
                    self.pieces.push(Piece { operation, lane, to, transfer });
                    left[i].1 = (rest > frame).then(|| rest - frame);
                }
            }
            cursor.sent = true;
            while let Some(&(from, bytes)) = turn.receives.get(cursor.received.0) {
                let pieces = bytes.0.div_ceil(frame).max(1);
                while cursor.received.1 < pieces {
                    let there =
                        self.arrived.get_mut(&(operation, lane, from, rank)).and_then(VecDeque::pop_front);
                    let Some(at) = there else { break 'turns };
                    cursor.clock = cursor.clock.max(at);
                    cursor.received.1 += 1;
                }
                cursor.received = (cursor.received.0 + 1, 0);
            }
            let Cursor { turn, clock, stage, .. } = *cursor;
            *cursor = Cursor { turn: turn + 1, clock, stage, ..Cursor::default() };
        }
        if cursor.turn < turns.len() {
            return;
        }
        cursor.stage = Stage::Ended;
        let (clock, next) = (cursor.clock, lane.saturating_add(side.window));
        progress.left -= 1;
        if next < side.lanes.len() {
            let next_cursor = &mut progress.cursors[next];
            (next_cursor.clock, next_cursor.stage) = (clock, Stage::Runs);
            self.awake.push_back((operation, rank, next));
        }
        if progress.left == 0 {
            let at = progress.cursors.iter().map(|cursor| cursor.clock).max().unwrap_or_default();
            self.finished.push_back(Finished { operation, rank, at });
        }
    }

    fn happen(&mut self, (time, class, from, number): Event) {
        let Piece { operation, lane, to, transfer } = &mut self.pieces[number];
        let sender = Rank(from as u32);
        let mut next = |at, class| self.queue.push(Reverse((at, class, from, number)));
        match class {
            DEPARTS => {
                *transfer = self.network.depart(sender, time, transfer.bytes);
                if self.network.has_lines() {
                    next(transfer.head, CROSSES);
                } else {
                    *transfer = self.network.cross(sender, *to, *transfer);
                    next(transfer.head, LANDS);
                }
            }
            CROSSES => {
                *transfer = self.network.cross(sender, *to, *transfer);
                next(transfer.head, ENTERS);
            }
            ENTERS => {
                *transfer = self.network.enter(sender, *to, *transfer);
                next(transfer.head, LANDS);
            }
            LANDS => next(self.network.land(*to, *transfer), ARRIVES),
            _ => {
                let (operation, lane, to) = (*operation, *lane, *to);
                self.arrived.entry((operation, lane, sender, to)).or_default().push_back(time);
                self.awake.push_back((operation, to, lane));
            }
        }
    }
}

/// Virtual time from a common start until the last rank has done its side of an operation alone on the links;
/// [`Nanos::MAX`] if its sides do not fit together or a link is dead.
#[must_use]
pub fn alone(operation: &Operation, topology: &Topology) -> Nanos {
    let mut simulator = NetworkSimulator::new(topology, std::slice::from_ref(operation));
    operation.sides.keys().for_each(|&rank| simulator.begin(0, rank, Nanos::ZERO));
    let (mut ended, mut last) = (0, Nanos::ZERO);
    while let Some(Finished { at, .. }) = simulator.next_end() {
        (ended, last) = (ended + 1, last.max(at));
    }
    if ended == operation.sides.len() { last } else { Nanos::MAX }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Bandwidth, Port};

    const FRAME: Bytes = Bytes(1_000_000);

    fn ms(n: u64) -> Nanos {
        Nanos::from_millis(n)
    }

    /// 8 Mbit/s and 1 ms: a thousand bytes take a millisecond.
    fn topology(ranks: usize) -> Topology {
        Topology::uniform(ranks, "8mbit,1ms".parse().unwrap())
    }

    #[test]
    fn messages_of_one_rank_share_its_uplink_and_those_of_others_do_not_disturb_them() {
        let message = |from, to, bytes| Operation::message(Rank(from), Rank(to), Bytes(bytes), FRAME);
        assert_eq!(alone(&message(0, 1, 5_000), &topology(2)), ms(6));
        let all = [message(0, 1, 5_000), message(0, 2, 5_000), message(3, 2, 2_000)];
        let topology = topology(4);
        let mut simulator = NetworkSimulator::new(&topology, &all);
        for (number, operation) in all.iter().enumerate() {
            operation.sides.keys().for_each(|&rank| simulator.begin(number, rank, ms(10)));
        }
        let mut ends = BTreeMap::new();
        while let Some(Finished { operation, rank, at }) = simulator.next_end() {
            ends.insert((operation, rank.0), at);
        }
        // A sender has done its side when it has begun.
        assert_eq!(ends[&(0, 0)], ms(10));
        assert_eq!([ends[&(0, 1)], ends[&(1, 2)], ends[&(2, 2)]], [ms(16), ms(21), ms(13)]);
    }

    #[test]
    fn what_leaves_a_region_shares_its_line_and_late_receivers_find_what_came() {
        let mut topology = Topology::uniform(4, "80mbit,1ms".parse().unwrap());
        for pair in [[Rank(0), Rank(1)], [Rank(2), Rank(3)]] {
            topology.set_region(&pair, Port { up: Bandwidth(8_000_000), down: Bandwidth(8_000_000) });
        }
        let all =
            [(0, 2), (1, 3)].map(|(from, to)| Operation::message(Rank(from), Rank(to), Bytes(4_000), FRAME));
        let mut simulator = NetworkSimulator::new(&topology, &all);
        simulator.begin(0, Rank(0), ms(0));
        simulator.begin(1, Rank(1), ms(0));
        simulator.begin(0, Rank(2), ms(0));
        simulator.begin(1, Rank(3), ms(100));
        let ends: BTreeMap<_, _> =
            std::iter::from_fn(|| simulator.next_end()).map(|end| (end.rank.0, end.at)).collect();
        // The second waits for the line; who asks later has it at once.
        assert_eq!((ends[&2], ends[&3]), (ms(5), ms(100)));
        let both = Operation {
            sides: all.iter().flat_map(|operation| operation.sides.clone()).collect(),
            frame: FRAME,
        };
        assert_eq!(alone(&both, &topology), ms(9));
    }

    /// Two messages of two pieces each over one uplink.
    #[test]
    fn messages_leave_in_turns_or_one_after_the_other() {
        let ends = |order| {
            let two = |to| (Rank(to), Bytes(2_000));
            let step = OperationStep { sends: vec![two(1), two(2)], order, receives: Vec::new() };
            let mut operation = Operation::message(Rank(0), Rank(1), Bytes(2_000), Bytes(1_000));
            let other = Operation::message(Rank(0), Rank(2), Bytes(2_000), Bytes(1_000));
            operation.sides.extend(other.sides);
            operation.sides.get_mut(&Rank(0)).unwrap().lanes[0] = vec![step];
            let topology = topology(3);
            let all = [operation];
            let mut simulator = NetworkSimulator::new(&topology, &all);
            all[0].sides.keys().for_each(|&rank| simulator.begin(0, rank, ms(0)));
            std::iter::from_fn(|| simulator.next_end()).map(|end| end.at).skip(1).collect::<Vec<_>>()
        };
        assert_eq!(ends(SendOrder::SideBySide), [ms(4), ms(5)]);
        assert_eq!(ends(SendOrder::InTurn), [ms(3), ms(5)]);
    }

    #[test]
    fn sides_that_do_not_fit_never_end() {
        let mut operation = Operation::message(Rank(0), Rank(1), Bytes(10), FRAME);
        operation.sides.remove(&Rank(0));
        assert_eq!(alone(&operation, &topology(2)), Nanos::MAX);
        let moved = Operation::message(Rank(0), Rank(1), Bytes(10), FRAME).among(&[Rank(3), Rank(1)]);
        assert_eq!(moved, Operation::message(Rank(3), Rank(1), Bytes(10), FRAME));
    }
}
