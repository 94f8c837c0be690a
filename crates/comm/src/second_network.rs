//! A second network below an endpoint over sockets: it carries the frames of the peers that sockets do not
//! reach, into the same inbox. A growing network uses it to connect such peers. Independent of the kind of
//! network.

use std::fmt::Debug;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::{Arc, Weak};

use farflung_base::PeerId;

use crate::control::Control;
use crate::deadline::Deadline;
use crate::error::Refusal;
use crate::inbox::Inbox;
use crate::rate::Budget;
use crate::secure::{PublicKey, Security};
use crate::shared::RingWaker;
use crate::transport::Tag;
use crate::{CommError, DownReason, Frame, PathStats, Pool};

/// Inbox of an endpoint, and the counter that wakes the thread that polls the endpoint's sockets.
#[derive(Debug, Clone)]
pub(crate) struct Intake {
    inbox: Arc<Inbox>,
    bell: Arc<RingWaker>,
}

impl Intake {
    pub(crate) const fn new(inbox: Arc<Inbox>, bell: Arc<RingWaker>) -> Self {
        Self { inbox, bell }
    }

    /// Returns the inbox, for everything that wakes no thread.
    pub(crate) fn inbox(&self) -> &Inbox {
        &self.inbox
    }

    /// Puts in a frame that has arrived.
    pub(crate) fn deliver(&self, from: PeerId, tag: Tag, frame: Frame) {
        self.inbox.deliver(from, tag, frame);
        self.ring();
    }

    /// Counts a change, and wakes waiting threads.
    pub(crate) fn signal(&self) {
        self.inbox.signal();
        self.ring();
    }

    /// Marks a peer as gone for good.
    pub(crate) fn peer_down(&self, peer: PeerId, reason: DownReason) {
        self.inbox.peer_down(peer, reason);
        self.ring();
    }

    /// Records that a peer has connected.
    pub(crate) fn peer_up(&self, peer: PeerId) {
        self.inbox.peer_up(peer);
        self.ring();
    }

    fn ring(&self) {
        ring(&self.inbox, &self.bell);
    }
}

/// Wakes the thread that polls the sockets of an inbox, if there is one.
pub(crate) fn ring(inbox: &Inbox, bell: &RingWaker) {
    if inbox.is_driven() {
        bell.ring();
    }
}

/// Returns the address that stands for all addresses of this machine of the same kind as `ip`.
pub(crate) const fn unspecified(ip: IpAddr) -> IpAddr {
    match ip {
        IpAddr::V4(_) => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
        IpAddr::V6(_) => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
    }
}

/// Prefix of a process's key among its addresses.
const KEY: &str = "key:";

/// Returns the parts of an address that sockets use: `host:port`, without relays and addresses of QUIC.
pub(crate) fn of_sockets(address: &str) -> String {
    let is_socket =
        |one: &&str| !one.is_empty() && !["://", "quic:", KEY].iter().any(|mark| one.contains(mark));
    address.split(',').filter(is_socket).collect::<Vec<_>>().join(",")
}

/// Returns the key in an address, if it has one.
pub(crate) fn key_in(address: &str) -> Option<PublicKey> {
    address.split(',').find_map(|one| one.strip_prefix(KEY))?.parse().ok()
}

/// Adds the key of a process to its addresses, so that they suffice to reach it.
pub(crate) fn with_key(address: &str, key: PublicKey) -> String {
    format!("{address},{KEY}{key}")
}

/// The endpoint that a network is opened for.
#[derive(Debug)]
pub(crate) struct EndpointParts {
    /// Greatest number of endpoints.
    pub(crate) size: usize,
    pub(crate) intake: Intake,
    pub(crate) pool: Arc<Pool>,
    /// Rate limits that the endpoint's sockets share with the network.
    pub(crate) budget: Arc<dyn Budget>,
}

/// Access of a process to a second network. It outlives the endpoints that use it.
pub(crate) trait SecondNetworkAccess: Debug + Send + Sync {
    /// Returns the addresses at which other processes reach this one by it, separated by commas.
    fn address(&self) -> String;
    /// Returns whether an address has a part that this network uses.
    fn has_address(&self, address: &str) -> bool;
    /// Connects to the process with this key, sends a greeting as an encoded frame, and returns the frame with
    /// which the process answers.
    ///
    /// # Errors
    /// [`CommError::Io`] if it is not reached; other errors if it is another process, or refuses this one.
    fn ask(self: Arc<Self>, to: &ConnectTarget<'_>, question: Vec<u8>) -> Result<Vec<u8>, CommError>;
    /// Opens the network for an endpoint.
    fn open(self: Arc<Self>, parts: EndpointParts) -> Arc<dyn SecondNetwork>;
}

/// The process that a connection is made to.
#[derive(Clone, Copy)]
pub(crate) struct ConnectTarget<'a> {
    /// Its addresses, separated by commas.
    pub(crate) address: &'a str,
    pub(crate) key: PublicKey,
    /// Security of the process that calls.
    pub(crate) security: &'a Security,
    pub(crate) until: Deadline,
}

/// Answers the greetings of processes that connect over a second network.
pub(crate) trait GreetingHandler: Send + Sync {
    /// Returns the frame that answers a greeting of the holder of `key`, or the reason to refuse it.
    fn answer(&self, greeting: &Control<'_>, key: PublicKey) -> Result<Vec<u8>, Refusal>;
    /// Called after the answer to a peer that is to be connected.
    fn peer_accepted(&self, peer: PeerId, listen: &str, key: PublicKey);
    /// Called once that peer has been connected, or its connection was lost before.
    fn connect_ended(&self, peer: PeerId);
}

/// A network that carries the frames of some of an endpoint's peers.
pub(crate) trait SecondNetwork: Debug + Send + Sync {
    /// Sends a frame. Never blocks.
    fn submit(&self, to: PeerId, tag: Tag, frame: Frame);
    /// Returns whether the peer is connected and accepts another frame of this tag. If not, the inbox is
    /// signalled once it does.
    fn has_room(&self, to: PeerId, tag: Tag) -> bool;
    /// Called after a frame of the peer was taken from the inbox.
    fn taken(&self, from: PeerId);
    /// Returns whether the peer has ever been connected by this network.
    fn is_connected(&self, peer: PeerId) -> bool;
    /// Returns measurements of the path to a peer.
    fn path(&self, peer: PeerId) -> Option<PathStats>;
    /// Returns the address by which a peer is reached now.
    fn path_to(&self, peer: PeerId) -> Option<String>;
    /// Returns the number of streams opened to a peer so far.
    fn streams_to(&self, peer: PeerId) -> u64;
    /// Connects to a peer as a member; `hello` is the encoded greeting.
    ///
    /// # Errors
    /// As [`SecondNetworkAccess::ask`]. A peer that has connected meanwhile is no error.
    fn call(&self, peer: PeerId, to: &ConnectTarget<'_>, hello: Vec<u8>) -> Result<(), CommError>;
    /// Accepts connections until [`SecondNetwork::stop_listening`].
    fn listen(&self, security: &Security, host: Weak<dyn GreetingHandler>);
    /// Ends [`SecondNetwork::listen`]; later connections are not answered.
    fn stop_listening(&self);
    /// Says goodbye to the peers and closes their connections.
    fn close(&self);
}
