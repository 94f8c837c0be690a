//! Checks which rank the others name when a rank of a launched job is killed, stopped or cut off.

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use farflung::base::Philox;
use rustix::net::{Shutdown, shutdown};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, Signal, kill_process, pidfd_getfd, pidfd_open};

use crate::binary::farflung;
use crate::harness::{Bench, Options, Report, Threshold};

pub(crate) const BENCH: Bench = Bench {
    name: "blame",
    claim: "each rank of ddp, DiLoCo and pipelines under `launch` is killed, stopped, or loses its \
            connections: every survivor names that rank, even if it never waited for it; a rank that was cut \
            off reports this itself; the launcher names a rank that was killed or stopped; and all exit with \
            code 75",
    source: "ours",
    seed: 1337,
    run,
};

/// Longest time that a run may take to start or to end; after that it counts as hanging.
const PATIENCE: Duration = Duration::from_secs(40);

/// A fault of a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum InjectedFault {
    Kill,
    Stop,
    /// All connections of the rank end, but the rank stays alive.
    Cut,
}

/// A kind of job.
struct Case {
    name: &'static str,
    ranks: usize,
    args: &'static str,
}

const CASES: [Case; 4] = [
    Case { name: "ddp", ranks: 3, args: "--sync ddp" },
    Case { name: "diloco", ranks: 3, args: "--sync diloco --sync-every 5" },
    Case { name: "3 stages", ranks: 3, args: "--stages 3 --microbatches 4" },
    Case { name: "2 stages, 2 replicas", ranks: 4, args: "--stages 2 --microbatches 2 --sync ddp" },
];

fn run(report: &mut Report<'_>, options: &Options) -> Result<()> {
    let folder = tempfile::tempdir().context("failed to make a temporary folder")?;
    let text = folder.path().join("text.txt");
    fs::write(&text, "the quick brown fox jumps over the lazy dog. ".repeat(500))?;
    // Quick runs test every second kind of job.
    for (stream, case) in (0..).zip(&CASES).step_by(if options.quick { 2 } else { 1 }) {
        let random = Philox::new(report.seed(), stream);
        for (number, fault) in (0..).zip([InjectedFault::Kill, InjectedFault::Stop, InjectedFault::Cut]) {
            let (mut survivors, mut wrong, mut codes, mut launcher) = (0_u32, 0_u32, 0_u32, 0_u32);
            let victims = if options.quick {
                random.below(100 + number, case.ranks as u64)..case.ranks as u64
            } else {
                0..case.ranks as u64
            };
            for victim in victims.take(if options.quick { 1 } else { case.ranks }) {
                let late = Duration::from_millis(random.below(number * 8 + victim, 300));
                let seen = inject_fault(case, fault, victim as usize, late, &text)
                    .with_context(|| format!("{}, {fault:?} of rank {victim}", case.name))?;
                survivors += seen.survivors;
                wrong += seen.wrong;
                codes += u32::from(!seen.right_code);
                launcher += u32::from(!seen.launcher_names);
            }
            let of = format!("{}, {fault:?}", case.name).to_lowercase();
            report.row(&format!("{of}: survivors"), f64::from(survivors), "1", Threshold::None)?;
            report.row(
                &format!("{of}: survivors that name another rank"),
                f64::from(wrong),
                "1",
                Threshold::AtMost(0.0),
            )?;
            report.row(&format!("{of}: wrong exit codes"), f64::from(codes), "1", Threshold::AtMost(0.0))?;
            if fault != InjectedFault::Cut {
                let metric = format!("{of}: runs in which the launcher names another rank");
                report.row(&metric, f64::from(launcher), "1", Threshold::AtMost(0.0))?;
            }
        }
    }
    Ok(())
}

/// What the ranks and the launcher reported after a fault.
struct FaultOutcome {
    survivors: u32,
    wrong: u32,
    right_code: bool,
    launcher_names: bool,
}

