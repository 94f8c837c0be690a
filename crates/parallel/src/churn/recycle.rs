//! ReCycle's re-routing: machines that hold the same stage in other pipelines process the microbatches of a
//! lost machine, in their bubbles.

use std::collections::BTreeMap;

use farflung_base::{Nanos, Rank};

use super::best_shape::best_shape;
use super::policy::{ChangeContext, CheckpointInterval, LostWork, Policy, PolicyRow, Reaction};
use super::{Shape, StepTimes};
use crate::ParallelError;
use crate::pipeline::{Action, ComputeKind, ComputeOrder, Op, PipelineCost, Placement, peak_bytes, simulate};

/// This policy's entry in the table [`POLICIES`](super::POLICIES).
pub(super) const ROW: PolicyRow = PolicyRow {
    name: "recycle",
    summary: "microbatches of a lost machine are sent through machines of the same stage in other pipelines",
    saves: CheckpointInterval::Hourly,
    begin: || Box::new(Recycle::default()),
};

/// The position of a machine: one stage of one pipeline.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Position {
    /// Index of the pipeline.
    pub pipeline: u32,
    /// Index of the stage.
    pub stage: u32,
}

/// The work of all pipelines in one order, without the lost machines.
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use]
pub struct Rerouted {
    /// The order. Microbatch `i` of pipeline `d` has number `d m + i`, where `m` is the number of microbatches
    /// per pipeline. Each distinct route through the machines is one copy of the model.
    pub order: ComputeOrder,
    /// Position of each rank of the order.
    pub positions: Vec<Position>,
}

/// Builds the order of several pipelines of `base` side by side without the machines at `lost`.
///
/// The work of each position is done in the order of `base`. The microbatches of a lost position go in turn to
/// the remaining machines of its stage. A machine with the work of several positions takes what can start
/// first; at equal times `I` before a forward, then what starts first in `base` at `cost`. Whole backwards are
/// split: `I` runs first because other machines wait for its result; `W` fills the time in which nothing else
/// is ready. [`ComputeOrder::new`] checks the result: each microbatch passes each stage once, and there is no
/// deadlock.
///
/// Source: Gandhi et al. 2024, "ReCycle", section 3. Differs: theirs finds the order by an integer program and
/// staggers the optimizer's steps; this one is a list schedule without optimizer steps.
///
/// Errors: [`ParallelError::Zero`] for no pipelines, for a stage with no machine left, or for a position that
/// does not exist; [`ParallelError::NotBuilt`] for an order with several copies or slices, or with several
/// stages per rank; errors of [`simulate`] and [`ComputeOrder::new`].
pub fn reroute(
    base: &ComputeOrder,
    pipelines: u32,
    lost: &[Position],
    cost: &PipelineCost,
) -> Result<Rerouted, ParallelError> {
    let stages = base.placement().stages();
    if base.placement().copies() != 1 || base.slices() != 1 || base.placement().ranks() != stages {
        return Err(ParallelError::NotBuilt {
            what: "re-routing an order with chunks, copies or slices".to_owned(),
        });
    }
    let zero = |of: String, field| Err(ParallelError::Zero { of, field });
    if pipelines == 0 {
        return zero("the order".to_owned(), "pipelines");
    }
    for stage in 0..stages {
        if (0..pipelines).all(|pipeline| lost.contains(&Position { pipeline, stage })) {
            return zero(format!("stage {stage}"), "machines");
        }
    }
    if let Some(position) =
        lost.iter().find(|position| position.pipeline >= pipelines || position.stage >= stages)
    {
        return zero(format!("pipeline {}, stage {}", position.pipeline, position.stage), "machines");
    }
    let routes = Routes::new(stages, pipelines, base.microbatches(), lost);
    let mut merge = Merge::new(base, &routes, cost)?;
    let lists = merge.run();
    let ranks = routes.copies.iter().flatten().copied();
    let rank_of = ranks.zip((0..stages).cycle()).map(|(pipeline, stage)| {
        routes.positions.binary_search(&Position { pipeline, stage }).map_or(Rank(0), |at| Rank(at as u32))
    });
    let placement = Placement::new(rank_of.collect(), routes.copies.len() as u32)?;
    let order = ComputeOrder::new(placement, pipelines * base.microbatches(), 1, lists)?;
    Ok(Rerouted { order, positions: routes.positions })
}

