//! What a collective costs on declared links: the alpha-beta model with each rank's access link as a shared resource.
//!
//! Pure. The simulated transport moves real bytes by the same rules, in [`Links`], and a test holds the two together.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, VecDeque};

use farflung_base::{Bytes, Nanos, Rank, Topology};

use crate::FRAME_BYTES;
use crate::steps::{Code, CodedMessage, Program, Step};

/// The state of all links: when each becomes free. A transfer goes out over the sender's uplink and its region's, over the
/// pair's own link, and in over the receiver's region's downlink and its own, each first come first served and each at its own
/// rate; its last byte is there when the slowest of them has passed it.
///
/// The order of calls for one transfer: [`Links::depart`], [`Links::cross`], [`Links::enter`] where
/// [`Links::has_lines`], [`Links::land`]. Each is to be called in the order of time over all transfers.
#[derive(Debug, Clone)]
pub(crate) struct Links {
    topology: Topology,
    up: Vec<Nanos>,
    pair: Vec<Nanos>,
    down: Vec<Nanos>,
    /// By region.
    line_up: Vec<Nanos>,
    line_down: Vec<Nanos>,
}

/// A transfer on its way.
#[derive(Debug, Clone, Copy)]
pub(crate) struct InFlight {
    /// When its first byte reaches what it goes over next.
    pub(crate) head: Nanos,
    /// When its last byte does, at best.
    pub(crate) tail: Nanos,
    pub(crate) bytes: Bytes,
}

impl Links {
    pub(crate) fn new(topology: &Topology) -> Self {
        let idle = |count| vec![Nanos::ZERO; count];
        let (n, regions) = (topology.size(), topology.regions());
        Self {
            topology: topology.clone(),
            up: idle(n),
            pair: idle(n * n),
            down: idle(n),
            line_up: idle(regions),
            line_down: idle(regions),
        }
    }

    /// Whether regions share lines, so that what leaves one rank can hold up what leaves another.
    pub(crate) const fn has_lines(&self) -> bool {
        !self.line_up.is_empty()
    }

    /// Sends `bytes` at `at`, or when the sender's uplink is free.
    pub(crate) fn depart(&mut self, from: Rank, at: Nanos, bytes: Bytes) -> InFlight {
        let up = self.topology.port(from).up;
        let (head, tail) = occupy(&mut self.up[from.index()], at, up.transfer(bytes));
        InFlight { head, tail, bytes }
    }

    /// Goes from the sender's uplink to the receiver, over the line of the sender's region where it leaves that.
    pub(crate) fn cross(&mut self, from: Rank, to: Rank, transfer: InFlight) -> InFlight {
        let InFlight { mut head, mut tail, bytes } = transfer;
        if let Some(region) = self.topology.region(from).filter(|_| self.topology.leaves(from, to)) {
            let up = self.topology.region_port(region).up;
            let (start, out) = occupy(&mut self.line_up[region], head, up.transfer(bytes));
            (head, tail) = (start, tail.max(out));
        }
        let link = self.topology.link(from, to);
        let pair = &mut self.pair[from.index() * self.topology.size() + to.index()];
        let (start, through) = occupy(pair, head, link.bandwidth.transfer(bytes));
        let later = |time: Nanos| time.saturating_add(link.latency);
        InFlight { head: later(start), tail: later(tail.max(through)), bytes }
    }

    /// Comes in over the line of the receiver's region where it comes from outside.
    pub(crate) fn enter(&mut self, from: Rank, to: Rank, transfer: InFlight) -> InFlight {
        let InFlight { head, tail, bytes } = transfer;
        let Some(region) = self.topology.region(to).filter(|_| self.topology.leaves(from, to)) else {
            return transfer;
        };
        let down = self.topology.region_port(region).down;
        let (head, end) = occupy(&mut self.line_down[region], head, down.transfer(bytes));
        InFlight { head, tail: tail.max(end), bytes }
    }

    /// Receives what arrives from `head` on; returns when its last byte is there.
    pub(crate) fn land(&mut self, to: Rank, transfer: InFlight) -> Nanos {
        let InFlight { head, tail, bytes } = transfer;
        let (_, end) = occupy(&mut self.down[to.index()], head, self.topology.port(to).down.transfer(bytes));
        end.max(tail)
    }
}

