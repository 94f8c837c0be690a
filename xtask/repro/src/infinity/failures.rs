//! Disks that are too small for two generations, and failures of each write and flush of a step.

use std::fs;
use std::path::Path;
use std::process::{Output, Stdio};

use anyhow::{Context, Result, ensure};

use crate::binary::{behind, failing, farflung};
use crate::disk::file_system::FileSystem;
use crate::harness::{Report, Threshold};

/// The step within which the disk fails.
const STEP: u64 = 4;
const STEPS: &str = "6";

/// Runs a small GPT with its state on a file system, behind another command such as strace.
fn train(system: &FileSystem, text: &Path, wrapper: &[String]) -> Result<Output> {
    let (text, out) = (text.display().to_string(), FileSystem::path("run").display().to_string());
    let common = "train --layers 2 --heads 2 --dim 32 --context 16 --batch 2 --warmup 0 --threads 1 --eval-batches 1 \
                  --sample-tokens 0 --codec none --workers 1 --transport memory --state disk --resume auto --steps";
    let mut words: Vec<&str> = common.split_whitespace().collect();
    words.extend([STEPS, "--data", &text, "--out", &out]);
    let mut inside = system.inside(&behind(wrapper, farflung(&words)?));
    inside.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    inside.output().context("failed to start `nsenter`, from util-linux")
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

pub(super) fn run(report: &mut Report<'_>, quick: bool) -> Result<()> {
    let folder = tempfile::tempdir().context("failed to make a temporary folder")?;
    let text = folder.path().join("text.txt");
    fs::write(&text, "the quick brown fox jumps over the lazy dog. ".repeat(500))?;
    let end = format!("step-{STEPS:0>8}/model.safetensors");
    let weights = |system: &FileSystem| fs::read(system.outside(&FileSystem::path("run")).join(&end));

    let system = FileSystem::new("size=64m")?;
    let output = train(&system, &text, &[])?;
    ensure!(output.status.success(), "a run with room failed: {}", said(&output));
    let expected = weights(&system)?;
    let state = fs::metadata(system.outside(&FileSystem::path("run/state/part-0.state")))?.len();

    // Room for the records of a run, but not for both generations.
    let system = FileSystem::new(&format!("size={}", state * 3 / 4))?;
    let output = train(&system, &text, &[])?;
    let is_refused = output.status.code() == Some(2)
        && said(&output).contains(&format!("needs {state} bytes for two generations"))
        && !system.outside(&FileSystem::path("run/metrics.jsonl")).exists();
    if !is_refused {
        report.progress(&format!("too small: {}", said(&output)))?;
    }
    let metric = "file systems smaller than two generations that were not refused with the bytes";
    report.row(metric, f64::from(u8::from(!is_refused)), "1", Threshold::AtMost(0.0))?;

    let path = FileSystem::path("run/state/part-0.state");
    // Of the thread that writes: a header, three arrays and a record; two flushes.
    let (writes, flushes) = (5, 2);
    let (mut tried, mut unsaid, mut lost, mut differing) = (0.0, 0.0, 0.0, 0.0);
    for (call, count) in [("pwrite64", writes), ("fdatasync", flushes)] {
        for nth in 1..=count {
            for error in ["ENOSPC", "EIO"] {
                if quick && nth % 2 == 0 {
                    continue;
                }
                let system = FileSystem::new("size=64m")?;
                let output = train(&system, &text, &failing(&path, (call, (STEP - 1) * count + nth), error))?;
                let text_of = said(&output);
                let action = if call == "pwrite64" { "write" } else { "flush" };
                let named =
                    format!("failed to {action} {}", FileSystem::path("run/state/part-0.state").display());
                let is_said = output.status.code() == Some(1)
                    && text_of.contains(&named)
                    && (action == "flush" || text_of.contains(" bytes at "));
                let again = train(&system, &text, &[])?;
                let resumed = said(&again);
                let whole = [STEP - 1, STEP].map(|step| format!("resumed at step {step}\n"));
                let is_whole = again.status.success() && whole.iter().any(|line| resumed.contains(line));
                let is_same = weights(&system).is_ok_and(|found| found == expected);
                let count = |is: bool| f64::from(u8::from(is));
                tried += 1.0;
                unsaid += count(!is_said);
                lost += count(!is_whole);
                differing += count(!is_same);
                if !is_said || !is_whole || !is_same {
                    report.progress(&format!("{call} {nth} with {error}: {text_of}\n{resumed}"))?;
                }
            }
        }
    }
    let zero = Threshold::AtMost(0.0);
    report.row("writes and flushes of a step that failed with ENOSPC or EIO", tried, "1", Threshold::None)?;
    report.row(
        "failures without the file, or the bytes of the write, or with another exit code",
        unsaid,
        "1",
        zero,
    )?;
    report.row("failures after which the last generation was not intact", lost, "1", zero)?;
    report.row("failures after which the run ended with other bits", differing, "1", zero)
}
