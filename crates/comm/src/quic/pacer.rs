//! Rate limits over QUIC: each writer asks for permission before it hands bytes to its stream. The limits are
//! those of the endpoint, which QUIC shares with the endpoint's sockets.

use std::sync::Arc;
use std::time::Duration;

use farflung_base::PeerId;

use crate::rate::Budget;

/// Shortest sleep: tokio's timers have a resolution of a millisecond.
const LEAST: Duration = Duration::from_millis(1);

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
