//! Deadlines measured with the real clock.

use std::time::{Duration, Instant};

use crate::memory::real_start;

/// A deadline by the real clock: a start and a duration.
#[derive(Clone, Copy)]
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

    /// Returns this deadline, or the one in `limit` from now if that is earlier or if this deadline has passed.
    pub(crate) fn at_most(self, limit: Duration) -> Self {
        match self.remaining() {
            Some(left) if left < limit => self,
            _ => Self::after(limit),
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
