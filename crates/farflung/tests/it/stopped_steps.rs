//! Runs that signals stop within a step: the step is dropped, the steps before it are saved at once, and the
//! resumed run has the same bits as one that was never stopped.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use crate::child::{send, wait_until};
use crate::tiny::{Run, farflung};
use farflung::metrics;
use rustix::process::Signal;

/// Time limit of a stop: longer than any stop takes on a busy machine, and shorter than the deadline of waiting
/// ranks.
const SOON: Duration = Duration::from_secs(15);

/// Settings with which a resumed run equals a run with more steps.
const SAME: &str = "--lr-schedule constant --digest-every 1 --checkpoint-every 0";

fn start(mut command: Command, args: &[String]) -> Child {
    command.args(args).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
}

fn launch(processes: usize) -> Command {
    let mut launch = farflung();
    launch.args(["launch", "-n", &processes.to_string(), "--"]);
    launch
}

/// Returns the number of steps that a run has recorded.
fn steps(out: &Path) -> u64 {
    std::fs::read_to_string(out.join("metrics.jsonl")).unwrap_or_default().matches('\n').count() as u64
}

fn wait_for_steps(out: &Path, child: &mut Child, wanted: u64) {
    wait_until("its steps", || {
        assert_eq!(child.try_wait().unwrap(), None, "it ended by itself");
        (steps(out) >= wanted).then_some(())
    });
}

/// Waits for the end; returns the exit status and stderr.
fn end(mut child: Child) -> (ExitStatus, String) {
    #[expect(clippy::disallowed_methods, reason = "how long a process takes to end")]
    let begun = Instant::now();
    let stderr = child.stderr.take().unwrap();
    let said = thread::spawn(|| std::io::read_to_string(stderr).unwrap());
    let status = wait_until("its end", || child.try_wait().unwrap());
    assert!(begun.elapsed() < SOON, "it took {:?}", begun.elapsed());
    (status, said.join().unwrap())
}

/// Returns the step of a rank's newest checkpoint.
fn saved(out: &Path) -> Option<u64> {
    let latest = std::fs::read_to_string(out.join("latest")).ok()?;
    latest.trim().strip_prefix("step-")?.parse().ok()
}

/// Returns the children that a process's main thread has started, in order.
fn children(parent: &Child) -> Vec<u32> {
    let id = parent.id();
    let text = std::fs::read_to_string(format!("/proc/{id}/task/{id}/children")).unwrap();
    text.split_whitespace().map(|pid| pid.parse().unwrap()).collect()
}

fn digests(out: &Path) -> Vec<Option<String>> {
    metrics::read(&out.join("metrics.jsonl")).unwrap().into_iter().map(|row| row.digest).collect()
}

/// Continues for some steps, and compares with a run that was never stopped.
fn goes_on(run: &Run, command: impl Fn() -> Command, args: &str, more: u64) {
    let (stopped, whole) = (run.at("run"), run.at("whole"));
    let wanted = saved(&stopped).unwrap() + more;
    for (out, resume) in [(&stopped, "auto"), (&whole, "no")] {
        let args = format!("{args} {SAME} --steps {wanted} --resume {resume} --out {}", out.display());
        let (status, said) = end(start(command(), &run.args(&args)));
        assert!(status.success(), "{said}");
    }
    assert_eq!(steps(&stopped), wanted);
    // The row of a step that was done but not evaluated has no digest.
    let bits: Vec<_> = digests(&stopped).into_iter().zip(digests(&whole)).collect();
    let mut bits_since = bits.iter().skip((wanted - more) as usize);
    assert!(bits_since.all(|(stopped, whole)| stopped == whole), "{bits:?}");
    assert!(bits.last().is_some_and(|(stopped, _)| stopped.is_some()), "{bits:?}");
}

/// A first step that takes many seconds is dropped when the signal arrives.
#[test]
fn a_first_step_that_is_long_is_dropped() {
    let pipedream = "--workers 2 --stages 2 --microbatches 2 --schedule pipedream --clip 0";
    for args in ["", "--sync diloco", "--workers 2 --stages 2 --microbatches 2", pipedream] {
        let run = Run::new();
        let large = "--layers 4 --dim 512 --heads 8 --context 64 --batch 64";
        let args = format!("{args} {large} --out {}", run.at("run").display());
        let mut child = start(farflung(), &run.args(&args));
        let lock = run.at("run/run.lock");
        wait_until("its start", || {
            assert_eq!(child.try_wait().unwrap(), None, "it ended by itself");
            lock.exists().then_some(())
        });
        thread::sleep(Duration::from_secs(2));
        assert_eq!(child.try_wait().unwrap(), None);
        send(child.id(), Signal::INT);
        let (status, said) = end(child);
        assert_eq!(status.code(), Some(130), "{said}");
        assert!(said.contains("stopped by SIGINT"), "{said}");
        assert_eq!(saved(&run.at("run")), None);
    }
}

