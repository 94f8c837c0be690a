//! Compares estimates of memory with measured peaks of the real binary, and starts runs that are too large for
//! any machine.

#![cfg(target_os = "linux")]
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use farflung::train::needed_memory;
use farflung::{TrainConfig, TrainFlags};

fn farflung(args: &str, out: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_farflung"));
    command.arg("train").args(args.split(' ')).arg("--out").arg(out).env_remove("RUST_LOG");
    command
}

/// Waits for a process and returns its peak of resident memory in bytes, polled while it runs. Pages of the
/// binary are not counted: the system drops them when memory is short, and a debug build with a GPU backend has
/// tens of megabytes more.
fn peak(mut child: Child) -> (u64, Output) {
    let path = format!("/proc/{}/status", child.id());
    let (mut most, mut binary) = (0, 0);
    while child.try_wait().unwrap().is_none() {
        let status = std::fs::read_to_string(&path).unwrap_or_default();
        let kilobytes = |name| -> u64 {
            let line = status.lines().find_map(|line| line.strip_prefix(name));
            line.and_then(|line| line.trim().strip_suffix(" kB")?.parse().ok()).unwrap_or(0)
        };
        most = most.max(kilobytes("VmHWM:"));
        binary = binary.max(kilobytes("RssFile:"));
        std::thread::sleep(Duration::from_millis(2));
    }
    ((most - binary) * 1024, child.wait_with_output().unwrap())
}

fn config(args: &str) -> TrainConfig {
    use clap::{Args, FromArgMatches};
    let command = TrainFlags::augment_args(clap::Command::new("train"));
    let matches = command.get_matches_from(std::iter::once("train").chain(args.split(' ')));
    TrainFlags::from_arg_matches(&matches).unwrap().resolve().unwrap()
}

/// The estimates of these runs were 0.80 to 1.15 times the measured peaks, in debug builds on two Intel cores.
/// Above 1.25, a run that fits could be refused.
#[test]
fn estimates_are_near_what_runs_take() {
    let folder = tempfile::tempdir().unwrap();
    let data = folder.path().join("text.txt");
    let text: Vec<_> = (0..30_000_u64).map(|i| format!("{} is the square of {i}.", i * i)).collect();
    std::fs::write(&data, text.join(" ")).unwrap();
    let always = format!(
        "--data {} --steps 2 --eval-batches 1 --threads 1 --sample-tokens 4 --quiet true",
        data.display()
    );
    let (deep, wide) = (
        "--layers 8 --dim 128 --workers 1 --batch 32",
        "--layers 2 --heads 8 --dim 384 --context 32 --batch 1",
    );
    let cases = [
        "--layers 1 --heads 2 --dim 16 --context 16 --batch 1 --workers 1".to_owned(),
        "--workers 4".to_owned(),
        "--layers 1 --heads 2 --dim 16 --context 16 --batch 1 --workers 64 --transport memory".to_owned(),
        deep.to_owned(),
        format!("{deep} --recompute 6"),
        format!("{wide} --workers 1"),
        format!("{wide} --workers 2"),
        format!("{wide} --workers 2 --codec none"),
        format!("{wide} --workers 2 --codec topk:0.01 --optimizer sgd --momentum 0"),
        format!("{wide} --workers 2 --sync diloco --sync-every 1"),
        format!("{wide} --workers 3 --zero 1"),
        format!("{wide} --workers 3 --zero 3"),
        "--tokenizer gpt2 --dim 32 --heads 2 --batch 8 --workers 1".to_owned(),
        "--tokenizer gpt2 --dim 32 --heads 2 --batch 8 --workers 1 --precision bf16".to_owned(),
        format!("{wide} --workers 2 --stages 2"),
        format!("{wide} --workers 2 --stages 2 --microbatches 64 --sampling epochs --boundary aqsgd:4"),
        "--layers 8 --dim 128 --workers 4 --stages 4 --schedule zb-h1 --microbatches 8 --batch 8".to_owned(),
        "--layers 8 --dim 128 --workers 2 --stages 2 --schedule gpipe --microbatches 8 --batch 8".to_owned(),
    ];
    let mut off = Vec::new();
    for (i, case) in cases.iter().enumerate() {
        let args = format!("{always} {case}");
        let mut command = farflung(&args, &folder.path().join(i.to_string()));
        let child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let (measured, output) = peak(child);
        assert!(output.status.success(), "{case}: {}", String::from_utf8_lossy(&output.stderr));
        let ratio = needed_memory(&config(&args), None).unwrap() as f64 / measured as f64;
        println!("{ratio:.2} of {} MB: {case}", measured / 1_000_000);
        if !(0.6..1.25).contains(&ratio) {
            off.push(format!("{ratio:.2} of {measured} bytes: {case}"));
        }
    }
    assert!(off.is_empty(), "{off:#?}");
}

#[test]
fn what_no_machine_could_hold_is_refused_before_it_is_begun() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("run");
    for (args, said) in [
        ("--batch 1000000000", "activations"),
        ("--model gpt3-175b --tokenizer gpt2", "checkpoint"),
        ("--workers 100000", "`workers` is 100000, expected at most 2048"),
        ("--workers 2000", "codec residuals"),
        ("--threads 100000", "`threads` is 100000, expected at most "),
        ("--stages 2 --microbatches 4000000000", "`microbatches`"),
        ("--accumulate 1000000000000000000", "losses of a step"),
        ("--eval-batches 1000000000000000000", "evaluation"),
    ] {
        let output = farflung(args, &out).output().unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{args}: {stderr}");
        assert!(stderr.starts_with("error: ") && stderr.contains(said), "{args}: {stderr}");
        assert!(output.stdout.is_empty() && !out.exists(), "{args}");
    }
    let mut joined = farflung("--steps 1", &out);
    let output = joined.env("RANK", "0").env("WORLD_SIZE", "4000000000").output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(stderr.contains("WORLD_SIZE is `4000000000`, expected at most 2048 processes"), "{stderr}");
    let launch = ["launch", "-n", "2049", "--", "train"];
    let output = Command::new(env!("CARGO_BIN_EXE_farflung")).args(launch).output().unwrap();
    assert_eq!(output.status.code(), Some(2), "{output:?}");
}
