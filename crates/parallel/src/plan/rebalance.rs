//! Shares of a step by the replicas' measured speeds: when to change them, and when a replica is so slow that
//! the others train faster without it.

use farflung_base::Nanos;

use crate::churn::{self, PipelineTimes};

/// Recent times of a replica's or a rank's steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Measured {
    /// Time to compute one microbatch. Zero: not known.
    pub microbatch: Nanos,
    /// Time of a step besides computing: communication and waiting for other ranks.
    pub rest: Nanos,
}

/// Change that [`Rebalance`] advises.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Advice {
    /// No change.
    Stay,
    /// New number of microbatches of each replica in a step.
    Shares(Vec<u32>),
    /// This replica should leave the run.
    Leave(u32),
}

/// A replica should leave if the others alone would train at least this many times as many tokens per second.
const SPEEDUP: f64 = 1.5;
/// Number of consecutive slow steps after which a replica should leave, if they also took [`SLOW_FOR`].
const SLOW_STEPS: u32 = 20;
/// Minimum total time of these slow steps.
const SLOW_FOR: Nanos = Nanos::from_millis(10_000);

/// How clearly, and for how long, a change must be better before it is advised. Without hysteresis, changes
/// follow the noise of the measured times. `cargo xtask bench swarm-rebalance` compares several.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Hysteresis {
    /// Least percentage by which a change must shorten the busiest rank's work in a step.
    pub percent: u32,
    /// Number of consecutive steps in which it must.
    pub steps: u32,
}

/// A tenth, in five steps.
impl Default for Hysteresis {
    fn default() -> Self {
        Self { percent: 10, steps: 5 }
    }
}

impl Hysteresis {
    /// Returns whether a time of `then` is short enough, compared with `now`.
    pub(super) fn is_worth_it(self, now: Nanos, then: Nanos) -> bool {
        then.as_secs_f64() < f64::from(100_u32.saturating_sub(self.percent)) / 100.0 * now.as_secs_f64()
    }
}

