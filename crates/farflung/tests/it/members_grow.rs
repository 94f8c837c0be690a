//! Tests of spares that form a further pipeline: they fetch their parts of the model while the others train on,
//! and replay the steps since.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::collections::BTreeMap;
use std::path::Path;

use crate::members::{des_loc, diloco};
use crate::members_follow::{Noted, end, step_of};
use crate::members_follow_parts::{FOLLOWED, STEP, hash, job, waits_for_one_record};
use crate::virtual_members::{Ended, connections};
use farflung::TrainConfig;
use farflung::comm::simulated::Faults;
use farflung::train::{Job, run_workers};
use farflung_base::{Nanos, PeerId};

/// Creates a job of one pipeline of two members.
fn growing(folder: &Path, config: TrainConfig) -> Job {
    let job = job(folder, config);
    let config = TrainConfig { workers: 2, ..TrainConfig::clone(&job.given) };
    job.with_config(config, 2).unwrap()
}

/// Runs a job to which further members come at these times, one after the other.
fn run(job: &Job, come: &[Nanos], faults: &Faults) -> (Vec<Ended>, Noted) {
    let mut told = Noted::default();
    let come: Vec<_> = (job.world as u32..).map(PeerId).zip(come.iter().copied()).collect();
    let ended = run_workers(job, connections(job, job.world + come.len(), &come, faults), &mut told);
    (ended, told)
}

/// Parts of the notes when spares begin to fetch their parts, and when they are in a further pipeline.
const FETCH: &str = "2 of which fetch the parts of a further pipeline meanwhile";
const GREW: &str = "2 pipelines of 2";

#[test]
fn spares_that_form_a_further_pipeline_fetch_their_parts_while_the_others_train() {
    let folder = tempfile::tempdir().unwrap();
    let job = growing(folder.path(), TrainConfig::default());
    let come = |part: u64| [Nanos(STEP / 2), Nanos(STEP * 3 / 2 + STEP * part / 3)];
    let waits = Job { barrier: true, ..job.clone() };
    // By the step after which the second pipeline begins while all wait: the final hash.
    let mut waited: BTreeMap<u64, String> = BTreeMap::new();
    for part in 0..16 {
        let (ended, told) = run(&waits, &come(part), &Faults::new());
        assert!(!told.has(FETCH), "{told:?}");
        if told.has(GREW) {
            waited.insert(step_of(&told, GREW), hash(&ended, &[], &told));
        }
    }
    let mut compared = 0;
    for part in 0..6 {
        let (ended, told) = run(&job, &come(part), &Faults::new());
        let (begins, grew) = (step_of(&told, FETCH), step_of(&told, GREW));
        assert!(begins < grew, "steps are committed while they fetch: {told:?}");
        assert!(told.has(FOLLOWED), "{told:?}");
        let hash = hash(&ended, &[], &told);
        if let Some(waited) = waited.get(&grew) {
            assert_eq!(hash, *waited, "{told:?}");
            compared += 1;
        }
    }
    assert!(compared >= 4, "{compared}: {:?}", waited.keys());
}

#[test]
fn spares_replay_averages_of_local_steps() {
    // With DiLoCo, spares that follow have an optimizer of the round before.
    for (config, same_bits) in [(diloco(), false), (des_loc(), true)] {
        let folder = tempfile::tempdir().unwrap();
        let job = growing(folder.path(), config);
        let job = job.with_config(TrainConfig { steps: 18, ..TrainConfig::clone(&job.given) }, 2).unwrap();
        let come = |part: u64| [Nanos(STEP / 2), Nanos(STEP * 3 / 2 + STEP * part / 2)];
        let waits = Job { barrier: true, ..job.clone() };
        let mut waited: BTreeMap<u64, String> = BTreeMap::new();
        for part in (0..20).step_by(4).filter(|_| same_bits) {
            let (ended, told) = run(&waits, &come(part), &Faults::new());
            assert!(!told.has(FETCH), "{told:?}");
            if told.has(GREW) {
                waited.insert(step_of(&told, GREW), hash(&ended, &[], &told));
            }
        }
        let mut compared = 0;
        for part in [0, 2, 5] {
            let (ended, told) = run(&job, &come(part), &Faults::new());
            let (begins, grew) = (step_of(&told, FETCH), step_of(&told, GREW));
            assert!(
                begins < grew && grew.is_multiple_of(2),
                "steps are committed while they fetch: {told:?}"
            );
            assert!(told.has("of the last round"), "{told:?}");
            let hash = hash(&ended, &[], &told);
            if let Some(waited) = waited.get(&grew) {
                assert_eq!(hash, *waited, "{told:?}");
                compared += 1;
            }
        }
        assert!(compared >= 2 || !same_bits, "{compared}: {:?}", waited.keys());
    }
}

