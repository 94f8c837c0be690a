//! Tests of a newcomer that fetches the state while the members train on, and replays the steps since. It has
//! the same bits as one that takes the state while all wait, and whatever happens to it costs the members no
//! step.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::collections::BTreeMap;
use std::path::Path;

use crate::virtual_members::{Ended, connections, fox, tiny};
use farflung::comm::simulated::Faults;
use farflung::config::choice::OptimizerKind;
use farflung::optim::local::SGD;
use farflung::train::{Fault, FaultyValue, Job, RunObserver, run_workers};
use farflung::{StepMetrics, Stop, TrainConfig};
use farflung_base::{Nanos, PeerId};

pub(crate) const MEMBERS: usize = 3;
pub(crate) const NEW: PeerId = PeerId(MEMBERS as u32);
const STEPS: u64 = 14;
/// Parts of the members' notes: when they begin to keep records for a newcomer, and when it has joined.
const BEGINS: &str = "of state while the others train on";
pub(crate) const CAME: &str = "member 3 joined; ";

/// Creates a job of three members with 1.4 MB of state each, on links of 10 Mbit/s. A step takes 6.1 s, and its
/// record 0.75 s at half of a newcomer's rate.
fn job(folder: &Path, config: TrainConfig) -> Job {
    let config = TrainConfig {
        layers: Some(2),
        steps: STEPS,
        workers: MEMBERS,
        eval_every: 100,
        eval_batches: 1,
        deadline: Nanos::from_millis(5000),
        link: "10mbit,1ms".parse().unwrap(),
        compute_rate: 1e6,
        ..tiny(folder, &fox(), config)
    };
    Job::new(TrainConfig { dim: Some(64), ..config }, MEMBERS, Stop::manual()).unwrap()
}

fn ddp(codec: &str) -> TrainConfig {
    TrainConfig { codec: codec.parse().unwrap(), ..TrainConfig::default() }
}

/// Notes of rank 0, each with the number of steps before it; and the times of the steps.
#[derive(Debug, Default)]
pub(crate) struct Noted {
    pub(crate) notes: Vec<(usize, String)>,
    pub(crate) times: Vec<f64>,
}

impl Noted {
    pub(crate) fn has(&self, text: &str) -> bool {
        self.notes.iter().any(|(_, note)| note.contains(text))
    }
}

impl RunObserver for Noted {
    fn step(&mut self, metrics: &StepMetrics, _: Option<f64>) {
        self.times.push(metrics.time_s);
    }
    fn note(&mut self, note: &str) {
        self.notes.push((self.times.len(), note.to_owned()));
    }
}

pub(crate) fn run(job: &Job, come: Nanos, faults: &Faults) -> (Vec<Ended>, Noted) {
    let mut told = Noted::default();
    let connections = connections(job, MEMBERS + 1, &[(NEW, come)], faults);
    let ended = run_workers(job, connections, &mut told);
    (ended, told)
}

/// Returns the hash in all reports, which must be equal.
pub(crate) fn hash(ended: &[Ended], count: usize, told: &Noted) -> String {
    let reports = ended.iter().filter_map(|ended| ended.as_ref().ok()?.as_ref());
    let hashes: Vec<String> = reports.map(|report| report.hash.clone()).collect();
    assert_eq!(hashes.len(), count, "{ended:?} {:?}", told.notes);
    assert!(hashes.iter().all(|hash| *hash == hashes[0]), "{:?}", told.notes);
    hashes[0].clone()
}

/// Returns the number of steps that were done when a note with this text came.
pub(crate) fn step_of(told: &Noted, text: &str) -> u64 {
    let note = told.notes.iter().find(|(_, note)| note.contains(text));
    note.ok_or_else(|| format!("{text} in {told:?}")).unwrap().0 as u64
}

/// Returns the numbers of steps that were done when the members began to keep records, and when the newcomer
/// joined.
fn steps_of(told: &Noted) -> (u64, u64) {
    (step_of(told, BEGINS), step_of(told, CAME))
}

/// Returns the time of the end of a step, in nanoseconds.
pub(crate) fn end(told: &Noted, step: u64) -> u64 {
    (told.times[step as usize - 1] * 1e9) as u64
}

