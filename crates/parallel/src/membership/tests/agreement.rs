//! Trials under faults, and that they find what is wrong.

use super::super::check::{Breach, Faults, FaultsOutcome, Flaw, faults};

fn trials(members: u32, seeds: u64, flaw: Option<Flaw>) -> Vec<(Faults, FaultsOutcome)> {
    let trials = (0..seeds).map(|seed| Faults { members, seed, flaw });
    trials.map(|trial| (trial, faults(&trial))).collect()
}

#[test]
fn one_view_of_each_epoch_and_all_go_on_after_healing() {
    for members in 2..=7 {
        let mut can_go_on = 0;
        for (trial, outcome) in trials(members, 100, None) {
            assert_eq!(outcome.breaches, [], "{trial:?}");
            can_go_on += u32::from(outcome.can_go_on);
        }
        assert!(can_go_on > 90, "{can_go_on}");
    }
}
