//! When each link of a topology is free: the alpha-beta model with access links and lines that are shared. The
//! one model of links: the simulated transport, the price of a collective and the simulator of a step all run
//! on it.

use crate::{Bandwidth, Bytes, Nanos, Rank, Topology};

/// The state of all links: when each becomes free. A transfer goes out over the sender's uplink and its
/// region's, over the pair's own link, and in over the receiver's region's downlink and its own, each first
/// come first served and each at its own rate; its last byte is there when the slowest of them has passed it.
///
/// The order of calls for one transfer: [`Network::depart`], [`Network::cross`], [`Network::enter`] where
/// [`Network::has_lines`], [`Network::land`]. Each is to be called in the order of time over all transfers.
#[derive(Debug, Clone)]
pub struct Network {
    topology: Topology,
    up: Vec<Nanos>,
    pair: Vec<Nanos>,
    down: Vec<Nanos>,
    /// By region.
    line_up: Vec<Nanos>,
    line_down: Vec<Nanos>,
}

/// A transfer on its way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct InFlight {
    /// When its first byte reaches what it goes over next.
    pub head: Nanos,
    /// When its last byte does, at best.
    pub tail: Nanos,
    /// What it carries.
    pub bytes: Bytes,
}

/// The links between two ranks that others share and that have a limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SharedLimits {
    /// The line out of the sender's region.
    pub(crate) out: bool,
    /// The line into the receiver's region.
    pub(crate) into: bool,
    /// The receiver's downlink.
    pub(crate) down: bool,
}

impl Network {
    /// All links idle.
    #[must_use]
    pub fn new(topology: &Topology) -> Self {
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
    #[must_use]
    pub const fn has_lines(&self) -> bool {
        !self.line_up.is_empty()
    }

    /// Which links between two ranks can make a transfer of one sender wait for one of another.
    pub(crate) fn shared_limits(&self, from: Rank, to: Rank) -> SharedLimits {
        let leaves = self.topology.leaves(from, to);
        let line = |rank: Rank| self.topology.region(rank).filter(|_| leaves);
        let limited = |rate: Bandwidth| rate != Bandwidth::UNLIMITED;
        SharedLimits {
            out: line(from).is_some_and(|region| limited(self.topology.region_port(region).up)),
            into: line(to).is_some_and(|region| limited(self.topology.region_port(region).down)),
            down: limited(self.topology.port(to).down),
        }
    }

    /// Sends `bytes` at `at`, or when the sender's uplink is free.
    pub fn depart(&mut self, from: Rank, at: Nanos, bytes: Bytes) -> InFlight {
        let up = self.topology.port(from).up;
        let (head, tail) = occupy(&mut self.up[from.index()], at, up, bytes);
        InFlight { head, tail, bytes }
    }

    /// Goes from the sender's uplink to the receiver, over the line of the sender's region where it leaves
    /// that.
    pub fn cross(&mut self, from: Rank, to: Rank, transfer: InFlight) -> InFlight {
        let InFlight { mut head, mut tail, bytes } = transfer;
        if let Some(region) = self.topology.region(from).filter(|_| self.topology.leaves(from, to)) {
            let up = self.topology.region_port(region).up;
            let (start, out) = occupy(&mut self.line_up[region], head, up, bytes);
            (head, tail) = (start, tail.max(out));
        }
        let link = self.topology.link(from, to);
        let pair = &mut self.pair[from.index() * self.topology.size() + to.index()];
        let (start, through) = occupy(pair, head, link.bandwidth, bytes);
        let later = |time: Nanos| time.saturating_add(link.latency);
        InFlight { head: later(start), tail: later(tail.max(through)), bytes }
    }

    /// Comes in over the line of the receiver's region where it comes from outside.
    pub fn enter(&mut self, from: Rank, to: Rank, transfer: InFlight) -> InFlight {
        let InFlight { head, tail, bytes } = transfer;
        let Some(region) = self.topology.region(to).filter(|_| self.topology.leaves(from, to)) else {
            return transfer;
        };
        let down = self.topology.region_port(region).down;
        let (head, end) = occupy(&mut self.line_down[region], head, down, bytes);
        InFlight { head, tail: tail.max(end), bytes }
    }

    /// Receives what arrives from `head` on; returns when its last byte is there.
    pub fn land(&mut self, to: Rank, transfer: InFlight) -> Nanos {
        let InFlight { head, tail, bytes } = transfer;
        let (_, end) = occupy(&mut self.down[to.index()], head, self.topology.port(to).down, bytes);
        end.max(tail)
    }
}

/// Takes a link for what `bytes` need at its rate, from `at` on or from when it is free; returns start and end.
///
/// A link without a limit is always free, in whatever order transfers come.
fn occupy(free: &mut Nanos, at: Nanos, rate: Bandwidth, bytes: Bytes) -> (Nanos, Nanos) {
    if rate == Bandwidth::UNLIMITED {
        return (at, at);
    }
    let start = at.max(*free);
    *free = start.saturating_add(rate.transfer(bytes));
    (start, *free)
}
