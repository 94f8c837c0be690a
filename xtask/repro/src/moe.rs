//! Mixtures of experts: routing against a reference, plans against one process, and a mixture against a dense
//! model of its active size.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Result, anyhow, bail};
use farflung::base::Axis;
use farflung::comm::{Communicator, memory};
use farflung::compress::AverageSpec;
use farflung::config::choice::{LrScheduleKind, OptimizerKind, SyncKind};
use farflung::config::pools::Numbers;
use farflung::optim::local::ADAMW;
use farflung::optim::sync::DDP;
use farflung::parallel::Recompute;
use farflung::parallel::pipeline::Method;
use farflung::tensor::{Device, Param};
use farflung::train::Job;
use farflung::zoo::layer::{Grads, Routed};
use farflung::zoo::weights::{Dtype, TokenIds, config_text};
use farflung::zoo::{AxisShare, Borders, Input, ModelSpec, Output, Stage, Targets, stage};
use farflung::{OverRanks, TrainConfig, tensor, zoo};

use crate::harness::{Bench, Options, Report, Threshold};
use crate::predict_vs_run::one_period;
use crate::workers::{JobTransport, again, farthest, job, on_all, relative_l2};

#[path = "../../../crates/zoo/tests/it/experts/alone.rs"]
mod alone;

pub(crate) const BENCH: Bench = Bench {
    name: "moe",
    claim: "the layer of Switch Transformers is that of transformers; models with experts train under every plan \
            as in one process, also where ranks divide the experts; at equal compute, a mixture ends below the \
            dense model of its active size",
    source: "Fedus et al. 2021, Switch Transformers; Jiang et al. 2024, Mixtral; transformers 5.24",
    seed: 1337,
    run,
};

/// The folder of the layer and the expected values.
const LAYER: &str =
    concat!(env!("CARGO_MANIFEST_DIR"), "/../../crates/zoo/tests/fixtures/experts/switch-layer");

/// Learning rates of which each model takes its own best.
const RATES: [f64; 4] = [1e-3, 2e-3, 4e-3, 8e-3];
/// Experts of the mixture that is compared with a dense model, of which each token has two.
const EXPERTS: usize = 16;

fn run(report: &mut Report<'_>, options: &Options) -> Result<()> {
    for (what, off) in alone::switch_layer(Path::new(LAYER)).map_err(|error| anyhow!(error))? {
        let most = if what.contains("choices") { 0.0 } else { 1e-5 };
        report.row(&format!("layer of Switch Transformers: {what}"), off, "", Threshold::AtMost(most))?;
    }
    plans(report)?;
    divided_plans(report)?;
    predictions(report)?;
    meshes(report)?;
    against_dense(report, options)
}

/// What a rank has of a step: its part of the loss, its gradients by name, the bytes that it sent, and the
/// choices of its routers.
struct OfRank {
    loss: f64,
    grads: BTreeMap<String, Vec<f32>>,
    sent: u64,
    routed: Vec<Routed>,
}

/// Runs a step of some of `all` sequences.
fn step(stage: &Stage, own: Range<usize>, all: usize, sent: impl Fn() -> u64) -> Result<OfRank> {
    let (context, vocab) = (stage.spec().context, stage.spec().vocab as u64);
    let tokens = (own.start * context..own.end * context).map(|i| ((i * i + 7 * i) as u64 % vocab) as u32);
    let ids: Vec<u32> = tokens.collect();
    let (scale, weight) = (1.0 / (all * context) as f32, 1.0 / all as f32);
    let params = stage.init(5)?;
    let targets = stage.tokens(&ids, context)?;
    let input = Input::Tokens(stage.tokens(&ids, context)?)
        .with_borders(Borders::default())
        .with_sequence_weight(weight);
    let before = sent();
    let (output, saved) = stage.forward(&params, input, Some(Targets::all(&targets, scale)))?;
    let Output::Losses(losses) = output else { bail!("the whole model gives losses") };
    let routed = saved.routed().to_vec();
    let mut flat = stage.zeros()?;
    let grads = &mut Grads::flat(&mut flat, false);
    stage.backward(&params, saved, None, grads, |_, _| {})?;
    let sent = sent() - before;
    let values = flat.to_vec::<f32>()?;
    let by_name = |param: &Param| (param.name.clone(), values[param.range()].to_vec());
    let grads = stage.layout().params().iter().map(by_name).collect();
    Ok(OfRank { loss: stage::total(&losses)? * f64::from(scale), grads, sent, routed })
}

