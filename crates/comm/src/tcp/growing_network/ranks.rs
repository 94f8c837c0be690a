//! A growing network whose members are the ranks of a job: numbers are given instead of drawn, and the member
//! with number 0 sends the others the addresses and keys of all.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr, UdpSocket};

use farflung_base::{PeerId, Rank};

use super::super::Tcp;
use super::super::listeners::{AddressUse, Listeners};
use super::super::target::resolve;
use super::{Connected, GateConfig, GrowingNetwork, MemberList, listen_at};
use crate::control::{BoundedVec, Control};
use crate::deadline::Deadline;
use crate::error::Refusal;
use crate::second_network::{of_sockets, unspecified};
use crate::secure::{JoinSecret, PublicKey, refused};
use crate::{CommError, Transport as _};

impl GrowingNetwork {
    /// Creates the member with number 0, at which the others ask.
    pub(crate) fn first_rank(config: &GateConfig) -> Result<Self, CommError> {
        let listeners = listen_at(config, AddressUse::Meet)?;
        let secret = config.security.is_encrypted().then(JoinSecret::generate).transpose()?;
        Self::open(config, listeners, PeerId(0), secret, None)
    }

    /// Asks the member with number 0 at these addresses, as [`GrowingNetwork::ask`] does. If that member
    /// expects another number of ranks, it refuses this process later, when this process connects.
    pub(crate) fn ask_for_ranks(config: &GateConfig, addresses: &[String]) -> Result<MemberList, CommError> {
        Self::ask(&GateConfig { slots: u32::MAX, ..config.clone() }, addresses)
    }

    /// Returns whether a peer has ever connected.
    pub(crate) fn has_connected(&self, peer: PeerId) -> bool {
        self.shared.tcp.driver().is_connected(peer)
    }

    /// Returns the last reason for which each of some addresses was refused.
    pub(crate) fn refusals(&self) -> BTreeMap<IpAddr, String> {
        self.shared.security.refused().last_of_each()
    }

    /// Returns whether a peer that has connected is gone.
    pub(crate) fn has_left(&self, peer: PeerId) -> bool {
        self.shared.tcp.driver().inbox.is_down(peer)
    }

    /// Connects to a peer, unless it has connected to this one.
    pub(crate) fn reach_rank(&self, peer: &Connected, until: Deadline) -> Result<(), CommError> {
        self.shared.reach(peer, until)
    }

    /// Returns the encoded message with the addresses and keys of all members.
    pub(crate) fn table(&self) -> Vec<u8> {
        let known: Vec<Connected> = super::lock(&self.shared.known).values().cloned().collect();
        let keys = known.iter().filter_map(|known| known.key.as_ref());
        let table = Control::Table {
            addresses: BoundedVec(known.iter().map(|known| &*known.address).collect()),
            keys: BoundedVec(keys.map(|key| &key.bytes()[..]).collect()),
            secret: &[],
        };
        table.encode()
    }

    /// Reads the message of [`GrowingNetwork::table`], in the order of ranks; `None` if it is not valid.
    pub(crate) fn read_table(&self, message: &Control<'_>) -> Option<Vec<Connected>> {
        let Control::Table { addresses: BoundedVec(addresses), keys: BoundedVec(keys), .. } = message else {
            return None;
        };
        let is_sealed = self.shared.security.is_encrypted();
        if addresses.len() != self.shared.slots as usize || is_sealed && keys.len() != addresses.len() {
            return None;
        }
        let member = |(rank, address): (usize, &&str)| {
            let key = if is_sealed { Some(PublicKey::from_slice(keys[rank])?) } else { None };
            Some(Connected { peer: PeerId(rank as u32), address: (*address).to_owned(), key })
        };
        addresses.iter().enumerate().map(member).collect()
    }

