//! Chooses between synchronous and local-step training for a cluster by simulating both, and reports why.

pub mod alpa;
pub mod dapple;
pub mod dtfm;
pub mod galvatron;
pub mod matching;
#[cfg(feature = "integer-programs")]
pub mod operators;
pub mod path;
pub mod pipedream;
pub mod piper;
pub mod regional;
pub mod ring;
pub mod uneven;

use std::fmt;

use farflung_base::{Bytes, ContextCut, Nanos, Rank};

use crate::average::{AllReduceTime, all_reduce_bytes};
use crate::plan::NO_CODEC;
use crate::share::largest_remainder;
use crate::{
    Algorithm, Cluster, Codec, Cost, Level, Limits, Machine, ModelShape, Overlap, ParallelError, Part,
    Pipeline, Plan, PlannedModel, Recompute, Replicas, Sync, Timeline, simulate_replicas,
};

/// A method of synchronising replicas that the planner compared with others.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Candidate {
    /// The method of synchronising.
    pub sync: Sync,
    /// Algorithm that averages values.
    pub algorithm: Algorithm,
    /// Predicted time per step, averaged over one period.
    pub step: Nanos,
    /// Bytes that a rank sends per step, rounded up.
    pub sent_per_step: Bytes,
    /// Time that communication adds to a step, in hundredths of a percent of the step's compute.
    pub overhead: u64,
}

/// A choice, and the report on how it was made.
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use]
pub struct Planned {
    /// The chosen replicas: method of synchronisation, shares and codec.
    pub replicas: Replicas,
    /// Number of sequences in a microbatch.
    pub batch: u64,
    /// Number of parameters of the model, for the sizes of buckets.
    pub parameters: u64,
    /// Precision of the computation.
    pub precision: farflung_base::Precision,
    /// All candidates that were compared, including the chosen one.
    pub candidates: Vec<Candidate>,
    /// Compute time of the slowest rank in a step.
    pub compute: Nanos,
    /// For each rank: its name, its microbatches in a step, and their compute time.
    pub ranks: Vec<(String, u32, Nanos)>,
    /// The overhead limit that the choice is based on, in percent of compute.
    pub overhead_percent: u32,
    /// Maximum number of local steps between two averages.
    pub max_every: u32,
    /// Whether the choice is within the overhead limit.
    pub within: bool,
}

/// Plans data-parallel training of `shape` on `cluster` within `limits`. `price` returns the times of the
/// collectives that will be used.
///
/// Microbatches are divided in proportion to speed (largest remainder). The choice is, in this order:
///
/// 1. synchronous training with overlap, with the fastest number of buckets (a power of two), if it is within
///    the overhead limit;
/// 2. `DiLoCo` with the smallest number of local steps that is within the limit, because more local steps cost
///    quality;
/// 3. the fastest candidate; `DiLoCo` then has the maximum number of local steps.
///
/// Errors: those of [`Cluster::topology`], [`ModelShape::microbatches`] and [`Replicas::check`];
/// [`ParallelError::Memory`] for a device that cannot hold a replica.
pub fn plan(
    shape: &ModelShape,
    cluster: &Cluster,
    limits: &Limits,
    price: AllReduceTime<'_>,
) -> Result<Planned, ParallelError> {
    cluster.topology()?;
    let base = skeleton(shape, cluster, limits)?;
    let cost = Cost::of(shape, cluster);
    let search = Search { shape, limits, price, cost: &cost, base: &base };
    let compute = search.compute();
    for device in &cluster.devices {
        search.memory(device, 1)?;
    }

    let mut candidates = vec![search.simulate_period(ddp(Overlap::None, 1))?];
    let mut overlapped = Vec::new();
    for buckets in (0..32).map(|i| 1 << i).take_while(|&b| b <= limits.max_buckets.max(1)) {
        overlapped.push(search.simulate_period(ddp(Overlap::WithBackward, buckets))?);
    }
    candidates.extend(overlapped.into_iter().min_by_key(|c| c.step));
    // Local steps need memory for an anchor. On a cluster without it, only ddp is considered.
    let local = limits.max_every > 1 && cluster.devices.iter().all(|d| search.memory(d, 2).is_ok());
    if local {
        let every = search.fewest_local_steps(compute);
        candidates.push(search.simulate_period(Sync::DiLoCo { every })?);
    }
    let (chosen, within) = choose(&candidates, limits.overhead_percent);
    let replicas = Replicas { sync: chosen.sync, algorithm: chosen.algorithm, ..base.clone() };
    let names = cluster.rank_names().into_iter().zip(&replicas.shares);
    let ranks = names.zip(0..).map(|((n, &share), r)| (n, share, cost.step(Rank(r), share))).collect();
    Ok(Planned {
        replicas,
        batch: shape.sequences_per_microbatch,
        parameters: shape.parameters,
        precision: limits.precision,
        candidates,
        compute,
        ranks,
        overhead_percent: limits.overhead_percent,
        max_every: limits.max_every,
        within,
    })
}

