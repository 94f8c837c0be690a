//! Measures the fraction of time in which eight machines on several continents compute with `DiLoCo`, on the
//! virtual clock.

use anyhow::{Context, Result};
use farflung::TrainConfig;
use farflung::base::{Bandwidth, Link, Nanos};
use farflung::config::choice::SyncKind;
use farflung::optim::sync::DILOCO;
use farflung::train::Job;

use crate::harness::{Bench, Options, Report, Threshold};
use crate::lab::{Published, to_meeting};
use crate::workers::{JobTransport, again, config, job, on_all};

pub(crate) const BENCH: Bench = Bench {
    name: "utilisation",
    claim: "machines on several continents that average every 500 steps in 16 bits, or every 100 steps in 8 \
            bits, compute for 83 to 96% of the time, as published; the share agrees with its closed form",
    source: "Jaghouar et al. 2024, OpenDiLoCo; Jaghouar et al. 2024, INTELLECT-1",
    seed: 1337,
    run,
};

const WORKERS: usize = 8;
/// One-way latency in seconds between any two machines.
const LATENCY: f64 = 0.06;
/// Number of steps without averages by which computing alone is measured.
const ALONE: u64 = 8;

/// A model on real machines. The small model that is trained here has the same ratio of a step's time to an
/// average's time.
struct Large {
    name: &'static str,
    parameters: f64,
    /// Seconds of computing per step.
    step: f64,
    /// Bits per second that a machine sends.
    line: f64,
    every: u64,
    codec: &'static str,
    /// Bytes per parameter with this codec.
    bytes: f64,
    /// Least fraction of the time that must be spent computing.
    least: Option<f64>,
}

/// Times of steps and speeds of links are our choice, within the ranges that the papers give for their
/// machines.
const LARGE: [Large; 4] = [
    Large {
        name: "1.1 B, H=500, f16",
        parameters: 1.1e9,
        step: 8.0,
        line: 127e6,
        every: 500,
        codec: "f16",
        bytes: 2.0,
        least: Some(0.9),
    },
    Large {
        name: "1.1 B, H=50, f16",
        parameters: 1.1e9,
        step: 8.0,
        line: 127e6,
        every: 50,
        codec: "f16",
        bytes: 2.0,
        least: None,
    },
    Large {
        name: "1.1 B, H=1, f32",
        parameters: 1.1e9,
        step: 8.0,
        line: 127e6,
        every: 1,
        codec: "none",
        bytes: 4.0,
        least: None,
    },
    Large {
        name: "10 B, H=100, int8",
        parameters: 1e10,
        step: 23.0,
        line: 500e6,
        every: 100,
        codec: "int8",
        bytes: 1.0,
        least: Some(0.83),
    },
];

impl Large {
    /// Returns the seconds of an average: each machine sends and receives `2 (n - 1) / n` of the model.
    fn average(&self) -> f64 {
        let n = WORKERS as f64;
        2.0 * (n - 1.0) / n * self.parameters * self.bytes * 8.0 / self.line
    }

    /// Returns the fraction of the time that is spent computing.
    fn share(&self) -> f64 {
        let computing = self.every as f64 * self.step;
        computing / (computing + self.average())
    }

    /// Returns the link of a machine, scaled to a model of `parameters` parameters whose step takes `step`
    /// seconds.
    fn scaled(&self, parameters: f64, step: f64) -> Link {
        let faster = self.step / step;
        Link {
            bandwidth: Bandwidth((self.line * parameters / self.parameters * faster) as u64),
            latency: Nanos((LATENCY / faster * 1e9) as u64),
        }
    }
}

/// Returns the small model's settings with averages every `every` steps.
fn small(report: &Report<'_>, every: u64, codec: &str) -> Result<TrainConfig> {
    Ok(TrainConfig {
        workers: WORKERS,
        sync: SyncKind::of(&DILOCO),
        sync_every: every,
        codec: codec.parse()?,
        steps: every + 1,
        eval_batches: 1,
        batch: 1,
        ..config(report.seed(), false)
    })
}

/// Returns the seconds of a step without averages on the virtual clock.
fn alone(job: &Job) -> Result<f64> {
    let times = on_all(job, |rank| {
        let begun = rank.comm().now();
        for _ in 0..ALONE {
            rank.step(false)?;
        }
        Ok(rank.comm().now().saturating_sub(begun).as_secs_f64() / ALONE as f64)
    })?;
    times.into_iter().reduce(f64::max).context("the job has no workers")
}

/// Returns the seconds from the start of the run to the end of the first average, for the slowest machine.
fn period(job: &Job) -> Result<f64> {
    let times = on_all(job, |rank| Ok(to_meeting(rank)?.as_secs_f64()))?;
    times.into_iter().reduce(f64::max).context("the job has no workers")
}

fn run(report: &mut Report<'_>, _: &Options) -> Result<()> {
    let still = small(report, 1000, "none")?;
    let first =
        job(still, JobTransport::Simulated(Link { bandwidth: Bandwidth(1_000_000_000), latency: Nanos(0) }))?;
    let (step, parameters) = (alone(&first)?, first.model.parameters() as f64);
    let (mut said, mut holds) = (Vec::new(), true);
    for large in &LARGE {
        let link = large.scaled(parameters, step);
        let settings = small(report, large.every, large.codec)?;
        let period = period(&again(&first, settings, JobTransport::Simulated(link)))?;
        let share = large.every as f64 * step / period;
        let mark = large.least.map_or(Threshold::None, Threshold::AtLeast);
        report.row(&format!("{}: share of the time spent computing", large.name), share, "", mark)?;
        let off = (share / large.share() - 1.0).abs() * 100.0;
        report.row(
            &format!("{}: share, difference from the closed form", large.name),
            off,
            "%",
            Threshold::AtMost(2.0),
        )?;
        holds &= large.least.is_none_or(|least| share >= least);
        said.push(format!("{} {:.1} %", large.name, share * 100.0));
    }
    Published {
        what: "share of the time that machines on several continents spend computing with DiLoCo",
        paper: "90 to 95 % (1.1 B, H=500, f16, two continents); 83 to 96 % (10 B, H=100, int8, three \
                continents)",
        ours: said.join("; "),
        setting: format!(
            "farflung train --layers 2 --heads 2 --dim 64 --context 32 --batch 1 --workers {WORKERS} --transport simulated \
             --link {} --sync diloco --sync-every {} --codec {} --steps {}",
            LARGE[0].scaled(parameters, step),
            LARGE[0].every,
            LARGE[0].codec,
            LARGE[0].every + 1
        ),
        holds,
        note: "machines are 60 ms apart; a step takes 8 s on lines of 127 Mbit/s (1.1 B), or 23 s on lines \
               of 500 Mbit/s (10 B), which are our choice. The trained model is small, and its lines are \
               scaled in proportion",
    }
    .record(report);
    Ok(())
}
