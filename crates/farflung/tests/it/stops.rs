//! Runs that signals stop, in any state of their stderr and stdout: the checkpoint is there, and resuming
//! works.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::fs::File;
use std::io::{PipeReader, Write};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

use crate::child::{Guarded, send, wait_until};
use crate::tiny::{Run, farflung};
use farflung::EventKind;
use rustix::process::Signal;

/// Helpers for a run in the folder `run`.
trait Stops {
    fn args_in(&self, steps: u64, resume: &str) -> Vec<String>;
    fn endless(&self, program: Command) -> Command;
    fn steps_done(&self) -> u64;
    fn wait_for_steps(&self, child: &mut Child, more: u64);
    fn ends(&self, child: Guarded, signal: Signal, code: i32);
}

impl Stops for Run {
    fn args_in(&self, steps: u64, resume: &str) -> Vec<String> {
        self.args(&format!("--out {} --steps {steps} --resume {resume}", self.at("run").display()))
    }

    /// Prepares a run that never ends by itself. Its log is long, and has an invalid directive.
    fn endless(&self, mut program: Command) -> Command {
        program.args(self.args_in(1_000_000, "no")).env("RUST_LOG", "debug,x=y");
        program.stdin(Stdio::null()).stdout(Stdio::null());
        program
    }

    fn steps_done(&self) -> u64 {
        let text = std::fs::read_to_string(self.at("run/metrics.jsonl")).unwrap_or_default();
        text.matches('\n').count() as u64
    }

    /// Waits until the run has done `more` further steps.
    fn wait_for_steps(&self, child: &mut Child, more: u64) {
        let wanted = self.steps_done() + more;
        wait_until("its steps", || {
            assert_eq!(child.try_wait().unwrap(), None, "it ended by itself");
            (self.steps_done() >= wanted).then_some(())
        });
    }

    /// Signals the run, which must end with `code` and with a checkpoint from which another run continues.
    fn ends(&self, mut child: Guarded, signal: Signal, code: i32) {
        send(child.id(), signal);
        let status = wait_until("its end", || child.try_wait().unwrap());
        assert_eq!(status.code(), Some(code), "{status}");
        let latest = std::fs::read_to_string(self.at("run/latest")).unwrap();
        let saved: u64 = latest.trim().trim_start_matches("step-").parse().unwrap();
        assert!(saved > 0 && saved == self.steps_done(), "{latest}: {} steps", self.steps_done());
        let output = farflung().args(self.args_in(saved + 2, "auto")).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        assert_eq!(self.steps_done(), saved + 2);
    }
}

/// Runs the binary under a shell that does `before`, in which `$0` is the program.
fn shell(before: &str) -> Command {
    let mut shell = Command::new("/bin/sh");
    shell.args(["-c", before, env!("CARGO_BIN_EXE_farflung")]);
    shell
}

fn launch() -> Command {
    let mut launch = farflung();
    launch.args(["launch", "-n", "2", "--"]);
    launch
}

/// Returns a pipe that stays full while its reader exists.
fn full_pipe() -> (PipeReader, Stdio) {
    let (reader, writer) = std::io::pipe().unwrap();
    let mut filler = writer.try_clone().unwrap();
    // Blocks when the pipe is full, and fails when the reader is dropped.
    thread::spawn(move || filler.write_all(&vec![b'.'; 1 << 22]));
    thread::sleep(Duration::from_millis(200));
    (reader, writer.into())
}

#[test]
fn with_stderr_closed_from_the_start() {
    let run = Run::new();
    let mut child = Guarded(run.endless(shell("exec \"$0\" \"$@\" 2>&-")).spawn().unwrap());
    run.wait_for_steps(&mut child, 3);
    run.ends(child, Signal::INT, 130);
}

#[test]
fn with_stderr_a_pipe_whose_reader_has_gone() {
    let run = Run::new();
    let mut child = Guarded(run.endless(farflung()).stderr(Stdio::piped()).spawn().unwrap());
    drop(child.stderr.take());
    run.wait_for_steps(&mut child, 3);
    run.ends(child, Signal::INT, 130);
}

#[test]
fn with_stderr_on_a_full_disk() {
    let run = Run::new();
    let full = File::options().write(true).open("/dev/full").unwrap();
    let mut child = Guarded(run.endless(farflung()).stderr(full).spawn().unwrap());
    run.wait_for_steps(&mut child, 3);
    run.ends(child, Signal::INT, 130);
}

#[test]
fn with_stderr_a_pipe_that_nobody_reads() {
    let run = Run::new();
    let (reader, stderr) = full_pipe();
    let mut child = Guarded(run.endless(farflung()).stderr(stderr).spawn().unwrap());
    run.wait_for_steps(&mut child, 100);
    run.ends(child, Signal::TERM, 143);
    drop(reader);
}

#[test]
fn when_the_terminal_hangs_up() {
    let run = Run::new();
    let mut child = Guarded(run.endless(farflung()).stderr(Stdio::null()).spawn().unwrap());
    run.wait_for_steps(&mut child, 3);
    run.ends(child, Signal::HUP, 129);
}

