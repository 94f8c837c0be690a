//! Members of pipelines on machines of unequal speed: a pipeline with a slow rank gets fewer microbatches, and
//! a rank that is too slow for any share leaves.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::path::Path;

use crate::members_in_pipelines::{report, run};
use crate::virtual_members::{Ended, Told, fox, in_pools, machines, tiny};
use farflung::comm::simulated::Faults;
use farflung::config::choice::{BalanceKind, SyncKind};
use farflung::optim::sync::DILOCO;
use farflung::train::{Fault, FaultyValue, Job, Report};
use farflung::{Error, Stop, TrainConfig};
use farflung_base::{Nanos, PeerId};

const STEPS: usize = 40;

/// Returns a job of pipelines of two, on machines with these speeds in MFLOP/s.
fn job(folder: &Path, speeds: &[f64], config: TrainConfig) -> Job {
    let config = TrainConfig {
        topology: Some(machines(folder, speeds)),
        layers: config.layers.or(Some(4)),
        stages: 2,
        workers: speeds.len(),
        microbatches: Some(4),
        steps: if config.steps == TrainConfig::default().steps { STEPS as u64 } else { config.steps },
        eval_every: 100,
        eval_batches: 1,
        check_every: 1,
        codec: "none".parse().unwrap(),
        deadline: Nanos::from_millis(600_000),
        ..tiny(folder, &fox(), config)
    };
    Job { elastic: true, ..Job::new(config, speeds.len(), Stop::manual()).unwrap() }
}

fn train(job: &Job) -> (Vec<Ended>, Told) {
    train_with(job, &Faults::new())
}

fn train_with(job: &Job, faults: &Faults) -> (Vec<Ended>, Told) {
    let mut told = Told::default();
    let ended = run(job, job.plan.ranks() as usize, &[], faults, &mut told);
    (ended, told)
}

/// Returns the mean time of the last ten steps, in seconds.
fn pace(told: &Told) -> f64 {
    (told.times[STEPS - 1] - told.times[STEPS - 11]) / 10.0
}

fn diloco() -> TrainConfig {
    TrainConfig { sync: SyncKind::of(&DILOCO), sync_every: 2, ..TrainConfig::default() }
}

#[test]
fn a_pipeline_with_a_slow_rank_gets_a_smaller_share() {
    for config in [TrainConfig::default(), diloco()] {
        let folder = tempfile::tempdir().unwrap();
        let job =
            |balance| job(folder.path(), &[8.0, 8.0, 8.0, 2.0], TrainConfig { balance, ..config.clone() });
        let (ended, by_speed) = train(&job(BalanceKind::BySpeed));
        let (ended_equal, equal) = train(&job(BalanceKind::Equal));
        let (found, all) = (report(&ended), report(&ended_equal));
        // The slow rank takes four times as long for a microbatch: 7 and 1, rather than 4 and 4.
        let shares: Vec<&String> =
            by_speed.notes.iter().filter(|note| note.contains("microbatches by speed")).collect();
        assert!(shares.len() == 1 && shares[0].contains("are 7, 1: a step takes"), "{:?}", by_speed.notes);
        assert!(!equal.has("by speed"), "{:?}", equal.notes);
        assert!(pace(&by_speed) < 0.6 * pace(&equal), "{} {}", pace(&by_speed), pace(&equal));
        // A step has as many tokens as before.
        assert_eq!((found.tokens, all.tokens), (STEPS as u64 * 64, STEPS as u64 * 64));
    }
}

#[test]
fn shares_stay_equal_where_a_larger_one_would_take_more_memory() {
    let folder = tempfile::tempdir().unwrap();
    let config = TrainConfig { schedule: "gpipe".parse().unwrap(), ..TrainConfig::default() };
    let (ended, told) = train(&job(folder.path(), &[8.0, 8.0, 8.0, 2.0], config));
    report(&ended);
    assert!(!told.has("microbatches by speed"), "{:?}", told.notes);
}

#[test]
fn a_rank_that_is_too_slow_for_any_share_leaves_its_pipeline() {
    let folder = tempfile::tempdir().unwrap();
    // Before it leaves, it gets fewer microbatches and then fewer layers.
    let config = TrainConfig { steps: 80, ..TrainConfig::default() };
    let (ended, told) = train(&job(folder.path(), &[8.0, 8.0, 8.0, 0.05], config));
    let error = ended[3].as_ref().unwrap_err();
    assert!(matches!(error, Error::TooSlow { .. }) && error.exit_code() == 2, "{error}");
    for (n, ended) in ended.iter().take(3).enumerate() {
        assert!(ended.is_ok(), "{n}: {:?}", ended.as_ref().err());
    }
    report(&ended);
    assert!(told.has("member 3 left"), "{:?}", told.notes);
    let before = (told.times[10] - told.times[0]) / 10.0;
    let after = (told.times[79] - told.times[69]) / 10.0;
    assert!(after < 0.1 * before, "{after} {before}");
}

/// Checks that two runs have the same losses, except for rounding.
fn same_losses(found: &Report, expected: &Report) {
    assert_eq!(found.rows.len(), expected.rows.len());
    for (found, expected) in found.rows.iter().zip(&expected.rows) {
        assert!((found.train_loss - expected.train_loss).abs() < 1e-4, "{found:?} {expected:?}");
    }
}

