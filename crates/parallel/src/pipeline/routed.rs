//! An order for microbatches that take different ways through a pipeline's ranks: a list schedule over the
//! routes.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use farflung_base::{Nanos, Rank};

use super::{Action, ComputeKind, ComputeOrder, Op, Placement};
use crate::ParallelError;

/// What the list schedule is made from.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Routed<'a> {
    /// The rank that each microbatch passes at each stage. A rank serves one stage, and each has a microbatch.
    pub(crate) routes: &'a [Vec<Rank>],
    /// What each rank takes for a microbatch, by rank.
    pub(crate) times: &'a [RankTimes],
    /// From each stage to the next: activations, and gradients on the way back.
    pub(crate) hops: &'a [Hop],
    /// Microbatches that each rank may hold, from their forwards to their weights' gradients; at least 1. By
    /// rank.
    pub(crate) held: &'a [u32],
}

/// What a rank takes for a microbatch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RankTimes {
    pub(crate) forward: Nanos,
    pub(crate) input: Nanos,
    pub(crate) weight: Nanos,
}

/// What a message takes between two stages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Hop {
    pub(crate) activation: Nanos,
    pub(crate) gradient: Nanos,
}

impl Routed<'_> {
    /// Each rank does what is ready first, and of that gradients before forwards, since other ranks wait for
    /// them. Backwards are split: `I` as soon as its gradient is there, `W` where the rank would stand still
    /// otherwise.
    ///
    /// Nobody waits for ever: a rank that holds all that it may has handed these microbatches on, and the last
    /// stage never waits for another with the gradient of what it has.
    ///
    /// Each way through the ranks is a copy of the model in the order's placement, numbered by first use.
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
        let lists = Walk::new(self, copy_of).run();
        ComputeOrder::new(placement, microbatches, 1, lists)
    }
}

/// A rank on its way through its work.
#[derive(Debug, Default)]
struct Worker {
    stage: usize,
    free: Nanos,
    held: u32,
    /// What waits for a forward, and for the gradient of its input, by arrival.
    forwards: BTreeSet<(Nanos, usize)>,
    gradients: BTreeSet<(Nanos, usize)>,
    /// Weights' gradients that wait.
    weights: VecDeque<usize>,
    list: Vec<Op>,
}

/// What a worker does next, from when on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Next {
    start: Nanos,
    /// Gradients first.
    kind: Turn,
    microbatch: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Turn {
    Gradient,
    Forward,
    Weight,
}

struct Walk<'a> {
    made_of: Routed<'a>,
    copy_of: Vec<usize>,
    depth: usize,
    workers: Vec<Worker>,
}

impl<'a> Walk<'a> {
    fn new(made_of: Routed<'a>, copy_of: Vec<usize>) -> Self {
        let depth = made_of.hops.len() + 1;
        let mut workers: Vec<Worker> = made_of.times.iter().map(|_| Worker::default()).collect();
        for (microbatch, route) in made_of.routes.iter().enumerate() {
            for (stage, rank) in route.iter().enumerate() {
                workers[rank.index()].stage = stage;
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
        let forward = (worker.held < self.made_of.held[rank].max(1))
            .then(|| first(&worker.forwards, Turn::Forward))
            .flatten();
        let head = [first(&worker.gradients, Turn::Gradient), forward].into_iter().flatten().min();
        // Rather than standing still, also where what comes next then begins a little later.
        let idle = head.is_none_or(|head| head.start > worker.free);
        let weight = worker.weights.front().copied().filter(|_| idle);
        weight.map(|microbatch| Next { start: worker.free, kind: Turn::Weight, microbatch }).or(head)
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
        let (kind, time) = match kind {
            Turn::Gradient => {
                worker.gradients.pop_first();
                worker.weights.push_back(microbatch);
                (ComputeKind::BackwardInput, times.input)
            }
            Turn::Forward => {
                worker.forwards.pop_first();
                worker.held += 1;
                (ComputeKind::Forward, times.forward)
            }
            Turn::Weight => {
                worker.weights.pop_front();
                worker.held -= 1;
                (ComputeKind::BackwardWeight, times.weight)
            }
        };
        let end = start.saturating_add(time);
        worker.free = end;
        let at = (self.copy_of[microbatch] * self.depth + stage) as u32;
        worker.list.push(Action::new(kind, at, microbatch as u32).into());
        let route = &self.made_of.routes[microbatch];
        match kind {
            ComputeKind::Forward if stage + 1 == self.depth => {
                self.workers[rank].gradients.insert((end, microbatch));
            }
            ComputeKind::Forward => {
                let arrival = end.saturating_add(self.made_of.hops[stage].activation);
                self.workers[route[stage + 1].index()].forwards.insert((arrival, microbatch));
            }
            ComputeKind::BackwardInput if stage > 0 => {
                let arrival = end.saturating_add(self.made_of.hops[stage - 1].gradient);
                self.workers[route[stage - 1].index()].gradients.insert((arrival, microbatch));
            }
            _ => {}
        }
    }
}
