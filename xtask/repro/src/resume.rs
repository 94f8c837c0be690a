//! Checks that a run that is killed and resumed several times ends like one that was never stopped.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use farflung::base::Philox;
use farflung::{StepMetrics, metrics};

use crate::binary::{farflung, finish};
use crate::harness::{Bench, Options, Report, Threshold};

pub(crate) const BENCH: Bench = Bench {
    name: "resume",
    claim: "a run killed with SIGKILL at random moments and resumed ends with the same bits as one never \
            killed; lost and swapped folders, a finished run, changed settings and another number of workers \
            are handled",
    source: "ours",
    seed: 1337,
    run,
};

const WORKERS: usize = 4;
const STEPS: u64 = 60;

/// Names of methods, and their flags.
const CASES: [(&str, &[&str]); 5] = [
    ("ddp", &["--sync", "ddp", "--codec", "none"]),
    ("diloco, int8 + error feedback", &["--sync", "diloco", "--sync-every", "4", "--codec", "int8"]),
    ("diloco", &["--sync", "diloco", "--sync-every", "4", "--codec", "none"]),
    ("ddp, int8 + error feedback", &["--sync", "ddp", "--codec", "int8"]),
    ("ddp, PowerSGD", &["--sync", "ddp", "--codec", "powersgd:2"]),
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
            // The kills are spread over equal parts of the run, each up to 20 ms after the end of a step.
            let part = (STEPS - 4) / kills;
            let step = 1 + kill * part + random.below(2 * kill, part);
            let late = Duration::from_micros(random.below(2 * kill + 1, 20_000));
            between.push(kill_after(&mut train(flags, &killed)?, &killed, step, late)?);
        }
        finish(&mut train(flags, &killed)?)?;

        let files = differing_files(&alone, &killed, STEPS)?;
        report.row(&format!("{name}: kills"), kills as f64, "", Threshold::AtLeast(1.0))?;
        let last = between.last().copied().unwrap_or(0);
        report.row(
            &format!("{name}: step of the last kill, of {STEPS}"),
            last as f64,
            "",
            Threshold::None,
        )?;
        let metric = format!("{name}: models and optimizer states that differ, of {}", 2 * WORKERS);
        report.row(&metric, files as f64, "files", Threshold::AtMost(0.0))?;
        let losses = differing_losses(&log(&alone)?, &log(&killed)?);
        report.row(&format!("{name}: losses that differ"), losses as f64, "steps", Threshold::AtMost(0.0))?;
    }
    other_ways(report, options, folder.path())
}

/// Steps of a run before it is changed. Its learning rate is constant, so that a run with more steps begins in
/// the same way.
const HALF: u64 = 10;

/// Tests resumes in which the run or its folders have changed.
fn other_ways(report: &mut Report<'_>, options: &Options, folder: &Path) -> Result<()> {
    let flags = ["--codec", "none", "--lr-schedule", "constant"];
    let half = HALF.to_string();
    let train = |out: &Path, more: &[&str]| train(&[&flags[..], more].concat(), out);
    let (whole, first) = (folder.join("whole"), folder.join("first"));
    finish(&mut train(&whole, &["--steps", "20"])?)?;
    finish(&mut train(&first, &["--steps", &half])?)?;
    let copy = |name: &str| -> Result<PathBuf> {
        let to = folder.join(name);
        let copied = Command::new("cp").arg("-r").args([&first, &to]).status().context("failed to copy")?;
        ensure!(copied.success(), "failed to copy {}", first.display());
        Ok(to)
    };
    let said = |command: &mut Command| -> Result<(Option<i32>, String)> {
        let output = command.output().context("failed to start `farflung`")?;
        Ok((output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned()))
    };

    for lost in 0..if options.quick { 2 } else { WORKERS } {
        let run = copy(&format!("lost-{lost}"))?;
        let folder = run.join(rank_folder(lost));
        for entry in std::fs::read_dir(&folder)?.filter_map(Result::ok).filter(|e| e.file_name() != "ranks") {
            let path = entry.path();
            if path.is_dir() { std::fs::remove_dir_all(path)? } else { std::fs::remove_file(path)? }
        }
        finish(&mut train(&run, &["--steps", "20"])?)?;
        let files = differing_files(&whole, &run, 20)?;
        let metric = format!("folder of rank {lost} lost: models and optimizer states that differ");
        report.row(&metric, files as f64, "files", Threshold::AtMost(0.0))?;
    }

    let run = copy("swapped")?;
    let (one, two) = (run.join(rank_folder(1)), run.join(rank_folder(2)));
    std::fs::rename(&one, run.join("aside"))?;
    std::fs::rename(&two, &one)?;
    std::fs::rename(run.join("aside"), &two)?;
    let (code, text) = said(&mut train(&run, &["--steps", "20"])?)?;
    let refused = code == Some(2) && text.contains("expected one of rank");
    report.row(
        "swapped folders: rejected, with the rank that owns them",
        f64::from(u8::from(refused)),
        "",
        Threshold::AtLeast(1.0),
    )?;

    let run = copy("finished")?;
    let before = std::fs::read(run.join("report.json"))?;
    let (code, text) = said(&mut train(&run, &["--steps", &half])?)?;
    let left = code == Some(0)
        && text.contains("there is nothing to do")
        && std::fs::read(run.join("report.json"))? == before;
    report.row(
        "a finished run: not changed, and reported",
        f64::from(u8::from(left)),
        "",
        Threshold::AtLeast(1.0),
    )?;
    let (code, text) = said(&mut train(&run, &["--steps", "5"])?)?;
    let named = code == Some(2) && text.contains(&run.join(format!("step-{HALF:08}")).display().to_string());
    report.row(
        "fewer steps than are done: rejected",
        f64::from(u8::from(named)),
        "",
        Threshold::AtLeast(1.0),
    )?;

    let shapes = [("--heads", "4"), ("--dim", "32"), ("--context", "16"), ("--layers", "3")];
    for (flag, value) in shapes.into_iter().take(if options.quick { 1 } else { 4 }) {
        let (code, text) = said(&mut train(&copy(&flag[2..])?, &["--steps", "20", flag, value])?)?;
        let refused = code == Some(2) && text.contains(&format!("`{}`", &flag[2..]));
        let metric = format!("{flag} changed: rejected by name");
        report.row(&metric, f64::from(u8::from(refused)), "", Threshold::AtLeast(1.0))?;
    }
    let (code, text) = said(&mut train(&copy("beta2")?, &["--steps", "20", "--beta2", "0.5"])?)?;
    let told = code == Some(0) && text.contains("warning: ") && text.contains("`beta2` is 0.5, was 0.95");
    report.row("--beta2 changed: reported", f64::from(u8::from(told)), "", Threshold::AtLeast(1.0))?;

    let run = copy("workers")?;
    finish(&mut train(&run, &["--steps", "20", "--workers", "2", "--batch", "8"])?)?;
    let losses = |run: &Path| -> Result<Vec<f64>> { Ok(log(run)?.iter().map(|m| m.train_loss).collect()) };
    let off = crate::workers::farthest(&losses(&run)?, &losses(&whole)?);
    report.row("4 workers, then 2: largest difference of losses", off, "nats", Threshold::AtMost(1e-5))
}

