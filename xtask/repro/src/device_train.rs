//! Compares training of nano on a device with training on the cpu, alone and in jobs that use both.

use anyhow::{Context, Result};
use farflung::TrainConfig;
use farflung::config::choice::Devices;
use farflung::config::value::Setting;
use farflung::train::{StepDone, Trainer};

use crate::harness::{Bench, Options, Report, Threshold};
use crate::workers::{JobTransport, again, config, job, on_all};

pub(crate) const BENCH: Bench = Bench {
    name: "device-train",
    claim: "nano on wgpu ends within 0.02 of the cpu's loss; so do jobs of one cpu rank and one wgpu rank, \
            as two replicas and as a pipeline of two stages; the drift between their copies of parameters is \
            measured and removed",
    source: "the cpu backend",
    seed: 1337,
    run,
};

/// Steps between two comparisons of the copies.
const EVERY: u64 = 5;

/// Result of a run.
struct Trace {
    /// Mean of the losses of the last steps.
    loss: f64,
    /// Largest distance between copies that a comparison found, and the number of comparisons.
    drift: (f64, usize),
    /// Bytes sent by the comparisons, and by the copies of parameters that followed.
    bytes: u64,
    /// Hash of the parameters that both ranks hold.
    hash: blake3::Hash,
}

/// Trains one rank and returns its trace.
fn trace<R>(
    rank: &mut R,
    steps: u64,
    step: impl Fn(&mut R) -> farflung::Result<StepDone>,
    hash: impl Fn(&R) -> Result<blake3::Hash>,
) -> Result<Trace> {
    let done = (0..steps).map(|_| step(rank)).collect::<farflung::Result<Vec<_>>>()?;
    let last = &done[done.len() - done.len().min(10)..];
    let loss = last.iter().map(|d| d.loss).sum::<f64>() / last.len() as f64;
    let found: Vec<_> = done.iter().filter_map(|d| d.drift).collect();
    let farthest = found.iter().map(|d| d.distance).fold(0.0, f64::max);
    let bytes = found.iter().map(|d| d.bytes).sum();
    Ok(Trace { loss, drift: (farthest, found.len()), bytes, hash: hash(rank)? })
}

/// Returns the hash of the token table on a rank whose stage uses the table.
fn table(rank: &Trainer) -> Result<blake3::Hash> {
    let (stage, params) = rank.parts().next().context("the rank has no part of the model")?;
    let layout = stage.layout();
    let table = layout.view(params, layout.find("wte.weight")?)?.to_vec::<f32>()?;
    let bytes: Vec<u8> = table.iter().flat_map(|v| v.to_le_bytes()).collect();
    Ok(blake3::hash(&bytes))
}

fn run(report: &mut Report<'_>, options: &Options) -> Result<()> {
    // A software device computes a hundred times slower than the cpu backend, so steps are few and have few
    // tokens.
    let (seed, steps) = (report.seed(), if options.quick { 6 } else { 60 });
    let first = job(config(seed, true), JobTransport::Memory)?;
    let train = |devices: &str, workers: usize, stages: usize| {
        let device = Devices::parse(devices).context("failed to parse the names of devices")?;
        // With two microbatches per step both stages compute at the same time.
        let microbatches = (stages > 1).then_some(2);
        let config = TrainConfig {
            workers,
            stages,
            microbatches,
            steps,
            batch: 1,
            resync_every: EVERY,
            device,
            ..config(seed, true)
        };
        let job = again(&first, config, JobTransport::Memory);
        if stages > 1 {
            on_all(&job, |rank| trace(rank, steps, |rank| rank.step(false), table))
        } else {
            on_all(&job, |rank| trace(rank, steps, |rank| rank.step(false), |rank| Ok(rank.hash()?)))
        }
    };
    for (what, workers, stages, devices, copies) in [
        ("alone", 1, 1, "wgpu", ""),
        ("two ranks, cpu and wgpu", 2, 1, "cpu,wgpu", "replicas"),
        ("a pipeline, cpu and wgpu", 2, 2, "cpu,wgpu", "token tables"),
    ] {
        let cpu = train("cpu", workers, stages)?.remove(0);
        let mixed = train(devices, workers, stages)?;
        let found = &mixed[0];
        report.row(&format!("{what}: loss after {steps} steps on cpu"), cpu.loss, "nats", Threshold::None)?;
        report.row(
            &format!("{what}: loss on {devices}, difference from that on cpu"),
            (found.loss - cpu.loss).abs(),
            "nats",
            Threshold::AtMost(0.02),
        )?;
        if workers > 1 {
            let unequal = mixed.iter().filter(|t| t.hash != found.hash).count() as f64;
            let compared = mixed.iter().map(|t| t.drift.1).min().unwrap_or(0) as f64;
            let bytes = mixed.iter().map(|t| t.bytes).sum::<u64>() as f64;
            report.row(
                &format!("{what}: comparisons of the {copies}"),
                compared,
                "1",
                Threshold::AtLeast((steps / EVERY) as f64),
            )?;
            report.row(
                &format!("{what}: largest drift between comparisons, relative l2"),
                found.drift.0,
                "1",
                Threshold::AtMost(1e-5),
            )?;
            report.row(
                &format!("{what}: bytes sent by comparisons and copies"),
                bytes,
                "B",
                Threshold::AtLeast(1.0),
            )?;
            report.row(
                &format!("{what}: {copies} that differ at the end"),
                unequal,
                "1",
                Threshold::AtMost(0.0),
            )?;
        }
    }
    Ok(())
}
