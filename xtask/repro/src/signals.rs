//! Sends signals at random moments of a run, with a terminal, a file, a closed pipe or a full device as stderr,
//! and also within long steps, with a stopped rank and while data loads. What was trained must be saved, and
//! the run must end within 2 s with the right exit code.

mod within;

use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result};
use farflung::base::Philox;
use farflung::{metrics, run_dir};
use rustix::fs::{Mode, OFlags};
use rustix::process::{Pid, Signal, kill_process};
use rustix::pty;

use crate::binary::farflung;
use crate::harness::{Bench, Options, Report, Threshold};
use crate::machine::now;

pub(crate) const BENCH: Bench = Bench {
    name: "signals",
    claim: "SIGINT, SIGTERM, SIGHUP and the warnings of schedulers at 100 random moments, with stderr a terminal, a file, a closed pipe \
            and a full device in turn, and also within long steps, with a stopped rank and while data loads: \
            no checkpoint is lost, and each run ends within 2 s with the right exit code",
    source: "ours",
    seed: 1337,
    run,
};

/// The signals, and the exit codes after them.
const SIGNALS: [(Signal, i32); 6] = [
    (Signal::INT, 130),
    (Signal::TERM, 143),
    (Signal::HUP, 129),
    (Signal::USR1, 138),
    (Signal::USR2, 140),
    (Signal::XCPU, 152),
];

/// The longest time from the moment when a run has locked its folder to its signal.
const LATEST: Duration = Duration::from_millis(600);

/// Longest time that a run may take to start or to end; after that it counts as hanging.
const PATIENCE: Duration = Duration::from_secs(20);

/// Kind of a run's stderr.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Stderr {
    Terminal,
    File,
    ClosedPipe,
    FullDevice,
}

impl Stderr {
    const ALL: [Self; 4] = [Self::Terminal, Self::File, Self::ClosedPipe, Self::FullDevice];

    fn name(self) -> &'static str {
        match self {
            Self::Terminal => "terminal",
            Self::File => "file",
            Self::ClosedPipe => "closed pipe",
            Self::FullDevice => "full device",
        }
    }
}

/// A pseudo-terminal. What is written to `inner` is read from `outer` and dropped.
struct Terminal {
    outer: File,
    inner: File,
}

impl Terminal {
    fn new() -> Result<Self> {
        let flags = pty::OpenptFlags::RDWR | pty::OpenptFlags::NOCTTY | pty::OpenptFlags::CLOEXEC;
        let outer = pty::openpt(flags).context("failed to open a terminal")?;
        pty::grantpt(&outer)?;
        pty::unlockpt(&outer)?;
        let name =
            pty::ptsname(&outer, Vec::new())?.into_string().context("the terminal's name is not UTF-8")?;
        let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
        let inner = rustix::fs::open(&name, flags, Mode::empty());
        let inner = inner.with_context(|| format!("failed to open {name}"))?;
        Ok(Self { outer: outer.into(), inner: inner.into() })
    }

    /// Reads the output until `gone` is set, or until all writers have closed the terminal.
    fn watch(mut outer: File, gone: &AtomicBool) {
        let mut text = [0; 4096];
        while !gone.load(Ordering::Relaxed) && outer.read(&mut text).is_ok_and(|n| n > 0) {}
    }
}

/// Result of a signal.
#[derive(Default)]
struct Outcome {
    /// Seconds until the run ended.
    took: f64,
    right_code: bool,
    saved: bool,
}

fn run(report: &mut Report<'_>, options: &Options) -> Result<()> {
    let folder = tempfile::tempdir().context("failed to make a temporary folder")?;
    let text = folder.path().join("text.txt");
    fs::write(&text, "the quick brown fox jumps over the lazy dog. ".repeat(500))?;
    let random = Philox::new(report.seed(), 0);
    let times = if options.quick { 12 } else { 100 };
    let (mut lost, mut wrong) = (0_u32, 0_u32);
    let mut slowest = [0.0_f64; Stderr::ALL.len()];
    for time in 0..times {
        let (which, (signal, code)) = (time % Stderr::ALL.len(), SIGNALS[time % SIGNALS.len()]);
        let stderr = Stderr::ALL[which];
        // Each run resumes where the previous one with the same kind of stderr was saved.
        let out = folder.path().join(stderr.name());
        let late = Duration::from_micros(random.below(time as u64, LATEST.as_micros() as u64));
        let outcome = stop(stderr, &text, &out, late, (signal, code))
            .with_context(|| format!("signal {time}, stderr a {}", stderr.name()))?;
        slowest[which] = slowest[which].max(outcome.took);
        lost += u32::from(!outcome.saved);
        wrong += u32::from(!outcome.right_code);
    }
    report.row("signals", times as f64, "1", Threshold::None)?;
    report.row("checkpoints lost", f64::from(lost), "1", Threshold::AtMost(0.0))?;
    report.row("wrong exit codes", f64::from(wrong), "1", Threshold::AtMost(0.0))?;
    for (stderr, slowest) in Stderr::ALL.into_iter().zip(slowest) {
        let metric = format!("longest time to end, stderr a {}", stderr.name());
        report.row(&metric, slowest, "s", Threshold::AtMost(2.0))?;
    }
    within::run(report, options, &text)
}

