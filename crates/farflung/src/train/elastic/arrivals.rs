//! Peers that have connected, whether they are members or may become members.

use std::collections::BTreeMap;
use std::sync::Arc;

use farflung_base::{Nanos, PeerId};
use farflung_comm::secure::PublicKey;
use farflung_comm::tcp::{Connected, GateConfig, GrowingNetwork, WELCOME_BYTES};
use farflung_parallel::membership::{Member, MemberId};

use super::newcomer_info::NewcomerInfo;
use super::status::Status;

/// A connected peer: a member or a possible member.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Newcomer {
    /// Its endpoint's number in the network.
    pub peer: PeerId,
    /// Its id in views.
    pub id: MemberId,
}

impl Newcomer {
    /// Creates the record of a connected endpoint. `key` is the peer's public key where connections are
    /// encrypted. The id contains the endpoint's number, which is never used twice: a machine that reconnects
    /// is a new member.
    #[must_use]
    pub fn new(peer: PeerId, key: Option<&PublicKey>) -> Self {
        let Some(key) = key else { return Self { peer, id: MemberId::number(peer.0) } };
        let mut id = *key.bytes();
        id[28..].copy_from_slice(&peer.0.to_be_bytes());
        Self { peer, id: MemberId(id) }
    }
}

impl From<&Newcomer> for Member {
    fn from(newcomer: &Newcomer) -> Self {
        Self::new(newcomer.id, newcomer.peer.0)
    }
}

impl From<&Connected> for Newcomer {
    fn from(connected: &Connected) -> Self {
        Self::new(connected.peer, connected.key.as_ref())
    }
}

/// Source of the list of connected peers.
pub trait Arrivals: std::fmt::Debug + Send + Sync {
    /// Returns all peers that are connected at time `now` of the transport's clock, members included.
    fn connected(&self, now: Nanos) -> Vec<Newcomer>;

    /// Returns the time of the transport's clock at which this peer appears.
    fn begins(&self, _me: PeerId) -> Nanos {
        Nanos::ZERO
    }

    /// Returns the addresses of the connected peers and of this endpoint, as far as they are known.
    fn addresses(&self) -> BTreeMap<PeerId, String> {
        BTreeMap::new()
    }

    /// Returns the addresses of the connected peers, with the keys by which they are reached, if they are
    /// needed.
    fn to_reach(&self) -> BTreeMap<PeerId, String> {
        self.addresses()
    }

    /// Publishes the status that peers get when they ask about the run.
    fn publish_status(&self, _status: Status) {}

    /// Connects a waiting newcomer to peers that have connected to the network since it did.
    fn meet(&self) {}
}

/// Peers that have connected through a gate.
#[derive(Debug)]
pub struct AtGate {
    /// The gate.
    pub gate: Arc<GrowingNetwork>,
    /// Settings with which the gate was opened.
    pub config: GateConfig,
    /// Answer to a newcomer that asks about the run.
    pub(super) welcome: NewcomerInfo,
}

impl Arrivals for AtGate {
    fn connected(&self, _: Nanos) -> Vec<Newcomer> {
        self.gate.connected().iter().map(Newcomer::from).collect()
    }

    fn addresses(&self) -> BTreeMap<PeerId, String> {
        let own = self.gate.own();
        self.gate.connected().into_iter().chain([own]).map(|peer| (peer.peer, peer.address)).collect()
    }

    fn to_reach(&self) -> BTreeMap<PeerId, String> {
        self.gate.connected().iter().map(|peer| (peer.peer, peer.to_reach())).collect()
    }

    fn publish_status(&self, status: Status) {
        // The settings leave room for it, or the run could not have opened its gate.
        let room = WELCOME_BYTES.saturating_sub(self.welcome.to_bytes().len());
        let welcome = NewcomerInfo { status: Some(status.shortened(room)), ..self.welcome.clone() };
        if let Err(error) = self.gate.set_welcome(welcome.to_bytes()) {
            tracing::warn!(%error, "failed to publish the status of the run");
        }
    }

    fn meet(&self) {
        if let Err(error) = self.gate.meet_others(&self.config) {
            tracing::debug!(%error, "failed to learn which other members have connected");
        }
    }
}

/// Endpoints of one process, each with the time at which it appears. For simulated links and tests.
#[derive(Debug, Clone, Default)]
pub struct Scripted(pub Vec<(PeerId, Nanos)>);

impl Arrivals for Scripted {
    fn connected(&self, now: Nanos) -> Vec<Newcomer> {
        let come = self.0.iter().filter(|(_, from)| *from <= now);
        come.map(|&(peer, _)| Newcomer::new(peer, None)).collect()
    }

    fn begins(&self, me: PeerId) -> Nanos {
        self.0.iter().find(|(peer, _)| *peer == me).map_or(Nanos::ZERO, |(_, from)| *from)
    }
}
