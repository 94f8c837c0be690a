//! Members that form pipelines with local steps: a pipeline that loses a stage gives nothing to the round, and
//! the others finish it.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::path::Path;

use crate::members::{des_loc, diloco};
use crate::members_in_pipelines::{report, run};
use crate::virtual_members::{Told, fox, tiny};
use farflung::comm::simulated::Faults;
use farflung::train::{Departure, Failure, Job, Moment, Quiet, elastic};
use farflung::{Error, RunSettings, Stop, TrainConfig};
use farflung_base::{Nanos, PeerId};

const STEPS: u64 = 8;

/// Returns a job of eight small steps in pipelines of two.
fn job(folder: &Path, workers: usize, config: TrainConfig) -> Job {
    let config = TrainConfig {
        layers: Some(2),
        microbatches: Some(2),
        steps: STEPS,
        stages: 2,
        workers,
        eval_every: 4,
        eval_batches: 2,
        codec: "none".parse().unwrap(),
        deadline: Nanos::from_millis(2000),
        ..tiny(folder, &fox(), config)
    };
    Job { elastic: true, ..Job::new(config, workers, Stop::manual()).unwrap() }
}

/// Returns the final hash of a run in which a rank leaves normally before a step.
fn after_leaving(config: &TrainConfig, workers: usize, rank: u32, step: u64) -> String {
    let folder = tempfile::tempdir().unwrap();
    let job = job(folder.path(), workers, config.clone());
    let job = Job { departure: Some(Departure { rank, step }), ..job };
    let results = run(&job, workers, &[], &Faults::new(), &mut Quiet);
    assert!(matches!(results[rank as usize], Err(Error::StoppedAt { .. })), "{:?}", results[rank as usize]);
    report(&results).hash.clone()
}

/// The result of a round in which a rank of a pipeline is lost does not depend on the moment of the loss. If no
/// rank has done a step of the round yet, or all have averaged, it is that of a polite leave.
#[test]
fn a_round_in_which_a_pipeline_is_lost_is_that_of_the_others() {
    for (config, rank) in [(diloco(), 0), (diloco(), 3), (des_loc(), 5)] {
        let polite = [2, 4].map(|step| after_leaving(&config, 6, rank, step));
        assert_ne!(polite[0], polite[1]);
        let mut broken = Vec::new();
        for (step, moment) in [3, 4].into_iter().flat_map(|step| Moment::ALL.map(|moment| (step, moment))) {
            let folder = tempfile::tempdir().unwrap();
            let job = job(folder.path(), 6, config.clone());
            let job = Job { failure: Some(Failure { rank, step, moment }), ..job };
            let mut told = Told::default();
            let results = run(&job, 6, &[], &Faults::new(), &mut told);
            for (n, result) in results.iter().enumerate().filter(|(n, _)| *n != rank as usize) {
                assert!(result.is_ok(), "{rank} {step} {moment:?}: {n}: {:?}", result.as_ref().err());
            }
            let report = report(&results);
            assert_eq!(report.workers, 4, "{rank} {step} {moment:?}");
            let hash = report.hash.clone();
            match (step, moment) {
                (4, Moment::Met) => assert_eq!(hash, polite[1], "{rank} is lost behind the average"),
                (3, _) if hash == polite[0] => {}
                _ => broken.push((step, moment, hash)),
            }
        }
        assert!(broken.len() > Moment::ALL.len(), "{broken:?}");
        let first = broken[0].2.clone();
        assert!(!polite.contains(&first));
        assert!(broken.iter().all(|(.., hash)| *hash == first), "{rank}: {broken:?}");
    }
}

/// Returns the start and the end of the round of the third and fourth steps in a run without faults.
fn second_round(workers: usize) -> (Nanos, Nanos) {
    let folder = tempfile::tempdir().unwrap();
    let mut told = Told::default();
    run(&job(folder.path(), workers, diloco()), workers, &[], &Faults::new(), &mut told);
    let at = |step: usize| Nanos((told.times[step] * 1e9) as u64);
    (at(1), at(3))
}

