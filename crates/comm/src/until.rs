//! A time after which nothing is tried any more.

use std::time::{Duration, Instant};

use crate::memory::real_start;

/// From a start, for so long.
#[derive(Clone, Copy)]
pub(crate) struct Until {
    start: Instant,
    limit: Duration,
}

impl Until {
    pub(crate) fn after(limit: Duration) -> Self {
        Self { start: real_start(), limit }
    }

    /// As good as never.
    pub(crate) fn never() -> Self {
        Self::after(Duration::from_secs(u32::MAX.into()))
    }

    /// The same, over after `limit` from now at the latest.
    pub(crate) fn at_most(self, limit: Duration) -> Self {
        match self.left() {
            Some(left) if left < limit => self,
            _ => Self::after(limit),
        }
    }

    /// The same, and a moment longer.
    pub(crate) fn longer(self, by: Duration) -> Self {
        Self { limit: self.limit + by, ..self }
    }

    pub(crate) fn left(self) -> Option<Duration> {
        self.limit.checked_sub(self.start.elapsed()).filter(|left| !left.is_zero())
    }

    pub(crate) const fn limit(&self) -> Duration {
        self.limit
    }
}
