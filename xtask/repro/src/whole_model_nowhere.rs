//! Measures the memory of the processes of a pipeline that saves, evaluates and generates a sample, and lets
//! four stages continue a text with the model that it has trained.

use std::io::{BufRead as _, BufReader, Write};
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use farflung::base::Link;
use farflung::config::value::Setting as _;
use farflung::tensor::Device;
use farflung::train::{Generated, OpenedPart, Quiet, StagedModel, needed_memory, run as train};
use farflung::zoo::weights::Weights;
use farflung::zoo::{Sampling, Stage, generate};
use farflung::{LaunchEnv, Stop, TrainConfig};

use crate::harness::{Bench, Options, Report, Threshold};
use crate::machine::resident_without_files;
use crate::workers::config;

pub(crate) const BENCH: Bench = Bench {
    name: "whole-model-nowhere",
    claim: "in a run of four stages with checkpoints, evaluation and a sample, no process takes more memory \
            than is predicted for its own part, within 5%. Four stages continue a text as one process does, \
            and a token takes the predicted time on the virtual clock, within 5%",
    source: "the plan's own prediction; zoo::generate",
    seed: 1337,
    run,
};

/// First argument of this program when it runs as one rank.
pub(crate) const CHILD: &str = "--whole-model-rank";
const STAGES: usize = 4;
/// Name of the folder of the run.
const RUN: &str = "run";

fn settings(seed: u64, quick: bool, folder: &Path) -> TrainConfig {
    TrainConfig {
        data: Some(folder.join("text.txt")),
        out: Some(folder.join(RUN)),
        layers: Some(8),
        heads: Some(8),
        // Below this, what a process takes besides its part counts.
        dim: Some(768),
        context: Some(64),
        batch: 1,
        steps: if quick { 2 } else { 4 },
        checkpoint_every: if quick { 1 } else { 2 },
        eval_batches: 1,
        microbatches: Some(STAGES),
        sample_tokens: 40,
        workers: STAGES,
        stages: STAGES,
        quiet: true,
        ..config(seed, false)
    }
}

fn place(rank: usize, port: u16) -> Result<LaunchEnv> {
    let value = |name: &str| match name {
        "RANK" | "LOCAL_RANK" => Some(rank.to_string()),
        "WORLD_SIZE" | "LOCAL_WORLD_SIZE" => Some(STAGES.to_string()),
        "MASTER_ADDR" => Some("127.0.0.1".to_owned()),
        "MASTER_PORT" => Some(port.to_string()),
        _ => None,
    };
    farflung::access::AccessArgs::default().detect(value)?.context("a launcher's variables")
}

/// Trains as one rank. The arguments are its number, the port of the meeting, the seed, whether the run is
/// short, and the folder. Prints the predicted and the highest memory, in bytes.
pub(crate) fn child(args: &[String], out: &mut dyn Write) -> Result<()> {
    let [rank, port, seed, quick, folder] = args else { bail!("expected five arguments") };
    let config = settings(seed.parse()?, quick.parse()?, Path::new(folder));
    let env = place(rank.parse()?, port.parse()?)?;
    let predicted = needed_memory(&config, Some(&env))?;
    train(config, Some(&env), Stop::manual(), &mut Quiet)?;
    let peak = resident_without_files().context("the system does not report the memory of a process")?;
    writeln!(out, "{predicted} {peak}")?;
    Ok(out.flush()?)
}

/// Starts the processes of the run. Returns the predicted and the highest memory of each.
fn memory(seed: u64, quick: bool, folder: &Path) -> Result<Vec<(f64, f64)>> {
    let program = std::env::current_exe().context("failed to find this program")?;
    let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
    let start = |rank: usize| {
        let mut command = Command::new(&program);
        command.args([CHILD, &rank.to_string(), &port.to_string(), &seed.to_string(), &quick.to_string()]);
        command.arg(folder).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::inherit()).spawn()
    };
    let ranks: Vec<Child> = (0..STAGES).map(start).collect::<Result<_, _>>()?;
    let told = |mut rank: Child| {
        let mut line = String::new();
        BufReader::new(rank.stdout.take().context("a rank's output")?).read_line(&mut line)?;
        ensure!(rank.wait()?.success(), "a rank failed");
        let (predicted, peak) = line.trim().split_once(' ').context("a rank told nothing")?;
        Ok((predicted.parse()?, peak.parse()?))
    };
    ranks.into_iter().map(told).collect()
}

