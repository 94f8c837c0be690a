//! The number of members with which a run begins, and members that leave before their machines are taken away.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::path::Path;

use crate::members::diloco;
use crate::virtual_members::{Ended, Told, connections, fox, machines, tiny};
use farflung::comm::simulated::Faults;
use farflung::train::{Departure, Failure, Job, Moment, Report, RunObserver, elastic, run_workers};
use farflung::{Error, Signal, StepMetrics, Stop, TrainConfig};
use farflung_base::{Nanos, PeerId};

const STEPS: u64 = 30;

/// Returns a job of thirty small steps. A step takes long against the links.
fn job(folder: &Path, workers: usize, config: TrainConfig) -> Job {
    let config = TrainConfig {
        layers: Some(2),
        steps: STEPS,
        workers,
        compute_rate: 1e6,
        eval_every: 100,
        eval_batches: 1,
        check_every: 1,
        codec: "none".parse().unwrap(),
        deadline: Nanos::from_millis(600_000),
        ..tiny(folder, &fox(), config)
    };
    if workers == 1 {
        return elastic::founder(config, &Stop::manual()).unwrap();
    }
    Job { elastic: true, ..Job::new(config, workers, Stop::manual()).unwrap() }
}

fn run(job: &Job, ends: usize, come: &[(PeerId, Nanos)]) -> (Vec<Ended>, Told) {
    let mut told = Told::default();
    let ended = run_workers(job, connections(job, ends, come, &Faults::new()), &mut told);
    (ended, told)
}

fn reports(ended: &[Ended]) -> Vec<&Report> {
    ended.iter().filter_map(|ended| ended.as_ref().unwrap().as_ref()).collect()
}

#[test]
fn a_run_begins_with_the_number_of_members_that_it_waits_for() {
    let pipelines = |config| TrainConfig { stages: 2, microbatches: Some(2), ..config };
    let cases = [
        ("ddp", TrainConfig::default(), 3),
        ("diloco", diloco(), 3),
        ("pipelines", pipelines(TrainConfig::default()), 4),
        ("pipelines with diloco", pipelines(diloco()), 4),
    ];
    for (name, config, members) in cases {
        let folder = tempfile::tempdir().unwrap();
        let job = job(folder.path(), 1, TrainConfig { min_members: members, ..config });
        let come: Vec<(PeerId, Nanos)> =
            (1..members as u32).map(|n| (PeerId(n), Nanos::from_millis(u64::from(n) * 700))).collect();
        let (ended, told) = run(&job, members, &come);
        let found = reports(&ended);
        // Every step has the sequences of all members; a pipeline has two microbatches.
        let sequences = if name.starts_with("pipelines") { 2 * 2 } else { members as u64 };
        let tokens: Vec<u64> = found[0].rows.iter().map(|row| row.tokens).collect();
        let expected: Vec<u64> = (1..=STEPS).map(|step| step * sequences * 8).collect();
        assert_eq!(tokens, expected, "{name}: {:?}", told.notes);
        assert!(found.iter().all(|report| report.hash == found[0].hash), "{name}");
        let waits = format!("1 of the {members} members with which the run begins are here");
        assert!(told.has(&waits), "{name}: {:?}", told.notes);
    }
}

/// Three pipelines with local steps, of which the first is slower than the others, and the last loses a member
/// when it has done one step. The others finish the round, and do not wait for a member although the first has
/// done no step yet.
#[test]
fn pipelines_that_finish_the_first_round_do_not_wait_for_a_member() {
    let folder = tempfile::tempdir().unwrap();
    let topology = Some(machines(folder.path(), &[1.0, 1.0, 8.0, 8.0, 8.0, 8.0]));
    let microbatches = Some(2);
    let config = TrainConfig { topology, microbatches, stages: 2, min_members: 6, ..diloco() };
    let failure = Some(Failure { rank: 4, step: 2, moment: Moment::Begun });
    let job = Job { failure, ..job(folder.path(), 6, config) };
    let (ended, told) = run(&job, 6, &[]);
    for (n, ended) in ended.iter().enumerate().filter(|(n, _)| *n != 4) {
        assert!(ended.is_ok(), "{n}: {:?}", ended.as_ref().err());
    }
    assert!(told.has("after step 0: member 4 lost"), "{:?}", told.notes);
    assert!(told.has("sequences are lost"), "{:?}", told.notes);
}

/// Asks a run to stop once a note says that it waits for members.
struct StopsWaiting(Stop);

impl RunObserver for StopsWaiting {
    fn step(&mut self, _: &StepMetrics, _: Option<f64>) {}
    fn note(&mut self, note: &str) {
        if note.contains("members with which the run begins") {
            self.0.request(Signal::Terminate);
        }
    }
}

#[test]
fn one_that_is_asked_to_stop_while_it_waits_for_others_ends() {
    let folder = tempfile::tempdir().unwrap();
    let job = job(folder.path(), 1, TrainConfig { min_members: 2, ..TrainConfig::default() });
    let mut stops = StopsWaiting(job.stop.clone());
    let ended = run_workers(&job, connections(&job, 1, &[], &Faults::new()), &mut stops);
    let error = ended[0].as_ref().unwrap_err();
    assert_eq!(error.exit_code(), 143, "{error}");
}

#[test]
fn a_member_leaves_at_once_if_the_round_is_longer_than_its_notice() {
    let folder = tempfile::tempdir().unwrap();
    let make = || job(folder.path(), 3, TrainConfig { sync_every: 10, ..diloco() });
    let (calm, told) = run(&make(), 3, &[]);
    reports(&calm);
    let step = told.times[5] - told.times[4];
    let leaves = |notice: f64| {
        let stop = Stop::manual().within(Some(Nanos::from_secs_f64(notice)));
        let job = Job { departure: Some(Departure { rank: 2, step: 13 }), stop, ..make() };
        run(&job, 3, &[])
    };
    // Two of ten steps are done. The notice ends after three more.
    let (ended, told) = leaves(3.0 * step);
    let error = ended[2].as_ref().unwrap_err();
    let Error::StoppedAt { left, .. } = error else { panic!("{error}") };
    assert_eq!((left.step, left.dropped, left.saved.is_none()), (10, 2, true), "{error}");
    assert!(told.has("member 2 lost") && told.has("10 sequences are lost"), "{:?}", told.notes);
    // The others finish the round as they would after a loss.
    let lost = Job { failure: Some(Failure { rank: 2, step: 13, moment: Moment::Begun }), ..make() };
    let (lost, _) = run(&lost, 3, &[]);
    let hashes = |ended: &[Ended]| [0, 1].map(|n| reports(&ended[n..=n])[0].hash.clone());
    assert_eq!(hashes(&ended), hashes(&lost));
    // With a longer notice it leaves after the average.
    let (ended, told) = leaves(20.0 * step);
    let error = ended[2].as_ref().unwrap_err();
    let Error::StoppedAt { left, .. } = error else { panic!("{error}") };
    assert_eq!((left.step, left.dropped), (20, 0), "{error}");
    assert!(told.has("member 2 left") && !told.has("are lost"), "{:?}", told.notes);
    assert_ne!(hashes(&ended), hashes(&lost));
}
