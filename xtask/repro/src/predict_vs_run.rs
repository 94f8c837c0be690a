//! Compares the predicted time of a plan's step with the virtual time that the trainer takes.

mod whole;

use std::fmt::Write as _;

use anyhow::{Context, Result};
use farflung::TrainConfig;
use farflung::base::Nanos;
use farflung::comm::Communicator;
use farflung::config::choice::SamplingKind;
use farflung::parallel::pipeline::{Method, VersionSync};
use farflung::train::{Job, Prediction, refusal};

use crate::harness::{Bench, Options, Report, Threshold};
use crate::workers::{JobTransport, again, config, job, on_all, plain_sgd};

pub(crate) const BENCH: Bench = Bench {
    name: "predict-vs-run",
    claim: "the predicted time of a plan's step is the virtual time that it takes, within 1%: every schedule \
            on uneven stages and links, and whole plans on uneven machines (shared uplinks, two regions, \
            mixed speeds) with coded averages, coded boundaries and DiLoCo",
    source: "ours",
    seed: 1337,
    run,
};

const RANKS: usize = 4;

/// Returns a topology of four machines in a row, with a different link between each two neighbours.
fn topology() -> String {
    let mut text = "default = \"50mbit,3ms\"\n".to_owned();
    for rank in 0..RANKS {
        let _ = write!(text, "[[device]]\nname = \"m{rank}\"\nflops = \"2 GFLOPS\"\nmemory = \"8GB\"\n");
    }
    for (rank, link) in ["200mbit,500us", "80mbit,2ms", "1gbit,100us"].into_iter().enumerate() {
        let _ = write!(text, "[[link]]\nbetween = [\"m{rank}\", \"m{}\"]\nlink = \"{link}\"\n", rank + 1);
    }
    text
}

/// Advances all ranks' clocks to the same time.
fn align(comm: &Communicator) -> Result<()> {
    let all = comm.all_gather_bytes(comm.now().0.to_le_bytes().to_vec())?;
    let clock = |bytes: &Vec<u8>| Ok(u64::from_le_bytes(bytes.as_slice().try_into()?));
    let latest = all.iter().map(clock).collect::<Result<Vec<_>>>()?.into_iter().max().unwrap_or_default();
    let meet = Nanos(latest).saturating_add(Nanos::from_millis(1000));
    comm.advance(meet.saturating_sub(comm.now()));
    Ok(())
}

/// Returns a topology for two pipelines of two machines. The link within a pipeline takes almost no time. The
/// two machines of each stage have a separate link.
fn replicas_topology() -> String {
    let mut text = "default = \"10gbit,1us\"\n".to_owned();
    for rank in 0..RANKS {
        let _ = write!(text, "[[device]]\nname = \"m{rank}\"\nflops = \"2 GFLOPS\"\nmemory = \"8GB\"\n");
    }
    for (rank, link) in ["200mbit,100us", "100mbit,10us"].into_iter().enumerate() {
        let _ =
            write!(text, "[[link]]\nbetween = [\"m{rank}\", \"m{}\"]\nlink = \"{link}\"\n", rank + RANKS / 2);
    }
    text
}

/// A predicted time, and the time of the slowest rank on the virtual clock.
pub(crate) struct TimePair {
    predicted: Nanos,
    took: Nanos,
}

impl TimePair {
    pub(crate) fn percent_error(&self) -> f64 {
        (self.took.as_secs_f64() / self.predicted.as_secs_f64() - 1.0).abs() * 100.0
    }
}

/// Runs one period of a job. Returns the times of the first step's pass, and of the whole period.
pub(crate) fn one_period(job: &Job) -> Result<(TimePair, TimePair)> {
    let predicted = Prediction::of(job)?;
    let ranks = on_all(job, |rank| {
        align(rank.comm())?;
        let begun = rank.comm().now();
        let mut passed = Nanos::ZERO;
        for step in 0..predicted.period {
            rank.step(false)?;
            if step == 0 {
                let (begun, ended) = rank.last_pass();
                passed = ended.saturating_sub(begun);
            }
        }
        Ok((passed, rank.comm().now().saturating_sub(begun)))
    })?;
    let slowest = |part: fn(&(Nanos, Nanos)) -> Nanos| ranks.iter().map(part).max().unwrap_or_default();
    let pass = TimePair { predicted: predicted.pass, took: slowest(|rank| rank.0) };
    Ok((pass, TimePair { predicted: predicted.total, took: slowest(|rank| rank.1) }))
}