/// The route of each microbatch through the machines.
struct Routes {
    /// Positions of the machines that are left, sorted.
    positions: Vec<Position>,
    /// Distinct routes: for each stage, the pipeline whose machine is used.
    copies: Vec<Vec<u32>>,
    /// Index into `copies` for each microbatch of all pipelines.
    copy_of: Vec<usize>,
}

impl Routes {
    fn new(stages: u32, pipelines: u32, microbatches: u32, lost: &[Position]) -> Self {
        let is_lost = |pipeline, stage| lost.contains(&Position { pipeline, stage });
        let left: Vec<Vec<u32>> = (0..stages)
            .map(|stage| (0..pipelines).filter(|&pipeline| !is_lost(pipeline, stage)).collect())
            .collect();
        // For each stage, the number of microbatches of lost positions that were distributed so far. The
        // remaining machines of the stage take them in turn.
        let mut turns = vec![0_usize; stages as usize];
        let mut numbers: BTreeMap<Vec<u32>, usize> = BTreeMap::new();
        let (mut copies, mut copy_of) = (Vec::new(), Vec::new());
        for pipeline in 0..pipelines {
            for _ in 0..microbatches {
                let mut at = |stage: u32| {
                    if !is_lost(pipeline, stage) {
                        return pipeline;
                    }
                    let (turn, left) = (&mut turns[stage as usize], &left[stage as usize]);
                    *turn += 1;
                    left[(*turn - 1) % left.len()]
                };
                let route: Vec<u32> = (0..stages).map(&mut at).collect();
                let next = numbers.len();
                let copy = *numbers.entry(route.clone()).or_insert(next);
                if copy == next {
                    copies.push(route);
                }
                copy_of.push(copy);
            }
        }
        let all =
            (0..pipelines).flat_map(|pipeline| (0..stages).map(move |stage| Position { pipeline, stage }));
        Self { positions: all.filter(|position| !lost.contains(position)).collect(), copies, copy_of }
    }

    /// Returns the machine that processes a microbatch at a stage.
    fn machine(&self, microbatch: usize, stage: u32) -> usize {
        let pipeline = self.copies[self.copy_of[microbatch]][stage as usize];
        self.positions.binary_search(&Position { pipeline, stage }).unwrap_or(0)
    }
}

/// A forward or an input gradient that waits for its turn at its position.
#[derive(Debug, Clone, Copy)]
struct Job {
    /// Number among the microbatches of all pipelines.
    microbatch: usize,
    is_forward: bool,
    /// Start time in the base order.
    start: Nanos,
}

/// List scheduler: machines take work that is ready, event by event.
struct Merge<'a> {
    cost: &'a PipelineCost,
    routes: &'a Routes,
    stages: u32,
    /// For each machine, one queue per position whose work it does.
    queues: Vec<Vec<Queue>>,
    /// For each machine, the microbatches whose weight gradients wait.
    weights: Vec<Vec<usize>>,
    /// Times at which the input of each stage and microbatch arrives: activations, then gradients.
    ready: [Vec<Option<Nanos>>; 2],
    free: Vec<Nanos>,
    lists: Vec<Vec<Op>>,
}

struct Queue {
    jobs: Vec<Job>,
    done: usize,
}

impl<'a> Merge<'a> {
    fn new(base: &ComputeOrder, routes: &'a Routes, cost: &'a PipelineCost) -> Result<Self, ParallelError> {
        let simulation = simulate(base, cost)?;
        let stages = base.placement().stages();
        let m = base.microbatches() as usize;
        let all = routes.copy_of.len();
        let machines = routes.positions.len();
        let mut queues: Vec<Vec<Queue>> = (0..machines).map(|_| Vec::new()).collect();
        for stage in 0..stages {
            let rank = base.placement().rank(farflung_base::StageId(stage));
            for pipeline in 0..all / m {
                // Distributes a position's list over the machines that do its work.
                let mut dealt: BTreeMap<usize, Vec<Job>> = BTreeMap::new();
                for (op, slot) in base.lists()[rank.index()].iter().zip(simulation.slots(rank)) {
                    for action in op.actions() {
                        let is_forward = action.kind == ComputeKind::Forward;
                        if is_forward || action.yields_gradient() {
                            let microbatch = pipeline * m + action.microbatch as usize;
                            let machine = routes.machine(microbatch, stage);
                            let job = Job { microbatch, is_forward, start: slot.start };
                            dealt.entry(machine).or_default().push(job);
                        }
                    }
                }
                for (machine, jobs) in dealt {
                    queues[machine].push(Queue { jobs, done: 0 });
                }
            }
        }
        let cells = stages as usize * all;
        let mut ready = [vec![None; cells], vec![None; cells]];
        ready[0][..all].fill(Some(Nanos::ZERO));
        Ok(Self {
            cost,
            routes,
            stages,
            queues,
            weights: vec![Vec::new(); machines],
            ready,
            free: vec![Nanos::ZERO; machines],
            lists: vec![Vec::new(); machines],
        })
    }