/// Returns synchronous training if it is within the overhead limit, else local steps if they are, else the
/// fastest candidate; and whether it is within the limit.
fn choose(candidates: &[Candidate], overhead_percent: u32) -> (Candidate, bool) {
    let fits = |c: &&Candidate| c.overhead <= u64::from(overhead_percent) * 100;
    let within = || candidates.iter().filter(fits);
    let chosen = within()
        .find(|c| matches!(c.sync, Sync::Ddp { overlap: Overlap::WithBackward, .. }))
        .or_else(|| within().find(|c| matches!(c.sync, Sync::DiLoCo { .. })))
        .or_else(|| candidates.iter().min_by_key(|c| c.step))
        .expect("ddp is always considered");
    (chosen.clone(), fits(&chosen))
}

/// Returns the time that communication adds to a step, in hundredths of a percent of the step's compute.
fn overhead(step: Nanos, compute: Nanos) -> u64 {
    let extra = u128::from(step.saturating_sub(compute).0) * 10_000;
    u64::try_from(extra.div_ceil(u128::from(compute.0.max(1)))).unwrap_or(u64::MAX)
}

/// Returns the smallest number of local steps H for which `extra` / (H * compute) is within the overhead limit,
/// but at least 2 and at most `max_every`.
fn fewest(extra: u128, compute: Nanos, overhead_percent: u32, max_every: u32) -> u32 {
    let allowed = u128::from(compute.0) * u128::from(overhead_percent);
    let every = if allowed == 0 { u128::MAX } else { (extra * 100).div_ceil(allowed) };
    u32::try_from(every).unwrap_or(u32::MAX).clamp(2, max_every.max(2))
}

/// Predicted time of a step of a plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepTime {
    /// Whole time of the step, averaged over a period.
    pub step: Nanos,
    /// Compute time of the busiest rank in the step.
    pub compute: Nanos,
}

/// Maximum number of predictions to find a candidate's number of local steps.
const TRIES: usize = 4;

impl Planned {
    /// Predicts the candidates again with `step` and chooses again. `step` returns the time of a plan; the
    /// number of local steps is adjusted to it. Candidates for which it returns `None` are dropped.
    ///
    /// Errors: those of `step` and of [`Plan::check`]; [`ParallelError::NotBuilt`] if no candidate is left.
    pub fn predicted<E: From<ParallelError>>(
        self,
        model: &PlannedModel,
        step: impl Fn(&Plan) -> Result<Option<StepTime>, E>,
    ) -> Result<Self, E> {
        let mut candidates = Vec::new();
        for candidate in &self.candidates {
            candidates.extend(self.settle(candidate.clone(), model, &step)?);
        }
        if candidates.is_empty() {
            return Err(ParallelError::NotBuilt { what: "a plan for these machines".to_owned() }.into());
        }
        let (chosen, within) = choose(&candidates, self.overhead_percent);
        let replicas = Replicas { sync: chosen.sync, algorithm: chosen.algorithm, ..self.replicas };
        Ok(Self { replicas, candidates, within, ..self })
    }

    /// Returns a candidate with its predicted time and, for local steps, the number of local steps that this
    /// time requires.
    fn settle<E: From<ParallelError>>(
        &self,
        mut candidate: Candidate,
        model: &PlannedModel,
        step: &impl Fn(&Plan) -> Result<Option<StepTime>, E>,
    ) -> Result<Option<Candidate>, E> {
        for tries in 1..=TRIES {
            let plan = self.plan_by(candidate.sync, candidate.algorithm, model.clone())?;
            let Some(StepTime { step, compute }) = step(&plan)? else { return Ok(None) };
            (candidate.step, candidate.overhead) = (step, overhead(step, compute));
            let Sync::DiLoCo { every } = &mut candidate.sync else { break };
            let extra = u128::from(step.saturating_sub(compute).0) * u128::from(*every);
            let better = fewest(extra, compute, self.overhead_percent, self.max_every);
            // After the first prediction, the number of local steps may only increase, because more local steps
            // reduce the overhead.
            if better == *every || tries == TRIES || (tries > 1 && better < *every) {
                break;
            }
            let sent = candidate.sent_per_step.0.saturating_mul(u64::from(*every));
            candidate.sent_per_step = Bytes(sent.div_ceil(u64::from(better)));
            *every = better;
        }
        Ok(Some(candidate))
    }

