//! Tests of a newcomer that fetches the state of a run with local steps while the members take these steps, and
//! replays the synchronisations since. It has the same bits as one that takes the state while all wait.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::collections::BTreeMap;
use std::path::Path;

use crate::members_follow::{CAME, MEMBERS, NEW, Noted, end, hash, run, step_of};
use crate::virtual_members::{connections, fox, tiny};
use farflung::comm::simulated::Faults;
use farflung::config::choice::SyncKind;
use farflung::optim::sync::{DES_LOC, DILOCO};
use farflung::train::{Fault, FaultyValue, Job, run_workers};
use farflung::{Stop, TrainConfig};
use farflung_base::{Nanos, PeerId};

const ROUND: u64 = 4;
const STEPS: u64 = 7 * ROUND;
/// Part of the members' note when they begin to keep records for a newcomer.
const BEGINS: &str = "for each round since";

/// Creates a job of three members on links of 10 Mbit/s. A local step takes 1.4 s and a round 6.1 s. At half of
/// the rates, a newcomer needs 2.3 s for the state and 4.5 s for the optimizer, which only one member sends.
fn job(folder: &Path, config: TrainConfig) -> Job {
    let config = TrainConfig {
        layers: Some(2),
        steps: STEPS,
        sync_every: ROUND,
        workers: MEMBERS,
        eval_every: 100,
        eval_batches: 1,
        deadline: Nanos::from_millis(5000),
        link: "10mbit,1ms".parse().unwrap(),
        compute_rate: 4e6,
        ..tiny(folder, &fox(), config)
    };
    Job::new(TrainConfig { dim: Some(64), ..config }, MEMBERS, Stop::manual()).unwrap()
}

fn diloco(codec: &str) -> TrainConfig {
    TrainConfig { sync: SyncKind::of(&DILOCO), codec: codec.parse().unwrap(), ..TrainConfig::default() }
}

/// First moments are averaged in every second round, and second moments in every round.
fn des_loc() -> TrainConfig {
    TrainConfig {
        sync: SyncKind::of(&DES_LOC),
        first_moment_every: Some(2 * ROUND),
        second_moment_every: Some(ROUND),
        ..diloco("none")
    }
}

#[test]
fn one_that_follows_rounds_has_the_bits_of_one_for_which_all_wait() {
    for config in [diloco("int8"), des_loc()] {
        let folder = tempfile::tempdir().unwrap();
        let is_des_loc = config.sync == SyncKind::of(&DES_LOC);
        let job = job(folder.path(), config);
        // By the step after which the newcomer joins while all wait: the final hash, and the time of the wait.
        let waits = Job { barrier: true, ..job.clone() };
        let round = 6_100;
        let mut waited: BTreeMap<u64, (String, u64)> = BTreeMap::new();
        for part in 0..5 {
            let (ended, told) = run(&waits, Nanos::from_millis(1 + round * part), &Faults::new());
            assert!(!told.has(BEGINS));
            let came = step_of(&told, CAME);
            let wait = end(&told, came + 1) - end(&told, came);
            waited.insert(came, (hash(&ended, MEMBERS + 1, &told), wait));
        }
        let mut compared = 0;
        for part in 0..5 {
            let (ended, told) = run(&job, Nanos::from_millis(1 + round * part / 2), &Faults::new());
            let (begins, came) = (step_of(&told, BEGINS), step_of(&told, CAME));
            assert!(begins < came, "local steps are done while it fetches: {told:?}");
            assert!(told.has("of the last round, about "), "{told:?}");
            let hash = hash(&ended, MEMBERS + 1, &told);
            let Some((other, wait)) = waited.get(&came) else { continue };
            assert_eq!(hash, *other, "{told:?}");
            // All wait for a fifth of the bytes; with des-loc for at most three quarters, if all moments are
            // averaged in that round.
            let waits = end(&told, came + 1) - end(&told, came);
            let step = end(&told, 2) - end(&told, 1);
            let most = if is_des_loc { 90 } else { 50 };
            assert!((waits - step) * 100 < (wait - step) * most, "{waits} {wait} {step}");
            compared += 1;
        }
        assert!(compared >= 3, "{compared}: {:?}", waited.keys());
    }
}

/// Members that are lost while the newcomer fetches, the first one included, and records and chunks that are
/// wrong: all remaining members have the same bits.
#[test]
fn members_are_lost_while_the_newcomer_follows_rounds() {
    let folder = tempfile::tempdir().unwrap();
    let job = job(folder.path(), diloco("none"));
    let (calm, told) = run(&job, Nanos(1), &Faults::new());
    let calm = hash(&calm, MEMBERS + 1, &told);
    let (begins, came) = (step_of(&told, BEGINS), step_of(&told, CAME));
    // While it fetches the state, the optimizer, and the last record.
    for (part, victim) in [(1, 0), (5, 0), (5, 2), (8, NEW.0)] {
        let (from, to) = (end(&told, begins.max(1)), end(&told, came) + 300_000_000);
        let at = Nanos(from + (to - from) * part / 8);
        let (ended, told) = run(&job, Nanos(1), &Faults::new().at(at).crash(PeerId(victim)));
        hash(&ended, MEMBERS, &told);
    }
    for (value, step) in [(FaultyValue::Chunk, begins), (FaultyValue::Record, came)] {
        for rank in 0..2 {
            let fault = Fault { rank, step, value, element: 7, bit: 20 };
            let (ended, told) = run(&Job { fault: Some(fault), ..job.clone() }, Nanos(1), &Faults::new());
            let hash = hash(&ended, MEMBERS + 1, &told);
            // A wrong chunk may delay the newcomer by a round.
            assert!(hash == calm || step_of(&told, CAME) > came, "{value:?} of {rank}: {told:?}");
        }
    }
}

/// A rank that is alone is followed, too, with any method.
#[test]
fn a_rank_that_is_alone_is_followed() {
    for (config, unit) in [(diloco("none"), "round"), (TrainConfig::default(), "step")] {
        let folder = tempfile::tempdir().unwrap();
        let job = job(folder.path(), config);
        let job = job.with_config(TrainConfig { workers: 1, ..TrainConfig::clone(&job.given) }, 1).unwrap();
        let run = |job: &Job, come: Nanos| {
            let mut told = Noted::default();
            let ended =
                run_workers(job, connections(job, 2, &[(PeerId(1), come)], &Faults::new()), &mut told);
            let failed = ended.iter().find_map(|ended| ended.as_ref().err());
            assert!(failed.is_none(), "{failed:?} {told:?}");
            (hash(&ended, 2, &told), told)
        };
        let (followed, told) = run(&job, Nanos(1));
        assert!(told.has(&format!("of the last {unit}")), "{told:?}");
        let came = step_of(&told, "member 1 joined");
        let every = if unit == "round" { ROUND } else { 1 };
        let before = end(&told, came) - end(&told, came - every);
        // Newcomers for which the rank waits.
        let waits = Job { barrier: true, ..job.clone() };
        let come = (1..=8).map(|part| Nanos(end(&told, came).saturating_sub(before * part / 2).max(1)));
        let waited = come.map(|at| run(&waits, at));
        let same: Vec<String> = waited
            .filter(|(_, told)| step_of(told, "member 1 joined") == came)
            .map(|(hash, _)| hash)
            .collect();
        assert!(!same.is_empty() && same.iter().all(|hash| *hash == followed), "{came} {same:?} {told:?}");
    }
}
