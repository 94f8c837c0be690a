//! A model whose training needs more memory than the machine has: GPT-2 XL's shape on four processes, with the
//! optimizer's state on disk, beside one process alone that recomputes every block.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::binary::farflung;
use crate::harness::{Bench, Options, Report, Threshold};
use crate::machine::{now, peak_of};

pub(crate) const BENCH: Bench = Bench {
    name: "larger-than-one",
    claim: "GPT-2 XL's shape (1.5B, 24 GB of state in f32) trains on one machine of 24 GB: on four processes of at \
            most 3.5 GiB each with the optimizer's state on disk, with the losses of one process alone",
    source: "Rajbhandari et al. 2021, ZeRO-Infinity; shared/facts/larger-than-a-machine.md 4",
    seed: 1337,
    run,
};

const GIB: f64 = (1_u64 << 30) as f64;
/// Bytes of the disk that a run needs.
const NEEDED: u64 = 40_000_000_000;
const STEPS: usize = 3;
/// Layers of the four stages: the first one also has the token table, and the last one a copy of it.
const LAYERS: [&str; 4] = ["0..10", "10..24", "24..38", "38..48"];

/// Flags of both runs: eight sequences of 128 tokens in a step.
const FLAGS: &str = "--model gpt2-xl --tokenizer byte --vocab 50257 --context 128 --warmup 0 --lr 1e-4 --eval-every 0 --eval-batches 1 --sample-tokens 0 \
                     --state disk --save-end false --deadline 600s --seed 1337";

/// What a plan decides, for a run without one.
const PLANNED: [&str; 6] = ["--batch", "1", "--recompute", "each-layer", "--codec", "none"];

/// Returns the words of `farflung train` in a folder.
fn words<'a>(more: &'a [&'a str], out: &'a str) -> Vec<&'a str> {
    let own = ["--steps", "3", "--out", out];
    ["train"].into_iter().chain(FLAGS.split_whitespace()).chain(own).chain(more.iter().copied()).collect()
}

/// A run, with the most resident memory of each of its processes.
struct Watched {
    seconds: f64,
    peaks: Vec<f64>,
}

/// Runs a command to its end, and watches the memory of its processes that train: it, or its children.
fn watched(mut command: Command, children: bool) -> Result<Watched> {
    let begun = now();
    let mut child = command.stderr(Stdio::piped()).spawn().context("failed to start `farflung`")?;
    let mut peaks = BTreeMap::new();
    let status = loop {
        for id in if children { children_of(&child) } else { vec![child.id()] } {
            let peak: &mut u64 = peaks.entry(id).or_default();
            *peak = peak_of(id).unwrap_or(0).max(*peak);
        }
        if let Some(status) = child.try_wait()? {
            break status;
        }
        thread::sleep(Duration::from_millis(100));
    };
    let mut said = String::new();
    std::io::Read::read_to_string(&mut child.stderr.take().context("stderr is piped")?, &mut said)?;
    ensure!(status.success(), "the run failed, {status}: {said}");
    Ok(Watched {
        seconds: begun.elapsed().as_secs_f64(),
        peaks: peaks.into_values().map(|bytes| bytes as f64).collect(),
    })
}

/// Returns the processes that a process has started.
fn children_of(parent: &Child) -> Vec<u32> {
    let text = fs::read_to_string(format!("/proc/{0}/task/{0}/children", parent.id())).unwrap_or_default();
    text.split_whitespace().filter_map(|id| id.parse().ok()).collect()
}

/// Returns the training losses of a run.
fn losses(out: &Path) -> Result<Vec<f64>> {
    let text = fs::read_to_string(out.join("metrics.jsonl"))?;
    let loss = |line: &str| serde_json::from_str::<Value>(line).ok()?["train_loss"].as_f64();
    let all: Vec<f64> = text.lines().filter_map(loss).collect();
    ensure!(all.len() == STEPS, "{} has {} losses", out.display(), all.len());
    Ok(all)
}

