//! A step that takes longer than the deadline although all members answer: the same members try it again.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::path::Path;

use crate::virtual_members::{Ended, connections, fox, tiny};
use farflung::comm::simulated::Faults;
use farflung::config::choice::{BalanceKind, SyncKind};
use farflung::events::{self, EventKind};
use farflung::optim::sync::DILOCO;
use farflung::train::{Job, Quiet, Report, run_workers};
use farflung::{Existing, RunDir, Stop, TrainConfig};
use farflung_base::Nanos;

const STEPS: u64 = 6;
const MEMBERS: usize = 3;

/// Returns a job on three machines. The last one computes a microbatch of eight tokens in `slow_ms`
/// milliseconds, the others in a tenth of a second.
fn job(folder: &Path, slow_ms: u32, deadline_ms: u64, config: TrainConfig) -> Job {
    let device = |(n, ms): (usize, u32)| {
        let speed = 8000 / ms;
        format!("[[device]]\nname = \"m{n}\"\ntokens_per_second = {speed}\nmemory = \"8GB\"\n")
    };
    let devices: String = [100, 100, slow_ms].into_iter().enumerate().map(device).collect();
    let topology = folder.join("machines.toml");
    std::fs::write(&topology, format!("default = \"1gbit,1ms\"\n{devices}")).unwrap();
    let config = TrainConfig {
        layers: Some(3),
        steps: STEPS,
        workers: MEMBERS,
        eval_every: 100,
        eval_batches: 1,
        codec: "none".parse().unwrap(),
        balance: BalanceKind::Equal,
        deadline: Nanos::from_millis(deadline_ms),
        topology: Some(topology),
        ..tiny(folder, &fox(), config)
    };
    Job { elastic: true, ..Job::new(config, MEMBERS, Stop::manual()).unwrap() }
}

/// Returns the result of each member, and the events of the first one.
fn run(job: &Job, folder: &Path) -> (Vec<Ended>, Vec<EventKind>) {
    let mut connections = connections(job, MEMBERS, &[], &Faults::new());
    for (n, connection) in connections.iter_mut().enumerate() {
        let own = RunDir::open(&folder.join(format!("member-{n}")), Existing::Refuse).unwrap();
        connection.place = connection.place.take().map(|place| place.saves_in(own));
    }
    let results = run_workers(job, connections, &mut Quiet);
    let told = events::read(&folder.join("member-0").join(events::EVENTS)).unwrap_or_default();
    (results, told.into_iter().map(|event| event.what).collect())
}

fn reports(ended: &[Ended]) -> Vec<&Report> {
    let all = ended.iter().map(|ended| ended.as_ref().map_err(ToString::to_string));
    all.map(|ended| ended.unwrap().as_ref().unwrap()).collect()
}

/// Returns the steps of a report with their losses.
fn losses(report: &Report) -> Vec<(u64, f64)> {
    report.rows.iter().map(|row| (row.step, row.train_loss)).collect()
}

/// Returns, for each repeat of the step, its number and the deadline.
fn repeats(told: &[EventKind]) -> Vec<(u32, u64)> {
    let of = |what: &EventKind| match what {
        EventKind::Repeated { times, deadline_ms, .. } => Some((*times, *deadline_ms)),
        _ => None,
    };
    told.iter().filter_map(of).collect()
}

#[test]
fn a_step_that_times_out_while_all_answer_is_done_again_by_the_same_members() {
    let diloco = TrainConfig { sync: SyncKind::of(&DILOCO), sync_every: 2, ..TrainConfig::default() };
    // A round of two steps takes two seconds, and all averages but the last are tried twice.
    let cases = [(TrainConfig::default(), vec![(1, 1000)]), (diloco, vec![(1, 1000), (1, 2000)])];
    for (config, expected) in cases {
        let folder = tempfile::tempdir().unwrap();
        let calm = job(folder.path(), 1000, 60_000, config.clone());
        let (calm, told) = run(&calm, &folder.path().join("calm"));
        assert_eq!(repeats(&told), []);
        // The slow member takes a second, which is longer than the others wait for it.
        let short = job(folder.path(), 1000, 500, config);
        let (short, told) = run(&short, &folder.path().join("short"));
        let (calm, short) = (reports(&calm), reports(&short));
        assert_eq!(short.len(), MEMBERS);
        for report in &short {
            assert_eq!((report.hash.as_str(), report.workers), (calm[0].hash.as_str(), MEMBERS));
            assert_eq!(losses(report), losses(calm[0]));
        }
        assert_eq!(repeats(&told), expected, "{told:?}");
        assert!(!told.iter().any(|what| matches!(what, EventKind::Members { .. })), "{told:?}");
    }
}

#[test]
fn a_member_that_keeps_the_others_waiting_again_and_again_is_given_up() {
    let folder = tempfile::tempdir().unwrap();
    // A step takes the slow member longer than eight times the deadline.
    let job = job(folder.path(), 8000, 500, TrainConfig::default());
    let (ended, told) = run(&job, folder.path());
    assert_eq!(ended[2].as_ref().unwrap_err().exit_code(), 75);
    let left: Vec<&Report> =
        ended[..2].iter().map(|ended| ended.as_ref().unwrap().as_ref().unwrap()).collect();
    assert_eq!((left[0].workers, &left[0].hash), (2, &left[1].hash));
    assert!(
        told.iter().any(|what| matches!(what, EventKind::Members { left, .. } if *left == [2])),
        "{told:?}"
    );
}

#[test]
fn a_pipeline_does_a_step_again_that_timed_out() {
    let folder = tempfile::tempdir().unwrap();
    let pipeline = || TrainConfig { stages: MEMBERS, microbatches: Some(3), ..TrainConfig::default() };
    let ended = |deadline_ms, name: &str| {
        // The last stage computes for 0.75 s of a microbatch, and the first one waits for its result.
        run(&job(folder.path(), 900, deadline_ms, pipeline()), &folder.path().join(name))
    };
    let (calm, _) = ended(60_000, "calm");
    let (short, told) = ended(600, "short");
    for result in short.iter().chain(&calm) {
        assert!(result.is_ok(), "{:?}", result.as_ref().err());
    }
    // One rank has the whole model at the end.
    let whole = |ended: &[Ended]| {
        let report = ended.iter().flatten().flatten().next().unwrap();
        (report.hash.clone(), losses(report), report.workers)
    };
    assert_eq!(whole(&short), whole(&calm));
    let repeats = repeats(&told);
    assert!(!repeats.is_empty() && repeats.iter().all(|(times, _)| *times <= 3), "{repeats:?}");
    assert!(!told.iter().any(|what| matches!(what, EventKind::Members { .. })), "{told:?}");
}
