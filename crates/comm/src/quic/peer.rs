//! One peer: its connection, the streams to it, and what is read from it.

mod incoming;
mod outgoing;

use std::io::ErrorKind;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use ::iroh::endpoint::{Connection, ConnectionError, Path};
use farflung_base::{Bytes, Nanos, PeerId};
use tokio::runtime::Handle;
use tokio::sync::Notify;

use super::pacer::Pacer;
use crate::inbox::{Inbox, WINDOW};
use crate::transport::{Channel, Tag};
use crate::{DownReason, FRAME_BYTES, Frame, PathStats, Pool, WireError};
use outgoing::Outgoing;

/// Bytes of a stream that may be on their way or unread. With more, a stream that lost every other packet
/// could have more gaps than iroh's QUIC keeps of a stream (`MAX_CHUNKS` of noq-proto, 1024), which ends the
/// connection.
pub(super) const STREAM_WINDOW: u32 = 2 << 20;
/// The same of all streams of a peer.
pub(super) const WINDOW_OF_ALL: u32 = (4 * WINDOW * FRAME_BYTES) as u32;
/// Streams of a peer that may be open at a time.
pub(super) const STREAMS: u32 = 1024;
/// Bytes of a peer that may lie in the inbox before its streams are read no further.
const HELD: usize = WINDOW_OF_ALL as usize;

/// The code with which a peer that leaves closes a connection.
const LEFT: u8 = 0;
/// The code after something that is no frame.
const PROTOCOL: u8 = 2;

/// The other end of a connection.
#[derive(Debug)]
pub(super) struct Peer {
    id: PeerId,
    connection: Connection,
    inbox: Arc<Inbox>,
    pacer: Arc<Pacer>,
    outgoing: Outgoing,
    /// Wakes readers that wait until frames are taken.
    space: Notify,
    /// Readers that wait.
    waiting: AtomicUsize,
    /// The shortest round trip that was seen, in ns; `u64::MAX` before there was one.
    least_round_trip: AtomicU64,
}

impl Peer {
    pub(super) fn new(id: PeerId, connection: Connection, inbox: Arc<Inbox>, pacer: Arc<Pacer>) -> Self {
        Self {
            id,
            connection,
            inbox,
            pacer,
            outgoing: Outgoing::default(),
            space: Notify::new(),
            waiting: AtomicUsize::new(0),
            least_round_trip: AtomicU64::new(u64::MAX),
        }
    }

    /// Waits until the rates admit some of so many bytes, and returns how many.
    pub(super) async fn admitted(&self, wanted: usize) -> usize {
        self.pacer.admitted(self.id, wanted).await
    }

    pub(super) const fn connection(&self) -> &Connection {
        &self.connection
    }

    pub(super) const fn outgoing(&self) -> &Outgoing {
        &self.outgoing
    }

    pub(super) fn inbox(&self) -> &Inbox {
        &self.inbox
    }

    /// Reads what it sends, and notices when the connection ends.
    pub(super) fn listen(self: &Arc<Self>, handle: &Handle, pool: &Arc<Pool>) {
        let (peer, pool) = (Arc::clone(self), Arc::clone(pool));
        handle.spawn(async move {
            while let Ok((send, recv)) = peer.connection.accept_bi().await {
                let (peer, pool) = (Arc::clone(&peer), Arc::clone(&pool));
                tokio::spawn(async move {
                    if let Err(error) = incoming::read(&peer, send, recv, &pool).await {
                        peer.break_off(error);
                    }
                });
            }
            if let Some(reason) = down(&peer.connection.closed().await) {
                peer.inbox.peer_down(peer.id, reason);
            }
            peer.space.notify_waiters();
        });
    }

    /// Ends the connection with a peer that broke the protocol.
    fn break_off(&self, error: WireError) {
        self.connection.close(PROTOCOL.into(), error.to_string().as_bytes());
        self.inbox.peer_down(self.id, DownReason::Protocol(error));
    }

    /// Sends a frame, in a stream of its tag.
    pub(super) fn push(self: &Arc<Self>, handle: &Handle, tag: Tag, frame: Frame) {
        self.outgoing.push(self, handle, tag, frame);
    }

