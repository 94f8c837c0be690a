//! Deadlines measured with the real clock.

use std::time::{Duration, Instant};

use crate::memory::real_start;

/// A deadline by the real clock: a start and a duration.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Deadline {
    start: Instant,
    limit: Duration,
}

impl Deadline {
    pub(crate) fn after(limit: Duration) -> Self {
        Self { start: real_start(), limit }
    }

    /// Returns a deadline that is never reached in practice (136 years).
    pub(crate) fn never() -> Self {
        Self::after(Duration::from_secs(u32::MAX.into()))
    }

    /// Returns this deadline, or the one in `limit` from now if that is earlier.
    pub(crate) fn at_most(self, limit: Duration) -> Self {
        match self.remaining() {
            Some(left) if left > limit => Self::after(limit),
            _ => self,
        }
    }

    /// Returns this deadline plus `by`.
    pub(crate) fn extended_by(self, by: Duration) -> Self {
        Self { limit: self.limit + by, ..self }
    }

    pub(crate) fn remaining(self) -> Option<Duration> {
        self.limit.checked_sub(self.start.elapsed()).filter(|left| !left.is_zero())
    }

    pub(crate) const fn limit(&self) -> Duration {
        self.limit
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_earlier_of_two_deadlines_is_kept() {
        let minute = Duration::from_mins(1);
        assert_eq!(Deadline::after(minute).at_most(2 * minute).limit(), minute);
        assert_eq!(Deadline::after(2 * minute).at_most(minute).limit(), minute);
        // A deadline that has passed is not replaced by a later one.
        assert_eq!(Deadline::after(Duration::ZERO).at_most(minute).remaining(), None);
    }
}