fn prompt() -> Vec<u32> {
    (0..20).collect()
}

/// Continues the prompt with four stages. Returns the tokens, and what they took.
fn staged(model: &Path, count: usize, sampling: &Sampling) -> Result<(Vec<u32>, Generated)> {
    let link = Link::parse("100mbit,5ms").context("a link")?;
    let config = TrainConfig { link, ..config(1337, false) };
    let connections = StagedModel::connect(&config.run_settings(), STAGES, None)?;
    let rate = config.compute_rate;
    let rank = |connection| -> Result<Option<(Vec<u32>, Generated)>> {
        let open = || Ok(OpenedPart { weights: Weights::open(model)?, step: None, device: Device::cpu(1)? });
        let stage = StagedModel::load(open(), connection, rate)?;
        if !stage.leads() {
            return Ok(stage.follow().map(|()| None)?);
        }
        let mut tokens = Vec::new();
        let generated = stage.generate(&prompt(), count, sampling, |token| {
            tokens.push(token);
            true
        })?;
        Ok(Some((tokens, generated)))
    };
    let all: Vec<Result<_>> = std::thread::scope(|scope| {
        let ranks: Vec<_> = connections.into_iter().map(|one| scope.spawn(move || rank(one))).collect();
        ranks.into_iter().map(|rank| rank.join().expect("no rank panics")).collect()
    });
    let all = all.into_iter().collect::<Result<Vec<_>>>()?;
    all.into_iter().flatten().next().context("no rank leads")
}

fn run(report: &mut Report<'_>, options: &Options) -> Result<()> {
    let folder = tempfile::tempdir().context("failed to make a temporary folder")?;
    let text: Vec<_> = (0..3000_u64).map(|i| format!("{} is the square of {i}.", i * i)).collect();
    std::fs::write(folder.path().join("text.txt"), text.join(" ")).context("failed to write the text")?;
    for (rank, (predicted, peak)) in
        memory(report.seed(), options.quick, folder.path())?.into_iter().enumerate()
    {
        report.row(&format!("rank {rank}: memory"), peak / 1e6, "MB", Threshold::None)?;
        let over = peak / predicted;
        report.row(&format!("rank {rank}: of what is predicted"), over, "", Threshold::AtMost(1.05))?;
    }
    let steps = settings(report.seed(), options.quick, folder.path()).steps;
    let model = folder.path().join(RUN).join(format!("step-{steps:08}"));
    let mut weights = Weights::open(&model)?;
    let whole = Stage::whole(weights.spec(), &Device::cpu(1)?)?;
    let params = whole.load(&mut weights)?;
    report.row("the whole model's weights", params.shape().len() as f64 * 4e-6, "MB", Threshold::None)?;
    let (count, sampling) = (if options.quick { 40 } else { 120 }, Sampling::default());
    let mut alone = Vec::new();
    generate(&whole, &params, &prompt(), count, &sampling, |token| {
        alone.push(token);
        true
    })?;
    let (tokens, generated) = staged(&model, count, &sampling)?;
    let other =
        alone.iter().zip(&tokens).filter(|(a, b)| a != b).count() + alone.len().abs_diff(tokens.len());
    report.row("tokens that differ from those of one process", other as f64, "", Threshold::AtMost(0.0))?;
    let predicted = generated.predicted.context("simulated links are declared")?;
    let each = |time| generated.per_token(time).as_secs_f64() * 1e3;
    report.row("time per token", each(generated.time), "ms", Threshold::None)?;
    report.row("time per token, predicted", each(predicted), "ms", Threshold::None)?;
    let error = (each(generated.time) / each(predicted) - 1.0).abs() * 100.0;
    report.row("error of the prediction", error, "%", Threshold::AtMost(5.0))
}
