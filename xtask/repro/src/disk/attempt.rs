//! A run on a file system without room, and what it leaves.

use std::fs::{self, File};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use farflung::{EventKind, events, metrics, run_dir};
use rustix::process::{Pid, Signal, kill_process};

use super::file_system::FileSystem;
use crate::binary::{behind, failing, farflung};

/// Longest time to wait for a run.
const PATIENCE: Duration = Duration::from_mins(1);
const POLL: Duration = Duration::from_millis(2);

/// What a run has left, and what it has said.
#[derive(Debug)]
#[expect(clippy::struct_excessive_bools, reason = "one for each property")]
pub(super) struct Outcome {
    /// Number of saves that failed, or 1 if the run was refused or ended because of its disk.
    pub(super) failed: usize,
    /// Whether the newest step that was saved can be read on every rank.
    pub(super) good: bool,
    /// Whether the run continues with `--resume auto` once there is room.
    pub(super) resumed: bool,
    /// Number of files and folders with a name for half-written ones.
    pub(super) left: usize,
    /// Whether each failure names the folder and the bytes.
    pub(super) named: bool,
    pub(super) panicked: bool,
    pub(super) killed: bool,
    pub(super) right_code: bool,
    pub(super) status: ExitStatus,
    pub(super) said: String,
}

/// A run that is to be started.
pub(super) struct Attempt<'a> {
    system: &'a FileSystem,
    words: Vec<String>,
    /// A command before the run's, such as strace.
    wrapper: Vec<String>,
    ranks: usize,
    is_host: bool,
    stderr: tempfile::NamedTempFile,
}

impl<'a> Attempt<'a> {
    fn new(system: &'a FileSystem, text: &Path, (before, command): (&[&str], &str), more: &[&str]) -> Self {
        let (text, out) = (text.display().to_string(), FileSystem::path("run").display().to_string());
        let words = [
            command,
            "--layers",
            "2",
            "--heads",
            "2",
            "--dim",
            "32",
            "--context",
            "16",
            "--batch",
            "2",
            "--warmup",
            "0",
            "--threads",
            "1",
            "--eval-batches",
            "1",
            "--sample-tokens",
            "0",
            "--codec",
            "none",
            "--data",
            &text,
            "--out",
            &out,
        ];
        let all = before.iter().chain(&words).chain(more);
        let stderr = tempfile::NamedTempFile::new().expect("a temporary file can be made");
        Self {
            system,
            words: all.map(|&word| word.to_owned()).collect(),
            wrapper: Vec::new(),
            ranks: 1,
            is_host: command == "host",
            stderr,
        }
    }

    pub(super) fn train(system: &'a FileSystem, text: &Path, more: &[&str]) -> Self {
        Self::workers(1, system, text, more)
    }

    /// One process with this number of workers.
    pub(super) fn workers(ranks: usize, system: &'a FileSystem, text: &Path, more: &[&str]) -> Self {
        let mut attempt = Self { ranks, ..Self::new(system, text, (&[], "train"), more) };
        attempt.words.extend(["--workers".to_owned(), ranks.to_string()]);
        attempt
    }

    /// Two processes.
    pub(super) fn launch(system: &'a FileSystem, text: &Path, more: &[&str]) -> Self {
        let before = ["launch", "-n", "2", "--"];
        Self { ranks: 2, ..Self::new(system, text, (&before, "train"), more) }
    }

    /// A host without other members.
    pub(super) fn host(system: &'a FileSystem, text: &Path, more: &[&str]) -> Self {
        let mut attempt = Self::new(system, text, (&[], "host"), more);
        let key = FileSystem::path("key").display().to_string();
        let flags = ["--listen", "127.0.0.1:0", "--address", "127.0.0.1:9", "--key-file", &key];
        attempt.words.extend(flags.map(str::to_owned));
        attempt
    }

    /// Limits the size of files.
    pub(super) fn limited_to(mut self, bytes: u64) -> Self {
        self.wrapper = ["prlimit".to_owned(), format!("--fsize={bytes}")].to_vec();
        self
    }

    /// Lets a system call fail at the `nth` time that it concerns a path below the run's folder.
    pub(super) fn failing(mut self, path: &str, call: (&str, u64), error: &str) -> Self {
        self.wrapper = failing(&Self::folder().join(path), call, error);
        self
    }

    /// Runs as a user with a quota.
    pub(super) fn by_nobody(mut self) -> Self {
        self.wrapper =
            ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"].map(str::to_owned).to_vec();
        self
    }

    /// Returns the run's folder in its namespace.
    pub(super) fn folder() -> PathBuf {
        FileSystem::path("run")
    }

    /// Returns the folders of all ranks, as this program reaches them.
    fn folders(&self) -> Vec<PathBuf> {
        let run = self.system.outside(&Self::folder());
        let of_rank = |rank: usize| match rank {
            0 => run.clone(),
            rank => run.join(format!("ranks/rank-{rank:05}")),
        };
        (0..self.ranks).map(of_rank).collect()
    }

    /// Returns the newest step that is saved in the run's folder; 0 if there is none.
    pub(super) fn newest(&self) -> Result<u64> {
        let folder = self.system.outside(&Self::folder());
        if !folder.exists() {
            return Ok(0);
        }
        Ok(run_dir::latest(&folder)?.map_or(0, |checkpoint| checkpoint.step()))
    }

    fn command(&self, words: &[String], wrapper: &[String]) -> Result<Command> {
        let plain = farflung(&words.iter().map(String::as_str).collect::<Vec<_>>())?;
        let mut inside = self.system.inside(&behind(wrapper, plain));
        inside.stdin(std::process::Stdio::null()).stdout(std::process::Stdio::null());
        inside.stderr(File::options().append(true).open(self.stderr.path())?);
        Ok(inside)
    }

