//! Replicas that divide the optimizer's state, gradients and weights (stages 1 to 3 of ZeRO): bits, bytes held
//! and sent, and the time of a step.

use anyhow::{Result, anyhow};
use farflung::TrainConfig;
use farflung::base::{Bandwidth, Link, Nanos};
use farflung::config::choice::OptimizerKind;
use farflung::config::value::Setting as _;
use farflung::config::zero::Weights;
use farflung::tensor::Device;
use farflung::train::{Job, Prediction, Trainer};
use farflung::zoo::Stage;

use crate::harness::{Bench, Options, Report, Threshold};
use crate::workers::{JobTransport, again, config, job, on_all};

pub(crate) const BENCH: Bench = Bench {
    name: "zero",
    claim: "replicas that divide the optimizer's state, gradients and weights, equally or not, take the steps of \
            replicas that each have all of it, hold and send what the closed forms say, and take the time of \
            what they send",
    source: "Rajbhandari et al. 2020, ZeRO; shared/facts/larger-than-a-machine.md 3",
    seed: 1337,
    run,
};

const STEPS: usize = 10;

fn run(report: &mut Report<'_>, options: &Options) -> Result<()> {
    let first = job(TrainConfig { workers: 1, ..config(report.seed(), false) }, JobTransport::Memory)?;
    let optimizers: &[&str] =
        if options.quick { &["adamw", "muon"] } else { &["adamw", "sgd", "lamb", "muon"] };
    for optimizer in optimizers {
        for stage in STAGES {
            steps(report, &first, (stage, optimizer))?;
        }
    }
    let nano = job(TrainConfig { workers: 1, ..config(report.seed(), true) }, JobTransport::Memory)?;
    // Of a wider model, a page for each empty buffer is less.
    let wide = TrainConfig { workers: 1, dim: Some(256), ..config(report.seed(), true) };
    let wide = job(wide, JobTransport::Memory)?;
    for stage in STAGES {
        held(report, &wide, stage)?;
        sent(report, &nano, (stage, options.quick))?;
        times(report, &nano, stage)?;
    }
    Ok(())
}

/// The stages of ZeRO: those that divide the state, gradients too, and weights as well.
const STAGES: [usize; 3] = [1, 2, 3];

/// Returns a job of replicas that divide by some weights what a stage says, or nothing.
fn divided(first: &Job, by: Option<(usize, &[u32])>, settings: TrainConfig, over: JobTransport) -> Job {
    let zero = by.map_or(0, |(stage, _)| stage);
    let shares = by.map(|(_, shares)| shares);
    let zero_weights = shares.map(|shares| Weights(shares.to_vec()));
    again(first, TrainConfig { zero, zero_weights, ..settings }, over)
}

fn named(shares: &[u32]) -> String {
    let equal = shares.windows(2).all(|pair| pair[0] == pair[1]);
    if equal { format!("{} equal shards", shares.len()) } else { format!("shards as {shares:?}") }
}

/// What the replicas have after some steps.
#[derive(Debug, PartialEq)]
struct Trained {
    losses: Vec<f64>,
    params: Vec<f32>,
}

fn trained(job: &Job) -> Result<Trained> {
    let all = on_all(job, |worker| {
        let losses = (0..STEPS).map(|_| Ok(worker.step(false)?.loss)).collect::<Result<Vec<_>>>()?;
        let params = worker.gather_params()?.map(|params| params.to_vec::<f32>()).transpose()?;
        Ok(params.map(|params| Trained { losses, params }))
    })?;
    all.into_iter().flatten().next().ok_or_else(|| anyhow!("no rank has the parameters"))
}

fn other_bits(one: &Trained, other: &Trained) -> f64 {
    let differs = |(a, b): (&f32, &f32)| a.to_bits() != b.to_bits();
    one.params.iter().zip(&other.params).filter(|&pair| differs(pair)).count() as f64
}

