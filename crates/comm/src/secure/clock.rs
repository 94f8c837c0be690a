//! The machine's calendar clock, by which the expiry of a ticket is set and checked.

use std::time::UNIX_EPOCH;

/// Returns the seconds since 1970 by this machine's clock; 0 if the clock is set to an earlier time.
#[must_use]
pub fn unix_seconds() -> u64 {
    #[expect(
        clippy::disallowed_methods,
        reason = "the expiry of a ticket is a calendar time; it is checked on real networks only"
    )]
    let now = std::time::SystemTime::now();
    now.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
