//! Simulates a whole step of a pipeline: computations, the collectives between them, and the optimizer. Times
//! of collectives are an input; their algorithms and links are not modelled here.

use std::collections::BTreeMap;

use farflung_base::{Bytes, Nanos, Rank, StageId};

use super::simulate::Simulator;
use super::{
    Action, ComputeKind, Lowered, LoweredKind, Op, PipelineCost, Schedule, Simulation, Slot, StageCost,
    Updates,
};
use crate::{Kind, Lane, ParallelError, Span, Timeline};

/// Time of each of a step's collectives, measured from the moment when all its participants are ready.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct CollectiveTimes {
    /// `REDUCE_GRAD`: averaging a part's gradients over all ranks that hold it, by part of the model. Empty: no
    /// time.
    pub reduce: Vec<Nanos>,
    /// `REDUCE_TIED`: summing the gradients that the first and the last part share.
    pub tied: Nanos,
    /// `UNSHARD`: gathering a part's weights, by part of the model. Empty: no time.
    pub gather: Vec<Nanos>,
}

impl CollectiveTimes {
    fn check(&self, schedule: &Schedule) -> Result<(), ParallelError> {
        let stages = schedule.order().placement().depth() as usize;
        for (what, given) in [("times.reduce", self.reduce.len()), ("times.gather", self.gather.len())] {
            if given != 0 && given != stages {
                return Err(ParallelError::PerStage { what, given, stages });
            }
        }
        Ok(())
    }
}

/// A collective of gradients, as seen by one of its ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reduction {
    /// The rank.
    pub rank: Rank,
    /// [`LoweredKind::Reduce`] or [`LoweredKind::ReduceTied`].
    pub kind: LoweredKind,
    /// The stage whose gradients are reduced.
    pub stage: StageId,
    /// Time at which the stage's gradients were complete on this rank.
    pub ready: Nanos,
    /// Time of the collective: from the moment when all participants are ready and free until the result is
    /// available.
    pub slot: Slot,
}

/// Result of [`Schedule::simulate`].
#[derive(Debug)]
pub struct StepSimulation<'a> {
    compute: Simulation<'a>,
    reductions: Vec<Reduction>,
    makespan: Nanos,
}

impl StepSimulation<'_> {
    /// Returns the simulation of the computations. Time in which a rank waits for a collective between them
    /// counts as bubble.
    #[must_use]
    pub const fn compute(&self) -> &Simulation<'_> {
        &self.compute
    }

    /// Returns the reductions: the averages in the order of their starts, then the sums of tied gradients in
    /// the order of their starts.
    #[must_use]
    pub fn reductions(&self) -> &[Reduction] {
        &self.reductions
    }

    /// Returns the time at which the last rank has done its optimizer steps.
    #[must_use]
    pub const fn makespan(&self) -> Nanos {
        self.makespan
    }

    /// Returns the time that is not hidden by computation: from the end of the last computation to the end of
    /// the step.
    #[must_use]
    pub fn exposed(&self) -> Nanos {
        self.makespan - self.compute.makespan()
    }

    /// Returns the spans of computations, messages and reductions, for drawing.
    #[must_use]
    pub fn timeline(&self) -> Timeline {
        let mut timeline = self.compute.timeline();
        let spans = self.reductions.iter().filter(|r| r.slot.end > r.slot.start).map(|r| Span {
            rank: r.rank,
            lane: Lane::Link,
            kind: Kind::AllReduce,
            step: 0,
            part: r.stage.0,
            op: None,
            start: r.slot.start,
            end: r.slot.end,
            sent: Bytes(0),
        });
        timeline.spans.extend(spans);
        timeline.spans.sort_by_key(|s| (s.rank, s.lane, s.start));
        timeline
    }
}

