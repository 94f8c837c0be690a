//! Kills processes of `farflung launch`, and checks the behaviour that torchrun's documentation describes.

use std::fs;
use std::path::Path;
use std::process::Child;
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use rustix::process::Signal;

use super::processes::{last_change, send};
use crate::binary::farflung;
use crate::harness::{Bench, Options, Report, Threshold};
use crate::machine::now;

pub(crate) const BENCH: Bench = Bench {
    name: "elastic-launch",
    claim: "`--restarts` restarts a job that lost a process, with the same bits as a job that lost none; \
            `--elastic` continues while processes, the host included, are killed and started again; after a \
            notice a job saves and leaves within seconds",
    source: "torchrun: --max-restarts, --nnodes=MIN:MAX; spot notices of two minutes and less",
    seed: 1337,
    run,
};

const PATIENCE: Duration = Duration::from_mins(2);
const LOOK: Duration = Duration::from_millis(5);
const SETTINGS: &str = "--layers 2 --heads 2 --dim 32 --context 32 --batch 2 --threads 1 --warmup 0 --eval-every 100000 \
                        --eval-batches 1 --sample-tokens 0 --quiet";

/// A launcher. Dropping it kills it.
struct Launcher(Child);

impl Launcher {
    fn start(folder: &Path, args: &str) -> Result<Self> {
        let args: Vec<&str> = args.split_whitespace().collect();
        let mut command = farflung(&args)?;
        command.env("FARFLUNG_HOME", folder.join("home")).current_dir(folder);
        command.stderr(fs::File::create(folder.join("said.txt"))?);
        Ok(Self(command.spawn().context("failed to start `farflung launch`")?))
    }

    /// Kills a process of the launcher that has these words in its command line or environment.
    fn kill(&self, words: &str) -> Result<()> {
        let child =
            child_of(self.0.id(), words).with_context(|| format!("no process was started with {words}"))?;
        send(child, Signal::KILL)
    }

    /// Waits for the launcher and returns its exit code.
    fn ends(&mut self) -> Result<i32> {
        wait("the launcher", || Ok(self.0.try_wait()?.map(|status| status.code().unwrap_or(-1))))
    }
}

