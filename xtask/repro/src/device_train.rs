//! Nano trains on a device as it does on the cpu, alone and in a job of both.

use anyhow::Result;
use farflung::config::choice::Devices;
use farflung::config::value::Setting;
use farflung::{TrainConfig, train::Worker};

use crate::harness::{Bench, Mark, Options, Report};
use crate::workers::{Over, again, config, job, on_all};

pub(crate) const BENCH: Bench = Bench {
    name: "device-train",
    claim: "nano on wgpu reaches the cpu's loss within 0.02; so does a job of one cpu and one wgpu rank, whose replicas' drift \
            is measured and ended",
    source: "the cpu backend",
    seed: 1337,
    run,
};

/// What a run gave.
struct Trace {
    /// Mean of the losses of the last steps.
    loss: f64,
    /// The largest distance of the replicas that a comparison found, and how many comparisons there were.
    drift: (f64, usize),
    /// Bytes of the comparisons and of what followed.
    bytes: u64,
    hash: blake3::Hash,
}

fn run(report: &mut Report<'_>, options: &Options) -> Result<()> {
    // A software device computes a hundred times slower than the cpu backend: few tokens a step, and few steps.
    let (seed, steps) = (report.seed(), if options.quick { 6 } else { 60 });
    let on = |devices: &str, workers: usize| TrainConfig {
        workers,
        steps,
        batch: 1,
        resync_every: 5,
        device: Devices::parse(devices).expect("devices' names"),
        ..config(seed, true)
    };
    let trace = move |worker: &mut Worker| {
        let (mut losses, mut drift, mut bytes) = (Vec::new(), (0.0_f64, 0), 0);
        for _ in 0..steps {
            let done = worker.step(false)?;
            losses.push(done.loss);
            if let Some(found) = done.drift {
                drift = (drift.0.max(found.distance), drift.1 + 1);
                bytes += found.bytes;
            }
        }
        let last = &losses[losses.len() - losses.len().min(10)..];
        let loss = last.iter().sum::<f64>() / last.len() as f64;
        Ok(Trace { loss, drift, bytes, hash: worker.hash()? })
    };
    let first = job(on("cpu", 1), Over::Memory)?;
    let run = |devices: &str, workers| on_all(&again(&first, on(devices, workers), Over::Memory), trace);
    for (what, workers, devices) in [("alone", 1, "wgpu"), ("two ranks, cpu and wgpu", 2, "cpu,wgpu")] {
        let cpu = run("cpu", workers)?.remove(0);
        let mixed = run(devices, workers)?;
        let found = &mixed[0];
        report.row(&format!("{what}: loss after {steps} steps on cpu"), cpu.loss, "nats", Mark::None)?;
        report.row(
            &format!("{what}: loss on {devices}, away from that"),
            (found.loss - cpu.loss).abs(),
            "nats",
            Mark::AtMost(0.02),
        )?;
        if workers > 1 {
            let unequal = mixed.iter().filter(|t| t.hash != found.hash).count() as f64;
            let compared = mixed.iter().map(|t| t.drift.1).min().unwrap_or(0) as f64;
            let bytes = mixed.iter().map(|t| t.bytes).sum::<u64>() as f64;
            report.row(
                &format!("{what}: comparisons of the replicas"),
                compared,
                "1",
                Mark::AtLeast((steps / 5) as f64),
            )?;
            report.row(
                &format!("{what}: largest drift between comparisons, relative l2"),
                found.drift.0,
                "1",
                Mark::AtMost(1e-5),
            )?;
            report.row(
                &format!("{what}: bytes of comparing and sending again"),
                bytes,
                "B",
                Mark::AtLeast(1.0),
            )?;
            report.row(
                &format!("{what}: replicas that differ at the end"),
                unequal,
                "1",
                Mark::AtMost(0.0),
            )?;
        }
    }
    Ok(())
}
