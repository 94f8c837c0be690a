//! Sends INT, TERM or HUP to a run that cannot end its step soon (the step is long, another rank does not
//! respond, or the run still waits for its data), and checks its checkpoint, its exit code and the time to end.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use farflung::base::Philox;
use rustix::process::{Pid, Signal, kill_process};

use super::{Outcome, PATIENCE, Running, SIGNALS, last_step_and_checkpoint};
use crate::binary::farflung;
use crate::harness::{Options, Report, Threshold};
use crate::machine::now;

/// Reason why a run cannot end its step.
#[derive(Clone, Copy)]
enum BlockedBy {
    /// A step takes seconds.
    LongStep,
    /// One rank is stopped, and the launcher gets the signal.
    Launched,
    /// One rank is stopped, and each of the others gets the signal.
    Alone,
    /// The data is a pipe without a writer.
    Loading,
}

impl BlockedBy {
    const ALL: [Self; 4] = [Self::LongStep, Self::Launched, Self::Alone, Self::Loading];

    fn name(self) -> &'static str {
        match self {
            Self::LongStep => "within a long step",
            Self::Launched => "with a stopped rank, the launcher gets the signal",
            Self::Alone => "with a stopped rank, the others get the signal",
            Self::Loading => "while loading",
        }
    }
}

pub(super) fn run(report: &mut Report<'_>, options: &Options, text: &Path) -> Result<()> {
    let times = if options.quick { 2 } else { 10 };
    for (stream, blocked_by) in (1..).zip(BlockedBy::ALL) {
        let random = Philox::new(report.seed(), stream);
        let (mut lost, mut wrong, mut slowest) = (0_u32, 0_u32, 0.0_f64);
        for time in 0..times {
            let (signal, code) = SIGNALS[time as usize % SIGNALS.len()];
            let delay = Duration::from_millis(random.below(time * 2, 800));
            let stopped_rank = random.below(time * 2 + 1, 3) as usize;
            let outcome = stop(blocked_by, text, delay, stopped_rank, (signal, code))
                .with_context(|| format!("{}, signal {time}", blocked_by.name()))?;
            lost += u32::from(!outcome.saved);
            wrong += u32::from(!outcome.right_code);
            slowest = slowest.max(outcome.took);
        }
        let name = blocked_by.name();
        report.row(&format!("{name}: checkpoints lost"), f64::from(lost), "1", Threshold::AtMost(0.0))?;
        report.row(&format!("{name}: wrong exit codes"), f64::from(wrong), "1", Threshold::AtMost(0.0))?;
        report.row(&format!("{name}: longest time to end"), slowest, "s", Threshold::AtMost(2.0))?;
    }
    Ok(())
}

fn command(blocked_by: BlockedBy, text: &Path, out: &Path) -> Result<Command> {
    let model =
        ["train", "--layers", "2", "--heads", "2", "--warmup", "0", "--threads", "1", "--steps", "1000000"];
    let mut command = match blocked_by {
        BlockedBy::LongStep | BlockedBy::Loading => farflung(&model)?,
        BlockedBy::Launched | BlockedBy::Alone => {
            farflung(&[&["launch", "-n", "3", "--"][..], &model].concat())?
        }
    };
    match blocked_by {
        // With these sizes a step takes one or two seconds on two cores.
        BlockedBy::LongStep => {
            command.args(["--dim", "64", "--context", "128", "--batch", "192", "--workers", "2"])
        }
        _ => command.args(["--dim", "16", "--context", "16", "--batch", "2"]),
    };
    command.args(["--eval-batches", "1", "--checkpoint-every", "0", "--sync", "ddp"]);
    command.arg("--data").arg(text).arg("--out").arg(out);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    Ok(command)
}

