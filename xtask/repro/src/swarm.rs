//! Runs SWARM's setting with the trainer on the virtual clock: unequal machines on links of 200 Mbit/s, in
//! pipelines whose stages are pools.

use std::fmt::Write as _;

use anyhow::{Context, Result};
use farflung::TrainConfig;
use farflung::base::{Bandwidth, Link, Nanos, Rank, StageId};
use farflung::config::pools::Numbers;
use farflung::parallel::Plan;
use farflung::parallel::pipeline::ComputeKind;
use farflung::parallel::swarm::{SquareCube, bound, optimum};
use farflung::train::{Job, ReplicaSchedule};

use crate::harness::{Bench, Options, Report, Threshold};
use crate::workers::{JobTransport, again, config, job, on_all, plain_sgd};

pub(crate) const BENCH: Bench = Bench {
    name: "swarm",
    claim: "with stages as pools of six unequal machines on 200 Mbit/s and boundaries in 8 bits, the slowest \
            pool computes for at least 90% of a pass, and a pass takes less time than in whole pipelines of \
            the same machines, with the same losses; how the use of a stage depends on its width follows the \
            square-cube law",
    source: "Ryabinin et al. 2023, SWARM: less than 200 Mbit/s between preemptible devices, 8 bits, \
             square-cube law",
    seed: 1337,
    run,
};

const LINE: Bandwidth = Bandwidth(200_000_000);
const STAGES: usize = 3;

/// Speeds of the machines in each pool, in GFLOPS. This assignment is the fastest of all.
const POOLS: [&[f64]; STAGES] = [&[4.0], &[3.0, 1.0], &[2.0, 2.0, 1.0]];

/// Speeds of the same machines as two pipelines: the three fastest, and the others.
const PIPELINES: [f64; 6] = [4.0, 3.0, 2.0, 2.0, 1.0, 1.0];

/// Returns a topology of machines with these GFLOPS.
fn topology(speeds: &[f64], latency: &str) -> String {
    let mut text = format!("default = \"200mbit,{latency}\"\n");
    for (rank, speed) in speeds.iter().enumerate() {
        let flops = (speed * 1e3).round();
        let _ =
            write!(text, "[[device]]\nname = \"m{rank}\"\nflops = \"{flops} MFLOPS\"\nmemory = \"8GB\"\n");
    }
    text
}

/// Results of some steps.
struct Measurement {
    losses: Vec<f64>,
    /// Time from the first rank's start of the last pass to the last rank's end.
    pass: Nanos,
    /// Computing time of each rank in a pass.
    busy: Vec<Nanos>,
    /// Microbatches per second that each rank could compute.
    rates: Vec<f64>,
}

fn measured(job: &Job, steps: usize) -> Result<Measurement> {
    let ranks = on_all(job, |rank| {
        let losses = (0..steps).map(|_| Ok(rank.step(false)?.loss)).collect::<Result<Vec<_>>>()?;
        Ok((losses, rank.last_pass()))
    })?;
    let (mut busy, mut rates) = (Vec::new(), Vec::new());
    for replica in 0..job.plan.replicas() {
        let schedule = ReplicaSchedule::new(job, replica)?;
        let order = schedule.schedule.order();
        let placement = order.placement();
        for rank in (0..placement.ranks()).map(Rank) {
            let of = |stage: StageId| schedule.cost.stages[stage.index() % schedule.cost.stages.len()];
            let each = placement.homes_of(rank).map(|home| of(home).forward + of(home).backward());
            let each = each.max().context("the rank has no stage")?;
            let mine = |(other, action): &(Rank, _)| *other == rank && is_forward(action);
            let count = order.actions().filter(mine).count() as u64;
            busy.push(Nanos(each.0 * count));
            rates.push(1.0 / each.as_secs_f64());
        }
    }
    let begun = ranks.iter().map(|(_, pass)| pass.0).min().unwrap_or_default();
    let ended = ranks.iter().map(|(_, pass)| pass.1).max().unwrap_or_default();
    let losses = ranks.into_iter().map(|(losses, _)| losses).next().unwrap_or_default();
    Ok(Measurement { losses, pass: ended.saturating_sub(begun), busy, rates })
}

