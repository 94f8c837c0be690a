//! Times that the rules of membership depend on.

use farflung_base::Nanos;

/// Times that a member's decisions depend on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Settings {
    /// The first wait before a message is sent again: a round trip or more.
    pub resend: Nanos,
    /// Waits double up to this one.
    pub slowest_resend: Nanos,
    /// How long a member without a majority waits for the others.
    pub patience: Nanos,
    /// How long two members must have been without each other before the coordinator, which hears both,
    /// removes one.
    pub grace: Nanos,
}

impl Default for Settings {
    /// For machines on the internet: half a second, 8 s, half a minute, 10 s.
    fn default() -> Self {
        Self {
            resend: Nanos::from_millis(500),
            slowest_resend: Nanos::from_millis(8_000),
            patience: Nanos::from_millis(30_000),
            grace: Nanos::from_millis(10_000),
        }
    }
}