/// Compares ranks that divide the experts with one process, and the bytes that they send with a closed form.
fn meshes(report: &mut Report<'_>) -> Result<()> {
    const ROWS: usize = 4;
    let mut model = ModelSpec::preset("mixtral-nano")?;
    model.context = 32;
    let device = Device::cpu(1)?;
    let alone = step(&Stage::whole(&model, &device)?, 0..ROWS, ROWS, || 0)?;
    for weights in [vec![1, 1], vec![3, 1], vec![1; 4]] {
        let ranks = weights.len();
        let shares: Vec<AxisShare> = AxisShare::new(0, weights.clone())?.all().collect();
        let each = ROWS / ranks;
        let all: Vec<OfRank> = std::thread::scope(|scope| {
            let ends = memory::cluster(ranks).into_iter().zip(&shares).enumerate();
            let (model, device) = (&model, &device);
            let threads = ends.map(|(rank, (end, share))| {
                scope.spawn(move || {
                    let comm = Communicator::new(end);
                    let over = Arc::new(OverRanks::new([(Axis::Expert, comm.clone())]));
                    let shares = [AxisShare::whole(), share.clone()];
                    let stage = Stage::shared(model, 0..model.layers(), device, shares, over)?;
                    let own = rank * each..(rank + 1) * each;
                    step(&stage, own, ROWS, || comm.stats().sent.payload.0)
                })
            });
            let threads: Vec<_> = threads.collect();
            threads
                .into_iter()
                .map(|t| t.join().map_err(|_| anyhow!("a rank panicked"))?)
                .collect::<Result<_>>()
        })?;
        let name =
            format!("experts divided {}", weights.iter().map(u32::to_string).collect::<Vec<_>>().join(":"));
        let loss: f64 = all.iter().map(|of| of.loss).sum();
        let metric = format!("{name}: difference of the loss from one process");
        report.row(&metric, (loss - alone.loss).abs(), "nats", Threshold::AtMost(1e-5))?;
        let mut farthest = 0.0_f64;
        for (tensor, want) in &alone.grads {
            let parts: Vec<_> = all.iter().filter_map(|of| of.grads.get(tensor)).collect();
            let sum: Vec<f32> = (0..want.len()).map(|i| parts.iter().map(|part| part[i]).sum()).collect();
            farthest = farthest.max(relative_l2(&sum, want));
        }
        let metric = format!("{name}: gradients, relative to their norms");
        report.row(&metric, farthest, "", Threshold::AtMost(1e-5))?;
        let sent: u64 = all.iter().map(|of| of.sent).sum();
        let off = sent.abs_diff(closed_form(&shares, &all, [model.context, model.dim])) as f64;
        report.row(
            &format!("{name}: {sent} bytes sent, off the closed form by"),
            off,
            "",
            Threshold::AtMost(0.0),
        )?;
        let tokens = (ROWS * model.context * model.layers()) as f64;
        let published = 4.0 * 2.0 * model.dim as f64 * 4.0 * (ranks as f64 - 1.0) / ranks as f64;
        let metric = format!("{name}: bytes of a token and layer, to those of even routing");
        report.row(&metric, sent as f64 / tokens / published, "", Threshold::None)?;
    }
    Ok(())
}