/// Takes a link for `length` from `at` on, or from when it is free; returns start and end.
fn occupy(free: &mut Nanos, at: Nanos, length: Nanos) -> (Nanos, Nanos) {
    let start = at.max(*free);
    *free = start.saturating_add(length);
    (start, *free)
}

/// Frames into which the price cuts the whole buffer at most: finer than that changes nothing that matters.
const FRAMES: u64 = 4096;

/// What happens to a transfer, in the order of one instant.
const DEPARTS: u8 = 0;
const CROSSES: u8 = 1;
const ENTERS: u8 = 2;
const LANDS: u8 = 3;
const ARRIVES: u8 = 4;

/// How far one lane of one rank is.
#[derive(Debug, Clone, Copy, Default)]
struct Cursor {
    step: usize,
    /// The step's sends are on their way.
    sent: bool,
    /// Receives of the step that are done, and frames of the next that are there.
    received: (usize, u64),
    clock: Nanos,
}

/// What the transfers of a program carry.
struct Sizes<'a> {
    /// Of the whole buffer, as plain transfers take it.
    bytes: u64,
    /// Values of the buffer, and the most bytes that the codec makes of so many: of messages.
    len: usize,
    payload: &'a dyn Fn(usize) -> usize,
}

impl Sizes<'_> {
    /// Bytes of a message.
    fn message(&self, program: &Program, number: usize) -> u64 {
        let CodedMessage { block, code } = program.messages[number];
        let values = program.elements(&(block..block + 1), self.len).len();
        match code {
            Code::Plain => (values * size_of::<f32>()) as u64,
            Code::Coded(_) => (self.payload)(values) as u64,
        }
    }

    /// What a step sends: to whom, and bytes.
    fn sends(&self, program: &Program, step: &Step) -> Vec<(Rank, u64)> {
        let plain = step.sends.iter().map(|(to, blocks)| (*to, program.bytes(blocks, self.bytes)));
        let coded = step.coding.sends.iter().map(|&(to, number)| (to, self.message(program, number)));
        plain.chain(coded).collect()
    }

    /// A step's receive: from whom, and bytes.
    fn receive(&self, program: &Program, step: &Step, i: usize) -> Option<(Rank, u64)> {
        if let Some((from, blocks, _)) = step.recvs.get(i) {
            return Some((*from, program.bytes(blocks, self.bytes)));
        }
        let &(from, number) = step.coding.recvs.get(i - step.recvs.len())?;
        Some((from, self.message(program, number)))
    }
}

/// Virtual time from a common start until the last rank has done its program over a buffer of `bytes`.
///
/// `programs` has one program per rank of `topology`; [`Nanos::MAX`] if they do not fit together or a link is dead.
#[must_use]
pub fn cost(programs: &[Program], bytes: Bytes, topology: &Topology) -> Nanos {
    let len = bytes.0 as usize / size_of::<f32>();
    walk(programs, &Sizes { bytes: bytes.0, len, payload: &|values| values * size_of::<f32>() }, topology)
}

/// [`cost`] of coded programs over a buffer of `len` values; `payload` is the most bytes that the codec makes of so many.
///
/// Encoding and decoding take no time.
#[must_use]
pub fn cost_coded(
    programs: &[Program],
    len: usize,
    payload: &dyn Fn(usize) -> usize,
    topology: &Topology,
) -> Nanos {
    walk(programs, &Sizes { bytes: (len * size_of::<f32>()) as u64, len, payload }, topology)
}