    /// Returns an error if a rank that has connected has another key than in the table.
    pub(crate) fn check_connected(&self, table: &[Connected]) -> Result<(), CommError> {
        let known = super::lock(&self.shared.known);
        let is_other = |peer: &&Connected| known.get(&peer.peer.0).is_some_and(|known| known.key != peer.key);
        match table.iter().find(is_other) {
            Some(other) => Err(refused(&Rank(other.peer.0).to_string(), Refusal::Key)),
            None => Ok(()),
        }
    }

    /// Returns an error if another rank has the key of this one: over the second network a process is reached
    /// by its key.
    pub(crate) fn check_keys(&self, table: &[Connected]) -> Result<(), CommError> {
        let (me, own) = (self.shared.tcp.me(), self.shared.security.own_key());
        let is_same = |peer: &&Connected| peer.peer != me && own.is_some() && peer.key == own;
        match table.iter().find(is_same).filter(|_| self.shared.second_network_access.is_some()) {
            Some(same) => Err(refused(&Rank(same.peer.0).to_string(), Refusal::SameKey)),
            None => Ok(()),
        }
    }
}

impl Tcp {
    /// Returns the address by which a peer is reached over the second network now, or that of a relay; `None`
    /// for a peer that is connected over TCP, or before the address is known.
    #[must_use]
    pub fn second_network_path(&self, peer: PeerId) -> Option<String> {
        self.driver().second_network.get()?.path_to(peer)
    }

    /// Returns the number of streams that this endpoint has opened to a peer over the second network so far:
    /// one for each tag, and another one if a tag is used again after its stream was closed.
    #[must_use]
    pub fn second_network_streams(&self, peer: PeerId) -> u64 {
        self.driver().second_network.get().map_or(0, |second_network| second_network.streams_to(peer))
    }

    /// Returns whether a peer is connected over the second network.
    #[must_use]
    pub fn is_over_second_network(&self, peer: PeerId) -> bool {
        self.driver().second_network.get().is_some_and(|second_network| second_network.is_connected(peer))
    }
}

impl MemberList {
    /// Joins as the member with this number, and connects to the one with number 0, which is at the addresses
    /// `host`.
    pub(crate) fn join_as(
        self,
        config: &GateConfig,
        me: PeerId,
        host: &[String],
        until: Deadline,
    ) -> Result<GrowingNetwork, CommError> {
        let own = config.security.own_key();
        if config.second_network.is_some()
            && self.members.iter().any(|member| own.is_some() && member.key == own)
        {
            return Err(refused("rank 0", Refusal::SameKey));
        }
        let listeners = self.listeners(config, host)?;
        let gate = GrowingNetwork::open(config, listeners, me, self.secret.clone(), self.seen)?;
        let key = self.members.iter().find(|member| member.peer == PeerId(0)).and_then(|zero| zero.key);
        let zero = Connected { peer: PeerId(0), address: host.join(","), key };
        gate.shared.reach(&zero, until)?;
        Ok(gate)
    }

    /// Listens at the configured address; without one, at any port of the address from which this process
    /// reached number 0, or would reach it. `None` if there is none, or if members do not connect over TCP.
    fn listeners(&self, config: &GateConfig, host: &[String]) -> Result<Option<Listeners>, CommError> {
        if !config.sockets || !config.listen.is_empty() {
            return listen_at(config, AddressUse::Listen);
        }
        let Some(own) = self.seen.or_else(|| own_address(host)) else { return Ok(None) };
        let at = GateConfig { listen: SocketAddr::new(own, 0).to_string(), ..config.clone() };
        listen_at(&at, AddressUse::Listen)
    }
}

/// Returns the address from which this machine would reach the first of the others that can be resolved.
fn own_address(others: &[String]) -> Option<IpAddr> {
    let other = others.iter().find_map(|one| resolve("address of rank 0", &of_sockets(one)).ok())?;
    let other = other.first()?;
    // Connecting a UDP socket sends nothing; the system only chooses the local address.
    let socket = UdpSocket::bind(SocketAddr::new(unspecified(other.ip()), 0)).ok()?;
    socket.connect(other).ok()?;
    socket.local_addr().ok().map(|own| own.ip())
}