/// Checks that the disk has room for a run.
fn check_room(folder: &Path) -> Result<()> {
    let known = rustix::fs::statvfs(folder)?;
    let free = known.f_bavail * known.f_frsize;
    ensure!(free >= NEEDED, "{} has {free} bytes free, expected {NEEDED}: set TMPDIR", folder.display());
    Ok(())
}

fn run(report: &mut Report<'_>, options: &Options) -> Result<()> {
    if options.quick {
        let metric = "runs: none with --quick, which take 20 minutes and 40 GB of disk";
        return report.row(metric, 0.0, "1", Threshold::None);
    }
    let folder = tempfile::tempdir().context("failed to make a temporary folder")?;
    check_room(folder.path())?;
    let at = |name: &str| folder.path().join(name).display().to_string();

    // The planner cuts by time, and here memory decides.
    let stages = ["--workers", "4", "--stages", "4", "--microbatches", "8", "--threads", "1"];
    let (cut, divided) = (at("plan.toml"), at("divided"));
    let printed = farflung(&words(&[&stages[..], &PLANNED, &["--print-plan"]].concat(), &divided))?
        .stdout(Stdio::piped())
        .output()
        .context("failed to start `farflung`")?;
    let mut plan = String::from_utf8_lossy(&printed.stdout).into_owned();
    for (number, layers) in LAYERS.iter().enumerate() {
        let from = format!("layers = \"{}..{}\"", 12 * number, 12 * number + 12);
        ensure!(plan.contains(&from), "the plan has no {from}: {plan}");
        plan = plan.replacen(&from, &format!("layers = '{layers}'"), 1);
    }
    fs::write(&cut, plan.replace('\'', "\""))?;
    let planned = ["--plan", &cut, "--threads", "1"];
    let all = [&["launch", "-n", "4", "--"][..], &words(&planned, &divided)].concat();
    let four = watched(farflung(&all)?, true)?;
    let of_four = losses(Path::new(&divided))?;
    report.progress(&format!("four processes: {:.0} s, losses {of_four:?}", four.seconds))?;
    fs::remove_dir_all(&divided)?;

    check_room(folder.path())?;
    let alone = at("alone");
    let flags = ["--workers", "1", "--accumulate", "8", "--threads", "2", "--transport", "memory"];
    let one = watched(farflung(&words(&[&flags[..], &PLANNED].concat(), &alone))?, false)?;
    let of_one = losses(Path::new(&alone))?;
    report.progress(&format!("one process: {:.0} s, losses {of_one:?}", one.seconds))?;

    let most = four.peaks.iter().copied().fold(0.0, f64::max);
    ensure!(four.peaks.len() == 4, "four processes train, not {}", four.peaks.len());
    report.row(
        "resident memory of the largest of four processes",
        most / GIB,
        "GiB",
        Threshold::AtMost(3.5),
    )?;
    report.row(
        "of the smallest",
        four.peaks.iter().copied().fold(f64::MAX, f64::min) / GIB,
        "GiB",
        Threshold::None,
    )?;
    let alone = one.peaks.first().copied().unwrap_or(f64::NAN);
    report.row("resident memory of one process alone", alone / GIB, "GiB", Threshold::None)?;
    let off = of_four.iter().zip(&of_one).map(|(a, b)| (a / b - 1.0).abs()).fold(0.0, f64::max);
    report.row("difference of losses, relative", off, "1", Threshold::AtMost(1e-5))?;
    report.row(
        "three steps on four processes, with evaluation",
        four.seconds / 60.0,
        "min",
        Threshold::None,
    )?;
    report.row("on one process", one.seconds / 60.0, "min", Threshold::None)?;
    let both = (four.seconds + one.seconds) / 60.0;
    report.row("both runs after each other", both, "min", Threshold::AtMost(25.0))
}
