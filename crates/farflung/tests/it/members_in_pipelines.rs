//! Members that form pipelines and join and leave: a pipeline that loses a stage continues from a replica of
//! that part, with the bits of a run in which the lost member left normally.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::path::Path;

use crate::virtual_members::{Ended, Told, connections, fox, tiny};
use farflung::comm::simulated::Faults;
use farflung::train::{Departure, Failure, Job, Moment, Quiet, Report, RunObserver, elastic, run_workers};
use farflung::{Error, RunSettings, Stop, TrainConfig};
use farflung_base::{Nanos, PeerId};

const STEPS: u64 = 6;
const STAGES: usize = 4;

/// Returns a job of six small steps in pipelines of four.
fn job(folder: &Path, workers: usize, config: TrainConfig) -> Job {
    let config = TrainConfig {
        layers: Some(4),
        microbatches: Some(4),
        steps: STEPS,
        stages: STAGES,
        workers,
        eval_every: 2,
        eval_batches: 2,
        codec: "none".parse().unwrap(),
        deadline: Nanos::from_millis(2000),
        ..tiny(folder, &fox(), config)
    };
    Job { elastic: true, ..Job::new(config, workers, Stop::manual()).unwrap() }
}

/// Returns the result of each worker in a network of `ends` endpoints.
pub(crate) fn run(
    job: &Job,
    ends: usize,
    come: &[(PeerId, Nanos)],
    faults: &Faults,
    watch: &mut dyn RunObserver,
) -> Vec<Ended> {
    run_workers(job, connections(job, ends, come, faults), watch)
}

/// Returns the report of the only member that has the whole model at the end.
pub(crate) fn report(results: &[Ended]) -> &Report {
    let mut reports = results.iter().filter_map(|result| result.as_ref().ok().and_then(Option::as_ref));
    let first = reports.next().unwrap_or_else(|| {
        let errors: Vec<String> = results.iter().map(|r| format!("{:?}", r.as_ref().err())).collect();
        unreachable!("nobody ends with a report: {errors:?}")
    });
    assert!(reports.next().is_none(), "one rank has the whole model");
    first
}

/// Returns the final hash of a run in which a rank leaves normally before a step.
fn after_leaving(workers: usize, rank: u32, step: u64) -> String {
    let folder = tempfile::tempdir().unwrap();
    let job = job(folder.path(), workers, TrainConfig::default());
    let job = Job { departure: Some(Departure { rank, step }), ..job };
    let results = run(&job, workers, &[], &Faults::new(), &mut Quiet);
    assert!(matches!(results[rank as usize], Err(Error::StoppedAt { .. })), "{:?}", results[rank as usize]);
    report(&results).hash.clone()
}

#[test]
fn a_replica_of_a_lost_part_goes_on_with_the_bits_of_a_polite_leave() {
    for rank in [0, 3, 5] {
        let polite: Vec<String> = (3..=4).map(|step| after_leaving(8, rank, step)).collect();
        assert_ne!(polite[0], polite[1]);
        for moment in Moment::ALL {
            let folder = tempfile::tempdir().unwrap();
            let job = job(folder.path(), 8, TrainConfig::default());
            let job = Job { failure: Some(Failure { rank, step: 4, moment }), ..job };
            let results = run(&job, 8, &[], &Faults::new(), &mut Quiet);
            assert!(matches!(results[rank as usize], Err(Error::InjectedFailure { .. })));
            let others = results.iter().enumerate().filter(|(n, _)| *n != rank as usize);
            for (n, result) in others {
                assert!(result.is_ok(), "rank {rank} at {moment:?}: {n}: {:?}", result.as_ref().err());
            }
            let left = report(&results);
            assert!(
                polite.contains(&left.hash),
                "rank {rank} at {moment:?}: {} is not in {polite:?}",
                left.hash
            );
            assert_eq!(left.rows.len() as u64, STEPS, "rank {rank} at {moment:?}");
        }
    }
}

