//! What a collective costs on declared links: the alpha-beta model with each rank's access link as a shared resource.
//!
//! Pure. The simulated transport moves real bytes by the same rules, in [`Links`], and a test holds the two together.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, VecDeque};

use farflung_base::{Bytes, Nanos, Rank, Topology};

use crate::halving_doubling::halving_doubling;
use crate::ring::ring;
use crate::steps::{Program, cut};

/// Which all-reduce.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Algorithm {
    /// [`ring`].
    #[default]
    Ring,
    /// [`halving_doubling`].
    HalvingDoubling,
    /// The cheaper of them by [`cost`] on the declared topology; ties go to the ring.
    Auto,
}

impl Algorithm {
    /// The algorithm that this means for a buffer of `bytes` on `topology`; never `Auto`.
    #[must_use]
    pub fn resolve(self, bytes: Bytes, topology: &Topology) -> Self {
        if self != Self::Auto {
            return self;
        }
        let price = |algorithm: Self| {
            let programs: Vec<_> = (0..topology.size())
                .map(|rank| algorithm.program(Rank(rank as u32), topology.size()))
                .collect();
            cost(&programs, bytes, topology)
        };
        if price(Self::HalvingDoubling) < price(Self::Ring) { Self::HalvingDoubling } else { Self::Ring }
    }

    /// One rank's steps; `Auto` that was not resolved is the ring.
    #[must_use]
    pub fn program(self, rank: Rank, size: usize) -> Program {
        match self {
            Self::Ring | Self::Auto => ring(rank, size),
            Self::HalvingDoubling => halving_doubling(rank, size),
        }
    }
}

/// The state of all access links: when each becomes free.
#[derive(Debug, Clone)]
pub(crate) struct Links {
    topology: Topology,
    up: Vec<Nanos>,
    down: Vec<Nanos>,
}

/// A transfer that has left its sender.
#[derive(Debug, Clone, Copy)]
pub(crate) struct InFlight {
    /// When its first byte reaches the receiver's access link.
    pub(crate) head: Nanos,
    /// How long it occupies each end.
    pub(crate) length: Nanos,
}

impl Links {
    pub(crate) fn new(topology: &Topology) -> Self {
        let idle = vec![Nanos::ZERO; topology.size()];
        Self { topology: topology.clone(), up: idle.clone(), down: idle }
    }

    /// Sends `bytes` at `at`, or when the uplink is free. To be called in the order of `at`.
    pub(crate) fn depart(&mut self, from: Rank, to: Rank, at: Nanos, bytes: Bytes) -> InFlight {
        let length = self.topology.rate(from, to).transfer(bytes);
        let free = &mut self.up[from.index()];
        let start = at.max(*free);
        *free = start.saturating_add(length);
        InFlight { head: start.saturating_add(self.topology.link(from, to).latency), length }
    }

    /// Receives what arrives from `head` on; returns when its last byte is there. To be called in the order of `head`.
    pub(crate) fn land(&mut self, to: Rank, transfer: InFlight) -> Nanos {
        let free = &mut self.down[to.index()];
        let start = transfer.head.max(*free);
        *free = start.saturating_add(transfer.length);
        *free
    }
}

/// Virtual time from a common start until the last rank has done its program over a buffer of `bytes`.
///
/// `programs` has one program per rank of `topology`; [`Nanos::MAX`] if they do not fit together or a link is dead.
#[must_use]
pub fn cost(programs: &[Program], bytes: Bytes, topology: &Topology) -> Nanos {
    let n = programs.len();
    let mut links = Links::new(topology);
    let mut clock = vec![Nanos::ZERO; n];
    let mut cursor = vec![(0, false); n];
    let mut arrived: BTreeMap<(usize, usize), VecDeque<Nanos>> = BTreeMap::new();
    // (time, class, from, to, sequence, transfer): departures before landings before arrivals of the same instant.
    let mut queue = BinaryHeap::new();
    let mut sequence = 0_u64;
    let mut awake: Vec<usize> = (0..n).collect();
    loop {
        for rank in awake.drain(..) {
            let program = &programs[rank];
            while let Some(step) = program.steps.get(cursor[rank].0) {
                if let Some((to, blocks)) = step.send.as_ref().filter(|_| !cursor[rank].1) {
                    let len = bytes.0 as usize;
                    let size = cut(len, blocks.end, program.blocks) - cut(len, blocks.start, program.blocks);
                    queue.push(Reverse((clock[rank], 0, rank, to.index(), sequence, size as u64)));
                    sequence += 1;
                }
                cursor[rank].1 = true;
                if let Some((from, ..)) = &step.recv {
                    let Some(at) = arrived.get_mut(&(from.index(), rank)).and_then(VecDeque::pop_front)
                    else {
                        break;
                    };
                    clock[rank] = clock[rank].max(at);
                }
                cursor[rank] = (cursor[rank].0 + 1, false);
            }
        }
        let Some(Reverse((time, class, from, to, number, value))) = queue.pop() else { break };
        match class {
            0 => {
                let flight = links.depart(Rank(from as u32), Rank(to as u32), time, Bytes(value));
                queue.push(Reverse((flight.head, 1, from, to, number, flight.length.0)));
            }
            1 => {
                let flight = InFlight { head: time, length: Nanos(value) };
                let at = links.land(Rank(to as u32), flight);
                queue.push(Reverse((at, 2, from, to, number, 0)));
            }
            _ => {
                arrived.entry((from, to)).or_default().push_back(time);
                awake.push(to);
            }
        }
    }
    let done = (0..n).all(|rank| cursor[rank].0 == programs[rank].steps.len());
    if done { clock.into_iter().max().unwrap_or_default() } else { Nanos::MAX }
}