    /// Whether the stream of this tag takes another frame.
    pub(super) fn has_room(&self, tag: Tag) -> bool {
        self.outgoing.has_room(tag)
    }

    /// Streams that were opened to it.
    pub(super) fn opened(&self) -> u64 {
        self.outgoing.opened()
    }

    /// A frame of it was taken from the inbox.
    pub(super) fn taken(&self) {
        if self.waiting.load(Ordering::SeqCst) > 0 {
            self.space.notify_waiters();
        }
    }

    /// Puts a frame into the inbox, once there is room for it.
    pub(super) async fn deliver(&self, tag: Tag, frame: Frame) {
        // News of failures are kept elsewhere, and must not wait behind frames that nobody takes.
        if matches!(tag.channel, Channel::User | Channel::Collective) && !self.takes(tag) {
            self.waiting.fetch_add(1, Ordering::SeqCst);
            loop {
                let freed = self.space.notified();
                tokio::pin!(freed);
                // Before the next look, so that a frame that is taken in between is noticed.
                freed.as_mut().enable();
                if self.takes(tag) {
                    break;
                }
                freed.await;
            }
            self.waiting.fetch_sub(1, Ordering::SeqCst);
        }
        self.inbox.deliver(self.id, tag, frame);
    }

    /// Whether the inbox has room; one that has ended drops everything.
    fn takes(&self, tag: Tag) -> bool {
        self.inbox.has_ended()
            || (self.inbox.queued(self.id, tag) < WINDOW && self.inbox.held(self.id) < HELD)
    }

    /// Waits until the peer has taken all that was sent. Frames that come after this call are not sent.
    pub(super) async fn finish(&self) {
        // The inbox has ended: readers that wait for room drop what they have.
        self.space.notify_waiters();
        for stream in self.outgoing.finish() {
            // A stream that broke has nothing to wait for.
            let _ = stream.await;
        }
    }

    /// Closes the connection.
    pub(super) fn say_goodbye(&self) {
        self.connection.close(LEFT.into(), b"left");
    }

    /// How the path does on which packets go now. QUIC does not tell its shortest round trip, so it is the
    /// shortest of those that were asked for here.
    pub(super) fn stats(&self) -> PathStats {
        let paths = self.connection.paths();
        let round_trip = paths.iter().find(Path::is_selected).map(|path| path.rtt());
        let round_trip = round_trip.map(Nanos::from);
        let last = round_trip.map_or(u64::MAX, |time| time.0);
        let least = self.least_round_trip.fetch_min(last, Ordering::Relaxed).min(last);
        let sent = self.connection.stats();
        let (queued, queued_for) = self.outgoing.waiting();
        let is_open = self.connection.close_reason().is_none();
        PathStats {
            round_trip,
            least_round_trip: round_trip.map(|_| Nanos(least)),
            packets: sent.sent_packets,
            retransmissions: sent.lost_packets,
            queued: if is_open { queued } else { Bytes(0) },
            queued_for,
        }
    }

    /// The address of the path on which packets go now: the peer's, or that of a relay.
    pub(super) fn path(&self) -> Option<String> {
        let paths = self.connection.paths();
        let path = paths.iter().find(Path::is_selected)?;
        Some(match path.remote_addr() {
            ::iroh::TransportAddr::Relay(url) => url.to_string().trim_end_matches('/').to_owned(),
            ::iroh::TransportAddr::Ip(address) => address.to_string(),
            other => format!("{other:?}"),
        })
    }
}

/// What the end of a connection means; `None` where this side ended it.
fn down(end: &ConnectionError) -> Option<DownReason> {
    Some(match end {
        ConnectionError::LocallyClosed => return None,
        ConnectionError::ApplicationClosed(close) if close.error_code == LEFT.into() => DownReason::Left,
        ConnectionError::TimedOut => DownReason::Broken(ErrorKind::TimedOut),
        ConnectionError::Reset => DownReason::Broken(ErrorKind::ConnectionReset),
        ConnectionError::ApplicationClosed(_) | ConnectionError::ConnectionClosed(_) => {
            DownReason::Broken(ErrorKind::ConnectionAborted)
        }
        other => DownReason::Sealed(other.to_string()),
    })
}
