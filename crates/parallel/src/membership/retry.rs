//! Timer for sending messages again.

use farflung_base::Nanos;

use super::Settings;

/// A timer with exponential backoff up to a limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Retry {
    attempt: u32,
    at: Nanos,
}

impl Retry {
    /// Returns a timer that is due at `now`.
    pub(super) const fn due(now: Nanos) -> Self {
        Self { attempt: 0, at: now }
    }

    /// Returns the time at which the timer is due.
    pub(super) const fn at(self) -> Nanos {
        self.at
    }

    pub(super) fn is_due(self, now: Nanos) -> bool {
        now >= self.at
    }

    /// Starts the next wait, twice as long as the one before.
    pub(super) fn again(self, now: Nanos, settings: &Settings) -> Self {
        self.later(now, Nanos::ZERO, settings)
    }

    /// Starts the next wait as [`Retry::again`] does, prolonged by `more`.
    pub(super) fn later(self, now: Nanos, more: Nanos, settings: &Settings) -> Self {
        let wait = settings.resend.0.saturating_mul(1 << self.attempt.min(32)).min(settings.slowest_resend.0);
        let at = now.saturating_add(Nanos(wait.max(1))).saturating_add(more);
        Self { attempt: self.attempt.saturating_add(1), at }
    }
}
