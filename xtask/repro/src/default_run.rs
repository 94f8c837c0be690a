//! Runs `farflung train` without arguments, as a new user does.

use std::process::Stdio;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use farflung::{TrainConfig, corpus};
use serde_json::Value;

use crate::binary::farflung;
use crate::harness::{Bench, Options, Report, Threshold};

pub(crate) const BENCH: Bench = Bench {
    name: "default-run",
    claim: "the default run takes at most 180 s on 2 cores, and its loss is at most 3% above that of one \
            plain worker on the same tokens",
    source: "ours",
    seed: 1337,
    run,
};

/// Validation loss in nats of a plain single worker after the default run's 500 steps, on the same tokens and
/// evaluated on the same windows. Each of its batches is the four workers' batches together. Measured on the
/// default text (`corpus::EXPECTED`) with
/// `farflung train --workers 1 --accumulate 4 --sync ddp --transport memory`.
const ONE_WORKER: f64 = 1.7607;

/// Settings for which [`ONE_WORKER`] was measured: steps, workers, sequences per batch, highest and lowest
/// learning rate, warm-up, and the hash of the text.
const MEASURED: (u64, usize, usize, f64, f64, u64, &str) =
    (500, 4, 12, 1e-3, 1e-4, 50, "d931b6eae46e91ebeb028231f24af58fca469996698f04a80df6e27f93e4642f");

/// Steps of a quick run. They are too few for the bound.
const QUICK_STEPS: &str = "40";

fn run(report: &mut Report<'_>, options: &Options) -> Result<()> {
    let now = TrainConfig::default();
    let now = (now.steps, now.workers, now.batch, now.lr, now.min_lr, now.warmup, corpus::EXPECTED);
    ensure!(now == MEASURED, "the default run is now {now:?}: measure ONE_WORKER again");
    let folder = tempfile::tempdir().context("failed to make a temporary folder")?;
    let mut command = farflung(&["train", "--json", "--quiet", "--out"])?;
    command.arg(folder.path().join("run")).stdout(Stdio::piped()).stderr(Stdio::piped());
    if options.quick {
        command.args(["--steps", QUICK_STEPS]);
    }
    #[expect(clippy::disallowed_methods, reason = "a bench measures real time")]
    let start = Instant::now();
    let output = command.output().context("failed to start `farflung`")?;
    let wall = start.elapsed().as_secs_f64();
    let message = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "`farflung train`, {}: {message}", output.status);
    let end: Value = serde_json::from_slice(&output.stdout).context("failed to parse the run's report")?;
    let figure = |name: &str| {
        end.pointer(name).and_then(Value::as_f64).with_context(|| format!("the run's report has no {name}"))
    };

    let (before, after) = (figure("/val_loss_before")?, figure("/val_loss")?);
    report.row("wall time", wall, "s", Threshold::AtMost(180.0))?;
    report.row("validation loss before training", before, "nats", Threshold::None)?;
    let bound = if options.quick { before - 1.0 } else { ONE_WORKER * 1.03 };
    report.row("validation loss", after, "nats", Threshold::AtMost(bound))?;
    if !options.quick {
        report.row(
            "validation loss above one plain worker's",
            (after / ONE_WORKER - 1.0) * 100.0,
            "%",
            Threshold::AtMost(3.0),
        )?;
    }
    report.row("tokens", figure("/tokens")?, "", Threshold::None)?;
    report.row("bytes sent by a worker", figure("/bytes_sent")?, "B", Threshold::None)?;
    report.row("time on the simulated link", figure("/time_s")?, "s", Threshold::None)?;
    report.row(
        "plain all-reduce: bytes sent by a worker",
        figure("/plain/bytes_sent")?,
        "B",
        Threshold::None,
    )?;
    report.row("plain all-reduce: time on the simulated link", figure("/plain/time_s")?, "s", Threshold::None)
}