/// Starts or resumes a run, signals it after `late`, and checks the files that it leaves.
fn stop(
    stderr: Stderr,
    text: &Path,
    out: &Path,
    late: Duration,
    (signal, code): (Signal, i32),
) -> Result<Outcome> {
    let (before, _) = last_step_and_checkpoint(out)?;
    let mut command =
        farflung(&["train", "--layers", "2", "--heads", "2", "--dim", "16", "--context", "16"])?;
    command.args(["--batch", "2", "--warmup", "0", "--threads", "1", "--workers", "2", "--steps", "1000000"]);
    // Output lines and checkpoints are frequent, so that some signals arrive during them.
    command.args(["--eval-every", "2", "--eval-batches", "1", "--checkpoint-every", "5", "--resume", "auto"]);
    command.arg("--data").arg(text).arg("--out").arg(out).env("TERM", "xterm");
    let gone = Arc::new(AtomicBool::new(false));
    let mut terminal = None;
    match stderr {
        Stderr::Terminal => {
            let Terminal { outer, inner } = Terminal::new()?;
            command.stderr(inner);
            let gone = Arc::clone(&gone);
            terminal = Some(thread::spawn(move || Terminal::watch(outer, &gone)));
        }
        Stderr::File => {
            command.stderr(File::create(out.with_extension("log"))?);
        }
        Stderr::ClosedPipe => {
            command.stderr(Stdio::piped());
        }
        Stderr::FullDevice => {
            command.stderr(File::options().write(true).open("/dev/full")?);
        }
    }
    let mut child = command.spawn().context("failed to start `farflung`")?;
    // Closes our own ends of the run's output.
    drop((command, child.stderr.take()));
    let mut running = Running(child);
    running.wait_for(out)?;
    thread::sleep(late);
    let start = now();
    // On SIGHUP the watching thread closes the terminal after the next text that it reads.
    gone.store(signal == Signal::HUP, Ordering::Relaxed);
    running.signal(signal)?;
    let status = running.end()?;
    let took = start.elapsed().as_secs_f64();
    if let Some(terminal) = terminal {
        terminal.join().map_err(|_| anyhow::anyhow!("the terminal's thread panicked"))?;
    }
    let (logged, saved) = last_step_and_checkpoint(out)?;
    // A run that was still loading has done no further steps.
    let saved = saved.unwrap_or(0) == logged && logged >= before;
    Ok(Outcome { took, right_code: status.is_some_and(|status| status.code() == Some(code)), saved })
}

/// Returns the last step that a run logged, and the step of its newest checkpoint, after checking all of its
/// bytes.
fn last_step_and_checkpoint(out: &Path) -> Result<(u64, Option<u64>)> {
    // The folder may not exist yet, and a rank's own folder has no metrics.
    if !out.exists() {
        return Ok((0, None));
    }
    let rows = out.join("metrics.jsonl");
    let rows = if rows.exists() { metrics::read(&rows)? } else { Vec::new() };
    let logged = rows.last().map_or(0, |row| row.step);
    Ok((logged, run_dir::latest(out)?.map(|checkpoint| checkpoint.step())))
}

/// A running process. Dropping this kills it.
struct Running(Child);

impl Running {
    /// Waits until the run has locked its folder. It handles signals from then on.
    fn wait_for(&mut self, out: &Path) -> Result<()> {
        let lock: PathBuf = out.join("run.lock");
        let own = self.0.id().to_string();
        for _ in 0..PATIENCE.as_millis() {
            if fs::read_to_string(&lock).is_ok_and(|pid| pid.trim() == own) {
                return Ok(());
            }
            if let Some(status) = self.0.try_wait()? {
                anyhow::bail!("the run ended before it got the signal: {status}");
            }
            thread::sleep(Duration::from_millis(1));
        }
        anyhow::bail!("timed out: the run did not start")
    }

    fn signal(&self, signal: Signal) -> Result<()> {
        let pid = i32::try_from(self.0.id()).ok().and_then(Pid::from_raw).context("invalid process id")?;
        Ok(kill_process(pid, signal)?)
    }

    /// Waits for the end and returns the exit status; `None` if the run hangs.
    fn end(&mut self) -> Result<Option<ExitStatus>> {
        for _ in 0..PATIENCE.as_millis() {
            if let Some(status) = self.0.try_wait()? {
                return Ok(Some(status));
            }
            thread::sleep(Duration::from_millis(1));
        }
        Ok(None)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // The process may have ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
