//! The links of an endpoint, by peer. Peers come at any time and are never replaced.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread;
use std::time::Duration;

use farflung_base::PeerId;

use super::link::Link;
use super::pace::Pacer;

/// Time between two attempts to write to sockets that have no room.
const FULL_SOCKET_POLL: Duration = Duration::from_micros(500);

/// By peer, those that it has; none to this endpoint itself, and to whoever has not come.
#[derive(Debug)]
pub(super) struct Links {
    peers: Vec<OnceLock<Vec<Link>>>,
    /// Those that have come.
    come: Mutex<Arc<[u32]>>,
}

impl Links {
    /// To nobody, of at most so many.
    pub(super) fn new(size: usize) -> Self {
        Self { peers: (0..size).map(|_| OnceLock::new()).collect(), come: Mutex::new(Arc::new([])) }
    }

    /// Takes the links to a peer up. False where it has come before.
    pub(super) fn connect(&self, peer: PeerId, links: Vec<Link>) -> bool {
        let new = self.peers.get(peer.index()).is_some_and(|place| place.set(links).is_ok());
        if new {
            let mut come = self.come.lock().unwrap_or_else(PoisonError::into_inner);
            *come = come.iter().copied().chain([peer.0]).collect();
        }
        new
    }

    /// Those to a peer, if it has come.
    pub(super) fn to(&self, peer: PeerId) -> Option<&[Link]> {
        self.peers.get(peer.index())?.get().map(Vec::as_slice)
    }

    /// All of them.
    pub(super) fn all(&self) -> impl Iterator<Item = &Link> {
        let come = Arc::clone(&self.come.lock().unwrap_or_else(PoisonError::into_inner));
        (0..come.len()).flat_map(move |n| self.to(PeerId(come[n])).into_iter().flatten())
    }

    /// Sends what waits for the rates, until the pacer is closed. `wake` makes threads that wait for the
    /// network look again.
    ///
    /// An operation may be over while its last frame waits for the rates; then no other thread drives the
    /// sockets.
    pub(super) fn send_paced(&self, pacer: &Pacer, wake: impl Fn()) {
        let mut turn = 0;
        while pacer.wait_for_work() {
            loop {
                let mut waiting: Vec<_> =
                    self.all().filter(|link| link.is_open() && link.wants_to_write()).collect();
                let soonest = waiting.iter().map(|link| pacer.wait(link.peer)).min();
                let Some(soonest) = soonest.filter(|_| !pacer.is_closed()) else { break };
                thread::sleep(Duration::from(soonest).max(FULL_SOCKET_POLL));
                // Links take turns at being the first.
                turn = (turn + 1) % waiting.len();
                waiting.rotate_left(turn);
                for link in waiting {
                    if link.flush() {
                        wake();
                    }
                }
            }
        }
    }
}