    /// Returns the choice as a plan that can be executed, for the machines with at least one microbatch.
    ///
    /// Errors: as [`Plan::check`].
    pub fn plan(&self, model: PlannedModel) -> Result<Plan, ParallelError> {
        self.plan_by(self.replicas.sync, self.replicas.algorithm, model)
    }

    fn plan_by(&self, sync: Sync, algorithm: Algorithm, model: PlannedModel) -> Result<Plan, ParallelError> {
        let busy = || self.ranks.iter().filter(|(_, share, _)| *share > 0);
        let layers = 0..model.layers;
        let (every, buckets, overlap) = match sync {
            Sync::Ddp { overlap, buckets } => (1, buckets, overlap == Overlap::WithBackward),
            Sync::DiLoCo { every } => (every, 1, true),
        };
        let method = if every == 1 { "ddp" } else { "diloco" };
        let plan = Plan {
            model,
            mesh: Plan::mesh_of(busy().count() as u32, 1)?,
            tensor_weights: Vec::new(),
            context: ContextCut::default(),
            sequence_parallel: false,
            zero: 0,
            zero_weights: Vec::new(),
            zero_tensors: false,
            zero_codec: NO_CODEC.to_owned(),
            zero_groups: Vec::new(),
            machines: busy().map(|(name, ..)| name.clone()).collect(),
            precision: self.precision,
            batch: u32::try_from(self.batch).unwrap_or(u32::MAX),
            microbatches: busy().map(|(_, share, _)| *share).collect(),
            experts: Vec::new(),
            expert_codec: NO_CODEC.to_owned(),
            paths: Vec::new(),
            parts: vec![Part { layers, recompute: Recompute::None, offload: 0 }],
            pipeline: Pipeline::default(),
            boundaries: Vec::new(),
            levels: vec![Level {
                method: method.to_owned(),
                every,
                codec: if self.replicas.codec == Codec::F32 {
                    NO_CODEC.to_owned()
                } else {
                    self.replicas.codec.to_string()
                },
                algorithm,
                bucket_bytes: (self.parameters.saturating_mul(4)).div_ceil(u64::from(buckets.max(1))),
                overlap,
                ..Level::default()
            }],
        };
        plan.check()?;
        Ok(plan)
    }
}

const fn ddp(overlap: Overlap, buckets: u32) -> Sync {
    Sync::Ddp { overlap, buckets }
}

/// Returns replicas with their shares and codec set. The search determines the other fields.
fn skeleton(shape: &ModelShape, cluster: &Cluster, limits: &Limits) -> Result<Replicas, ParallelError> {
    let microbatches = shape.microbatches()?;
    // Speed is the inverse of a microbatch's time, scaled to keep nine digits.
    let speed = |d: &Machine| u64::MAX / 4 / d.speed.time(shape.microbatch_tokens(), shape).0.max(1);
    let shares = largest_remainder(microbatches, &cluster.ranks().map(speed).collect::<Vec<_>>());
    let too_many = |_| ParallelError::TooManyMicrobatches { microbatches };
    let replicas = Replicas {
        sync: ddp(Overlap::None, 1),
        algorithm: Algorithm::default(),
        codec: limits.codec.clone(),
        shares: shares.into_iter().map(u32::try_from).collect::<Result<_, _>>().map_err(too_many)?,
    };
    replicas.check()?;
    Ok(replicas)
}

struct Search<'a> {
    shape: &'a ModelShape,
    limits: &'a Limits,
    price: AllReduceTime<'a>,
    cost: &'a Cost,
    base: &'a Replicas,
}

