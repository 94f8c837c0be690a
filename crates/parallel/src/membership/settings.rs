//! Timeouts of the membership protocol.

use farflung_base::Nanos;

/// Timeouts of a member.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Settings {
    /// Time before a message is first sent again: at least a round trip.
    pub resend: Nanos,
    /// Maximum time between two sends of a message. The time doubles up to this limit.
    pub slowest_resend: Nanos,
    /// Time that a member without a majority waits for the others before it stops.
    pub patience: Nanos,
    /// Time for which two members must not have heard each other before the coordinator, which hears both,
    /// removes one of them.
    pub grace: Nanos,
}

impl Default for Settings {
    /// Returns settings for machines on the internet: 500 ms, 8 s, 30 s and 10 s.
    fn default() -> Self {
        Self {
            resend: Nanos::from_millis(500),
            slowest_resend: Nanos::from_millis(8_000),
            patience: Nanos::from_millis(30_000),
            grace: Nanos::from_millis(10_000),
        }
    }
}