#[test]
fn when_a_scheduler_warns() {
    for (signal, name, code) in
        [(Signal::USR1, "SIGUSR1", 138), (Signal::USR2, "SIGUSR2", 140), (Signal::XCPU, "SIGXCPU", 152)]
    {
        let run = Run::new();
        let mut child = Guarded(run.endless(farflung()).stderr(Stdio::null()).spawn().unwrap());
        run.wait_for_steps(&mut child, 3);
        run.ends(child, signal, code);
        let events = farflung::events::read(&run.at("run/events.jsonl")).unwrap();
        let is_told = |event: &farflung::events::Event| {
            let start = format!("stopped by {name} after ");
            matches!(&event.what, EventKind::Stopped { reason } if reason.starts_with(&start))
        };
        assert!(events.iter().any(is_told), "{events:?}");
    }
}

/// Slurm sends its warning to the launcher and to each of its processes.
#[test]
fn a_launched_job_that_is_warned_everywhere() {
    let run = Run::new();
    let mut child = Guarded(run.endless(launch()).stderr(Stdio::null()).spawn().unwrap());
    run.wait_for_steps(&mut child, 50);
    for process in [child.id()].into_iter().chain(children(child.id())) {
        send(process, Signal::USR1);
    }
    let status = wait_until("its end", || child.try_wait().unwrap());
    assert_eq!(status.code(), Some(138), "{status}");
    let latest = |rank: &str| std::fs::read_to_string(run.at("run").join(rank).join("latest")).unwrap();
    assert_eq!(latest("."), latest("ranks/rank-00001"));
}

/// Returns the processes that a process has started.
fn children(process: u32) -> Vec<u32> {
    let path = format!("/proc/{process}/task/{process}/children");
    let listed = std::fs::read_to_string(path).unwrap();
    listed.split_whitespace().map(|child| child.parse().unwrap()).collect()
}

#[test]
fn not_by_a_hangup_under_nohup() {
    let run = Run::new();
    let ignoring = shell("trap '' HUP; exec \"$0\" \"$@\"");
    let mut child = Guarded(run.endless(ignoring).stderr(Stdio::null()).spawn().unwrap());
    run.wait_for_steps(&mut child, 3);
    send(child.id(), Signal::HUP);
    run.wait_for_steps(&mut child, 20);
    run.ends(child, Signal::INT, 130);
}

#[test]
fn a_launched_job_whose_launcher_has_lost_its_stderr() {
    let full = File::options().write(true).open("/dev/full").unwrap();
    let (reader, stuck) = full_pipe();
    let (gone, closed) = std::io::pipe().unwrap();
    drop(gone);
    for (stderr, signal, code) in
        [(closed.into(), Signal::INT, 130), (full.into(), Signal::HUP, 129), (stuck, Signal::TERM, 143)]
    {
        let run = Run::new();
        let mut child = Guarded(run.endless(launch()).stderr(stderr).spawn().unwrap());
        run.wait_for_steps(&mut child, 50);
        send(child.id(), signal);
        let status = wait_until("its end", || child.try_wait().unwrap());
        assert_eq!(status.code(), Some(code), "{status}");
        let latest = |rank: &str| std::fs::read_to_string(run.at("run").join(rank).join("latest")).unwrap();
        assert_eq!(latest("."), latest("ranks/rank-00001"));
    }
    drop(reader);
}

#[test]
fn stdout_that_takes_no_report_is_a_failure_behind_the_saved_run() {
    let full = File::options().write(true).open("/dev/full").unwrap();
    let (gone, closed) = std::io::pipe().unwrap();
    drop(gone);
    for stdout in [Stdio::from(full), closed.into()] {
        let run = Run::new();
        let output =
            farflung().args(run.args_in(2, "no")).stdout(stdout).stderr(Stdio::piped()).output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{stderr}");
        assert!(stderr.contains("error: failed to write to stdout"), "{stderr}");
        assert!(run.at("run/report.json").exists() && run.at("run/step-00000002").exists());
    }
}

#[test]
fn help_that_cannot_be_printed_is_a_failure_and_wrong_usage_needs_no_stderr() {
    let full = || File::options().write(true).open("/dev/full").unwrap();
    let help = farflung().arg("--help").stdout(full()).output().unwrap();
    assert_eq!(help.status.code(), Some(1), "{help:?}");
    let wrong = farflung().arg("--no-such-flag").stderr(full()).output().unwrap();
    assert_eq!(wrong.status.code(), Some(2), "{wrong:?}");
}

/// A rank waits for a master that never starts. A signal ends the rank before its deadline, which would give
/// another exit code, and there is nothing to save.
#[test]
fn a_rank_that_waits_for_the_others_stops_at_once() {
    let run = Run::new();
    for (signal, code) in [(Signal::INT, 130), (Signal::TERM, 143)] {
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let mut command = farflung();
        command.args(run.args(&format!("--out {} --deadline 60s", run.at("waits").display())));
        command
            .env("RANK", "1")
            .env("WORLD_SIZE", "2")
            .env("LOCAL_RANK", "1")
            .env("MASTER_ADDR", "127.0.0.1");
        command
            .env("MASTER_PORT", port.to_string())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        let mut child = command.spawn().unwrap();
        thread::sleep(Duration::from_millis(700));
        assert_eq!(child.try_wait().unwrap(), None, "it waits");
        send(child.id(), signal);
        let status = wait_until("its end", || child.try_wait().unwrap());
        assert_eq!(status.code(), Some(code), "{status}");
        assert!(!run.at("waits").exists());
    }
}
