//! Tests of a newcomer to pipelines that fetches its part of the model while the members train on, and replays
//! the steps since. It has the same bits as one that takes its part while all wait.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::collections::BTreeMap;
use std::path::Path;

use crate::members_follow::{Noted, end, step_of};
use crate::virtual_members::{Ended, connections, fox, in_pools, tiny};
use farflung::comm::simulated::Faults;
use farflung::config::choice::OptimizerKind;
use farflung::optim::local::MUON;
use farflung::train::{Fault, FaultyValue, Job, run_workers};
use farflung::{Stop, TrainConfig};
use farflung_base::{Nanos, PeerId};

const MEMBERS: usize = 4;
const NEW: PeerId = PeerId(MEMBERS as u32);
/// Parts of the members' notes: when they begin to keep records for a newcomer, and when it has joined.
const BEGINS: &str = "of state while the others train on";
const CAME: &str = "member 4 joined; ";
/// Part of the note of a newcomer that has followed its part.
pub(crate) const FOLLOWED: &str = "of the last step";
/// About the time of a step.
pub(crate) const STEP: u64 = 6_000_000_000;

/// Creates a job of two pipelines of two members with about 1 MB of state each, on links of 10 Mbit/s.
pub(crate) fn job(folder: &Path, config: TrainConfig) -> Job {
    let config = TrainConfig {
        layers: Some(4),
        microbatches: Some(4),
        stages: 2,
        steps: 14,
        workers: MEMBERS,
        eval_every: 100,
        eval_batches: 1,
        check_every: 1,
        codec: "none".parse().unwrap(),
        deadline: Nanos::from_millis(30_000),
        link: "10mbit,1ms".parse().unwrap(),
        compute_rate: 4e6,
        ..tiny(folder, &fox(), config)
    };
    let job = Job::new(TrainConfig { dim: Some(64), ..config }, MEMBERS, Stop::manual()).unwrap();
    Job { elastic: true, ..job }
}

/// Runs a job that loses a member in its second step. A newcomer comes at `come`.
fn run(job: &Job, lost: u32, come: Nanos, faults: Faults) -> (Vec<Ended>, Noted) {
    let mut told = Noted::default();
    let faults = faults.at(Nanos(STEP * 3 / 2)).crash(PeerId(lost));
    let ended = run_workers(job, connections(job, MEMBERS + 1, &[(NEW, come)], &faults), &mut told);
    (ended, told)
}

/// Returns the hash of the whole model, which one member has at the end.
pub(crate) fn hash(ended: &[Ended], lost: &[u32], told: &Noted) -> String {
    let others = || ended.iter().enumerate().filter(|(n, _)| !lost.contains(&(*n as u32)));
    let errors: Vec<_> =
        others().filter_map(|(n, ended)| Some((n, ended.as_ref().err()?.to_string()))).collect();
    assert!(errors.is_empty(), "{errors:?} {:?}", told.notes);
    let reports = ended.iter().filter_map(|ended| ended.as_ref().ok()?.as_ref());
    let hashes: Vec<String> = reports.map(|report| report.hash.clone()).collect();
    assert_eq!(hashes.len(), 1, "{:?}", told.notes);
    hashes[0].clone()
}

