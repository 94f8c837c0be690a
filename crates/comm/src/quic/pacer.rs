//! Rate limits of an endpoint over QUIC: each writer asks for permission before it hands bytes to its stream.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use farflung_base::{Nanos, PeerId};

use crate::memory::real_start;
use crate::rate::{Budget, Pace, Rates};

/// Shortest sleep: tokio's timers have a resolution of a millisecond.
const LEAST: Duration = Duration::from_millis(1);

/// Rate limits of an endpoint that has no sockets of its own.
#[derive(Debug)]
pub(super) struct Limits {
    start: Instant,
    limited: bool,
    rates: Mutex<Rates>,
}

impl Limits {
    pub(super) fn new(pace: Pace, peers: usize) -> Self {
        let (limited, rates) = (pace.is_limited(), Mutex::new(Rates::new(pace, peers)));
        Self { start: real_start(), limited, rates }
    }
}

impl Budget for Limits {
    fn is_limited(&self) -> bool {
        self.limited
    }
    fn ask(&self, peer: PeerId, wanted: u64) -> Result<u64, Nanos> {
        let now = Nanos::from(self.start.elapsed());
        let mut rates = self.rates.lock().unwrap_or_else(PoisonError::into_inner);
        match rates.admits(now, peer, wanted) {
            0 if wanted > 0 => Err(rates.wait(now, peer)),
            bytes => {
                rates.spend(now, peer, bytes);
                Ok(bytes)
            }
        }
    }
}

/// The rate limits of an endpoint, and the writers that wait for them.
#[derive(Debug)]
pub(super) struct Pacer {
    budget: Arc<dyn Budget>,
    /// By peer: a lock that serves its streams in the order of their requests.
    queues: Vec<tokio::sync::Mutex<()>>,
}

impl Pacer {
    pub(super) fn new(budget: Arc<dyn Budget>, peers: usize) -> Self {
        Self { budget, queues: (0..peers).map(|_| tokio::sync::Mutex::new(())).collect() }
    }

    /// Waits until the limits allow some of these bytes to be sent to the peer, and returns how many. They
    /// count as sent.
    pub(super) async fn admitted(&self, peer: PeerId, wanted: usize) -> usize {
        if !self.budget.is_limited() {
            return wanted;
        }
        let _served = self.queues[peer.index()].lock().await;
        loop {
            match self.budget.ask(peer, wanted as u64) {
                Ok(bytes) => return bytes as usize,
                Err(wait) => tokio::time::sleep(Duration::from(wait).max(LEAST)).await,
            }
        }
    }
}
