//! The model of shared links in virtual time: the alpha-beta model, with access links of ranks and regions that
//! transfers share. The simulated transport, the predicted cost of a collective and the simulation of a
//! training step all use it.

use crate::{Bandwidth, Bytes, Nanos, Rank, Topology};

/// State of all links: the time at which each becomes free.
///
/// A transfer passes, in this order, the sender's uplink, the uplink of the sender's region, the pair's own
/// link, the downlink of the receiver's region, and the receiver's downlink. Links of regions are left out if
/// both ranks are in the same region. Each link serves transfers first come, first served, at its own rate. The
/// last byte arrives when it has passed the slowest of them.
///
/// For one transfer, call [`Network::depart`], [`Network::cross`], [`Network::enter`] (needed only if
/// [`Network::has_region_links`]) and [`Network::land`], in this order. Calls of each method must be ordered by
/// time over all transfers.
#[derive(Debug, Clone)]
pub struct Network {
    topology: Topology,
    /// Time at which the sender's uplink becomes free, by rank.
    up: Vec<Nanos>,
    /// Time at which the pair's link becomes free; index `from * size + to`.
    pair: Vec<Nanos>,
    /// Time at which the receiver's downlink becomes free, by rank.
    down: Vec<Nanos>,
    /// Time at which a region's uplink becomes free, by region.
    region_up: Vec<Nanos>,
    /// Time at which a region's downlink becomes free, by region.
    region_down: Vec<Nanos>,
}

/// A transfer that is on its way over the links.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct InFlight {
    /// Time at which the first byte reaches the next link.
    pub head: Nanos,
    /// Earliest time at which the last byte reaches the next link.
    pub tail: Nanos,
    /// Size of the transfer.
    pub bytes: Bytes,
}

/// Which links between two ranks are shared with other senders and have a finite rate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SharedLimits {
    /// The uplink of the sender's region.
    pub(crate) out: bool,
    /// The downlink of the receiver's region.
    pub(crate) into: bool,
    /// The receiver's downlink.
    pub(crate) down: bool,
}

impl Network {
    /// Creates the network of `topology` with all links idle.
    #[must_use]
    pub fn new(topology: &Topology) -> Self {
        let idle = |count| vec![Nanos::ZERO; count];
        let (n, regions) = (topology.size(), topology.regions());
        Self {
            topology: topology.clone(),
            up: idle(n),
            pair: idle(n * n),
            down: idle(n),
            region_up: idle(regions),
            region_down: idle(regions),
        }
    }

    /// Returns whether there are regions whose ranks share an access link. If so, transfers of different
    /// senders can delay each other before they reach the receiver.
    #[must_use]
    pub const fn has_region_links(&self) -> bool {
        !self.region_up.is_empty()
    }

    /// Returns the links on which a transfer of one sender can wait for a transfer of another.
    pub(crate) fn shared_limits(&self, from: Rank, to: Rank) -> SharedLimits {
        let leaves = self.topology.leaves_region(from, to);
        let line = |rank: Rank| self.topology.region(rank).filter(|_| leaves);
        let limited = |rate: Bandwidth| rate != Bandwidth::UNLIMITED;
        SharedLimits {
            out: line(from).is_some_and(|region| limited(self.topology.region_access_link(region).up)),
            into: line(to).is_some_and(|region| limited(self.topology.region_access_link(region).down)),
            down: limited(self.topology.access_link(to).down),
        }
    }

    /// Passes `bytes` through the sender's uplink, from `at` or from when the uplink is free.
    pub fn depart(&mut self, from: Rank, at: Nanos, bytes: Bytes) -> InFlight {
        let up = self.topology.access_link(from).up;
        let (head, tail) = occupy(&mut self.up[from.index()], at, up, bytes);
        InFlight { head, tail, bytes }
    }

    /// Passes the uplink of the sender's region, if the transfer leaves the region, and then the link of the
    /// pair.
    pub fn cross(&mut self, from: Rank, to: Rank, transfer: InFlight) -> InFlight {
        let InFlight { mut head, mut tail, bytes } = transfer;
        if let Some(region) = self.topology.region(from).filter(|_| self.topology.leaves_region(from, to)) {
            let up = self.topology.region_access_link(region).up;
            let (start, out) = occupy(&mut self.region_up[region], head, up, bytes);
            (head, tail) = (start, tail.max(out));
        }
        let link = self.topology.link(from, to);
        let pair = &mut self.pair[from.index() * self.topology.size() + to.index()];
        let (start, through) = occupy(pair, head, link.bandwidth, bytes);
        let later = |time: Nanos| time.saturating_add(link.latency);
        InFlight { head: later(start), tail: later(tail.max(through)), bytes }
    }

    /// Passes the downlink of the receiver's region, if the transfer comes from outside.
    pub fn enter(&mut self, from: Rank, to: Rank, transfer: InFlight) -> InFlight {
        let InFlight { head, tail, bytes } = transfer;
        let Some(region) = self.topology.region(to).filter(|_| self.topology.leaves_region(from, to)) else {
            return transfer;
        };
        let down = self.topology.region_access_link(region).down;
        let (head, end) = occupy(&mut self.region_down[region], head, down, bytes);
        InFlight { head, tail: tail.max(end), bytes }
    }

    /// Passes the receiver's downlink. Returns the time at which the last byte arrives.
    pub fn land(&mut self, to: Rank, transfer: InFlight) -> Nanos {
        let InFlight { head, tail, bytes } = transfer;
        let (_, end) = occupy(&mut self.down[to.index()], head, self.topology.access_link(to).down, bytes);
        end.max(tail)
    }
}

/// Occupies a link for the time that `bytes` take at `rate`, from `at` or from when the link is free. Returns
/// the start and the end.
///
/// An unlimited link is always free, even if transfers come out of the order of time.
fn occupy(free: &mut Nanos, at: Nanos, rate: Bandwidth, bytes: Bytes) -> (Nanos, Nanos) {
    if rate == Bandwidth::UNLIMITED {
        return (at, at);
    }
    let start = at.max(*free);
    *free = start.saturating_add(rate.transfer(bytes));
    (start, *free)
}
