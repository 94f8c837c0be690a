//! Tests of stages that are pools of members which join and leave: which member holds which part, by which
//! routes microbatches go, and that each sequence is in exactly one committed step.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::fmt::Write as _;
use std::path::Path;

use crate::virtual_members::{Ended, Told, connections, fox, in_pools, tiny};
use farflung::comm::simulated::Faults;
use farflung::config::choice::{BalanceKind, OptimizerKind};
use farflung::config::value::Setting as _;
use farflung::optim::local::SGD;
use farflung::train::{Departure, Failure, Job, Moment, Report, elastic, run_workers};
use farflung::{Error, Stop, TrainConfig};
use farflung_base::{Nanos, PeerId};

const MICROBATCHES: usize = 12;

fn plain(steps: u64) -> TrainConfig {
    TrainConfig { steps, codec: "none".parse().unwrap(), ..TrainConfig::default() }
}

/// Returns the settings of members that form this many stages.
fn settings(folder: &Path, stages: usize, config: TrainConfig) -> TrainConfig {
    TrainConfig {
        layers: Some(4),
        microbatches: Some(MICROBATCHES),
        stages,
        pooled: true,
        eval_every: 4,
        eval_batches: 2,
        check_every: 1,
        deadline: Nanos::from_millis(4000),
        ..tiny(folder, &fox(), config)
    }
}

/// Creates a job that begins with pools of these sizes. `speeds` are the machines' speeds in GFLOP/s, those of
/// the first members first, then those of newcomers.
fn job(folder: &Path, pools: &[u32], speeds: &[f64], config: TrainConfig) -> Job {
    let ranks = pools.iter().sum::<u32>() as usize;
    let mut job = in_pools(settings(folder, pools.len(), config), pools);
    let mut text = "default = \"1gbit,1ms\"\n".to_owned();
    for (n, speed) in speeds.iter().enumerate() {
        let kind = if n < ranks { "worker" } else { "member" };
        let flops = (speed * 1e3).round();
        let device = format!("name = \"{kind}.{n}\"\nflops = \"{flops} MFLOPS\"\nmemory = \"8GB\"\n");
        write!(text, "[[device]]\n{device}").unwrap();
    }
    job.cluster = (!speeds.is_empty()).then(|| text.parse().unwrap());
    let plan = job.plan.clone().into_plan();
    job.with_plan(plan).unwrap()
}

fn run(job: &Job, ends: usize, come: &[(PeerId, Nanos)], faults: &Faults) -> (Vec<Ended>, Told) {
    let mut notes = Told::default();
    let ended = run_workers(job, connections(job, ends, come, faults), &mut notes);
    (ended, notes)
}

/// Returns the report of the one member that has the whole model at the end. Checks that all members except
/// `lost` end well.
fn report<'a>(ended: &'a [Ended], lost: Option<u32>, what: &str) -> &'a Report {
    for (n, ended) in ended.iter().enumerate().filter(|(n, _)| Some(*n as u32) != lost) {
        assert!(ended.is_ok(), "{what}: {n}: {:?}", ended.as_ref().err());
    }
    let mut reports = ended.iter().filter_map(|ended| ended.as_ref().ok().and_then(Option::as_ref));
    let found = reports.next().unwrap();
    assert!(reports.next().is_none(), "{what}: one rank has the whole model");
    found
}

/// Returns each row's step, number of tokens so far, and loss.
fn rows(report: &Report) -> Vec<(u64, u64, f64)> {
    report.rows.iter().map(|row| (row.step, row.tokens, row.train_loss)).collect()
}

/// Checks that each step has the same sequences as in a run without failures (`calm`): the same number of
/// tokens so far, and the same loss.
fn same_sequences(what: &str, found: &Report, calm: &[(u64, u64, f64)]) {
    let found = rows(found);
    assert!(!found.is_empty(), "{what}");
    // A member has no rows for steps that it received from others.
    for found in &found {
        let calm = calm.iter().find(|calm| calm.0 == found.0).unwrap();
        assert_eq!(found.1, calm.1, "{what}: a step's sequences");
        assert!((found.2 - calm.2).abs() < 1e-4, "{what}: {found:?} {calm:?}");
    }
}

