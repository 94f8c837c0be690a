//! Members of pipelines on machines of unequal speed: a pipeline with a slow rank gets fewer microbatches, and
//! a rank that is too slow for any share leaves.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::fmt::Write as _;
use std::path::Path;

use crate::members_in_pipelines::{report, run};
use crate::virtual_members::{Ended, Told, fox, tiny};
use farflung::comm::simulated::Faults;
use farflung::config::choice::{BalanceKind, SyncKind};
use farflung::optim::sync::DILOCO;
use farflung::train::Job;
use farflung::{Error, Stop, TrainConfig};
use farflung_base::Nanos;

const STEPS: usize = 40;

/// Returns a job of two pipelines of two, on machines with these speeds in MFLOP/s.
fn job(folder: &Path, speeds: &[f64], config: TrainConfig) -> Job {
    let mut machines = "default = \"1gbit,1ms\"\n".to_owned();
    for (n, speed) in speeds.iter().enumerate() {
        let device = format!("name = \"m{n}\"\nflops = \"{speed} MFLOPS\"\nmemory = \"8GB\"\n");
        write!(machines, "[[device]]\n{device}").unwrap();
    }
    let path = folder.join("machines.toml");
    std::fs::write(&path, machines).unwrap();
    let config = TrainConfig {
        topology: Some(path),
        layers: Some(4),
        stages: 2,
        workers: speeds.len(),
        microbatches: Some(4),
        steps: STEPS as u64,
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
    let mut told = Told::default();
    let ended = run(job, 4, &[], &Faults::new(), &mut told);
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
    assert!(!told.has("by speed"), "{:?}", told.notes);
}

#[test]
fn a_rank_that_is_too_slow_for_any_share_leaves_its_pipeline() {
    let folder = tempfile::tempdir().unwrap();
    let (ended, told) = train(&job(folder.path(), &[8.0, 8.0, 8.0, 0.05], TrainConfig::default()));
    let error = ended[3].as_ref().unwrap_err();
    assert!(matches!(error, Error::TooSlow { .. }) && error.exit_code() == 2, "{error}");
    for (n, ended) in ended.iter().take(3).enumerate() {
        assert!(ended.is_ok(), "{n}: {:?}", ended.as_ref().err());
    }
    report(&ended);
    assert!(told.has("member 3 left"), "{:?}", told.notes);
    let before = (told.times[10] - told.times[0]) / 10.0;
    assert!(pace(&told) < 0.1 * before, "{} {before}", pace(&told));
}
