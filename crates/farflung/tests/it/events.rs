//! Tests `events.jsonl`, the events of a run on each rank.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::path::PathBuf;
use std::process::{Child, Output, Stdio};
use std::time::Duration;

use crate::tiny::{Run, farflung};
use farflung::events::{self, Event};
use farflung::{EventKind, metrics};

fn folder(run: &Run, rank: usize) -> PathBuf {
    if rank == 0 { run.at("run") } else { run.at(&format!("run/ranks/rank-{rank:05}")) }
}

fn train(run: &Run, before: &[&str], args: &str) -> Output {
    let args = format!("--out {} {args}", run.at("run").display());
    farflung().args(before).args(run.args(&args)).output().unwrap()
}

fn read(run: &Run, rank: usize) -> Vec<Event> {
    events::read(&folder(run, rank).join("events.jsonl")).unwrap()
}

/// Returns the steps and names of events.
fn names(events: &[Event]) -> Vec<(u64, &str)> {
    let name = |event: &Event| match event.what {
        EventKind::Resumed { .. } => "resumed",
        EventKind::Saved { .. } => "saved",
        EventKind::Skipped { .. } => "skipped",
        EventKind::Lost { .. } => "lost",
        EventKind::Refused { .. } => "refused",
        _ => "another",
    };
    events.iter().map(|event| (event.step, name(event))).collect()
}

#[test]
fn every_rank_tells_what_was_saved_and_resumed_and_refused() {
    let (run, launch) = (Run::new(), ["launch", "-n", "2", "--"]);
    assert!(train(&run, &launch, "--steps 4 --checkpoint-every 2").status.success());
    for rank in [0, 1] {
        let events = read(&run, rank);
        assert_eq!(names(&events), [(2, "saved"), (4, "saved")], "rank {rank}");
        let path = folder(&run, rank).join("step-00000004").display().to_string();
        assert_eq!(events[1].what, EventKind::Saved { path }, "rank {rank}");
        assert!(0.0 < events[0].time_s && events[0].time_s <= events[1].time_s);
    }
    let rows = metrics::read(&run.at("run/metrics.jsonl")).unwrap();
    assert!(read(&run, 0)[0].time_s >= rows[0].time_s && read(&run, 0)[1].time_s <= rows[3].time_s);

    assert_eq!(train(&run, &launch, "--steps 6 --resume auto --heads 1").status.code(), Some(2));
    assert!(train(&run, &launch, "--steps 6 --resume auto --beta2 0.5").status.success());
    for rank in [0, 1] {
        let events = read(&run, rank);
        let after = [(0, "refused"), (4, "resumed"), (6, "saved")];
        assert_eq!(names(&events)[2..], after, "rank {rank}");
        let EventKind::Refused { reason } = &events[2].what else { unreachable!() };
        assert!(reason.contains("`heads` is 1, expected 2"), "{reason}");
        let EventKind::Resumed { from, notes } = &events[3].what else { unreachable!() };
        assert!(
            from.ends_with("step-00000004") && notes[0].contains("`beta2` is 0.5, was 0.95"),
            "{notes:?}"
        );
    }
    // A finished run is not changed.
    let before = read(&run, 0);
    assert!(train(&run, &launch, "--steps 6 --resume auto").status.success());
    assert_eq!(read(&run, 0), before);
}

#[test]
fn a_run_that_never_began_leaves_no_events() {
    let run = Run::new();
    assert_eq!(train(&run, &[], "--steps 2 --device wgpu:99").status.code(), Some(2));
    assert!(!run.at("run/events.jsonl").exists());
}

#[test]
fn a_peer_that_is_lost_is_told_by_the_other() {
    let run = Run::new();
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let start = |rank: usize| -> Child {
        let mut command = farflung();
        let args = format!("--out {} --steps 1000000 --deadline 20s", run.at("run").display());
        command.args(run.args(&args)).env("RANK", rank.to_string()).env("WORLD_SIZE", "2");
        command.env("LOCAL_RANK", rank.to_string()).env("MASTER_ADDR", "127.0.0.1");
        command.env("MASTER_PORT", port.to_string()).stdin(Stdio::null()).stdout(Stdio::null());
        command.stderr(Stdio::null()).spawn().unwrap()
    };
    let (mut first, mut second) = (start(0), start(1));
    while metrics::read(&run.at("run/metrics.jsonl")).map_or(0, |rows| rows.len()) < 3 {
        std::thread::sleep(Duration::from_millis(5));
    }
    second.kill().unwrap();
    second.wait().unwrap();
    assert_eq!(first.wait().unwrap().code(), Some(75));
    let events = read(&run, 0);
    let EventKind::Lost { peer } = &events[0].what else { unreachable!("{events:?}") };
    assert!(peer.contains('1') && events[0].step >= 3 && events.len() == 1, "{events:?}");
}

#[test]
fn steps_that_overflow_are_told_as_skipped() {
    let run = Run::new();
    // Trains weights for a step, and sets all values of `ln_f.weight` to 300. Gradients are then so large that
    // the first loss scale overflows.
    let weights = run.at("weights");
    assert!(train(&run, &[], "--steps 1").status.success());
    std::fs::create_dir(&weights).unwrap();
    for name in ["config.json", "model.safetensors"] {
        std::fs::copy(run.at("run/step-00000001").join(name), weights.join(name)).unwrap();
    }
    let path = weights.join("model.safetensors");
    let mut bytes = std::fs::read(&path).unwrap();
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let tensors: serde_json::Value = serde_json::from_slice(&bytes[8..8 + header]).unwrap();
    let (_, norm) =
        tensors.as_object().unwrap().iter().find(|(name, _)| name.ends_with("ln_f.weight")).unwrap();
    let at = |i: usize| 8 + header + norm["data_offsets"][i].as_u64().unwrap() as usize;
    for word in bytes[at(0)..at(1)].chunks_exact_mut(4) {
        word.copy_from_slice(&300.0_f32.to_le_bytes());
    }
    std::fs::write(&path, bytes).unwrap();
    std::fs::remove_dir_all(run.at("run")).unwrap();
    let output = train(&run, &[], &format!("--steps 2 --precision f16 --init-from {}", weights.display()));
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    for rank in [0, 1] {
        let events = read(&run, rank);
        assert_eq!(names(&events)[0], (1, "skipped"), "{events:?}");
        let EventKind::Skipped { times } = events[0].what else { unreachable!() };
        assert!((1..16).contains(&times), "{events:?}");
    }
}
