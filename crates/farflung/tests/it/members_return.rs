//! Members that are cut off or frozen for a while: the others continue without them, and a member that reaches
//! them again learns this and joins again as a newcomer.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::collections::BTreeMap;
use std::path::Path;

use crate::virtual_members::{Ended, connections, fox, tiny};
use farflung::comm::simulated::Faults;
use farflung::train::{Departure, Failure, Job, Moment, Quiet, Report, WorkerConnection, run_workers};
use farflung::{
    Error, Event, EventKind, Existing, LostSequences, RunDir, RunSettings, Stop, TrainConfig, events,
};
use farflung_base::{Nanos, PeerId};

const MEMBERS: usize = 5;
const STEPS: u64 = 30;
/// The time that members wait for each other.
const DEADLINE: Nanos = Nanos::from_millis(2_000);

fn ddp() -> TrainConfig {
    TrainConfig { codec: "none".parse().unwrap(), ..TrainConfig::default() }
}

/// Returns a job of five members. A step takes about half a second.
fn job(folder: &Path, config: TrainConfig) -> Job {
    let config = TrainConfig {
        layers: Some(2),
        steps: STEPS,
        workers: MEMBERS,
        eval_every: STEPS,
        eval_batches: 1,
        deadline: DEADLINE,
        compute_rate: 1e6,
        ..tiny(folder, &fox(), config)
    };
    Job::new(config, MEMBERS, Stop::manual()).unwrap()
}

/// What the members of a run ended with, and the events that each has written.
struct Outcome {
    ended: Vec<Ended>,
    events: Vec<Vec<Event>>,
}

impl Outcome {
    /// Runs a job whose members write their events into folders, in a network of `ends` endpoints.
    fn of(job: &Job, folder: &Path, ends: usize, come: &[(PeerId, Nanos)], faults: &Faults) -> Self {
        let home = |n: usize| folder.join(format!("member-{n}"));
        let saving = |(n, connection): (usize, WorkerConnection)| {
            let run = RunDir::open(&home(n), Existing::Refuse).unwrap();
            WorkerConnection { place: connection.place.map(|place| place.saves_in(run)), ..connection }
        };
        let connections = connections(job, ends, come, faults).into_iter().enumerate().map(saving).collect();
        let ended = run_workers(job, connections, &mut Quiet);
        let events = |n: usize| {
            let path = home(n).join(events::EVENTS);
            if path.exists() { events::read(&path).unwrap() } else { Vec::new() }
        };
        let events = (0..ended.len()).map(events).collect();
        Self { ended, events }
    }

    fn report(&self, member: usize) -> &Report {
        match &self.ended[member] {
            Ok(report) => report.as_ref().unwrap(),
            Err(error) => unreachable!("member {member}: {error}"),
        }
    }

    /// Returns the hash of all members but one.
    fn hash_without(&self, victim: usize) -> String {
        let others = (0..self.ended.len()).filter(|n| *n != victim);
        let hashes: Vec<&String> = others.map(|n| &self.report(n).hash).collect();
        assert!(hashes.iter().all(|hash| *hash == hashes[0]), "{hashes:?}");
        hashes[0].clone()
    }

    /// Returns the views by number, each as the number of steps done and of members. All members that report a
    /// view must report the same.
    fn views(&self) -> BTreeMap<u64, (u64, usize)> {
        let mut views = BTreeMap::new();
        for event in self.events.iter().flatten() {
            let EventKind::Members { epoch, members, .. } = event.what else { continue };
            let view = (event.step, members);
            assert_eq!(*views.entry(epoch).or_insert(view), view, "two views have the number {epoch}");
        }
        views
    }
}

/// A fault that ends.
#[derive(Debug, Clone, Copy)]
enum Passing {
    Cut,
    Frozen,
}