/// Returns the start and end of the fourth step in a run without faults, by the transport's clock.
fn fourth_step() -> (Nanos, Nanos) {
    let folder = tempfile::tempdir().unwrap();
    let job = job(folder.path(), 8, TrainConfig::default());
    let mut told = Told::default();
    run(&job, 8, &[], &Faults::new(), &mut told);
    let at = |step: usize| Nanos((told.times[step] * 1e9) as u64);
    (at(2), at(3))
}

#[test]
fn whoever_is_killed_frozen_or_cut_off_in_a_step_leaves_the_bits_of_a_polite_leave() {
    let (begin, end) = fourth_step();
    for rank in [0, 6] {
        let polite: Vec<String> = (2..=4).map(|step| after_leaving(8, rank, step)).collect();
        for part in 0..8 {
            let at = Nanos(begin.0 + (end.0 - begin.0) * part / 8);
            let faults = || Faults::new().at(at);
            let killed = faults().crash(PeerId(rank));
            let cut = faults().partition(&[PeerId(rank)], 8, Nanos::MAX);
            let frozen = faults().freeze(PeerId(rank), Nanos::from_millis(3_600_000));
            for (what, faults) in [("killed", killed), ("cut off", cut), ("frozen", frozen)] {
                let folder = tempfile::tempdir().unwrap();
                let job = job(folder.path(), 8, TrainConfig::default());
                let results = run(&job, 8, &[], &faults, &mut Quiet);
                for (n, result) in results.iter().enumerate().filter(|(n, _)| *n != rank as usize) {
                    assert!(result.is_ok(), "{rank} {what} at {at}: {n}: {:?}", result.as_ref().err());
                }
                let left = &report(&results).hash;
                assert!(
                    polite.contains(left),
                    "{rank} {what} at {at} of {begin} {end}: {left} is not in {polite:?}"
                );
            }
        }
    }
}

/// Returns the losses of each step.
fn losses(report: &Report) -> Vec<f64> {
    report.rows.iter().map(|row| row.train_loss).collect()
}

#[test]
fn members_that_come_make_a_pipeline_of_one_member_longer() {
    let folder = tempfile::tempdir().unwrap();
    // A step takes longer than the round trips after which a newcomer is ready.
    let (steps, compute_rate) = (12, 1e7);
    let config = TrainConfig {
        steps,
        compute_rate,
        ..TrainConfig::clone(&job(folder.path(), 4, TrainConfig::default()).given)
    };
    let founder = elastic::founder(TrainConfig { workers: 1, ..config }, &Stop::manual()).unwrap();
    assert_eq!((founder.plan.stages(), founder.plan.microbatches.clone()), (1, vec![4]));
    let alone = run(&founder, 1, &[], &Faults::new(), &mut Quiet);
    let come = [1, 2, 3].map(|n| (PeerId(n), Nanos::from_millis(20 * u64::from(n - 1)).max(Nanos(30_000))));
    let mut told = Told::default();
    let results = run(&founder, 4, &come, &Faults::new(), &mut told);
    for (n, result) in results.iter().enumerate() {
        assert!(result.is_ok(), "{n}: {:?}", result.as_ref().err());
    }
    assert!(told.notes.iter().any(|note| note.contains("; 1 pipeline of 4")), "{:?}", told.notes);
    // A step has the same sequences for any number of members.
    let (one, four) = (losses(report(&alone)), losses(report(&results)));
    assert_eq!((one.len(), four.len()), (12, 12));
    for (one, four) in one.iter().zip(&four) {
        assert!((one - four).abs() < 1e-4, "{one} {four}");
    }
}

#[test]
fn spares_and_a_newcomer_make_a_second_pipeline() {
    for lost in [2, 6] {
        let folder = tempfile::tempdir().unwrap();
        let job = job(folder.path(), 8, TrainConfig::default());
        let job = Job { config: RunSettings { steps: 24, ..job.config.clone() }, ..job };
        let faults = Faults::new().at(Nanos::from_millis(40)).crash(PeerId(lost));
        let mut told = Told::default();
        let results = run(&job, 9, &[(PeerId(8), Nanos::from_millis(100))], &faults, &mut told);
        for (n, result) in results.iter().enumerate().filter(|(n, _)| *n != lost as usize) {
            assert!(result.is_ok(), "{n}: {:?}", result.as_ref().err());
        }
        let found = |text: &str| told.notes.iter().any(|note| note.contains(text));
        assert!(found("; stages of 2, 2, 1, 2 members, re-routed"), "{:?}", told.notes);
        assert!(found("8 members continue") && found("; 2 pipelines of 4"), "{:?}", told.notes);
        let left = report(&results);
        assert_eq!((left.rows.last().unwrap().step, left.workers), (24, 8));
    }
}

