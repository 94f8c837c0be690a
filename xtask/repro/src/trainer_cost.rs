//! Measures the cost of a training step beyond its arithmetic: instructions, bytes and losses of a short run,
//! compared with those of the two earlier trainers.
//!
//! Full runs need valgrind, which counts instructions. The figures were recorded on a processor with AVX2.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use farflung::metrics;
use farflung::zoo::weights::Weights;
use serde_json::Value;

use crate::binary::farflung;
use crate::harness::{Bench, Options, Report, Threshold};

pub(crate) const BENCH: Bench = Bench {
    name: "trainer-cost",
    claim: "the one trainer for all plans takes at most 2% more instructions than the two earlier trainers, \
            sends no more bytes, and has the same losses",
    source: "valgrind's callgrind; records/trainer.txt, on x86-64 with AVX2",
    seed: 1337,
    run,
};

/// Name and figure of each row.
const RECORD: &str = include_str!("../records/trainer.txt");

/// Windows of an evaluation for each of `--eval-batches`, and those of the recorded run's evaluations.
const WINDOWS: f64 = 12.0;
const RECORDED_WINDOWS: f64 = 2.0;

/// Settings of both runs. The text does not matter, as long as it is always the same.
const SHORT: [&str; 11] = [
    "train",
    "--model",
    "nano",
    "--threads",
    "1",
    "--batch",
    "2",
    "--eval-batches",
    "1",
    "--sample-tokens",
    "0",
];

fn recorded(name: &str) -> Result<&'static str> {
    let line = RECORD.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(": "));
    line.with_context(|| format!("the record has no {name}"))
}

fn figure(name: &str) -> Result<f64> {
    recorded(name)?.parse().context("a figure of the record is not a number")
}

/// Returns whether this processor has AVX2, with which the model was recorded.
fn vectors() -> bool {
    #[cfg(target_arch = "x86_64")]
    return is_x86_feature_detected!("avx2");
    #[cfg(not(target_arch = "x86_64"))]
    false
}

fn run(report: &mut Report<'_>, options: &Options) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let data = folder.path().join("text.txt");
    std::fs::write(&data, "the quick brown fox jumps over the lazy dog. ".repeat(2000))?;
    let data = data.to_str().context("the folder's path is not UTF-8")?;
    // Measures bytes and losses of four workers behind slow links: the default run, but smaller.
    let out = folder.path().join("four");
    let told = train(data, &out, &["--steps", "6"])?;
    let sent: Vec<u64> =
        metrics::read(&out.join("metrics.jsonl"))?.iter().map(|row| row.bytes_sent).collect();
    let most =
        sent.windows(2).take(4).map(|two| two[1] - two[0]).max().context("the metrics have no rows")?;
    // The last step is left out: it sends more, because copies are compared before the model is saved.
    report.row(
        "bytes of a step of 4 workers",
        most as f64,
        "B",
        Threshold::AtMost(figure("bytes of a step")?),
    )?;
    let loss = told["val_loss"].as_f64().context("the report has no loss")?;
    report.row("validation loss after 6 steps", loss, "nats", Threshold::None)?;
    let off = (loss - figure("validation loss")?).abs();
    report.row("validation loss, difference from the record", off, "nats", Threshold::AtMost(1e-6))?;
    let other = f64::from(u8::from(bits(&out.join("step-00000006"))? != recorded("model")?));
    // Processors without AVX2 add in another order.
    let mark = if vectors() { Threshold::AtMost(0.0) } else { Threshold::None };
    report.row("a model with bits other than recorded", other, "", mark)?;
    if options.quick {
        return Ok(());
    }
    // An evaluation has 12 windows for each of `--eval-batches`; that of the recorded run, two in all. What a
    // window takes is the difference between two runs, each of which evaluates at its start and its end.
    let [few, more] = ["1", "2"].map(|batches| instructions(folder.path(), data, batches));
    let (few, more) = (few?, more?);
    let window = (more - few) / (2.0 * WINDOWS);
    report.row("instructions of a window of an evaluation", window, "", Threshold::None)?;
    let counted = few - 2.0 * (WINDOWS - RECORDED_WINDOWS) * window;
    report.row("instructions of 2 steps of one worker", counted, "", Threshold::None)?;
    report.row(
        "instructions relative to the earlier trainers",
        counted / figure("instructions")?,
        "x",
        Threshold::AtMost(1.02),
    )
}

/// Returns the hash of a saved model's weights, one behind the other.
fn bits(checkpoint: &Path) -> Result<String> {
    let mut weights = Weights::open(checkpoint)?;
    let mut hasher = blake3::Hasher::new();
    for tensor in weights.spec().tensors() {
        let mut values = vec![0.0_f32; tensor.shape.iter().product()];
        weights.tensor(&tensor.name, &mut values)?;
        hasher.update(&values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>());
    }
    Ok(hasher.finalize().to_hex().to_string())
}

/// Runs the command and returns its report.
fn train(data: &str, out: &Path, more: &[&str]) -> Result<Value> {
    let out_text = out.to_str().context("the folder's path is not UTF-8")?;
    let status = farflung(&SHORT)?.args(["--data", data, "--out", out_text]).args(more).status()?;
    ensure!(status.success(), "the run ended with {status}");
    let text = std::fs::read_to_string(out.join("report.json")).context("failed to read the report")?;
    serde_json::from_str(&text).context("failed to parse the report")
}

/// Returns the number of instructions of a whole run of two steps, with evaluations of so many batches.
fn instructions(folder: &Path, data: &str, eval_batches: &str) -> Result<f64> {
    let [out, counts] = ["counted", "counts"].map(|name| folder.join(format!("{name}-{eval_batches}")));
    let plain = farflung(&SHORT)?;
    let mut valgrind = Command::new("valgrind");
    valgrind.arg("--tool=callgrind").arg(format!("--callgrind-out-file={}", counts.display()));
    valgrind.arg(plain.get_program()).args(plain.get_args());
    valgrind.args([
        "--eval-batches",
        eval_batches,
        "--steps",
        "2",
        "--workers",
        "1",
        "--data",
        data,
        "--out",
    ]);
    valgrind.arg(out);
    let ran = valgrind.output().context("failed to run valgrind: install it (apt-get install valgrind)")?;
    ensure!(ran.status.success(), "the run under valgrind failed: {}", String::from_utf8_lossy(&ran.stderr));
    let text = std::fs::read_to_string(counts).context("failed to read valgrind's counts")?;
    let total = text
        .lines()
        .find_map(|line| line.strip_prefix("totals: "))
        .context("valgrind's counts have no total")?;
    Ok(total.trim().parse()?)
}