impl Search<'_> {
    fn compute(&self) -> Nanos {
        let steps = self.base.shares.iter().zip(0..).map(|(&s, r)| self.cost.step(Rank(r), s));
        steps.max().unwrap_or_default()
    }

    fn memory(&self, device: &Machine, every: u32) -> Result<(), ParallelError> {
        let needs = self.limits.replica(self.shape.parameters, every);
        match device.memory {
            Some(has) if has < needs => {
                Err(ParallelError::Memory { device: device.name.clone(), needs, has })
            }
            _ => Ok(()),
        }
    }

    /// Returns the number of values of each average in a period.
    fn averages(&self, sync: Sync) -> Vec<u64> {
        match sync {
            Sync::Ddp { buckets, .. } => self.shape.buckets(buckets),
            Sync::DiLoCo { .. } => vec![self.shape.parameters],
        }
    }

    /// Returns the time of an average, or [`Nanos::MAX`] if the algorithm cannot be used.
    fn time(&self, algorithm: Algorithm, values: u64) -> Nanos {
        (self.price)(algorithm, &self.limits.codec, values).unwrap_or(Nanos::MAX)
    }

    /// Returns the fastest algorithm for all these averages together. Among equals, the first in
    /// [`Algorithm::ALL`].
    fn algorithm(&self, averages: &[u64]) -> Algorithm {
        let total = |a: &Algorithm| {
            averages.iter().fold(Nanos::ZERO, |t, &values| t.saturating_add(self.time(*a, values)))
        };
        Algorithm::ALL.into_iter().min_by_key(total).expect("there are algorithms")
    }

    /// Simulates one period.
    fn simulate_period(&self, sync: Sync) -> Result<Candidate, ParallelError> {
        let averages = self.averages(sync);
        let algorithm = self.algorithm(&averages);
        let replicas = Replicas { sync, algorithm, ..self.base.clone() };
        let period = sync.period();
        let timeline: Timeline = simulate_replicas(&replicas, self.shape, self.cost, period, &|values| {
            self.time(algorithm, values)
        })?;
        let makespan = timeline.makespan();
        let compute = Nanos(self.compute().0.saturating_mul(u64::from(period)));
        let n = self.base.ranks();
        let bytes = |&values: &u64| all_reduce_bytes(n, self.limits.codec.bytes(values));
        let sent: Bytes = averages.iter().map(bytes).sum();
        Ok(Candidate {
            sync,
            algorithm,
            step: Nanos(makespan.0.div_ceil(u64::from(period))),
            sent_per_step: Bytes(sent.0.div_ceil(u64::from(period))),
            overhead: overhead(makespan, compute),
        })
    }

    /// Returns the smallest number of local steps H for which the time of one synchronisation, divided by H *
    /// compute, is within the overhead limit; at least 2 and at most `max_every`.
    fn fewest_local_steps(&self, compute: Nanos) -> u32 {
        let values = self.shape.parameters;
        let sync = self.time(self.algorithm(&[values]), values);
        let outer = self.cost.ranks.iter().map(|c| c.outer).max().unwrap_or_default();
        let extra = u128::from(sync.saturating_add(outer).0);
        fewest(extra, compute, self.limits.overhead_percent, self.limits.max_every)
    }
}

impl fmt::Display for Planned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Replicas { sync, algorithm, codec, shares } = &self.replicas;
        writeln!(f, "replicas        {}", shares.len())?;
        writeln!(f, "sync            {sync}\nalgorithm       {algorithm}\ncodec           {codec}")?;
        writeln!(f, "precision       {}", self.precision)?;
        writeln!(f, "\n{:>16} {:>12} {:>12}", "rank", "microbatches", "compute")?;
        for (name, share, compute) in &self.ranks {
            writeln!(f, "{name:>16} {share:>12} {compute:>12}")?;
        }
        writeln!(
            f,
            "\n  {:<26} {:<17} {:>12} {:>14} {:>10}",
            "sync", "all-reduce", "time a step", "sent a step", "overhead"
        )?;
        for c in &self.candidates {
            let mark = if c.sync == *sync { '>' } else { ' ' };
            writeln!(
                f,
                "{mark} {:<26} {:<17} {:>12} {:>14} {:>9.1}%",
                c.sync.to_string(),
                c.algorithm,
                c.step,
                c.sent_per_step,
                c.overhead as f64 / 100.0
            )?;
        }
        let limit = self.overhead_percent;
        let why = match (*sync, self.within) {
            (Sync::Ddp { .. }, true) => {
                format!(
                    "the overhead of synchronous training is within {limit}% of compute, and synchronous \
                     training is exact"
                )
            }
            (Sync::DiLoCo { every }, true) => format!(
                "the overhead of synchronous training exceeds {limit}% of compute; {every} is the smallest \
                 number of local steps whose overhead does not"
            ),
            (_, false) => {
                format!(
                    "no allowed method has an overhead within {limit}% of compute; this is the fastest one \
                     that is allowed"
                )
            }
        };
        writeln!(f, "\n{sync}: {why}.")
    }
}

#[cfg(test)]
mod tests;
