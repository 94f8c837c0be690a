//! Runs every rank's list as far as what it waits for allows: the one place that knows what depends on what.
//! It knows no durations; a [`Clock`] does.

use farflung_base::{Nanos, Rank, StageId};

use super::{Action, ComputeKind, ComputeOrder, Lowered, Op};
use crate::ParallelError;

/// What a walk over an order asks of time.
pub(super) trait Clock {
    /// A rank runs the op at `index` of its list, whose inputs are there at `ready`; answers with the end.
    fn run(&mut self, rank: Rank, index: usize, op: Op, ready: Nanos) -> Nanos;

    /// What `action` made leaves for a stage of another rank at `at`; answers with the arrival.
    fn deliver(&mut self, action: Action, to: StageId, at: Nanos) -> Nanos;
}

/// Time stands still: whether an order ends at all.
pub(super) struct Timeless;

impl Clock for Timeless {
    fn run(&mut self, _: Rank, _: usize, _: Op, _: Nanos) -> Nanos {
        Nanos::ZERO
    }

    fn deliver(&mut self, _: Action, _: StageId, _: Nanos) -> Nanos {
        Nanos::ZERO
    }
}

/// Walks `order` to its end. Actions must be in range, on their ranks, and each at most once.
///
/// A forward waits for the activation of the stage before, a backward for the gradient of the stage behind; at
/// the model's end the gradient is there with the forward's end. All else waits for its rank alone. Each rank's
/// clock runs in the order of its list, so the order in which ranks are visited does not matter.
///
/// Errors: [`ParallelError::Deadlock`] with the ops that the ranks stand at.
pub(super) fn flow(order: &ComputeOrder, clock: &mut impl Clock) -> Result<(), ParallelError> {
    let mut walk = Walk::new(order);
    let ranks = order.placement.ranks() as usize;
    let mut at = vec![0; ranks];
    // Whoever was woken last goes first: neighbours take turns, and what they touch stays in cache.
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

/// A slot that no rank waits for.
const NOTHING: usize = usize::MAX;

struct Walk<'a> {
    order: &'a ComputeOrder,
    /// When each activation (first half) and gradient (second half) is there; [`Nanos::MAX`]: not yet.
    arrivals: Vec<Nanos>,
    cells: usize,
    /// The slot at which each rank stands.
    waits_for: Vec<usize>,
}

impl<'a> Walk<'a> {
    fn new(order: &'a ComputeOrder) -> Self {
        let cells = order.cells();
        let per_stage = cells / order.placement.stages() as usize;
        let mut arrivals = vec![Nanos::MAX; 2 * cells];
        for stage in (0..order.placement.stages()).map(StageId) {
            if order.placement.is_first(stage) {
                arrivals[stage.index() * per_stage..][..per_stage].fill(Nanos::ZERO);
            }
        }
        Self { order, arrivals, cells, waits_for: vec![NOTHING; order.placement.ranks() as usize] }
    }

    /// What an action waits for, if not for its rank alone.
    fn input(&self, action: Action) -> Option<usize> {
        match action.kind {
            ComputeKind::Forward => Some(self.order.cell(action)),
            ComputeKind::Backward | ComputeKind::BackwardInput => Some(self.cells + self.order.cell(action)),
            _ => None,
        }
    }

    /// When an op's inputs are there, or the slot of the first that is not.
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

    /// Hands on what an action made; answers with the rank that stood waiting for it.
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