fn is_forward(action: &farflung::parallel::pipeline::Action) -> bool {
    action.kind == ComputeKind::Forward
}

fn numbers(sizes: &[usize]) -> Numbers {
    Numbers(sizes.iter().map(|&size| size as u32).collect())
}

fn run(report: &mut Report<'_>, options: &Options) -> Result<()> {
    let folder = tempfile::tempdir().context("failed to make a temporary folder")?;
    let file = |name: &str, text: String| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).context("failed to write the topology")?;
        anyhow::Ok(Some(path))
    };
    unequal(report, options, &file)?;
    square_cube(report, options, &file)
}

/// Writes a file of that name and contents, and returns its path.
type WriteFile<'a> = &'a dyn Fn(&str, String) -> Result<Option<std::path::PathBuf>>;

/// Compares six machines in three pools with the same machines in two pipelines of three.
fn unequal(report: &mut Report<'_>, options: &Options, file: WriteFile<'_>) -> Result<()> {
    // The longer a step, the less filling and draining the pipeline matter. The issue behind this bench assumes
    // 4096 samples per step.
    let microbatches = if options.quick { 66 } else { 132 };
    let steps = 3;
    let speeds: Vec<f64> = POOLS.concat();
    let link = Link { bandwidth: LINE, latency: Nanos::from_millis(5) };
    let base = TrainConfig {
        layers: Some(6),
        batch: 2,
        workers: 6,
        stages: 6,
        pools: Some(numbers(&POOLS.map(<[f64]>::len))),
        microbatches: Some(microbatches),
        topology: file("pools.toml", topology(&speeds, "5ms"))?,
        ..plain_sgd(config(report.seed(), false), 0.1)
    };
    let first = job(base.clone(), JobTransport::Simulated(link))?;
    let packed =
        TrainConfig { boundary: "int8".parse()?, boundary_backward: "int8".parse()?, ..base.clone() };
    let pools = measured(&again(&first, packed.clone(), JobTransport::Simulated(link)), steps)?;
    // The bound: no order is faster than one in which the slowest pool computes all the time.
    let mut at = 0;
    let mut pool_rates = Vec::new();
    for (number, pool) in POOLS.iter().enumerate() {
        let ranks = at..at + pool.len();
        at = ranks.end;
        let rate: f64 = pools.rates[ranks.clone()].iter().sum();
        let use_of = microbatches as f64 / rate / pools.pass.as_secs_f64();
        report.row(
            &format!("use of stage {}: {} machines", number + 1, pool.len()),
            use_of,
            "",
            Threshold::None,
        )?;
        let busiest = ranks.map(|rank| pools.busy[rank]).max().unwrap_or_default();
        let share = busiest.as_secs_f64() / pools.pass.as_secs_f64();
        report.row(
            &format!("use of stage {}: its busiest machine", number + 1),
            share,
            "",
            Threshold::None,
        )?;
        pool_rates.push(rate);
    }
    let slowest = pool_rates.iter().copied().fold(f64::INFINITY, f64::min);
    let share = microbatches as f64 / slowest / pools.pass.as_secs_f64();
    report.row("use of the slowest stage, relative to its bound of 1", share, "", Threshold::AtLeast(0.9))?;
    let (best, all) = (optimum(&speeds, STAGES), bound(&speeds, STAGES));
    report.row(
        "speed of the best assignment of these machines, relative to a perfectly equal division",
        best / all,
        "",
        Threshold::None,
    )?;

    let whole = TrainConfig {
        pools: None,
        stages: STAGES,
        microbatches: Some(microbatches / 2),
        topology: file("pipelines.toml", topology(&PIPELINES, "5ms"))?,
        ..packed.clone()
    };
    let equal = again(&first, whole.clone(), JobTransport::Simulated(link));
    // The second pipeline's slowest machine is half as fast as the first one's.
    let mut plan = Plan::from(&equal.plan);
    plan.microbatches = vec![2 * microbatches as u32 / 3, microbatches as u32 / 3];
    let shared = measured(&equal.with_plan(plan)?, steps)?;
    let equal = measured(&equal, steps)?;
    for (name, seen, mark) in [
        ("two pipelines of three, equal shares", &equal, Threshold::AtLeast(1.5)),
        ("two pipelines of three, shares by speed", &shared, Threshold::AtLeast(1.1)),
    ] {
        report.row(&format!("pass: {name}"), seen.pass.as_secs_f64() * 1e3, "ms", Threshold::None)?;
        let faster = seen.pass.as_secs_f64() / pools.pass.as_secs_f64();
        report.row(&format!("pools: speed relative to {name}"), faster, "x", mark)?;
    }
    report.row("pass: pools", pools.pass.as_secs_f64() * 1e3, "ms", Threshold::None)?;
    // Uncoded values do not depend on the rank that computes them.
    let plain = measured(&again(&first, base, JobTransport::Simulated(link)), steps)?;
    let unpacked = TrainConfig { boundary: "none".parse()?, boundary_backward: "none".parse()?, ..whole };
    let reference = measured(&again(&first, unpacked, JobTransport::Simulated(link)), steps)?;
    let off = plain.losses.iter().zip(&reference.losses).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
    report.row(
        "losses of pools and pipelines with plain boundaries: difference",
        off,
        "nats",
        Threshold::AtMost(1e-5),
    )
}

