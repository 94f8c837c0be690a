//! Numbers reported by other members that cannot be true. They are not used, and the user is told who has
//! reported them. A newcomer that reports such rates is refused. The run goes on.

use std::collections::BTreeSet;

use farflung_base::Nanos;
use farflung_parallel::plan::Measured;

use super::rank_speeds::RankWork;

/// The fastest link that is believed, in bytes a second: 8 Tbit/s.
pub(super) const MOST_BYTES_PER_S: u64 = 1_000_000_000_000;
/// The fastest rank that is believed, in operations a second: 1 EFLOP/s.
const MOST_OPERATIONS_PER_S: f64 = 1e18;

/// A member that reports to be more than this many times faster than the middle one is not believed.
pub(super) const MOST_TIMES_THE_MIDDLE: u64 = 4096;

/// A member's report that cannot be true.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Report {
    /// The member's endpoint.
    pub(super) member: u32,
    /// What it has reported, and why that cannot be.
    pub(super) reason: String,
}

/// The reports that cannot be true, each member's first one.
#[derive(Debug, Default)]
pub(super) struct Nonsense {
    of: BTreeSet<u32>,
    untold: Vec<Report>,
}

impl Nonsense {
    /// Notes a report, unless the member's nonsense is known.
    pub(super) fn note(&mut self, member: u32, reason: String) {
        if self.of.insert(member) {
            self.untold.push(Report { member, reason });
        }
    }

    /// Returns the reports of which the user has not been told.
    pub(super) fn take(&mut self) -> Vec<Report> {
        std::mem::take(&mut self.untold)
    }
}

/// Returns why a link cannot have this rate, in bytes a second; `None` if it can.
pub(super) fn impossible_rate(rate: u64) -> Option<String> {
    (rate > MOST_BYTES_PER_S)
        .then(|| format!("{rate} bytes a second from a member, expected at most {MOST_BYTES_PER_S}"))
}

/// Returns whether a rank can have this speed, in operations a second.
pub(super) fn is_possible_speed(speed: f64) -> bool {
    speed > 0.0 && speed <= MOST_OPERATIONS_PER_S
}

/// Returns why a rank cannot take this time for a microbatch of so many operations; `None` if it can, or if the
/// time is not known. [`Nanos::MAX`] is a number that is no time.
pub(super) fn impossible_time(operations: f64, time: Nanos) -> Option<String> {
    if time == Nanos::MAX {
        return Some("a time of a step that is no time".to_owned());
    }
    let fastest = Nanos::from_secs_f64(operations / MOST_OPERATIONS_PER_S);
    (Nanos::ZERO < time && time < fastest).then(|| {
        format!("{time} for a microbatch of {operations:.3e} operations, expected at least {fastest}")
    })
}

/// Replaces the times of ranks that report impossible ones by unknown ones. Returns the ranks, and what is
/// wrong with their times. Times come as sums over all ranks, of which each tells its own: another rank that
/// adds to them would not be found.
pub(super) fn without_impossible(work: &[RankWork], told: &mut [Measured]) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    for (rank, told) in told.iter_mut().enumerate() {
        let operations = work.get(rank).map_or(0.0, |work| work.operations);
        let rest = impossible_time(0.0, told.rest);
        if let Some(reason) = impossible_time(operations, told.microbatch).or(rest) {
            *told = Measured { microbatch: Nanos::ZERO, rest: Nanos::ZERO };
            found.push((rank, reason));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_and_rates_that_no_machine_has_are_found() {
        let work = [RankWork { stage: 0, operations: 1e13 }; 4];
        let of = |nanos| Measured { microbatch: Nanos(nanos), rest: Nanos(5) };
        // 10 microseconds are 1 EFLOP/s. The last rank has not told its times.
        let mut told = [of(10_000), of(9_999), Measured { rest: Nanos::MAX, ..of(50_000) }, of(0)];
        let found = without_impossible(&work, &mut told);
        assert_eq!(found.iter().map(|(rank, _)| *rank).collect::<Vec<_>>(), [1, 2]);
        assert!(found[0].1.contains("1.000e13 operations, expected at least 10us"), "{found:?}");
        let unknown = Measured { microbatch: Nanos::ZERO, rest: Nanos::ZERO };
        assert_eq!(told, [of(10_000), unknown, unknown, of(0)]);
        assert_eq!(impossible_rate(MOST_BYTES_PER_S), None);
        assert!(impossible_rate(u64::MAX).is_some());
    }

    #[test]
    fn a_member_is_named_once() {
        let mut nonsense = Nonsense::default();
        for member in [3, 3, 4] {
            nonsense.note(member, "x".to_owned());
        }
        assert_eq!(nonsense.take().iter().map(|report| report.member).collect::<Vec<_>>(), [3, 4]);
        nonsense.note(3, "y".to_owned());
        assert!(nonsense.take().is_empty());
    }
}
