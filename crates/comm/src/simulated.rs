//! Endpoints within one process, in virtual time, over a declared topology. Real bytes are moved, but no time
//! is slept.
//!
//! The core is a conservative event queue: an event (departure, arrival, deadline, fault) is processed only
//! when no rank can cause an earlier one. Events are ordered by (time, kind, from, sequence). Times and results
//! do not depend on how threads interleave. Ranks run in parallel as long as their clocks differ by less than
//! the latency between them.
//!
//! Each rank is one thread. A rank that computes keeps the others from going further than its clock plus a
//! latency, until it waits or drops its endpoint. If it declares modelled compute before the real computation,
//! the others can go on. Get results by `wait`; awaiting a pending value as a future does not advance virtual
//! time.

mod parked_ranks;
mod faults;
mod event;
mod recording;
mod lookahead;
mod queue;
mod world;

use std::fmt;
use std::sync::Arc;

use farflung_base::{Nanos, PeerId, Topology};

use crate::endpoint::{Driver, Endpoint, Wake};
use crate::inbox::{BlockedFor, Inbox};
use crate::transport::Tag;
use crate::{Frame, Pool};
pub use event::{Reached, SimulatedEvent};
pub use faults::{At, Faults, LinkNoise};
use lookahead::{Distances, distances};
pub use recording::{Recorder, Recording, record};
use world::World;

/// An endpoint of a simulated network.
pub type Simulated = Endpoint<SimulatedDriver>;

/// Creates one endpoint per rank of `topology`, `PeerId(0)` first.
#[must_use]
pub fn cluster(topology: &Topology) -> Vec<Arc<Simulated>> {
    cluster_with(topology, &Faults::new())
}

/// Creates a [`cluster`] in which `faults` occur.
#[must_use]
pub fn cluster_with(topology: &Topology, faults: &Faults) -> Vec<Arc<Simulated>> {
    build(topology, faults, distances(topology)).0
}

fn build(topology: &Topology, faults: &Faults, distances: Distances) -> (Vec<Arc<Simulated>>, Arc<World>) {
    let world = Arc::new(World::new(topology, faults, distances));
    let pool = Pool::new();
    let ranks = (0..topology.size())
        .map(|me| {
            let driver = SimulatedDriver { me, world: Arc::clone(&world) };
            let inbox = Arc::clone(&world.inboxes[me]);
            Arc::new(Endpoint::new(PeerId(me as u32), driver, inbox, Arc::clone(&pool)))
        })
        .collect();
    (ranks, world)
}

/// Driver of one rank's endpoint in the simulated network.
pub struct SimulatedDriver {
    me: usize,
    world: Arc<World>,
}

impl fmt::Debug for SimulatedDriver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Simulated(rank {} at {})", self.me, self.now())
    }
}

impl Driver for SimulatedDriver {
    fn submit(&self, to: PeerId, tag: Tag, at: Nanos, frame: Frame) {
        self.world.submit(self.me, to.index(), tag, at, frame);
    }
    fn has_room(&self, _: PeerId, _: Tag) -> bool {
        true
    }
    fn taken(&self, _: PeerId, _: Tag, _: usize) {}
    fn now(&self) -> Nanos {
        self.world.clock(self.me)
    }
    fn clock(&self, seen: Nanos) -> Nanos {
        seen
    }
    fn horizon(&self) -> Nanos {
        self.world.instant(self.me)
    }
    fn advance(&self, by: Nanos, idle: Nanos) {
        self.world.set_clock(self.me, idle, |clock| clock.saturating_add(by));
    }
    fn advance_to(&self, to: Nanos, idle: Nanos) {
        self.world.set_clock(self.me, idle, |clock| clock.max(to));
    }
    fn block(&self, inbox: &Inbox, seen: u64, until: Nanos, _: BlockedFor) -> Wake {
        self.world.block(self.me, until, || inbox.change_count() != seen)
    }
    fn unblock(&self) {
        self.world.unblock(self.me);
    }
    fn has_background(&self) -> bool {
        false
    }
    fn close(&self, _: &Inbox) {
        self.world.leave(self.me);
    }
}

#[cfg(test)]
mod tests;
