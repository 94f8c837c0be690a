//! SIGKILL at random moments.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use farflung::base::Philox;

use crate::binary::{farflung, finish};
use crate::harness::{Report, Threshold};

const STEPS: &str = "150";

/// The runs: a name, their flags, and the number of ranks.
const RUNS: [(&str, &str); 3] = [
    ("one worker", "--workers 1 --batch 4"),
    ("three replicas with shards 2:0:1", "--workers 3 --zero 1 --zero-weights 2,0,1"),
    ("two replicas of two stages", "--workers 4 --stages 2 --microbatches 2"),
];

/// Returns a run of nano in a folder.
fn train(flags: &str, out: &Path, more: &[&str]) -> Result<Command> {
    let out = out.display().to_string();
    let common = "--model nano --context 64 --batch 1 --codec none --transport memory --threads 1 --warmup 0 \
                  --eval-every 1000000 --eval-batches 1 --sample-tokens 0 --seed 3";
    let given: Vec<&str> = flags.split(' ').collect();
    let common: Vec<&str> = common.split_whitespace().collect();
    // Each flag has one value.
    let needed = common.chunks(2).filter(|flag| !given.contains(&flag[0]));
    let mut words = vec!["train"];
    words.extend(needed.flatten());
    words.extend(given);
    words.extend(["--steps", STEPS, "--out", &out]);
    words.extend(more);
    farflung(&words)
}

/// Kills each run `kills` times, and then lets it end.
pub(super) fn run(report: &mut Report<'_>, kills: u64) -> Result<()> {
    let random = Philox::new(report.seed(), 0);
    let (mut differing, mut backwards, mut within) = (0.0, 0.0, 0_u64);
    for (number, (name, flags)) in RUNS.into_iter().enumerate() {
        let folder = tempfile::tempdir().context("failed to make a temporary folder")?;
        let (whole, killed) = (folder.path().join("whole"), folder.path().join("killed"));
        finish(train(flags, &whole, &[])?.stderr(std::process::Stdio::piped()))?;
        let on_disk = ["--state", "disk", "--resume", "auto"];
        let mut newest = 0;
        for kill in 0..kills {
            let mut child = train(flags, &killed, &on_disk)?.spawn().context("failed to start `farflung`")?;
            // Long enough for some steps, so that the run comes nearer to its end.
            let wait = 150 + random.below(1000 * number as u64 + kill, 350);
            thread::sleep(Duration::from_millis(wait));
            let ended = child.try_wait()?.is_some();
            child.kill()?;
            child.wait()?;
            within += u64::from(!ended);
            let rows = steps(&killed);
            backwards += f64::from(u8::from(rows + 1 < newest));
            newest = newest.max(rows);
        }
        finish(train(flags, &killed, &on_disk)?.stderr(std::process::Stdio::piped()))?;
        for file in ["model.safetensors", "optimizer.safetensors"] {
            let of = |folder: &Path| fs::read(folder.join(format!("step-{STEPS:0>8}/{file}")));
            let same = of(&whole)? == of(&killed)?;
            differing += f64::from(u8::from(!same));
            if !same {
                report.progress(&format!("{name}: {file} differs after {kills} kills"))?;
            }
        }
    }
    ensure!(within > 0, "every run ended before it was killed");
    report.row("runs that were killed within their work", within as f64, "1", Threshold::None)?;
    report.row(
        "files that differ from those of runs that were not killed",
        differing,
        "1",
        Threshold::AtMost(0.0),
    )?;
    report.row("times that more than the last step was lost", backwards, "1", Threshold::AtMost(0.0))
}

/// Returns the number of steps whose rows a run has written.
fn steps(folder: &Path) -> usize {
    fs::read_to_string(folder.join("metrics.jsonl")).map_or(0, |text| text.lines().count())
}
