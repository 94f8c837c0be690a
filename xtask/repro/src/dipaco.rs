//! Paths through shared modules: four of them against one dense model of a path's size, the bytes that they
//! exchange, and the plan of the paper's shape.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, anyhow, bail};
use farflung::TrainConfig;
use farflung::base::{Algorithm, Link};
use farflung::compress::AverageSpec;
use farflung::config::choice::{LrScheduleKind, SyncKind};
use farflung::config::pools::Numbers;
use farflung::corpus;
use farflung::optim::sync::{DDP, DILOCO};
use farflung::parallel::{Cluster, Speed};
use farflung::train::{Job, Prediction, Trainer, plan_of};
use farflung::zoo::{Input, ModelSpec, Sampler, Shard, Sharding};

use crate::harness::{Bench, Options, Report, Threshold};
use crate::predict_vs_run::one_period;
use crate::workers::{JobTransport, again, config, job, on_all};

pub(crate) const BENCH: Bench = Bench {
    name: "dipaco",
    claim: "on a text of 4 kinds, 4 paths through 2 x 2 shared modules end below one dense model of a path's size at \
            equal tokens per path, and exchange less than 4 replicas of it; 16 x 16 paths are planned and priced",
    source: "Douillard et al. 2024, DiPaCo",
    seed: 1337,
    run,
};

/// Tokens at the beginning of a text that choose its path, of a context of this length.
const ROUTE: usize = 32;
const CONTEXT: usize = 128;
/// Sequences of a path in a step.
const BATCH: usize = 8;
/// Steps between two averages.
const EVERY: u64 = 20;
/// Learning rates of which each arm takes its own best.
const RATES: [f64; 4] = [1e-3, 2e-3, 4e-3, 8e-3];
/// Windows of the held-out text.
const WINDOWS: usize = 384;

fn run(report: &mut Report<'_>, options: &Options) -> Result<()> {
    let folder = tempfile::tempdir().context("failed to make a temporary folder")?;
    write_corpus(folder.path(), if options.quick { 60_000 } else { 600_000 })?;
    against_dense(report, options, folder.path())?;
    exchanged(report, folder.path())?;
    paper_shape(report)
}

/// Writes a training and a held-out text of four kinds of documents in turn: Rust, C, assembly and prose, of
/// our own dependencies, about `bytes` of each.
fn write_corpus(folder: &Path, bytes: usize) -> Result<()> {
    let (packages, mut kinds) = (packages()?, vec![corpus::default_documents()?]);
    for (package, endings) in [("zstd-sys", &["c", "h"][..]), ("ring", &["S", "asm"])] {
        let folder = packages.get(package).ok_or_else(|| anyhow!("cargo has no package {package}"))?;
        kinds.push(documents_of(folder, endings)?);
    }
    let prose: Result<Vec<_>> = packages.values().map(|folder| documents_of(folder, &["md"])).collect();
    kinds.push(prose?.concat());
    let (mut training, mut held_out) = (Vec::new(), Vec::new());
    // A document is at most this long, so that there are many of each kind.
    let longest = 16 << 10;
    let pieces = |documents: Vec<Vec<u8>>| {
        let cut = documents.into_iter().filter(|text| text.len() > 1000 && std::str::from_utf8(text).is_ok());
        let cut = cut.flat_map(|text| text.chunks(longest).map(<[u8]>::to_vec).collect::<Vec<_>>());
        let mut total = 0;
        cut.take_while(|text| {
            total += text.len();
            total <= bytes
        })
        .collect::<Vec<_>>()
    };
    let kinds: Vec<Vec<Vec<u8>>> = kinds.into_iter().map(pieces).collect();
    if let Some(short) = kinds.iter().position(|kind| kind.len() < 3) {
        bail!("there are only {} documents of kind {short}", kinds[short].len());
    }
    for turn in 0..kinds.iter().map(Vec::len).max().unwrap_or(0) {
        for kind in &kinds {
            let Some(text) = kind.get(turn) else { continue };
            let to =
                if turn % 10 == 9 || kind.len() < 10 && turn == 2 { &mut held_out } else { &mut training };
            to.extend_from_slice(text);
            to.push(b'\n');
        }
    }
    std::fs::write(folder.join("train.txt"), training).context("failed to write the text")?;
    std::fs::write(folder.join("valid.txt"), held_out).context("failed to write the text")
}