/// Codecs of boundaries, forward and backward, whose payloads have a fixed size.
const CODED: [(&str, &str); 3] = [("f16", "int8"), ("int4", "e4m3"), ("direct:4", "direct:8")];

/// Returns every schedule that the trainer supports, and `PipeDream` both with and without agreement on
/// versions.
fn schedules() -> impl Iterator<Item = (Method, VersionSync)> {
    let all = Method::ALL.into_iter().filter(|m| refusal(*m).is_none());
    let all = all.map(|schedule| (schedule, VersionSync::Vertical));
    all.chain([(Method::PipeDream, VersionSync::Newest)])
}

fn run(report: &mut Report<'_>, options: &Options) -> Result<()> {
    let folder = tempfile::tempdir().context("failed to make a temporary folder")?;
    let file = |name: &str, text: String| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).context("failed to write the topology")?;
        anyhow::Ok(Some(path))
    };
    let base = TrainConfig {
        // Ten layers over four or eight parts, and a head: parts take different times.
        layers: Some(10),
        batch: 2,
        workers: RANKS,
        stages: RANKS,
        topology: file("row.toml", topology())?,
        ..plain_sgd(config(report.seed(), false), 0.1)
    };
    let link = base.link;
    let first = job(TrainConfig { workers: RANKS, ..base.clone() }, JobTransport::Simulated(link))?;
    let microbatches: &[usize] = if options.quick { &[8] } else { &[8, 16] };
    for &m in microbatches {
        for (schedule, version_sync) in schedules() {
            let config = TrainConfig { schedule, version_sync, microbatches: Some(m), ..base.clone() };
            let (pass, _) = one_period(&again(&first, config, JobTransport::Simulated(link)))?;
            let newest = if version_sync == VersionSync::Newest { " with the newest weights" } else { "" };
            let name = format!("{schedule}{newest}, {m} microbatches");
            report.row(
                &format!("{name}: predicted"),
                pass.predicted.as_secs_f64() * 1e3,
                "ms",
                Threshold::None,
            )?;
            report.row(
                &format!("{name}: error of the prediction"),
                pass.percent_error(),
                "%",
                Threshold::AtMost(1.0),
            )?;
        }
    }
    for (forward, backward) in CODED {
        for schedule in [Method::OneFOneB, Method::ZbH1, Method::TeraPipe] {
            let config = TrainConfig {
                schedule,
                microbatches: Some(8),
                sampling: SamplingKind::Epochs,
                boundary: forward.parse()?,
                boundary_backward: backward.parse()?,
                ..base.clone()
            };
            let (pass, _) = one_period(&again(&first, config, JobTransport::Simulated(link)))?;
            let name = format!("{schedule}, boundaries {forward} and {backward}: error of the prediction");
            report.row(&name, pass.percent_error(), "%", Threshold::AtMost(1.0))?;
        }
    }
    let base = TrainConfig { stages: RANKS / 2, topology: file("two.toml", replicas_topology())?, ..base };
    for (schedule, version_sync) in schedules().filter(|(_, sync)| *sync == VersionSync::Vertical) {
        let config = TrainConfig { schedule, version_sync, microbatches: Some(4), ..base.clone() };
        let (_, step) = one_period(&again(&first, config, JobTransport::Simulated(link)))?;
        let name = format!(
            "{schedule}, two replicas of two stages: step with its averages, error of the prediction"
        );
        report.row(&name, step.percent_error(), "%", Threshold::AtMost(1.0))?;
    }
    whole::run(report, &first, options.quick)
}
