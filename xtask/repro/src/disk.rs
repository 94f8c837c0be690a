//! Runs on disks without room: file systems that are too small, a limit on the size of files, a disk that
//! another process fills, and failures of each system call of a save. The run goes on or says what is missing,
//! and the last good checkpoint stays.

mod attempt;
pub(crate) mod file_system;

use std::path::Path;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result};
use farflung::base::Philox;
use rustix::process::Signal;

use crate::harness::{Bench, Options, Report, Threshold};
use attempt::{Attempt, Outcome};
use file_system::FileSystem;

pub(crate) const BENCH: Bench = Bench {
    name: "disk",
    claim: "on file systems of 0.5, 1 and 2 checkpoints, under a limit on file sizes, beside a process that \
            fills the disk, and with a failure of each system call of a save: a good checkpoint remains, \
            nothing half-written is left, the message names the folder and the bytes, and no run panics or is \
            killed",
    source: "tmpfs in private mount namespaces, strace to inject ENOSPC and EDQUOT; as root",
    seed: 1337,
    run,
};

/// The files of a checkpoint, and the next content of `latest`.
const FILES: [&str; 8] = [
    "{partial}/config.json",
    "{partial}/model.safetensors",
    "{partial}/optimizer.safetensors",
    "{partial}/settings.toml",
    "{partial}/plan.toml",
    "{partial}/trainer.json",
    "{partial}/manifest.json",
    ".latest.tmp",
];

/// Sums over all attempts.
#[derive(Default)]
struct Sums {
    attempts: f64,
    failed_saves: f64,
    without_failure: f64,
    without_good: f64,
    not_resumed: f64,
    left: f64,
    without_message: f64,
    panics: f64,
    killed: f64,
    other_code: f64,
    not_warned: f64,
}

impl Sums {
    fn add(&mut self, report: &mut Report<'_>, name: &str, outcome: &Outcome) -> Result<()> {
        let Outcome { failed, good, resumed, left, named, panicked, killed, right_code, .. } = *outcome;
        let is_bad =
            failed == 0 || !good || !resumed || left > 0 || !named || panicked || killed || !right_code;
        let count = |is: bool| f64::from(u8::from(is));
        self.attempts += 1.0;
        self.failed_saves += failed as f64;
        self.without_failure += count(failed == 0);
        self.without_good += count(!good);
        self.not_resumed += count(!resumed);
        self.left += left as f64;
        self.without_message += count(!named);
        self.panics += count(panicked);
        self.killed += count(killed);
        self.other_code += count(!right_code);
        if is_bad {
            let facts = format!(
                "failed {failed}, good {good}, resumed {resumed}, left {left}, named {named}, code {right_code}"
            );
            report.progress(&format!("{name}: {}, {facts}\n{}", outcome.status, outcome.said))?;
        }
        Ok(())
    }
}

fn run(report: &mut Report<'_>, options: &Options) -> Result<()> {
    let folder = tempfile::tempdir().context("failed to make a temporary folder")?;
    let text = folder.path().join("text.txt");
    std::fs::write(&text, "the quick brown fox jumps over the lazy dog. ".repeat(500))?;
    let size = checkpoint_size(&text)?;
    report.row("a checkpoint", size as f64 / 1e3, "kB", Threshold::None)?;
    let mut sums = Sums::default();
    small(report, &mut sums, &text, size)?;
    limited(report, &mut sums, &text, size)?;
    filled(report, &mut sums, &text, size, if options.quick { 4 } else { 24 })?;
    injected(report, &mut sums, &text, size, options.quick)?;
    let zero = Threshold::AtMost(0.0);
    report.row("attempts", sums.attempts, "1", Threshold::None)?;
    report.row("saves that failed, or runs that were refused", sums.failed_saves, "1", Threshold::None)?;
    report.row("attempts in which nothing failed", sums.without_failure, "1", zero)?;
    report.row("attempts that lost the last good checkpoint", sums.without_good, "1", zero)?;
    report.row("attempts that did not continue once there was room", sums.not_resumed, "1", zero)?;
    report.row("half-written files and folders left", sums.left, "1", zero)?;
    report.row("attempts whose message lacks the folder or the bytes", sums.without_message, "1", zero)?;
    report.row("panics", sums.panics, "1", zero)?;
    report.row("runs killed by a signal", sums.killed, "1", zero)?;
    report.row("other exit codes than expected", sums.other_code, "1", zero)?;
    report.row("runs with room for one or two that were not warned", sums.not_warned, "1", zero)?;
    mapped(report, &text)?;
    quota(report, &text, size)
}

