//! Members that join and leave during training: after a loss the remaining members have the same bits as in a
//! run in which the lost one left normally, and a new member has the same bits as all others.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::path::Path;
use std::sync::Arc;

use crate::virtual_members::{Told, connections, fox, tiny};
use farflung::comm::Transport;
use farflung::comm::simulated::{Faults, Recorder, Recording, Simulated, record};
use farflung::config::choice::{BalanceKind, OptimizerKind, RecipeKind, SyncKind};
use farflung::events::{self, EventKind};
use farflung::optim::sync::{DES_LOC, DILOCO, METHODS, OnMemberLoss};
use farflung::train::{Departure, Failure, Job, Moment, Quiet, Report, RunObserver, elastic, run_workers};
use farflung::{
    Error, Event, Existing, Result, RunDir, RunSettings, StepMetrics, Stop, TrainArgs, TrainConfig,
};
use farflung_base::{Link, Nanos, PeerId, Topology};

const STEPS: u64 = 6;

/// Returns a job of six small steps with some workers.
fn job(folder: &Path, workers: usize, config: TrainConfig) -> Job {
    let config = TrainConfig {
        layers: Some(2),
        steps: STEPS,
        workers,
        eval_every: 2,
        eval_batches: 1,
        deadline: Nanos::from_millis(2000),
        ..tiny(folder, &fox(), config)
    };
    Job::new(config, workers, Stop::manual()).unwrap()
}

/// Returns the result of each worker in a network of `ends` endpoints.
fn run(job: &Job, ends: usize, come: &[(PeerId, Nanos)], faults: &Faults) -> Vec<Result<Option<Report>>> {
    watched(job, ends, come, faults, &mut Quiet)
}

fn watched(
    job: &Job,
    ends: usize,
    come: &[(PeerId, Nanos)],
    faults: &Faults,
    watch: &mut dyn RunObserver,
) -> Vec<Result<Option<Report>>> {
    run_workers(job, connections(job, ends, come, faults), watch)
}

fn hash(result: &Result<Option<Report>>) -> String {
    match result {
        Ok(report) => report.as_ref().unwrap().hash.clone(),
        Err(error) => unreachable!("{error}"),
    }
}

pub(crate) fn diloco() -> TrainConfig {
    TrainConfig { sync: SyncKind::of(&DILOCO), sync_every: 2, ..TrainConfig::default() }
}

/// Parameters and both moments are averaged every two steps.
pub(crate) fn des_loc() -> TrainConfig {
    let moments = Some(2);
    TrainConfig {
        sync: SyncKind::of(&DES_LOC),
        sync_every: 2,
        first_moment_every: moments,
        second_moment_every: moments,
        ..TrainConfig::default()
    }
}

fn ddp() -> TrainConfig {
    TrainConfig { codec: "none".parse().unwrap(), ..TrainConfig::default() }
}

/// Returns the hash of all remaining members, in a run in which a rank leaves normally before a step.
fn after_leaving(config: &TrainConfig, rank: u32, step: u64) -> String {
    let folder = tempfile::tempdir().unwrap();
    let job = job(folder.path(), 5, config.clone());
    let job = Job { departure: Some(Departure { rank, step }), ..job };
    let results = run(&job, 5, &[], &Faults::new());
    assert!(matches!(results[rank as usize], Err(Error::StoppedAt { .. })), "{:?}", results[rank as usize]);
    let hashes: Vec<String> =
        results.iter().enumerate().filter(|(n, _)| *n != rank as usize).map(|(_, r)| hash(r)).collect();
    assert!(hashes.iter().all(|hash| *hash == hashes[0]), "{hashes:?}");
    hashes[0].clone()
}

