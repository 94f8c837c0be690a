//! Runs the lists of all ranks as far as their inputs allow. The check for deadlocks and the simulation share
//! this code, so they agree on which computation depends on which. Durations come from a [`Clock`].

use farflung_base::{Nanos, Rank, StageId};

use crate::ParallelError;
use crate::pipeline::{Action, ComputeKind, ComputeOrder, Lowered, Op};

/// Supplies the durations for a walk over an order.
pub(in crate::pipeline) trait Clock {
    /// Runs the op at `index` of a rank's list, whose inputs are available at `ready`. Returns the time at
    /// which it ends.
    fn run(&mut self, rank: Rank, index: usize, op: Op, ready: Nanos) -> Nanos;

    /// Sends the output of `action` at `at` to a stage of another rank. Returns the time of arrival.
    fn deliver(&mut self, action: Action, to: StageId, at: Nanos) -> Nanos;
}

/// A clock with zero durations, to check only that an order has no deadlock.
pub(in crate::pipeline) struct ZeroDurations;

impl Clock for ZeroDurations {
    fn run(&mut self, _: Rank, _: usize, _: Op, _: Nanos) -> Nanos {
        Nanos::ZERO
    }

    fn deliver(&mut self, _: Action, _: StageId, _: Nanos) -> Nanos {
        Nanos::ZERO
    }
}

/// Walks `order` to its end. Actions must be in range, on their ranks, and each at most once.
///
/// A forward waits for the activation of the previous stage, a backward for the gradient of the next stage. At
/// the last stage, the gradient is available at the end of the forward. All other actions wait only for their
/// rank. Each rank processes its list in order, so the order in which ranks are visited does not change the
/// result.
///
/// Errors: [`ParallelError::Deadlock`] with the op at which each rank waits.
pub(in crate::pipeline) fn flow(order: &ComputeOrder, clock: &mut impl Clock) -> Result<(), ParallelError> {
    let mut walk = ReadyTracker::new(order);
    let ranks = order.placement.ranks() as usize;
    let mut at = vec![0; ranks];
    // Visits the rank woken last first: neighbours alternate, which keeps their data in the cache.
    let mut ready: Vec<usize> = (0..ranks).rev().collect();
    while let Some(rank) = ready.pop() {
        let list = &order.lists[rank];
        while let Some(&op) = list.get(at[rank]) {
            match walk.ready(op) {
                Err(slot) => {
                    walk.waits_for[rank] = slot;
                    break;
                }
                Ok(time) => {
                    let end = clock.run(Rank(rank as u32), at[rank], op, time);
                    at[rank] += 1;
                    for action in op.actions() {
                        if let Some(woken) = walk.publish(action, end, clock) {
                            ready.push(woken);
                        }
                    }
                }
            }
        }
    }
    let stands_at = |rank: usize| order.lists[rank].get(at[rank]).map(|&op| Lowered::Compute(op));
    let waiting: Vec<(Rank, Lowered)> =
        (0..ranks).filter_map(|rank| Some((Rank(rank as u32), stands_at(rank)?))).collect();
    if waiting.is_empty() { Ok(()) } else { Err(ParallelError::Deadlock { waiting }) }
}

/// Value of [`ReadyTracker::waits_for`] for a rank that does not wait.
const NOTHING: usize = usize::MAX;

struct ReadyTracker<'a> {
    order: &'a ComputeOrder,
    /// Arrival time of each activation (first half) and gradient (second half); [`Nanos::MAX`]: not yet.
    arrivals: Vec<Nanos>,
    cells: usize,
    /// For each rank, the index in `arrivals` (the slot) of the input for which it waits.
    waits_for: Vec<usize>,
}

impl<'a> ReadyTracker<'a> {
    fn new(order: &'a ComputeOrder) -> Self {
        let cells = order.cells();
        let per_stage = order.microbatches as usize * usize::from(order.slices);
        let mut arrivals = vec![Nanos::MAX; 2 * cells];
        for stage in (0..order.placement.stages()).map(StageId) {
            if order.placement.is_first(stage) {
                arrivals[stage.index() * per_stage..][..per_stage].fill(Nanos::ZERO);
            }
        }
        Self { order, arrivals, cells, waits_for: vec![NOTHING; order.placement.ranks() as usize] }
    }

    /// Returns the slot that an action waits for. `None` if it waits only for its rank.
    fn input(&self, action: Action) -> Option<usize> {
        match action.kind {
            ComputeKind::Forward => Some(self.order.cell(action)),
            ComputeKind::Backward | ComputeKind::BackwardInput => Some(self.cells + self.order.cell(action)),
            _ => None,
        }
    }

    /// Returns the time at which an op's inputs are all available, or the first slot that is missing.
    fn ready(&self, op: Op) -> Result<Nanos, usize> {
        let mut ready = Nanos::ZERO;
        for slot in op.actions().filter_map(|action| self.input(action)) {
            let arrival = self.arrivals[slot];
            if arrival == Nanos::MAX {
                return Err(slot);
            }
            ready = ready.max(arrival);
        }
        Ok(ready)
    }

    /// Delivers the output of an action. Returns the rank that was waiting for it, if any.
    fn publish(&mut self, action: Action, end: Nanos, clock: &mut impl Clock) -> Option<usize> {
        let placement = &self.order.placement;
        let (to, gradient) = match action.kind {
            ComputeKind::Forward => match placement.next(action.stage) {
                Some(next) => (next, false),
                None => (action.stage, true),
            },
            ComputeKind::Backward | ComputeKind::BackwardInput => (placement.previous(action.stage)?, true),
            _ => return None,
        };
        let slot = self.order.cell(Action { stage: to, ..action }) + if gradient { self.cells } else { 0 };
        let rank = placement.rank(to);
        let local = rank == placement.rank(action.stage);
        self.arrivals[slot] = if local { end } else { clock.deliver(action, to, end) };
        let waiting = &mut self.waits_for[rank.index()];
        (*waiting == slot).then(|| {
            *waiting = NOTHING;
            rank.index()
        })
    }
}