#[test]
fn whoever_is_killed_frozen_or_cut_off_in_a_round_gives_nothing_to_it() {
    let (begin, end) = second_round(6);
    for rank in [0, 3] {
        // The rounds that may be the first one without the rank.
        let mut allowed = vec![after_leaving(&diloco(), 6, rank, 2), after_leaving(&diloco(), 6, rank, 4)];
        for (step, moment) in [2, 4, 6].map(|step| (step, Moment::Begun)) {
            let folder = tempfile::tempdir().unwrap();
            let job = job(folder.path(), 6, diloco());
            let job = Job { failure: Some(Failure { rank, step, moment }), ..job };
            allowed.push(report(&run(&job, 6, &[], &Faults::new(), &mut Quiet)).hash.clone());
        }
        for part in 0..8 {
            let at = Nanos(begin.0 + (end.0 - begin.0) * part / 8);
            let faults = || Faults::new().at(at);
            let killed = faults().crash(PeerId(rank));
            let cut = faults().partition(&[PeerId(rank)], 6, Nanos::MAX);
            let frozen = faults().freeze(PeerId(rank), Nanos::from_millis(3_600_000));
            for (what, faults) in [("killed", killed), ("cut off", cut), ("frozen", frozen)] {
                let folder = tempfile::tempdir().unwrap();
                let job = job(folder.path(), 6, diloco());
                let mut told = Told::default();
                let results = run(&job, 6, &[], &faults, &mut told);
                for (n, result) in results.iter().enumerate().filter(|(n, _)| *n != rank as usize) {
                    assert!(result.is_ok(), "{rank} {what} at {at}: {n}: {:?}", result.as_ref().err());
                }
                let left = report(&results);
                let found = allowed.iter().position(|hash| *hash == left.hash);
                assert!(found.is_some(), "{rank} {what} at {at} of {begin} {end}: {:?}", told.notes);
                if rank > 0 {
                    let steps: Vec<u64> = left.rows.iter().map(|row| row.step).collect();
                    assert_eq!(steps, (1..=STEPS).collect::<Vec<_>>(), "{rank} {what} at {at}");
                }
            }
        }
    }
}

#[test]
fn members_that_come_make_pipelines_after_an_average() {
    let folder = tempfile::tempdir().unwrap();
    let settings = TrainConfig::clone(&job(folder.path(), 4, diloco()).given);
    // A step takes longer than the round trips after which a newcomer is ready.
    let config = TrainConfig { steps: 24, compute_rate: 1e7, workers: 1, ..settings };
    let founder = elastic::founder(config, &Stop::manual()).unwrap();
    let come = [1, 2, 3].map(|n| (PeerId(n), Nanos::from_millis(20 * u64::from(n - 1)).max(Nanos(30_000))));
    let mut told = Told::default();
    let results = run(&founder, 4, &come, &Faults::new(), &mut told);
    for (n, result) in results.iter().enumerate() {
        assert!(result.is_ok(), "{n}: {:?}", result.as_ref().err());
    }
    for text in ["; 1 pipeline of 2", "; 1 pipeline of 2, and 1 without a part", "; 2 pipelines of 2"] {
        assert!(told.notes.iter().any(|note| note.ends_with(text)), "{text}: {:?}", told.notes);
    }
    let left = report(&results);
    assert_eq!((left.rows.last().unwrap().step, left.workers), (24, 4));
    // Newcomers join after averages only.
    let joined = told.notes.iter().filter(|note| note.contains("joined"));
    for note in joined {
        let step = note.split(|c: char| !c.is_ascii_digit()).find_map(|word| word.parse::<u64>().ok());
        assert!(step.unwrap().is_multiple_of(2), "{note}");
    }
}

#[test]
fn a_broken_pipeline_is_whole_again_after_the_round() {
    for lost in [2, 3] {
        let folder = tempfile::tempdir().unwrap();
        let job = job(folder.path(), 4, diloco());
        let job = Job { config: RunSettings { steps: 80, ..job.config.clone() }, ..job };
        let faults = Faults::new().at(Nanos::from_millis(30)).crash(PeerId(lost));
        let mut told = Told::default();
        let results = run(&job, 5, &[(PeerId(4), Nanos::from_millis(60))], &faults, &mut told);
        for (n, result) in results.iter().enumerate().filter(|(n, _)| *n != lost as usize) {
            assert!(result.is_ok(), "{n}: {:?}", result.as_ref().err());
        }
        let notes = &told.notes;
        let broken = notes.iter().find(|note| note.contains(&format!("member {lost} lost"))).unwrap();
        assert!(broken.contains("; 1 pipeline of 2, and 1 without a part"), "{notes:?}");
        let joined = notes.iter().find(|note| note.contains("member 4 joined"));
        let joined = joined.unwrap_or_else(|| unreachable!("{notes:?}"));
        assert!(joined.contains(", 2 of which fetch the parts of a further pipeline meanwhile"), "{notes:?}");
        assert!(notes.iter().any(|note| note.ends_with("; 2 pipelines of 2")), "{notes:?}");
        let left = report(&results);
        assert_eq!((left.rows.last().unwrap().step, left.workers), (80, 4));
    }
}