/// Steps take half a second or more, so that the signal arrives in a step that is dropped or has just been
/// done.
#[test]
fn long_steps_are_saved_up_to_the_last_that_was_done() {
    for args in [
        "--batch 160 --dim 32 --context 64 --sync ddp --codec int4",
        "--batch 160 --dim 32 --context 64 --workers 2 --stages 2 --microbatches 2",
        // Parameters change within a step.
        "--batch 80 --dim 32 --context 64 --workers 2 --stages 2 --microbatches 4 --schedule pipedream --clip 0",
        "--batch 80 --dim 32 --context 64 --workers 4 --stages 2 --microbatches 4 --schedule pipedream-2bw --clip 0 \
         --codec int8",
    ] {
        let run = Run::new();
        let out = run.at("run");
        let mut child =
            start(farflung(), &run.args(&format!("{args} {SAME} --steps 100000 --out {}", out.display())));
        wait_for_steps(&out, &mut child, 2);
        thread::sleep(Duration::from_millis(100));
        send(child.id(), Signal::TERM);
        let (status, said) = end(child);
        assert_eq!(status.code(), Some(143), "{said}");
        assert_eq!(saved(&out), Some(steps(&out)), "{said}");
        let line = format!("step {} is saved in {}", steps(&out), out.display());
        assert!(said.contains(&line), "{said}");
        let resume = format!("train --config {0}/config.toml --out {0} --resume auto", out.display());
        assert!(said.contains(&resume), "{said}");
        goes_on(&run, farflung, args, 1);
    }
}

/// Replicas have different parameters between averages, so the run goes back to the last average.
#[test]
fn local_steps_are_dropped_back_to_the_last_average() {
    const ARGS: &str = "--sync diloco --sync-every 150 --codec int8 --batch 16 --context 32 --dim 32";
    let run = Run::new();
    let out = run.at("run");
    let mut child =
        start(farflung(), &run.args(&format!("{ARGS} {SAME} --steps 100000 --out {}", out.display())));
    wait_for_steps(&out, &mut child, 150);
    send(child.id(), Signal::INT);
    let (status, said) = end(child);
    assert_eq!(status.code(), Some(130), "{said}");
    let step = saved(&out).unwrap();
    assert!(step == steps(&out) && step.is_multiple_of(150), "{said}");
    goes_on(&run, farflung, ARGS, 150);
}

/// One rank is frozen and another one gets a signal: the other one saves without the frozen rank, long before
/// the deadline. The frozen rank also saves when it is resumed.
#[test]
fn a_rank_whose_peer_stands_still_saves() {
    const ARGS: &str = "--sync ddp --codec int4";
    let run = Run::new();
    let out = run.at("run");
    let mut child =
        start(launch(3), &run.args(&format!("{ARGS} {SAME} --steps 100000 --out {}", out.display())));
    wait_for_steps(&out, &mut child, 5);
    let ranks = children(&child);
    send(ranks[1], Signal::STOP);
    thread::sleep(Duration::from_millis(300));
    send(ranks[0], Signal::INT);
    wait_until("what it saves", || saved(&out));
    // Rank 2 was notified, so it no longer waits.
    wait_until("what the other saves", || saved(&out.join("ranks/rank-00002")));
    assert_eq!(saved(&out.join("ranks/rank-00001")), None);
    send(ranks[1], Signal::CONT);
    let (status, said) = end(child);
    // A restart is possible, since the launcher itself was not asked to stop.
    assert_eq!(status.code(), Some(75), "{said}");
    assert!(said.contains("[2] error: rank 0 was stopped; step"), "{said}");
    assert_eq!(saved(&out), Some(steps(&out)), "{said}");
    let all = ["", "ranks/rank-00001", "ranks/rank-00002"].map(|folder| saved(&out.join(folder)).unwrap());
    if all.iter().all(|step| *step == all[0]) {
        return goes_on(&run, || launch(3), ARGS, 3);
    }
    // The last step may have been committed on some ranks only. A rank without it gets its state from a rank
    // that has it, except for the residuals.
    let newest = all.iter().max().unwrap();
    assert!(all.iter().all(|step| step + 1 >= *newest), "{all:?}");
    let args = format!("{ARGS} {SAME} --steps {} --resume auto --out {}", newest + 3, out.display());
    let (status, said) = end(start(launch(3), &run.args(&args)));
    assert!(status.success(), "{said}");
    assert!(said.contains(&format!("resumed at step {newest}")), "{said}");
    assert!(said.contains(&format!("has no good checkpoint of step {newest}")), "{said}");
    assert_eq!(steps(&out), newest + 3);
}

