//! Measures how much of the averages of a pipeline's parts is hidden behind the last backward pass, and how
//! much of the vote on a step behind the averages, on the virtual clock.

use std::fmt::Write as _;
use std::path::PathBuf;

use anyhow::{Context, Result};
use farflung::TrainConfig;
use farflung::comm::Algorithm;
use farflung::parallel::pipeline::Method;
use farflung::train::Job;

use crate::harness::{Bench, Options, Report, Threshold};
use crate::workers::{JobTransport, again, config, job, on_all, plain_sgd};

pub(crate) const BENCH: Bench = Bench {
    name: "overlap-stages",
    claim: "in pipelines of 1, 2 and 4 stages with a replica each, the gradients of the part that ends the \
            pass leave while its last backward pass computes them. A step is shorter by what the closed form \
            says, within 2%: the average's time, less the longest wait of a layer's gradients and of those \
            behind it for the link. With an early vote, a step of 2 and 4 stages is shorter by 2 latencies for \
            each stage, within 2%: after the averages, the ring of one pipeline votes in place of that of all \
            ranks",
    source: "Li et al. 2020, PyTorch Distributed, section 3.2.3",
    seed: 1337,
    run,
};

/// Bits per second between the two holders of a part. Its average takes about twice as long as its last
/// backward pass.
const BETWEEN: f64 = 40e6;

/// Returns two pipelines of `stages` machines. Links within a pipeline take almost no time. The two machines of
/// each stage have a link of their own.
fn topology(stages: usize) -> String {
    let mut text = "default = \"100gbit,1us\"\n".to_owned();
    for rank in 0..2 * stages {
        let _ = write!(text, "[[device]]\nname = \"m{rank}\"\nflops = \"2 GFLOPS\"\nmemory = \"8GB\"\n");
    }
    for rank in 0..stages {
        let other = rank + stages;
        let link = format!("{}mbit,1us", BETWEEN / 1e6);
        let _ = write!(text, "[[link]]\nbetween = [\"m{rank}\", \"m{other}\"]\nlink = \"{link}\"\n");
    }
    text
}

/// What the closed form needs of one part.
struct PartTimes {
    /// Seconds of the last backward pass.
    backward: f64,
    /// The ranges of gradients in the order in which they become final: their shares of the backward pass, and
    /// the seconds that their averages take.
    ranges: Vec<(f64, f64)>,
}

impl PartTimes {
    fn average(&self) -> f64 {
        self.ranges.iter().map(|(_, takes)| takes).sum()
    }

    /// Returns the seconds from the end of the backward pass to that of the average, if each range leaves when
    /// it is final: the longest over all ranges of what it and those behind it take, less what is left of the
    /// pass when it is final.
    fn exposed(&self) -> f64 {
        let (mut left, mut takes, mut longest) = (0.0, 0.0, 0.0_f64);
        for (share, average) in self.ranges.iter().rev() {
            takes += average;
            longest = longest.max(takes - left);
            left += share * self.backward;
        }
        longest
    }
}

/// A step on the virtual clock.
struct Step {
    took: f64,
    parts: Vec<(u32, PartTimes)>,
}

fn one_step(job: &Job) -> Result<Step> {
    let ranks = on_all(job, |rank| {
        rank.comm().barrier()?;
        let begun = rank.comm().now();
        rank.step(false)?;
        let took = (rank.comm().now() - begun).as_secs_f64();
        let part = job.plan.at(rank.comm().rank()).pipeline;
        let cost = rank.schedule().cost.stages[part as usize];
        let elements = rank.stage().layout().len() as f64;
        let ranges = rank.stage().backward_ranges();
        // Two ranks send each byte once, in two halves. Padding is not sent.
        let params = rank.stage().layout().params();
        let sent = |range: &std::ops::Range<usize>| {
            let inside = params.iter().filter(|param| range.contains(&param.start));
            inside.map(|param| param.shape.len()).sum::<usize>() as f64 * 32.0 / BETWEEN
        };
        let ranges = ranges.iter().map(|range| (range.len() as f64 / elements, sent(range))).collect();
        Ok((took, part, PartTimes { backward: cost.backward().as_secs_f64(), ranges }))
    })?;
    let took = ranks.iter().map(|rank| rank.0).fold(0.0, f64::max);
    let half = ranks.len() / 2;
    Ok(Step { took, parts: ranks.into_iter().take(half).map(|(_, part, times)| (part, times)).collect() })
}

