//! Measures coded pipeline boundaries on slow links: the gain in speed and the cost in loss of encoding hidden
//! states.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use farflung::TrainConfig;
use farflung::base::Link;
use farflung::config::choice::SamplingKind;
use farflung::train::{Job, Trainer};
use farflung::zoo::weights::WriteOptions;

use crate::harness::{Bench, Options, Report, Threshold};
use crate::workers::{JobTransport, again, config, job, on_all};

pub(crate) const BENCH: Bench = Bench {
    name: "boundary",
    claim: "AQ-SGD, with hidden states in 4 bits and their gradients in 8 bits, trains several times as fast \
            over 100 Mbit/s as f32 and ends within 1% of f32's loss; the published gain is 4.3 x",
    source: "Wang et al. 2022, AQ-SGD",
    seed: 1337,
    run,
};

const STAGES: usize = 4;
const MICROBATCHES: usize = 8;
/// Steps of an epoch: number of windows in the data divided by sequences per step.
const EPOCH: u64 = 8;
const EPOCHS: u64 = 12;
/// Steps of training before the measured ones, on random windows of the default text. After them hidden states
/// no longer change as fast. The data of the measured steps are the beginning of this text.
const PRETRAINED: u64 = 150;

/// Time to send a microbatch's hidden states in f32 over 100 Mbit/s, divided by the time in which a stage
/// computes the microbatch: 0.524 s and 0.12 s in the paper's run of GPT2-XL.
const OVER_COMPUTE: f64 = 0.524 / 0.12;

struct Case {
    name: &'static str,
    forward: &'static str,
    backward: &'static str,
    /// Largest allowed increase of the case's loss over that of f32, in percent.
    most: Option<f64>,
}

const fn case(name: &'static str, forward: &'static str, backward: &'static str) -> Case {
    Case { name, forward, backward, most: None }
}

const CASES: &[Case] = &[
    case("f32", "none", "none"),
    case("f16", "f16", "f16"),
    case("int8", "int8", "int8"),
    case("int4", "int4", "int4"),
    Case { most: Some(1.0), ..case("AQ-SGD 4 and 8 bits", "aqsgd:4", "direct:8") },
    case("direct 4 and 8 bits", "direct:4", "direct:8"),
    case("AQ-SGD 2 and 4 bits", "aqsgd:2", "direct:4"),
    case("direct 2 and 4 bits", "direct:2", "direct:4"),
];

impl Case {
    fn coded(&self, job: &Job, config: &TrainConfig) -> Result<Job> {
        let (boundary, boundary_backward) = (self.forward.parse()?, self.backward.parse()?);
        let config = TrainConfig { boundary, boundary_backward, ..config.clone() };
        Ok(again(job, config, JobTransport::Simulated(Link::FREE)))
    }
}

/// Writes a topology of four machines that compute `rate` operations per second, with a separate link for each
/// pair.
fn topology(folder: &Path, link: &str, rate: f64) -> Result<PathBuf> {
    let mut text = format!("default = \"{link},100us\"\n");
    for rank in 0..STAGES {
        let _ = write!(text, "[[device]]\nname = \"m{rank}\"\nflops = \"{rate:.0} FLOPS\"\n");
    }
    let path = folder.join(format!("{link}.toml"));
    std::fs::write(&path, text).context("failed to write the topology")?;
    Ok(path)
}

fn run(report: &mut Report<'_>, options: &Options) -> Result<()> {
    let folder = tempfile::tempdir().context("failed to make a temporary folder")?;
    let (seeds, epochs) = if options.quick { (1, 4) } else { (3, EPOCHS) };
    let mut last = Vec::new();
    for seed in 0..seeds {
        let setting = Setting::new(folder.path(), report.seed() + seed)?;
        let losses = CASES.iter().map(|case| setting.trained(case, epochs)).collect::<Result<Vec<_>>>()?;
        last.push(losses);
    }
    let links = ["100mbit", "500mbit"];
    for link in if options.quick { &links[..1] } else { &links[..] } {
        let config = long_step(folder.path(), link, report.seed())?;
        let job = job(config.clone(), JobTransport::Simulated(Link::FREE))?;
        let mut plain = 0.0;
        for case in CASES {
            let speed = speed(&case.coded(&job, &config)?)?;
            report.row(&format!("{link}, {}: speed", case.name), speed, "tokens/s", Threshold::None)?;
            plain = if case.name == "f32" { speed } else { plain };
            let gain = speed / plain;
            report.row(
                &format!("{link}, {}: speed relative to f32", case.name),
                gain,
                "x",
                Threshold::None,
            )?;
        }
    }
    report.row("published, 100mbit, with 2 to 4 bits: speed relative to f32", 4.3, "x", Threshold::None)?;
    let mean = |case: usize| last.iter().map(|losses| losses[case]).sum::<f64>() / last.len() as f64;
    for (i, case) in CASES.iter().enumerate() {
        report.row(&format!("{}: loss of the last epoch", case.name), mean(i), "nats", Threshold::None)?;
        let over = (mean(i) / mean(0) - 1.0) * 100.0;
        let mark = case.most.filter(|_| !options.quick).map_or(Threshold::None, Threshold::AtMost);
        report.row(&format!("{}: loss above f32's", case.name), over, "%", mark)?;
    }
    Ok(())
}

