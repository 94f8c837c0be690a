//! Checks that a checkpoint of any plan is read by any other, and that a save that is killed leaves a good one.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use farflung::base::Philox;
use farflung::zoo::weights::TensorFile;
use farflung::{Checkpoint, metrics};

use crate::binary::{farflung, finish};
use crate::harness::{Bench, Options, Report, Threshold};
use crate::workers::farthest;

pub(crate) const BENCH: Bench = Bench {
    name: "recut",
    claim: "a checkpoint that any of 12 plans wrote is read by any other: the next step has the loss and the \
            optimizer state of one process. SIGKILL at random moments of a save leaves a good checkpoint",
    source: "ours",
    seed: 1337,
    run,
};

/// Names of plans, their ranks, microbatches of a replica, and further flags: of each schedule family, with
/// and without replicas. A step has 8 sequences. The first and last parts share the token table.
const PLANS: [(&str, &str, &str, &[&str]); 12] = [
    ("one process", "1", "8", &[]),
    ("2 replicas", "2", "4", &[]),
    ("4 replicas", "4", "2", &[]),
    ("1f1b, 2 stages", "2", "8", &["--stages", "2"]),
    ("gpipe, 4 stages", "4", "8", &["--stages", "4", "--schedule", "gpipe"]),
    ("zb-h1, 3 stages", "3", "8", &["--stages", "3", "--schedule", "zb-h1"]),
    ("interleaved, 2 stages", "2", "8", &["--stages", "2", "--schedule", "interleaved"]),
    ("zbv, 2 stages", "2", "8", &["--stages", "2", "--schedule", "zbv"]),
    ("hanayo, 2 stages", "2", "8", &["--stages", "2", "--schedule", "hanayo"]),
    ("chimera, 2 stages", "2", "8", &["--stages", "2", "--schedule", "chimera"]),
    ("1f1b, 2 replicas of 2 stages", "4", "4", &["--stages", "2"]),
    ("zbv, 2 replicas of 2 stages", "4", "4", &["--stages", "2", "--schedule", "zbv"]),
];

/// Steps before the checkpoint that other plans read.
const BEFORE: u64 = 2;
/// The largest difference of a weight or of a value of the optimizer's state, as a part of the largest one of
/// its tensor. Sums in another order differ by about 1e-6, and AdamW divides small gradients by themselves.
/// State that was lost or of another tensor would differ by about 1.
const CLOSE: f64 = 1e-4;

fn train(plan: usize, out: &Path, steps: u64, more: &[&str]) -> Result<Command> {
    let (_, workers, microbatches, flags) = PLANS[plan];
    let steps = steps.to_string();
    let needed = [
        ("--layers", "8"),
        ("--heads", "2"),
        ("--dim", "32"),
        ("--context", "32"),
        ("--batch", "1"),
        ("--codec", "none"),
        ("--lr-schedule", "constant"),
        ("--warmup", "0"),
        ("--threads", "1"),
        ("--eval-every", "0"),
        ("--eval-batches", "4"),
        ("--sample-tokens", "0"),
        ("--transport", "memory"),
        ("--steps", &steps),
        ("--workers", workers),
        ("--microbatches", microbatches),
    ];
    let mut command = farflung(&["train"])?;
    command.args(flags).args(more).arg("--out").arg(out).stderr(Stdio::piped());
    for (flag, value) in needed.into_iter().filter(|(flag, _)| !more.contains(flag)) {
        command.args([flag, value]);
    }
    Ok(command)
}

fn step_folder(step: u64) -> String {
    format!("step-{step:08}")
}

/// The weights and optimizer states of a step, by name: of all ranks.
type State = BTreeMap<String, Vec<f32>>;

fn state(out: &Path, step: u64) -> Result<State> {
    let ranks = std::fs::read_dir(out.join("ranks")).into_iter().flatten().filter_map(Result::ok);
    let folders = ranks.map(|entry| entry.path()).chain([out.to_owned()]);
    let mut all = State::new();
    for folder in folders {
        for file in ["model.safetensors", "optimizer.safetensors"] {
            let mut file = TensorFile::open(&folder.join(step_folder(step)).join(file))?;
            let tensors: Vec<(String, Vec<usize>)> =
                file.tensors().iter().map(|(name, info)| (name.clone(), info.shape.clone())).collect();
            for (name, shape) in tensors {
                let mut values = vec![0.0; shape.iter().product()];
                file.read_f32(&name, &shape, &mut values)?;
                // Codecs and the loss scale are each rank's own.
                if !name.starts_with("average.") && name != "loss_scale" {
                    all.insert(name, values);
                }
            }
        }
    }
    Ok(all)
}

/// Returns the largest difference of a tensor's values from `expected`, as a part of the largest of them.
/// Tensors that only one of them has count as infinitely far.
fn off(expected: &State, found: &State) -> f64 {
    if !expected.keys().eq(found.keys()) {
        return f64::INFINITY;
    }
    let tensor = |(a, b): (&Vec<f32>, &Vec<f32>)| {
        let largest = a.iter().fold(f32::MIN_POSITIVE, |most, x| most.max(x.abs()));
        a.iter().zip(b).fold(0.0_f32, |most, (x, y)| most.max((x - y).abs())) / largest
    };
    expected.values().zip(found.values()).map(tensor).fold(0.0, |most, one| most.max(f64::from(one)))
}

