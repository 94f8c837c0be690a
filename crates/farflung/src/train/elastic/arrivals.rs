//! Who is there beside the members: peers that have connected and may become members.

use std::collections::BTreeMap;
use std::sync::Arc;

use farflung_base::{Nanos, PeerId};
use farflung_comm::secure::PublicKey;
use farflung_comm::tcp::{Connected, Gate, GateConfig};
use farflung_parallel::membership::{Member, MemberId};

use super::status::Status;
use super::welcome::Welcome;

/// A peer that is connected.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Newcomer {
    /// Its number in the network.
    pub peer: PeerId,
    /// Its name among members.
    pub id: MemberId,
}

impl Newcomer {
    /// An endpoint whose peer has this key, where connections are encrypted. An endpoint's number is nobody
    /// else's ever, so that a machine that comes again is a new member.
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

/// Tells who is connected.
pub trait Arrivals: std::fmt::Debug + Send + Sync {
    /// All peers that are connected at a time by the transport's clock, members or not.
    fn here(&self, now: Nanos) -> Vec<Newcomer>;

    /// From when on this peer is there, by the transport's clock.
    fn begins(&self, _me: PeerId) -> Nanos {
        Nanos::ZERO
    }

    /// Where the peers are reached that are connected, where that is known.
    fn addresses(&self) -> BTreeMap<PeerId, String> {
        BTreeMap::new()
    }

    /// Has whoever asks told how the run stands.
    fn tell(&self, _status: Status) {}

    /// A newcomer that waits looks whether others have come that it has not met.
    fn meet(&self) {}
}

/// Those that have come through a gate.
#[derive(Debug)]
pub struct AtGate {
    /// The gate.
    pub gate: Arc<Gate>,
    /// What it was opened with.
    pub config: GateConfig,
    /// What newcomers are told.
    pub(super) welcome: Welcome,
}

impl Arrivals for AtGate {
    fn here(&self, _: Nanos) -> Vec<Newcomer> {
        self.gate.connected().iter().map(Newcomer::from).collect()
    }

    fn addresses(&self) -> BTreeMap<PeerId, String> {
        let own = self.gate.own();
        self.gate.connected().into_iter().chain([own]).map(|peer| (peer.peer, peer.address)).collect()
    }

    fn tell(&self, status: Status) {
        let welcome = Welcome { status: Some(status), ..self.welcome.clone() };
        if let Err(error) = self.gate.set_welcome(welcome.to_bytes()) {
            tracing::warn!(%error, "how the run stands is not told");
        }
    }

    fn meet(&self) {
        if let Err(error) = self.gate.meet_others(&self.config) {
            tracing::debug!(%error, "who else has come is not known");
        }
    }
}

/// Endpoints of one process, each of which is there from a time on: for simulated links and tests.
#[derive(Debug, Clone, Default)]
pub struct Scripted(pub Vec<(PeerId, Nanos)>);

impl Arrivals for Scripted {
    fn here(&self, now: Nanos) -> Vec<Newcomer> {
        let come = self.0.iter().filter(|(_, from)| *from <= now);
        come.map(|&(peer, _)| Newcomer::new(peer, None)).collect()
    }

    fn begins(&self, me: PeerId) -> Nanos {
        self.0.iter().find(|(peer, _)| *peer == me).map_or(Nanos::ZERO, |(_, from)| *from)
    }
}