impl Schedule {
    /// Simulates a step with computations that take the times in `cost` and collectives that take those in
    /// `times`.
    ///
    /// Computations and messages are simulated as in [`simulate`](super::simulate()). A part's gradients are
    /// averaged as soon as they are complete on all ranks that hold it, in parallel with computation. A rank
    /// takes part in one reduction at a time.
    ///
    /// With a flush, a rank runs the optimizer when all its gradients are averaged. Without one, it waits for
    /// the average of each update before it continues. Weights are gathered where the list says so, and the
    /// rank waits for them. Moves to slower memory and back are assumed to be hidden.
    ///
    /// Errors: as [`PipelineCost::check`]; [`ParallelError::PerStage`] if a list in `times` has a wrong number
    /// of entries.
    ///
    /// ```
    /// use farflung_base::{Nanos, Rank};
    /// use farflung_parallel::pipeline::{
    ///     Boundary, CollectiveTimes, Lowering, Method, PipelineCost, Schedule, Settings, StageCost,
    /// };
    ///
    /// let order = Method::OneFOneB.order(&Settings::new(4, 8))?;
    /// let cost = PipelineCost::uniform(&order, StageCost::UNIT, Boundary::latency(Nanos::ZERO));
    /// let schedule = Schedule::new(order, &Lowering { replicas: true, ..Lowering::default() })?;
    /// let times = CollectiveTimes { reduce: vec![Nanos::from_millis(5); 4], ..CollectiveTimes::default() };
    /// let step = schedule.simulate(&cost, &times)?;
    /// // The last stage is done 6 ms before the first, and its average before it too. Only the first one's is
    /// // seen.
    /// assert_eq!(step.reductions()[0].rank, Rank(3));
    /// assert_eq!(step.reductions()[0].slot.end, Nanos::from_millis(27 + 5));
    /// assert_eq!((step.makespan(), step.exposed()), (Nanos::from_millis(33 + 5), Nanos::from_millis(5)));
    /// # Ok::<(), farflung_parallel::ParallelError>(())
    /// ```
    pub fn simulate(
        &self,
        cost: &PipelineCost,
        times: &CollectiveTimes,
    ) -> Result<StepSimulation<'_>, ParallelError> {
        cost.check(self.order())?;
        times.check(self)?;
        let mut marks = Marks::of(self, cost, times);
        let mut simulator = Simulator::new(self.order(), cost);
        simulator.pauses = std::mem::take(&mut marks.pauses);
        let (compute, free) = simulator.run()?;
        let reductions = marks.reductions(self, &compute, times);
        let mut ready = free;
        for reduction in &reductions {
            let ready = &mut ready[reduction.rank.index()];
            *ready = reduction.slot.end.max(*ready);
        }
        let ends = ready.into_iter().zip(marks.steps).map(|(ready, steps)| ready.saturating_add(steps));
        let makespan = ends.max().unwrap_or_default();
        Ok(StepSimulation { compute, reductions, makespan })
    }
}

/// The positions of a schedule's communication and optimizer entries among the ops of the order.
struct Marks {
    /// Pauses of each rank, by the index of the op after the pause.
    pauses: Vec<BTreeMap<usize, Nanos>>,
    /// Collectives of gradients, each with the number of ops before it.
    gradients: Vec<(Rank, LoweredKind, StageId, usize)>,
    /// Time of each rank's optimizer steps after its last op.
    steps: Vec<Nanos>,
}

impl Marks {
    fn of(schedule: &Schedule, cost: &PipelineCost, times: &CollectiveTimes) -> Self {
        let order = schedule.order();
        let placement = order.placement();
        let flush = order.updates() == Updates::Flush;
        let ranks = schedule.lists().len();
        let mut marks = Self {
            pauses: vec![BTreeMap::new(); ranks],
            gradients: Vec::new(),
            steps: vec![Nanos::ZERO; ranks],
        };
        for (rank, list) in schedule.lists().iter().enumerate() {
            let ops = &order.lists()[rank];
            let mut next = 0;
            for &entry in list {
                let mut pause = |time| {
                    let pause: &mut Nanos = marks.pauses[rank].entry(next).or_default();
                    *pause = pause.saturating_add(time);
                };
                match entry {
                    Lowered::Compute(op) if ops.get(next) == Some(&op) => next += 1,
                    Lowered::Compute(Op::Run(Action { kind: ComputeKind::Step, stage, .. })) => {
                        let StageCost { step, .. } = *cost.stage(stage);
                        if flush { marks.steps[rank] += step } else { pause(step) }
                    }
                    Lowered::Move { kind: LoweredKind::Gather, stage, .. } => {
                        pause(part_time(&times.gather, placement.part(stage)));
                    }
                    // Replicas are assumed to be identical, so all replicas are ready at the same time.
                    Lowered::Move { kind: LoweredKind::Reduce, stage, .. } if !flush => {
                        pause(part_time(&times.reduce, placement.part(stage)));
                    }
                    Lowered::Move {
                        kind: kind @ (LoweredKind::Reduce | LoweredKind::ReduceTied),
                        stage,
                        ..
                    } => marks.gradients.push((Rank(rank as u32), kind, stage, next)),
                    _ => {}
                }
            }
        }
        marks
    }