#[test]
fn one_that_follows_its_part_has_the_bits_of_one_for_which_all_wait() {
    let muon = TrainConfig { optimizer: OptimizerKind::of(&MUON), ..TrainConfig::default() };
    for (config, lost) in [(TrainConfig::default(), 3), (TrainConfig::default(), 1), (muon, 3)] {
        let folder = tempfile::tempdir().unwrap();
        let job = job(folder.path(), config);
        // By the step after which the newcomer joins while all wait: the final hash.
        let waits = Job { barrier: true, ..job.clone() };
        let mut waited: BTreeMap<u64, String> = BTreeMap::new();
        for part in 0..8 {
            let (ended, told) = run(&waits, lost, Nanos(STEP * 2 + STEP * part), Faults::new());
            assert!(!told.has(BEGINS));
            if told.has(CAME) {
                waited.insert(step_of(&told, CAME), hash(&ended, &[lost], &told));
            }
        }
        let mut compared = 0;
        for part in 0..6 {
            let (ended, told) = run(&job, lost, Nanos(STEP * 2 + STEP * part / 3), Faults::new());
            let (begins, came) = (step_of(&told, BEGINS), step_of(&told, CAME));
            assert!(begins < came, "steps are committed while it fetches: {told:?}");
            assert!(told.has(FOLLOWED), "{told:?}");
            let hash = hash(&ended, &[lost], &told);
            if let Some(waited) = waited.get(&came) {
                assert_eq!(hash, *waited, "{told:?}");
                compared += 1;
            }
        }
        assert!(compared >= 4, "{compared}: {:?}", waited.keys());
    }
}

/// Creates a job whose stages are two pools of two members, by choice.
fn pooled(folder: &Path) -> Job {
    in_pools(
        TrainConfig { pooled: true, ..TrainConfig::clone(&job(folder, TrainConfig::default()).given) },
        &[2, 2],
    )
}

#[test]
fn one_that_joins_a_pool_follows_its_part_with_the_bits_of_one_for_which_all_wait() {
    // The pool that has lost a member is the slower one. Without a loss, it is that of the second stage, which
    // has the head.
    for (lost, pools) in [(Some(3), "2, 2"), (Some(1), "2, 2"), (None, "2, 3")] {
        let folder = tempfile::tempdir().unwrap();
        let job = pooled(folder.path());
        let run = |job: &Job, come: u64| {
            let mut told = Noted::default();
            let faults = match lost {
                Some(lost) => Faults::new().at(Nanos(STEP * 3 / 2)).crash(PeerId(lost)),
                None => Faults::new(),
            };
            let ended =
                run_workers(job, connections(job, MEMBERS + 1, &[(NEW, Nanos(come))], &faults), &mut told);
            assert!(!told.has(CAME) || told.has(&format!("; pools of {pools} members")), "{told:?}");
            (ended, told)
        };
        let lost: Vec<u32> = lost.into_iter().collect();
        let waits = Job { barrier: true, ..job.clone() };
        let mut waited: BTreeMap<u64, String> = BTreeMap::new();
        for part in 0..8 {
            let (ended, told) = run(&waits, STEP * 2 + STEP * part);
            assert!(!told.has(BEGINS));
            if told.has(CAME) {
                waited.insert(step_of(&told, CAME), hash(&ended, &lost, &told));
            }
        }
        let mut compared = 0;
        for part in 0..3 {
            let (ended, told) = run(&job, STEP * 2 + STEP * part);
            let (begins, came) = (step_of(&told, BEGINS), step_of(&told, CAME));
            assert!(begins < came && told.has(FOLLOWED), "{told:?}");
            let hash = hash(&ended, &lost, &told);
            if let Some(waited) = waited.get(&came) {
                assert_eq!(hash, *waited, "{told:?}");
                compared += 1;
            }
        }
        assert!(compared >= 2, "{compared}: {:?}", waited.keys());
    }
}

/// Checks that members are not slower while a newcomer fetches, and then wait for one record only. `calm` is a
/// run without the newcomer, `all_wait` one in which all wait for it. `came` is a text in the note on its
/// admission.
pub(crate) fn waits_for_one_record(came: &str, calm: &Noted, told: &Noted, all_wait: &Noted) {
    let at = step_of(told, came);
    let slower = end(told, at) as f64 / end(calm, at) as f64;
    assert!(slower < 1.01, "steps while it fetches take {slower} times as long");
    // More members are done sooner with a step, so only the changes are compared.
    let longest = |told: &Noted, at: u64| end(told, at + 1) - end(told, at);
    let step = end(told, at + 2) - end(told, at + 1);
    let (follows, waits) = (longest(told, at) - step, longest(all_wait, step_of(all_wait, came)) - step);
    // A record is a third of the state.
    assert!(follows * 5 < waits * 3, "{follows} {waits} {step}");
}

