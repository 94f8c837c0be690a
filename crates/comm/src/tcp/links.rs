//! The links of an endpoint, by peer. Peers may connect at any time. Once all links to a peer have ended they
//! are dropped, with their sockets and shared memory; the peer's number is not used again.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use farflung_base::PeerId;

use super::link::Link;
use super::pace::Pacer;

/// Shortest time between two attempts of the pacing thread to write, since sockets may have no room.
const FULL_SOCKET_POLL: Duration = Duration::from_micros(500);

/// The links to one peer.
#[derive(Debug, Clone)]
pub(super) enum PeerLinks {
    /// The peer has not connected, or the endpoint is this one.
    Never,
    /// The peer has connected.
    Connected(Arc<[Link]>),
    /// The peer has connected, and all links to it have ended.
    Ended,
}

/// The links to all peers at one moment. Those that end meanwhile stay valid.
#[derive(Debug)]
pub(super) struct AllLinks(Arc<[Arc<[Link]>]>);

impl AllLinks {
    pub(super) fn iter(&self) -> impl Iterator<Item = &Link> {
        self.0.iter().flat_map(|links| links.iter())
    }

    /// Returns the links that have not ended.
    pub(super) fn open(&self) -> impl Iterator<Item = &Link> {
        self.iter().filter(|link| link.is_open())
    }
}

/// Links by peer.
#[derive(Debug)]
pub(super) struct Links {
    peers: Vec<Mutex<PeerLinks>>,
    /// The links of all peers that are connected.
    connected: Mutex<Arc<[Arc<[Link]>]>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Links {
    /// Creates an empty set of links, for at most `size` peers.
    pub(super) fn new(size: usize) -> Self {
        let peers = (0..size).map(|_| Mutex::new(PeerLinks::Never)).collect();
        Self { peers, connected: Mutex::new(Arc::new([])) }
    }

    /// Adds the links to a peer. Returns false if the peer has connected before.
    pub(super) fn connect(&self, peer: PeerId, links: Vec<Link>) -> bool {
        let Some(place) = self.peers.get(peer.index()) else { return false };
        let mut place = lock(place);
        if !matches!(*place, PeerLinks::Never) {
            return false;
        }
        let links: Arc<[Link]> = links.into();
        *place = PeerLinks::Connected(Arc::clone(&links));
        let mut connected = lock(&self.connected);
        *connected = connected.iter().cloned().chain([links]).collect();
        true
    }

    /// Drops the links to a peer once all of them have ended.
    pub(super) fn drop_ended(&self, peer: PeerId) {
        let Some(place) = self.peers.get(peer.index()) else { return };
        let mut place = lock(place);
        let PeerLinks::Connected(links) = &*place else { return };
        if links.iter().any(Link::is_open) {
            return;
        }
        let mut connected = lock(&self.connected);
        *connected = connected.iter().filter(|other| !Arc::ptr_eq(other, links)).cloned().collect();
        *place = PeerLinks::Ended;
    }

    /// Returns the links to a peer.
    pub(super) fn to(&self, peer: PeerId) -> PeerLinks {
        self.peers.get(peer.index()).map_or(PeerLinks::Never, |place| lock(place).clone())
    }

    /// Returns whether a peer has ever connected.
    pub(super) fn has_connected(&self, peer: PeerId) -> bool {
        self.peers.get(peer.index()).is_some_and(|place| !matches!(*lock(place), PeerLinks::Never))
    }

    /// Returns the links to all connected peers.
    pub(super) fn all(&self) -> AllLinks {
        AllLinks(Arc::clone(&lock(&self.connected)))
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
                let all = self.all();
                let mut waiting: Vec<&Link> = all.open().filter(|link| link.wants_to_write()).collect();
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
