//! What was refused, counted by its reason: a stranger can come ten thousand times, and the log must not grow
//! with it.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Refusals of one kind that are logged one by one; of more, each time their number has doubled.
const LOGGED: u64 = 4;

/// Counts of refused connections by their reason.
#[derive(Debug, Clone, Default)]
pub struct Refused(Arc<Mutex<BTreeMap<&'static str, u64>>>);

impl Refused {
    /// The counts so far.
    #[must_use]
    pub fn counts(&self) -> BTreeMap<&'static str, u64> {
        self.lock().clone()
    }

    /// Counts one, and logs it with what is known of it.
    pub(crate) fn note(&self, from: Option<SocketAddr>, kind: &'static str, detail: &dyn Display) {
        let so_far = {
            let mut counts = self.lock();
            let count = counts.entry(kind).or_default();
            *count += 1;
            *count
        };
        let from = from.map_or_else(|| "an unknown address".to_owned(), |from| from.to_string());
        if so_far <= LOGGED || so_far.is_power_of_two() {
            tracing::warn!(from, so_far, "refused a connection: {kind}: {detail}");
        }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<&'static str, u64>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