/// Returns the folders of the packages on which farflung depends, by name.
fn packages() -> Result<BTreeMap<String, PathBuf>> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let manifest = concat!(env!("CARGO_MANIFEST_DIR"), "/../../Cargo.toml");
    let asked = ["metadata", "--offline", "--format-version", "1", "--manifest-path", manifest];
    let output = Command::new(cargo).args(asked).output().context("failed to run cargo")?;
    anyhow::ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: serde_json::Value = serde_json::from_slice(&output.stdout)?;
    let of = |package: &serde_json::Value| {
        package["source"].as_str()?;
        let folder = Path::new(package["manifest_path"].as_str()?).parent()?.to_owned();
        Some((package["name"].as_str()?.to_owned(), folder))
    };
    let all = metadata["packages"].as_array().into_iter().flatten().filter_map(of);
    Ok(all.filter(|(_, folder)| folder.is_dir()).collect())
}

/// Returns the files below a folder with one of these endings, in the order of their names.
fn documents_of(folder: &Path, endings: &[&str]) -> Result<Vec<Vec<u8>>> {
    let mut found = Vec::new();
    let mut open = vec![folder.to_owned()];
    while let Some(folder) = open.pop() {
        for entry in
            std::fs::read_dir(&folder).with_context(|| format!("failed to list {}", folder.display()))?
        {
            let path = entry?.path();
            if path.is_dir() {
                open.push(path);
            } else if path.extension().is_some_and(|end| endings.iter().any(|wanted| end == *wanted)) {
                found.push(path);
            }
        }
    }
    found.sort_unstable();
    let read =
        |path: &PathBuf| std::fs::read(path).with_context(|| format!("failed to read {}", path.display()));
    found.iter().map(read).collect()
}

/// Makes the settings of an arm from a seed and the text.
type Settings = fn(u64, &Path) -> TrainConfig;

/// Returns the settings of one worker with a dense model.
fn dense(seed: u64, data: &Path) -> TrainConfig {
    TrainConfig {
        data: Some(data.to_owned()),
        context: Some(CONTEXT),
        batch: BATCH,
        min_lr: 0.0,
        warmup: 20,
        lr_schedule: LrScheduleKind::Cosine,
        weight_decay: 0.1,
        clip: 1.0,
        workers: 1,
        sync: SyncKind::of(&DDP),
        codec: AverageSpec::default(),
        route_tokens: ROUTE,
        threads: 0,
        ..config(seed, true)
    }
}

/// Returns the settings of four paths of 2 x 2 modules.
fn paths(seed: u64, data: &Path) -> TrainConfig {
    TrainConfig {
        workers: 4,
        sync: SyncKind::of(&DILOCO),
        sync_every: EVERY,
        outer_lr: 0.7,
        outer_momentum: 0.9,
        paths: Some(Numbers(vec![2, 2])),
        shards: Sharding::KMeans(4),
        threads: 1,
        ..dense(seed, data)
    }
}

/// Trains, and returns the loss of the held-out targets after those that choose a path, and the share of
/// windows on each path.
fn trained(job: &Job, steps: u64) -> Result<(f64, Vec<f64>)> {
    let sums = on_all(job, |worker| {
        (0..steps).try_for_each(|_| worker.step(false).map(|_| ()))?;
        measured(job, worker)
    })?;
    let (sum, count) = sums.iter().fold((0.0, 0), |all, one| (all.0 + one.0, all.1 + one.1));
    let shares = sums.iter().map(|one| one.1 as f64 / count as f64).collect();
    Ok((sum / count as f64, shares))
}

