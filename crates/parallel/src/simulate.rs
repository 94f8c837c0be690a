//! Simulates data-parallel and `DiLoCo` training: computes a [`Timeline`] from replicas and their costs. All
//! times are integers, so results are the same on every machine.

use farflung_base::{Bytes, Nanos, Rank};

use crate::average::all_reduce_bytes;
use crate::share::largest_remainder;
use crate::{Cluster, Kind, Lane, ModelShape, Overlap, ParallelError, Replicas, Span, Sync, Timeline};

/// Times of one rank in a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RankCost {
    /// Time of the forward of one microbatch.
    pub forward: Nanos,
    /// Time of the backward of one microbatch.
    pub backward: Nanos,
    /// Time of one step of the inner optimizer.
    pub optimizer: Nanos,
    /// Time of one step of the outer optimizer.
    pub outer: Nanos,
}

/// Times of all ranks in a step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cost {
    /// One entry per rank.
    pub ranks: Vec<RankCost>,
}

impl Cost {
    /// Computes the costs of a model on a cluster from the speeds of its devices. The forward takes a third of
    /// the time, the backward two thirds, and optimizers take none (they need about a thousandth of any step
    /// that is worth distributing).
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

    /// Returns the time in which a rank computes its share of one step, including the optimizer.
    #[must_use]
    pub fn step(&self, rank: Rank, share: u32) -> Nanos {
        let c = &self.ranks[rank.index()];
        let microbatch = c.forward.saturating_add(c.backward);
        Nanos(microbatch.0.saturating_mul(u64::from(share))).saturating_add(c.optimizer)
    }
}

/// Simulates `steps` steps of `replicas`. `price` returns the time to average a number of values over all
/// ranks.
///
/// Ddp: a rank runs its microbatches one after the other. During the last backward, the buckets of
/// [`ModelShape::buckets`] become ready in backward order. The all-reduce of a bucket starts when every rank
/// has the bucket and the link is free. All ranks run the optimizer when the last bucket is done.
///
/// `DiLoCo`: ranks step independently. After every period, all wait for the slowest, average, and run the outer
/// optimizer. If the last period is shorter, it ends with a synchronisation too.
///
/// If `price` is that of `farflung-comm`, the result equals the time of a run in virtual time.
///
/// Errors: as [`Replicas::check`] and [`ModelShape::microbatches`]; [`ParallelError::PerRank`] if `cost` does
/// not have one entry per rank.
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
    /// Time at which each rank's processor is free.
    clock: Vec<Nanos>,
    /// Time at which the link, which all collectives share, is free.
    link_free: Nanos,
    timeline: Timeline,
}

impl Run<'_> {
    fn ranks(&self) -> impl Iterator<Item = Rank> + use<> {
        (0..self.timeline.ranks).map(Rank)
    }

    /// Appends a span of work to a rank's processor.
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

    /// Appends an all-reduce of `values` values. It starts when all ranks are ready and the link is free.
    /// Returns its end.
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

    /// Runs the forwards and backwards of a rank's share. Raises `ready` to the time at which the rank has each
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
            // A rank without a share contributes zero gradients as soon as it is done with the previous step.
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
