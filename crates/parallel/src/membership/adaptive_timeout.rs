//! Adaptive timeout: how long to wait for other members before asking whether they are alive.

use std::collections::VecDeque;

use farflung_base::Nanos;

/// Number of recent waits that are used.
const WINDOW: usize = 64;
/// With fewer waits than this, the limit is `most`.
const LEAST: usize = 8;
/// Number of deviations above the median.
const DEVIATIONS: u64 = 8;

/// An adaptive timeout: the median of recent waits plus eight times their median absolute deviation, so that a
/// few long waits change little. At least `least`, for example two round trips, and at most `most`.
///
/// ```
/// use farflung_base::Nanos;
/// use farflung_parallel::membership::AdaptiveTimeout;
///
/// let ms = Nanos::from_millis;
/// let mut timeout = AdaptiveTimeout::new(ms(10), ms(60_000));
/// assert_eq!(timeout.limit(), ms(60_000));
/// (0..20).for_each(|n| timeout.observe(ms(100 + n % 3)));
/// assert_eq!(timeout.limit(), ms(109));
/// ```
#[derive(Debug, Clone)]
pub struct AdaptiveTimeout {
    least: Nanos,
    most: Nanos,
    waits: VecDeque<Nanos>,
}

impl AdaptiveTimeout {
    /// Creates a timeout. Until enough waits are observed, it is `most`.
    #[must_use]
    pub fn new(least: Nanos, most: Nanos) -> Self {
        Self { least, most, waits: VecDeque::new() }
    }

    /// Records the length of a finished wait.
    pub fn observe(&mut self, took: Nanos) {
        if self.waits.len() == WINDOW {
            self.waits.pop_front();
        }
        self.waits.push_back(took);
    }

    /// Returns the present timeout.
    #[must_use]
    pub fn limit(&self) -> Nanos {
        if self.waits.len() < LEAST {
            return self.most;
        }
        let middle = median(self.waits.iter().map(|wait| wait.0).collect());
        let deviation = median(self.waits.iter().map(|wait| wait.0.abs_diff(middle)).collect());
        let limit = Nanos(middle.saturating_add(deviation.saturating_mul(DEVIATIONS)));
        limit.max(self.least).min(self.most)
    }
}

/// Returns the median; for an even number of values, the higher of the middle two. Panics if there are none.
fn median(mut values: Vec<u64>) -> u64 {
    let middle = values.len() / 2;
    *values.select_nth_unstable(middle).1
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: fn(u64) -> Nanos = Nanos::from_millis;

    #[test]
    fn a_few_long_waits_change_little_and_many_change_it() {
        let mut timeout = AdaptiveTimeout::new(MS(1), MS(60_000));
        (0..60).for_each(|n| timeout.observe(MS(100 + n % 5)));
        let usual = timeout.limit();
        assert_eq!(usual, MS(102 + 8));
        (0..4).for_each(|_| timeout.observe(MS(30_000)));
        assert!(timeout.limit() <= MS(102 + 2 * 8), "{}", timeout.limit());
        (0..64).for_each(|_| timeout.observe(MS(3_000)));
        assert_eq!(timeout.limit(), MS(3_000));
    }

    #[test]
    fn it_stays_within_its_bounds() {
        let mut timeout = AdaptiveTimeout::new(MS(10), MS(1_000));
        (0..7).for_each(|_| timeout.observe(MS(1)));
        assert_eq!(timeout.limit(), MS(1_000));
        timeout.observe(MS(1));
        assert_eq!(timeout.limit(), MS(10));
        (0..64).for_each(|_| timeout.observe(Nanos::MAX));
        assert_eq!(timeout.limit(), MS(1_000));
    }
}
