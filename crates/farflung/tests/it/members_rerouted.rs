//! A pipeline that loses a rank without a replacement. All remaining members continue: those that hold the same
//! part form a pool. They train on the same sequences as a run that loses no rank, with the same training
//! losses.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::path::Path;

use crate::virtual_members::{Ended, Told, connections, tiny};
use farflung::comm::simulated::Faults;
use farflung::config::choice::OptimizerKind;
use farflung::config::value::Setting as _;
use farflung::train::{Departure, Failure, Job, Moment, Report, run_workers};
use farflung::{Error, Stop, TrainConfig};
use farflung_base::{Nanos, PeerId};

const STAGES: usize = 2;

/// Returns a job of small steps in pipelines of two, with comparisons of the copies of each part after each
/// step.
fn job(folder: &Path, workers: usize, config: TrainConfig) -> Job {
    let config = TrainConfig {
        layers: Some(4),
        microbatches: config.microbatches.or(Some(3)),
        stages: STAGES,
        workers,
        eval_every: 2,
        eval_batches: 2,
        check_every: 1,
        deadline: Nanos::from_millis(2000),
        ..tiny(folder, &"the quick brown fox jumps over the lazy dog ".repeat(300), config)
    };
    Job { elastic: true, ..Job::new(config, workers, Stop::manual()).unwrap() }
}

/// Returns the settings of a run of `steps` steps whose averages between replicas are not compressed.
fn plain(steps: u64) -> TrainConfig {
    TrainConfig { steps, codec: "none".parse().unwrap(), ..TrainConfig::default() }
}

/// Returns the result of each worker in a network of `ends` endpoints, and the notes.
fn run(job: &Job, ends: usize, come: &[(PeerId, Nanos)], faults: &Faults) -> (Vec<Ended>, Told) {
    let mut notes = Told::default();
    let ended = run_workers(job, connections(job, ends, come, faults), &mut notes);
    (ended, notes)
}

/// Returns the report of the only member that has the whole model at the end; all but `lost` must succeed.
fn report<'a>(ended: &'a [Ended], lost: Option<u32>, what: &str) -> &'a Report {
    for (n, ended) in ended.iter().enumerate().filter(|(n, _)| Some(*n as u32) != lost) {
        assert!(ended.is_ok(), "{what}: {n}: {:?}", ended.as_ref().err());
    }
    let mut reports = ended.iter().filter_map(|ended| ended.as_ref().ok().and_then(Option::as_ref));
    let found = reports.next().unwrap();
    assert!(reports.next().is_none(), "{what}: one rank has the whole model");
    found
}

/// Returns each row's step, tokens of the run so far, and loss.
fn rows(report: &Report) -> Vec<(u64, u64, f64)> {
    report.rows.iter().map(|row| (row.step, row.tokens, row.train_loss)).collect()
}

fn same_losses(what: &str, found: &[(u64, u64, f64)], calm: &[(u64, u64, f64)]) {
    for (found, calm) in found.iter().zip(calm) {
        assert_eq!((found.0, found.1), (calm.0, calm.1), "{what}: a step's sequences");
        assert!((found.2 - calm.2).abs() < 1e-4, "{what}: {found:?} {calm:?}");
    }
}

#[test]
fn three_of_two_pipelines_of_two_go_on_with_the_losses_of_four() {
    let folder = tempfile::tempdir().unwrap();
    let calm = run(&job(folder.path(), 4, plain(8)), 4, &[], &Faults::new()).0;
    let calm = rows(report(&calm, None, "calm"));
    for rank in 0..4_u32 {
        for moment in Moment::ALL {
            let what = format!("rank {rank} at {moment:?}");
            let job = job(folder.path(), 4, plain(8));
            let job = Job { failure: Some(Failure { rank, step: 4, moment }), ..job };
            let (ended, notes) = run(&job, 4, &[], &Faults::new());
            assert!(matches!(ended[rank as usize], Err(Error::InjectedFailure { .. })), "{what}");
            let left = report(&ended, Some(rank), &what);
            assert_eq!(left.workers, 3, "{what}");
            if rank > 0 {
                // The notes are those of rank 0, which is present all the time.
                let sizes = if rank % 2 == 0 { "1, 2" } else { "2, 1" };
                assert!(
                    notes.has(&format!("; stages of {sizes} members, re-routed")),
                    "{what}: {:?}",
                    notes.notes
                );
                assert_eq!(left.rows.len(), 8, "{what}");
            }
            let since = 8 - left.rows.len();
            same_losses(&what, &rows(left), &calm[since..]);
        }
    }
}