/// Compares steps of shards with those of replicas that each have all of the state. Two numbers have one sum;
/// of more, the owner of each element adds them in rank order, and `ddp` by its own algorithm.
fn steps(report: &mut Report<'_>, first: &Job, (stage, optimizer): (usize, &str)) -> Result<()> {
    let kind = OptimizerKind::parse(optimizer).ok_or_else(|| anyhow!("no such optimizer"))?;
    // Whole tensors do not begin with the chunks in which the squares of a clipped norm are added up.
    let clip = if kind.row().per_tensor { 0.0 } else { 1.0 };
    let settings = |workers| TrainConfig {
        workers,
        optimizer: kind,
        clip,
        bucket_mb: 0.05,
        ..config(first.config.seed, false)
    };
    let (two, four) = (settings(2), settings(4));
    let over = JobTransport::Memory;
    let whole = trained(&divided(first, None, two.clone(), over))?;
    for shares in [&[1, 1][..], &[3, 1], &[0, 1]] {
        let found = trained(&divided(first, Some((stage, shares)), two.clone(), over))?;
        let metric =
            format!("{optimizer}, stage {stage}, {}: parameters with other bits than ddp's", named(shares));
        report.row(&metric, other_bits(&found, &whole), "", Threshold::AtMost(0.0))?;
    }
    let whole = trained(&divided(first, None, four.clone(), over))?;
    let equal = trained(&divided(first, Some((stage, &[1; 4])), four.clone(), over))?;
    let off = whole.losses.iter().zip(&equal.losses).map(|(a, b)| ((a - b) / a).abs()).fold(0.0, f64::max);
    let metric = format!(
        "{optimizer}, stage {stage}, 4 equal shards: largest relative difference of {STEPS} losses from ddp's"
    );
    report.row(&metric, off, "", Threshold::AtMost(1e-6))?;
    for shares in [&[5, 1, 0, 2][..], &[0, 0, 1, 0]] {
        let found = trained(&divided(first, Some((stage, shares)), four.clone(), over))?;
        let metric = format!(
            "{optimizer}, stage {stage}, {}: parameters with other bits than equal shards",
            named(shares)
        );
        report.row(&metric, other_bits(&found, &equal), "", Threshold::AtMost(0.0))?;
    }
    Ok(())
}

/// Compares the bytes of weights, gradients and state that ranks hold after a step, counted at the allocator,
/// with the closed forms in f32: with AdamW and LAMB `8 P + 8 P / N`, with the momentum of SGD
/// `8 P + 4 P / N`; where gradients are divided, `4 P + 12 P / N` and `4 P + 8 P / N`; where weights are,
/// `16 P / N` and `12 P / N`.
fn held(report: &mut Report<'_>, wide: &Job, stage: usize) -> Result<()> {
    let parameters = wide.model.parameters() as f64;
    for (optimizer, state) in [("adamw", 8.0), ("sgd", 4.0)] {
        let optimizer_kind = OptimizerKind::parse(optimizer).ok_or_else(|| anyhow!("no such optimizer"))?;
        for shares in [&[1, 1][..], &[1; 4], &[1; 8], &[5, 0, 2, 1]] {
            let settings = TrainConfig {
                workers: shares.len(),
                optimizer: optimizer_kind,
                momentum: 0.9,
                batch: 1,
                ..config(wide.config.seed, true)
            };
            let job = divided(wide, Some((stage, shares)), settings, JobTransport::Memory);
            let whole = [8.0, 4.0, 0.0][stage - 1];
            let all: u32 = shares.iter().sum();
            let mut off = 0.0_f64;
            let after = |worker: &mut Trainer| {
                worker.step(false)?;
                Ok(worker.memory().device_after)
            };
            for (held, &own) in on_all(&job, after)?.iter().zip(shares) {
                let found = (held.weights.0 + held.gradients.0 + held.optimizer.0) as f64;
                let of = |share: f64| (whole + (8.0 - whole + state) * share) * parameters;
                let (form, equal) = (of(f64::from(own) / f64::from(all)), of(1.0 / shares.len() as f64));
                // A rank that has nothing has empty buffers, of a page each.
                off = off.max((found - form).abs() / form.max(equal));
            }
            let metric =
                format!("{optimizer}, stage {stage}, {}: bytes held, off the closed form", named(shares));
            report.row(&metric, 100.0 * off, "%", Threshold::AtMost(1.0))?;
        }
    }
    Ok(())
}

