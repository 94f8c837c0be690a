//! Refused connections: counts of those that this process refused, and the error for a refusal by another
//! process. They are counted by reason, and only some are logged: a stranger may try ten thousand times, and
//! the log must not grow with every try.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::clock::unix_seconds;
use crate::CommError;
use crate::error::Refusal;

/// The first refusals of each kind, up to this number, are all logged. Later ones are logged only when the
/// count of their kind is a power of two.
const LOGGED: u64 = 4;

/// Greatest number of addresses whose last refusal is kept.
const ADDRESSES: usize = 16;

/// Counts of refused connections by reason, and the last reason for each of some addresses.
#[derive(Debug, Clone, Default)]
pub struct Refused(Arc<Mutex<Refusals>>);

#[derive(Debug, Default)]
struct Refusals {
    counts: BTreeMap<&'static str, u64>,
    last: BTreeMap<IpAddr, String>,
}

impl Refused {
    /// Returns the counts so far.
    #[must_use]
    pub fn counts(&self) -> BTreeMap<&'static str, u64> {
        self.lock().counts.clone()
    }

    /// Returns the reason for the last refusal of each address, for the first addresses that were refused.
    pub(crate) fn last_of_each(&self) -> BTreeMap<IpAddr, String> {
        self.lock().last.clone()
    }

    /// Counts a refused connection, and logs it if it is one of the first [`LOGGED`] of its kind, or if the new
    /// count is a power of two.
    pub(crate) fn note(&self, from: Option<SocketAddr>, kind: &'static str, detail: &dyn Display) {
        let so_far = {
            let mut refusals = self.lock();
            if let Some(from) = from.map(|from| from.ip())
                && (refusals.last.len() < ADDRESSES || refusals.last.contains_key(&from))
            {
                refusals.last.insert(from, detail.to_string());
            }
            let count = refusals.counts.entry(kind).or_default();
            *count += 1;
            *count
        };
        let from = from.map_or_else(|| "an unknown address".to_owned(), |from| from.to_string());
        if so_far <= LOGGED || so_far.is_power_of_two() {
            tracing::warn!(from, so_far, "refused a connection: {kind}: {detail}");
        }
    }

    fn lock(&self) -> MutexGuard<'_, Refusals> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// If two clocks differ by more than this number of seconds, the error about an expired ticket says that the
/// clocks differ.
const APART: u64 = 300;

/// Returns the error for a refusal of this process by `peer`.
pub(crate) fn refused(peer: &str, reason: Refusal) -> CommError {
    let (peer, own) = (peer.to_owned(), unix_seconds());
    match reason {
        Refusal::Expired { clock, .. } if clock.abs_diff(own) > APART => {
            CommError::Clocks { peer, host: clock, own }
        }
        reason => CommError::Refused { peer, reason },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clocks_that_are_far_apart_are_named() {
        let now = unix_seconds();
        let said = |clock: u64| refused("a:1", Refusal::Expired { expiry: clock - 7300, clock }).to_string();
        let near = said(now + 10);
        assert!(
            near.contains("the ticket expired 2 h ago by the clock of the side that refused it"),
            "{near}"
        );
        let far = said(now + 5 * 3600 + 10);
        assert!(far.contains("which is 5 h ahead of this one: set the clocks"), "{far}");
        assert!(said(now - 3 * 86_400).contains("3 days behind"));
    }
}
