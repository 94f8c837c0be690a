//! `launch` with processes that share memory: the same bits as over sockets, a killed peer, and no leftovers.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::fs;
use std::path::Path;
use std::process::Stdio;

use crate::child::{Guarded, send, shares_with, wait_until};
use crate::tiny::{Run, farflung};
use rustix::process::Signal;

fn launch(run: &Run, args: &str, ranks: usize, out: &Path) -> Guarded {
    let mut launch = farflung();
    launch.args(["launch", "-n", &ranks.to_string(), "--grace", "1s", "--"]);
    launch.args(run.args(&format!("{args} --sync ddp --workers {ranks} --out {}", out.display())));
    let said = fs::File::create(out.with_extension("said")).unwrap();
    Guarded(launch.stdin(Stdio::null()).stdout(Stdio::null()).stderr(said).spawn().unwrap())
}

/// Returns the processes of a launched job, if each of them has mapped memory shared with `others` others.
fn ranks_that_share(launched: u32, others: usize) -> Option<Vec<u32>> {
    let children = fs::read_to_string(format!("/proc/{launched}/task/{launched}/children")).ok()?;
    let ids: Vec<u32> = children.split_whitespace().map(|id| id.parse().unwrap()).collect();
    ids.iter().all(|&id| shares_with(id) == others).then_some(ids)
}

#[test]
fn a_run_has_the_bits_of_one_over_sockets() {
    let run = Run::new();
    let trained = |transport: &str| {
        let out = run.at(transport);
        let mut child = launch(&run, &format!("--steps 5 --transport {transport}"), 3, &out);
        let status = wait_until("its end", || child.try_wait().unwrap());
        assert!(status.success(), "{}", fs::read_to_string(out.with_extension("said")).unwrap());
        let rows = fs::read_to_string(out.join("metrics.jsonl")).unwrap();
        let loss =
            |line: &str| line.split_once("\"train_loss\":").unwrap().1.split(',').next().unwrap().to_owned();
        rows.lines().map(loss).collect::<Vec<_>>()
    };
    let sockets = trained("tcp");
    assert_eq!(sockets.len(), 5);
    assert_eq!(trained("shared-memory"), sockets);
    assert_eq!(trained("auto"), sockets);
}

#[test]
fn a_killed_rank_is_noticed_and_nothing_is_left_behind() {
    let run = Run::new();
    let out = run.at("run");
    let mut child = launch(&run, "--steps 1000000 --deadline 60s", 3, &out);
    let ranks = wait_until("shared memory", || {
        assert_eq!(child.try_wait().unwrap(), None, "it ended by itself");
        fs::metadata(out.join("metrics.jsonl")).is_ok_and(|rows| rows.len() > 0).then_some(())?;
        ranks_that_share(child.id(), 2)
    });
    send(ranks[1], Signal::KILL);
    // The job ends long before the deadline.
    let status = wait_until("its end", || child.try_wait().unwrap());
    let said = fs::read_to_string(out.with_extension("said")).unwrap();
    assert_eq!(status.code(), Some(75), "{said}");
    assert!(said.contains("peer 1 was lost"), "{said}");
    // Sockets have no file and shared memory has no name, so nothing remains after the processes have ended.
    assert!(ranks.iter().all(|id| !Path::new(&format!("/proc/{id}/maps")).exists()));
    let left: Vec<_> = fs::read_dir("/dev/shm")
        .into_iter()
        .flatten()
        .flatten()
        .filter(|entry| entry.file_name().to_string_lossy().starts_with("farflung"))
        .collect();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn a_run_that_members_join_does_not_take_shared_memory_alone() {
    let run = Run::new();
    let mut host = farflung();
    host.arg("host").args(run.flags("--steps 1 --transport shared-memory"));
    let output = host.output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("members on other machines can join"), "{said}");
}