/// Starts a run, makes it unable to end its step, signals it after `delay`, and checks the files that it
/// leaves.
fn stop(
    blocked_by: BlockedBy,
    text: &Path,
    delay: Duration,
    stopped_rank: usize,
    (signal, code): (Signal, i32),
) -> Result<Outcome> {
    let folder = tempfile::tempdir().context("failed to make a temporary folder")?;
    let out = folder.path().join("run");
    let mut data = text.to_owned();
    if let BlockedBy::Loading = blocked_by {
        data = folder.path().join("pipe");
        ensure!(Command::new("mkfifo").arg(&data).status()?.success(), "failed to make a pipe");
    }
    let mut running =
        Running(command(blocked_by, &data, &out)?.spawn().context("failed to start `farflung`")?);
    if let BlockedBy::Loading = blocked_by {
        thread::sleep(Duration::from_millis(200) + delay);
        let start = now();
        running.signal(signal)?;
        let status = running.end()?;
        let right_code = status.is_some_and(|status| status.code() == Some(code));
        // Nothing has been trained, so nothing must be saved.
        return Ok(Outcome {
            took: start.elapsed().as_secs_f64(),
            right_code,
            saved: !out.join("latest").exists(),
        });
    }
    wait_for(&mut running, || Ok((last_step_and_checkpoint(&out)?.0 >= 1).then_some(())))?;
    thread::sleep(delay);
    let ranks = children(&running)?;
    let own = |rank: usize| match rank {
        0 => out.clone(),
        rank => out.join(format!("ranks/rank-{rank:05}")),
    };
    match blocked_by {
        BlockedBy::LongStep | BlockedBy::Loading => {}
        BlockedBy::Launched | BlockedBy::Alone => {
            ensure!(ranks.len() == 3, "the launcher has {} ranks", ranks.len());
            kill_process(ranks[stopped_rank], Signal::STOP)?;
            // The other ranks need this time to reach the point where they wait for the stopped one.
            thread::sleep(Duration::from_millis(200));
        }
    }
    let start = now();
    let BlockedBy::Alone = blocked_by else {
        running.signal(signal)?;
        let status = running.end()?;
        let took = start.elapsed().as_secs_f64();
        let (logged, saved) = last_step_and_checkpoint(&out)?;
        let saved = saved == Some(logged)
            && (ranks.len() < 3
                || last_step_and_checkpoint(&own(1))?.1 == saved
                    && last_step_and_checkpoint(&own(2))?.1 == saved);
        return Ok(Outcome { took, right_code: status.is_some_and(|s| s.code() == Some(code)), saved });
    };
    let others: Vec<usize> = (0..3).filter(|&rank| rank != stopped_rank).collect();
    for &rank in &others {
        kill_process(ranks[rank], signal)?;
    }
    wait_for(&mut running, || Ok(others.iter().all(|&rank| has_ended(ranks[rank])).then_some(())))?;
    let took = start.elapsed().as_secs_f64();
    kill_process(ranks[stopped_rank], Signal::KILL)?;
    // The stopped rank was killed, so the launcher reports that the job can be started again (75).
    let right_code = running.end()?.is_some_and(|status| status.code() == Some(75));
    let steps =
        others.iter().map(|&rank| Ok(last_step_and_checkpoint(&own(rank))?.1)).collect::<Result<Vec<_>>>()?;
    // A step that only one of the two has saved is enough, since the others can continue from it.
    let logged = if stopped_rank == 0 { 1 } else { last_step_and_checkpoint(&out)?.0 };
    let saved = steps.iter().all(Option::is_some) && steps.iter().flatten().any(|&step| step >= logged);
    Ok(Outcome { took, right_code, saved })
}

/// Waits until `look` returns something, while the process runs.
fn wait_for(running: &mut Running, mut look: impl FnMut() -> Result<Option<()>>) -> Result<()> {
    for _ in 0..PATIENCE.as_millis() {
        if look()?.is_some() {
            return Ok(());
        }
        if let Some(status) = running.0.try_wait()? {
            anyhow::bail!("the run ended too early: {status}");
        }
        thread::sleep(Duration::from_millis(1));
    }
    anyhow::bail!("timed out: the run made no progress")
}

/// Returns the processes that a process has started, in order of their start.
fn children(running: &Running) -> Result<Vec<Pid>> {
    let id = running.0.id();
    let text = fs::read_to_string(format!("/proc/{id}/task/{id}/children"))?;
    let pid = |word: &str| word.parse().ok().and_then(Pid::from_raw).context("invalid process id");
    text.split_whitespace().map(pid).collect()
}

/// Returns whether a process has ended, even if its parent has not collected it yet.
fn has_ended(pid: Pid) -> bool {
    let stat = fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero()));
    stat.is_ok_and(|stat| stat.contains(") Z "))
        || !Path::new(&format!("/proc/{}", pid.as_raw_nonzero())).exists()
}