#[test]
fn a_slow_stage_of_a_lone_pipeline_gets_fewer_layers() {
    for config in [TrainConfig::default(), diloco()] {
        let local = config.sync_every > 1;
        let folder = tempfile::tempdir().unwrap();
        // A head of 256 characters takes as long as some layers. With local steps, speeds are compared once a
        // round.
        let config = TrainConfig { layers: Some(12), steps: if local { 60 } else { 40 }, ..config };
        let job = |balance| job(folder.path(), &[8.0, 4.0], TrainConfig { balance, ..config.clone() });
        let (ended, told) = train(&job(BalanceKind::BySpeed));
        let (ended_equal, equal) = train(&job(BalanceKind::Equal));
        same_losses(report(&ended), report(&ended_equal));
        let divided: Vec<&String> =
            told.notes.iter().filter(|note| note.contains("layers of the stages by speed are")).collect();
        assert_eq!(divided.len(), 1, "{:?}", told.notes);
        let (_, after) = divided[0].split_once("by speed are ").unwrap();
        let (layers, times) = after.split_once(": a step takes ").unwrap();
        let layers: Vec<u32> = layers.split(", ").map(|layers| layers.parse().unwrap()).collect();
        assert!(layers.iter().sum::<u32>() == 12 && layers[0] > 6, "{layers:?}");
        let (now, before) = times.split_once(" instead of ").unwrap();
        let [now, before] = [now, before].map(|time| time.parse::<Nanos>().unwrap().as_secs_f64());
        // Steps take as long as predicted.
        let last = told.times.len() - 1;
        let found = (told.times[last] - told.times[last - 6]) / 6.0;
        let found_equal = (equal.times[last] - equal.times[last - 6]) / 6.0;
        assert!((found / now - 1.0).abs() < 0.15, "{found} {now}");
        assert!((found_equal / before - 1.0).abs() < 0.15, "{found_equal} {before}");
        assert!(found < 0.9 * found_equal, "{found} {found_equal}");
    }
}

/// Two pipelines of two lose the second rank of one of them: the stages are pools of two members and of one.
#[test]
fn a_stage_that_has_lost_a_member_gets_fewer_layers() {
    let folder = tempfile::tempdir().unwrap();
    let config = TrainConfig { layers: Some(12), steps: 60, ..TrainConfig::default() };
    let make = |balance| job(folder.path(), &[8.0; 4], TrainConfig { balance, ..config.clone() });
    let (calm, calm_told) = train(&make(BalanceKind::Equal));
    let lost_at = Nanos((calm_told.times[2] * 1e9) as u64 + 1);
    let faults = Faults::new().at(lost_at).crash(PeerId(3));
    let (ended, told) = train_with(&make(BalanceKind::BySpeed), &faults);
    let (ended_equal, equal) = train_with(&make(BalanceKind::Equal), &faults);
    for (ended, what) in [(&ended, "by speed"), (&ended_equal, "equal")] {
        for (n, ended) in ended.iter().enumerate().take(3) {
            assert!(ended.is_ok(), "{what}: {n}: {:?}", ended.as_ref().err());
        }
        same_losses(report(ended), report(&calm));
    }
    assert!(told.has("stages of 2, 1 members, re-routed"), "{:?}", told.notes);
    assert!(told.has("layers of the stages by speed are"), "{:?}", told.notes);
    let last = told.times.len() - 1;
    let pace = |told: &Told| (told.times[last] - told.times[last - 10]) / 10.0;
    assert!(pace(&told) < 0.85 * pace(&equal), "{} {}", pace(&told), pace(&equal));
}

/// A rank reports times of a microbatch that no machine can have, from a step on: that is said, and nothing
/// follows from them. The bits are the highest and the second highest one of the exponent, and the sign.
#[test]
fn a_time_that_cannot_be_true_is_reported_and_not_used() {
    let folder = tempfile::tempdir().unwrap();
    let pipelines = job(folder.path(), &[8.0; 4], TrainConfig::default());
    let whole = TrainConfig { stages: 1, ..TrainConfig::clone(&pipelines.given) };
    let whole = Job { elastic: true, ..Job::new(whole, 4, Stop::manual()).unwrap() };
    let pools = in_pools(TrainConfig::clone(&pipelines.given), &[2, 2]);
    for (calm, rank, what) in [(whole, 3, "whole models"), (pipelines, 2, "pipelines"), (pools, 1, "pools")] {
        for bit in [61, 62, 63] {
            let fault = Fault { rank, step: 20, value: FaultyValue::StepTime, element: 0, bit };
            let (ended, told) = train(&Job { fault: Some(fault), ..calm.clone() });
            let what = format!("{what}, bit {bit}: {:?}", told.notes);
            let said = told.notes.iter().filter(|note| note.contains("has reported")).collect::<Vec<_>>();
            assert!(said.len() == 1 && said[0].starts_with(&format!("member {rank} ")), "{what}");
            assert!(said[0].contains("that is no time"), "{what}");
            assert!(!told.has("by speed") && !told.has("moves to stage"), "{what}");
            // Without the fault, microbatches take other routes through pools once their speeds are known.
            assert!(calm.plan.pools().is_some() || hash(&ended) == hash(&train(&calm).0), "{what}");
        }
    }
}

/// Returns the hash of the model at the end of a run.
fn hash(ended: &[Ended]) -> &str {
    let reports = ended.iter().map(|ended| ended.as_ref().unwrap());
    &reports.flatten().next().unwrap().hash
}