impl Drop for Launcher {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn wait<T>(what: &str, mut done: impl FnMut() -> Result<Option<T>>) -> Result<T> {
    let begun = now();
    while begun.elapsed() < PATIENCE {
        if let Some(value) = done()? {
            return Ok(value);
        }
        sleep(LOOK);
    }
    anyhow::bail!("timed out waiting for {what}")
}

/// Finds a process started by `parent` that has these words in its command line or its environment variables.
fn child_of(parent: u32, words: &str) -> Option<u32> {
    let processes =
        fs::read_dir("/proc").ok()?.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    processes.filter_map(|name| name.parse::<u32>().ok()).find(|id| {
        let read = |file: &str| fs::read(format!("/proc/{id}/{file}")).unwrap_or_default();
        let stat = String::from_utf8_lossy(&read("stat")).into_owned();
        // The fields after the name in brackets are the state and the parent.
        let numbers =
            stat.rsplit(") ").next().map(|rest| rest.split(' ').nth(1) == Some(&parent.to_string()));
        let text = [read("cmdline"), read("environ")].concat();
        numbers == Some(true) && text.windows(words.len()).any(|part| part == words.as_bytes())
    })
}

/// Returns the number of steps in a folder's metrics.
fn steps(folder: &Path) -> usize {
    fs::read_to_string(folder.join("metrics.jsonl")).unwrap_or_default().lines().count()
}

fn weights(folder: &Path, step: u64) -> Result<Vec<u8>> {
    let path = folder.join(format!("step-{step:08}/model.safetensors"));
    fs::read(&path).with_context(|| format!("failed to read {}", path.display()))
}

fn restarts(report: &mut Report<'_>, folder: &Path) -> Result<()> {
    let job = |restarts: u32, out: &str| {
        format!(
            "launch -n 2 --grace 500ms --restarts {restarts} -- train --steps 400 --out {out} --resume auto \
             --checkpoint-every 20 --keep-last 0 --seed 7 {SETTINGS}"
        )
    };
    let code = Launcher::start(folder, &job(0, "whole"))?.ends()?;
    ensure!(code == 0, "an undisturbed job ended with exit code {code}");
    let mut launcher = Launcher::start(folder, &job(2, "killed"))?;
    for after in [60, 200] {
        wait("steps", || Ok((steps(&folder.join("killed")) > after).then_some(())))?;
        launcher.kill("RANK=1")?;
    }
    let code = launcher.ends()?;
    report.row(
        "restarts: exit code of a job that lost two processes",
        code.into(),
        "1",
        Threshold::AtMost(0.0),
    )?;
    let same = weights(&folder.join("killed"), 400)? == weights(&folder.join("whole"), 400)?;
    let metric = "restarts: the weights equal those of a job that lost none";
    report.row(metric, f64::from(u8::from(same)), "1", Threshold::AtLeast(1.0))
}

fn elastic(report: &mut Report<'_>, folder: &Path) -> Result<()> {
    let args = format!(
        "launch --elastic 2:3 --restarts 2 -- host --listen 127.0.0.1:0 --deadline 5s --steps 6000 --out run \
         --checkpoint-every 100000 {SETTINGS}"
    );
    let mut launcher = Launcher::start(folder, &args)?;
    let is = |folder: &Path, count| Ok((last_change(folder).0 == count).then_some(()));
    let (host, other) = (folder.join("run"), folder.join("run/members/2"));
    wait("three members", || is(&host, 3))?;
    launcher.kill("run/members/1")?;
    let begun = now();
    wait("two members", || is(&host, 2))?;
    let first = begun.elapsed().as_secs_f64();
    wait("three members again", || is(&host, 3))?;
    launcher.kill("farflung\0host")?;
    let begun = now();
    wait("two members without the host", || is(&other, 2))?;
    let slowest = first.max(begun.elapsed().as_secs_f64());
    wait("the host as a member", || is(&other, 3))?;
    let code = launcher.ends()?;
    report.row(
        "elastic: exit code of a job whose host was killed as well",
        code.into(),
        "1",
        Threshold::AtMost(0.0),
    )?;
    report.row(
        "elastic: longest time from a fault to the others' next step",
        slowest,
        "s",
        Threshold::AtMost(6.0),
    )?;
    let all: Vec<Vec<u8>> =
        (0..3).map(|n| weights(&folder.join(format!("run/members/{n}")), 6_000)).collect::<Result<_>>()?;
    let same = all.iter().all(|weights| *weights == all[0]);
    report.row(
        "elastic: all members end with the same weights",
        f64::from(u8::from(same)),
        "1",
        Threshold::AtLeast(1.0),
    )
}

fn notice(report: &mut Report<'_>, folder: &Path) -> Result<()> {
    let args = format!(
        "launch -n 2 -- train --steps 10000000 --out noticed --notice-file notice --notice-every 100ms {SETTINGS}"
    );
    let mut launcher = Launcher::start(folder, &args)?;
    wait("steps", || Ok((steps(&folder.join("noticed")) > 20).then_some(())))?;
    fs::write(folder.join("notice"), "")?;
    let begun = now();
    let code = launcher.ends()?;
    // Code 75 means that the job can be started again elsewhere.
    let says_so = f64::from(u8::from(code == 75));
    report.row(
        "notice: the exit code says that the job can continue elsewhere",
        says_so,
        "1",
        Threshold::AtLeast(1.0),
    )?;
    report.row(
        "notice: time until the job has saved and left",
        begun.elapsed().as_secs_f64(),
        "s",
        Threshold::AtMost(5.0),
    )?;
    let saved = fs::read_dir(folder.join("noticed"))?.filter_map(Result::ok);
    let saved = saved.filter(|entry| entry.file_name().to_string_lossy().starts_with("step-")).count();
    report.row("notice: checkpoints that it left", saved as f64, "1", Threshold::AtLeast(1.0))
}

fn run(report: &mut Report<'_>, _: &Options) -> Result<()> {
    ensure!(cfg!(target_os = "linux"), "this bench needs Linux: it looks for processes in /proc");
    let folder = tempfile::tempdir().context("failed to make a temporary folder")?;
    let said = |error: anyhow::Error| {
        let text = fs::read_to_string(folder.path().join("said.txt")).unwrap_or_default();
        error.context(format!("the launcher printed: {text}"))
    };
    restarts(report, folder.path()).map_err(said)?;
    elastic(report, folder.path()).map_err(said)?;
    notice(report, folder.path()).map_err(said)
}