/// Returns the lengths of the shards that weights make of the parameters.
fn lengths(shares: &[u32], parameters: f64) -> Vec<f64> {
    let all = f64::from(shares.iter().sum::<u32>());
    shares.iter().map(|&own| parameters * f64::from(own) / all).collect()
}

/// Compares the bytes that a rank sends in a step with the closed form: to each owner what it updates, once a
/// step or, where gradients are divided, after each microbatch; and its own shard to all others, once a step
/// or, where weights are divided, for each pass that reads them: blocks twice, the token table for the
/// embedding and for the head. The next microbatch begins with the first block, which the one before has just
/// read.
fn sent(report: &mut Report<'_>, nano: &Job, (stage, quick): (usize, bool)) -> Result<()> {
    let parameters = nano.model.parameters() as f64;
    let whole = Stage::whole(&nano.model, &Device::sizes())?;
    let units: Vec<f64> = whole.backward_ranges().iter().map(|range| range.len() as f64).collect();
    let (head, block) = (units[0], units[1]);
    let accumulated: &[usize] = if quick { &[4] } else { &[1, 4, 16] };
    for &accumulate in accumulated {
        for shares in [&[1, 1][..], &[1; 4], &[5, 3, 1, 1]] {
            let settings =
                TrainConfig { workers: shares.len(), batch: 1, accumulate, ..config(nano.config.seed, true) };
            let job = divided(nano, Some((stage, shares)), settings, JobTransport::Memory);
            let bytes = on_all(&job, |worker| {
                worker.step(false)?;
                let sent = |worker: &Trainer| worker.comm().stats().sent.payload.0;
                let before = sent(worker);
                worker.step(false)?;
                Ok(sent(worker) - before)
            })?;
            let mut off = 0.0_f64;
            for (bytes, own) in bytes.into_iter().zip(lengths(shares, parameters)) {
                let often = if stage == 1 { 1 } else { accumulate } as f64;
                let read = often * (2.0 * parameters - head) - (often - 1.0) * block;
                let read = if stage == 3 { read / parameters } else { 1.0 };
                let form = 4.0 * (often * (parameters - own) + read * (shares.len() - 1) as f64 * own);
                off = off.max((bytes as f64 / form - 1.0).abs());
            }
            let metric = format!(
                "stage {stage}, {}, {accumulate} microbatches: bytes sent, off the closed form",
                named(shares)
            );
            report.row(&metric, 100.0 * off, "%", Threshold::AtMost(1.0))?;
        }
    }
    Ok(())
}

/// Returns how many of `elements` elements pass the busiest link while they reach their owners, or come from
/// them: the gradients of others leave, and the others' contributions arrive; or the reverse.
fn busiest(shares: &[u32], elements: f64) -> f64 {
    let others = (shares.len() - 1) as f64;
    lengths(shares, elements).into_iter().map(|own| (elements - own).max(others * own)).fold(0.0, f64::max)
}

/// Returns the time of a backward pass whose units take shares of `compute` by their elements, and then leave
/// one after another over a link that takes `seconds` for them.
fn backward(units: &[f64], compute: f64, seconds: impl Fn(f64) -> f64) -> f64 {
    let all: f64 = units.iter().sum();
    let (mut computed, mut left) = (0.0, 0.0_f64);
    for unit in units {
        computed += compute * unit / all;
        left = left.max(computed) + seconds(*unit);
    }
    left
}

