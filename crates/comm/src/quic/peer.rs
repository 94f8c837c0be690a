//! One peer: its connection, the streams to it, and the streams read from it.

mod closed_port;
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
use crate::second_network::Intake;
use crate::transport::{Channel, Tag};
use crate::{DownReason, FRAME_BYTES, Frame, PathStats, Pool, WireError};
use outgoing::Outgoing;

/// Greatest number of bytes of a stream that may be in flight or unread. With a larger window, a stream that
/// lost every other packet could have more gaps than iroh's QUIC keeps for a stream (`MAX_CHUNKS` of noq-proto,
/// 1024), which ends the connection.
pub(super) const STREAM_WINDOW: u32 = 2 << 20;
/// Greatest number of bytes of all streams of a peer that may be in flight or unread.
pub(super) const WINDOW_OF_ALL: u32 = (4 * WINDOW * FRAME_BYTES) as u32;
/// Greatest number of streams of a peer that may be open at the same time.
pub(super) const STREAMS: u32 = 1024;
/// Number of unread bytes of a peer in the inbox from which its streams are not read.
const MAX_UNREAD_BYTES: usize = WINDOW_OF_ALL as usize;

/// Error code with which a peer that leaves closes the connection.
const LEFT: u8 = 0;
/// Error code with which a connection is closed after malformed data.
const PROTOCOL: u8 = 2;
/// Error code with which a connection to a process that has ended is closed.
const ENDED: u8 = 3;

/// The peer at the other end of a connection.
#[derive(Debug)]
pub(super) struct Peer {
    id: PeerId,
    connection: Connection,
    intake: Intake,
    pacer: Arc<Pacer>,
    outgoing: Outgoing,
    /// Wakes readers that wait for room in the inbox.
    space: Notify,
    /// Number of readers that wait for room.
    waiting: AtomicUsize,
    /// The shortest round trip measured, in ns; `u64::MAX` before the first.
    least_round_trip: AtomicU64,
}

impl Peer {
    pub(super) fn new(id: PeerId, connection: Connection, intake: Intake, pacer: Arc<Pacer>) -> Self {
        Self {
            id,
            connection,
            intake,
            pacer,
            outgoing: Outgoing::default(),
            space: Notify::new(),
            waiting: AtomicUsize::new(0),
            least_round_trip: AtomicU64::new(u64::MAX),
        }
    }

    /// Waits until the rates allow some of `wanted` bytes to be sent, and returns how many.
    pub(super) async fn admitted(&self, wanted: usize) -> usize {
        self.pacer.admitted(self.id, wanted).await
    }

    pub(super) const fn connection(&self) -> &Connection {
        &self.connection
    }

    const fn outgoing(&self) -> &Outgoing {
        &self.outgoing
    }

    pub(super) const fn intake(&self) -> &Intake {
        &self.intake
    }

    fn inbox(&self) -> &Inbox {
        self.intake.inbox()
    }

