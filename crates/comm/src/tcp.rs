//! Endpoints in separate processes, connected by TCP. A thread that waits for an operation polls all sockets of
//! its endpoint; a background thread does so only while operations are pending and no other thread waits.
//!
//! Processes of one machine can move to shared memory ([`SharedMemory`]). Their sockets stay open, to show when
//! a peer has gone.
//!
//! Memory is bounded: a sender stops after [`WINDOW`] frames of a tag that the receiver has not taken, and a
//! peer is not read while [`MAX_UNREAD_BYTES`] or more of its bytes are unread. This module is independent of
//! the collectives.

mod acceptor;
mod growing_network;
mod kernel;
mod large_packets;
mod link;
mod links;
mod listeners;
mod shared_memory;
mod pace;
mod rendezvous;
mod store;
mod stream;
mod target;

use std::net::{IpAddr, TcpStream};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use farflung_base::{Nanos, PeerId};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::sockopt;

use crate::endpoint::{Driver, Endpoint, Wake};
use crate::inbox::{BlockedFor, Inbox, WINDOW};
use crate::memory::real_start;
pub use crate::rate::{Pace, SLOWEST};
use crate::second_network::{EndpointParts, Intake, SecondNetwork, ring};
use crate::shared::RingWaker;
pub use crate::shared::SEGMENT_BYTES;
use crate::transport::{Tag, Transport};
use crate::{CommError, Frame, PathStats, Pool};
pub use growing_network::{Connected, GateConfig, GrowingNetwork, MemberList, WELCOME_BYTES};
use link::Link;
use links::{Links, PeerLinks};
use pace::Pacer;
pub use rendezvous::Config;
pub use shared_memory::SharedMemory;
pub use store::{STORE_BYTES, Store, StoreHost, VALUE_BYTES};
use stream::Stream;

/// Number of unread bytes of a peer from which nothing more is read from it.
pub const MAX_UNREAD_BYTES: usize = 4 * WINDOW * crate::FRAME_BYTES;

/// Number of rounds over shared memory alone, after which sockets are polled as well, since a peer may have
/// gone.
const SOCKET_TURN: u32 = 64;

/// Time limit for the goodbyes when an endpoint closes.
const GOODBYE_TIMEOUT: Duration = Duration::from_secs(5);

/// An endpoint in a network of processes.
pub type Tcp = Endpoint<TcpDriver>;

/// Driver of an endpoint over sockets to all peers.
#[derive(Debug)]
pub struct TcpDriver {
    me: PeerId,
    start: Instant,
    links: Arc<Links>,
    pacer: Arc<Pacer>,
    inbox: Arc<Inbox>,
    pool: Arc<Pool>,
    /// Wakes the thread that polls; processes that share memory with this one ring it too.
    bell: Arc<RingWaker>,
    shared_memory: SharedMemory,
    turns: AtomicU32,
    /// The network of the peers that sockets do not reach, if there is one.
    second_network: OnceLock<Arc<dyn SecondNetwork>>,
}

/// Meets the other ranks at the master or at the addresses of [`Config::peers`], and connects to each of them.
/// Rank `r` becomes `PeerId(r)`.
///
/// # Errors
/// If a setting or an address cannot be used, a rank refuses this one, ranks are missing at the deadline, or a
/// peer does not share memory with [`SharedMemory::Always`].
pub fn join(config: &Config) -> Result<Arc<Tcp>, CommError> {
    let io = |what| move |e: std::io::Error| CommError::io(what, &config.master, &e);
    let streams = rendezvous::meet(config)?;
    let near = streams
        .iter()
        .filter(|peer| peer.first().is_some_and(|stream| is_within_one_machine(&stream.socket)))
        .count();
    let crowded = std::thread::available_parallelism().is_ok_and(|cores| near >= cores.get());
    let shares = config.shared_memory;
    let tcp =
        open(PeerId(config.rank), streams.len(), crowded, shares).map_err(io("make a wake-up event for"))?;
    tcp.keep_pace(config.pace)?;
    for (peer, streams) in (0..).map(PeerId).zip(streams).filter(|(_, streams)| !streams.is_empty()) {
        tcp.driver().connect(peer, streams, crowded).map_err(io("socket of"))?;
    }
    if shares == SharedMemory::Always {
        tcp.driver().await_shared_memory(config.deadline.into())?;
    }
    Ok(tcp)
}