/// Returns the final hash of a run in which a rank leaves normally before a step.
fn after_leaving(folder: &Path, rank: u32, step: u64) -> String {
    let job = job(folder, 4, plain(6));
    let job = Job { departure: Some(Departure { rank, step }), ..job };
    let (ended, _) = run(&job, 4, &[], &Faults::new());
    assert!(matches!(ended[rank as usize], Err(Error::StoppedAt { .. })), "{:?}", ended[rank as usize]);
    report(&ended, Some(rank), "in peace").hash.clone()
}

#[test]
fn a_loss_has_the_bits_of_a_polite_leave() {
    let folder = tempfile::tempdir().unwrap();
    for rank in [1, 2] {
        let polite: Vec<String> = (3..=4).map(|step| after_leaving(folder.path(), rank, step)).collect();
        assert_ne!(polite[0], polite[1]);
        for moment in Moment::ALL {
            let job = job(folder.path(), 4, plain(6));
            let job = Job { failure: Some(Failure { rank, step: 4, moment }), ..job };
            let (ended, _) = run(&job, 4, &[], &Faults::new());
            let left = &report(&ended, Some(rank), "lost").hash;
            assert!(polite.contains(left), "rank {rank} at {moment:?}: {left} is not in {polite:?}");
        }
    }
}

#[test]
fn pools_last_until_there_are_members_for_whole_pipelines() {
    // The newcomer needs some of them to fetch its part while the others train on.
    const STEPS: u64 = 100;
    let folder = tempfile::tempdir().unwrap();
    let calm = run(&job(folder.path(), 4, plain(STEPS)), 4, &[], &Faults::new()).0;
    let calm = rows(report(&calm, None, "calm"));
    // A codec of averages drops its residuals when members change, in pipelines and in a pool of one member.
    for codec in ["none", "int8"] {
        let config = TrainConfig { codec: codec.parse().unwrap(), ..plain(STEPS) };
        let job = job(folder.path(), 4, config);
        let faults = Faults::new().at(Nanos::from_millis(30)).crash(PeerId(3));
        let (ended, notes) = run(&job, 5, &[(PeerId(4), Nanos::from_millis(100))], &faults);
        let left = report(&ended, Some(3), codec);
        assert!(notes.has("; stages of 2, 1 members, re-routed"), "{:?}", notes.notes);
        assert!(notes.has("4 members continue") && notes.has("; 2 pipelines of 2"), "{:?}", notes.notes);
        assert_eq!((left.rows.len() as u64, left.workers), (STEPS, 4));
        if codec == "none" {
            same_losses(codec, &rows(left), &calm);
        }
    }
}

#[test]
fn a_spare_takes_the_place_of_a_lost_rank_before_anything_is_rerouted() {
    let folder = tempfile::tempdir().unwrap();
    let job = job(folder.path(), 4, plain(14));
    let faults = Faults::new().at(Nanos::from_millis(100)).crash(PeerId(2));
    let (ended, notes) = run(&job, 5, &[(PeerId(4), Nanos(1))], &faults);
    assert_eq!(report(&ended, Some(2), "a spare").rows.len(), 14);
    assert!(notes.has("; 2 pipelines of 2, and 1 without a part"), "{:?}", notes.notes);
    assert!(!notes.has("re-routed"), "{:?}", notes.notes);
}

#[test]
fn what_does_not_go_with_pools_trains_in_the_pipelines_that_are_whole() {
    let folder = tempfile::tempdir().unwrap();
    let optimizer = OptimizerKind::parse("onebit-adam").unwrap();
    let schedule = farflung::parallel::pipeline::Method::Interleaved;
    for config in
        [TrainConfig { optimizer, ..plain(8) }, TrainConfig { schedule, microbatches: Some(4), ..plain(8) }]
    {
        let job = job(folder.path(), 4, config);
        let job = Job { failure: Some(Failure { rank: 3, step: 4, moment: Moment::Begun }), ..job };
        let (ended, notes) = run(&job, 4, &[], &Faults::new());
        assert_eq!(report(&ended, Some(3), "whole").workers, 2);
        assert!(notes.has("; 1 pipeline of 2, and 1 without a part"), "{:?}", notes.notes);
    }
}
