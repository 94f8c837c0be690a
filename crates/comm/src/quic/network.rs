//! The peers of an endpoint that are reached over QUIC. Peers may connect at any time. A connection that has
//! ended is dropped; the peer's number is not used again.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak, mpsc};
use std::time::Duration;

use ::iroh::endpoint::{Connection, VarInt};
use farflung_base::PeerId;
use tokio::task::{JoinHandle, JoinSet};

use super::acceptor::{Acceptor, AuthenticatedConnection};
use super::address::PeerAddresses;
use super::greet::greet;
use super::handshake_stream::{HandshakeStream, control};
use super::pacer::Pacer;
use super::peer::{Peer, STREAMS, WINDOW_OF_ALL};
use super::socket::Socket;
use crate::control::Control;
use crate::second_network::{ConnectTarget, EndpointParts, GreetingHandler, Intake, SecondNetwork};
use crate::secure::{Role, Security, refused};
use crate::transport::Tag;
use crate::{CommError, Frame, PathStats, Pool, WireError};

/// Time limit for the goodbyes when an endpoint closes.
const GOODBYE_TIMEOUT: Duration = Duration::from_secs(5);

/// The connection to one peer.
#[derive(Debug)]
enum PeerConnection {
    /// The peer has not connected.
    Never,
    Connected(Arc<Peer>),
    /// The peer has connected, and its connection has ended.
    Ended,
}

/// Connections of an endpoint to its peers, by number.
#[derive(Debug)]
pub(super) struct Network {
    socket: Arc<Socket>,
    peers: Vec<Mutex<PeerConnection>>,
    intake: Intake,
    pool: Arc<Pool>,
    pacer: Arc<Pacer>,
    listening: Mutex<Option<JoinHandle<()>>>,
}

impl Network {
    pub(super) fn new(socket: Arc<Socket>, parts: EndpointParts) -> Self {
        let EndpointParts { size, intake, pool, budget } = parts;
        let peers = (0..size).map(|_| Mutex::new(PeerConnection::Never)).collect();
        let (pacer, listening) = (Arc::new(Pacer::new(budget, size)), Mutex::default());
        Self { socket, peers, intake, pool, pacer, listening }
    }

    /// Adds the connection to a peer that has proven that it belongs to the job. Returns false if the peer has
    /// connected before.
    pub(super) fn connect(self: &Arc<Self>, id: PeerId, connection: Connection) -> bool {
        connection.set_receive_window(VarInt::from_u32(WINDOW_OF_ALL));
        connection.set_max_concurrent_bi_streams(VarInt::from_u32(STREAMS));
        let peer = Peer::new(id, connection, self.intake.clone(), Arc::clone(&self.pacer));
        let peer = Arc::new(peer);
        {
            let Some(place) = self.peers.get(id.index()) else { return false };
            let mut place = lock(place);
            if !matches!(*place, PeerConnection::Never) {
                return false;
            }
            *place = PeerConnection::Connected(Arc::clone(&peer));
        }
        self.intake.peer_up(id);
        let network = Arc::downgrade(self);
        let ended = move || {
            if let Some(place) = network.upgrade().as_ref().and_then(|network| network.peers.get(id.index()))
            {
                *lock(place) = PeerConnection::Ended;
            }
        };
        peer.listen(self.socket.handle(), &self.pool, ended);
        true
    }

    /// Returns a peer whose connection has not ended.
    pub(super) fn peer(&self, peer: PeerId) -> Option<Arc<Peer>> {
        match &*lock(self.peers.get(peer.index())?) {
            PeerConnection::Connected(peer) => Some(Arc::clone(peer)),
            _ => None,
        }
    }