#[test]
fn without_a_whole_pipeline_all_go_back_to_the_last_average() {
    let folder = tempfile::tempdir().unwrap();
    let config = TrainConfig {
        layers: Some(3),
        stages: 3,
        ..TrainConfig::clone(&job(folder.path(), 6, diloco()).given)
    };
    let config = TrainConfig { sync_every: 4, steps: 12, ..config };
    let job = Job { elastic: true, ..Job::new(config, 6, Stop::manual()).unwrap() };
    let mut calm = Told::default();
    let expected = report(&run(&job, 6, &[], &Faults::new(), &mut calm)).rows.clone();
    // In the seventh step, one rank of each pipeline is lost.
    let at = Nanos((f64::midpoint(calm.times[5], calm.times[6]) * 1e9) as u64);
    let faults = Faults::new().at(at).crash(PeerId(1)).at(at).crash(PeerId(5));
    let mut told = Told::default();
    let results = run(&job, 6, &[], &faults, &mut told);
    for n in [0, 2, 3, 4] {
        assert!(results[n].is_ok(), "{n}: {:?}", results[n].as_ref().err());
    }
    let back = told.notes.iter().find(|note| note.contains("steps are lost"));
    assert!(
        back.is_some_and(|note| note.contains("after step 4: ") && note.contains("; 1 pipeline of 3")),
        "{:?}",
        told.notes
    );
    let left = report(&results);
    assert_eq!(left.workers, 3);
    let steps: Vec<u64> = left.rows.iter().map(|row| row.step).collect();
    assert_eq!(steps, (1..=12).collect::<Vec<_>>());
    for (row, expected) in left.rows.iter().zip(&expected).take(4) {
        assert!((row.train_loss - expected.train_loss).abs() < 1e-6, "{row:?} {expected:?}");
    }
}

#[test]
fn one_pipeline_goes_back_to_an_average_that_all_have_copied() {
    let folder = tempfile::tempdir().unwrap();
    let config = TrainConfig { copy_share: 0.5, ..diloco() };
    let config = TrainConfig {
        layers: Some(3),
        stages: 3,
        ..TrainConfig::clone(&job(folder.path(), 6, config).given)
    };
    let config = TrainConfig { steps: 16, workers: 3, ..config };
    let all = Job { elastic: true, ..Job::new(config, 3, Stop::manual()).unwrap() };
    let calm = report(&run(&all, 3, &[], &Faults::new(), &mut Quiet)).rows.clone();
    let mut went_back = 0;
    for rank in 0..3 {
        for moment in Moment::ALL {
            let job = Job { failure: Some(Failure { rank, step: 12, moment }), ..all.clone() };
            let mut told = Told::default();
            let results = run(&job, 3, &[], &Faults::new(), &mut told);
            for (n, result) in results.iter().enumerate().filter(|(n, _)| *n != rank as usize) {
                assert!(result.is_ok(), "{rank} at {moment:?}: {n}: {:?}", result.as_ref().err());
            }
            let left = report(&results);
            assert_eq!(left.workers, 2);
            if rank > 0 {
                let shorter = told.notes.iter().find(|note| note.contains("; 1 pipeline of 2")).unwrap();
                went_back += u32::from(shorter.contains("steps are lost"));
                let steps: Vec<u64> = left.rows.iter().map(|row| row.step).collect();
                assert_eq!(steps, (1..=16).collect::<Vec<_>>(), "{rank} at {moment:?}");
                // The steps that are done again begin with the optimizer of the average, too.
                for (row, calm) in left.rows.iter().zip(&calm) {
                    let apart = (row.train_loss - calm.train_loss).abs();
                    assert!(apart < 1e-4, "{rank} at {moment:?}: {row:?} {calm:?}");
                }
            }
        }
    }
    assert!(went_back > 0);
}

#[test]
fn the_others_go_on_when_one_of_two_pipelines_is_left() {
    for rank in 0..4 {
        let hash = after_leaving(&diloco(), 4, rank, 4);
        assert!(!hash.is_empty());
    }
}
