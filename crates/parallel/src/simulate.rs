//! Predicts the time of data-parallel and `DiLoCo` training: replicas and their costs in, a [`Timeline`] out.
//! Nothing moves and nobody waits; all times are integers, so every machine predicts the same.

use farflung_base::{Bytes, Nanos, Rank};

use crate::average::all_reduce_bytes;
use crate::share::largest_remainder;
use crate::{Cluster, Kind, Lane, ModelShape, Overlap, ParallelError, Replicas, Span, Sync, Timeline};

/// What one rank takes for its part of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RankCost {
    /// Forward of one microbatch.
    pub forward: Nanos,
    /// Backward of one microbatch.
    pub backward: Nanos,
    /// One step of the inner optimizer.
    pub optimizer: Nanos,
    /// One step of the outer optimizer.
    pub outer: Nanos,
}

/// What a step takes, rank by rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cost {
    /// An entry per rank.
    pub ranks: Vec<RankCost>,
}

impl Cost {
    /// The speeds of a cluster's devices applied to a model: a third of the time is forward, two thirds
    /// backward, and optimizers are free (they are a thousandth of a step of any size worth distributing).
    #[must_use]
    pub fn of(shape: &ModelShape, cluster: &Cluster) -> Self {
        let cost = |time: Nanos| {
            let forward = Nanos(time.0 / 3);
            RankCost { forward, backward: time.saturating_sub(forward), ..RankCost::default() }
        };
        Self {
            ranks: cluster.ranks().map(|d| cost(d.speed.time(shape.microbatch_tokens(), shape))).collect(),
        }
    }

    /// Compute of a rank's share of one step, optimizer included.
    #[must_use]
    pub fn step(&self, rank: Rank, share: u32) -> Nanos {
        let c = &self.ranks[rank.index()];
        let microbatch = c.forward.saturating_add(c.backward);
        Nanos(microbatch.0.saturating_mul(u64::from(share))).saturating_add(c.optimizer)
    }
}

/// Simulates `steps` steps of `replicas`; `price` is the time of an average of so many values over all ranks.
///
/// Ddp: a rank runs the microbatches of its share one after the other, and in the last one's backward the
/// buckets of [`ModelShape::buckets`] become ready in backward order. A bucket's all-reduce starts when every
/// rank has it and the link is free; all ranks step when the last bucket is done. `DiLoCo`: ranks step alone,
/// and after every so many steps all wait for the slowest, average, and take the outer step. A last, shorter
/// period ends with a synchronisation too.
///
/// With the price of `comm` this predicts what a run under virtual time takes.
///
/// Errors: as [`Replicas::check`] and [`ModelShape::microbatches`], and costs that are not one per rank.
pub fn simulate_replicas(
    replicas: &Replicas,
    shape: &ModelShape,
    cost: &Cost,
    steps: u32,
    price: &dyn Fn(u64) -> Nanos,
) -> Result<Timeline, ParallelError> {
    replicas.check()?;
    shape.microbatches()?;
    let ranks = replicas.ranks();
    if cost.ranks.len() != ranks as usize {
        let given = cost.ranks.len();
        return Err(ParallelError::PerRank { what: "cost.ranks", given, ranks: ranks as usize });
    }
    let mut run = Run {
        replicas,
        cost,
        price,
        clock: vec![Nanos::ZERO; ranks as usize],
        link_free: Nanos::ZERO,
        timeline: Timeline { ranks, steps, spans: Vec::new() },
    };
    match replicas.sync {
        Sync::Ddp { overlap, buckets } => {
            let buckets = shape.buckets(buckets);
            for step in 0..steps {
                run.ddp_step(step, overlap, &buckets);
            }
        }
        Sync::DiLoCo { every } => {
            for step in 0..steps {
                run.local_step(step);
                if (step + 1) % every == 0 || step + 1 == steps {
                    run.outer_step(step, shape.parameters);
                }
            }
        }
    }
    Ok(run.timeline)
}

struct Run<'a> {
    replicas: &'a Replicas,
    cost: &'a Cost,
    price: &'a dyn Fn(u64) -> Nanos,
    /// When each rank's processor is free.
    clock: Vec<Nanos>,
    /// When the link, which all collectives share, is free.
    link_free: Nanos,
    timeline: Timeline,
}