impl Tcp {
    /// Limits the rate at which this endpoint sends, from now on.
    ///
    /// # Errors
    /// [`CommError::Argument`] for a rate below [`SLOWEST`]; [`CommError::Io`] if no thread can be started.
    pub fn keep_pace(&self, pace: Pace) -> Result<(), CommError> {
        pace.check()?;
        let TcpDriver { links, pacer, inbox, bell, .. } = self.driver();
        let (links, inbox, bell) = (Arc::clone(links), Arc::clone(inbox), Arc::clone(bell));
        let wake = move || {
            inbox.signal();
            ring(&inbox, &bell);
        };
        let send = move |pacer: &Pacer| links.send_paced(pacer, wake);
        pacer.keep(pace, send).map_err(|e| CommError::io("start the pacing thread of", &self.me(), &e))
    }
}

/// Creates an endpoint in a network of `size` endpoints, without connections. `crowded` says that this machine
/// has more of them than cores.
fn open(me: PeerId, size: usize, crowded: bool, shared_memory: SharedMemory) -> std::io::Result<Arc<Tcp>> {
    let bell = Arc::new(RingWaker::new()?);
    let inbox = Inbox::new(size);
    let inbox = Arc::new(if crowded { inbox.without_polling() } else { inbox });
    let (pool, links, pacer) = (Pool::new(), Arc::new(Links::new(size)), Arc::new(Pacer::new(size)));
    let (start, turns) = (real_start(), AtomicU32::new(0));
    let (filled, leased) = (Arc::clone(&inbox), Arc::clone(&pool));
    let second_network = OnceLock::new();
    let driver = TcpDriver {
        me,
        start,
        links,
        pacer,
        inbox: filled,
        pool: leased,
        bell,
        shared_memory,
        turns,
        second_network,
    };
    Ok(Arc::new(Endpoint::new(me, driver, inbox, pool)))
}

fn is_within_one_machine(stream: &TcpStream) -> bool {
    let (own, peer) = (stream.local_addr(), stream.peer_addr());
    // A machine may have several addresses of the loopback, such as 127.0.0.1 and 127.0.1.1.
    let is_one = |own: IpAddr, peer: IpAddr| own == peer || own.is_loopback() && peer.is_loopback();
    own.is_ok_and(|own| peer.is_ok_and(|peer| is_one(own.ip(), peer.ip())))
}

/// Sets the options of a socket within one machine. There is no network queue, so congestion control has
/// nothing to estimate; one that paces would cost a timer for every few packets, so Reno is used. The send
/// buffer is small, so that bytes on their way stay in the caches until they are read. If ranks share cores,
/// switching between them costs more than that: the buffer is larger, so that a rank writes more per turn.
fn tune_within_one_machine(stream: &TcpStream, crowded: bool) {
    let frames = if crowded { 8 } else { 2 };
    // If Reno or this size is not available, the system's defaults are used.
    let _ = sockopt::set_tcp_congestion(stream, "reno");
    let _ = sockopt::set_socket_send_buffer_size(stream, frames * crate::FRAME_BYTES);
}

/// Returns the link to a peer that carries this tag; a peer that has connected has at least one.
fn of_tag(links: &[Link], tag: Tag) -> &Link {
    &links[tag.number as usize % links.len()]
}

impl TcpDriver {
    /// Connects a peer; fails if it has been connected before.
    fn connect(&self, peer: PeerId, streams: Vec<Stream>, crowded: bool) -> std::io::Result<()> {
        for Stream { socket, .. } in &streams {
            socket.set_nodelay(true)?;
            socket.set_nonblocking(true)?;
            if is_within_one_machine(socket) {
                tune_within_one_machine(socket, crowded);
            }
        }
        // Several connections are used for links with a large product of bandwidth and delay.
        let near = streams.len() == 1 && is_within_one_machine(&streams[0].socket);
        let bell = (near && self.shared_memory != SharedMemory::Never).then_some(&self.bell);
        if !self.links.connect(peer, Link::side_by_side(peer, streams, &self.pacer, bell)) {
            return Err(std::io::ErrorKind::AlreadyExists.into());
        }
        if let PeerLinks::Connected(links) = self.links.to(peer)
            && let Some(link) = links.first()
            && self.me > peer
            && near
        {
            link.offer(&self.pool);
        }
        self.inbox.peer_up(peer);
        self.unblock();
        Ok(())
    }

    /// Returns whether a peer has ever been connected.
    fn is_connected(&self, peer: PeerId) -> bool {
        self.links.has_connected(peer)
            || self.second_network().is_some_and(|second_network| second_network.is_connected(peer))
    }

