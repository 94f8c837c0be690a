//! Communication as data: which rank sends how many bytes to which rank, in which order. [`NetworkSimulator`]
//! computes when any number of such operations end in virtual time. No data moves.

mod burst;
#[cfg(test)]
mod event_by_event;
mod simulator;
mod stream;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

pub use simulator::{Completion, NetworkSimulator};

use crate::{Bytes, Nanos, Rank, Topology};

/// Order in which the messages of a step leave a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum SendOrder {
    /// Round-robin: one piece of each message in turn. Several messages to the same rank leave one after the
    /// other.
    #[default]
    RoundRobin,
    /// One message after the other, in the order of the list.
    Sequential,
}

/// One step of a rank in an operation. Its receives complete in the order of the list. The next step starts
/// when all of them have arrived.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct OperationStep {
    /// Receiver and size of each message to send.
    pub sends: Vec<(Rank, Bytes)>,
    /// Order in which the messages leave.
    pub order: SendOrder,
    /// Sender and size of each message to receive.
    pub receives: Vec<(Rank, Bytes)>,
}

/// The steps of one rank in an operation.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RankPart {
    /// Lists of steps that run concurrently. Lane `i` of a rank exchanges messages with lane `i` of other
    /// ranks.
    pub lanes: Vec<Vec<OperationStep>>,
    /// Maximum number of concurrent lanes: lane `i` starts when lane `i - window` is done.
    pub window: usize,
}

/// A message or a collective, given as the messages that its ranks exchange.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Operation {
    /// Part of each rank.
    pub parts: BTreeMap<Rank, RankPart>,
    /// Largest piece into which messages are cut, at least one byte.
    pub frame: Bytes,
}

impl Operation {
    /// Creates the operation of a single message from one rank to another.
    #[must_use]
    pub fn message(from: Rank, to: Rank, bytes: Bytes, frame: Bytes) -> Self {
        let side = |turn| RankPart { lanes: vec![vec![turn]], window: usize::MAX };
        let sent = OperationStep { sends: vec![(to, bytes)], ..OperationStep::default() };
        let received = OperationStep { receives: vec![(from, bytes)], ..OperationStep::default() };
        Self { parts: BTreeMap::from([(from, side(sent)), (to, side(received))]), frame }
    }

    /// Returns the operation with other ranks: rank `i` becomes `ranks[i]`.
    ///
    /// # Panics
    /// If `ranks` is shorter than the operation needs, or contains a rank twice.
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
        let side =
            |side: &RankPart| RankPart { lanes: side.lanes.iter().map(lane).collect(), window: side.window };
        let sides: BTreeMap<Rank, RankPart> =
            self.parts.iter().map(|(&rank, of)| (place(rank), side(of))).collect();
        assert_eq!(sides.len(), self.parts.len(), "two ranks are mapped to the same rank");
        Self { parts: sides, frame: self.frame }
    }
}

/// Simulates one operation on idle links. All ranks begin it at time 0. Returns the time at which the last rank
/// finishes. Returns [`Nanos::MAX`] if a rank never finishes (a receive has no matching send, or steps wait for
/// each other), or if a link is dead.
#[must_use]
pub fn isolated_time(operation: &Operation, topology: &Topology) -> Nanos {
    let mut simulator = NetworkSimulator::new(topology, std::slice::from_ref(operation));
    operation.parts.keys().for_each(|&rank| simulator.begin(0, rank, Nanos::ZERO));
    let (mut ended, mut last) = (0, Nanos::ZERO);
    while let Some(Completion { at, .. }) = simulator.next_completion() {
        (ended, last) = (ended + 1, last.max(at));
    }
    if ended == operation.parts.len() { last } else { Nanos::MAX }
}
