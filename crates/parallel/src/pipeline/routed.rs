//! List scheduling for microbatches that take different routes through the ranks of a pipeline.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use farflung_base::{Nanos, Rank};

use super::{Action, CellProgress, ComputeKind, ComputeOrder, Op, Placement};
use crate::ParallelError;

/// Input of the list scheduler.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Routed<'a> {
    /// The rank that each microbatch passes at each stage, `routes[microbatch][stage]`. A rank serves one stage
    /// and has at least one microbatch.
    pub(crate) routes: &'a [Vec<Rank>],
    /// What is done of each microbatch in each stage; empty if nothing is. What is done takes no time.
    pub(crate) progress: &'a [Vec<CellProgress>],
    /// Times of each rank for a microbatch.
    pub(crate) times: &'a [RankTimes],
    /// Message times between each stage and the next.
    pub(crate) hops: &'a [Hop],
    /// Maximum number of microbatches that each rank may hold at a time, from the forward pass to the weight
    /// gradients; at least 1.
    pub(crate) held: &'a [u32],
}

/// Times of a rank for the forward pass, input gradients and weight gradients of a microbatch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RankTimes {
    pub(crate) forward: Nanos,
    pub(crate) input: Nanos,
    pub(crate) weight: Nanos,
}

/// Times of the messages between two stages, in both directions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Hop {
    pub(crate) activation: Nanos,
    pub(crate) gradient: Nanos,
}

impl Routed<'_> {
    /// Returns what is done of a microbatch in a stage.
    fn done(&self, microbatch: usize, stage: usize) -> CellProgress {
        self.progress.get(microbatch).and_then(|cells| cells.get(stage)).copied().unwrap_or_default()
    }

    /// Returns the order. Each rank runs the operation that can start first; if several can start at the same
    /// time, input gradients go before forward passes, because other ranks wait for them. Backward passes are
    /// split: `I` (input gradient) runs as soon as its output gradient has arrived, `W` (weight gradient) runs
    /// when the rank would otherwise be idle.
    ///
    /// The schedule cannot deadlock: a rank that holds its maximum has sent these microbatches on, and the last
    /// stage computes the gradient of a microbatch without waiting for another rank.
    ///
    /// Each distinct route through the ranks is one copy of the model in the order's placement, numbered by
    /// first use.
    ///
    /// Errors: those of [`Placement::new`] and [`ComputeOrder::new`].
    pub(crate) fn order(self) -> Result<ComputeOrder, ParallelError> {
        let microbatches = self.routes.len() as u32;
        let mut numbers: BTreeMap<&[Rank], usize> = BTreeMap::new();
        let (mut rank_of, mut copy_of) = (Vec::new(), Vec::with_capacity(self.routes.len()));
        for route in self.routes {
            let next = numbers.len();
            let copy = *numbers.entry(route).or_insert(next);
            if copy == next {
                rank_of.extend_from_slice(route);
            }
            copy_of.push(copy);
        }
        let copies = numbers.len() as u32;
        let placement = Placement::new(rank_of, copies)?;
        ComputeOrder::check_cells(placement.stages().into(), microbatches, 1)?;
        let lists = RouteBuilder::new(self, copy_of).run();
        ComputeOrder::new(placement, microbatches, 1, lists)
    }
}

/// Simulation state of one rank.
#[derive(Debug, Default)]
struct Worker {
    stage: usize,
    free: Nanos,
    /// Number of microbatches that it holds.
    held: u32,
    /// Number of further microbatches that it holds from before the order begins.
    kept: u32,
    /// Microbatches ready for their forward pass, with arrival times.
    forwards: BTreeSet<(Nanos, usize)>,
    gradients: BTreeSet<(Nanos, usize)>,
    /// Microbatches whose weight gradient is pending.
    weights: VecDeque<usize>,
    list: Vec<Op>,
}

/// The next operation of a rank and its start time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Next {
    start: Nanos,
    /// Kind of the operation. Input gradients sort before forwards.
    kind: OpKind,
    microbatch: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum OpKind {
    Gradient,
    Forward,
    Weight,
}

struct RouteBuilder<'a> {
    made_of: Routed<'a>,
    copy_of: Vec<usize>,
    depth: usize,
    workers: Vec<Worker>,
}

