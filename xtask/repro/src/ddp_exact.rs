//! Compares data-parallel training of four workers with one worker on the same batches.

use anyhow::Result;
use farflung::TrainConfig;
use farflung::base::Link;
use farflung::train::Trainer;

use crate::harness::{Bench, Options, Report, Threshold};
use crate::workers::{JobTransport, again, config, farthest, job, on_all, relative_l2};

pub(crate) const BENCH: Bench = Bench {
    name: "ddp-exact",
    claim: "4 workers train like 1 worker with a batch 4 times as large; replicas are equal, and their bits \
            are the same over every transport",
    source: "Li et al. 2020, PyTorch Distributed, section 3.2",
    seed: 1337,
    run,
};

const STEPS: usize = 20;

/// Results of one worker's 20 steps.
struct Trace {
    losses: Vec<f64>,
    hashes: Vec<blake3::Hash>,
    first_grads: Vec<f32>,
}

fn trace(worker: &mut Trainer) -> Result<Trace> {
    let mut trace = Trace { losses: Vec::new(), hashes: Vec::new(), first_grads: Vec::new() };
    for step in 0..STEPS {
        trace.losses.push(worker.step(false)?.loss);
        trace.hashes.push(worker.hash()?);
        if step == 0 {
            trace.first_grads = worker.grads().to_vec()?;
        }
    }
    Ok(trace)
}

fn run(report: &mut Report<'_>, options: &Options) -> Result<()> {
    let four = TrainConfig { workers: 4, ..config(report.seed(), !options.quick) };
    let first = job(four.clone(), JobTransport::Memory)?;
    // The sampler distributes sequences so that microbatch m of the single worker is the batch of rank m of the
    // four.
    let alone = TrainConfig { workers: 1, accumulate: 4, ..four.clone() };
    let alone = on_all(&again(&first, alone, JobTransport::Memory), trace)?.remove(0);

    let mut reference: Option<Vec<blake3::Hash>> = None;
    let link: Link = "100mbit,5ms".parse()?;
    for (name, over) in [
        ("memory", JobTransport::Memory),
        ("simulated", JobTransport::Simulated(link)),
        ("tcp", JobTransport::Tcp),
    ] {
        let traces = on_all(&again(&first, four.clone(), over), trace)?;
        let losses = traces.iter().map(|t| farthest(&t.losses, &alone.losses)).fold(0.0, f64::max);
        let grads = traces.iter().map(|t| relative_l2(&t.first_grads, &alone.first_grads));
        let grads = grads.fold(0.0, f64::max);
        let unequal = (0..STEPS).filter(|&s| traces.iter().any(|t| t.hashes[s] != traces[0].hashes[s]));
        report.row(
            &format!("{name}: largest difference of 20 losses"),
            losses,
            "nats",
            Threshold::AtMost(1e-5),
        )?;
        report.row(
            &format!("{name}: first averaged gradient, relative l2"),
            grads,
            "",
            Threshold::AtMost(1e-6),
        )?;
        report.row(
            &format!("{name}: steps after which replicas differ"),
            unequal.count() as f64,
            "steps",
            Threshold::AtMost(0.0),
        )?;
        let reference = reference.get_or_insert_with(|| traces[0].hashes.clone());
        let other = reference.iter().zip(&traces[0].hashes).filter(|(a, b)| a != b).count();
        if over != JobTransport::Memory {
            let metric = format!("{name}: steps after which bits differ from those over memory");
            report.row(&metric, other as f64, "steps", Threshold::AtMost(0.0))?;
        }
    }
    report.row("loss of the first step", alone.losses[0], "nats", Threshold::None)?;
    report.row("loss of the last step", alone.losses[STEPS - 1], "nats", Threshold::None)
}