#[test]
fn a_loss_at_any_moment_is_a_polite_leave_before_or_after_the_step() {
    for rank in [0, 2, 4] {
        let polite: Vec<String> = (3..=4).map(|step| after_leaving(&ddp(), rank, step)).collect();
        for moment in Moment::ALL {
            let folder = tempfile::tempdir().unwrap();
            let job = job(folder.path(), 5, ddp());
            let job = Job { failure: Some(Failure { rank, step: 4, moment }), ..job };
            let results = run(&job, 5, &[], &Faults::new());
            assert!(matches!(results[rank as usize], Err(Error::InjectedFailure { .. })));
            let survivors = results.iter().enumerate().filter(|(n, _)| *n != rank as usize);
            for (n, result) in survivors {
                let hash = hash(result);
                assert!(polite.contains(&hash), "rank {rank} at {moment:?}: {n} has {hash}, not {polite:?}");
            }
        }
    }
}

/// With local steps, a rank may be lost at any moment of a round. The average of this round then uses only the
/// steps of the other ranks.
#[test]
fn a_round_in_which_a_rank_is_lost_is_that_of_the_others() {
    for rank in [0, 2, 4] {
        round_of_the_others(&diloco(), rank);
    }
    for rank in [0, 3] {
        round_of_the_others(&des_loc(), rank);
    }
}

fn round_of_the_others(config: &TrainConfig, rank: u32) {
    let after_the_round = after_leaving(config, rank, 4);
    let mut rounds = Vec::new();
    for (step, moment) in [3, 4].into_iter().flat_map(|step| Moment::ALL.map(|moment| (step, moment))) {
        let folder = tempfile::tempdir().unwrap();
        let job = job(folder.path(), 5, config.clone());
        let job = Job { failure: Some(Failure { rank, step, moment }), ..job };
        let results = run(&job, 5, &[], &Faults::new());
        assert!(matches!(results[rank as usize], Err(Error::InjectedFailure { .. })));
        let survivors = results.iter().enumerate().filter(|(n, _)| *n != rank as usize);
        let hashes: Vec<String> = survivors.map(|(_, result)| hash(result)).collect();
        assert!(hashes.iter().all(|hash| *hash == hashes[0]), "{rank} {step} {moment:?}: {hashes:?}");
        rounds.push((step, moment, hashes[0].clone()));
    }
    let (.., last) = rounds.pop().unwrap();
    assert_eq!(last, after_the_round, "{rank} is lost behind the average");
    let (.., first) = rounds[0].clone();
    assert_ne!(first, last);
    for (step, moment, hash) in rounds {
        assert!([&first, &last].contains(&&hash), "{rank} is lost in step {step}, {moment:?}");
        assert!(hash == first || moment == Moment::Met, "{rank} {step} {moment:?}");
    }
}

#[test]
fn methods_that_do_not_go_on_without_a_member_say_why() {
    for row in METHODS {
        let OnMemberLoss::Unsupported(reason) = row.on_member_loss else { continue };
        // A method that works with one optimizer only is tested with that optimizer.
        let config =
            match farflung::optim::local::METHODS.iter().find(|o| o.averages.sync() == Some(row.name)) {
                Some(own) => TrainConfig { optimizer: OptimizerKind::of(own), ..TrainConfig::default() },
                None => TrainConfig { codec: "none".parse().unwrap(), ..TrainConfig::default() },
            };
        let folder = tempfile::tempdir().unwrap();
        let job = job(folder.path(), 2, TrainConfig { sync: SyncKind::of(row), ..config });
        for result in run(&job, 2, &[], &Faults::new()) {
            let error = result.err().unwrap();
            assert_eq!(error.exit_code(), 2, "{}: {error}", row.name);
            let expected = format!("`sync` is {}, expected ddp, diloco or des-loc", row.name);
            assert!(error.to_string().contains(&expected) && error.to_string().contains(reason), "{error}");
        }
    }
}