fn inject_fault(
    case: &Case,
    fault: InjectedFault,
    victim: usize,
    late: Duration,
    text: &Path,
) -> Result<FaultOutcome> {
    let folder = tempfile::tempdir().context("failed to make a temporary folder")?;
    let out = folder.path().join("run");
    let ranks = case.ranks.to_string();
    let mut command: Command = farflung(&["launch", "-n", &ranks, "--grace", "2s", "--", "train"])?;
    command.args(["--layers", "3", "--heads", "2", "--dim", "16", "--context", "16", "--batch", "2"]);
    command.args(["--warmup", "0", "--threads", "1", "--steps", "1000000", "--eval-batches", "1"]);
    command.args(["--checkpoint-every", "0", "--deadline", "3s"]).args(case.args.split_whitespace());
    command.arg("--data").arg(text).arg("--out").arg(&out).stdin(Stdio::null()).stdout(Stdio::null());
    let said = folder.path().join("said");
    command.stderr(fs::File::create(&said)?);
    let mut job = Job(command.spawn().context("failed to start `farflung`")?);
    let rows = out.join("metrics.jsonl");
    job.wait_for(|| fs::metadata(&rows).is_ok_and(|rows| rows.len() > 0))?;
    thread::sleep(late);
    let processes = job.ranks()?;
    ensure!(processes.len() == case.ranks, "the launcher has {} ranks", processes.len());
    match fault {
        InjectedFault::Kill => kill_process(processes[victim], Signal::KILL)?,
        InjectedFault::Stop => kill_process(processes[victim], Signal::STOP)?,
        InjectedFault::Cut => cut(processes[victim])?,
    }
    let code = job.end()?;
    let said = fs::read_to_string(&said)?;
    let errors = |rank: usize| {
        let prefix = format!("[{rank}] error: ");
        said.lines().filter_map(move |line| line.strip_prefix(&prefix)).map(str::to_owned).next()
    };
    let (mut survivors, mut wrong) = (0, 0);
    for rank in 0..case.ranks {
        let right = match (rank == victim, fault) {
            (true, InjectedFault::Cut) => format!("rank {victim} has lost all other ranks"),
            (true, _) => continue,
            (false, _) => format!("peer {victim} was lost"),
        };
        survivors += 1;
        let error = errors(rank).unwrap_or_default();
        if !error.starts_with(&right) {
            wrong += 1;
            print_wrong_error(case, fault, victim, rank, &error, &said);
        }
    }
    let launcher_names = said.lines().any(|line| line.starts_with(&format!("error: rank {victim} failed")));
    Ok(FaultOutcome { survivors, wrong, right_code: code == Some(75), launcher_names })
}

/// Prints a wrong error of a rank next to the bench's own lines.
fn print_wrong_error(case: &Case, fault: InjectedFault, victim: usize, rank: usize, error: &str, said: &str) {
    let all: Vec<&str> =
        said.lines().filter(|line| line.contains("error") || line.contains("cause")).collect();
    farflung::terminal::write_stderr(format!(
        "{}, {fault:?} of rank {victim}: rank {rank} reports `{error}`\n{}\n",
        case.name,
        all.join("\n")
    ));
}

/// Ends all connections of a process. A switch that loses its power does the same, except that here the process
/// is notified at once.
fn cut(process: Pid) -> Result<()> {
    let handle = pidfd_open(process, PidfdFlags::empty())?;
    // The process is stopped first, so that all connections end together. Otherwise it would report the end of
    // one connection over another that is still open.
    kill_process(process, Signal::STOP)?;
    for entry in fs::read_dir(format!("/proc/{}/fd", process.as_raw_nonzero()))? {
        let entry = entry?;
        let is_socket =
            fs::read_link(entry.path()).is_ok_and(|to| to.to_string_lossy().starts_with("socket:"));
        if let (true, Some(Ok(number))) = (is_socket, entry.file_name().to_str().map(str::parse::<i32>)) {
            let socket = pidfd_getfd(&handle, number, PidfdGetfdFlags::empty())?;
            // This fails for a listening socket, which has no connection to end.
            let _ = shutdown(&socket, Shutdown::Both);
        }
    }
    kill_process(process, Signal::CONT)?;
    Ok(())
}

/// A launched job. Dropping it kills the job.
struct Job(Child);

impl Job {
    fn wait_for(&mut self, is_there: impl Fn() -> bool) -> Result<()> {
        for _ in 0..PATIENCE.as_millis() {
            if is_there() {
                return Ok(());
            }
            if let Some(status) = self.0.try_wait()? {
                anyhow::bail!("the job ended too early: {status}");
            }
            thread::sleep(Duration::from_millis(1));
        }
        anyhow::bail!("timed out: the job made no progress")
    }

    /// Returns the processes of its ranks, in order of rank.
    fn ranks(&self) -> Result<Vec<Pid>> {
        let id = self.0.id();
        let text = fs::read_to_string(format!("/proc/{id}/task/{id}/children"))?;
        let pid = |word: &str| word.parse().ok().and_then(Pid::from_raw).context("invalid process id");
        text.split_whitespace().map(pid).collect()
    }

    /// Waits for the job and returns its exit code; `None` if it hangs or was killed.
    fn end(&mut self) -> Result<Option<i32>> {
        for _ in 0..PATIENCE.as_millis() {
            if let Some(status) = self.0.try_wait()? {
                return Ok(status.code());
            }
            thread::sleep(Duration::from_millis(1));
        }
        Ok(None)
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        // The ranks end with the launcher. The launcher may have ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