    /// Returns the stage of a machine. All positions whose work it does have the same stage.
    fn stage(&self, machine: usize) -> u32 {
        self.routes.positions[machine].stage
    }

    fn cell(&self, stage: u32, microbatch: usize) -> usize {
        stage as usize * self.routes.copy_of.len() + microbatch
    }

    /// Returns the earliest start among the heads of a machine's queues, and the index of that queue.
    fn head(&self, machine: usize) -> Option<(Nanos, usize)> {
        let stage = self.stage(machine);
        let of = |(at, queue): (usize, &Queue)| {
            let job = queue.jobs.get(queue.done)?;
            let ready = self.ready[usize::from(!job.is_forward)][self.cell(stage, job.microbatch)]?;
            // At equal times, input gradients sort before forwards, because other machines wait for them.
            Some((ready.max(self.free[machine]), job.is_forward, job.start, job.microbatch, at))
        };
        let found = self.queues[machine].iter().enumerate().filter_map(of).min()?;
        Some((found.0, found.4))
    }

    /// Schedules everything: in each round, the machine that can start first takes its next action.
    fn run(&mut self) -> Vec<Vec<Op>> {
        loop {
            let next = (0..self.free.len()).filter_map(|machine| {
                let head = self.head(machine);
                let weight = (!self.weights[machine].is_empty()).then_some(self.free[machine]);
                let start = [head.map(|(start, _)| start), weight].into_iter().flatten().min()?;
                Some((start, machine, head))
            });
            let Some((_, machine, head)) = next.min_by_key(|&(start, machine, _)| (start, machine)) else {
                break;
            };
            let weight = self.cost.stages[self.stage(machine) as usize].weight;
            // A weight gradient runs first if it ends before anything else could start.
            let is_idle = head.is_none_or(|(start, _)| self.free[machine].saturating_add(weight) <= start);
            match head {
                Some((_, queue)) if self.weights[machine].is_empty() || !is_idle => self.job(machine, queue),
                _ => self.weight(machine),
            }
        }
        std::mem::take(&mut self.lists)
    }

    fn weight(&mut self, machine: usize) {
        let stage = self.stage(machine);
        let microbatch = self.weights[machine].remove(0);
        self.push(machine, ComputeKind::BackwardWeight, microbatch);
        self.free[machine] = self.free[machine].saturating_add(self.cost.stages[stage as usize].weight);
    }

    fn job(&mut self, machine: usize, queue: usize) {
        let stage = self.stage(machine);
        let queue = &mut self.queues[machine][queue];
        let job = queue.jobs[queue.done];
        queue.done += 1;
        let kind = if job.is_forward { ComputeKind::Forward } else { ComputeKind::BackwardInput };
        let cell = self.cell(stage, job.microbatch);
        let ready = self.ready[usize::from(!job.is_forward)][cell].unwrap_or_default();
        let end = ready.max(self.free[machine]).saturating_add(self.cost.stages[stage as usize].time(kind));
        self.free[machine] = end;
        self.push(machine, kind, job.microbatch);
        if job.is_forward && stage + 1 == self.stages {
            self.ready[1][cell] = Some(end);
        } else if job.is_forward {
            let hop = &self.cost.boundaries[stage as usize];
            let next = self.cell(stage + 1, job.microbatch);
            self.ready[0][next] = Some(end.saturating_add(hop.link.time(hop.forward)));
        } else {
            self.weights[machine].push(job.microbatch);
            if let Some(before) = stage.checked_sub(1) {
                let hop = &self.cost.boundaries[before as usize];
                let cell = self.cell(before, job.microbatch);
                self.ready[1][cell] = Some(end.saturating_add(hop.link.time(hop.backward)));
            }
        }
    }

    fn push(&mut self, machine: usize, kind: ComputeKind, microbatch: usize) {
        let stage = self.routes.copy_of[microbatch] as u32 * self.stages + self.stage(machine);
        self.lists[machine].push(Action::new(kind, stage, microbatch as u32).into());
    }
}

/// The policy's state: the machine at each position.
#[derive(Default)]
struct Recycle {
    shape: Option<Shape>,
    positions: BTreeMap<Position, u32>,
    /// Machines that copy a position's stage, each with the time at which the copy is complete.
    coming: Vec<(Nanos, Position, u32)>,
    /// Cached step times by list of empty positions.
    known: BTreeMap<Vec<Position>, Option<Nanos>>,
}