/// Returns a rank's folder, relative to the run's folder.
fn rank_folder(rank: usize) -> PathBuf {
    if rank == 0 { PathBuf::new() } else { PathBuf::from(format!("ranks/rank-{rank:05}")) }
}

/// Returns the command of a small run with a checkpoint every 5 steps, which resumes where it was stopped.
/// `flags` override the flags that it needs.
fn train(flags: &[&str], out: &Path) -> Result<Command> {
    let (steps, workers) = (STEPS.to_string(), WORKERS.to_string());
    let needed = [
        ("--layers", "2"),
        ("--heads", "2"),
        ("--dim", "64"),
        ("--context", "32"),
        ("--batch", "4"),
        ("--warmup", "10"),
        ("--threads", "1"),
        ("--eval-every", "0"),
        ("--eval-batches", "4"),
        ("--sample-tokens", "0"),
        ("--checkpoint-every", "5"),
        ("--resume", "auto"),
        ("--steps", &steps),
        ("--workers", &workers),
    ];
    let mut command = farflung(&["train"])?;
    command.args(flags).arg("--out").arg(out).stderr(Stdio::piped());
    for (flag, value) in needed.into_iter().filter(|(flag, _)| !flags.contains(flag)) {
        command.args([flag, value]);
    }
    Ok(command)
}

/// Kills a run some time after it has logged a step. Returns the last step that it logged.
fn kill_after(command: &mut Command, out: &Path, step: u64, late: Duration) -> Result<u64> {
    let mut child = command.stderr(Stdio::null()).spawn().context("failed to start `farflung`")?;
    while last_step(out) < step {
        if let Some(status) = child.try_wait().context("failed to check whether `farflung` has ended")? {
            anyhow::bail!("`farflung train` ended before step {step}: {status}");
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    std::thread::sleep(late);
    // This is SIGKILL on Unix.
    child.kill().context("failed to kill `farflung`")?;
    let status = child.wait().context("failed to wait for `farflung`")?;
    ensure!(!status.success(), "the run ended before it was killed");
    Ok(last_step(out))
}

/// Returns the last step whose line is complete; 0 before the first.
fn last_step(out: &Path) -> u64 {
    // The last line may be incomplete, which `metrics::read` would reject.
    let text = std::fs::read_to_string(out.join("metrics.jsonl")).unwrap_or_default();
    let mut lines =
        text.lines().rev().filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok());
    lines.find_map(|line| line["step"].as_u64()).unwrap_or(0)
}

fn log(out: &Path) -> Result<Vec<StepMetrics>> {
    Ok(metrics::read(&out.join("metrics.jsonl"))?)
}

/// Counts the steps whose losses differ in any bit.
fn differing_losses(a: &[StepMetrics], b: &[StepMetrics]) -> usize {
    let key = |m: &StepMetrics| (m.step, m.train_loss.to_bits(), m.val_loss.map(f64::to_bits));
    let pairs = a.iter().zip(b).filter(|(a, b)| key(a) != key(b)).count();
    pairs + a.len().abs_diff(b.len())
}

/// Counts the files that differ between the last checkpoints of all ranks.
fn differing_files(a: &Path, b: &Path, step: u64) -> Result<usize> {
    let read =
        |path: PathBuf| std::fs::read(&path).with_context(|| format!("failed to read {}", path.display()));
    let mut differing = 0;
    for rank in 0..WORKERS {
        for name in ["model.safetensors", "optimizer.safetensors"] {
            let file = rank_folder(rank).join(format!("step-{step:08}")).join(name);
            differing += usize::from(read(a.join(&file))? != read(b.join(&file))?);
        }
    }
    Ok(differing)
}