#[test]
fn a_newcomer_has_the_bits_of_all() {
    for config in [ddp(), diloco(), des_loc()] {
        let folder = tempfile::tempdir().unwrap();
        let job = job(folder.path(), 2, config);
        let job = Job { config: RunSettings { steps: 16, ..job.config }, ..job };
        let results = run(&job, 3, &[(PeerId(2), Nanos::from_millis(5))], &Faults::new());
        let hashes: Vec<String> = results.iter().map(hash).collect();
        assert_eq!(hashes.len(), 3);
        assert!(hashes.iter().all(|hash| *hash == hashes[0]), "{hashes:?}");
        assert_eq!(results[0].as_ref().unwrap().as_ref().unwrap().workers, 3);
    }
}

/// Codecs that remember what they have not sent, optimizers that average momentum, and local steps with each of
/// them: a member is lost, another one comes, and all have the same bits.
#[test]
fn every_recipe_works_with_members_that_come_and_go() {
    for recipe in RecipeKind::all() {
        let folder = tempfile::tempdir().unwrap();
        let given = format!("recipe = \"{}\"", recipe.name);
        let given = TrainArgs::from_toml(&given, Path::new("a test")).unwrap();
        let config = TrainConfig::merge(given, TrainArgs::default()).unwrap();
        if config.paths.is_some() {
            // `host` refuses paths, as `paths.rs` tests: a member that leaves would take its own with it.
            assert_eq!(recipe.name, "dipaco");
            continue;
        }
        if config.sync.on_member_loss != OnMemberLoss::MeanOfOthers {
            // So is a method whose averages are in flight when a member is lost.
            assert_eq!((recipe.name, config.sync.name), ("gpt-jt", "cocktail"));
            continue;
        }
        let each_step = config.sync.each_step;
        let config = TrainConfig { sync_every: if each_step { config.sync_every } else { 2 }, ..config };
        let job = job(folder.path(), 3, config);
        let config = RunSettings { steps: 16, ..job.config.clone() };
        for moment in Moment::ALL {
            let failure = Some(Failure { rank: 1, step: 4, moment });
            let job = Job { config: config.clone(), failure, ..job.clone() };
            let mut told = Told::default();
            let come = [(PeerId(3), Nanos::from_millis(5))];
            let mut results = watched(&job, 4, &come, &Faults::new(), &mut told);
            assert!(matches!(results.remove(1), Err(Error::InjectedFailure { .. })), "{}", recipe.name);
            let hashes: Vec<String> = results.iter().map(hash).collect();
            assert!(hashes.iter().all(|hash| *hash == hashes[0]), "{} {moment:?}: {hashes:?}", recipe.name);
            let came = told.has("member 3 joined") && told.has("member 1 lost");
            assert!(came, "{} {moment:?}: {:?}", recipe.name, told.notes);
        }
    }
}

/// Returns the start and end of the fourth step in a run of five without faults, by the transport's clock.
fn fourth_step(config: &TrainConfig) -> (Nanos, Nanos) {
    let folder = tempfile::tempdir().unwrap();
    let job = job(folder.path(), 5, config.clone());
    let mut times = Times::default();
    watched(&job, 5, &[], &Faults::new(), &mut times);
    let at = |step: usize| Nanos((times.0[step] * 1e9) as u64);
    (at(2), at(3))
}

/// The end time of each step, in seconds.
#[derive(Default)]
struct Times(Vec<f64>);

impl RunObserver for Times {
    fn step(&mut self, metrics: &StepMetrics, _: Option<f64>) {
        self.0.push(metrics.time_s);
    }
    fn note(&mut self, _: &str) {}
}

#[test]
fn whoever_is_frozen_or_cut_off_is_left_behind() {
    let config = ddp();
    let (begin, end) = fourth_step(&config);
    for victim in [0, 3] {
        let polite: Vec<String> = (3..=5).map(|step| after_leaving(&config, victim, step)).collect();
        for part in 0..4 {
            let at = Nanos(begin.0 + (end.0 - begin.0) * part / 4);
            let island = [PeerId(victim)];
            let cut = Faults::new().at(at).partition(&island, 5, Nanos::MAX);
            let frozen = Faults::new().at(at).freeze(PeerId(victim), Nanos::from_millis(3_600_000));
            for (what, faults) in [("cut off", cut), ("frozen", frozen)] {
                let folder = tempfile::tempdir().unwrap();
                let job = job(folder.path(), 5, config.clone());
                let results = run(&job, 5, &[], &faults);
                for (n, result) in results.iter().enumerate() {
                    if n == victim as usize {
                        let error = result.as_ref().err().unwrap();
                        assert_eq!(error.exit_code(), 75, "{what} at {at}: {error}");
                    } else {
                        let hash = hash(result);
                        assert!(
                            polite.contains(&hash),
                            "{victim} {what} at {at}: {n} has {hash}, not {polite:?}"
                        );
                    }
                }
            }
        }
    }
}