impl Recycle {
    fn empty(&self) -> Vec<Position> {
        let Some(shape) = self.shape else { return Vec::new() };
        let all = (0..shape.pipelines)
            .flat_map(|pipeline| (0..shape.stages).map(move |stage| Position { pipeline, stage }));
        all.filter(|position| !self.positions.contains_key(position)).collect()
    }

    /// Returns the time of a step without the empty positions. If the other machines cannot hold the
    /// microbatches, the pipelines with empty positions are left out.
    fn step(&mut self, prices: &mut StepTimes<'_>) -> Option<Nanos> {
        let (shape, empty) = (self.shape?, self.empty());
        if empty.is_empty() {
            return prices.step(shape);
        }
        if !self.known.contains_key(&empty) {
            let step = rerouted(prices, shape, &empty);
            self.known.insert(empty.clone(), step);
        }
        self.known.get(&empty).copied().flatten().or_else(|| {
            let mut hit: Vec<u32> = empty.iter().map(|position| position.pipeline).collect();
            hit.dedup();
            prices.step(Shape { pipelines: shape.pipelines - hit.len() as u32, ..shape })
        })
    }

    /// Starts again in the best shape with at least two pipelines, or in the best shape of all if there is
    /// none.
    fn begin(&mut self, live: &[u32], prices: &mut StepTimes<'_>) {
        let machines = live.len() as u32;
        self.shape = best_shape(prices, machines, 2).or_else(|| best_shape(prices, machines, 1));
        self.coming.clear();
        self.known.clear();
        self.positions.clear();
        let empty = self.empty();
        self.positions.extend(empty.into_iter().zip(live.iter().copied()));
    }

    /// Assigns idle machines to empty positions and starts their copies.
    fn call(&mut self, now: ChangeContext<'_>, live: &[u32], prices: &mut StepTimes<'_>) {
        let Some(state) = self.shape.and_then(|shape| prices.state(shape.stages)) else { return };
        let has = prices.fleet().link.time(state).saturating_add(now.at);
        for position in self.empty() {
            let is_taken = |machine: &u32| {
                self.positions.values().any(|taken| taken == machine)
                    || self.coming.iter().any(|(.., coming)| coming == machine)
            };
            if self.coming.iter().any(|(_, coming, _)| *coming == position) {
                continue;
            }
            let Some(&machine) = live.iter().find(|machine| !is_taken(machine)) else { break };
            self.coming.push((has, position, machine));
        }
    }
}

impl Policy for Recycle {
    fn change(&mut self, now: ChangeContext<'_>, prices: &mut StepTimes<'_>) -> Reaction {
        let live = now.live();
        let before = self.positions.len();
        self.positions.retain(|_, machine| !now.lost.contains(machine));
        self.coming.retain(|(.., machine)| !now.lost.contains(machine));
        let is_hit = self.positions.len() < before;
        let is_whole = self.shape.is_some_and(|shape| {
            (0..shape.stages).all(|stage| self.positions.keys().any(|position| position.stage == stage))
        });
        if !is_whole {
            self.begin(&live, prices);
            let step = self.step(prices);
            return match step {
                Some(_) => Reaction::restarted(step, now.recovery.restart),
                None => Reaction { gone: LostWork::Step, ..Reaction::same(None) },
            };
        }
        let (there, coming): (Vec<_>, Vec<_>) = self.coming.drain(..).partition(|(at, ..)| *at <= now.at);
        self.coming = coming;
        let has_joined = !there.is_empty();
        self.positions.extend(there.into_iter().map(|(_, position, machine)| (position, machine)));
        self.call(now, &live, prices);
        let wake = self.coming.iter().map(|(at, ..)| *at).min();
        let step = self.step(prices);
        let reaction = if is_hit || has_joined {
            Reaction::regrouped(step, now.recovery.regroup)
        } else {
            Reaction::same(step)
        };
        Reaction { wake, ..reaction }
    }
}

