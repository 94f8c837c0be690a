//! The links of an endpoint, by peer. Peers come at any time and are never replaced.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use farflung_base::PeerId;

use super::link::Link;

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
}
