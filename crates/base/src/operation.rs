//! What goes over the links of a topology when ranks talk to each other: who sends what to whom in which order,
//! in bytes; and a walk in virtual time over any number of such operations at once. No data moves.

mod burst;
#[cfg(test)]
mod event_by_event;
mod simulator;
mod stream;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

pub use simulator::{Finished, NetworkSimulator};

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