/// Returns the time of a step whose layers gather their weights over one link, each while the one before
/// computes, and whose gradients leave over the same link: the recursion of facts 3.5. `units` are the head,
/// the blocks from the last to the first, and the embeddings, whose table the head reads too.
fn gathering(units: &[f64], compute: f64, seconds: impl Fn(f64) -> f64) -> f64 {
    let all: f64 = units.iter().sum();
    let [head, blocks @ .., embeddings] = units else { return compute };
    let layer = |own: f64, read: f64| (own / all * compute / 3.0, seconds(read));
    let mut forward = vec![layer(*embeddings, *embeddings)];
    forward.extend(blocks.iter().rev().map(|&block| layer(block, block)));
    forward.push(layer(*head, head + embeddings));
    let (mut now, mut link) = (forward[0].1, forward[0].1);
    for (i, (took, _)) in forward.iter().enumerate() {
        if let Some((_, next)) = forward.get(i + 1) {
            link = link.max(now) + next;
        }
        now = (now + took).max(link);
    }
    // The embeddings' gradients need no weights.
    for (i, unit) in units.iter().enumerate() {
        let mut arrives = now;
        if let Some(next) = units.get(i + 1).filter(|_| i + 2 < units.len()) {
            link = link.max(now) + seconds(*next);
            arrives = link;
        }
        let done = now + 2.0 * unit / all * compute / 3.0;
        link = link.max(done) + seconds(*unit);
        now = done.max(arrives);
    }
    link
}

/// Compares the virtual time of a step, and its prediction, with the closed form: computation, then each rank
/// sends and receives what the shards say, at the rate of its link. Where gradients are divided they leave
/// within the backward pass.
fn times(report: &mut Report<'_>, nano: &Job, stage: usize) -> Result<()> {
    let parameters = nano.model.parameters() as f64;
    let whole = Stage::whole(&nano.model, &Device::sizes())?;
    let units: Vec<f64> = whole.backward_ranges().iter().map(|range| range.len() as f64).collect();
    for mbits in [20, 200] {
        for shares in [&[1, 1][..], &[1; 4], &[5, 3, 1, 1], &[1, 0, 0, 0]] {
            let bandwidth = Bandwidth(mbits * 1_000_000);
            let link = Link { bandwidth, latency: Nanos::ZERO };
            let settings = TrainConfig {
                workers: shares.len(),
                batch: 1,
                overlap: stage > 1,
                compute_rate: 5e9,
                ..config(nano.config.seed, true)
            };
            let job = divided(nano, Some((stage, shares)), settings, JobTransport::Simulated(link));
            let took = on_all(&job, |worker| {
                worker.step(false)?;
                let begun = worker.comm().now();
                worker.step(false)?;
                Ok((worker.comm().now() - begun).as_secs_f64())
            })?;
            let took = took.into_iter().fold(0.0, f64::max);
            let predicted = Prediction::of(&job)?;
            let compute = predicted.compute.as_secs_f64();
            let seconds = |elements: f64| 4.0 * busiest(shares, elements) * 8.0 / (mbits as f64 * 1e6);
            let form = match stage {
                1 => compute + 2.0 * seconds(parameters),
                2 => compute / 3.0 + backward(&units, 2.0 / 3.0 * compute, seconds) + seconds(parameters),
                _ => gathering(&units, compute, seconds),
            };
            let name = format!("stage {stage}, {}", named(shares));
            let metric = format!("{name} at {mbits} Mbit/s: a step of {took:.2} s, off the closed form");
            // The form has one link for both directions, which unequal shards use differently.
            let is_mark = stage < 3 || shares.windows(2).all(|pair| pair[0] == pair[1]);
            let mark = if is_mark { Threshold::AtMost(2.0) } else { Threshold::None };
            report.row(&metric, 100.0 * (took / form - 1.0).abs(), "%", mark)?;
            let off = (predicted.step().as_secs_f64() / took - 1.0).abs();
            let metric = format!("{name} at {mbits} Mbit/s: the predicted step, off the step");
            report.row(&metric, 100.0 * off, "%", Threshold::AtMost(2.0))?;
        }
    }
    Ok(())
}
