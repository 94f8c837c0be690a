//! Reference simulator: a plain loop over every event of every piece.
//! [`NetworkSimulator`](super::NetworkSimulator) must give exactly the same times.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, VecDeque};

use super::{Completion, Operation, SendOrder};
use crate::network::{InFlight, Network};
use crate::{Bytes, Nanos, Rank, Topology};

/// Classes of events. Events of the same time are processed in the order of these numbers.
const DEPARTS: u8 = 0;
const CROSSES: u8 = 1;
const ENTERS: u8 = 2;
const LANDS: u8 = 3;
const ARRIVES: u8 = 4;

/// An event: time, class, sender, piece number.
type Event = (Nanos, u8, usize, usize);

/// A piece of a message that is being sent.
#[derive(Debug, Clone, Copy)]
struct Piece {
    operation: usize,
    lane: usize,
    to: Rank,
    transfer: InFlight,
}

/// Progress of one lane (list of steps) of one rank.
#[derive(Debug, Clone, Copy, Default)]
struct Cursor {
    turn: usize,
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

/// Progress of one rank's part in an operation.
#[derive(Debug, Default)]
struct Progress {
    cursors: Vec<Cursor>,
    /// Number of lanes that have not ended.
    left: usize,
}

/// Simulates operations in virtual time on one network.
#[derive(Debug)]
pub(super) struct EventByEvent<'a> {
    network: Network,
    operations: &'a [Operation],
    progress: BTreeMap<(usize, Rank), Progress>,
    queue: BinaryHeap<Reverse<Event>>,
    /// Pieces, indexed by piece number.
    pieces: Vec<Piece>,
    /// Times at which pieces arrived, by operation, lane, sender and receiver.
    arrived: BTreeMap<(usize, usize, Rank, Rank), VecDeque<Nanos>>,
    awake: VecDeque<(usize, Rank, usize)>,
    finished: VecDeque<Completion>,
}

impl<'a> EventByEvent<'a> {
    /// Creates a simulator with idle links and no operation begun.
    #[must_use]
    pub(super) fn new(topology: &Topology, operations: &'a [Operation]) -> Self {
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

    /// Begins a rank's part of an operation at `at`, once. `at` must not be before the end that
    /// `next_completion` returned last.
    pub(super) fn begin(&mut self, operation: usize, rank: Rank, at: Nanos) {
        let side = &self.operations[operation].parts[&rank];
        let cursors = vec![Cursor { clock: at, ..Cursor::default() }; side.lanes.len()];
        let left = cursors.len();
        let mut progress = Progress { cursors, left };
        for (lane, cursor) in progress.cursors.iter_mut().enumerate().take(side.window) {
            cursor.stage = Stage::Runs;
            self.awake.push_back((operation, rank, lane));
        }
        self.progress.insert((operation, rank), progress);
        if left == 0 {
            self.finished.push_back(Completion { operation, rank, at });
        }
    }

    /// Returns the next end of a rank's part; `None` if nothing more happens.
    pub(super) fn next_completion(&mut self) -> Option<Completion> {
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

    /// Advances a lane as far as the arrived pieces allow.
    fn go_on(&mut self, operation: usize, rank: Rank, lane: usize) {
        let Operation { parts: sides, frame } = &self.operations[operation];
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
                        rest.is_some() && (other == to || turn.order == SendOrder::Sequential)
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
            self.finished.push_back(Completion { operation, rank, at });
        }
    }

    fn happen(&mut self, (time, class, from, number): Event) {
        let Piece { operation, lane, to, transfer } = &mut self.pieces[number];
        let sender = Rank(from as u32);
        let mut next = |at, class| self.queue.push(Reverse((at, class, from, number)));
        match class {
            DEPARTS => {
                *transfer = self.network.depart(sender, time, transfer.bytes);
                if self.network.has_region_links() {
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