/// What a member has at the end of a run: the hash of its weights or its error, and its events.
type Outcome = (std::result::Result<String, String>, Vec<Event>);

/// Runs five members, with folders inside `folder`, on a network that records what reaches each of them.
fn recorded(
    job: &Job,
    (ranks, recorder): (Vec<Arc<Simulated>>, Recorder),
    folder: &Path,
) -> (Recording, Vec<Outcome>) {
    let ranks = ranks.into_iter().map(|rank| rank as Arc<dyn Transport>).collect();
    let mut connections = elastic::connections(job, ranks, &[], true).unwrap();
    let folder = |number: usize| folder.join(number.to_string());
    for (number, connection) in connections.iter_mut().enumerate() {
        let own = RunDir::open(&folder(number), Existing::Refuse).unwrap();
        connection.place = connection.place.take().map(|place| place.saves_in(own));
    }
    let ended = run_workers(job, connections, &mut Quiet);
    let outcome = |(number, ended): (usize, &Result<Option<Report>>)| {
        let ended = ended.as_ref().map(|report| report.as_ref().unwrap().hash.clone());
        let mut events = events::read(&folder(number).join(events::EVENTS)).unwrap();
        // The paths of checkpoints contain the folder, which is another one in each run.
        events.retain(|event| !matches!(event.what, EventKind::Saved { .. }));
        (ended.map_err(ToString::to_string), events)
    };
    (recorder.finish(), ended.iter().enumerate().map(outcome).collect())
}

/// A run in which a member is lost is recorded and read again as a file. In the replay, the same frames reach
/// each member at the same times, and the survivors have the same weights and the same events.
#[test]
fn a_run_that_loses_a_member_is_replayed_bit_for_bit() {
    for config in [ddp(), diloco()] {
        let (begin, end) = fourth_step(&config);
        let at = |part: u64| Faults::new().at(Nanos(begin.0 + (end.0 - begin.0) * part / 4));
        replayed(&config, 0, &at(1).crash(PeerId(0)));
        replayed(&config, 2, &at(2).crash(PeerId(2)));
        replayed(&config, 3, &at(2).freeze(PeerId(3), Nanos::MAX));
        replayed(&config, 4, &at(3).partition(&[PeerId(4)], 5, Nanos::MAX));
    }
}

/// Records and replays a run that loses the member `victim` through these faults.
fn replayed(config: &TrainConfig, victim: u32, faults: &Faults) {
    let folder = tempfile::tempdir().unwrap();
    let job = job(folder.path(), 5, config.clone());
    let link = Link { latency: Nanos::from_millis(1), ..job.config.link };
    let network = record(&Topology::uniform(5, link), faults);
    let (recording, first) = recorded(&job, network, &folder.path().join("first"));
    let read = Recording::decode(&recording.encode()).unwrap();
    let (again, second) = recorded(&job, read.replay(), &folder.path().join("second"));
    read.compare(&again).unwrap();
    let survivors = |outcomes: &[Outcome]| {
        let all = outcomes.iter().cloned().enumerate();
        all.filter(|(number, _)| *number != victim as usize).collect::<Vec<_>>()
    };
    let (first, second) = (survivors(&first), survivors(&second));
    assert_eq!(first, second, "{faults:?}");
    let lost = |event: &Event| match &event.what {
        EventKind::Members { members, left, .. } => *members == 4 && *left == [victim],
        _ => false,
    };
    for (number, (hash, events)) in &first {
        assert!(hash.is_ok() && *hash == first[0].1.0, "{number}: {hash:?}");
        assert_eq!(events.iter().filter(|event| lost(event)).count(), 1, "{number}: {events:?}");
    }
}

