//! Members of pipelines that leave together, one after another, or as the only holder of a part: no step is
//! lost, and a host that is started again in any of their folders continues from the newest one.

use std::fs;
use std::process::Output;

use rustix::process::Signal;

use super::{Member, Run, host, join, members, on, said, said_by, start, trains};
use crate::child::wait_until_or;

const PIPELINES: &str = "--layers 2 --stages 2 --microbatches 2";

/// Returns the last step of a member's records.
fn last_step(run: &Run, name: &str) -> u64 {
    let rows = fs::read_to_string(run.at(name).join("metrics.jsonl")).unwrap();
    let last: serde_json::Value = serde_json::from_str(rows.lines().last().unwrap()).unwrap();
    last["step"].as_u64().unwrap()
}

/// Returns the events of one kind of a member.
fn events(run: &Run, name: &str, kind: &str) -> Vec<serde_json::Value> {
    let text = fs::read_to_string(run.at(name).join("events.jsonl")).unwrap_or_default();
    let all = text.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
    all.filter(|event| event["event"] == kind).collect()
}

/// Starts a host again in a member's folder, and returns the step from which it continues.
fn continues_from(run: &Run, name: &'static str, more: &str) -> u64 {
    let before = events(run, name, "resumed").len();
    let args = format!(
        "--listen 127.0.0.1:0 --deadline 2s --eval-every 100000 --eval-batches 1 --steps 1000000 --out {name} --resume auto {more}"
    );
    let mut command = on(run, name);
    command.arg("host").args(run.flags(&args));
    let mut again = start(run, name, command);
    let resumed = wait_until_or(
        || said_by(&again),
        || events(run, name, "resumed").get(before).map(|event| event["step"].as_u64().unwrap()),
    );
    let mut process = again.process.take().unwrap();
    process.kill().unwrap();
    process.wait().unwrap();
    resumed
}

fn assert_stopped(ended: &Output) {
    assert_eq!(ended.status.code(), Some(130), "{}", said(ended));
}

#[test]
fn a_host_that_waits_for_others_ends_without_a_step() {
    let run = Run::new();
    let host = host(&run, "--steps 6 --out host --min-members 2");
    wait_until_or(
        || said_by(&host),
        || said_by(&host).contains("1 of the 2 members with which the run begins").then_some(()),
    );
    host.send(Signal::INT);
    assert_stopped(&host.ends());
    let names = fs::read_dir(run.at("host")).unwrap().map(|entry| entry.unwrap().file_name());
    let left: Vec<_> = names.filter(|name| name.to_string_lossy().starts_with("step-")).collect();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn members_of_pipelines_that_all_stop_save_the_same_step() {
    let run = Run::new();
    let host = host(&run, &format!("--steps 1000000 --out host {PIPELINES}"));
    let a = join(&run, "a", "host/run.ticket", &[]);
    members(&run, &host, 2);
    trains(&run, &a);
    for member in [&host, &a] {
        member.send(Signal::INT);
    }
    let ended = [host.ends(), a.ends()];
    ended.iter().for_each(assert_stopped);
    let step = last_step(&run, "host");
    for (ended, name) in ended.iter().zip(["host", "a"]) {
        let saved =
            format!("step {step} is saved in {name}/step-{step:08}; to continue: farflung host --config");
        assert!(said(ended).contains(&saved), "{saved}: {}", said(ended));
    }
    // The parts of both are next to each other.
    assert_eq!(continues_from(&run, "host", PIPELINES), step);
}

#[test]
fn the_only_holder_of_a_part_hands_it_over_before_it_leaves() {
    let run = Run::new();
    let host = host(&run, &format!("--steps 1000000 --out host {PIPELINES} --copy-share 0"));
    let a = join(&run, "a", "host/run.ticket", &[]);
    members(&run, &host, 2);
    trains(&run, &a);
    host.send(Signal::INT);
    let left = host.ends();
    assert_stopped(&left);
    assert!(said(&left).contains("the other members continue from step"), "{}", said(&left));
    members(&run, &a, 1);
    let lost: Vec<u64> =
        events(&run, "a", "members").iter().map(|event| event["lost_steps"].as_u64().unwrap()).collect();
    assert!(lost.iter().all(|&lost| lost == 0), "{lost:?}");
    let at = last_step(&run, "a");
    wait_until_or(|| said_by(&a), || (last_step(&run, "a") > at + 5).then_some(()));
    a.send(Signal::INT);
    let ended = a.ends();
    assert_stopped(&ended);
    let step = last_step(&run, "a");
    assert!(said(&ended).contains(&format!("step {step} is saved in a/step-")), "{}", said(&ended));
    // The newest step is found although another member has saved it.
    assert_eq!(continues_from(&run, "host", PIPELINES), step);
}

/// A spare has nothing to save, and the others do not wait for it.
#[test]
fn a_spare_that_is_asked_to_stop_leaves_and_is_not_lost() {
    let run = Run::new();
    let host = host(&run, &format!("--steps 1000000 --out host {PIPELINES}"));
    let a = join(&run, "a", "host/run.ticket", &[]);
    members(&run, &host, 2);
    let b = join(&run, "b", "host/run.ticket", &[]);
    members(&run, &host, 3);
    b.send(Signal::INT);
    let left = b.ends();
    assert_stopped(&left);
    members(&run, &host, 2);
    let last = events(&run, "host", "members").pop().unwrap();
    assert_eq!((last["reason"].is_null(), &last["lost_steps"]), (true, &0.into()), "{last}");
    drop::<[Member; 2]>([host, a]);
}

/// A member that is asked to stop in a long round of local steps says when it leaves. A second signal ends it
/// at once.
#[test]
fn a_second_signal_ends_a_member_with_its_last_checkpoint() {
    let run = Run::new();
    let rounds = "--layers 2 --sync diloco --sync-every 2000 --checkpoint-every 2000 --balance equal";
    let host = host(&run, &format!("--steps 100000000 --out host {rounds}"));
    let a = join(&run, "a", "host/run.ticket", &[]);
    members(&run, &host, 2);
    wait_until_or(|| said_by(&a), || (!events(&run, "a", "saved").is_empty()).then_some(()));
    a.send(Signal::INT);
    let leaves = "this member leaves after the current round of local steps, in about";
    wait_until_or(|| said_by(&a), || said_by(&a).contains(leaves).then_some(()));
    // Two signals within 0.3 s count as one.
    std::thread::sleep(std::time::Duration::from_millis(400));
    a.send(Signal::INT);
    let ended = a.ends();
    assert_stopped(&ended);
    let expected = "ended at once by a second SIGINT; the last checkpoint is a/step-";
    assert!(said(&ended).contains(expected), "{}", said(&ended));
}