#[test]
fn a_part_that_nobody_else_holds_is_lost() {
    let folder = tempfile::tempdir().unwrap();
    let job = job(folder.path(), 4, TrainConfig { copy_share: 0.0, ..TrainConfig::default() });
    let job = Job { failure: Some(Failure { rank: 2, step: 4, moment: Moment::Begun }), ..job };
    let results = run(&job, 4, &[], &Faults::new(), &mut Quiet);
    for n in [0, 1, 3] {
        let error = results[n].as_ref().unwrap_err();
        assert!(matches!(error, Error::PartLost { .. }), "{n}: {error}");
        assert_eq!(error.exit_code(), 75);
    }
}

#[test]
fn a_step_that_is_done_again_has_one_row() {
    let folder = tempfile::tempdir().unwrap();
    let job = job(folder.path(), 4, TrainConfig { copy_share: 0.5, ..TrainConfig::default() });
    let job = Job { config: RunSettings { steps: 16, ..job.config.clone() }, ..job };
    let mut calm = Told::default();
    let expected = losses(report(&run(&job, 4, &[], &Faults::new(), &mut calm)));
    // Rank 0 is lost at a time within step 12. The rank in its place may have committed that step, or not.
    let (begin, end) = (calm.times[10] * 1e9, calm.times[11] * 1e9);
    for part in 0..12 {
        let at = Nanos((begin + (end - begin) * f64::from(part) / 12.0) as u64);
        let results = run(&job, 4, &[], &Faults::new().at(at).crash(PeerId(0)), &mut Quiet);
        let left = report(&results);
        for pair in left.rows.windows(2) {
            assert!(pair[0].step < pair[1].step, "{at}: {pair:?}");
        }
        for row in &left.rows {
            let expected = expected[row.step as usize - 1];
            assert!((expected - row.train_loss).abs() < 1e-4, "{at}: {expected} {row:?}");
        }
    }
}

#[test]
fn without_a_replica_all_go_back_to_a_step_that_all_have_copied() {
    let folder = tempfile::tempdir().unwrap();
    let steps = 16;
    let settings = |workers: usize| {
        let job = job(folder.path(), workers, TrainConfig { copy_share: 0.5, ..TrainConfig::default() });
        Job { config: RunSettings { steps, ..job.config.clone() }, ..job }
    };
    let calm = run(&settings(4), 4, &[], &Faults::new(), &mut Quiet);
    let calm = losses(report(&calm));
    let mut went_back = 0;
    for rank in 0..4 {
        for moment in Moment::ALL {
            let job = Job { failure: Some(Failure { rank, step: 12, moment }), ..settings(4) };
            let mut told = Told::default();
            let results = run(&job, 4, &[], &Faults::new(), &mut told);
            for (n, result) in results.iter().enumerate().filter(|(n, _)| *n != rank as usize) {
                assert!(result.is_ok(), "{rank} at {moment:?}: {n}: {:?}", result.as_ref().err());
            }
            let left = report(&results);
            assert_eq!(left.workers, 3);
            // Rank 0 has the losses of all steps, except for the steps that it took from other ranks.
            if rank > 0 {
                let shorter = told.notes.iter().find(|note| note.contains("; 1 pipeline of 3"));
                let shorter = shorter.unwrap_or_else(|| unreachable!("{:?}", told.notes));
                went_back += u32::from(shorter.contains("steps are lost"));
                let found = losses(left);
                assert_eq!(found.len() as u64, steps, "{rank} at {moment:?}");
                for (calm, found) in calm.iter().zip(&found) {
                    assert!((calm - found).abs() < 1e-4, "{rank} at {moment:?}: {calm} {found}");
                }
            }
        }
    }
    assert!(went_back > 0);
}
