//! A run that is killed and resumed, as often as it takes, ends where one that was left alone ends.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use farflung::base::Philox;
use farflung::{StepMetrics, metrics};

use crate::binary::farflung;
use crate::harness::{Bench, Mark, Options, Report};

pub(crate) const BENCH: Bench = Bench {
    name: "resume",
    claim: "a run killed with SIGKILL at random moments and resumed ends with the same bits as one never killed",
    source: "ours",
    seed: 1337,
    run,
};

const WORKERS: usize = 4;
const STEPS: u64 = 60;

/// What is trained: how workers agree, and the flags for it.
const CASES: [(&str, &[&str]); 4] = [
    ("ddp", &["--sync", "ddp", "--codec", "none"]),
    ("diloco, int8 + error feedback", &["--sync", "diloco", "--sync-every", "4", "--codec", "int8"]),
    ("diloco", &["--sync", "diloco", "--sync-every", "4", "--codec", "none"]),
    ("ddp, int8 + error feedback", &["--sync", "ddp", "--codec", "int8"]),
];

fn run(report: &mut Report<'_>, options: &Options) -> Result<()> {
    let (cases, kills) = if options.quick { (2, 1) } else { (CASES.len(), 5) };
    let folder = tempfile::tempdir().context("failed to make a temporary folder")?;
    for (index, (name, flags)) in CASES.iter().take(cases).enumerate() {
        let at = |which: &str| folder.path().join(format!("{index}-{which}"));
        let (alone, killed) = (at("alone"), at("killed"));
        finish(&mut train(flags, &alone)?)?;

        let random = Philox::new(report.seed(), index as u64);
        let mut between = Vec::new();
        for kill in 0..kills {
            // One moment in each of equal parts of the run, and up to 20 ms past the end of a step.
            let part = (STEPS - 4) / kills;
            let step = 1 + kill * part + random.below(2 * kill, part);
            let late = Duration::from_micros(random.below(2 * kill + 1, 20_000));
            between.push(kill_after(&mut train(flags, &killed)?, &killed, step, late)?);
        }
        finish(&mut train(flags, &killed)?)?;

        let files = differing_files(&alone, &killed)?;
        report.row(&format!("{name}: kills"), kills as f64, "", Mark::AtLeast(1.0))?;
        let last = between.last().copied().unwrap_or(0);
        report.row(&format!("{name}: step of the last kill, of {STEPS}"), last as f64, "", Mark::None)?;
        let metric = format!("{name}: models and optimizer states that differ, of {}", 2 * WORKERS);
        report.row(&metric, files as f64, "files", Mark::AtMost(0.0))?;
        let losses = differing_losses(&log(&alone)?, &log(&killed)?);
        report.row(&format!("{name}: losses that differ"), losses as f64, "steps", Mark::AtMost(0.0))?;
    }
    Ok(())
}

/// A small run with a checkpoint every 5 steps that goes on where it was cut off.
fn train(flags: &[&str], out: &Path) -> Result<Command> {
    let mut command =
        farflung(&["train", "--layers", "2", "--heads", "2", "--dim", "64", "--context", "32"])?;
    command.args([
        "--batch",
        "4",
        "--warmup",
        "10",
        "--threads",
        "1",
        "--eval-every",
        "0",
        "--eval-batches",
        "4",
    ]);
    command.args(["--sample-tokens", "0", "--checkpoint-every", "5", "--resume", "auto"]);
    command.args(["--steps", &STEPS.to_string(), "--workers", &WORKERS.to_string()]);
    command.args(flags).arg("--out").arg(out).stderr(Stdio::piped());
    Ok(command)
}

/// Runs it to its end.
fn finish(command: &mut Command) -> Result<()> {
    let output = command.output().context("failed to start `farflung`")?;
    let message = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "`farflung train`, {}: {message}", output.status);
    Ok(())
}

/// Kills the run some time after it has logged a step. Gives the last step that it logged.
fn kill_after(command: &mut Command, out: &Path, step: u64, late: Duration) -> Result<u64> {
    let mut child = command.stderr(Stdio::null()).spawn().context("failed to start `farflung`")?;
    while last_step(out) < step {
        if let Some(status) = child.try_wait().context("failed to ask for `farflung`")? {
            anyhow::bail!("`farflung train` ended before step {step}: {status}");
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    std::thread::sleep(late);
    // SIGKILL where there is one.
    child.kill().context("failed to kill `farflung`")?;
    let status = child.wait().context("failed to wait for `farflung`")?;
    ensure!(!status.success(), "the run was over before it was killed");
    Ok(last_step(out))
}

/// The last step that was logged whole; 0 before the first.
fn last_step(out: &Path) -> u64 {
    // A last line that is only half there is to be expected: `metrics::read` would refuse it.
    let text = std::fs::read_to_string(out.join("metrics.jsonl")).unwrap_or_default();
    let mut lines =
        text.lines().rev().filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok());
    lines.find_map(|line| line["step"].as_u64()).unwrap_or(0)
}

fn log(out: &Path) -> Result<Vec<StepMetrics>> {
    Ok(metrics::read(&out.join("metrics.jsonl"))?)
}

/// Steps whose losses are not the same bits.
fn differing_losses(a: &[StepMetrics], b: &[StepMetrics]) -> usize {
    let key = |m: &StepMetrics| (m.step, m.train_loss.to_bits(), m.val_loss.map(f64::to_bits));
    let pairs = a.iter().zip(b).filter(|(a, b)| key(a) != key(b)).count();
    pairs + a.len().abs_diff(b.len())
}

/// Files of the last checkpoints of all ranks that are not the same.
fn differing_files(a: &Path, b: &Path) -> Result<usize> {
    let read =
        |path: PathBuf| std::fs::read(&path).with_context(|| format!("failed to read {}", path.display()));
    let mut differing = 0;
    for rank in 0..WORKERS {
        let folder = if rank == 0 { PathBuf::new() } else { PathBuf::from(format!("ranks/rank-{rank:05}")) };
        for name in ["model.safetensors", "optimizer.safetensors"] {
            let file = folder.join(format!("step-{STEPS:08}")).join(name);
            differing += usize::from(read(a.join(&file))? != read(b.join(&file))?);
        }
    }
    Ok(differing)
}
