//! Measures how much communication is hidden behind the backward pass, on the virtual clock.

use anyhow::Result;
use farflung::TrainConfig;
use farflung::base::{Bandwidth, Link, Nanos, Topology};
use farflung::parallel::{
    Algorithm, Codec, Cost, ModelShape, Overlap, RankCost, Replicas, Sync, simulate_replicas,
};
use farflung::train::{AveragePrices, Job};

use crate::harness::{Bench, Options, Report, Threshold};
use crate::workers::{JobTransport, again, config, job, on_all};

pub(crate) const BENCH: Bench = Bench {
    name: "overlap-ddp",
    claim: "a ddp step over a link takes the longer of compute and communication, not their sum. Gradients \
            are sent during the backward pass, so communication is completely hidden up to two thirds of \
            compute; beyond that a step takes the forward pass and then the longer of backward and \
            communication. The embeddings' gradient is final last and cannot be hidden, so the model has a \
            small vocabulary",
    source: "Li et al. 2020, PyTorch Distributed, section 3.2.3",
    seed: 1337,
    run,
};

const WORKERS: u32 = 4;

/// Seconds of modelled compute in a step.
const COMPUTE: f64 = 1.0;

/// Returns the mean seconds of a step on the virtual clock, for the slowest rank.
fn steps_time(job: &Job, steps: u32) -> Result<f64> {
    let times = on_all(job, |worker| {
        let start = worker.comm().now();
        for _ in 0..steps {
            worker.step(false)?;
        }
        let time = worker.comm().now() - start;
        worker.comm().barrier()?;
        Ok(time)
    })?;
    Ok(times.into_iter().max().unwrap_or(Nanos::ZERO).as_secs_f64() / f64::from(steps))
}

fn run(report: &mut Report<'_>, options: &Options) -> Result<()> {
    let steps = if options.quick { 2 } else { 4 };
    // 24 thin layers: the embeddings have 1.5% of the parameters, as many as a third of a block.
    let shape = TrainConfig {
        workers: WORKERS as usize,
        layers: Some(24),
        batch: 1,
        // A few buckets per block, so that only a small part of a block waits for the next block's gradient.
        bucket_mb: 0.07,
        ..config(report.seed(), false)
    };
    let first = job(shape.clone(), JobTransport::Memory)?;
    let flops = first.model.flops_per_token(first.model.context) as f64
        * (first.tokens_per_step() / u64::from(first.plan.replicas())) as f64;
    let computing = |overlap| TrainConfig { compute_rate: flops / COMPUTE, overlap, ..shape.clone() };
    let free = JobTransport::Simulated(Link::FREE);
    let compute = steps_time(&again(&first, computing(true), free), steps)?;
    report.row("compute alone", compute, "s", Threshold::None)?;

    let parameters = first.model.parameters();
    let volume = parameters as f64 * 4.0 * 2.0 * f64::from(WORKERS - 1) / f64::from(WORKERS);
    for ratio in [0.25, 0.5, 1.0, 2.0, 10.0] {
        let bandwidth = Bandwidth((volume * 8.0 / (ratio * COMPUTE)) as u64);
        let link = Link { bandwidth, latency: Nanos::from_micros(10) };
        let over = JobTransport::Simulated(link);
        let instant = TrainConfig { compute_rate: 1e30, ..shape.clone() };
        let communication = steps_time(&again(&first, instant, over), steps)?;
        let overlapped = steps_time(&again(&first, computing(true), over), steps)?;
        let after = steps_time(&again(&first, computing(false), over), steps)?;

        let name = format!("communication {ratio}x compute");
        let longer = compute.max(communication);
        let law = compute / 3.0 + (compute * 2.0 / 3.0).max(communication);
        let off = |a: f64, b: f64| (a / b - 1.0).abs() * 100.0;
        report.row(&format!("{name}: communication alone"), communication, "s", Threshold::None)?;
        report.row(&format!("{name}: step, overlapped"), overlapped, "s", Threshold::None)?;
        // The forward pass cannot hide communication. If it is long enough to matter, a step cannot be as short
        // as the longer of the two.
        let reachable = law / longer < 1.04;
        let mark = if reachable { Threshold::AtMost(5.0) } else { Threshold::None };
        let metric = format!("{name}: difference from max(compute, communication)");
        report.row(&metric, off(overlapped, longer), "%", mark)?;
        let metric = format!("{name}: difference from forward + max(backward, communication)");
        report.row(&metric, off(overlapped, law), "%", Threshold::AtMost(5.0))?;
        let metric = format!("{name}: without overlap, difference from the sum");
        report.row(&metric, off(after, compute + communication), "%", Threshold::AtMost(5.0))?;
        let metric = format!("{name}: difference from the prediction of `simulate_replicas`");
        let predicted = predicted(&first, link, steps)?;
        report.row(&metric, off(overlapped, predicted), "%", Threshold::AtMost(5.0))?;
    }
    Ok(())
}

/// Returns the seconds of the same step by the planner's simulation.
fn predicted(job: &Job, link: Link, steps: u32) -> Result<f64> {
    let mut shape = ModelShape::dense(job.model.parameters(), job.model.context as u64, 0);
    shape.sequences_per_microbatch = u64::from(job.plan.batch);
    shape.tokens_per_step = job.tokens_per_step() / u64::from(job.plan.replicas()) * u64::from(WORKERS);
    let microbatch = Nanos::from_secs_f64(COMPUTE);
    let forward = Nanos(microbatch.0 / 3);
    let backward = microbatch.saturating_sub(forward);
    let rank = RankCost { forward, backward, ..RankCost::default() };
    let buckets =
        (job.model.parameters() as f64 * 4.0 / job.plan.outermost().bucket_bytes as f64).ceil() as u32;
    let replicas = Replicas {
        sync: Sync::Ddp { overlap: Overlap::WithBackward, buckets },
        algorithm: Algorithm::Ring,
        codec: Codec::F32,
        shares: vec![1; WORKERS as usize],
    };
    let prices = AveragePrices::new(Topology::uniform(WORKERS as usize, link));
    let price = |values| prices.of(Algorithm::Ring, &Codec::F32, values).unwrap_or(Nanos::MAX);
    let cost = Cost { ranks: vec![rank; WORKERS as usize] };
    Ok(simulate_replicas(&replicas, &shape, &cost, steps, &price)?.makespan().as_secs_f64()
        / f64::from(steps))
}
