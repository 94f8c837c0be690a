//! Tests of the transfer of state to a newcomer in verified chunks from all members. A donor that is killed or
//! sends a wrong chunk is replaced by another, and slow donors send less.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::path::Path;
use std::sync::Arc;

use crate::virtual_members::{Ended, Told, connections, fox, tiny};
use farflung::comm::Transport;
use farflung::comm::simulated::{Faults, cluster_with};
use farflung::config::choice::SyncKind;
use farflung::optim::sync::DILOCO;
use farflung::train::{Fault, FaultyValue, Job, elastic, run_workers};
use farflung::{Stop, TrainConfig};
use farflung_base::{AccessLink, Bandwidth, Nanos, PeerId, Rank, Topology};

const MEMBERS: usize = 3;
const NEW: PeerId = PeerId(MEMBERS as u32);

/// Creates a job of three members with about 1.5 MB of state each, on links of 10 Mbit/s.
fn job(folder: &Path, config: TrainConfig) -> Job {
    // All wait while the newcomer takes the state.
    Job { barrier: true, ..Job::new(settings(folder, config), MEMBERS, Stop::manual()).unwrap() }
}

fn settings(folder: &Path, config: TrainConfig) -> TrainConfig {
    let config = TrainConfig {
        layers: Some(2),
        dim: Some(64),
        steps: 8,
        workers: MEMBERS,
        eval_every: 100,
        eval_batches: 1,
        deadline: Nanos::from_millis(5000),
        link: "10mbit,1ms".parse().unwrap(),
        ..tiny(folder, &fox(), config)
    };
    TrainConfig { dim: Some(64), ..config }
}

fn ddp() -> TrainConfig {
    TrainConfig { codec: "none".parse().unwrap(), ..TrainConfig::default() }
}

fn diloco() -> TrainConfig {
    TrainConfig { sync: SyncKind::of(&DILOCO), sync_every: 2, ..TrainConfig::default() }
}

fn run(job: &Job, faults: &Faults) -> (Vec<Ended>, Told) {
    let mut told = Told::default();
    let connections = connections(job, MEMBERS + 1, &[(NEW, Nanos(1))], faults);
    let ended = run_workers(job, connections, &mut told);
    (ended, told)
}

/// Returns the hashes in all reports.
fn hashes(ended: &[Ended]) -> Vec<String> {
    ended.iter().filter_map(|ended| ended.as_ref().ok()?.as_ref()).map(|report| report.hash.clone()).collect()
}

fn all_same(hashes: &[String]) -> bool {
    hashes.iter().all(|hash| *hash == hashes[0])
}

/// Returns the start and end of the transfer in nanoseconds: the longest time between two steps.
fn transfer(told: &Told) -> (u64, u64) {
    let pairs = told.times.windows(2);
    let longest = pairs.max_by(|a, b| (a[1] - a[0]).total_cmp(&(b[1] - b[0]))).unwrap();
    ((longest[0] * 1e9) as u64, (longest[1] * 1e9) as u64)
}

#[test]
fn a_donor_that_is_killed_or_frozen_while_it_sends_is_replaced() {
    for config in [ddp(), diloco()] {
        let folder = tempfile::tempdir().unwrap();
        let job = job(folder.path(), config);
        let (calm, told) = run(&job, &Faults::new());
        assert!(hashes(&calm).len() == MEMBERS + 1 && all_same(&hashes(&calm)));
        assert!(told.has("of state from 3 of them"), "{:?}", told.notes);
        let (from, to) = transfer(&told);
        for part in 1..8 {
            let at = Nanos(from + (to - from) * part / 8);
            for victim in [1, 2] {
                let faults = Faults::new().at(at);
                let faults = match part % 2 {
                    0 => faults.crash(PeerId(victim)),
                    _ => faults.freeze(PeerId(victim), Nanos::MAX),
                };
                let (ended, told) = run(&job, &faults);
                let hashes = hashes(&ended);
                assert!(hashes.len() == MEMBERS && all_same(&hashes), "{victim} at {at}: {:?}", told.notes);
                assert!(ended[MEMBERS].is_ok(), "{victim} at {at}: {:?}", ended[MEMBERS]);
            }
        }
    }
}

#[test]
fn a_newcomer_that_is_killed_while_it_takes_the_state_is_left_out() {
    let folder = tempfile::tempdir().unwrap();
    let job = job(folder.path(), ddp());
    let (_, told) = run(&job, &Faults::new());
    let (from, to) = transfer(&told);
    for part in 1..8 {
        let at = Nanos(from + (to - from) * part / 8);
        let (ended, told) = run(&job, &Faults::new().at(at).crash(NEW));
        let hashes = hashes(&ended);
        assert!(hashes.len() == MEMBERS && all_same(&hashes), "{at}: {:?}", told.notes);
        // The run has all its steps, with the sequences of three members.
        let report = ended[0].as_ref().unwrap().as_ref().unwrap();
        assert_eq!((report.rows.len(), report.workers), (8, MEMBERS));
    }
}

#[test]
fn one_that_is_not_ready_costs_nobody_a_step() {
    let folder = tempfile::tempdir().unwrap();
    let job = job(folder.path(), ddp());
    let (alone, calm) = {
        let mut told = Told::default();
        let ended = run_workers(&job, connections(&job, MEMBERS, &[], &Faults::new()), &mut told);
        (hashes(&ended), told)
    };
    // The newcomer is connected, and crashes or freezes before it has measured its links.
    for at in [2, 1_000, 2_500_000] {
        for faults in
            [Faults::new().at(Nanos(at)).crash(NEW), Faults::new().at(Nanos(at)).freeze(NEW, Nanos::MAX)]
        {
            let (ended, told) = run(&job, &faults);
            assert_eq!(hashes(&ended), alone);
            assert!(!told.has("is ready to join"), "{:?}", told.notes);
            // The newcomer's probes use the members' links, so some extra time is allowed.
            let most = calm.times[7] + 0.2 * calm.times[0];
            assert!(told.times[7] <= most, "{at}: {:?} instead of {:?}", told.times, calm.times);
        }
    }
}