const COME: [Nanos; 2] = [Nanos(STEP / 2), Nanos(STEP * 3 / 2)];

#[test]
fn the_members_of_a_pipeline_wait_for_one_record_of_another_only() {
    let folder = tempfile::tempdir().unwrap();
    // Copies to the next rank would take part of some steps.
    let job = growing(folder.path(), TrainConfig { copy_share: 0.0, ..TrainConfig::default() });
    let (_, calm) = run(&job, &COME[..1], &Faults::new());
    let (_, told) = run(&job, &COME, &Faults::new());
    let (_, all_wait) = run(&Job { barrier: true, ..job }, &COME, &Faults::new());
    waits_for_one_record(GREW, &calm, &told, &all_wait);
}

#[test]
fn whoever_is_lost_while_spares_fetch_their_parts_costs_no_other_member() {
    let folder = tempfile::tempdir().unwrap();
    // Two pipelines, so that another member holds the part of each. Members 4 and 5 form the third one.
    let job = job(folder.path(), TrainConfig { microbatches: Some(6), ..TrainConfig::default() });
    let (_, calm) = run(&job, &COME, &Faults::new());
    let (from, to) = (end(&calm, step_of(&calm, FETCH)), end(&calm, step_of(&calm, "3 pipelines of 2")));
    for part in 1..6 {
        let at = Nanos(from + (to - from) * part / 6);
        for victim in [1, 4, 5] {
            let faults = [
                Faults::new().at(at).crash(PeerId(victim)),
                Faults::new().at(at).freeze(PeerId(victim), Nanos::MAX),
            ];
            for faults in faults {
                let (ended, told) = run(&job, &COME, &faults);
                hash(&ended, &[victim], &told);
                assert!(told.has(&format!("member {victim} l")), "{victim} at {at}: {told:?}");
            }
        }
    }
}

#[test]
fn a_newcomer_waits_until_a_further_pipeline_is_formed_and_can_be_in_the_next_one() {
    let folder = tempfile::tempdir().unwrap();
    let job = growing(folder.path(), TrainConfig { microbatches: Some(6), ..TrainConfig::default() });
    let job = job.with_config(TrainConfig { steps: 24, ..TrainConfig::clone(&job.given) }, 2).unwrap();
    let come = [COME[0], COME[1], Nanos(STEP * 5 / 2), Nanos(STEP * 5 / 2)];
    let (ended, told) = run(&job, &come, &Faults::new());
    hash(&ended, &[], &told);
    let (grew, came) = (step_of(&told, GREW), step_of(&told, "member 4 joined"));
    assert!(grew <= came && told.has("3 pipelines of 2"), "{told:?}");
    assert!(came < step_of(&told, "3 pipelines of 2"), "{told:?}");
}

#[test]
fn spares_whose_links_are_too_slow_receive_their_parts_while_all_wait() {
    let folder = tempfile::tempdir().unwrap();
    let job = growing(folder.path(), TrainConfig::default());
    let link = "200kbit,1ms".parse().unwrap();
    // With `--join-wait`, members do not wait longer for them: they stay without a part.
    for (join_wait, grows) in [(Nanos::MAX, true), (Nanos::from_millis(60_000), false)] {
        let job =
            job.with_config(TrainConfig { link, join_wait, ..TrainConfig::clone(&job.given) }, 2).unwrap();
        let (ended, told) = run(&job, &COME, &Faults::new());
        if grows {
            hash(&ended, &[], &told);
            assert!(told.has("all members wait"), "{told:?}");
        }
        assert!(told.has(GREW) == grows && !told.has(FOLLOWED), "{told:?}");
    }
}
