//! Rate limits of an endpoint over QUIC: each writer asks for permission before it hands bytes to its stream.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use farflung_base::{Nanos, PeerId};

use crate::memory::real_start;
use crate::rate::{Pace, Rates};

/// Shortest sleep: tokio's timers have a resolution of a millisecond.
const LEAST: Duration = Duration::from_millis(1);

/// The rate limits of an endpoint, and their use.
#[derive(Debug)]
pub(super) struct Pacer {
    start: Instant,
    limited: bool,
    rates: Mutex<Rates>,
    /// By peer: a lock that serves its streams in the order of their requests.
    queues: Vec<tokio::sync::Mutex<()>>,
}

impl Pacer {
    pub(super) fn new(pace: Pace, peers: usize) -> Self {
        Self {
            start: real_start(),
            limited: pace.is_limited(),
            rates: Mutex::new(Rates::new(pace, peers)),
            queues: (0..peers).map(|_| tokio::sync::Mutex::new(())).collect(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Rates> {
        self.rates.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until the limits allow some of these bytes to be sent to the peer, and returns how many. They
    /// count as sent.
    pub(super) async fn admitted(&self, peer: PeerId, wanted: usize) -> usize {
        if !self.limited {
            return wanted;
        }
        let _served = self.queues[peer.index()].lock().await;
        loop {
            match self.ask(peer, wanted as u64) {
                Ok(bytes) => return bytes as usize,
                Err(wait) => tokio::time::sleep(Duration::from(wait).max(LEAST)).await,
            }
        }
    }

    /// Returns the number of bytes that may be sent now, and counts them as sent; if none, the time to wait as
    /// an error.
    fn ask(&self, peer: PeerId, wanted: u64) -> Result<u64, Nanos> {
        let now = Nanos::from(self.start.elapsed());
        let mut rates = self.lock();
        match rates.admits(now, peer, wanted) {
            0 if wanted > 0 => Err(rates.wait(now, peer)),
            bytes => {
                rates.spend(now, peer, bytes);
                Ok(bytes)
            }
        }
    }
}