/// A model after some training, and a small text on which it continues to train in epochs.
struct Setting {
    job: Job,
    config: TrainConfig,
}

impl Setting {
    fn new(folder: &Path, seed: u64) -> Result<Self> {
        let base = TrainConfig { layers: Some(4), batch: 1, lr: 1e-3, ..config(seed, false) };
        let before = job(
            TrainConfig { workers: 1, accumulate: MICROBATCHES, steps: PRETRAINED, ..base.clone() },
            JobTransport::Memory,
        )?;
        let weights = folder.join(format!("weights-{seed}"));
        let params = on_all(&before, |rank: &mut Trainer| {
            for _ in 0..PRETRAINED {
                rank.step(false)?;
            }
            Ok(rank.params().to_vec::<f32>()?)
        })?;
        let params = params.into_iter().next().context("the job has no ranks")?;
        let device = farflung::tensor::Device::cpu(1)?;
        let layout = farflung::zoo::Stage::whole(&before.model, &device)?.layout().clone();
        farflung::zoo::weights::write(
            &weights,
            &before.model,
            WriteOptions::default(),
            |_, spec, values| {
                let at = layout.find(&spec.name)?;
                values.copy_from_slice(&params[layout.params()[at].range()]);
                Ok::<_, farflung::zoo::ZooError>(())
            },
        )?;

        let data = epoch_of(folder, EPOCH as usize * MICROBATCHES, before.model.context)?;
        let config = TrainConfig {
            workers: STAGES,
            stages: STAGES,
            microbatches: Some(MICROBATCHES),
            data: Some(data),
            init_from: Some(weights),
            sampling: SamplingKind::Epochs,
            layers: None,
            heads: None,
            dim: None,
            context: None,
            ..base
        };
        let job = job(config.clone(), JobTransport::Simulated(Link::FREE))?;
        Ok(Self { job, config })
    }

    /// Returns the mean loss of the last epoch's steps.
    fn trained(&self, case: &Case, epochs: u64) -> Result<f64> {
        let steps = EPOCH * epochs;
        let job = case.coded(&self.job, &TrainConfig { steps, ..self.config.clone() })?;
        let ranks = on_all(&job, |rank: &mut Trainer| {
            (0..steps).map(|_| Ok(rank.step(false)?.loss)).collect::<Result<Vec<f64>>>()
        })?;
        let losses = &ranks.first().context("the job has no ranks")?[(steps - EPOCH) as usize..];
        Ok(losses.iter().sum::<f64>() / losses.len() as f64)
    }
}

/// Returns settings in which a step is long compared with the exchange of the token table at its end: 128
/// sequences of 64 tokens. These are all of the data, so each step is an epoch.
fn long_step(folder: &Path, link: &str, seed: u64) -> Result<TrainConfig> {
    const BATCH: usize = 4;
    const MICROBATCHES: usize = 32;
    const CONTEXT: usize = 64;
    let base =
        TrainConfig { layers: Some(STAGES), context: Some(CONTEXT), batch: BATCH, ..config(seed, false) };
    let data = epoch_of(folder, BATCH * MICROBATCHES, CONTEXT)?;
    let shape =
        job(TrainConfig { workers: 1, data: Some(data.clone()), ..base.clone() }, JobTransport::Memory)?
            .model;
    let tokens = (BATCH * CONTEXT) as f64;
    let compute = tokens * (shape.dim * size_of::<f32>()) as f64 * 8.0 / 100e6 / OVER_COMPUTE;
    let rate = tokens * shape.flops_per_token(CONTEXT) as f64 / STAGES as f64 / compute;
    Ok(TrainConfig {
        workers: STAGES,
        stages: STAGES,
        microbatches: Some(MICROBATCHES),
        data: Some(data),
        sampling: SamplingKind::Epochs,
        topology: Some(topology(folder, link, rate)?),
        ..base
    })
}

/// Writes a text with `windows` windows for training. Its last tenth is for evaluation.
fn epoch_of(folder: &Path, windows: usize, context: usize) -> Result<PathBuf> {
    let text = farflung::corpus::default_text()?.0;
    let data = folder.join(format!("{windows}-windows.txt"));
    let len = (windows * context + 1) * 10 / 9 + 2;
    std::fs::write(&data, &text[..len]).context("failed to write the text")?;
    Ok(data)
}

/// Returns the tokens per second of the second step on the virtual clock, when every sample has been seen.
fn speed(job: &Job) -> Result<f64> {
    let times = on_all(job, |rank: &mut Trainer| {
        rank.step(false)?;
        let begun = rank.comm().now();
        rank.step(false)?;
        Ok(rank.comm().now().saturating_sub(begun).as_secs_f64())
    })?;
    Ok(job.tokens_per_step() as f64 / times.into_iter().fold(0.0, f64::max))
}