/// Returns the sum of the losses of the targets of this rank's path, and their number.
fn measured(job: &Job, worker: &mut Trainer) -> Result<(f64, u64)> {
    let params = worker.gather_params()?.ok_or_else(|| anyhow!("each rank has its own path"))?;
    let (held_out, shard) = (job.held_out.clone(), Shard::whole(BATCH));
    let sampler = match &job.text_parts.router {
        Some(router) => {
            let path = job.plan.path(worker.comm().rank().0) as usize;
            Sampler::evaluation_routed(held_out, shard, CONTEXT, WINDOWS, router, path)?
        }
        None => Sampler::evaluation(held_out, shard, CONTEXT, WINDOWS)?,
    };
    let sampler = sampler.without_first_targets(ROUTE - 1);
    let stage = worker.stage();
    let (mut sum, mut count) = (0.0, 0);
    for step in 0..sampler.steps().unwrap_or(0) as u64 {
        let batch = sampler.batch(step)?;
        let (x, y) = (stage.tokens(&batch.inputs, CONTEXT)?, stage.tokens(&batch.targets, CONTEXT)?);
        let losses = stage.losses(&params, Input::Tokens(x), &y)?.to_vec::<f32>()?;
        let weights = batch.weights.as_ref().ok_or_else(|| anyhow!("the first targets have no weight"))?;
        let counted = losses.iter().zip(weights).filter(|(_, weight)| **weight > 0.0);
        sum += counted.map(|(loss, _)| f64::from(*loss)).sum::<f64>();
        count += batch.counted() as u64;
    }
    Ok((sum, count))
}

/// Compares four paths with a dense model of a path's size, each at its best learning rate. Each path takes as
/// many steps, of as many tokens, as the dense model.
fn against_dense(report: &mut Report<'_>, options: &Options, data: &Path) -> Result<()> {
    let (steps, seeds, rates) = match (options.quick, options.long) {
        (true, _) => (20, 1, &RATES[..1]),
        (false, false) => (400, 3, &RATES[..]),
        (false, true) => (2000, 3, &RATES[..]),
    };
    let seed = report.seed();
    let arms: [(&str, Settings); 2] = [("4 paths", paths), ("dense", dense)];
    let mut ends = Vec::new();
    for (name, settings) in arms {
        let first = job(settings(seed, data), JobTransport::Memory)?;
        let run = |lr: f64, seed: u64| {
            let job = again(&first, TrainConfig { lr, steps, ..settings(seed, data) }, JobTransport::Memory);
            trained(&job, steps)
        };
        let mut tried = Vec::new();
        for &rate in rates {
            let (loss, shares) = run(rate, seed)?;
            report.row(
                &format!("{name}: loss after {steps} steps at {rate}"),
                loss,
                "nats",
                Threshold::None,
            )?;
            tried.push((rate, loss, shares));
        }
        let best = tried.iter().min_by(|a, b| a.1.total_cmp(&b.1)).ok_or_else(|| anyhow!("no rate"))?;
        for (path, share) in best.2.iter().enumerate().filter(|_| best.2.len() > 1) {
            report.row(
                &format!("share of held-out text on path {path}"),
                100.0 * share,
                "%",
                Threshold::None,
            )?;
        }
        let mut all = vec![best.1];
        for seed in seed + 1..seed + seeds {
            all.push(run(best.0, seed)?.0);
        }
        ends.push(all);
    }
    for (seed, (paths, dense)) in ends[0].iter().zip(&ends[1]).enumerate() {
        let metric = format!("seed {seed}: loss of 4 paths less that of the dense model");
        let below = if options.quick { Threshold::None } else { Threshold::AtMost(0.0) };
        report.row(&metric, paths - dense, "nats", below)?;
    }
    Ok(())
}