/// Returns the bytes that a checkpoint takes on a disk, in whole blocks.
fn checkpoint_size(text: &Path) -> Result<u64> {
    let system = FileSystem::new("size=64m")?;
    let mut attempt = Attempt::train(&system, text, &["--steps", "1"]);
    let outcome = attempt.run(0)?;
    anyhow::ensure!(outcome.right_code && outcome.good, "a run with room failed: {outcome:?}");
    let folder = system.outside(&Attempt::folder()).join("step-00000001");
    let mut bytes = 4096;
    for entry in std::fs::read_dir(folder)? {
        bytes += entry?.metadata()?.len().next_multiple_of(4096);
    }
    Ok(bytes)
}

/// Returns the options of a tmpfs with room for some checkpoints and for the records of a run.
fn holds(checkpoints: f64, size: u64) -> String {
    const RECORDS: f64 = 96.0 * 1024.0;
    let records = if checkpoints < 1.0 { 0.0 } else { RECORDS };
    format!("size={}", (size as f64 * checkpoints + records) as u64)
}

/// File systems of 0.5, 1 and 2 checkpoints, for each way to start a run.
fn small(report: &mut Report<'_>, sums: &mut Sums, text: &Path, size: u64) -> Result<()> {
    let steps = ["--steps", "12", "--checkpoint-every", "2"];
    for checkpoints in [0.5, 1.0, 2.0] {
        // The last save has no room either, unless the run was refused.
        let code = if checkpoints < 1.0 { 2 } else { 1 };
        for kind in ["train", "two workers", "two processes", "host"] {
            let two = matches!(kind, "two workers" | "two processes");
            let room = holds(checkpoints * if two { 2.0 } else { 1.0 }, size);
            let system = FileSystem::new(&room)?;
            let mut attempt = match kind {
                "train" => Attempt::train(&system, text, &steps),
                "two workers" => Attempt::workers(2, &system, text, &steps),
                "two processes" => Attempt::launch(&system, text, &steps),
                _ => Attempt::host(&system, text, &steps),
            };
            let outcome = attempt.run(code)?;
            let is_warned = outcome.said.contains("more checkpoints at the same time need");
            sums.not_warned += f64::from(u8::from(checkpoints >= 1.0 && !is_warned));
            sums.add(report, &format!("{kind}, {checkpoints} checkpoints"), &outcome)?;
        }
    }
    Ok(())
}

/// A limit on the size of files: plain checkpoints are refused at the start, compressed ones fail in the
/// middle.
fn limited(report: &mut Report<'_>, sums: &mut Sums, text: &Path, size: u64) -> Result<()> {
    for (packing, code) in [("false", 2), ("true", 1)] {
        let system = FileSystem::new("size=64m")?;
        let steps = ["--steps", "12", "--checkpoint-every", "2", "--compress-checkpoints", packing];
        let mut attempt = Attempt::train(&system, text, &steps).limited_to(size / 8);
        let outcome = attempt.run(code)?;
        sums.add(report, &format!("ulimit -f, compressed {packing}"), &outcome)?;
    }
    Ok(())
}

/// Another process fills the disk at random moments, and makes room again.
fn filled(report: &mut Report<'_>, sums: &mut Sums, text: &Path, size: u64, times: u64) -> Result<()> {
    let random = Philox::new(report.seed(), 0);
    for time in 0..times {
        let system = FileSystem::new(&holds(8.0, size))?;
        let steps = ["--steps", "100000000", "--checkpoint-every", "3"];
        let mut attempt = match time % 3 {
            0 => Attempt::train(&system, text, &steps),
            1 => Attempt::launch(&system, text, &steps),
            _ => Attempt::host(&system, text, &steps),
        };
        let mut running = attempt.start()?;
        running.wait_for_save(&attempt, 0)?;
        thread::sleep(Duration::from_micros(random.below(time, 20_000)));
        let filler = system.fill()?;
        running.wait_for_failure(&attempt)?;
        let before = attempt.newest()?;
        std::fs::remove_file(filler)?;
        running.wait_for_save(&attempt, before)?;
        running.signal(Signal::TERM)?;
        let outcome = attempt.end(running, 143)?;
        sums.add(report, &format!("filled, attempt {time}"), &outcome)?;
    }
    Ok(())
}

