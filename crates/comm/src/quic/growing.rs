//! QUIC as the second network of a [`GrowingNetwork`](crate::tcp::GrowingNetwork): members that cannot reach
//! each other over TCP, such as those behind address translation, connect over QUIC.

use std::net::{SocketAddr, ToSocketAddrs as _};
use std::sync::Arc;
use std::time::Duration;

use super::IDLE_TIMEOUT;
use super::address::{PeerAddresses, relay};
use super::network::{Network, Shared, call};
use super::socket::{Socket, SocketOptions};
use crate::CommError;
use crate::second_network::{ConnectTarget, EndpointParts, SecondNetwork, SecondNetworkAccess};
use crate::secure::Security;
use crate::tcp::GateConfig;

/// How a member of a growing network is reached over QUIC.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct SocketConfig {
    /// Key of this process. Certificates have none that QUIC uses.
    pub security: Security,
    /// Relays that this process may use: `http://host:port` for a [`Relay`](super::Relay), `https://host:port`
    /// for one with a certificate from a public authority.
    pub relays: Vec<String>,
    /// UDP address to listen at, as `host:port`; `None` for any port on all addresses.
    pub listen: Option<String>,
    /// Addresses at which others reach this process, as `host:port`, besides those that it finds itself.
    pub advertise: Vec<String>,
    /// Whether it may reach others directly; if not, only over relays.
    pub direct: bool,
    /// Time after which a silent peer counts as lost, from 1 to 30 seconds.
    pub patience: Duration,
}

impl SocketConfig {
    /// Creates the configuration of a process that listens at any port and uses no relay.
    #[must_use]
    pub fn new(security: Security) -> Self {
        let (relays, advertise) = (Vec::new(), Vec::new());
        Self { security, relays, listen: None, advertise, direct: true, patience: IDLE_TIMEOUT }
    }
}

impl Socket {
    /// Opens a socket for a member of a growing network.
    ///
    /// # Errors
    /// If the port is in use or an address is wrong; [`CommError::NoEncryptedConnection`] without a key;
    /// [`CommError::Argument`] for a patience out of range.
    pub fn open(config: &SocketConfig) -> Result<Arc<Self>, CommError> {
        let Some(identity) = config.security.identity() else {
            let reason = "over QUIC processes are named by their keys: it needs a ticket or a secret";
            return Err(CommError::NoEncryptedConnection {
                peer: "this process".to_owned(),
                reason: reason.to_owned(),
            });
        };
        let got = config.patience.as_secs() as usize;
        if !(1..=30).contains(&got) {
            return Err(CommError::Argument { op: "QUIC", what: "seconds of patience", got, want: 30 });
        }
        let resolve = |one: &String| -> Result<Vec<SocketAddr>, CommError> {
            let found = one.to_socket_addrs().map_err(|e| CommError::io("address", one, &e))?;
            Ok(found.collect())
        };
        let mut advertise = Vec::new();
        for one in &config.advertise {
            advertise.extend(resolve(one)?);
        }
        let listen = config.listen.as_ref().map(resolve).transpose()?;
        let opening = SocketOptions {
            identity: identity.clone(),
            relays: config.relays.iter().map(|url| relay(url)).collect::<Result<_, _>>()?,
            listen: listen.and_then(|found| found.first().copied()),
            advertise,
            direct: config.direct,
            patience: config.patience,
        };
        Self::new(&opening).map(Arc::new)
    }

    /// Returns the addresses at which other processes reach this one, separated by commas.
    #[must_use]
    pub fn addresses(&self) -> String {
        self.peer_addresses().for_member()
    }
}

impl GateConfig {
    /// Lets members connect over QUIC where TCP does not reach them. With `sockets` false they connect over
    /// QUIC alone.
    #[must_use]
    pub fn over_quic(mut self, socket: &Arc<Socket>, sockets: bool) -> Self {
        let way: Arc<dyn SecondNetworkAccess> = Arc::clone(socket) as _;
        (self.second_network, self.sockets) = (Some(way), sockets);
        self
    }
}

impl SecondNetworkAccess for Socket {
    fn address(&self) -> String {
        self.addresses()
    }
    fn has_address(&self, address: &str) -> bool {
        PeerAddresses::of_member(address).is_ok_and(|places| !places.is_empty())
    }
    fn ask(self: Arc<Self>, to: &ConnectTarget<'_>, question: Vec<u8>) -> Result<Vec<u8>, CommError> {
        call(&self, to, question).map(|(_, answer)| answer)
    }
    fn open(self: Arc<Self>, parts: EndpointParts) -> Arc<dyn SecondNetwork> {
        Arc::new(Shared(Arc::new(Network::new(self, parts))))
    }
}