/// Decides on shares from the times that replicas measure. The result depends only on the arguments of
/// [`Rebalance::observe`], so all replicas reach the same decision.
///
/// Shares change only if this makes a step more than a tenth shorter by the measured times, in five consecutive
/// steps. A machine that is busy for a moment therefore keeps its share. A replica should leave only if it
/// slows the others down even with the best shares.
///
/// ```
/// use farflung_base::Nanos;
/// use farflung_parallel::plan::{Advice, Measured, Rebalance};
///
/// let of = |ms| Measured { microbatch: Nanos::from_millis(ms), rest: Nanos::ZERO };
/// let mut rebalance = Rebalance::default();
/// let said: Vec<Advice> =
///     (0..5).map(|_| rebalance.observe(&[4, 4, 4], &[of(10), of(10), of(40)])).collect();
/// assert_eq!(said[3], Advice::Stay);
/// assert_eq!(said[4], Advice::Shares(vec![5, 6, 1]));
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Rebalance {
    /// Number of consecutive steps in which other shares would have been worthwhile.
    uneven: u32,
    /// The replica that slows the others down, for how many steps, and the total time of these steps.
    slow: Option<Slow>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Slow {
    replica: u32,
    steps: u32,
    time: Nanos,
}

/// Returns the shares, of at least one microbatch each, that minimise the compute time of the slowest replica.
/// Returns `None` if there are fewer microbatches than replicas or a time is not known.
///
/// The optimum is exact; see [`churn::shares`].
#[must_use]
pub fn shares_by_speed(microbatches: u32, measured: &[Measured]) -> Option<Vec<u32>> {
    let pace = |measured: &Measured| PipelineTimes { first: measured.microbatch, each: measured.microbatch };
    let paces: Vec<PipelineTimes> = measured.iter().map(pace).collect();
    if paces.iter().any(|pace| pace.each == Nanos::ZERO) {
        return None;
    }
    churn::shares(&paces, microbatches)
}

/// Returns the predicted time of a step with these shares.
#[must_use]
pub fn step_time(shares: &[u32], measured: &[Measured]) -> Nanos {
    let computes = shares.iter().zip(measured).map(|(&n, m)| Nanos(m.microbatch.0.saturating_mul(n.into())));
    // The minimum over replicas is communication alone: the slowest replica does not wait for the others.
    let rest = measured.iter().map(|measured| measured.rest).min().unwrap_or_default();
    computes.max().unwrap_or_default().saturating_add(rest)
}

/// Returns whether a step time of `then` is short enough, compared with `now`, to justify a change.
#[must_use]
pub fn is_worth_it(now: Nanos, then: Nanos) -> bool {
    Hysteresis::default().is_worth_it(now, then)
}

impl Rebalance {
    /// Returns the advice after a step with these shares. `measured` has one entry for each replica.
    pub fn observe(&mut self, shares: &[u32], measured: &[Measured]) -> Advice {
        let total: u32 = shares.iter().sum();
        let best = (shares.len() == measured.len()).then(|| shares_by_speed(total, measured)).flatten();
        let Some(best) = best else {
            *self = Self::default();
            return Advice::Stay;
        };
        if let Some(replica) = self.holds_up(&best, measured) {
            *self = Self::default();
            return Advice::Leave(replica);
        }
        let (now, then) = (step_time(shares, measured), step_time(&best, measured));
        if !is_worth_it(now, then) {
            self.uneven = 0;
            return Advice::Stay;
        }
        self.uneven += 1;
        if self.uneven < Hysteresis::default().steps {
            return Advice::Stay;
        }
        self.uneven = 0;
        Advice::Shares(best)
    }

    /// Returns the replica that has slowed the others down for long enough, even with the best shares.
    fn holds_up(&mut self, best: &[u32], measured: &[Measured]) -> Option<u32> {
        let Some((slowest, time)) = slowed_by(best, measured) else {
            self.slow = None;
            return None;
        };
        let before = self.slow.filter(|slow| slow.replica == slowest);
        let before = before.unwrap_or(Slow { replica: slowest, steps: 0, time: Nanos::ZERO });
        let slow = Slow { steps: before.steps + 1, time: before.time.saturating_add(time), ..before };
        self.slow = Some(slow);
        (slow.steps >= SLOW_STEPS && slow.time >= SLOW_FOR).then_some(slowest)
    }
}

/// Returns the slowest replica and the time of a step with it, if the others alone would train at least
/// [`SPEEDUP`] times as fast.
fn slowed_by(best: &[u32], measured: &[Measured]) -> Option<(u32, Nanos)> {
    let replicas = best.len() as u32;
    let slowest = (0..best.len()).max_by_key(|&replica| (measured[replica].microbatch, replica))?;
    // If the slowest replica leaves, the others no longer wait for it; besides computing, only communication
    // remains.
    let rest = measured.iter().map(|measured| measured.rest).min()?;
    let others = (0..best.len()).filter(|&other| other != slowest);
    let others: Vec<Measured> = others.map(|other| Measured { rest, ..measured[other] }).collect();
    let total: u32 = best.iter().sum();
    // The number of microbatches of a step is proportional to the number of replicas, so a step without this
    // replica has fewer of them.
    let without = total / replicas * (replicas - 1);
    let alone = shares_by_speed(without, &others)?;
    let speed = |shares: &[u32], measured: &[Measured]| {
        f64::from(shares.iter().sum::<u32>()) / step_time(shares, measured).as_secs_f64()
    };
    let time = step_time(best, measured);
    (speed(&alone, &others) >= SPEEDUP * speed(best, measured)).then_some((slowest as u32, time))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measured<const N: usize>(ms: [u64; N]) -> [Measured; N] {
        ms.map(|ms| Measured { microbatch: Nanos::from_millis(ms), rest: Nanos::ZERO })
    }

    /// Returns the first advice other than `Stay` within this many steps, and the number of the step.
    fn first(shares: &[u32], measured: &[Measured], steps: u32) -> Option<(u32, Advice)> {
        let mut rebalance = Rebalance::default();
        (1..=steps).map(|n| (n, rebalance.observe(shares, measured))).find(|(_, said)| *said != Advice::Stay)
    }

    /// Returns the minimum time of the slowest replica, by trying all shares.
    fn exhaustive(total: u32, times: &[u64]) -> u64 {
        match times {
            [] => u64::MAX,
            [only] => only * u64::from(total),
            [one, rest @ ..] => {
                let most = total.saturating_sub(rest.len() as u32);
                let with = |own: u32| (one * u64::from(own)).max(exhaustive(total - own, rest));
                (1..=most).map(with).min().unwrap_or(u64::MAX)
            }
        }
    }

    #[test]
    fn shares_are_the_best_there_are() {
        for times in [[10, 10, 40, 1], [7, 7, 7, 7], [3, 5, 11, 2], [1, 1, 1, 100]] {
            for total in 4..12 {
                let measured = measured(times);
                let shares = shares_by_speed(total, &measured).unwrap();
                assert_eq!(shares.iter().sum::<u32>(), total);
                assert!(shares.iter().all(|&share| share > 0));
                let best = Nanos::from_millis(exhaustive(total, &times));
                assert_eq!(step_time(&shares, &measured), best, "{times:?} {total}");
            }
        }
        assert_eq!(shares_by_speed(2, &measured([1, 1, 1])), None);
    }

    #[test]
    fn small_differences_and_short_ones_change_nothing() {
        assert_eq!(first(&[4, 4], &measured([10, 12]), 100), None);
        let mut rebalance = Rebalance::default();
        for step in 0..100 {
            // Every fifth step, the second replica is as fast as the first.
            let slow = if step % 5 == 4 { 10 } else { 60 };
            assert_eq!(rebalance.observe(&[4, 4], &measured([10, slow])), Advice::Stay);
        }
        assert_eq!(first(&[4, 4], &measured([10, 0]), 100), None);
    }

    #[test]
    fn what_is_spent_on_communication_counts() {
        let measured = measured([10, 20]);
        assert_eq!(first(&[2, 2], &measured, 100), Some((5, Advice::Shares(vec![3, 1]))));
        let measured = measured.map(|replica| Measured { rest: Nanos::from_millis(1_000), ..replica });
        assert_eq!(first(&[2, 2], &measured, 100), None);
    }

    #[test]
    fn one_that_is_too_slow_for_any_share_leaves() {
        // The slow replica takes 3 s for a microbatch, the others 100 ms.
        let times = measured([100, 100, 100, 3_000]);
        assert_eq!(first(&[1, 1, 1, 1], &times, 100), Some((20, Advice::Leave(3))));
        // If steps are short, the slow steps must together take at least ten seconds.
        let times = measured([1, 1, 1, 50]);
        assert_eq!(first(&[1, 1, 1, 1], &times, 1_000), Some((200, Advice::Leave(3))));
        // A smaller share for the slow replica is tried first.
        let times = measured([100, 100, 100, 400]);
        assert_eq!(first(&[8, 8, 8, 8], &times, 100), Some((5, Advice::Shares(vec![10, 10, 10, 2]))));
        assert_eq!(first(&[10, 10, 10, 2], &times, 100), None);
        assert_eq!(first(&[1], &measured([100]), 100), None);
        // The fast replicas spend the rest of the step waiting.
        let mut times = measured([100, 100, 4_000]);
        times[0].rest = Nanos::from_millis(3_900);
        times[1].rest = Nanos::from_millis(3_900);
        assert_eq!(first(&[1, 1, 1], &times, 100), Some((20, Advice::Leave(2))));
        // If communication dominates a step, a slow replica does no harm.
        let times = times.map(|member| Measured { rest: Nanos::from_millis(100_000), ..member });
        assert_eq!(first(&[1, 1, 1], &times, 100), None);
    }
}
