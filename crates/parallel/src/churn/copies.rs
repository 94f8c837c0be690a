//! Number of copies of each stage that keeps a model complete while machines come and go.

/// Returns the fraction of time in which every stage of a model has at least one machine. Each stage is held by
/// `copies` machines, which fail and return independently.
///
/// A machine works for `lifetime` on average and is then away for `absence`, in the same unit. It is present
/// for `p = lifetime / (lifetime + absence)` of the time, and the result is `(1 - (1 - p)^copies)^stages`.
///
/// ```
/// use farflung_parallel::churn::alive;
///
/// assert!((alive(2, 1, 900.0, 100.0) - 0.81).abs() < 1e-12);
/// assert!((alive(2, 2, 900.0, 100.0) - 0.99 * 0.99).abs() < 1e-12);
/// ```
#[must_use]
pub fn alive(stages: u32, copies: u32, lifetime: f64, absence: f64) -> f64 {
    let away = absence / (lifetime + absence);
    (1.0 - away.powi(i32::try_from(copies).unwrap_or(i32::MAX)))
        .powi(i32::try_from(stages).unwrap_or(i32::MAX))
}

/// Returns the smallest number of copies of each stage with which the model is complete for at least `share` of
/// the time. `None` if 1,024 copies are not enough.
#[must_use]
pub fn copies_for(share: f64, stages: u32, lifetime: f64, absence: f64) -> Option<u32> {
    (1..=1024).find(|&copies| alive(stages, copies, lifetime, absence) >= share)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::churn::Trace;
    use farflung_base::Nanos;

    #[test]
    fn the_closed_form_is_the_share_of_a_trace() {
        let (stages, copies) = (3, 2);
        let trace = Trace::drawn(stages * copies, 900.0, 300.0, Nanos(4_000_000 * 1_000_000_000), 5);
        let mut there = vec![true; (stages * copies) as usize];
        let (mut whole, mut at) = (0_u64, Nanos::ZERO);
        let mut count = |there: &[bool], from: Nanos, to: Nanos| {
            if there.chunks(copies as usize).all(|stage| stage.contains(&true)) {
                whole += to.0 - from.0;
            }
        };
        for change in &trace.changes {
            count(&there, at, change.at);
            at = change.at;
            for &machine in &change.lost {
                there[machine as usize] = false;
            }
            for &machine in &change.back {
                there[machine as usize] = true;
            }
        }
        count(&there, at, trace.time);
        let (seen, form) = (whole as f64 / trace.time.0 as f64, alive(stages, copies, 900.0, 300.0));
        assert!((seen - form).abs() < 0.005, "{seen} {form}");
    }

    #[test]
    fn the_fewest_copies_are_enough_and_one_less_is_not() {
        let copies = copies_for(0.999, 8, 7200.0, 600.0).unwrap();
        assert!(alive(8, copies, 7200.0, 600.0) >= 0.999 && alive(8, copies - 1, 7200.0, 600.0) < 0.999);
        assert_eq!(copies_for(1.5, 1, 1.0, 1.0), None);
    }
}