impl Run<'_> {
    fn ranks(&self) -> impl Iterator<Item = Rank> + use<> {
        (0..self.timeline.ranks).map(Rank)
    }

    /// The next thing that a rank's processor does.
    fn compute(&mut self, rank: Rank, kind: Kind, step: u32, part: u32, time: Nanos) {
        let start = self.clock[rank.index()];
        let end = start.saturating_add(time);
        self.clock[rank.index()] = end;
        let lane = Lane::Compute;
        self.push(Span { rank, lane, kind, step, part, op: None, start, end, sent: Bytes(0) });
    }

    fn push(&mut self, span: Span) {
        if span.end > span.start || span.sent.0 > 0 {
            self.timeline.spans.push(span);
        }
    }

    /// An all-reduce of `values` values that starts when all are ready and the link is free; returns its end.
    fn all_reduce(&mut self, ready: Nanos, kind: Kind, step: u32, part: u32, values: u64) -> Nanos {
        let n = self.timeline.ranks;
        if n == 1 {
            return ready;
        }
        let bytes = self.replicas.codec.bytes(values);
        let start = ready.max(self.link_free);
        let end = start.saturating_add((self.price)(values));
        self.link_free = end;
        for rank in self.ranks() {
            let (lane, sent) = (Lane::Link, all_reduce_bytes(n, bytes));
            self.push(Span { rank, lane, kind, step, part, op: None, start, end, sent });
        }
        end
    }

    fn ddp_step(&mut self, step: u32, overlap: Overlap, buckets: &[u64]) {
        let mut ready = vec![Nanos::ZERO; buckets.len()];
        for rank in self.ranks() {
            self.microbatches(rank, step, buckets, &mut ready);
        }
        if overlap == Overlap::None {
            let last = ready.iter().copied().max().unwrap_or_default();
            ready.fill(last);
        }
        let mut done = Nanos::ZERO;
        for (part, (&values, &ready)) in buckets.iter().zip(&ready).enumerate() {
            done = self.all_reduce(ready, Kind::AllReduce, step, part as u32, values);
        }
        for rank in self.ranks() {
            self.clock[rank.index()] = self.clock[rank.index()].max(done);
            self.compute(rank, Kind::Optimizer, step, 0, self.cost.ranks[rank.index()].optimizer);
        }
    }

    /// The forward and backward of a rank's share; lifts `ready` to when its last gradients are there, per
    /// bucket.
    fn microbatches(&mut self, rank: Rank, step: u32, buckets: &[u64], ready: &mut [Nanos]) {
        let RankCost { forward, backward, .. } = self.cost.ranks[rank.index()];
        let share = self.replicas.shares[rank.index()];
        for microbatch in 0..share {
            self.compute(rank, Kind::Forward, step, microbatch, forward);
            if microbatch + 1 < share {
                self.compute(rank, Kind::Backward, step, microbatch, backward);
                continue;
            }
            for (ready, time) in ready.iter_mut().zip(largest_remainder(backward.0, buckets)) {
                self.compute(rank, Kind::Backward, step, microbatch, Nanos(time));
                *ready = self.clock[rank.index()].max(*ready);
            }
        }
        if share == 0 {
            // Zero gradients are there from the start, but not before the rank is done with the step before.
            let now = self.clock[rank.index()];
            for ready in ready {
                *ready = now.max(*ready);
            }
        }
    }

    fn local_step(&mut self, step: u32) {
        for rank in self.ranks() {
            self.microbatches(rank, step, &[1], &mut [Nanos::ZERO]);
            self.compute(rank, Kind::Optimizer, step, 0, self.cost.ranks[rank.index()].optimizer);
        }
    }

    fn outer_step(&mut self, step: u32, parameters: u64) {
        let ready = self.clock.iter().copied().max().unwrap_or_default();
        let done = self.all_reduce(ready, Kind::OuterSync, step, 0, parameters);
        for rank in self.ranks() {
            self.clock[rank.index()] = done;
            self.compute(rank, Kind::OuterStep, step, 0, self.cost.ranks[rank.index()].outer);
        }
    }
}

#[cfg(test)]
mod tests;