/// Returns settings for machines with these speeds, in tokens per second.
fn unequal(folder: &Path, speeds: &[u32]) -> TrainConfig {
    let device = |(n, speed): (usize, &u32)| {
        format!("[[device]]\nname = \"m{n}\"\ntokens_per_second = {speed}\nmemory = \"8GB\"\n")
    };
    let devices: String = speeds.iter().enumerate().map(device).collect();
    let path = folder.join("machines.toml");
    std::fs::write(&path, format!("default = \"1gbit,1ms\"\n{devices}")).unwrap();
    TrainConfig { topology: Some(path), ..ddp() }
}

/// Sets sixty steps, with a deadline so long that no member is given up.
fn long(job: Job) -> Job {
    let config = RunSettings { steps: 60, deadline: Nanos::from_millis(600_000), ..job.config };
    Job { config, elastic: true, ..job }
}

#[test]
fn a_slow_machine_gets_a_smaller_share() {
    let folder = tempfile::tempdir().unwrap();
    let of = |settings: TrainConfig| {
        let job = long(job(folder.path(), 3, settings));
        let mut told = Told::default();
        let results = watched(&job, 3, &[], &Faults::new(), &mut told);
        assert_eq!(hash(&results[0]), hash(&results[2]));
        let tokens = results[0].as_ref().unwrap().as_ref().unwrap().tokens;
        (told, tokens)
    };
    for method in [ddp(), diloco()] {
        let by_speed = TrainConfig {
            microbatches: Some(4),
            sync: method.sync,
            sync_every: method.sync_every,
            ..unequal(folder.path(), &[80, 80, 20])
        };
        let equal = TrainConfig { balance: BalanceKind::Equal, ..by_speed.clone() };
        let ((by_speed, tokens), (equal, tokens_when_equal)) = (of(by_speed), of(equal));
        // Both runs have the same number of tokens in each step.
        assert_eq!(tokens, 60 * 12 * 8);
        assert_eq!(tokens, tokens_when_equal);
        let shares: Vec<&String> =
            by_speed.notes.iter().filter(|note| note.contains("microbatches by speed")).collect();
        assert!(shares.len() == 1 && shares[0].contains("are 5, 6, 1: a step takes 6"), "{shares:?}");
        assert!(!equal.notes.iter().any(|note| note.contains("by speed")), "{:?}", equal.notes);
        // Four microbatches of the slow machine take 1.6 s, six of another 0.6 s.
        let last = |times: &[f64]| (times[59] - times[39]) / 20.0;
        let (fast, slow) = (last(&by_speed.times), last(&equal.times));
        assert!((0.6..0.63).contains(&fast) && (1.6..1.63).contains(&slow), "{fast} {slow}");
    }
}

#[test]
fn one_that_is_too_slow_for_any_share_leaves() {
    let folder = tempfile::tempdir().unwrap();
    let job = long(job(folder.path(), 3, unequal(folder.path(), &[80, 80, 2])));
    let mut told = Told::default();
    let results = watched(&job, 3, &[], &Faults::new(), &mut told);
    let error = results[2].as_ref().unwrap_err();
    assert!(matches!(error, Error::TooSlow { .. }) && error.exit_code() == 2, "{error}");
    let text = error.to_string();
    assert!(text.contains("a microbatch takes 4s on it and at most 100ms on the others"), "{text}");
    assert_eq!(hash(&results[0]), hash(&results[1]));
    assert!(
        told.notes.iter().any(|note| note.contains("member 2 left; 2 members continue")),
        "{:?}",
        told.notes
    );
    let after = told.times[59] - told.times[39];
    assert!(after < 20.0 * 0.15, "{after}");
}