/// Returns the time of a step of a shape without the machines at some positions. `None` if a machine's memory
/// would not be enough.
fn rerouted(prices: &mut StepTimes<'_>, shape: Shape, empty: &[Position]) -> Option<Nanos> {
    let each = prices.fleet().microbatches.div_ceil(shape.pipelines);
    let memory = prices.fleet().machine.memory;
    let cost = prices.division(shape.stages)?.cost.clone();
    let settings = crate::pipeline::Settings::new(shape.stages, each);
    let base = crate::pipeline::Method::OneFOneB.order(&settings).ok()?;
    let found = reroute(&base, shape.pipelines, empty, &cost).ok()?;
    let layers = prices.division(shape.stages)?.layers.clone();
    let held = peak_bytes(&found.order, &cost).ok()?;
    let fits = found.positions.iter().zip(held).all(|(position, held)| {
        let layers = &prices.fleet().layers[layers[position.stage as usize].clone()];
        let state: u64 = layers.iter().map(|layer| layer.state.0).sum();
        memory.is_none_or(|memory| state.saturating_add(held.0) <= memory.0)
    });
    if fits { prices.ordered(&found.order, shape.pipelines) } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pipeline::{Boundary, Method, Settings, StageCost};

    fn base(stages: u32, microbatches: u32) -> (ComputeOrder, PipelineCost) {
        let order = Method::OneFOneB.order(&Settings::new(stages, microbatches)).unwrap();
        let cost = PipelineCost::uniform(&order, StageCost::UNIT, Boundary::latency(Nanos(100_000)));
        (order, cost)
    }

    #[test]
    fn each_stage_does_all_microbatches_on_machines_that_hold_it() {
        let (base, cost) = base(4, 8);
        let lost = [
            Position { pipeline: 1, stage: 2 },
            Position { pipeline: 2, stage: 0 },
            Position { pipeline: 0, stage: 2 },
        ];
        let found = reroute(&base, 4, &lost, &cost).unwrap();
        assert_eq!((found.positions.len(), found.order.microbatches()), (13, 32));
        let mut forwards = vec![0; 4];
        for (rank, action) in found.order.actions() {
            let part = found.order.placement().part(action.stage);
            assert_eq!(part, found.positions[rank.index()].stage);
            forwards[part as usize] += u32::from(action.kind == ComputeKind::Forward);
        }
        assert_eq!(forwards, [32; 4]);
        // The two remaining machines of stage 2 process 16 microbatches each.
        for (rank, position) in
            (0..).map(Rank).zip(&found.positions).filter(|(_, position)| position.stage == 2)
        {
            let count = found.order.actions().filter(|(of, a)| *of == rank && a.kind == ComputeKind::Forward);
            assert_eq!(count.count(), 16, "{position:?}");
        }
    }

    #[test]
    fn a_loss_costs_less_than_a_pipeline_and_no_less_than_its_work() {
        for (stages, pipelines, microbatches) in [(4, 4, 8), (4, 2, 12), (6, 3, 12), (2, 8, 8)] {
            let (base, cost) = base(stages, microbatches);
            let whole = reroute(&base, pipelines, &[], &cost).unwrap();
            let whole = simulate(&whole.order, &cost).unwrap().makespan();
            // Without losses, the merged order is no slower than the order that it is made from.
            assert!(whole <= simulate(&base, &cost).unwrap().makespan());
            for stage in 0..stages {
                let found = reroute(&base, pipelines, &[Position { pipeline: 0, stage }], &cost).unwrap();
                let time = simulate(&found.order, &cost).unwrap().makespan();
                let fewer = Method::OneFOneB
                    .order(&Settings::new(stages, (microbatches * pipelines).div_ceil(pipelines - 1)))
                    .unwrap();
                let dropped = simulate(&fewer, &cost).unwrap().makespan();
                assert!(time <= dropped, "{stages} {pipelines} {stage}: {time} {dropped}");
                let work = 3_000_000 * u64::from((microbatches * pipelines).div_ceil(pipelines - 1));
                assert!(time.0 >= work, "{time}");
            }
        }
    }

    #[test]
    fn what_cannot_be_is_refused() {
        let (base, cost) = base(2, 4);
        let position = |pipeline, stage| Position { pipeline, stage };
        assert!(reroute(&base, 0, &[], &cost).is_err());
        let gone = reroute(&base, 2, &[position(0, 1), position(1, 1)], &cost).unwrap_err();
        assert!(gone.to_string().contains("stage 1"), "{gone}");
        assert!(reroute(&base, 2, &[position(5, 1)], &cost).is_err());
        let chunks = Method::Interleaved.order(&Settings { chunks: Some(2), ..Settings::new(2, 4) }).unwrap();
        let cost = PipelineCost::uniform(&chunks, StageCost::UNIT, Boundary::latency(Nanos::ZERO));
        assert!(reroute(&chunks, 2, &[], &cost).is_err());
    }
}