#[test]
fn members_of_pipelines_wait_for_one_record_only() {
    let folder = tempfile::tempdir().unwrap();
    let job = job(folder.path(), TrainConfig { copy_share: 0.0, ..TrainConfig::default() });
    let never = Nanos(STEP * 1_000);
    let (_, calm) = run(&job, 3, never, Faults::new());
    let come = Nanos(STEP * 2);
    let (_, told) = run(&job, 3, come, Faults::new());
    let (_, all_wait) = run(&Job { barrier: true, ..job }, 3, come, Faults::new());
    waits_for_one_record(CAME, &calm, &told, &all_wait);
}

#[test]
fn a_wrong_record_of_a_part_is_found_out() {
    let folder = tempfile::tempdir().unwrap();
    let job = job(folder.path(), TrainConfig::default());
    let come = Nanos(STEP * 2);
    let (calm, told) = run(&job, 3, come, Faults::new());
    let (calm, begins) = (hash(&calm, &[3], &told), step_of(&told, BEGINS));
    let mut found = 0;
    // After the loss of rank 3, the ranks of the first stage are 0 and 1, and that of the second is 2.
    for rank in 0..3 {
        let fault = Fault { rank, step: begins + 1, value: FaultyValue::Record, element: 7, bit: 20 };
        let (ended, told) = run(&Job { fault: Some(fault), ..job.clone() }, 3, come, Faults::new());
        assert_eq!(hash(&ended, &[3], &told), calm, "{told:?}");
        // It takes its whole part instead: three values for each parameter, and the record.
        found +=
            u32::from(told.notes.iter().any(|(_, note)| note.contains(CAME) && note.contains("MB of state")));
    }
    assert_eq!(found, 1, "one member has the records of the second stage");
}

#[test]
fn a_donor_that_is_lost_while_a_part_is_fetched_costs_its_own_part_only() {
    let folder = tempfile::tempdir().unwrap();
    let job = job(folder.path(), TrainConfig { microbatches: Some(6), workers: 6, ..TrainConfig::default() });
    let job = job.with_config(TrainConfig { workers: 6, ..TrainConfig::clone(&job.given) }, 6).unwrap();
    let new = PeerId(6);
    let run = |faults: Faults| {
        let mut told = Noted::default();
        let faults = faults.at(Nanos(STEP)).crash(PeerId(5));
        let come = [(new, Nanos(STEP * 2))];
        let ended = run_workers(&job, connections(&job, 7, &come, &faults), &mut told);
        (ended, told)
    };
    let (_, calm) = run(Faults::new());
    let (begins, came) = (step_of(&calm, BEGINS), step_of(&calm, "member 6 joined; "));
    let (from, to) = (end(&calm, begins), end(&calm, came));
    for part in 1..5 {
        for victim in [1, 2] {
            let at = Nanos(from + (to - from) * part / 5);
            let (ended, told) = run(Faults::new().at(at).crash(PeerId(victim)));
            hash(&ended, &[5, victim], &told);
            assert!(told.has("member 6 joined; "), "{victim} at {at}: {told:?}");
        }
    }
}

#[test]
fn a_newcomer_that_would_be_a_spare_or_move_others_takes_no_copy() {
    let folder = tempfile::tempdir().unwrap();
    let job = job(folder.path(), TrainConfig::default());
    let mut told = Noted::default();
    // Two whole pipelines, and a fifth member.
    let come = [(NEW, Nanos(STEP * 2))];
    let ended = run_workers(&job, connections(&job, MEMBERS + 1, &come, &Faults::new()), &mut told);
    hash(&ended, &[], &told);
    assert!(told.has(CAME) && !told.has(BEGINS), "{told:?}");
}
