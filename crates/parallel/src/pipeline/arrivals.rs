//! Ranks that work in the order of arrivals instead of by a fixed list: the order that [`ArrivalRule`] gives
//! for known times, and its executor. The module has no clock: the worker reports what has arrived.

use std::collections::VecDeque;

use farflung_base::{Rank, StageId};

use super::method::greedy::{self, Greedy};
use super::simulate::Simulator;
use super::{
    Action, ArrivalRule, ComputeKind, ComputeOrder, Lowered, LoweredKind, Message, Op, PipelineCost,
    Schedule, Updates, Worker,
};
use crate::ParallelError;

impl ArrivalRule {
    /// Returns the order that the rule gives if every action takes the time in `cost`. Only the lists differ
    /// from `order`.
    ///
    /// Errors: as [`PipelineCost::check`] and [`ComputeOrder::new`].
    pub fn order_at(self, order: &ComputeOrder, cost: &PipelineCost) -> Result<ComputeOrder, ParallelError> {
        cost.check(order)?;
        let (placement, microbatches) = (order.placement(), order.microbatches());
        let rule = Greedy { placement, microbatches, arrivals: self };
        let lists = greedy::lists(&rule, &mut Simulator::new(order, cost));
        Ok(ComputeOrder::new(placement.clone(), microbatches, order.slices(), lists)?
            .with_updates(order.updates()))
    }
}

/// A worker that can report which messages have arrived.
pub trait PollArrivals: Worker {
    /// Returns the index of a message that has arrived, without blocking; the lowest if several have.
    /// [`Worker::wait`] on that message must not block. A message that ended with an error counts as arrived.
    fn arrived(&mut self, awaited: &mut [&mut Self::Pending]) -> Option<usize>;

    /// Blocks until one of the messages has arrived and returns its index; the lowest if several have. The list
    /// is not empty.
    fn first(&mut self, awaited: &mut [&mut Self::Pending]) -> usize;
}

/// A computation of the list, and the data movements between it and the next computation.
#[derive(Debug, Clone)]
struct Entry {
    action: Action,
    behind: Vec<(LoweredKind, StageId, u32, u16)>,
}

/// The computations of one direction.
#[derive(Debug)]
struct Side<P> {
    left: VecDeque<Entry>,
    done: u32,
    /// The message that the next computation needs, once it was requested.
    awaited: Option<P>,
}

/// What a rank may do next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Next {
    Backward,
    Forward,
    Recompute,
}

/// Runs one rank's work of a schedule in the order of arrivals.
#[derive(Debug)]
pub struct ArrivalExecutor<'a> {
    schedule: &'a Schedule,
    rule: ArrivalRule,
    forwards: VecDeque<Entry>,
    backwards: VecDeque<Entry>,
    /// Recomputed forwards, in the order of their backwards.
    recomputes: VecDeque<Entry>,
    steps: Vec<Action>,
}

impl<'a> ArrivalExecutor<'a> {
    /// Creates an executor for `rank`'s list of `schedule`.
    ///
    /// Errors: [`ParallelError::NotFollowed`] unless the rank has one stage, microbatches are not sliced,
    /// backwards are neither split nor paired with forwards, and all stages update at the end.
    ///
    /// # Panics
    /// If the schedule has no such rank.
    pub fn new(schedule: &'a Schedule, rank: Rank, rule: ArrivalRule) -> Result<Self, ParallelError> {
        let entries = schedule.lists()[rank.index()].iter().copied();
        Self::of_entries(schedule, rank, rule, entries)
    }

