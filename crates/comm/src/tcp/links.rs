//! The links of an endpoint, by peer. Peers may connect at any time, and their links are never replaced.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread;
use std::time::Duration;

use farflung_base::PeerId;

use super::link::Link;
use super::pace::Pacer;

/// Shortest time between two attempts of the pacing thread to write, since sockets may have no room.
const FULL_SOCKET_POLL: Duration = Duration::from_micros(500);

/// Links by peer. There are none for this endpoint itself and for peers that have not connected.
#[derive(Debug)]
pub(super) struct Links {
    peers: Vec<OnceLock<Vec<Link>>>,
    /// Numbers of the peers that have connected.
    come: Mutex<Arc<[u32]>>,
}

impl Links {
    /// Creates an empty set of links, for at most `size` peers.
    pub(super) fn new(size: usize) -> Self {
        Self { peers: (0..size).map(|_| OnceLock::new()).collect(), come: Mutex::new(Arc::new([])) }
    }

    /// Adds the links to a peer. Returns false if the peer has connected before.
    pub(super) fn connect(&self, peer: PeerId, links: Vec<Link>) -> bool {
        let new = self.peers.get(peer.index()).is_some_and(|place| place.set(links).is_ok());
        if new {
            let mut come = self.come.lock().unwrap_or_else(PoisonError::into_inner);
            *come = come.iter().copied().chain([peer.0]).collect();
        }
        new
    }

    /// Returns the links to a peer, if it has connected.
    pub(super) fn to(&self, peer: PeerId) -> Option<&[Link]> {
        self.peers.get(peer.index())?.get().map(Vec::as_slice)
    }

    /// Returns the links to all peers.
    pub(super) fn all(&self) -> impl Iterator<Item = &Link> {
        let come = Arc::clone(&self.come.lock().unwrap_or_else(PoisonError::into_inner));
        (0..come.len()).flat_map(move |n| self.to(PeerId(come[n])).into_iter().flatten())
    }

    /// Sends the frames that wait for the rates, until the pacer is closed. Calls `wake` when operations have
    /// room again.
    ///
    /// Needed because an operation may be complete while its last frame waits for the rates: then no other
    /// thread drives the sockets.
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
