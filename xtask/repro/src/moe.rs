//! Mixtures of experts: routing against a reference, plans against one process, and a mixture against a dense
//! model of its active size.

use std::path::Path;

use anyhow::{Result, anyhow};
use farflung::compress::AverageSpec;
use farflung::config::choice::{LrScheduleKind, OptimizerKind, SyncKind};
use farflung::optim::local::ADAMW;
use farflung::optim::sync::DDP;
use farflung::train::Job;
use farflung::zoo::ModelSpec;
use farflung::zoo::weights::{Dtype, TokenIds, config_text};
use farflung::{TrainConfig, tensor, zoo};

use crate::harness::{Bench, Options, Report, Threshold};
use crate::workers::{JobTransport, again, farthest, job, on_all};

#[path = "../../../crates/zoo/tests/it/experts/alone.rs"]
mod alone;

pub(crate) const BENCH: Bench = Bench {
    name: "moe",
    claim: "the layer of Switch Transformers is that of transformers; models with experts train under every plan \
            as in one process; at equal compute, a mixture ends below the dense model of its active size",
    source: "Fedus et al. 2021, Switch Transformers; Jiang et al. 2024, Mixtral; transformers 5.24",
    seed: 1337,
    run,
};

/// The folder of the layer and the expected values.
const LAYER: &str =
    concat!(env!("CARGO_MANIFEST_DIR"), "/../../crates/zoo/tests/fixtures/experts/switch-layer");

/// Learning rates of which each model takes its own best.
const RATES: [f64; 3] = [5e-4, 1e-3, 2e-3];
/// Experts of the mixture that is compared with a dense model, of which each token has two.
const EXPERTS: usize = 8;

fn run(report: &mut Report<'_>, options: &Options) -> Result<()> {
    for (what, off) in alone::switch_layer(Path::new(LAYER)).map_err(|error| anyhow!(error))? {
        let most = if what.contains("choices") { 0.0 } else { 1e-5 };
        report.row(&format!("layer of Switch Transformers: {what}"), off, "", Threshold::AtMost(most))?;
    }
    plans(report)?;
    against_dense(report, options)
}

fn settings(seed: u64, model: &ModelSpec) -> TrainConfig {
    TrainConfig {
        model: config_text(model, Dtype::F32, &TokenIds::default()),
        context: Some(64),
        batch: 12,
        optimizer: OptimizerKind::of(&ADAMW),
        lr: 1e-3,
        min_lr: 1e-3,
        warmup: 50,
        lr_schedule: LrScheduleKind::Constant,
        weight_decay: 0.1,
        clip: 1.0,
        seed,
        workers: 1,
        sync: SyncKind::of(&DDP),
        codec: AverageSpec::default(),
        eval_batches: 50,
        threads: 1,
        ..TrainConfig::default()
    }
}

/// Compares the losses of some steps under several plans with those of one process.
fn plans(report: &mut Report<'_>) -> Result<()> {
    const STEPS: usize = 5;
    for preset in ["mixtral-nano", "switch-nano"] {
        let model = ModelSpec::preset(preset)?;
        let base = TrainConfig { batch: 2, warmup: 0, ..settings(report.seed(), &model) };
        let first = job(TrainConfig { accumulate: 4, ..base.clone() }, JobTransport::Memory)?;
        let losses = |job: &Job| -> Result<Vec<f64>> {
            let all = on_all(job, |worker| (0..STEPS).map(|_| Ok(worker.step(false)?.loss)).collect());
            Ok(all?.into_iter().next().unwrap_or_default())
        };
        let alone = losses(&first)?;
        for (name, plan) in [
            ("2 replicas", TrainConfig { workers: 2, accumulate: 2, ..base.clone() }),
            ("2 stages", TrainConfig { workers: 2, stages: 2, microbatches: Some(4), ..base.clone() }),
            ("2 x 2", TrainConfig { workers: 4, stages: 2, microbatches: Some(2), ..base.clone() }),
        ] {
            let off = farthest(&losses(&again(&first, plan, JobTransport::Memory))?, &alone);
            let metric = format!("{preset}, {name}: largest difference of {STEPS} losses from one process");
            report.row(&metric, off, "nats", Threshold::AtMost(1e-5))?;
        }
    }
    Ok(())
}

/// Trains a mixture, and a dense model that costs a token as much, or a little more.
fn against_dense(report: &mut Report<'_>, options: &Options) -> Result<()> {
    let mut mixture = ModelSpec::preset("mixtral-nano")?;
    for experts in mixture.blocks.iter_mut().filter_map(|run| run.block.experts.as_mut()) {
        experts.count = EXPERTS;
    }
    let mut dense = ModelSpec { names: ModelSpec::preset("llama-nano")?.names, ..mixture.clone() };
    for run in &mut dense.blocks {
        let per_token = run.block.experts.take().map_or(1, |experts| experts.per_token);
        // Wider by what the router has.
        run.block.mlp.width = per_token * run.block.mlp.width + 2;
    }
    let [active, all] = [dense.parameters(), mixture.active_parameters()].map(|count| count as f64);
    report.row(
        "parameters that a token meets, dense to mixture",
        active / all,
        "",
        Threshold::AtLeast(1.0),
    )?;
    let total = mixture.parameters() as f64 / dense.parameters() as f64;
    report.row("all parameters, mixture to dense", total, "", Threshold::None)?;
    let (steps, seeds, rates) = if options.quick { (10, 1, &RATES[..1]) } else { (1000, 3, &RATES[..]) };
    let first_seed = report.seed();
    let loss = |model: &ModelSpec, lr: f64, seed: u64| -> Result<f64> {
        let config = TrainConfig { lr, min_lr: lr, steps, threads: 0, ..settings(seed, model) };
        let losses = on_all(&job(config, JobTransport::Memory)?, |worker| {
            (0..steps).try_for_each(|_| worker.step(false).map(|_| ()))?;
            Ok(worker.evaluate()?)
        })?;
        losses.into_iter().next().ok_or_else(|| anyhow!("no worker"))
    };
    let mut ends = Vec::new();
    for (name, model) in [("mixture", &mixture), ("dense", &dense)] {
        let tried = rates.iter().map(|&rate| Ok((rate, loss(model, rate, first_seed)?)));
        let tried: Vec<(f64, f64)> = tried.collect::<Result<_>>()?;
        let best =
            tried.iter().copied().min_by(|a, b| a.1.total_cmp(&b.1)).ok_or_else(|| anyhow!("no rate"))?;
        for (rate, loss) in &tried {
            report.row(
                &format!("{name}: loss after {steps} steps at {rate}"),
                *loss,
                "nats",
                Threshold::None,
            )?;
        }
        let more = (1..seeds).map(|seed| loss(model, best.0, first_seed + seed));
        let all: Vec<f64> = std::iter::once(Ok(best.1)).chain(more).collect::<Result<_>>()?;
        ends.push(all);
    }
    for (seed, (mixture, dense)) in ends[0].iter().zip(&ends[1]).enumerate() {
        let metric = format!("seed {seed}: loss of the mixture less that of the dense model");
        let below = if options.quick { Threshold::None } else { Threshold::AtMost(0.0) };
        report.row(&metric, mixture - dense, "nats", below)?;
    }
    Ok(())
}