/// Compares the use of a stage with the square-cube law: two stages of two layers, sequences of 32 tokens in 8
/// bits, machines of 250 GFLOP/s.
fn square_cube(report: &mut Report<'_>, options: &Options, file: WriteFile<'_>) -> Result<()> {
    const FLOPS: f64 = 250e9;
    let widths: &[usize] = if options.quick { &[16, 32, 64] } else { &[16, 32, 64, 128] };
    let microbatches = if options.quick { 48 } else { 96 };
    let link = Link { bandwidth: LINE, latency: Nanos::ZERO };
    let mut before = 0.0;
    let mut falls = 0;
    for &width in widths {
        let base = TrainConfig {
            layers: Some(4),
            dim: Some(width),
            batch: 1,
            workers: 2,
            stages: 2,
            pools: Some(numbers(&[1, 1])),
            microbatches: Some(microbatches),
            boundary: "int8".parse()?,
            boundary_backward: "int8".parse()?,
            topology: file("line.toml", topology(&[FLOPS / 1e9; 2], "0ns"))?,
            ..plain_sgd(config(report.seed(), false), 0.1)
        };
        let job = job(base, JobTransport::Simulated(link))?;
        let seen = measured(&job, 2)?;
        // Forward and backward take the time of three forwards. Hidden states and gradients use opposite
        // directions of the link.
        let (hidden, tokens) = (width as u64, job.model.context as u64);
        let flops = FLOPS / 3.0;
        let law = SquareCube { hidden, layers: 2, tokens, bits: 8, flops, bandwidth: 200e6, round_trip: 0.0 };
        report.row(
            &format!("width {width}: the law for the layers alone"),
            law.utilisation().share,
            "",
            Threshold::None,
        )?;
        // Compares the computing of the last stage, including its head, with the time to send over the link.
        let schedule = ReplicaSchedule::new(&job, 0)?;
        let busy = seen.busy[1].as_secs_f64() / microbatches as f64;
        let boundary = &schedule.cost.boundaries[0];
        let line = boundary.link.bandwidth.transfer(boundary.forward).as_secs_f64();
        let expected = busy / busy.max(line);
        let found = seen.busy[1].as_secs_f64() / seen.pass.as_secs_f64();
        report.row(&format!("width {width}: use of the last stage"), found, "", Threshold::None)?;
        report.row(
            &format!("width {width}: use of the last stage, relative to its law"),
            found / expected,
            "",
            Threshold::AtLeast(0.9),
        )?;
        report.row(
            &format!("width {width}: use of the last stage, at most its law"),
            found / expected,
            "",
            Threshold::AtMost(1.0 + 1e-6),
        )?;
        falls += u32::from(found < before);
        before = found;
    }
    report.row("widths at which use falls", f64::from(falls), "", Threshold::AtMost(0.0))
}
