//! The rates of an endpoint over QUIC: each writer asks before it hands bytes to its stream.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use farflung_base::{Nanos, PeerId};

use crate::memory::real_start;
use crate::rate::{Pace, Rates};

/// The shortest sleep: timers of tokio have a resolution of a millisecond.
const LEAST: Duration = Duration::from_millis(1);

/// The rates of an endpoint, and what of them is used up.
#[derive(Debug)]
pub(super) struct Pacer {
    start: Instant,
    limited: bool,
    rates: Mutex<Rates>,
    /// By peer: its streams are served in the order in which they ask.
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

    /// Waits until the rates admit some of these bytes to the peer, and returns how many. They count as sent.
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

    /// How many bytes may be sent now, or how long none may be.
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