    /// Returns the times at which the collectives of gradients run.
    fn reductions(
        &self,
        schedule: &Schedule,
        compute: &Simulation<'_>,
        times: &CollectiveTimes,
    ) -> Vec<Reduction> {
        let placement = schedule.order().placement();
        let pooled = placement.is_pooled();
        let mut line = Line { free: vec![Nanos::ZERO; schedule.lists().len()], done: Vec::new() };
        let of = |kind| {
            // Participants of each update: all holders of a part, or the two users of the tied weights in one
            // copy.
            let mut groups: BTreeMap<(u32, u32), Vec<Reduction>> = BTreeMap::new();
            let mut updates: BTreeMap<StageId, u32> = BTreeMap::new();
            for &(rank, _, stage, after) in self.gradients.iter().filter(|mark| mark.1 == kind) {
                let update = updates.entry(stage).or_default();
                let parts = (placement.part(stage), stage.0 / placement.depth());
                let group = match kind {
                    LoweredKind::Reduce => parts.0,
                    // With pools, all ranks that hold the tied weights take part, whatever the routes.
                    _ if pooled => 0,
                    _ => parts.1,
                };
                let ready = after.checked_sub(1).map_or(Nanos::ZERO, |op| compute.slots(rank)[op].end);
                let slot = Slot::default();
                groups.entry((*update, group)).or_default().push(Reduction {
                    rank,
                    kind,
                    stage,
                    ready,
                    slot,
                });
                *update += 1;
            }
            groups.into_values().collect::<Vec<_>>()
        };
        line.take(of(LoweredKind::Reduce), |stage| part_time(&times.reduce, placement.part(stage)));
        // Tied gradients are summed after each of the two parts has its average.
        let mut tied = of(LoweredKind::ReduceTied);
        for reduction in tied.iter_mut().flatten() {
            let average = line.done.iter().find(|r| r.stage == reduction.stage);
            reduction.ready = average.map_or(reduction.ready, |average| average.slot.end);
        }
        line.take(tied, |_| times.tied);
        line.done
    }
}

/// Returns the time of the collective of a part; zero if no times are given.
fn part_time(times: &[Nanos], part: u32) -> Nanos {
    times.get(part as usize).copied().unwrap_or_default()
}

/// Simulates collectives. A rank takes part in one collective at a time.
struct Line {
    free: Vec<Nanos>,
    done: Vec<Reduction>,
}