    /// Returns the parts of this endpoint that a second network needs, for the peers that sockets do not reach.
    fn endpoint_parts(&self, size: usize) -> EndpointParts {
        let intake = Intake::new(Arc::clone(&self.inbox), Arc::clone(&self.bell));
        EndpointParts { size, intake, pool: Arc::clone(&self.pool), budget: Arc::clone(&self.pacer) as _ }
    }

    fn second_network(&self) -> Option<&Arc<dyn SecondNetwork>> {
        self.second_network.get()
    }

    /// Waits until all peers share memory with this process. Fails if a peer declines or has gone, or after
    /// `limit`.
    fn await_shared_memory(&self, limit: Nanos) -> Result<(), CommError> {
        let until = self.now().saturating_add(limit);
        loop {
            let open = |link: &&Link| link.negotiation_outcome() != Some(true);
            let all = self.links.all();
            let Some(apart) = all.iter().find(open) else { return Ok(()) };
            let left = until.saturating_sub(self.now());
            if apart.negotiation_outcome() == Some(false) || !apart.is_open() || left == Nanos::ZERO {
                return Err(CommError::NoSharedMemory { peer: apart.peer });
            }
            self.drive(left.min(Nanos::from_millis(20)));
        }
    }

    /// Moves frames that have arrived in shared memory to the inbox, and queued frames to shared memory.
    /// Returns whether frames have arrived, or operations have room again.
    fn take_shared(&self) -> bool {
        let mut moved = false;
        for link in self.links.all().open() {
            moved |= link.may_read(self.inbox.unread_bytes(link.peer))
                && link.take_shared(&self.inbox, &self.pool);
            if link.flush_shared() {
                self.inbox.signal();
                moved = true;
            }
            if !link.is_open() {
                self.links.drop_ended(link.peer);
            }
        }
        moved
    }

    /// Waits for at most `timeout` until a peer sends or can receive, and moves frames.
    fn drive(&self, timeout: Nanos) {
        let moved = self.take_shared();
        let brief = moved || timeout == Nanos::ZERO;
        let all = self.links.all();
        let by_sockets = all.open().any(|link| !link.shares());
        let turn = self.turns.fetch_add(1, Ordering::Relaxed).is_multiple_of(SOCKET_TURN);
        if brief && !by_sockets && !turn {
            return;
        }
        // A peer that sends after `sleep` rings the doorbell; `sleep` itself finds frames sent before.
        let sleeps = |link: &Link| !link.may_read(self.inbox.unread_bytes(link.peer)) || link.sleep();
        if brief || all.open().all(sleeps) {
            self.poll_sockets(if brief { Nanos::ZERO } else { timeout });
        }
        if !brief {
            all.open().for_each(Link::wake);
        }
    }

    /// Waits for sockets and the doorbell for at most `timeout`, and moves frames from and to sockets.
    fn poll_sockets(&self, timeout: Nanos) {
        let may_read = |link: &Link| link.may_read(self.inbox.unread_bytes(link.peer));
        // For bytes that an encrypted session has already read, the socket does not become readable.
        let has_more = |link: &&Link| link.is_open() && link.has_more() && may_read(link);
        let all = self.links.all();
        let links: Vec<&Link> = all.open().collect();
        let waits = !links.iter().any(has_more);
        let timeout = if waits { timeout.min(Nanos::from_millis(3_600_000)) } else { Nanos::ZERO };
        let wait = Timespec {
            tv_sec: (timeout.0 / 1_000_000_000).cast_signed(),
            tv_nsec: i64::from((timeout.0 % 1_000_000_000) as u32),
        };
        let mut polled = Vec::with_capacity(links.len());
        let mut fds = vec![PollFd::new(&*self.bell, PollFlags::IN)];
        for link in links {
            let mut flags = PollFlags::empty();
            flags.set(PollFlags::IN, may_read(link));
            flags.set(PollFlags::OUT, link.waits_for_socket());
            polled.push(link);
            fds.push(PollFd::from_borrowed_fd(link.socket().as_fd(), flags));
        }
        // If the poll is interrupted, the caller polls again.
        if poll(&mut fds, Some(&wait)).is_err() {
            return;
        }
        if !fds[0].revents().is_empty() {
            self.bell.reset();
        }
        let broken = PollFlags::ERR | PollFlags::HUP;
        for (link, fd) in polled.iter().zip(&fds[1..]) {
            let got = fd.revents();
            if got.intersects(PollFlags::OUT | broken) && link.flush() {
                self.inbox.signal();
            }
            if got.intersects(PollFlags::IN | broken) || has_more(link) {
                link.read(&self.inbox, &self.pool);
            }
            if !link.is_open() {
                self.links.drop_ended(link.peer);
            }
        }
    }
}

