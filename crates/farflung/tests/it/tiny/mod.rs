//! The binary on very short runs: two workers with a tiny model.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;

/// A folder with a text, for a run.
pub(crate) struct Run(tempfile::TempDir);

impl Run {
    pub(crate) fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("text.txt"), "the quick brown fox ".repeat(500)).unwrap();
        Self(folder)
    }

    pub(crate) fn at(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Returns the arguments of `train`: `args`, and those of a tiny run of two workers that `args` does not
    /// set.
    pub(crate) fn args(&self, args: &str) -> Vec<String> {
        let workers = if args.split_whitespace().any(|arg| arg == "--workers") { "" } else { "--workers 2" };
        let command = ["train".to_owned()];
        command.into_iter().chain(self.flags(&format!("{args} {workers}"))).collect()
    }

    /// Returns `args`, and the flags of a tiny run that `args` does not set.
    pub(crate) fn flags(&self, args: &str) -> Vec<String> {
        let data = self.at("text.txt").display().to_string();
        let needed = [
            ("--layers", "2"),
            ("--heads", "2"),
            ("--dim", "8"),
            ("--context", "8"),
            ("--batch", "1"),
            ("--warmup", "0"),
            ("--threads", "1"),
            ("--eval-every", "1"),
            ("--eval-batches", "1"),
            ("--sample-tokens", "0"),
            ("--data", &data),
        ];
        let given: Vec<&str> = args.split_whitespace().collect();
        let needed = needed.into_iter().filter(|(flag, _)| !given.contains(flag));
        let needed = needed.flat_map(|(flag, value)| [flag, value]);
        given.iter().copied().chain(needed).map(str::to_owned).collect()
    }
}

pub(crate) fn farflung() -> Command {
    Command::new(env!("CARGO_BIN_EXE_farflung"))
}

/// Runs a command in the folder of `run`.
pub(crate) fn output(run: &Run, args: &str) -> Output {
    farflung().current_dir(run.at("")).args(args.split_whitespace()).output().unwrap()
}

pub(crate) fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[track_caller]
pub(crate) fn json_of(output: &Output) -> Value {
    assert!(output.status.success(), "{}", stderr(output));
    serde_json::from_slice(&output.stdout).unwrap()
}

#[track_caller]
pub(crate) fn refused(output: &Output, expected: &str) {
    let said = stderr(output);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains(expected), "{said} / {expected}");
}

/// Returns the training losses of a run, and after them its validation losses.
pub(crate) fn losses_of(folder: &Path) -> Vec<f64> {
    let rows = metrics(folder);
    let of = |key: &'static str| rows.iter().map(move |row| row[key].as_f64().unwrap());
    of("train_loss").chain(of("val_loss")).collect()
}

/// Returns the training losses of a run, and the validation loss after its last step.
pub(crate) fn losses_and_last(folder: &Path) -> Vec<f64> {
    let rows = metrics(folder);
    let after = rows.last().and_then(|row| row["val_loss"].as_f64()).unwrap();
    rows.iter().map(|row| row["train_loss"].as_f64().unwrap()).chain([after]).collect()
}

fn metrics(folder: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(folder.join("metrics.jsonl")).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[track_caller]
pub(crate) fn near(got: &[f64], want: &[f64], bound: f64, what: &str) {
    assert_eq!(got.len(), want.len(), "{what}: {got:?}");
    let far = got.iter().zip(want).any(|(a, b)| (a - b).abs() > bound);
    assert!(!far, "{what}: {got:?}, expected {want:?}");
}