    /// Returns whether a peer has ever connected.
    fn has_connected(&self, peer: PeerId) -> bool {
        self.peers.get(peer.index()).is_some_and(|place| !matches!(*lock(place), PeerConnection::Never))
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Connects to a process and greets it; returns the connection, and the frame of its answer.
pub(super) fn call(
    socket: &Arc<Socket>,
    to: &ConnectTarget<'_>,
    greeting: Vec<u8>,
) -> Result<(HandshakeStream, Vec<u8>), CommError> {
    let places = PeerAddresses::of_member(to.address)?;
    let address = (places.of(to.key, socket.is_direct())?, to.key);
    let (endpoint, security, until) = (socket.endpoint().clone(), to.security.clone(), to.until);
    let called = socket.wait(async move {
        let mut line = greet(&security, &endpoint, address, &greeting, until).await?;
        let answer = line.receive(HandshakeStream::LONGEST, until).await?;
        Ok((line, answer))
    });
    called.unwrap_or(Err(CommError::Ended { op: "call" }))
}

/// Answers a greeting: the question of a process that wants to join, or the hello of a peer, which is then
/// connected.
async fn receive(
    network: &Weak<Network>,
    host: &Weak<dyn GreetingHandler>,
    security: &Security,
    mut guest: AuthenticatedConnection,
) {
    let key = guest.line.key();
    let greeting = std::mem::take(&mut guest.greeting);
    let Ok(greeting) = control(&greeting, "a guest") else { return };
    let answer = match host.upgrade() {
        Some(host) => host.answer(&greeting, key),
        None => return,
    };
    let frame = match answer {
        Ok(frame) => frame,
        Err(refusal) => return guest.refuse(security, refusal),
    };
    let proven = guest.line.prove(security, Role::Server, Some(guest.expiry)).await;
    let said = match proven {
        Ok(()) => guest.line.send_frame(&frame).await,
        failed => failed,
    };
    let Control::Hello { rank, listen, .. } = greeting else {
        if said.is_ok() {
            guest.line.end().await;
        }
        return;
    };
    let (Some(host), Some(network)) = (host.upgrade(), network.upgrade()) else { return };
    if said.is_ok() {
        host.peer_accepted(PeerId(rank), listen, key);
        network.connect(PeerId(rank), guest.line.connection);
    }
    host.connect_ended(PeerId(rank));
}

/// A [`Network`] in an `Arc`: the tasks that accept peers and answer them hold weak references to it.
#[derive(Debug)]
pub(super) struct Shared(pub(super) Arc<Network>);

impl SecondNetwork for Shared {
    fn submit(&self, to: PeerId, tag: Tag, frame: Frame) {
        if let Some(peer) = self.0.peer(to) {
            peer.push(self.0.socket.handle(), tag, frame);
        }
    }
    fn has_room(&self, to: PeerId, tag: Tag) -> bool {
        self.0.peer(to).is_some_and(|peer| peer.has_room(tag))
    }
    fn taken(&self, from: PeerId) {
        if let Some(peer) = self.0.peer(from) {
            peer.taken();
        }
    }
    fn is_connected(&self, peer: PeerId) -> bool {
        self.0.has_connected(peer)
    }
    fn path(&self, peer: PeerId) -> Option<PathStats> {
        self.0.peer(peer).map(|peer| peer.stats())
    }
    fn path_to(&self, peer: PeerId) -> Option<String> {
        self.0.peer(peer).and_then(|peer| peer.path())
    }

    fn streams_to(&self, peer: PeerId) -> u64 {
        self.0.peer(peer).map_or(0, |peer| peer.opened())
    }

    fn call(&self, peer: PeerId, to: &ConnectTarget<'_>, hello: Vec<u8>) -> Result<(), CommError> {
        let (line, answer) = call(&self.0.socket, to, hello)?;
        let from = to.key.to_string();
        match control(&answer, &from)? {
            Control::Refuse(reason) => Err(refused(&from, reason)),
            Control::Welcome(by) if by == peer.0 => {
                self.0.connect(peer, line.connection);
                Ok(())
            }
            _ => Err(CommError::Handshake { peer: from, source: WireError::Malformed("answer") }),
        }
    }

    fn listen(&self, security: &Security, host: Weak<dyn GreetingHandler>) {
        let (network, security) = (Arc::downgrade(&self.0), security.clone());
        let endpoint = self.0.socket.endpoint().clone();
        let listening = self.0.socket.handle().spawn(async move {
            let mut door = Acceptor::open(&endpoint, &security);
            let mut answering = JoinSet::new();
            while let Some(guest) = door.next().await {
                while answering.try_join_next().is_some() {}
                let (network, host, security) = (network.clone(), host.clone(), security.clone());
                answering.spawn(async move { receive(&network, &host, &security, guest).await });
            }
        });
        *self.0.listening.lock().unwrap_or_else(PoisonError::into_inner) = Some(listening);
    }

    fn stop_listening(&self) {
        let listening = self.0.listening.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(listening) = listening {
            listening.abort();
        }
    }

    fn close(&self) {
        self.stop_listening();
        // The listener has stopped and the endpoint is closing, so no peer connects any more.
        let peers: Vec<Arc<Peer>> =
            (0..self.0.peers.len() as u32).filter_map(|peer| self.0.peer(PeerId(peer))).collect();
        let (told, closed) = mpsc::channel();
        self.0.socket.handle().spawn(async move {
            // All peers at once, so that one that does not read does not use up the time of the others.
            let mut leaving = JoinSet::new();
            for peer in peers {
                leaving.spawn(async move {
                    let _ = tokio::time::timeout(GOODBYE_TIMEOUT, peer.finish()).await;
                    peer.say_goodbye();
                });
            }
            while leaving.join_next().await.is_some() {}
            let _ = told.send(());
        });
        let _ = closed.recv_timeout(GOODBYE_TIMEOUT + Duration::from_secs(1));
    }
}
