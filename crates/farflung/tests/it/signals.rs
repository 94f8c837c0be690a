//! Signals as sent by a terminal or a scheduler, to this test's own binary.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::env;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

use farflung::Stop;
use farflung::comm::{Communicator, ReduceOp, memory};
use rustix::process::{Pid, Signal, kill_process};

const ROLE: &str = "FARFLUNG_TEST_ROLE";

/// Not a test by itself: the process to which the tests below send signals. It prints the signals that it sees
/// for ten seconds. A second signal ends it, unless the two come within a moment.
#[test]
fn a_process_that_waits() {
    if env::var_os(ROLE).is_none() {
        return;
    }
    let stop = Stop::install().unwrap();
    println!("ready");
    for _ in 0..1000 {
        thread::sleep(Duration::from_millis(10));
        if let Some(signal) = stop.take() {
            println!("saw {signal}");
        }
    }
}

/// Not a test by itself: a rank that waits for one that never sends.
#[test]
fn a_rank_that_waits() {
    if env::var_os(ROLE).is_none() {
        return;
    }
    let stop = Stop::install().unwrap();
    let ranks: Vec<_> = memory::cluster(2).into_iter().map(|rank| Communicator::new(rank)).collect();
    println!("ready");
    let mean = |comm: &Communicator| comm.all_reduce(&mut [1.0_f32], ReduceOp::Mean);
    let error = mean(&stop.with_stop(ranks[0].clone())).unwrap_err();
    let told = mean(&ranks[1]).unwrap_err();
    println!("{} {error}, {told}", stop.cancelled().unwrap());
    thread::sleep(Duration::from_mins(1));
}

#[test]
fn the_second_ends_what_waits_for_other_ranks_and_tells_them() {
    let (mut child, mut expect) = start("signals::a_rank_that_waits");
    send(&child, Signal::INT);
    thread::sleep(Duration::from_millis(400));
    assert_eq!(child.try_wait().unwrap(), None);
    send(&child, Signal::INT);
    expect("SIGINT all_reduce was cancelled, all_reduce: peer 0 cancelled it");
    assert_eq!(child.wait().unwrap().code(), Some(130));
}

/// Starts one of the tests above as a process of its own; also returns a function that waits for a line of its
/// output.
fn start(test: &str) -> (Child, impl FnMut(&str)) {
    start_by(Command::new(env::current_exe().unwrap()), &[], test)
}

/// Like `start`, through a shell, whose arguments before the program are `shell`.
fn start_by(mut program: Command, shell: &[&str], test: &str) -> (Child, impl FnMut(&str)) {
    if !shell.is_empty() {
        program.args(shell).arg(env::current_exe().unwrap());
    }
    let mut child = program
        .args(["--exact", test, "--nocapture"])
        .env(ROLE, "waits")
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut expect = move |text: &str| assert!(lines.any(|l| l.unwrap().ends_with(text)), "no line `{text}`");
    expect("ready");
    (child, expect)
}

fn send(child: &Child, signal: Signal) {
    kill_process(Pid::from_raw(i32::try_from(child.id()).unwrap()).unwrap(), signal).unwrap();
}

#[test]
fn the_first_asks_and_the_second_ends_at_once() {
    let (mut child, mut expect) = start("signals::a_process_that_waits");
    send(&child, Signal::INT);
    expect("saw SIGINT");
    thread::sleep(Duration::from_millis(400));
    send(&child, Signal::TERM);
    assert_eq!(child.wait().unwrap().code(), Some(143));
}

#[test]
fn a_hangup_asks_as_sigterm_does() {
    let (mut child, mut expect) = start("signals::a_process_that_waits");
    send(&child, Signal::HUP);
    expect("saw SIGHUP");
    thread::sleep(Duration::from_millis(400));
    send(&child, Signal::HUP);
    assert_eq!(child.wait().unwrap().code(), Some(129));
}

#[test]
fn a_signal_that_was_ignored_at_the_start_stays_ignored() {
    for (name, signal) in
        [("HUP", Signal::HUP), ("USR1", Signal::USR1), ("USR2", Signal::USR2), ("XCPU", Signal::XCPU)]
    {
        let script = format!("trap '' {name}; exec \"$0\" \"$@\"");
        let shell = ["-c", &script];
        let (mut child, mut expect) =
            start_by(Command::new("/bin/sh"), &shell, "signals::a_process_that_waits");
        for _ in 0..2 {
            send(&child, signal);
            thread::sleep(Duration::from_millis(400));
        }
        send(&child, Signal::TERM);
        // A second one that was not ignored would have ended the process, or a first one would be seen.
        expect("saw SIGTERM");
        thread::sleep(Duration::from_millis(400));
        send(&child, Signal::INT);
        assert_eq!(child.wait().unwrap().code(), Some(130), "{name}");
    }
}

/// Slurm sends a warning to every process of a step, and SIGTERM at the end of the job; the kernel repeats
/// SIGXCPU.
#[test]
fn warnings_ask_once_and_do_not_end_what_they_have_asked() {
    for (signal, name) in [(Signal::USR1, "SIGUSR1"), (Signal::USR2, "SIGUSR2"), (Signal::XCPU, "SIGXCPU")] {
        let (mut child, mut expect) = start("signals::a_process_that_waits");
        send(&child, signal);
        expect(&format!("saw {name}"));
        for later in [signal, signal, Signal::TERM, signal] {
            thread::sleep(Duration::from_millis(400));
            send(&child, later);
        }
        thread::sleep(Duration::from_millis(400));
        assert_eq!(child.try_wait().unwrap(), None, "{name}");
        send(&child, Signal::INT);
        assert_eq!(child.wait().unwrap().code(), Some(130), "{name}");
    }
}

#[test]
fn one_that_comes_twice_in_a_moment_is_one() {
    let (mut child, mut expect) = start("signals::a_process_that_waits");
    send(&child, Signal::TERM);
    expect("saw SIGTERM");
    send(&child, Signal::TERM);
    thread::sleep(Duration::from_millis(200));
    assert_eq!(child.try_wait().unwrap(), None);
    child.kill().unwrap();
    child.wait().unwrap();
}