    pub(super) fn start(&mut self) -> Result<Running> {
        let child = self.command(&self.words, &self.wrapper)?.spawn();
        Ok(Running(child.context("failed to start `nsenter`, from util-linux")?))
    }

    /// Runs to the end.
    pub(super) fn run(&mut self, code: i32) -> Result<Outcome> {
        let running = self.start()?;
        self.end(running, code)
    }

    /// Waits for the end, checks the files, makes room, and continues the run.
    pub(super) fn end(&mut self, mut running: Running, code: i32) -> Result<Outcome> {
        let status = running.end()?;
        let said = fs::read_to_string(self.stderr.path())?;
        let mut reasons = Vec::new();
        let (mut good, mut left, mut saved) = (true, 0, 0);
        for folder in self.folders().iter().filter(|folder| folder.exists()) {
            for entry in fs::read_dir(folder)? {
                left += usize::from(entry?.file_name().to_string_lossy().starts_with('.'));
            }
            let path = folder.join("events.jsonl");
            let told = if path.exists() { events::read(&path)? } else { Vec::new() };
            let newest = run_dir::latest(folder)?.map_or(0, |checkpoint| checkpoint.step());
            for event in told {
                match event.what {
                    EventKind::Saved { .. } => good &= newest >= event.step,
                    EventKind::Unsaved { reason } => reasons.push(reason),
                    _ => {}
                }
            }
            let rows = folder.join("metrics.jsonl");
            if rows.exists() {
                metrics::read(&rows)?;
            }
            saved = saved.max(newest);
        }
        // The events themselves may have had no room.
        let lines = said.lines().filter(|line| line.contains("there is no room"));
        reasons.extend(lines.map(str::to_owned));
        let folder = Self::folder().display().to_string();
        let has_bytes = |reason: &String| {
            ["needs ", "need "].iter().any(|word| reason.contains(word)) && reason.contains('B')
        };
        let named = reasons.iter().all(|reason| reason.contains(&folder) && has_bytes(reason));
        let resumed = self.resumes(saved)?;
        Ok(Outcome {
            failed: reasons.len(),
            good,
            resumed,
            left,
            named,
            panicked: said.contains("panicked at"),
            killed: status.signal().is_some() || status.code() == Some(128 + 25),
            right_code: status.code() == Some(code),
            status,
            said,
        })
    }

    /// Makes room, and continues the run for two steps after its newest checkpoint.
    fn resumes(&self, saved: u64) -> Result<bool> {
        self.system.make_room()?;
        let mut words: Vec<String> = self.words.clone();
        if self.is_host {
            // A host waits for the members of its former run; one process continues in its folder instead.
            words = Vec::new();
            words.extend(self.words.iter().take_while(|word| *word != "--listen").cloned());
        }
        let at = words.iter().position(|word| word == "--steps").context("the run has no --steps")?;
        words[at + 1] = (saved + 2).to_string();
        words.extend(["--resume".to_owned(), "auto".to_owned()]);
        if self.is_host {
            words.extend(["--listen".to_owned(), "127.0.0.1:0".to_owned()]);
            let key = FileSystem::path("key").display().to_string();
            words.extend(["--key-file".to_owned(), key]);
        }
        let mut running = Running(self.command(&words, &[])?.spawn()?);
        let done = running.end()?.success();
        Ok(done && self.newest()? == saved + 2)
    }
}

/// A running process. Dropping this kills it.
pub(super) struct Running(Child);

impl Running {
    fn wait_until<T>(&mut self, what: &str, mut done: impl FnMut() -> Result<Option<T>>) -> Result<T> {
        for _ in 0..PATIENCE.as_millis() / POLL.as_millis() {
            if let Some(value) = done()? {
                return Ok(value);
            }
            let ended = self.0.try_wait()?;
            ensure!(ended.is_none(), "the run ended before {what}: {ended:?}");
            thread::sleep(POLL);
        }
        anyhow::bail!("waited in vain for {what}")
    }

    /// Waits until a step after `step` is saved.
    pub(super) fn wait_for_save(&mut self, attempt: &Attempt<'_>, step: u64) -> Result<()> {
        let latest = attempt.system.outside(&Attempt::folder()).join("latest");
        self.wait_until("a checkpoint", || {
            let text = fs::read_to_string(&latest).unwrap_or_default();
            let saved: u64 = text.trim().trim_start_matches("step-").parse().unwrap_or(0);
            Ok((saved > step).then_some(()))
        })
    }

    /// Waits until the run has said that a save failed.
    pub(super) fn wait_for_failure(&mut self, attempt: &Attempt<'_>) -> Result<()> {
        let path = attempt.stderr.path().to_owned();
        self.wait_until("a save that fails", || {
            Ok(fs::read_to_string(&path)?.contains("no room").then_some(()))
        })
    }

    pub(super) fn signal(&self, signal: Signal) -> Result<()> {
        let pid = i32::try_from(self.0.id()).ok().and_then(Pid::from_raw).context("invalid process id")?;
        Ok(kill_process(pid, signal)?)
    }

    fn end(&mut self) -> Result<ExitStatus> {
        for _ in 0..PATIENCE.as_millis() / POLL.as_millis() {
            if let Some(status) = self.0.try_wait()? {
                return Ok(status);
            }
            thread::sleep(POLL);
        }
        anyhow::bail!("the run did not end")
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // The process may have ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