/// Each system call of a save fails: of one in the middle of a run, after which the run goes on, and of the
/// last one.
fn injected(report: &mut Report<'_>, sums: &mut Sums, text: &Path, size: u64, quick: bool) -> Result<()> {
    let partial = |step: u64| format!(".step-{step:08}.tmp");
    let calls = |path: &str| match path {
        "{partial}" => ["rename,renameat,renameat2", "mkdir,mkdirat", "fsync"],
        _ => ["openat", "write", "fsync"],
    };
    let paths = FILES.iter().copied().chain(["{partial}"]);
    for (number, path) in paths.enumerate() {
        for (nth, call) in calls(path).iter().enumerate() {
            for (step, code) in [(4, 0), (6, 1)] {
                if quick && !(number + nth + step as usize / 2).is_multiple_of(3) {
                    continue;
                }
                let error = if (number + nth).is_multiple_of(2) { "ENOSPC" } else { "EDQUOT" };
                let system = FileSystem::new(&holds(8.0, size))?;
                // The next content of `latest` has the same name in each save.
                let nth_time = if path == ".latest.tmp" { step / 2 } else { 1 };
                let path = path.replace("{partial}", &partial(step));
                let mut attempt = Attempt::train(&system, text, &["--steps", "6", "--checkpoint-every", "2"])
                    .failing(&path, (call, nth_time), error);
                let outcome = attempt.run(code)?;
                sums.add(report, &format!("{call} of {path} with {error}"), &outcome)?;
            }
        }
    }
    Ok(())
}

/// A file that is mapped into memory: where the disk has no room for all of it, a write to it would end the
/// process.
fn mapped(report: &mut Report<'_>, text: &Path) -> Result<()> {
    let system = FileSystem::new("size=1200k")?;
    let pipeline = ["--stages", "2", "--microbatches", "4", "--steps", "400", "--sampling", "epochs"];
    let samples = ["--boundary", "aqsgd:8", "--boundary-store", "mapped"];
    let outcome = Attempt::workers(2, &system, text, &[&pipeline[..], &samples].concat()).run(1)?;
    let is_bad = outcome.killed || outcome.panicked || !outcome.right_code;
    if is_bad {
        report.progress(&format!("mapped samples: {}\n{}", outcome.status, outcome.said))?;
    }
    let metric = "runs with mapped samples that a full disk killed";
    report.row(metric, f64::from(u8::from(is_bad)), "1", Threshold::AtMost(0.0))
}

/// A quota of the user, where the kernel has quotas for tmpfs.
fn quota(report: &mut Report<'_>, text: &Path, size: u64) -> Result<()> {
    let limit = format!("size=64m,mode=1777,usrquota,usrquota_block_hardlimit={}", size * 2 + (96 << 10));
    let system = match FileSystem::new(&limit) {
        Ok(system) => system,
        Err(error) => {
            report.progress(&format!("quota: {error:#}"))?;
            let metric = "attempts under a quota: none, since this kernel has no quotas for tmpfs";
            return report.row(metric, 0.0, "1", Threshold::None);
        }
    };
    let steps = ["--steps", "12", "--checkpoint-every", "2"];
    let outcome = Attempt::train(&system, text, &steps).by_nobody().run(1)?;
    let all = outcome.good && outcome.left == 0 && outcome.named && outcome.right_code && !outcome.killed;
    let metric = "attempts under a quota that lost a checkpoint, left files or named no bytes";
    report.row(metric, f64::from(u8::from(!all || outcome.failed == 0)), "1", Threshold::AtMost(0.0))
}