impl<'a> RouteBuilder<'a> {
    fn new(made_of: Routed<'a>, copy_of: Vec<usize>) -> Self {
        let depth = made_of.hops.len() + 1;
        let mut workers: Vec<Worker> = made_of.times.iter().map(|_| Worker::default()).collect();
        for (microbatch, route) in made_of.routes.iter().enumerate() {
            for (stage, rank) in route.iter().enumerate() {
                let worker = &mut workers[rank.index()];
                worker.stage = stage;
                let done = made_of.done(microbatch, stage);
                let is_open = done >= CellProgress::Forward && done < CellProgress::WeightGradient;
                worker.kept += u32::from(is_open);
            }
            workers[route[0].index()].forwards.insert((Nanos::ZERO, microbatch));
        }
        Self { made_of, copy_of, depth, workers }
    }

    fn next(&self, rank: usize) -> Option<Next> {
        let worker = &self.workers[rank];
        let first = |of: &BTreeSet<(Nanos, usize)>, kind| {
            let &(ready, microbatch) = of.first()?;
            Some(Next { start: ready.max(worker.free), kind, microbatch })
        };
        // A rank that holds the maximum from before may hold one more, or ranks could wait for each other.
        let most = self.made_of.held[rank].saturating_sub(worker.kept).max(1);
        let is_done = |next: &Next| self.made_of.done(next.microbatch, worker.stage) >= CellProgress::Forward;
        let forward = first(&worker.forwards, OpKind::Forward);
        let forward = forward.filter(|next| worker.held < most || is_done(next));
        let head = [first(&worker.gradients, OpKind::Gradient), forward].into_iter().flatten().min();
        // A weight gradient runs in idle time, even if it delays the next operation a little.
        let idle = head.is_none_or(|head| head.start > worker.free);
        let weight = worker.weights.front().copied().filter(|_| idle);
        weight.map(|microbatch| Next { start: worker.free, kind: OpKind::Weight, microbatch }).or(head)
    }

    fn run(mut self) -> Vec<Vec<Op>> {
        loop {
            let next = (0..self.workers.len()).filter_map(|rank| Some((self.next(rank)?, rank)));
            let Some((next, rank)) = next.min_by_key(|&(next, rank)| (next.start, rank)) else { break };
            self.take(rank, next);
        }
        self.workers.into_iter().map(|worker| worker.list).collect()
    }

    fn take(&mut self, rank: usize, Next { start, kind, microbatch }: Next) {
        let times = self.made_of.times[rank];
        let worker = &mut self.workers[rank];
        let stage = worker.stage;
        let done = self.made_of.done(microbatch, stage);
        let unless = |progress, time| if done >= progress { Nanos::ZERO } else { time };
        let (kind, time) = match kind {
            OpKind::Gradient => {
                worker.gradients.pop_first();
                worker.weights.push_back(microbatch);
                (ComputeKind::BackwardInput, unless(CellProgress::InputGradient, times.input))
            }
            OpKind::Forward => {
                worker.forwards.pop_first();
                worker.held += u32::from(done < CellProgress::Forward);
                (ComputeKind::Forward, unless(CellProgress::Forward, times.forward))
            }
            OpKind::Weight => {
                worker.weights.pop_front();
                match done {
                    CellProgress::Nothing => worker.held -= 1,
                    CellProgress::Forward | CellProgress::InputGradient => worker.kept -= 1,
                    CellProgress::WeightGradient => {}
                }
                (ComputeKind::BackwardWeight, unless(CellProgress::WeightGradient, times.weight))
            }
        };
        let end = start.saturating_add(time);
        worker.free = end;
        let at = (self.copy_of[microbatch] * self.depth + stage) as u32;
        worker.list.push(Action::new(kind, at, microbatch as u32).into());
        let route = &self.made_of.routes[microbatch];
        // A message that no rank needs is not sent, and takes no time.
        let way = |to: usize, progress, time| {
            if self.made_of.done(microbatch, to) >= progress { end } else { end.saturating_add(time) }
        };
        match kind {
            ComputeKind::Forward if stage + 1 == self.depth => {
                self.workers[rank].gradients.insert((end, microbatch));
            }
            ComputeKind::Forward => {
                let arrival = way(stage + 1, CellProgress::Forward, self.made_of.hops[stage].activation);
                self.workers[route[stage + 1].index()].forwards.insert((arrival, microbatch));
            }
            ComputeKind::BackwardInput if stage > 0 => {
                let arrival =
                    way(stage - 1, CellProgress::InputGradient, self.made_of.hops[stage - 1].gradient);
                self.workers[route[stage - 1].index()].gradients.insert((arrival, microbatch));
            }
            _ => {}
        }
    }
}