fn walk(programs: &[Program], sizes: &Sizes<'_>, topology: &Topology) -> Nanos {
    let frame = (sizes.bytes / FRAMES).max(FRAME_BYTES as u64);
    let mut links = Links::new(topology);
    let mut cursors: Vec<Vec<Cursor>> =
        programs.iter().map(|program| vec![Cursor::default(); program.lanes.len()]).collect();
    // By lane, sender and receiver.
    let mut arrived: BTreeMap<(usize, usize, usize), VecDeque<Nanos>> = BTreeMap::new();
    // (time, class, from, number, to, lane): in one instant first departures, then what goes over the lines of regions, out
    // and in, then landings, then arrivals.
    let mut queue = BinaryHeap::new();
    // By number.
    let mut flights: Vec<InFlight> = Vec::new();
    let lanes = |(rank, program): (usize, &Program)| {
        (0..program.lanes.len().min(program.window)).map(move |lane| (rank, lane))
    };
    let mut awake: VecDeque<(usize, usize)> = programs.iter().enumerate().flat_map(lanes).collect();
    loop {
        while let Some((rank, lane)) = awake.pop_front() {
            let program = &programs[rank];
            let cursor = &mut cursors[rank][lane];
            let ended = program.lanes[lane].len();
            if cursor.step == ended {
                continue;
            }
            'steps: while let Some(step) = program.lanes[lane].get(cursor.step) {
                // A frame of each at a time, as they are really sent.
                let sends = if cursor.sent { Vec::new() } else { sizes.sends(program, step) };
                let mut left: Vec<_> = sends.into_iter().map(|(to, bytes)| (to, Some(bytes))).collect();
                while left.iter().any(|(_, left)| left.is_some()) {
                    for i in 0..left.len() {
                        let (to, Some(rest)) = left[i] else { continue };
                        if left[..i].iter().any(|&(other, rest)| other == to && rest.is_some()) {
                            continue;
                        }
                        let class = if to.index() == rank { ARRIVES } else { DEPARTS };
                        queue.push(Reverse((cursor.clock, class, rank, flights.len(), to.index(), lane)));
                        let bytes = Bytes(rest.min(frame));
                        flights.push(InFlight { head: Nanos::ZERO, tail: Nanos::ZERO, bytes });
                        left[i].1 = (rest > frame).then(|| rest - frame);
                    }
                }
                cursor.sent = true;
                while let Some((from, bytes)) = sizes.receive(program, step, cursor.received.0) {
                    let frames = bytes.div_ceil(frame).max(1);
                    while cursor.received.1 < frames {
                        let there =
                            arrived.get_mut(&(lane, from.index(), rank)).and_then(VecDeque::pop_front);
                        let Some(at) = there else { break 'steps };
                        cursor.clock = cursor.clock.max(at);
                        cursor.received.1 += 1;
                    }
                    cursor.received = (cursor.received.0 + 1, 0);
                }
                *cursor = Cursor { step: cursor.step + 1, clock: cursor.clock, ..Cursor::default() };
            }
            let (over, clock, next) =
                (cursor.step == ended, cursor.clock, lane.saturating_add(program.window));
            if over && next < program.lanes.len() {
                cursors[rank][next].clock = clock;
                awake.push_back((rank, next));
            }
        }
        let Some(Reverse((time, class, from, number, to, lane))) = queue.pop() else { break };
        let flight = &mut flights[number];
        let (sender, receiver) = (Rank(from as u32), Rank(to as u32));
        let mut next = |at, class| queue.push(Reverse((at, class, from, number, to, lane)));
        match class {
            DEPARTS => {
                *flight = links.depart(sender, time, flight.bytes);
                if links.has_lines() {
                    next(flight.head, CROSSES);
                } else {
                    *flight = links.cross(sender, receiver, *flight);
                    next(flight.head, LANDS);
                }
            }
            CROSSES => {
                *flight = links.cross(sender, receiver, *flight);
                next(flight.head, ENTERS);
            }
            ENTERS => {
                *flight = links.enter(sender, receiver, *flight);
                next(flight.head, LANDS);
            }
            LANDS => next(links.land(receiver, *flight), ARRIVES),
            _ => {
                arrived.entry((lane, from, to)).or_default().push_back(time);
                awake.push_back((to, lane));
            }
        }
    }
    let done = |(cursors, program): (&Vec<Cursor>, &Program)| {
        cursors.iter().zip(&program.lanes).all(|(cursor, lane)| cursor.step == lane.len())
    };
    if cursors.iter().zip(programs).all(done) {
        cursors.iter().flatten().map(|cursor| cursor.clock).max().unwrap_or_default()
    } else {
        Nanos::MAX
    }
}