    /// Starts tasks that read the peer's streams, and report the end of the connection or the process. `ended`
    /// is called once the connection has ended.
    pub(super) fn listen(
        self: &Arc<Self>,
        handle: &Handle,
        pool: &Arc<Pool>,
        ended: impl FnOnce() + Send + 'static,
    ) {
        let (peer, pool) = (Arc::clone(self), Arc::clone(pool));
        let watched = Arc::clone(self);
        handle.spawn(async move {
            tokio::select! {
                _ = watched.connection.closed() => {}
                () = closed_port::wait(&watched.connection) => {
                    let reason = DownReason::Broken(ErrorKind::ConnectionRefused);
                    watched.intake.peer_down(watched.id, reason);
                    watched.connection.close(ENDED.into(), b"the process has ended");
                }
            }
        });
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
                peer.intake.peer_down(peer.id, reason);
            }
            ended();
            // Ends the tasks that write idle streams, and those that wait for room in the inbox.
            drop(peer.outgoing.finish());
            peer.space.notify_waiters();
        });
    }

    /// Closes the connection to a peer that violated the protocol.
    fn break_off(&self, error: WireError) {
        self.connection.close(PROTOCOL.into(), error.to_string().as_bytes());
        self.intake.peer_down(self.id, DownReason::Protocol(error));
    }

    /// Sends a frame on the stream of its tag.
    pub(super) fn push(self: &Arc<Self>, handle: &Handle, tag: Tag, frame: Frame) {
        self.outgoing.push(self, handle, tag, frame);
    }

    /// Returns whether the stream of this tag accepts another frame.
    pub(super) fn has_room(&self, tag: Tag) -> bool {
        self.outgoing.has_room(tag)
    }

    /// Returns the number of streams opened to the peer so far.
    pub(super) fn opened(&self) -> u64 {
        self.outgoing.opened()
    }

    /// Wakes waiting readers after a frame of the peer was taken from the inbox.
    pub(super) fn taken(&self) {
        if self.waiting.load(Ordering::SeqCst) > 0 {
            self.space.notify_waiters();
        }
    }

    /// Puts a frame into the inbox, once there is room for it.
    pub(super) async fn deliver(&self, tag: Tag, frame: Frame) {
        // Reports of failures are not stored with frames, and must not wait behind frames that no operation
        // takes.
        if matches!(tag.channel, Channel::User | Channel::Collective) && !self.takes(tag) {
            self.waiting.fetch_add(1, Ordering::SeqCst);
            loop {
                let freed = self.space.notified();
                tokio::pin!(freed);
                // Registers before checking again, so that a frame taken in between is noticed.
                freed.as_mut().enable();
                if self.takes(tag) {
                    break;
                }
                freed.await;
            }
            self.waiting.fetch_sub(1, Ordering::SeqCst);
        }
        self.intake.deliver(self.id, tag, frame);
    }

    /// Returns whether the inbox has room. An inbox that has ended always has room, and so has that of a peer
    /// that has gone, so that its readers do not wait forever.
    fn takes(&self, tag: Tag) -> bool {
        self.inbox().has_ended()
            || self.inbox().is_down(self.id)
            || (self.inbox().queued(self.id, tag) < WINDOW
                && self.inbox().unread_bytes(self.id) < MAX_UNREAD_BYTES)
    }

    /// Waits until the peer has received everything that was sent. Frames pushed after this call are not sent.
    pub(super) async fn finish(&self) {
        // The inbox has ended: readers that wait for room must continue.
        self.space.notify_waiters();
        for stream in self.outgoing.finish() {
            // A stream that failed does not have to be waited for.
            let _ = stream.await;
        }
    }

    /// Closes the connection.
    pub(super) fn say_goodbye(&self) {
        self.connection.close(LEFT.into(), b"left");
    }

    /// Returns measurements of the selected path. QUIC does not report the shortest round trip, so it is the
    /// shortest of those returned by this function.
    pub(super) fn stats(&self) -> PathStats {
        let paths = self.connection.paths();
        let selected = paths.iter().find(Path::is_selected).map(|path| path.stats());
        let round_trip = selected.as_ref().map(|path| Nanos::from(path.rtt));
        let rate = selected.as_ref().map(|path| path.cwnd as f64 / path.rtt.as_secs_f64());
        let rate = rate.filter(|rate| rate.is_finite()).map(|rate| rate as u64);
        let last = round_trip.map_or(u64::MAX, |time| time.0);
        let least = self.least_round_trip.fetch_min(last, Ordering::Relaxed).min(last);
        let sent = self.connection.stats();
        let (queued, queued_for) = self.outgoing.waiting();
        let is_open = self.connection.close_reason().is_none();
        PathStats {
            round_trip,
            least_round_trip: round_trip.map(|_| Nanos(least)),
            rate,
            rate_is_least: false,
            packets: sent.sent_packets,
            retransmissions: sent.lost_packets,
            queued: if is_open { queued } else { Bytes(0) },
            queued_for,
        }
    }

    /// Returns the address of the selected path: that of the peer, or of a relay.
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

/// Returns what the end of a connection means; `None` if this side closed it.
fn down(end: &ConnectionError) -> Option<DownReason> {
    Some(match end {
        ConnectionError::LocallyClosed => return None,
        ConnectionError::ApplicationClosed(close) if close.error_code == LEFT.into() => DownReason::Left,
        ConnectionError::TimedOut => DownReason::Broken(ErrorKind::TimedOut),
        ConnectionError::Reset => DownReason::Broken(ErrorKind::ConnectionReset),
        ConnectionError::ApplicationClosed(_) | ConnectionError::ConnectionClosed(_) => {
            DownReason::Broken(ErrorKind::ConnectionAborted)
        }
        other => DownReason::SessionFailed(other.to_string()),
    })
}