fn calm(folder: &Path, pools: &[u32], steps: u64) -> Vec<(u64, u64, f64)> {
    let config = TrainConfig { balance: BalanceKind::Equal, ..plain(steps) };
    let (ended, _) =
        run(&job(folder, pools, &[], config), pools.iter().sum::<u32>() as usize, &[], &Faults::new());
    rows(report(&ended, None, "calm"))
}

/// Settings with which a step that loses a member is done again as a whole.
fn whole_steps(steps: u64) -> TrainConfig {
    TrainConfig { keep_work: false, ..plain(steps) }
}

/// Returns the hash at the end of a run that a rank leaves on request before a step.
fn after_leaving(folder: &Path, pools: &[u32], rank: u32, step: u64) -> String {
    let job = job(folder, pools, &[], plain(6));
    let job = Job { departure: Some(Departure { rank, step }), ..job };
    let (ended, _) = run(&job, pools.iter().sum::<u32>() as usize, &[], &Faults::new());
    assert!(matches!(ended[rank as usize], Err(Error::StoppedAt { .. })), "{:?}", ended[rank as usize]);
    report(&ended, Some(rank), "in peace").hash.clone()
}

#[test]
fn a_loss_moves_no_state_and_has_the_bits_of_a_polite_leave() {
    let folder = tempfile::tempdir().unwrap();
    let pools = [2, 3];
    let calm = calm(folder.path(), &pools, 6);
    for rank in [0, 3] {
        let polite: Vec<String> =
            (3..=4).map(|step| after_leaving(folder.path(), &pools, rank, step)).collect();
        assert_ne!(polite[0], polite[1]);
        for moment in Moment::ALL {
            let what = format!("rank {rank} at {moment:?}");
            let job = job(folder.path(), &pools, &[], whole_steps(6));
            let job = Job { failure: Some(Failure { rank, step: 4, moment }), ..job };
            let (ended, notes) = run(&job, 5, &[], &Faults::new());
            assert!(matches!(ended[rank as usize], Err(Error::InjectedFailure { .. })), "{what}");
            let left = report(&ended, Some(rank), &what);
            assert!(polite.contains(&left.hash), "{what}: {} is not in {polite:?}", left.hash);
            same_sequences(&what, left, &calm);
            if rank > 0 {
                // Rank 0 is not lost, so its notes are complete.
                assert!(notes.has("; pools of 2, 2 members"), "{what}: {:?}", notes.notes);
                assert!(!notes.has("of state"), "{what}: {:?}", notes.notes);
            }
        }
    }
}

