//! Whole runs of a small model of four layers, started through the command line.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::path::Path;
use std::process::{Command, Output};

pub(crate) struct Run(tempfile::TempDir);

impl Run {
    pub(crate) fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let text =
            (0..4000).map(|i| format!("{} is the square of {i}.", i * i)).collect::<Vec<_>>().join(" ");
        std::fs::write(folder.path().join("text.txt"), text).unwrap();
        Self(folder)
    }

    pub(crate) fn at(&self, name: &str) -> std::path::PathBuf {
        self.0.path().join(name)
    }

    /// Runs `farflung BEFORE train ... ARGS`, on a small model of four layers.
    pub(crate) fn farflung(&self, before: &[&str], out: &str, args: &str) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_farflung"));
        command.args(before).arg("train").args(
            "--layers 4 --heads 2 --dim 16 --context 16 --warmup 2 --lr 0.01 --min-lr 0.01 --eval-batches 4 --eval-every 2 \
             --sample-tokens 0 --threads 1"
                .split(' '),
        );
        command.arg("--data").arg(self.at("text.txt")).arg("--out").arg(self.at(out));
        for (flag, unless_given) in
            [("--steps", "6"), ("--quiet", "true"), ("--batch", "2"), ("--codec", "none")]
        {
            let decided = args.contains("--plan") && ["--batch", "--codec"].contains(&flag);
            if !args.contains(flag) && !decided {
                command.args([flag, unless_given]);
            }
        }
        command.args(args.split(' ')).output().unwrap()
    }

    pub(crate) fn done(&self, before: &[&str], out: &str, args: &str) -> Vec<farflung::StepMetrics> {
        let output = self.farflung(before, out, args);
        assert!(output.status.success(), "{args}: {}", String::from_utf8_lossy(&output.stderr));
        farflung::metrics::read(&self.at(out).join("metrics.jsonl")).unwrap()
    }
}

pub(crate) fn same(what: &str, a: &[farflung::StepMetrics], b: &[farflung::StepMetrics]) {
    assert_eq!(a.len(), b.len(), "{what}");
    for (a, b) in a.iter().zip(b) {
        let close = (a.train_loss - b.train_loss).abs() < 1e-5;
        assert!(close && a.tokens == b.tokens, "{what}: {a:?} {b:?}");
    }
}

pub(crate) fn model(out: &Path) -> Vec<u8> {
    saved(out, "model")
}

pub(crate) fn saved(out: &Path, what: &str) -> Vec<u8> {
    std::fs::read(out.join(format!("step-00000006/{what}.safetensors"))).unwrap()
}