#[test]
fn a_wrong_chunk_is_noticed_and_taken_from_another() {
    for config in [ddp(), diloco()] {
        let folder = tempfile::tempdir().unwrap();
        let job = job(folder.path(), config);
        let (calm, _) = run(&job, &Faults::new());
        for step in 1..=4 {
            let job = Job { fault: Some(wrong_chunk(1, step)), ..job.clone() };
            let (ended, told) = run(&job, &Faults::new());
            assert_eq!(hashes(&ended), hashes(&calm), "{:?}", told.notes);
        }
    }
}

/// Returns a fault: the first chunk that a rank sends after a step has one bit flipped.
const fn wrong_chunk(rank: u32, step: u64) -> Fault {
    Fault { rank, step, value: FaultyValue::Chunk, element: 0, bit: 0 }
}

/// If the only donor sends a wrong chunk, the newcomer rejects it and ends, and the run continues.
#[test]
fn a_wrong_chunk_of_the_only_donor_ends_the_newcomer() {
    let folder = tempfile::tempdir().unwrap();
    let job = job(folder.path(), ddp());
    let job = Job {
        elastic: true,
        ..job
            .with_config(TrainConfig { workers: 1, compute_rate: 1e8, ..TrainConfig::clone(&job.given) }, 1)
            .unwrap()
    };
    let mut refused = Vec::new();
    for step in 1..=6 {
        let job = Job { fault: Some(wrong_chunk(0, step)), ..job.clone() };
        let ended = run_workers(
            &job,
            connections(&job, 2, &[(PeerId(1), Nanos(1))], &Faults::new()),
            &mut Told::default(),
        );
        assert_eq!(ended[0].as_ref().unwrap().as_ref().unwrap().rows.len(), 8);
        match &ended[1] {
            Ok(_) => assert!(all_same(&hashes(&ended))),
            Err(error) => refused.push(error.to_string()),
        }
    }
    // The newcomer joins after one of these steps, so one of the runs fails.
    assert_eq!(refused.len(), 1, "{refused:?}");
    assert!(refused[0].contains("does not have the hashes that its members reported"), "{refused:?}");
}

/// Three pipelines of two members, and a spare that takes the place of a lost member. It fetches its part from
/// all members that hold it.
#[test]
fn a_spare_takes_its_part_in_chunks_from_all_that_hold_it() {
    let folder = tempfile::tempdir().unwrap();
    let config = TrainConfig { stages: 2, microbatches: Some(2), ..ddp() };
    let config =
        TrainConfig { workers: 6, deadline: Nanos::from_millis(2000), ..settings(folder.path(), config) };
    let job = Job::new(config, 6, Stop::manual()).unwrap();
    let job = Job { elastic: true, ..job };
    let of = |job: &Job| {
        let mut told = Told::default();
        let faults = Faults::new().at(Nanos::from_millis(2_500)).crash(PeerId(5));
        let ended = run_workers(job, connections(job, 7, &[(PeerId(6), Nanos(1))], &faults), &mut told);
        assert!(told.has("member 5 lost; 6 members continue"), "{:?}", told.notes);
        assert!(told.has("of state from 5 of them; 3 pipelines of 2"), "{:?}", told.notes);
        let hashes = hashes(&ended);
        assert_eq!(hashes.len(), 1, "one member has the whole model: {:?}", told.notes);
        hashes
    };
    let calm = of(&job);
    for step in 1..=8 {
        assert_eq!(of(&Job { fault: Some(wrong_chunk(1, step)), ..job.clone() }), calm);
    }
}

#[test]
fn members_with_slow_uplinks_give_less() {
    let folder = tempfile::tempdir().unwrap();
    let config = TrainConfig { codec: "int8".parse().unwrap(), ..TrainConfig::default() };
    let job = job(folder.path(), config);
    let took = |uplinks: &[u64]| {
        let mut topology = Topology::uniform(MEMBERS + 1, "1gbit,1ms".parse().unwrap());
        for (rank, &up) in (0..).map(Rank).zip(uplinks) {
            let (up, down) = (Bandwidth(up * 1_000_000), Bandwidth(100_000_000));
            topology.set_access_link(rank, AccessLink { up, down });
        }
        let ends = cluster_with(&topology, &Faults::new());
        let ends = ends.into_iter().map(|end| end as Arc<dyn Transport>).collect();
        let mut told = Told::default();
        let connections = elastic::connections(&job, ends, &[(NEW, Nanos(1))], true).unwrap();
        let ended = run_workers(&job, connections, &mut told);
        assert!(hashes(&ended).len() == MEMBERS + 1 && all_same(&hashes(&ended)), "{:?}", told.notes);
        // The note before the transfer is `it receives S of state, about T during which all members wait`.
        let said = told.notes.iter().find_map(|note| note.split_once(", about ")).unwrap().1;
        let said: Nanos = said.split(' ').next().unwrap().parse().unwrap();
        let (from, to) = transfer(&told);
        let step = told.times[7] - told.times[6];
        (said.as_secs_f64(), (to - from) as f64 / 1e9 - step)
    };
    // 1.4 MB over 22 Mbit/s take half a second. A third of it over the slowest link would take two seconds.
    let (said, took) = took(&[2, 10, 10, 10]);
    assert!((0.4..0.7).contains(&said), "{said} s");
    assert!((0.4..1.4).contains(&took), "{took} s");
}
