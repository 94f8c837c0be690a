//! Simulations of a day in which machines join and leave.

use farflung_base::Nanos;

use super::super::check::{Churn, churn};

#[test]
fn a_day_of_churn_goes_on() {
    let day = Churn { span: Nanos::from_millis(4 * 3_600_000), ..Churn::day(3) };
    let outcome = churn(&day);
    assert_eq!(outcome.breaches, []);
    assert!(outcome.rounds > 200 && outcome.views > 20 && outcome.admitted > 10, "{outcome:?}");
    assert!(outcome.died > 5 && outcome.left > 2, "{outcome:?}");
    assert!(outcome.goodput > 0.9 && outcome.goodput < 1.0, "{}", outcome.goodput);
    assert!(outcome.of_all < outcome.goodput);
    assert_eq!(outcome, churn(&day), "a day is a function of its seed");
}

#[test]
fn without_churn_every_round_counts() {
    let forever = Nanos::from_millis(1_000_000 * 3_600_000);
    let hours = Nanos::from_millis(2 * 3_600_000);
    let outcome = churn(&Churn { life: forever, span: hours, ..Churn::day(1) });
    assert_eq!((outcome.views, outcome.died, outcome.left, outcome.admitted), (0, 0, 0, 0));
    assert_eq!(outcome.rounds, 120);
    assert!((outcome.goodput - 1.0).abs() < 1e-9 && outcome.stays.len() == 16);
}