/// Returns the settings of two pipelines of `depth` machines of the topology at `path`.
fn pipelines(depth: usize, path: PathBuf, seed: u64) -> TrainConfig {
    TrainConfig {
        layers: Some(8),
        batch: 2,
        workers: 2 * depth,
        stages: depth,
        microbatches: Some(8),
        schedule: Method::OneFOneB,
        topology: Some(path),
        ..plain_sgd(config(seed, false), 0.1)
    }
}

/// Latency of each link where votes are measured, in milliseconds.
const LATENCY: f64 = 5.0;

/// Returns two pipelines of `stages` machines in which each message takes [`LATENCY`], and averages take longer
/// than a vote.
fn far_topology(stages: usize) -> String {
    let mut text = format!("default = \"20mbit,{LATENCY}ms\"\n");
    for rank in 0..2 * stages {
        let _ = write!(text, "[[device]]\nname = \"m{rank}\"\nflops = \"2 GFLOPS\"\nmemory = \"8GB\"\n");
    }
    text
}

/// Compares a step in which all ranks vote while gradients are averaged with one in which they vote after it.
fn early_vote(report: &mut Report<'_>, depth: usize, folder: &std::path::Path) -> Result<()> {
    let path = folder.join(format!("far-{depth}.toml"));
    std::fs::write(&path, far_topology(depth)).context("failed to write the topology")?;
    let settings = TrainConfig { algorithm: Algorithm::Ring, ..pipelines(depth, path, report.seed()) };
    let over = JobTransport::Simulated(settings.link);
    let early = job(settings, over)?;
    let late = Job { late_vote: true, ..early.clone() };
    let (early, late) = (one_step(&early)?.took * 1e3, one_step(&late)?.took * 1e3);
    // A ring of n ranks has 2(n - 1) rounds. All ranks are 2 depth, those of a pipeline depth.
    let expected = (2 * (2 * depth - 1) - 2 * (depth - 1)) as f64 * LATENCY;
    let name = format!("{depth} stages");
    report.row(&format!("{name}: step, vote after averages"), late, "ms", Threshold::None)?;
    report.row(&format!("{name}: step, early vote"), early, "ms", Threshold::None)?;
    report.row(&format!("{name}: closed form of the early vote"), expected, "ms", Threshold::None)?;
    let error = ((late - early) / expected - 1.0).abs() * 100.0;
    report.row(&format!("{name}: error of the early vote"), error, "%", Threshold::AtMost(2.0))
}

fn run(report: &mut Report<'_>, options: &Options) -> Result<()> {
    let folder = tempfile::tempdir().context("failed to make a temporary folder")?;
    let depths: &[usize] = if options.quick { &[2] } else { &[1, 2, 4] };
    for &depth in depths {
        let path = folder.path().join(format!("{depth}.toml"));
        std::fs::write(&path, topology(depth)).context("failed to write the topology")?;
        let base = TrainConfig {
            // Many buckets, so that little of a layer waits for the next one's gradients.
            bucket_mb: 0.02,
            overlap: true,
            ..pipelines(depth, path, report.seed())
        };
        let over = JobTransport::Simulated(base.link);
        let overlapped = job(base.clone(), over)?;
        let after = again(&overlapped, TrainConfig { overlap: false, ..base }, over);
        let (overlapped, after) = (one_step(&overlapped)?, one_step(&after)?);
        // The first part ends the pass.
        let first = overlapped.parts.iter().find(|(part, _)| *part == 0).context("no first part")?;
        let expected = first.1.average() - first.1.exposed();
        let shorter = after.took - overlapped.took;
        let name = format!("{depth} stages");
        report.row(
            &format!("{name}: step, averages after the pass"),
            after.took * 1e3,
            "ms",
            Threshold::None,
        )?;
        report.row(&format!("{name}: step, overlapped"), overlapped.took * 1e3, "ms", Threshold::None)?;
        report.row(
            &format!("{name}: closed form of the difference"),
            expected * 1e3,
            "ms",
            Threshold::None,
        )?;
        let error = (shorter / expected - 1.0).abs() * 100.0;
        report.row(&format!("{name}: error of the difference"), error, "%", Threshold::AtMost(2.0))?;
        // A rank that has the whole model knows the norm without a vote.
        if depth > 1 {
            early_vote(report, depth, folder.path())?;
        }
    }
    Ok(())
}