/// Returns the faults that end one of `members` members at a time, each with its name.
fn all_faults(peer: PeerId, members: usize, at: Nanos) -> [(&'static str, Faults); 3] {
    let faults = || Faults::new().at(at);
    [
        ("killed", faults().crash(peer)),
        ("cut off", faults().partition(&[peer], members, Nanos::MAX)),
        ("frozen", faults().freeze(peer, Nanos::from_millis(3_600_000))),
    ]
}

#[test]
fn whoever_is_killed_frozen_or_cut_off_in_a_step_leaves_the_bits_of_a_polite_leave() {
    let folder = tempfile::tempdir().unwrap();
    let pools = [2, 2];
    let (_, told) = run(&job(folder.path(), &pools, &[], plain(6)), 4, &[], &Faults::new());
    let at = |step: usize| told.times[step] * 1e9;
    let (begin, end) = (at(2), at(3));
    let calm = calm(folder.path(), &pools, 6);
    for rank in [1, 3] {
        let polite: Vec<String> =
            (2..=5).map(|step| after_leaving(folder.path(), &pools, rank, step)).collect();
        for part in 0..8 {
            let at = Nanos((begin + (end - begin) * f64::from(part) / 8.0) as u64);
            for (what, faults) in all_faults(PeerId(rank), 4, at) {
                let what = format!("{rank} {what} at {at}");
                let (ended, _) = run(&job(folder.path(), &pools, &[], whole_steps(6)), 4, &[], &faults);
                let left = report(&ended, Some(rank), &what);
                assert!(polite.contains(&left.hash), "{what}: {} is not in {polite:?}", left.hash);
                same_sequences(&what, left, &calm);
            }
        }
    }
}

/// Settings with plain gradient descent and a large rate: a microbatch that counted twice or not at all would
/// change the losses of later steps by far more than rounding.
fn descent(steps: u64) -> TrainConfig {
    TrainConfig {
        optimizer: OptimizerKind::of(&SGD),
        lr: 0.5,
        clip: 0.0,
        balance: BalanceKind::Equal,
        ..plain(steps)
    }
}

/// Checks that each microbatch of each step has counted once: losses differ by rounding only.
fn counts_once(what: &str, found: &Report, calm: &[(u64, u64, f64)]) {
    let found = rows(found);
    assert_eq!(found.last().map(|row| row.0), calm.last().map(|row| row.0), "{what}");
    for found in &found {
        let calm = calm.iter().find(|calm| calm.0 == found.0).unwrap();
        assert_eq!(found.1, calm.1, "{what}");
        assert!((found.2 - calm.2).abs() < 2e-6, "{what}: {found:?} {calm:?}");
    }
}

#[test]
fn after_a_loss_only_the_work_of_the_lost_member_is_done_again() {
    let folder = tempfile::tempdir().unwrap();
    let (pools, speeds) = ([2, 3], [0.005; 5]);
    let make = |keep_work| job(folder.path(), &pools, &speeds, TrainConfig { keep_work, ..descent(6) });
    let (ended, told) = run(&make(true), 5, &[], &Faults::new());
    let calm = rows(report(&ended, None, "calm"));
    assert!(calm[0].2 - calm[5].2 > 0.05, "{calm:?}");
    let (begin, end) = (told.times[2] * 1e9, told.times[3] * 1e9);
    let (mut kept, mut took) = (0, [0.0; 2]);
    for rank in [1, 4] {
        for part in 0..10 {
            let at = Nanos((begin + (end - begin) * f64::from(part) / 10.0) as u64);
            for (what, faults) in all_faults(PeerId(rank), 5, at) {
                let what = format!("{rank} {what} at {at}");
                let (ended, told) = run(&make(true), 5, &[], &faults);
                counts_once(&what, report(&ended, Some(rank), &what), &calm);
                kept += u32::from(told.has("% of the step in flight is kept"));
                let (_, whole) = run(&make(false), 5, &[], &faults);
                took[0] += told.times.last().unwrap();
                took[1] += whole.times.last().unwrap();
            }
        }
    }
    assert!(kept >= 45, "{kept}");
    let step = told.times[3] - told.times[2];
    let saved = (took[1] - took[0]) / 60.0 / step;
    assert!(saved > 0.25, "{saved} of a step is saved");
}

#[test]
fn work_is_kept_with_recomputed_activations_and_coded_messages_and_when_newcomers_come() {
    let folder = tempfile::tempdir().unwrap();
    let (pools, speeds) = ([2, 3], [0.005; 6]);
    let config = TrainConfig {
        recompute: "full".parse().unwrap(),
        boundary: "int8".parse().unwrap(),
        boundary_backward: "int8".parse().unwrap(),
        ..descent(7)
    };
    let make = || job(folder.path(), &pools, &speeds, config.clone());
    let (ended, told) = run(&make(), 5, &[], &Faults::new());
    let calm = rows(report(&ended, None, "calm"));
    let (begin, end) = (told.times[1] * 1e9, told.times[2] * 1e9);
    let mut kept = 0;
    for part in 0..12 {
        let at = Nanos((begin + (end - begin) * f64::from(part) / 12.0) as u64);
        let what = format!("at {at}");
        // The newcomer asks in the step before, and is admitted together with the loss or after it.
        let come = [(PeerId(5), Nanos((begin * 0.7) as u64))];
        let (ended, told) = run(&make(), 6, &come, &Faults::new().at(at).crash(PeerId(3)));
        counts_once(&what, report(&ended, Some(3), &what), &calm);
        kept += u32::from(told.has("% of the step in flight is kept"));
        assert!(told.has("member 5 joined"), "{what}: {:?}", told.notes);
    }
    assert!(kept >= 6, "{kept}");
}

/// Losses that balance the experts of all layers need what all routers chose, also of work that is kept.
#[test]
fn work_is_kept_with_experts_that_are_balanced_together() {
    let folder = tempfile::tempdir().unwrap();
    let (pools, speeds) = ([2, 3], [0.005; 5]);
    let config = TrainConfig {
        model: "mixtral-nano".to_owned(),
        balance_loss: Some(0.5),
        balance_over: Some(farflung::zoo::spec::BalanceOver::Batch),
        ..descent(5)
    };
    let make = || job(folder.path(), &pools, &speeds, config.clone());
    let (ended, told) = run(&make(), 5, &[], &Faults::new());
    let calm = rows(report(&ended, None, "calm"));
    let (begin, end) = (told.times[1] * 1e9, told.times[2] * 1e9);
    let mut kept = 0;
    for rank in [1, 4] {
        for part in 0..5 {
            let at = Nanos((begin + (end - begin) * f64::from(part) / 5.0) as u64);
            let what = format!("{rank} at {at}");
            let (ended, told) = run(&make(), 5, &[], &Faults::new().at(at).crash(PeerId(rank)));
            counts_once(&what, report(&ended, Some(rank), &what), &calm);
            kept += u32::from(told.has("% of the step in flight is kept"));
        }
    }
    assert!(kept >= 5, "{kept}");
}

#[test]
fn work_is_kept_when_a_second_member_is_lost_in_the_same_step() {
    let folder = tempfile::tempdir().unwrap();
    let (pools, speeds) = ([2, 3, 2], [0.005; 7]);
    let make = || job(folder.path(), &pools, &speeds, descent(5));
    let (ended, told) = run(&make(), 7, &[], &Faults::new());
    let calm = rows(report(&ended, None, "calm"));
    let (begin, end) = (told.times[1] * 1e9, told.times[2] * 1e9);
    let mut twice = 0;
    for first in 1..5 {
        // In the change of the view, and in the rest of the step.
        for later in [2, 4, 6, 8, 10, 12, 14, 16, 18, 40, 65, 90, 115] {
            let after = |part: u32| Nanos((begin + (end - begin) * f64::from(part) / 6.0) as u64);
            let at = (after(first), after(first) + Nanos::from_millis(later));
            let what = format!("at {} and {}", at.0, at.1);
            let faults = Faults::new().at(at.0).crash(PeerId(3)).at(at.1).crash(PeerId(5));
            let (mut ended, told) = run(&make(), 7, &[], &faults);
            assert!(ended.remove(5).is_err());
            counts_once(&what, report(&ended, Some(3), &what), &calm);
            let notes = told.notes.iter().filter(|note| note.contains("% of the step in flight is kept"));
            twice += u32::from(notes.count() == 2);
        }
    }
    assert!(twice >= 5, "{twice}");
}

#[test]
fn a_step_that_times_out_continues_with_what_is_done() {
    let folder = tempfile::tempdir().unwrap();
    let (pools, speeds) = ([1, 2], [0.05, 0.05, 0.001]);
    let make = |deadline, keep_work| {
        let config = TrainConfig { keep_work, ..descent(3) };
        let mut job = job(folder.path(), &pools, &speeds, config);
        job.config.deadline = Nanos::from_millis(deadline);
        job
    };
    let (ended, told) = run(&make(60_000, true), 3, &[], &Faults::new());
    let calm = rows(report(&ended, None, "calm"));
    assert!(told.notes.iter().all(|note| !note.contains("the step is repeated")), "{:?}", told.notes);
    for (deadline, keep_work) in [(300, true), (160, true), (300, false)] {
        let (ended, told) = run(&make(deadline, keep_work), 3, &[], &Faults::new());
        counts_once("times out", report(&ended, None, "times out"), &calm);
        assert!(told.has("all members answer, and the step is repeated"), "{:?}", told.notes);
        assert_eq!(told.has("% of the step in flight is kept"), keep_work, "{:?}", told.notes);
    }
}

#[test]
fn an_empty_pool_is_filled_by_a_member_of_another() {
    let folder = tempfile::tempdir().unwrap();
    let (pools, steps) = ([1, 3], 16);
    let calm = calm(folder.path(), &pools, steps);
    for moment in Moment::ALL {
        let what = format!("{moment:?}");
        let config = TrainConfig { copy_share: 0.9, balance: BalanceKind::Equal, ..plain(steps) };
        let job = job(folder.path(), &pools, &[], config);
        // No other member holds the lost part: all go back to the newest copied step.
        let job = Job { failure: Some(Failure { rank: 0, step: 12, moment }), ..job };
        let (ended, _) = run(&job, 4, &[], &Faults::new());
        let left = report(&ended, Some(0), &what);
        assert_eq!(left.workers, 3, "{what}");
        same_sequences(&what, left, &calm);
    }
}

/// Returns the mean time of these steps, in seconds.
fn pace(told: &Told, range: std::ops::Range<usize>) -> f64 {
    (told.times[range.end] - told.times[range.start]) / range.len() as f64
}

#[test]
fn rates_are_measured_and_microbatches_follow_them() {
    let folder = tempfile::tempdir().unwrap();
    let (pools, steps) = ([1, 2], 20);
    let speeds = [0.09, 0.06, 0.02];
    let calm = calm(folder.path(), &pools, steps);
    let (ended, told) = run(&job(folder.path(), &pools, &speeds, plain(steps)), 3, &[], &Faults::new());
    assert!(told.has("microbatches are routed by speed"), "{:?}", told.notes);
    same_sequences("by speed", report(&ended, None, "by speed"), &calm);
    let last = steps as usize - 1;
    let (before, after) = (pace(&told, 1..4), pace(&told, last - 4..last));
    // The slowest member has six microbatches at first and three later.
    assert!(after < 0.7 * before, "{before} {after}");
    let config = TrainConfig { balance: BalanceKind::Equal, ..plain(steps) };
    let (ended, told) = run(&job(folder.path(), &pools, &speeds, config), 3, &[], &Faults::new());
    report(&ended, None, "equal");
    assert!(told.notes.iter().all(|note| !note.contains("by speed")), "{:?}", told.notes);
}

#[test]
fn a_member_changes_its_stage_where_a_pool_holds_the_others_up() {
    let folder = tempfile::tempdir().unwrap();
    let (pools, steps) = ([4, 1, 1], 40);
    let speeds = [0.05; 6];
    let calm = calm(folder.path(), &pools, steps);
    let config = TrainConfig { boundary: "none".parse().unwrap(), ..plain(steps) };
    let (ended, told) = run(&job(folder.path(), &pools, &speeds, config), 6, &[], &Faults::new());
    let moves = told.notes.iter().filter(|note| note.contains("moves to stage")).count();
    assert!((1..=4).contains(&moves), "{:?}", told.notes);
    assert!(told.notes.iter().any(|note| note.contains("moves to stage") && note.contains("of state")));
    same_sequences("moves", report(&ended, None, "moves"), &calm);
    let last = steps as usize - 1;
    let (before, after) = (pace(&told, 1..4), pace(&told, last - 4..last));
    assert!(after < 0.8 * before, "{before} {after}");
}

#[test]
fn a_loss_while_a_member_changes_its_stage_loses_no_sequence() {
    let folder = tempfile::tempdir().unwrap();
    let (pools, steps) = ([4, 2, 1], 14);
    let calm = calm(folder.path(), &pools, steps);
    let make = || job(folder.path(), &pools, &[0.05; 7], plain(steps));
    let (_, told) = run(&make(), 7, &[], &Faults::new());
    let moved = told.notes.iter().find(|note| note.contains("moves to stage")).unwrap();
    let step: usize = moved.split(&[' ', ':'][..]).find_map(|word| word.parse().ok()).unwrap();
    // The range is from the end of the step before the move to the end of the step after it.
    let (begin, end) = (told.times[step - 1] * 1e9, told.times[step] * 1e9);
    let mut before_the_move = 0;
    for rank in [0, 4] {
        for part in 0..8 {
            let at = Nanos((begin + (end - begin) * f64::from(part) / 8.0) as u64);
            let what = format!("{rank} at {at}");
            let faults = Faults::new().at(at).crash(PeerId(rank));
            let (ended, told) = run(&make(), 7, &[], &faults);
            let left = report(&ended, Some(rank), &what);
            same_sequences(&what, left, &calm);
            assert_eq!((left.workers, left.rows.last().unwrap().step), (6, steps), "{what}");
            before_the_move += u32::from(!told.has("moves to stage"));
        }
    }
    assert!(before_the_move > 0 && before_the_move < 16, "{before_the_move}");
}

#[test]
fn a_newcomer_joins_the_pool_that_holds_the_others_up() {
    let folder = tempfile::tempdir().unwrap();
    let (pools, steps) = ([2, 1], 24);
    let calm = calm(folder.path(), &pools, steps);
    let job = job(folder.path(), &pools, &[0.05; 4], plain(steps));
    let (ended, told) = run(&job, 4, &[(PeerId(3), Nanos::from_millis(90))], &Faults::new());
    assert!(told.has("member 3 joined") && told.has("; pools of 2, 2 members"), "{:?}", told.notes);
    same_sequences("comes", report(&ended, None, "comes"), &calm);
    let last = steps as usize - 1;
    let (before, after) = (pace(&told, 0..1), pace(&told, last - 4..last));
    assert!(after < 0.8 * before, "{before} {after}");
}

#[test]
fn members_that_come_to_one_become_a_pipeline_and_then_pools() {
    let folder = tempfile::tempdir().unwrap();
    let config = settings(folder.path(), 3, TrainConfig { compute_rate: 5e7, ..plain(40) });
    let founder = elastic::founder(TrainConfig { workers: 1, ..config }, &Stop::manual()).unwrap();
    let alone = run(&founder, 1, &[], &Faults::new()).0;
    let come: Vec<_> = (1..5).map(|n| (PeerId(n), Nanos::from_millis(150 * u64::from(n)))).collect();
    let (ended, told) = run(&founder, 5, &come, &Faults::new());
    for text in ["; 1 pipeline of 2", "; pools of 1, 1, 1 members", "; pools of "] {
        assert!(told.has(text), "{text}: {:?}", told.notes);
    }
    let left = report(&ended, None, "grows");
    assert_eq!(left.workers, 5);
    same_sequences("grows", left, &rows(report(&alone, None, "alone")));
}

#[test]
fn boundaries_in_8_bits_work_and_what_remembers_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let boundary = || "int8".parse().unwrap();
    let config = TrainConfig { boundary: boundary(), boundary_backward: boundary(), ..plain(8) };
    let job = job(folder.path(), &[2, 2], &[], config);
    let faults = Faults::new().at(Nanos::from_millis(60)).crash(PeerId(2));
    let (ended, told) = run(&job, 4, &[], &faults);
    report(&ended, Some(2), "int8");
    assert!(told.has("; pools of 2, 1 members"), "{:?}", told.notes);
    for (field, config) in [
        ("boundary", TrainConfig { boundary: "aqsgd:4".parse().unwrap(), ..plain(8) }),
        (
            "sync",
            TrainConfig { sync: farflung::config::choice::SyncKind::parse("diloco").unwrap(), ..plain(8) },
        ),
    ] {
        let config = TrainConfig { workers: 1, ..settings(folder.path(), 2, config) };
        let refused = elastic::founder(config, &Stop::manual()).unwrap_err();
        assert!(matches!(&refused, Error::Setting { field: wrong, .. } if *wrong == field), "{refused}");
    }
}

#[test]
fn a_slow_newcomer_gets_its_share_from_its_first_step_on() {
    let folder = tempfile::tempdir().unwrap();
    let (pools, steps) = ([1, 2], 16);
    // The newcomer is a fourth as fast as the members of the pool that it joins.
    let speeds = [0.09, 0.04, 0.04, 0.01];
    let job = job(folder.path(), &pools, &speeds, plain(steps));
    let (ended, told) = run(&job, 4, &[(PeerId(3), Nanos::from_millis(100))], &Faults::new());
    assert_eq!(report(&ended, None, "comes").workers, 4);
    let came = told.notes.iter().find(|note| note.contains("member 3 joined")).unwrap();
    let came: usize = came.split(['p', ':']).nth(1).unwrap().trim().parse().unwrap();
    // With an equal share, its four microbatches would take nearly twice the time of a step before.
    let (before, after) = (pace(&told, 1..came - 1), pace(&told, came + 1..came + 5));
    assert!(after < 1.4 * before, "{before} {after}");
}
