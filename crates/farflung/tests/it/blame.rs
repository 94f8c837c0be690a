//! Tests which rank the ranks of a launched job name when one of them is lost. (`cargo xtask bench blame` tries
//! all of them.)

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::process::Stdio;

use crate::child::{Guarded, send, wait_until};
use crate::tiny::{Run, farflung};
use rustix::process::Signal;

/// Sends a signal to a rank of a launched job once it trains; returns the exit code and the job's stderr.
fn struck(args: &str, ranks: usize, victim: usize, signal: Signal) -> (Option<i32>, String) {
    let run = Run::new();
    let out = run.at("run");
    let mut launch = farflung();
    launch.args(["launch", "-n", &ranks.to_string(), "--grace", "1s", "--"]);
    launch.args(run.args(&format!("{args} --steps 100000 --deadline 3s --out {}", out.display())));
    let said = run.at("said");
    launch.stdin(Stdio::null()).stdout(Stdio::null()).stderr(std::fs::File::create(&said).unwrap());
    let mut child = Guarded(launch.spawn().unwrap());
    wait_until("its first step", || {
        assert_eq!(child.try_wait().unwrap(), None, "it ended by itself");
        std::fs::metadata(out.join("metrics.jsonl")).is_ok_and(|rows| rows.len() > 0).then_some(())
    });
    let id = child.id();
    let children = std::fs::read_to_string(format!("/proc/{id}/task/{id}/children")).unwrap();
    send(children.split_whitespace().nth(victim).unwrap().parse().unwrap(), signal);
    let status = wait_until("its end", || child.try_wait().unwrap());
    (status.code(), std::fs::read_to_string(said).unwrap())
}

/// The first stage never waits for the last one: it learns of the loss from the stage in between, which ends as
/// well.
#[test]
fn all_stages_name_the_one_that_was_lost() {
    for signal in [Signal::KILL, Signal::STOP] {
        let (code, said) = struck("--stages 3 --layers 3 --microbatches 2", 3, 2, signal);
        assert_eq!(code, Some(75), "{said}");
        for rank in [0, 1] {
            let error = format!("[{rank}] error: peer 2 was lost");
            assert!(said.lines().any(|line| line == error), "{said}");
        }
        assert!(said.lines().any(|line| line.starts_with("error: rank 2 failed")), "{said}");
    }
}
