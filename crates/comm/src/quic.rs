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
mod handshake_stream;
mod meet;
mod pacer;
mod peer;
mod relay;

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::{Duration, Instant};

use farflung_base::{Nanos, PeerId};
use tokio::runtime::{Builder, Handle, Runtime};

use crate::endpoint::{Driver, Endpoint, Wake};
use crate::inbox::{BlockedFor, Inbox};
use crate::memory::real_start;
use crate::secure::Security;
use crate::tcp::Pace;
use crate::transport::Tag;
use crate::{CommError, Frame, PathStats, Pool};
use pacer::Pacer;
use peer::Peer;
pub use relay::{Relay, RelayConfig};

/// Time limit for the goodbyes when an endpoint closes.
const GOODBYE_TIMEOUT: Duration = Duration::from_secs(5);
/// Time limit for closing sockets and connections to relays after that.
const CLOSING: Duration = Duration::from_secs(2);

/// Default time after which a silent peer counts as lost. QUIC cannot distinguish a killed process from an
/// unreachable one, so this is a compromise. A relay that is away for 4 s interrupts for 8 s, since attempts to
/// reconnect to it are made at growing intervals.
pub const IDLE_TIMEOUT: Duration = Duration::from_secs(20);

/// An endpoint in a network of processes.
pub type Quic = Endpoint<QuicDriver>;

/// The rank of this process, and how it reaches rank 0.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Config {
    /// Rank of this process. All ranks have the address and the key of rank 0.
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
    /// Creates the configuration of a member of the job `farflung`, with a minute for the rendezvous.
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
    /// Peers by rank; `None` for this endpoint itself.
    peers: Vec<Option<Arc<Peer>>>,
    endpoint: ::iroh::Endpoint,
    handle: Handle,
    runtime: Mutex<Option<Runtime>>,
}

/// Meets the other ranks and connects to each of them. Rank `r` becomes `PeerId(r)`.
///
/// # Errors
/// If an address is wrong, rank 0 refuses, or ranks are missing at the deadline; [`CommError::Unsealed`] if
/// `security` has no key of rank 0, by which it is reached; [`CommError::Argument`] for a setting out of range.
pub fn join(config: &Config) -> Result<Arc<Quic>, CommError> {
    meet::check(config)?;
    let runtime = Builder::new_multi_thread()
        .worker_threads(1)
        .thread_name("farflung-quic")
        .enable_all()
        .build()
        .map_err(|e| CommError::io("threads of", &"the QUIC transport", &e))?;
    let met = runtime.block_on(async {
        let endpoint = meet::open(config).await?;
        match meet::meet(config, &endpoint).await {
            Ok(connections) => Ok((endpoint, connections)),
            Err(error) => {
                let _ = tokio::time::timeout(CLOSING, endpoint.close()).await;
                Err(error)
            }
        }
    });
    let (endpoint, connections) = match met {
        Ok(met) => met,
        Err(error) => {
            runtime.shutdown_timeout(CLOSING);
            return Err(error);
        }
    };
    // Waiting threads sleep at once: polling would take the core from the thread that moves the frames.
    let inbox = Arc::new(Inbox::new(connections.len()).crowded());
    let (pool, handle) = (Pool::new(), runtime.handle().clone());
    let pacer = Arc::new(Pacer::new(config.pace, connections.len()));
    let me = PeerId(config.rank);
    let peers: Vec<_> = (0..)
        .map(PeerId)
        .zip(connections)
        .map(|(id, connection)| {
            let peer = Arc::new(Peer::new(id, connection?, Arc::clone(&inbox), Arc::clone(&pacer)));
            inbox.peer_up(id);
            peer.listen(&handle, &pool);
            Some(peer)
        })
        .collect();
    let (start, runtime) = (real_start(), Mutex::new(Some(runtime)));
    let driver = QuicDriver { start, peers, endpoint, handle, runtime };
    Ok(Arc::new(Endpoint::new(me, driver, inbox, pool)))
}

impl Quic {
    /// Returns the address at which a peer is reached now, or that of a relay; `None` before it is known, and
    /// for a peer that is gone.
    #[must_use]
    pub fn path_to(&self, peer: PeerId) -> Option<String> {
        self.driver().peer(peer).and_then(Peer::path)
    }

    /// Ends without notifying the peers, like a killed process.
    pub fn vanish(&self) {
        let runtime = self.driver().runtime.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(runtime) = runtime {
            runtime.shutdown_background();
        }
    }

    /// Returns the number of streams that this endpoint has opened to a peer so far.
    #[must_use]
    pub fn streams_to(&self, peer: PeerId) -> u64 {
        self.driver().peer(peer).map_or(0, Peer::opened)
    }
}

impl QuicDriver {
    fn peer(&self, peer: PeerId) -> Option<&Peer> {
        self.peers.get(peer.index())?.as_deref()
    }
}

impl Driver for QuicDriver {
    fn submit(&self, to: PeerId, tag: Tag, _: Nanos, frame: Frame) {
        if let Some(Some(peer)) = self.peers.get(to.index()) {
            Peer::push(peer, &self.handle, tag, frame);
        }
    }
    fn has_room(&self, to: PeerId, tag: Tag) -> bool {
        self.peer(to).is_some_and(|peer| peer.has_room(tag))
    }
    fn taken(&self, from: PeerId, _: Tag, _: usize) {
        if let Some(peer) = self.peer(from) {
            peer.taken();
        }
    }
    fn now(&self) -> Nanos {
        self.start.elapsed().into()
    }
    fn block(&self, inbox: &Inbox, seen: u64, until: Nanos, role: BlockedFor) -> Wake {
        inbox.park(seen, role, || until.saturating_sub(self.now()), None);
        Wake::Moved
    }
    fn path(&self, peer: PeerId) -> Option<PathStats> {
        self.peer(peer).map(Peer::stats)
    }
    fn has_background(&self) -> bool {
        true
    }
    fn close(&self, _: &Inbox) {
        let Some(runtime) = self.runtime.lock().unwrap_or_else(PoisonError::into_inner).take() else {
            return;
        };
        let (told, closed) = mpsc::channel();
        let (peers, endpoint) = (self.peers.clone(), self.endpoint.clone());
        runtime.spawn(async move {
            let peers: Vec<Arc<Peer>> = peers.into_iter().flatten().collect();
            // All peers at once, so that one that does not read does not use up the time of the others.
            let leaving: Vec<_> = peers
                .iter()
                .map(|peer| {
                    let peer = Arc::clone(peer);
                    tokio::spawn(async move {
                        let _ = tokio::time::timeout(GOODBYE_TIMEOUT, peer.finish()).await;
                        peer.say_goodbye();
                    })
                })
                .collect();
            for leaving in leaving {
                // Does not wait forever: each task has a time limit.
                let _ = leaving.await;
            }
            let _ = tokio::time::timeout(CLOSING, endpoint.close()).await;
            let _ = told.send(());
        });
        let _ = closed.recv_timeout(GOODBYE_TIMEOUT + CLOSING + Duration::from_secs(1));
        runtime.shutdown_timeout(Duration::from_millis(100));
    }
}