#[test]
fn one_that_follows_has_the_bits_of_one_for_which_all_wait() {
    let sgd = TrainConfig { optimizer: OptimizerKind::of(&SGD), ..ddp("none") };
    for config in [ddp("none"), ddp("int8"), sgd] {
        let folder = tempfile::tempdir().unwrap();
        let job = job(folder.path(), config);
        // By the step after which the newcomer joins while all wait: the final hash.
        let waits = Job { barrier: true, ..job.clone() };
        let step = Nanos::from_millis(6_100);
        let mut waited: BTreeMap<u64, String> = BTreeMap::new();
        for part in 0..8 {
            let (ended, told) = run(&waits, Nanos(1 + step.0 * part), &Faults::new());
            assert!(!told.has(BEGINS));
            waited.insert(step_of(&told, CAME), hash(&ended, MEMBERS + 1, &told));
        }
        let mut compared = 0;
        for part in 0..12 {
            let (ended, told) = run(&job, Nanos(1 + step.0 * part / 3), &Faults::new());
            let (begins, came) = steps_of(&told);
            assert!(begins < came, "steps are committed while it fetches: {told:?}");
            assert!(told.has("it receives 467.97 kB of the last step"), "{told:?}");
            let hash = hash(&ended, MEMBERS + 1, &told);
            if let Some(waited) = waited.get(&came) {
                assert_eq!(hash, *waited, "{told:?}");
                compared += 1;
            }
        }
        assert!(compared >= 9, "{compared}: {:?}", waited.keys());
    }
}

/// The members take their steps as if there were no newcomer, up to the last record.
#[test]
fn members_wait_for_one_record_only() {
    let folder = tempfile::tempdir().unwrap();
    let job = job(folder.path(), ddp("none"));
    let (alone, calm) = run(&job, Nanos::from_millis(600_000_000), &Faults::new());
    assert_eq!(alone.len(), MEMBERS + 1);
    let (_, told) = run(&job, Nanos(1), &Faults::new());
    let (begins, came) = steps_of(&told);
    let slower = end(&told, came) as f64 / end(&calm, came) as f64;
    assert!(slower < 1.005, "steps while it fetches take {slower} times as long");
    let waits = end(&told, came + 1) - end(&told, came);
    let (_, all_wait) = run(&Job { barrier: true, ..job }, Nanos(1), &Faults::new());
    let came = step_of(&all_wait, CAME);
    let all_wait = end(&all_wait, came + 1) - end(&all_wait, came);
    let step = end(&calm, 2) - end(&calm, 1);
    // A record is a third of the state.
    assert!((waits - step) * 5 < (all_wait - step) * 3, "{waits} {all_wait} {step} {begins}");
}

/// Returns times spread over the steps during which the newcomer fetches.
fn times_of_the_fetch(told: &Noted, parts: u64) -> Vec<Nanos> {
    let (begins, came) = steps_of(told);
    let (from, to) = (end(told, begins), end(told, came) + 400_000_000);
    (1..parts).map(|part| Nanos(from + (to - from) * part / parts)).collect()
}

#[test]
fn a_donor_that_is_lost_while_the_newcomer_fetches_is_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let job = job(folder.path(), ddp("none"));
    let (_, calm) = run(&job, Nanos(1), &Faults::new());
    for (part, at) in times_of_the_fetch(&calm, 9).into_iter().enumerate() {
        for victim in [0, 2] {
            let faults = Faults::new().at(at);
            let faults = match part % 2 {
                0 => faults.crash(PeerId(victim)),
                _ => faults.freeze(PeerId(victim), Nanos::MAX),
            };
            let (ended, told) = run(&job, Nanos(1), &faults);
            hash(&ended, MEMBERS, &told);
            assert!(ended[MEMBERS].is_ok(), "{victim} at {at}: {told:?}");
            // Notes and times are those of rank 0.
            assert!(victim == 0 || told.has(CAME), "{victim} at {at}: {told:?}");
        }
    }
}

#[test]
fn a_newcomer_that_is_lost_while_it_fetches_costs_no_step() {
    let folder = tempfile::tempdir().unwrap();
    let job = job(folder.path(), ddp("none"));
    let (alone, without) = run(&job, Nanos::from_millis(600_000_000), &Faults::new());
    let alone = hash(&alone, MEMBERS, &without);
    let (_, calm) = run(&job, Nanos(1), &Faults::new());
    let (begins, came) = steps_of(&calm);
    // It is lost before it has said that it is ready.
    let (from, to) = (end(&calm, begins), end(&calm, came - 1));
    for part in 0..6 {
        let at = Nanos(from + 1_000_000 + (to - from) * part / 6);
        for faults in [Faults::new().at(at).crash(NEW), Faults::new().at(at).freeze(NEW, Nanos::MAX)] {
            let (ended, told) = run(&job, Nanos(1), &faults);
            assert_eq!(hash(&ended, MEMBERS, &told), alone, "{at}: {told:?}");
            assert!(!told.has(CAME), "{at}: {told:?}");
            let slower = end(&told, STEPS) as f64 / end(&without, STEPS) as f64;
            assert!(slower < 1.005, "{at}: {slower}");
        }
    }
}