/// Compares the bytes of an average with those of four replicas of one model, and its predicted time with a
/// run.
fn exchanged(report: &mut Report<'_>, data: &Path) -> Result<()> {
    const STEPS: u64 = 2;
    let link: Link = "100mbit,20ms".parse().map_err(|error| anyhow!("{error}"))?;
    let base = |paths: &[u32]| {
        let paths = (!paths.is_empty()).then(|| Numbers(paths.to_vec()));
        TrainConfig {
            paths,
            steps: STEPS,
            sync_every: STEPS,
            algorithm: Algorithm::Ring,
            ..self::paths(report.seed(), data)
        }
    };
    let (one, two, own) = (base(&[]), base(&[2, 2]), base(&[4]));
    let first = job(one.clone(), JobTransport::Simulated(link))?;
    let model = first.model.clone();
    let blocks: u64 = model.parameters() - common(&model);
    let mut sent = Vec::new();
    for (name, config, averaged) in [
        ("one model", one, 1.5 * model.parameters() as f64),
        ("2 x 2 modules", two, 1.5 * common(&model) as f64 + blocks as f64),
        ("4 modules", own, 1.5 * common(&model) as f64),
    ] {
        let job = again(&first, config, JobTransport::Simulated(link));
        let bytes = on_all(&job, |worker| {
            let begun = worker.comm().stats().sent.payload.0;
            (0..STEPS).try_for_each(|_| worker.step(false).map(|_| ()))?;
            Ok(worker.comm().stats().sent.payload.0 - begun)
        })?;
        let most = bytes.iter().copied().max().unwrap_or(0) as f64;
        report.row(
            &format!("4 replicas, {name}: sent by a worker for an average"),
            most,
            "B",
            Threshold::None,
        )?;
        // A ring of n sends 2 (n - 1) / n values; votes and headers come to less than a hundredth.
        let off = (most / (4.0 * averaged) - 1.0).abs() * 100.0;
        report.row(&format!("{name}: off the closed form"), off, "%", Threshold::AtMost(1.0))?;
        let (_, step) = one_period(&job)?;
        report.row(
            &format!("{name}: error of the predicted step"),
            step.percent_error(),
            "%",
            Threshold::AtMost(1.0),
        )?;
        sent.push(most);
    }
    report.row("bytes, 2 x 2 modules to one model", sent[1] / sent[0], "", Threshold::AtMost(1.0))
}

/// Returns the parameters in no block: those of the table of tokens, of positions, and of the head.
fn common(model: &ModelSpec) -> u64 {
    let tensors = model
        .tensors()
        .into_iter()
        .filter(|tensor| !tensor.name.contains(".h.") && !tensor.name.starts_with("h."));
    tensors.map(|tensor| tensor.count() as u64).sum()
}

/// Plans 256 paths of 16 x 16 modules of a model of 150 M parameters, and predicts its period.
fn paper_shape(report: &mut Report<'_>) -> Result<()> {
    const PATHS: u32 = 256;
    let config = TrainConfig {
        model: "gpt2".to_owned(),
        dim: Some(896),
        heads: Some(14),
        layers: Some(11),
        workers: PATHS as usize,
        batch: BATCH,
        sync: SyncKind::of(&DILOCO),
        sync_every: 150,
        paths: Some(Numbers(vec![16, 16])),
        codec: AverageSpec::default(),
        route_tokens: ROUTE,
        ..TrainConfig::default()
    };
    let plan = plan_of(config.clone(), PATHS as usize)?;
    let plain = plan_of(TrainConfig { paths: None, ..config.clone() }, PATHS as usize)?;
    let model = ModelSpec::preset("gpt2")?.resized(farflung::zoo::Resize {
        dim: config.dim,
        heads: config.heads,
        layers: config.layers,
        ..farflung::zoo::Resize::default()
    })?;
    report.row("16 x 16: parameters of a path", model.parameters() as f64, "", Threshold::None)?;
    let modules = 16.0 * (model.parameters() - common(&model)) as f64 + common(&model) as f64;
    report.row("16 x 16: parameters of all modules", modules, "", Threshold::None)?;
    let wrong = (0..PATHS).filter(|&replica| plan.replicas_of_module(replica, 1).len() != 16).count();
    report.row("replicas whose module is not shared by 16", wrong as f64, "", Threshold::AtMost(0.0))?;
    let link: Link = "100mbit,50ms".parse().map_err(|error| anyhow!("{error}"))?;
    let cluster = Cluster::uniform(PATHS, Speed::Flops(50_000_000_000_000), link);
    for (name, plan) in [("16 x 16 paths", &plan), ("one model", &plain)] {
        let predicted = Prediction::on(plan, &model, &cluster)?;
        let seconds = predicted.total.as_secs_f64();
        report.row(
            &format!("256 replicas, {name}: predicted time of 150 steps"),
            seconds,
            "s",
            Threshold::None,
        )?;
    }
    Ok(())
}