fn losses(out: &Path) -> Result<Vec<f64>> {
    Ok(metrics::read(&out.join("metrics.jsonl"))?.iter().map(|row| row.train_loss).collect())
}

fn run(report: &mut Report<'_>, options: &Options) -> Result<()> {
    let folder = tempfile::tempdir().context("failed to make a temporary folder")?;
    let reference = folder.path().join("reference");
    finish(&mut train(0, &reference, BEFORE + 1, &[])?)?;
    let (expected, loss) = (state(&reference, BEFORE + 1)?, losses(&reference)?);
    let chosen: Vec<usize> = if options.quick { vec![0, 5, 10] } else { (0..PLANS.len()).collect() };
    for &writer in &chosen {
        let written = folder.path().join(format!("{writer}"));
        finish(&mut train(writer, &written, BEFORE, &[])?)?;
        let checkpoint = written.join(step_folder(BEFORE)).display().to_string();
        let (mut far, mut far_loss, mut read) = (0.0_f64, 0.0_f64, 0);
        for &reader in &chosen {
            let out = folder.path().join(format!("{writer}-{reader}"));
            finish(&mut train(reader, &out, BEFORE + 1, &["--resume", &checkpoint])?)?;
            far = far.max(off(&expected, &state(&out, BEFORE + 1)?));
            let (next, expected) = (losses(&out)?, &loss[BEFORE as usize..]);
            ensure!(next.len() == expected.len(), "a run that was continued has {} steps", next.len());
            far_loss = far_loss.max(farthest(&next, expected));
            read += 1;
            std::fs::remove_dir_all(&out)?;
        }
        let name = PLANS[writer].0;
        report.progress(&format!("{name}: read by {read} plans"))?;
        report.row(
            &format!("{name}: next loss of {read} plans, largest difference"),
            far_loss,
            "nats",
            Threshold::AtMost(1e-5),
        )?;
        report.row(
            &format!("{name}: state after it, largest difference"),
            far,
            "",
            Threshold::AtMost(CLOSE),
        )?;
    }
    killed(report, options, folder.path())
}

/// Kills runs that save after each step, at random moments.
fn killed(report: &mut Report<'_>, options: &Options, folder: &Path) -> Result<()> {
    let kills = if options.quick { 3 } else { 40 };
    let out = folder.join("killed");
    let random = Philox::new(report.seed(), 0);
    let every = ["--checkpoint-every", "1", "--resume", "auto", "--dim", "128"];
    let (mut during, mut bad, mut lost, mut tries, mut newest) = (0, 0, 0, 0, 0);
    while during < kills && tries < 20 * kills {
        let mut child = train(10, &out, 1_000_000, &every)?.stderr(Stdio::null()).spawn()?;
        // At least one save of this process is done: then the next one begins at some time.
        while saved(&out)? == newest {
            ensure!(child.try_wait()?.is_none(), "the run ended before it was killed");
            std::thread::sleep(Duration::from_millis(1));
        }
        std::thread::sleep(Duration::from_micros(random.below(tries, 60_000)));
        let known = saved(&out)?;
        // This is SIGKILL on Unix.
        child.kill()?;
        child.wait()?;
        tries += 1;
        during += u64::from(folders(&out).iter().any(|folder| has_partial(folder)));
        newest = saved(&out)?;
        // A step that was valid before the kill must still be there, or a newer one, and whole.
        lost += u64::from(newest < known);
        bad += u64::from(folders(&out).iter().any(|folder| newest_is_bad(folder)));
    }
    report.row("kills during a save", during as f64, "", Threshold::AtLeast(kills as f64))?;
    report.row("newest checkpoints that are damaged", bad as f64, "", Threshold::AtMost(0.0))?;
    report.row("valid steps that were gone", lost as f64, "", Threshold::AtMost(0.0))?;
    let (steps, last) = (newest + 2, (newest + 2).to_string());
    finish(&mut train(10, &out, steps, &[&every[..], &["--steps", &last]].concat())?)?;
    let whole = state(&out, steps)?;
    report.row("tensors after the run went on", whole.len() as f64, "", Threshold::AtLeast(1.0))
}

/// Returns the folders of all ranks.
fn folders(out: &Path) -> Vec<PathBuf> {
    let ranks = std::fs::read_dir(out.join("ranks")).into_iter().flatten().filter_map(Result::ok);
    ranks.map(|entry| entry.path()).chain([out.to_owned()]).collect()
}

fn has_partial(folder: &Path) -> bool {
    let names = std::fs::read_dir(folder).into_iter().flatten().filter_map(Result::ok);
    names.into_iter().any(|entry| entry.file_name().to_string_lossy().starts_with(".step-"))
}

fn newest_is_bad(folder: &Path) -> bool {
    match std::fs::read_to_string(folder.join("latest")) {
        Ok(newest) => Checkpoint::open(&folder.join(newest.trim())).is_err(),
        Err(_) => false,
    }
}

/// Returns the newest step that rank 0 has saved; 0 before the first.
fn saved(out: &Path) -> Result<u64> {
    let latest = std::fs::read_to_string(out.join("latest")).unwrap_or_default();
    let number = latest.trim().trim_start_matches("step-");
    Ok(if number.is_empty() { 0 } else { number.parse().context("the name of a checkpoint")? })
}