/// One that says that it is ready and then freezes is not admitted, if it freezes before the step ends.
#[test]
fn a_newcomer_that_freezes_when_it_is_ready_costs_no_step() {
    let folder = tempfile::tempdir().unwrap();
    let job = job(folder.path(), ddp("none"));
    for barrier in [false, true] {
        let job = Job { barrier, ..job.clone() };
        let (_, calm) = run(&job, Nanos(1), &Faults::new());
        let came = step_of(&calm, CAME);
        let (_, without) = run(&job, Nanos::from_millis(600_000_000), &Faults::new());
        for part in 1..4 {
            let at = end(&calm, came - 1) + (end(&calm, came) - end(&calm, came - 1)) * part / 5;
            let (ended, told) = run(&job, Nanos(1), &Faults::new().at(Nanos(at)).freeze(NEW, Nanos::MAX));
            hash(&ended, MEMBERS, &told);
            let slower = end(&told, STEPS) as f64 / end(&without, STEPS) as f64;
            assert!(slower < 1.005, "{at}: {slower} {told:?}");
        }
    }
}

#[test]
fn one_whose_links_are_too_slow_is_waited_for() {
    let folder = tempfile::tempdir().unwrap();
    let job = job(folder.path(), ddp("none"));
    // A step takes 0.9 s, a record 0.75 s at half of the rate; and a tenth of that.
    for (compute_rate, follows) in [(1e7, true), (1e9, false)] {
        let config = TrainConfig { compute_rate, steps: 24, ..TrainConfig::clone(&job.given) };
        let job = job.with_config(config, MEMBERS).unwrap();
        let (ended, told) = run(&job, Nanos(1), &Faults::new());
        hash(&ended, MEMBERS + 1, &told);
        assert!(told.has(CAME), "{told:?}");
        assert_eq!(told.has("of the last "), follows, "{told:?}");
        assert_eq!(told.has("it receives 1.4 MB of state, about 1.1"), !follows, "{told:?}");
    }
}

#[test]
fn a_wrong_chunk_in_the_background_is_taken_from_another() {
    let folder = tempfile::tempdir().unwrap();
    let job = job(folder.path(), ddp("none"));
    let (calm, told) = run(&job, Nanos(1), &Faults::new());
    let calm = hash(&calm, MEMBERS + 1, &told);
    let (begins, _) = steps_of(&told);
    for rank in 0..3 {
        let fault = Fault { rank, step: begins, value: FaultyValue::Chunk, element: 0, bit: 0 };
        let (ended, told) = run(&Job { fault: Some(fault), ..job.clone() }, Nanos(1), &Faults::new());
        assert_eq!(hash(&ended, MEMBERS + 1, &told), calm, "{told:?}");
        assert!(told.has("467.97 kB of the last step"), "{told:?}");
    }
}

/// The newcomer may take a wrong record of a step, if the member with that record is the first to report it.
/// The newcomer's state then differs from that of the members, so it takes theirs.
#[test]
fn a_wrong_record_is_found_out_by_the_state_after_it() {
    let folder = tempfile::tempdir().unwrap();
    let mut took_all = 0;
    for members in [3, 2] {
        let job = job(folder.path(), ddp("none"));
        let job = job
            .with_config(TrainConfig { workers: members, ..TrainConfig::clone(&job.given) }, members)
            .unwrap();
        let run = |job: &Job| {
            let mut told = Noted::default();
            let come = [(PeerId(members as u32), Nanos(1))];
            let ended = run_workers(job, connections(job, members + 1, &come, &Faults::new()), &mut told);
            (hash(&ended, members + 1, &told), told)
        };
        let (calm, told) = run(&job);
        let (begins, _) = (step_of(&told, BEGINS), step_of(&told, " joined; "));
        for rank in 0..members as u32 {
            let fault = Fault { rank, step: begins + 1, value: FaultyValue::Record, element: 7, bit: 20 };
            let (ended, told) = run(&Job { fault: Some(fault), ..job.clone() });
            assert_eq!(ended, calm, "{told:?}");
            // A record takes 0.4 s, and the state 1.1 s more.
            let came = step_of(&told, " joined; ");
            let waited = (end(&told, came + 1) - end(&told, came)) as f64 / 1e9 - 6.1;
            took_all += u32::from(waited > 1.0);
        }
    }
    assert!((1..=2).contains(&took_all), "{took_all} of 5 wrong records were taken");
}

/// Two newcomers fetch the same copy; the one that comes later follows beyond the admission of the other.
#[test]
fn two_may_come_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let job = job(folder.path(), ddp("none"));
    for later in [1, 3_000, 8_000] {
        let mut told = Noted::default();
        let come = [(NEW, Nanos(1)), (PeerId(4), Nanos::from_millis(later))];
        let ended = run_workers(&job, connections(&job, MEMBERS + 2, &come, &Faults::new()), &mut told);
        hash(&ended, MEMBERS + 2, &told);
        let follow = told.notes.iter().filter(|(_, note)| note.contains("of the last ")).count();
        assert_eq!(follow, 2, "{later}: {told:?}");
    }
}
