//! Simulations under faults, and checks that they detect deliberate flaws.

use super::super::check::{Breach, Faults, FaultsOutcome, Flaw, faults};

/// Runs simulations with `members` members and different seeds.
fn trials(members: u32, seeds: u64, flaw: Option<Flaw>) -> impl Iterator<Item = (Faults, FaultsOutcome)> {
    let trials = (0..seeds).map(move |seed| Faults { members, seed, starts_again: false, flaw });
    trials.map(|trial| (trial, faults(&trial)))
}

#[test]
fn one_view_of_each_epoch_and_all_go_on_after_healing() {
    for members in 2..=7 {
        let mut sum = FaultsOutcome::default();
        let mut can_go_on = 0;
        for (trial, outcome) in trials(members, 60, None) {
            assert_eq!(outcome.breaches, [], "{trial:?}");
            assert!(!outcome.can_go_on || outcome.recovery.is_some(), "{trial:?}");
            can_go_on += u32::from(outcome.can_go_on);
            sum.views += outcome.views;
            sum.cuts += outcome.cuts;
            sum.crashes += outcome.crashes;
            sum.restarts += outcome.restarts;
            sum.newcomers += outcome.newcomers;
            sum.leaves += outcome.leaves;
            sum.stops += outcome.stops;
            sum.repeats += outcome.repeats;
        }
        // The faults must be neither so severe that the run rarely continues, nor so mild that little happens.
        assert!(can_go_on >= 30, "{members} members: {can_go_on} of 60");
        let counts = [
            sum.views,
            sum.cuts,
            sum.crashes,
            sum.restarts,
            sum.newcomers,
            sum.leaves,
            sum.stops,
            sum.repeats,
        ];
        assert!(counts.iter().all(|&count| count > 10), "{members} members: {counts:?}");
    }
}

#[test]
fn a_trial_is_a_function_of_its_seed() {
    let trial = Faults { members: 5, seed: 77, starts_again: false, flaw: None };
    assert_eq!(faults(&trial), faults(&trial));
    assert_ne!(faults(&trial), faults(&Faults { seed: 78, ..trial }));
}

#[test]
fn a_run_that_is_started_again_ends_in_one_incarnation() {
    for members in 2..=7 {
        let [mut can_go_on, mut apart, mut refused, mut took_over] = [0; 4];
        for seed in 0..40 {
            let trial = Faults { members, seed, starts_again: true, flaw: None };
            let outcome = faults(&trial);
            assert_eq!(outcome.breaches, [], "{trial:?}");
            can_go_on += u32::from(outcome.can_go_on);
            apart += u32::from(outcome.was_apart);
            refused += u32::from(outcome.refused > 0 && outcome.survivor == Some(1));
            took_over += u32::from(outcome.superseded > 0 && outcome.survivor > Some(1));
        }
        let counts = [can_go_on, apart, refused, took_over];
        let fewest = [25, 1, 5, 3];
        assert!(counts.iter().zip(fewest).all(|(count, fewest)| *count >= fewest), "{members}: {counts:?}");
    }
}

#[test]
fn incarnations_that_ignore_each_other_are_found() {
    let flaw = Some(Flaw::IgnoresIncarnations);
    let trials = (0..20).map(|seed| faults(&Faults { members: 3, seed, starts_again: true, flaw }));
    let breaches: Vec<Breach> = trials.flat_map(|outcome| outcome.breaches).collect();
    let found = breaches.iter().find(|breach| matches!(breach, Breach::Incarnations { .. }));
    let says = found.map(ToString::to_string).unwrap_or_default();
    assert!(says.contains("does not stop although incarnation 1 is still in progress"), "{says}");
}

/// Returns whether one of `seeds` simulations with three members finds a fork.
fn is_found(flaw: Flaw, seeds: u64) -> bool {
    trials(3, seeds, Some(flaw)).any(|(_, outcome)| outcome.forks() > 0)
}

#[test]
fn a_majority_of_one_vote_is_found() {
    assert!(is_found(Flaw::OneVoteDecides, 20));
}

#[test]
fn a_proposer_that_looks_for_no_votes_is_found() {
    assert!(is_found(Flaw::ProposesAnew, 600));
}

#[test]
fn votes_that_are_not_kept_are_found() {
    assert!(is_found(Flaw::ForgetsVotes, 1200));
}

#[test]
fn a_fork_is_told_with_its_epoch_and_members() {
    let forks = trials(3, 20, Some(Flaw::OneVoteDecides)).flat_map(|(_, outcome)| outcome.breaches);
    let fork = forks.into_iter().find(|breach| matches!(breach, Breach::Fork { .. }));
    let says = fork.map(|fork| fork.to_string()).unwrap_or_default();
    assert!(says.starts_with("two different views of epoch ") && says.contains("MemberId(#"), "{says}");
}