impl Passing {
    fn on(self, victim: u32, from: Nanos, until: Nanos) -> Faults {
        let faults = Faults::new().at(from);
        match self {
            // The network has an endpoint more than there are members: that of the newcomer.
            Self::Cut => faults.partition(&[PeerId(victim)], MEMBERS + 1, until),
            Self::Frozen => faults.freeze(PeerId(victim), until),
        }
    }
}

/// Returns the start and end of the fourth step in a run without faults.
fn fourth_step(config: &TrainConfig) -> (Nanos, Nanos) {
    let folder = tempfile::tempdir().unwrap();
    let calm = Outcome::of(&job(folder.path(), config.clone()), folder.path(), MEMBERS, &[], &Faults::new());
    let at = |step: usize| Nanos((calm.report(0).rows[step].time_s * 1e9) as u64);
    (at(2), at(3))
}

/// Returns the hash of a run that a member leaves after a step.
fn after_leaving(config: &TrainConfig, rank: u32, step: u64) -> String {
    let folder = tempfile::tempdir().unwrap();
    let job = Job { departure: Some(Departure { rank, step }), ..job(folder.path(), config.clone()) };
    Outcome::of(&job, folder.path(), MEMBERS, &[], &Faults::new()).hash_without(rank as usize)
}

/// In production a member that ends with [`Error::Removed`] joins again as a newcomer, with a new endpoint.
#[test]
fn a_member_that_reaches_the_others_again_is_told_that_they_continued_without_it() {
    let (begin, end) = fourth_step(&ddp());
    for victim in [0, 3] {
        let polite: Vec<String> = (3..=5).map(|step| after_leaving(&ddp(), victim, step)).collect();
        for (fault, part) in
            [(Passing::Cut, 1), (Passing::Cut, 3), (Passing::Frozen, 1), (Passing::Frozen, 3)]
        {
            let at = Nanos(begin.0 + (end.0 - begin.0) * part / 4);
            // The others have continued, and the member still waits for them.
            let until = at.saturating_add(Nanos(2 * DEADLINE.0));
            let folder = tempfile::tempdir().unwrap();
            let job = job(folder.path(), ddp());
            let faults = fault.on(victim, at, until);
            let outcome = Outcome::of(&job, folder.path(), MEMBERS, &[], &faults);
            let what = format!("member {victim}, {fault:?} at {at}");
            let views = outcome.views();
            assert_eq!(
                views.values().map(|(_, members)| *members).collect::<Vec<_>>(),
                [4],
                "{what}: {views:?}"
            );
            let Err(Error::Removed { reason }) = &outcome.ended[victim as usize] else {
                panic!("{what}: {:?}", outcome.ended[victim as usize])
            };
            let view = views.keys().next().unwrap();
            assert!(reason.contains(&format!("the view of epoch {view} ")), "{what}: {reason}");
            let hash = outcome.hash_without(victim as usize);
            assert!(polite.contains(&hash), "{what}: {hash}, not {polite:?}");
        }
    }
}

#[test]
fn a_member_that_was_given_up_joins_again() {
    for config in [ddp(), crate::members::diloco()] {
        let (begin, end) = fourth_step(&config);
        let at = Nanos(u64::midpoint(begin.0, end.0));
        let until = at.saturating_add(Nanos(2 * DEADLINE.0));
        for (victim, fault) in [0, 3].into_iter().flat_map(|n| [(n, Passing::Cut), (n, Passing::Frozen)]) {
            let what = format!("{}: member {victim}, {fault:?}", config.sync);
            let folder = tempfile::tempdir().unwrap();
            let job = job(folder.path(), config.clone());
            let again = [(PeerId(MEMBERS as u32), until.saturating_add(Nanos::from_millis(500)))];
            let faults = fault.on(victim, at, until);
            let outcome = Outcome::of(&job, folder.path(), MEMBERS + 1, &again, &faults);
            let ended = &outcome.ended[victim as usize];
            assert!(matches!(ended, Err(Error::Removed { .. })), "{what}: {ended:?}");
            // All others have the same bits, the one that came back included.
            outcome.hash_without(victim as usize);
            let views = outcome.views();
            assert_eq!(views.values().map(|(_, members)| *members).collect::<Vec<_>>(), [4, 5], "{what}");
        }
    }
}