/// Returns the bytes of all ranks: each choice of another rank's expert is sent there and back, forward and
/// backward, as `dim` floats; each message has its numbers of rows in front.
fn closed_form(shares: &[AxisShare], all: &[OfRank], [context, dim]: [usize; 2]) -> u64 {
    let mut bytes = 0;
    for (from, of) in all.iter().enumerate() {
        for routed in &of.routed {
            let experts = routed.chosen.len() / (routed.tokens / context);
            for (_, share) in shares.iter().enumerate().filter(|(to, _)| *to != from) {
                let theirs = share.of(experts);
                let chosen =
                    routed.chosen.iter().enumerate().filter(|(i, _)| theirs.contains(&(i % experts)));
                let rows: u64 = chosen.map(|(_, &count)| u64::from(count)).sum();
                // There and back, in both passes. The numbers are for the receiver's experts, and those back
                // for the same.
                bytes += 4 * (rows * dim as u64 * 4 + 4 * (1 + theirs.len() as u64));
            }
        }
    }
    bytes
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

/// Compares plans whose replicas divide the experts with one process.
fn divided_plans(report: &mut Report<'_>) -> Result<()> {
    const STEPS: usize = 5;
    for preset in ["mixtral-nano", "switch-nano"] {
        let model = ModelSpec::preset(preset)?;
        let base = TrainConfig { batch: 1, warmup: 0, ..settings(report.seed(), &model) };
        let first = job(TrainConfig { accumulate: 8, ..base.clone() }, JobTransport::Memory)?;
        let trained = |job: &Job| -> Result<(Vec<f64>, Vec<f32>)> {
            let all = on_all(job, |worker| {
                let mut losses = vec![worker.step(false)?.loss];
                let grads = worker.gather_grads()?.map(|grads| grads.to_vec::<f32>()).transpose()?;
                for _ in 1..STEPS {
                    losses.push(worker.step(false)?.loss);
                }
                Ok((losses, grads))
            })?;
            let mut first = all.into_iter().next().ok_or_else(|| anyhow!("no rank"))?;
            Ok((first.0, first.1.take().ok_or_else(|| anyhow!("rank 0 gathers no gradients"))?))
        };
        let alone = trained(&first)?;
        for (name, weights, plan) in [
            (
                "4 replicas, over 2",
                None,
                TrainConfig { workers: 4, accumulate: 2, expert: 2, ..base.clone() },
            ),
            (
                "4 replicas, over 4",
                None,
                TrainConfig { workers: 4, accumulate: 2, expert: 4, ..base.clone() },
            ),
            (
                "4 replicas, over 2 as 3:1",
                Some(Numbers(vec![3, 1])),
                TrainConfig { workers: 4, accumulate: 2, expert: 2, ..base.clone() },
            ),
            (
                "2 x 2 stages, over 2",
                None,
                TrainConfig { workers: 4, stages: 2, microbatches: Some(4), expert: 2, ..base.clone() },
            ),
            (
                "2 x 2 stages with recomputation, over 2",
                None,
                TrainConfig {
                    workers: 4,
                    stages: 2,
                    microbatches: Some(4),
                    expert: 2,
                    schedule: Method::ZbH1,
                    recompute: Recompute::Full,
                    ..base.clone()
                },
            ),
        ] {
            let plan = TrainConfig { expert_weights: weights, ..plan };
            let (losses, grads) = trained(&again(&first, plan, JobTransport::Memory))?;
            let row = |what: &str| format!("{preset}, experts of {name}: {what}");
            let off = farthest(&losses, &alone.0);
            let metric = row(&format!("largest difference of {STEPS} losses from one process"));
            report.row(&metric, off, "nats", Threshold::AtMost(1e-5))?;
            let off = relative_l2(&grads, &alone.1);
            report.row(&row("gradients, relative to their norm"), off, "", Threshold::AtMost(1e-5))?;
        }
    }
    Ok(())
}

/// Compares the predicted time of a step, with even routing, with that of a run on the virtual clock.
fn predictions(report: &mut Report<'_>) -> Result<()> {
    let mut model = ModelSpec::preset("mixtral-nano")?;
    model.context = 32;
    for per_token in [4, 2] {
        for experts in model.blocks.iter_mut().filter_map(|run| run.block.experts.as_mut()) {
            experts.per_token = per_token;
        }
        predicted(report, &model, per_token)?;
    }
    Ok(())
}

fn predicted(report: &mut Report<'_>, model: &ModelSpec, per_token: usize) -> Result<()> {
    let base = TrainConfig { batch: 2, workers: 4, expert: 2, ..settings(report.seed(), model) };
    let link = base.link;
    let first = job(base.clone(), JobTransport::Simulated(link))?;
    // A token that has all experts is routed evenly. Others are not, which the prediction does not know.
    let most = if per_token == 4 { Threshold::AtMost(1.0) } else { Threshold::None };
    for (name, plan) in [
        ("4 replicas, over 2", TrainConfig { accumulate: 2, ..base.clone() }),
        ("4 replicas, over 4", TrainConfig { expert: 4, overlap: false, ..base.clone() }),
        ("2 x 2 stages, over 2", TrainConfig { stages: 2, microbatches: Some(4), ..base.clone() }),
        ("4 replicas, over 2, tokens as int8", TrainConfig { expert_codec: "int8".parse()?, ..base.clone() }),
    ] {
        let (_, step) = one_period(&again(&first, plan, JobTransport::Simulated(link)))?;
        let metric = format!("{per_token} of 4 experts of {name}: error of the predicted step");
        report.row(&metric, step.percent_error(), "%", most)?;
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
        // Wider by what the router has: three matrices have a column for each.
        let experts = run.block.experts.take().map_or((1, 0), |experts| (experts.per_token, experts.count));
        run.block.mlp.width = experts.0 * run.block.mlp.width + experts.1.div_ceil(3);
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
    let (steps, seeds, rates) = match (options.quick, options.long) {
        (true, _) => (10, 1, &RATES[..1]),
        (false, false) => (1500, 3, &RATES[..]),
        (false, true) => (3000, 3, &RATES[..]),
    };
    let first_seed = report.seed();
    let loss = |model: &ModelSpec, lr: f64, seed: u64| -> Result<f64> {
        let config = TrainConfig {
            batch: 8,
            steps,
            lr,
            // To zero, so that the loss at the end is not that of the last few steps.
            min_lr: 0.0,
            lr_schedule: LrScheduleKind::Cosine,
            eval_batches: 100,
            threads: 0,
            ..settings(seed, model)
        };
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