impl Driver for TcpDriver {
    fn submit(&self, to: PeerId, tag: Tag, _: Nanos, frame: Frame) {
        match self.links.to(to) {
            PeerLinks::Connected(links) => {
                let link = of_tag(&links, tag);
                link.push(tag, frame);
                if link.wants_to_write() {
                    self.unblock();
                }
            }
            PeerLinks::Never => {
                if let Some(second_network) = self.second_network() {
                    second_network.submit(to, tag, frame);
                }
            }
            PeerLinks::Ended => {}
        }
    }
    fn submit_bytes(&self, to: PeerId, tag: Tag, _: Nanos, check: u32, bytes: &[u8], pool: &Arc<Pool>) {
        match self.links.to(to) {
            PeerLinks::Connected(links) => {
                let link = of_tag(&links, tag);
                link.push_bytes(tag, check, bytes, pool);
                if link.wants_to_write() {
                    self.unblock();
                }
            }
            PeerLinks::Never => {
                if let Some(second_network) = self.second_network() {
                    second_network.submit(to, tag, pool.copy_of(bytes, check));
                }
            }
            PeerLinks::Ended => {}
        }
    }
    fn has_room(&self, to: PeerId, tag: Tag) -> bool {
        // A peer that has not connected yet is waited for: a frame sent now would be lost, and later frames
        // would be taken for it. A send to a peer that has gone fails, so it need not wait.
        match self.links.to(to) {
            PeerLinks::Connected(links) => of_tag(&links, tag).has_room(tag),
            PeerLinks::Never => self.second_network().is_some_and(|network| network.has_room(to, tag)),
            PeerLinks::Ended => true,
        }
    }
    fn is_reached(&self, to: PeerId) -> bool {
        self.is_connected(to)
    }
    fn taken(&self, from: PeerId, tag: Tag, _: usize) {
        match self.links.to(from) {
            PeerLinks::Connected(links) => {
                let link = of_tag(&links, tag);
                let resumes = link.taken(tag, &self.inbox);
                if resumes || link.wants_to_write() {
                    self.unblock();
                }
            }
            PeerLinks::Never => {
                if let Some(second_network) = self.second_network() {
                    second_network.taken(from);
                }
            }
            PeerLinks::Ended => {}
        }
    }
    fn now(&self) -> Nanos {
        self.start.elapsed().into()
    }
    fn block(&self, inbox: &Inbox, seen: u64, until: Nanos, role: BlockedFor) -> Wake {
        inbox.park(seen, role, || until.saturating_sub(self.now()), Some(&|left| self.drive(left)));
        Wake::Moved
    }
    fn path(&self, peer: PeerId) -> Option<PathStats> {
        match self.links.to(peer) {
            PeerLinks::Connected(links) => links.iter().map(Link::path).reduce(PathStats::merged_with),
            PeerLinks::Never => self.second_network()?.path(peer),
            PeerLinks::Ended => None,
        }
    }
    fn cause_of_silence(&self) -> Option<String> {
        let all = self.links.all();
        // To ask for the cause takes time: if a machine is lost, all links to it are silent.
        let silent = all.open().filter(|link| large_packets::is_unconfirmed(link.socket()));
        silent.take(2).find_map(Link::cause_of_silence)
    }
    fn unblock(&self) {
        ring(&self.inbox, &self.bell);
    }
    fn has_background(&self) -> bool {
        true
    }
    fn close(&self, _: &Inbox) {
        // If this endpoint ends because of packets that do not arrive, this warns the user.
        self.cause_of_silence();
        let until = Nanos::from(GOODBYE_TIMEOUT).saturating_add(self.now());
        self.links.all().open().for_each(Link::say_goodbye);
        let unsent = |link: &Link| link.wants_to_write() || link.has_queued();
        while self.links.all().open().any(unsent) && self.now() < until {
            self.drive(Nanos::from_millis(20));
        }
        self.links.all().open().for_each(Link::end_writing);
        // Closing a socket with unread bytes resets it; the peer might then lose the last bytes sent by this
        // side.
        let grace = self.now().saturating_add(Nanos::from_millis(200)).min(until);
        while self.links.all().open().next().is_some() && self.now() < grace {
            self.drive(grace.saturating_sub(self.now()));
        }
        if let Some(second_network) = self.second_network() {
            second_network.close();
        }
        self.pacer.close();
    }
}