/// The frozen rank is never resumed: the run continues from the other ranks' step, and the frozen rank gets its
/// state from them.
#[test]
fn a_step_saved_without_a_rank_is_gone_on_from() {
    let run = Run::new();
    let out = run.at("run");
    let args = format!("--sync ddp --checkpoint-every 3 --out {}", out.display());
    let child = start(launch(3), &run.args(&format!("{args} --steps 100000")));
    wait_until("a checkpoint", || saved(&out.join("ranks/rank-00001")));
    let ranks = children(&child);
    send(ranks[1], Signal::STOP);
    // The other ranks continue until they wait for the frozen rank.
    thread::sleep(Duration::from_millis(300));
    let behind = saved(&out.join("ranks/rank-00001")).unwrap();
    send(ranks[0], Signal::INT);
    send(ranks[2], Signal::INT);
    wait_until("their end", || (!runs(ranks[0]) && !runs(ranks[2])).then_some(()));
    send(ranks[1], Signal::KILL);
    let (_, said) = end(child);
    // The last step may have arrived on only one of the two ranks.
    let own = saved(&out).unwrap();
    assert_eq!(own, steps(&out), "{said}");
    let newest = own.max(saved(&out.join("ranks/rank-00002")).unwrap());
    assert!(newest <= steps(&out) + 1, "{said}");
    let (status, said) =
        end(start(launch(3), &run.args(&format!("{args} --steps {} --resume auto", newest + 2))));
    assert!(status.success(), "{said}");
    assert!(said.contains(&format!("resumed at step {newest}")), "{said}");
    assert_eq!(said.contains("rank 1 has no good checkpoint"), behind < newest, "{said}");
    assert_eq!(metrics::read(&out.join("metrics.jsonl")).unwrap().pop().unwrap().step, newest + 2);
}

/// Returns whether a process is still running.
fn runs(pid: u32) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| !stat.contains(") Z "))
}

/// The launcher resumes frozen ranks, so that all can save.
#[test]
fn a_launched_job_with_a_rank_that_stands_still_saves() {
    const ARGS: &str = "--stages 3 --workers 3 --layers 3 --microbatches 2";
    let run = Run::new();
    let out = run.at("run");
    let mut child =
        start(launch(3), &run.args(&format!("{ARGS} {SAME} --steps 100000 --out {}", out.display())));
    wait_for_steps(&out, &mut child, 3);
    send(children(&child)[1], Signal::STOP);
    thread::sleep(Duration::from_millis(300));
    send(child.id(), Signal::INT);
    let (status, said) = end(child);
    assert_eq!(status.code(), Some(130), "{said}");
    assert_eq!(saved(&out), Some(steps(&out)), "{said}");
    goes_on(&run, || launch(3), ARGS, 2);
}

/// A killed launcher cannot notify its ranks: the system signals them, and they save.
#[test]
#[cfg(target_os = "linux")]
fn the_ranks_of_a_launcher_that_is_killed_save_and_end() {
    let run = Run::new();
    let out = run.at("run");
    let mut child = start(launch(2), &run.args(&format!("{SAME} --steps 100000 --out {}", out.display())));
    wait_for_steps(&out, &mut child, 3);
    let ranks = children(&child);
    send(child.id(), Signal::KILL);
    child.wait().unwrap();
    wait_until("the ranks' end", || ranks.iter().all(|&pid| !runs(pid)).then_some(()));
    assert_eq!(saved(&out), Some(steps(&out)));
    assert_eq!(saved(&out.join("ranks/rank-00001")), saved(&out));
}

/// A run that still loads its data ends at the first signal.
#[test]
fn a_run_that_is_loading_ends_at_once() {
    let run = Run::new();
    // The data is a pipe without a writer, so the run waits for its data forever.
    let data = run.at("pipe");
    assert!(Command::new("mkfifo").arg(&data).status().unwrap().success());
    let args = format!("--data {} --out {}", data.display(), run.at("run").display());
    for (signal, code) in [(Signal::INT, 130), (Signal::TERM, 143), (Signal::HUP, 129)] {
        let mut child = start(farflung(), &run.args(&args));
        thread::sleep(Duration::from_millis(500));
        assert_eq!(child.try_wait().unwrap(), None, "it loads");
        send(child.id(), signal);
        let (status, said) = end(child);
        assert_eq!(status.code(), Some(code), "{said}");
        assert!(said.starts_with("error: stopped by SIG"), "{said}");
    }
}

/// The second signal ends a run without saving, in any state of the run.
#[test]
fn the_second_signal_saves_nothing() {
    let run = Run::new();
    let out = run.at("run");
    let args = "--batch 160 --dim 32 --context 64 --steps 100000 --checkpoint-every 0";
    let mut child = start(farflung(), &run.args(&format!("{args} --out {}", out.display())));
    wait_for_steps(&out, &mut child, 1);
    send(child.id(), Signal::INT);
    thread::sleep(Duration::from_millis(310));
    if child.try_wait().unwrap().is_none() {
        send(child.id(), Signal::TERM);
        let (status, said) = end(child);
        assert!([Some(143), Some(130)].contains(&status.code()), "{said}");
    }
}
