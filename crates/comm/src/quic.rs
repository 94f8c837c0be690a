//! Endpoints that reach each other from behind address translation: QUIC by the crate `iroh`, with hole
//! punching, relays that the user names, and addresses that may change during a run. A peer is identified by
//! its ed25519 key, that of its [`Identity`](crate::secure::Identity).
//!
//! Each (peer, tag) has a stream of its own, so a lost packet delays only one tag's frames. No public service
//! is used: the relays are those of [`Config::relays`] and [`Config::host`], and rank 0 distributes the
//! addresses.
//!
//! A tokio runtime with one thread moves the bytes; no public type mentions tokio. Backpressure is QUIC's flow
//! control of each stream: a stream is not read while [`WINDOW`](crate::WINDOW) of its frames have not been
//! taken.

mod address;
mod acceptor;
mod greet;
mod growing;
mod handshake_stream;
mod meet;
mod network;
mod pacer;
mod peer;
mod relay;
mod socket;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use farflung_base::{Nanos, PeerId};

use crate::endpoint::{Driver, Endpoint, Wake};
use crate::inbox::{BlockedFor, Inbox};
use crate::memory::real_start;
use crate::rate::Pace;
use crate::second_network::{EndpointParts, Intake, SecondNetwork as _};
use crate::secure::Security;
use crate::transport::Tag;
use crate::{CommError, Frame, PathStats, Pool};
pub use growing::SocketConfig;
use network::{Network, Shared};
use pacer::Limits;
pub use relay::{Relay, RelayConfig};
pub use socket::Socket;

/// Default time after which a silent peer counts as lost. A killed process that is reached directly is noticed
/// sooner, if its machine answers that its port is closed. Else QUIC cannot distinguish it from an unreachable
/// one, so this is a compromise. A relay that is away for 4 s interrupts for 8 s, since attempts to
/// reconnect to it are made at growing intervals.
pub const IDLE_TIMEOUT: Duration = Duration::from_secs(20);

/// An endpoint in a network of processes.
pub type Quic = Endpoint<QuicDriver>;

/// The rank of this process, and how it reaches rank 0.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Config {
    /// Rank of this process. All other ranks need the address and the key of rank 0.
    pub rank: u32,
    /// Number of ranks.
    pub world_size: u32,
    /// Addresses of rank 0, `host:port`, separated by commas. Also relays, `http://host:port` or
    /// `https://host:port`, as in [`Config::relays`]. Rank 0 listens at the port of the first address that is
    /// not a relay.
    pub host: String,
    /// Name of the job. Processes of other jobs are refused.
    pub job: String,
    /// Time limit for the whole rendezvous.
    pub deadline: Duration,
    /// Relays that this process may use, besides those of `host`: `http://host:port` for a [`Relay`],
    /// `https://host:port` for one with a certificate from a public authority. A relay sees which keys exchange
    /// how many bytes, but cannot read them.
    pub relays: Vec<String>,
    /// UDP address at which this process listens; by default all its addresses, or the loopback if rank 0 is
    /// there.
    pub listen: Option<SocketAddr>,
    /// Whether it may reach others directly; if not, only over relays.
    pub direct: bool,
    /// Key of this process, key of rank 0 (in a ticket), and the proof of the right to join.
    pub security: Security,
    /// Time after which a silent peer counts as lost, from 1 to 30 seconds. A running process sends something
    /// six times in this time. A relay may be away for a third of this time.
    pub patience: Duration,
    /// Limits of the rate at which it sends.
    pub pace: Pace,
}

impl Config {
    /// Creates the configuration of a rank of the job `farflung`, with a minute for the rendezvous.
    #[must_use]
    pub fn new(rank: u32, world_size: u32, host: impl Into<String>, security: Security) -> Self {
        Self {
            rank,
            world_size,
            host: host.into(),
            job: "farflung".to_owned(),
            deadline: Duration::from_mins(1),
            relays: Vec::new(),
            listen: None,
            direct: true,
            security,
            patience: IDLE_TIMEOUT,
            pace: Pace::default(),
        }
    }
}

/// Driver of an endpoint over connections to all peers.
#[derive(Debug)]
pub struct QuicDriver {
    start: Instant,
    network: Shared,
}

/// Meets the other ranks and connects to each of them. Rank `r` becomes `PeerId(r)`.
///
/// # Errors
/// If an address is wrong, a rank refuses this one, or ranks are missing at the deadline;
/// [`CommError::NoEncryptedConnection`] if `security` has no key of rank 0, by which it is reached;
/// [`CommError::Argument`] for a setting out of range.
pub fn join(config: &Config) -> Result<Arc<Quic>, CommError> {
    meet::check(config)?;
    let socket = Arc::new(Socket::new(&meet::opening(config)?)?);
    let (meets, endpoint) = (config.clone(), socket.endpoint().clone());
    let met = socket.wait(async move { meet::meet(&meets, &endpoint).await });
    let connections = met.unwrap_or(Err(CommError::Ended { op: "rendezvous" }))?;
    // Waiting threads sleep at once: polling would take the core from the thread that moves the frames.
    let size = connections.len();
    let inbox = Arc::new(Inbox::new(size).without_polling());
    let pool = Pool::new();
    let intake = Intake::new(Arc::clone(&inbox), None);
    let budget = Arc::new(Limits::new(config.pace, size));
    let shore = EndpointParts { size, intake, pool: Arc::clone(&pool), budget };
    let network = Network::new(socket, shore);
    for (id, connection) in (0..).map(PeerId).zip(connections) {
        if let Some(connection) = connection {
            network.connect(id, connection);
        }
    }
    let driver = QuicDriver { start: real_start(), network: Shared(Arc::new(network)) };
    Ok(Arc::new(Endpoint::new(PeerId(config.rank), driver, inbox, pool)))
}

impl Quic {
    /// Returns the address at which a peer is reached now, or that of a relay; `None` before it is known, and
    /// for a peer that is gone.
    #[must_use]
    pub fn path_to(&self, peer: PeerId) -> Option<String> {
        self.driver().network.path_to(peer)
    }

    /// Ends without notifying the peers, like a killed process.
    pub fn vanish(&self) {
        self.driver().network.0.socket().vanish();
    }

    /// Returns the number of streams that this endpoint has opened to a peer so far.
    #[must_use]
    pub fn streams_to(&self, peer: PeerId) -> u64 {
        self.driver().network.0.peer(peer).map_or(0, |peer| peer.opened())
    }
}

impl Driver for QuicDriver {
    fn submit(&self, to: PeerId, tag: Tag, _: Nanos, frame: Frame) {
        self.network.submit(to, tag, frame);
    }
    fn has_room(&self, to: PeerId, tag: Tag) -> bool {
        self.network.has_room(to, tag)
    }
    fn taken(&self, from: PeerId, _: Tag, _: usize) {
        self.network.taken(from);
    }
    fn now(&self) -> Nanos {
        self.start.elapsed().into()
    }
    fn block(&self, inbox: &Inbox, seen: u64, until: Nanos, role: BlockedFor) -> Wake {
        inbox.park(seen, role, || until.saturating_sub(self.now()), None);
        Wake::Moved
    }
    fn path(&self, peer: PeerId) -> Option<PathStats> {
        self.network.path(peer)
    }
    fn has_background(&self) -> bool {
        true
    }
    fn close(&self, _: &Inbox) {
        self.network.close();
        self.network.0.socket().close();
    }
}