    /// Creates an executor of a list that has the computations of `rank`'s list of `schedule`.
    ///
    /// Errors: as [`ArrivalExecutor::new`].
    pub(crate) fn of_entries(
        schedule: &'a Schedule,
        rank: Rank,
        rule: ArrivalRule,
        entries: impl Iterator<Item = Lowered>,
    ) -> Result<Self, ParallelError> {
        let order = schedule.order();
        let refuse = |found| Err(ParallelError::NotFollowed { rank, found });
        if order.placement().stages_of(rank).count() != 1 {
            return refuse("several stages on this rank");
        }
        if order.slices() > 1 || order.updates() != Updates::Flush {
            return refuse("slices, or updates within a pass");
        }
        let (forwards, backwards, recomputes) = (VecDeque::new(), VecDeque::new(), VecDeque::new());
        let mut follower = Self { schedule, rule, forwards, backwards, recomputes, steps: Vec::new() };
        let mut last = ComputeKind::Forward;
        for entry in entries {
            match entry {
                Lowered::Compute(Op::Run(action)) if action.kind == ComputeKind::Step => {
                    follower.steps.push(action);
                }
                Lowered::Compute(Op::Run(action)) => {
                    last = action.kind;
                    let Some(list) = follower.list(last) else {
                        return refuse("backwards that are split into input and weight gradients");
                    };
                    list.push_back(Entry { action, behind: Vec::new() });
                }
                Lowered::Compute(Op::Overlap { .. }) => {
                    return refuse("overlapped pairs of a forward and a backward");
                }
                // Messages are derived from the computations.
                Lowered::Move { .. } if entry.message(order.placement()).is_some() => {}
                Lowered::Move { kind, stage, microbatch, slice } => {
                    if let Some(entry) = follower.list(last).and_then(VecDeque::back_mut) {
                        entry.behind.push((kind, stage, microbatch, slice));
                    }
                }
            }
        }
        Ok(follower)
    }

    fn list(&mut self, kind: ComputeKind) -> Option<&mut VecDeque<Entry>> {
        match kind {
            ComputeKind::Forward => Some(&mut self.forwards),
            ComputeKind::Backward => Some(&mut self.backwards),
            ComputeKind::Recompute => Some(&mut self.recomputes),
            _ => None,
        }
    }

    /// Runs all of the work. Waits for at most one message of each direction at a time.
    ///
    /// Errors: those of the worker.
    pub fn run<W: PollArrivals>(self, worker: &mut W) -> Result<(), W::Error> {
        let Self { schedule, rule, forwards, backwards, mut recomputes, steps } = self;
        let placement = schedule.order().placement();
        let side = |left| Side { left, done: 0, awaited: None };
        let (mut forward, mut backward) = (side(forwards), side(backwards));
        loop {
            let may_forward = forward.left.front().is_some_and(|entry| {
                !placement.is_first(entry.action.stage) || rule.admits(forward.done, backward.done)
            });
            let may_backward = backward.done < forward.done;
            if !may_forward && !may_backward {
                break;
            }
            let due = backward.left.front().filter(|_| may_backward).map(|entry| entry.action.microbatch);
            let again = recomputes.front().is_some_and(|entry| Some(entry.action.microbatch) == due);
            // Candidates for the next action, the preferred one first, with the message that each waits for.
            let mut waiting = Vec::with_capacity(2);
            let mut at_once = None;
            for (next, may, side) in
                [(Next::Backward, may_backward, &mut backward), (Next::Forward, may_forward, &mut forward)]
            {
                let Some(entry) = side.left.front().filter(|_| may && at_once.is_none()) else { continue };
                match Message::taken_by(entry.action, placement) {
                    Some(message) => {
                        if side.awaited.is_none() {
                            side.awaited = Some(worker.receive(placement.rank(message.from), message)?);
                        }
                        waiting.extend(side.awaited.as_mut().map(|awaited| (next, awaited)));
                    }
                    None => at_once = Some(next),
                }
            }
            let (nexts, mut awaited): (Vec<Next>, Vec<&mut W::Pending>) = waiting.into_iter().unzip();
            let arrived = if awaited.is_empty() { None } else { worker.arrived(&mut awaited) };
            let next = match arrived.map(|i| nexts[i]).or(at_once) {
                Some(next) => next,
                // A recomputation needs no message, so it runs while the rank waits.
                None if again => Next::Recompute,
                None => nexts[worker.first(&mut awaited)],
            };
            if again && next != Next::Forward {
                let entry = recomputes.pop_front().expect("the list was checked not to be empty");
                worker.compute(entry.action, None)?;
            }
            let side = match next {
                Next::Backward => &mut backward,
                Next::Forward => &mut forward,
                Next::Recompute => continue,
            };
            let Entry { action, behind } =
                side.left.pop_front().expect("the list was checked not to be empty");
            side.done += 1;
            let input = side.awaited.take().map(|awaited| worker.wait(awaited)).transpose()?;
            let output = worker.compute(action, input)?;
            if let (Some(message), Some(data)) = (Message::made_by(action, placement), output) {
                worker.send(placement.rank(message.to()), message, data)?;
            }
            for (kind, stage, microbatch, slice) in behind {
                worker.start_transfer(kind, stage, microbatch, slice)?;
            }
        }
        steps.into_iter().try_for_each(|step| worker.compute(step, None).map(drop))
    }
}
