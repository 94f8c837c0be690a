//! A peer of a growing network.

use farflung_base::PeerId;

use crate::second_network::with_key;
use crate::secure::PublicKey;

/// A member: its number, address and key. It need not be connected to this process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Connected {
    /// Number of the peer.
    pub peer: PeerId,
    /// Address at which the peer listens; several are separated by commas, as in
    /// [`GrowingNetwork::address`](super::GrowingNetwork::address).
    pub address: String,
    /// Public key of the peer; `None` if connections are not encrypted.
    pub key: Option<PublicKey>,
}

impl Connected {
    /// Returns the address, with the peer's key if it has one. That suffices to
    /// [ask](super::GrowingNetwork::ask) it.
    #[must_use]
    pub fn to_reach(&self) -> String {
        self.key.map_or_else(|| self.address.clone(), |key| with_key(&self.address, key))
    }
}