impl Line {
    /// Runs the collectives of all groups. Each round runs the one that can start first.
    fn take(&mut self, mut groups: Vec<Vec<Reduction>>, time: impl Fn(StageId) -> Nanos) {
        loop {
            let start = |group: &Vec<Reduction>| {
                group.iter().map(|r| r.ready.max(self.free[r.rank.index()])).max().unwrap_or_default()
            };
            let starts = groups.iter().map(start).enumerate();
            let Some((first, start)) = starts.min_by_key(|&(_, start)| start) else { break };
            let group = groups.swap_remove(first);
            let end = start.saturating_add(time(group[0].stage));
            for reduction in group {
                self.free[reduction.rank.index()] = end;
                self.done.push(Reduction { slot: Slot { start, end }, ..reduction });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pipeline::{Boundary, Lowering, Method, Settings};

    fn ms(n: u64) -> Nanos {
        Nanos::from_millis(n)
    }

    fn step(
        method: Method,
        lowering: &Lowering,
        times: &CollectiveTimes,
    ) -> (Vec<(u32, u64, u64)>, u64, u64) {
        let order = method.order(&Settings::new(4, 8)).unwrap();
        let mut cost = PipelineCost::uniform(&order, StageCost::UNIT, Boundary::latency(Nanos::ZERO));
        cost.stages.iter_mut().for_each(|stage| stage.step = ms(1));
        let schedule = Schedule::new(order, lowering).unwrap();
        let step = schedule.simulate(&cost, times).unwrap();
        let in_ms = |t: Nanos| t.0 / ms(1).0;
        let slots = step.reductions().iter().map(|r| (r.rank.0, in_ms(r.slot.start), in_ms(r.slot.end)));
        (slots.collect(), in_ms(step.compute().makespan()), in_ms(step.makespan()))
    }

    const REPLICAS: Lowering =
        Lowering { ahead: 1, replicas: true, tied: false, sharded: false, offload: None };

    #[test]
    fn a_part_is_averaged_as_soon_as_its_last_backward_is_done() {
        let times = CollectiveTimes { reduce: vec![ms(5); 4], ..CollectiveTimes::default() };
        let (slots, compute, step_ends) = step(Method::OneFOneB, &REPLICAS, &times);
        assert_eq!(slots, [(3, 27, 32), (2, 29, 34), (1, 31, 36), (0, 33, 38)]);
        assert_eq!((compute, step_ends), (33, 39));
        // The times of averages differ by part. A long one determines the time of the step.
        let times = CollectiveTimes { reduce: [1, 1, 1, 20].map(ms).to_vec(), ..CollectiveTimes::default() };
        assert_eq!(step(Method::OneFOneB, &REPLICAS, &times).2, 27 + 20 + 1);
    }

    /// In breadth-first, the second chunks are done while the first ones still compute. The two averages run
    /// one after the other.
    #[test]
    fn a_rank_averages_one_chunk_at_a_time() {
        let times = CollectiveTimes { reduce: vec![ms(20); 8], ..CollectiveTimes::default() };
        let (slots, compute, step_ends) = step(Method::BreadthFirst, &REPLICAS, &times);
        let of_last: Vec<_> = slots.iter().filter(|slot| slot.0 == 3).collect();
        assert_eq!(of_last, [&(3, 35, 55), &(3, 55, 75)]);
        assert_eq!((compute, step_ends), (57, 41 + 40 + 2));
    }

    /// If a pipeline has two copies of the model, they average their gradients even without replicas. The
    /// average starts when the later copy is done.
    #[test]
    fn copies_wait_for_each_other() {
        let times = CollectiveTimes { reduce: vec![ms(3); 4], ..CollectiveTimes::default() };
        let (slots, compute, step_ends) = step(Method::Chimera, &Lowering::default(), &times);
        for part in 0..4_u32 {
            let starts: Vec<u64> =
                slots.iter().filter(|s| s.0 == part || s.0 == 3 - part).map(|s| s.1).collect();
            assert_eq!(starts.len(), 4, "{slots:?}");
            assert!(
                starts.windows(2).all(|w| w[0] == w[1] || w[1] >= w[0] + 3 || w[0] >= w[1] + 3),
                "{slots:?}"
            );
        }
        assert!(step_ends >= compute + 3 + 2, "{compute} {step_ends}");
    }

    #[test]
    fn tied_weights_follow_the_averages() {
        let tied = Lowering { tied: true, ..REPLICAS };
        let times = CollectiveTimes { reduce: vec![ms(5); 4], tied: ms(2), gather: Vec::new() };
        let (slots, _, step_ends) = step(Method::OneFOneB, &tied, &times);
        assert_eq!(slots[4..], [(0, 38, 40), (3, 38, 40)]);
        assert_eq!(step_ends, 41);
    }

    /// Each update of `PipeDream` is averaged before the rank continues: eight times on the first rank.
    #[test]
    fn without_a_flush_averages_are_waited_for() {
        let none = CollectiveTimes::default();
        let times = CollectiveTimes { reduce: vec![ms(5); 4], ..none.clone() };
        let end = |lowering: &Lowering, times| step(Method::PipeDream, lowering, times).2;
        assert!(end(&Lowering::default(), &none) >= 33 + 8);
        assert!(end(&REPLICAS, &times) >= 33 + 8 * 6);
    }

    #[test]
    fn gathers_are_waited_for_and_times_fit() {
        let sharded = Lowering { sharded: true, ..Lowering::default() };
        let times = CollectiveTimes { gather: vec![ms(2); 4], ..CollectiveTimes::default() };
        // All ranks gather at the same time.
        assert_eq!(step(Method::Inference, &sharded, &times).1, 11 + 2);
        let order = Method::OneFOneB.order(&Settings::new(4, 8)).unwrap();
        let cost = PipelineCost::uniform(&order, StageCost::UNIT, Boundary::latency(Nanos::ZERO));
        let schedule = Schedule::new(order, &REPLICAS).unwrap();
        let times = CollectiveTimes { reduce: vec![ms(1); 3], ..CollectiveTimes::default() };
        assert!(schedule.simulate(&cost, &times).unwrap_err().to_string().contains("times.reduce has 3"));
    }
}