/// Returns the step and the number of lost sequences that all members but one report for the first change.
fn lost_sequences(outcome: &Outcome, lost: usize) -> (u64, u64) {
    let others = (0..MEMBERS).filter(|n| *n != lost);
    let first = |n: usize| match &outcome.events[n][0] {
        Event { step, what: EventKind::Members { left, lost_sequences, lost: listed, .. }, .. } => {
            assert_eq!(*left, [lost as u32]);
            // The sequences themselves: those of the lost member in each step of the round.
            let mut of_round = Vec::new();
            if *lost_sequences > 0 {
                let all = MEMBERS as u64 * 3;
                let first = |step| step * all + lost as u64 * 3;
                of_round.extend((step - 4..*step).map(|step| first(step)..first(step) + 3));
            }
            let listed_of = |lost: &LostSequences| (lost.members.clone(), lost.ranges().collect::<Vec<_>>());
            let expected = (*lost_sequences > 0).then(|| (vec![lost as u32], of_round));
            assert_eq!(listed.iter().map(listed_of).collect::<Vec<_>>(), Vec::from_iter(expected));
            (*step, *lost_sequences)
        }
        other => unreachable!("member {n}: {other:?}"),
    };
    let all: Vec<(u64, u64)> = others.map(first).collect();
    assert!(all.iter().all(|told| *told == all[0]), "{all:?}");
    all[0]
}

/// With local steps, the others notice a loss at the next average. It then lacks all of the lost member's local
/// steps of that round, whether or not the member had done them all: no message says how many it has done.
#[test]
fn events_tell_the_sequences_that_an_average_lacks() {
    let (every, sequences) = (4, 3);
    let local = TrainConfig {
        sync_every: every,
        microbatches: Some(sequences as usize),
        digest_every: every,
        ..crate::members::diloco()
    };
    let run = |config: &TrainConfig, change: &dyn Fn(Job) -> Job| {
        let folder = tempfile::tempdir().unwrap();
        let job = change(job(folder.path(), config.clone()));
        Outcome::of(&job, folder.path(), MEMBERS, &[], &Faults::new())
    };
    let digest = |outcome: &Outcome| outcome.report(0).rows[7].digest.clone().unwrap();
    let calm = digest(&run(&local, &|job| job));
    for (step, moment, average) in [
        (5, Moment::Begun, 8),
        (6, Moment::Met, 8),
        (8, Moment::Committed, 8),
        // Its contribution is in the average of step 8.
        (8, Moment::Met, 12),
    ] {
        let failure = Some(Failure { rank: 3, step, moment });
        let outcome = run(&local, &|job| Job { failure, ..job });
        let what = format!("step {step}, {moment:?}");
        assert_eq!(lost_sequences(&outcome, 3), (average, every * sequences), "{what}");
        assert_eq!(digest(&outcome) != calm, average == 8, "{what}");
    }
    // It is in the average of step 8, and the others notice its loss in the evaluation after that step.
    let failure = Some(Failure { rank: 3, step: 8, moment: Moment::Met });
    let evaluated = run(&local, &|job| {
        let config = RunSettings { eval_every: 8, ..job.config.clone() };
        Job { failure, config, ..job }
    });
    assert_eq!(lost_sequences(&evaluated, 3), (8, 0));
    let departure = Some(Departure { rank: 3, step: 6 });
    assert_eq!(lost_sequences(&run(&local, &|job| Job { departure, ..job }), 3), (8, 0));
    // With an average in each step, the step is done again without the member.
    let failure = Some(Failure { rank: 3, step: 6, moment: Moment::Begun });
    assert_eq!(lost_sequences(&run(&ddp(), &|job| Job { failure, ..job }), 3), (5, 0));
}
