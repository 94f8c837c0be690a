//! One socket to one peer, or the memory shared with it: sends frames from a queue, puts received frames into
//! the inbox, and exchanges credits in both directions.

mod memory;

use std::collections::VecDeque;
use std::io::{self, ErrorKind, IoSlice};
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use farflung_base::{Bytes, Nanos, PeerId};

use super::MAX_UNREAD_BYTES;
use super::kernel;
use super::large_packets;
use super::pace::Pacer;
use super::shared_memory::{Negotiation, SharedMemorySender};
use super::stream::{Stream, session_error};
use crate::control::Control;
use crate::credit::Counts;
use crate::inbox::{Inbox, WINDOW};
use crate::shared::{Consumer, RingWaker};
use crate::sizes::HEADER_BYTES;
use crate::transport::Tag;
use crate::wire::{self, Header, Kind, NO_TAG};
use crate::{DownReason, Frame, PathStats, Pool, WireError};

/// Bytes read from one socket before the others have their turn. Small enough that they are used while they are
/// in cache.
const BYTES_PER_TURN: usize = crate::FRAME_BYTES;
/// Smallest number of bytes that a frame counts for in a turn, however short it is.
const MIN_FRAME_COST: usize = BYTES_PER_TURN / 16;
/// Greatest number of frames written by one system call.
const FRAMES_PER_WRITE: usize = 4;
/// Length of a payload in bytes from which a received frame keeps its header, so that a rank that forwards the
/// frame need not compute its checksum.
const KEPT_HEADER_BYTES: usize = 4096;

#[derive(Debug)]
pub(super) struct Link {
    pub(super) peer: PeerId,
    stream: Stream,
    pacer: Arc<Pacer>,
    out: Mutex<SendState>,
    incoming: Mutex<ReceiveState>,
    taken: Mutex<Counts>,
    /// Number of links to the peer over which it has not said goodbye; shared by these links.
    staying: Arc<AtomicUsize>,
    /// Whether the link is open: the peer has not ended its side, and the socket has not failed.
    open: AtomicBool,
    /// Whether the queue is not empty.
    waiting: AtomicBool,
    /// Whether reading is paused because too many bytes of the peer are unread.
    paused: AtomicBool,
    /// Whether this side sends through shared memory.
    shares: AtomicBool,
    /// Whether an operation or a frame waits for room in shared memory.
    waits_for_memory: AtomicBool,
    /// Error of a write that failed although the peer had not closed the connection. Reading does not return it
    /// again.
    write_failure: OnceLock<ErrorKind>,
    /// Whether the user has been warned of packets that do not arrive.
    loss_is_told: AtomicBool,
}

#[derive(Debug, Default)]
struct SendState {
    queue: VecDeque<([u8; HEADER_BYTES], Option<Frame>)>,
    /// Bytes of the first frame in the queue that are written.
    at: usize,
    /// Frames for which the peer has sent no credit yet.
    in_flight: Counts,
    /// Time since which the queue is not empty; `None` if it is empty.
    waits_since: Option<Nanos>,
    /// Total time that the queue was not empty before `waits_since`.
    waited: Nanos,
    /// Where new frames go instead of the queue, once this side sends through shared memory.
    shared_sender: Option<SharedMemorySender>,
}

#[derive(Debug)]
struct ReceiveState {
    header: [u8; HEADER_BYTES],
    /// The next frame's header, which is read together with this frame's payload.
    next: [u8; HEADER_BYTES],
    /// Bytes read so far: of the header, then of the payload and the next header.
    have: usize,
    body: Option<(Header, Frame)>,
    /// Whether the socket returned less than requested, or its turn is over.
    enough: bool,
    said_goodbye: bool,
    negotiation: Negotiation,
    /// Frames that the peer sends through shared memory.
    shared_consumer: Option<Consumer>,
}

impl ReceiveState {
    const fn new(bell: Option<Arc<RingWaker>>) -> Self {
        Self {
            header: [0; HEADER_BYTES],
            next: [0; HEADER_BYTES],
            have: 0,
            body: None,
            enough: false,
            said_goodbye: false,
            negotiation: Negotiation::new(bell),
            shared_consumer: None,
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Link {
    /// Creates the links to one peer. `bell` is this endpoint's doorbell, if it is to share memory with the
    /// peer.
    pub(super) fn side_by_side(
        peer: PeerId,
        streams: Vec<Stream>,
        pacer: &Arc<Pacer>,
        bell: Option<&Arc<RingWaker>>,
    ) -> Vec<Self> {
        let staying = Arc::new(AtomicUsize::new(streams.len()));
        let link = |stream| Self::new(peer, stream, Arc::clone(pacer), Arc::clone(&staying), bell.cloned());
        streams.into_iter().map(link).collect()
    }

    fn new(
        peer: PeerId,
        stream: Stream,
        pacer: Arc<Pacer>,
        staying: Arc<AtomicUsize>,
        bell: Option<Arc<RingWaker>>,
    ) -> Self {
        Self {
            peer,
            stream,
            pacer,
            staying,
            out: Mutex::default(),
            incoming: Mutex::new(ReceiveState::new(bell)),
            taken: Mutex::default(),
            open: AtomicBool::new(true),
            waiting: AtomicBool::new(false),
            paused: AtomicBool::new(false),
            shares: AtomicBool::new(false),
            waits_for_memory: AtomicBool::new(false),
            write_failure: OnceLock::new(),
            loss_is_told: AtomicBool::new(false),
        }
    }

    pub(super) fn is_open(&self) -> bool {
        self.open.load(Ordering::Acquire)
    }

    pub(super) const fn socket(&self) -> &TcpStream {
        &self.stream.socket
    }

    /// Returns why data does not arrive at the peer, if the system shows a reason. The first time, also warns
    /// the user.
    pub(super) fn cause_of_silence(&self) -> Option<String> {
        let cause = large_packets::lost(self.socket())?;
        if !self.loss_is_told.swap(true, Ordering::Relaxed) {
            tracing::warn!("{}: {cause}: {}", self.peer, large_packets::ADVICE);
        }
        Some(cause)
    }

    pub(super) fn wants_to_write(&self) -> bool {
        self.waiting.load(Ordering::Acquire) || self.stream.holds()
    }

    /// Returns whether bytes wait for the socket rather than for the rate.
    pub(super) fn waits_for_socket(&self) -> bool {
        self.stream.holds() || self.wants_to_write() && self.pacer.wait(self.peer) == Nanos::ZERO
    }

    /// Returns whether the encrypted session holds bytes to be read, for which the socket does not become
    /// readable.
    pub(super) fn has_more(&self) -> bool {
        self.stream.has_more()
    }

    /// Returns whether to read while `held` bytes of the peer are unread, and records whether reading is
    /// paused.
    pub(super) fn may_read(&self, held: usize) -> bool {
        self.paused.store(held >= MAX_UNREAD_BYTES, Ordering::Release);
        held < MAX_UNREAD_BYTES
    }

    pub(super) fn has_room(&self, tag: Tag) -> bool {
        let out = lock(&self.out);
        if out.in_flight.of(tag) >= WINDOW {
            return false;
        }
        let Some(near) = &out.shared_sender else { return out.queue.is_empty() };
        if near.has_room() {
            return true;
        }
        // Sets the flag before checking once more, so that a thread that the peer wakes in between sees the
        // flag.
        self.waits_for_memory.store(true, Ordering::SeqCst);
        near.has_room()
    }

    /// Returns the header of a frame with this payload: with a checksum, unless the link is encrypted, since
    /// TLS records have tags of their own.
    fn header(&self, kind: Kind, tag: Tag, check: u32, payload: &[u8]) -> [u8; HEADER_BYTES] {
        if self.stream.is_encrypted() {
            wire::plain(kind, tag, check, payload.len())
        } else {
            wire::encode(kind, tag, check, payload)
        }
    }

    /// Queues a frame and writes as much as the socket accepts. With shared memory, hands the frame over there.
    pub(super) fn push(&self, tag: Tag, frame: Frame) {
        if self.shares() {
            let mut out = lock(&self.out);
            out.in_flight.count(tag);
            let header = wire::plain(Kind::Data, tag, frame.check, frame.len());
            self.share(&mut out, header, Some(frame));
            return;
        }
        let same = |header: &[u8; HEADER_BYTES]| {
            let (length, check) = (frame.len(), frame.check);
            wire::decode(header)
                .is_ok_and(|h| h == Header { kind: Kind::Data, tag, check, length, crc: h.crc })
        };
        let known = frame.came_with.as_deref().copied().filter(same);
        let header = known.unwrap_or_else(|| self.header(Kind::Data, tag, frame.check, frame.bytes()));
        let mut out = lock(&self.out);
        out.in_flight.count(tag);
        self.enqueue(&mut out, header, Some(frame));
    }

    /// Writes as much as the socket accepts directly from `bytes`, and queues a copy of the rest. With shared
    /// memory, hands the bytes over there as a frame.
    pub(super) fn push_bytes(&self, tag: Tag, check: u32, bytes: &[u8], pool: &Arc<Pool>) {
        if self.shares() {
            let mut out = lock(&self.out);
            out.in_flight.count(tag);
            let header = wire::plain(Kind::Data, tag, check, bytes.len());
            if !out.shared_sender.as_mut().is_some_and(|near| near.put(&header, bytes)) {
                self.share(&mut out, header, Some(pool.copy_of(bytes, check)));
            }
            return;
        }
        let header = self.header(Kind::Data, tag, check, bytes);
        let mut out = lock(&self.out);
        out.in_flight.count(tag);
        if !out.queue.is_empty() {
            out.queue.push_back((header, Some(pool.copy_of(bytes, check))));
            return;
        }
        let whole = HEADER_BYTES + bytes.len();
        let mut written = 0;
        while written < whole {
            let at = written.min(HEADER_BYTES);
            let rest = [&header[at..], &bytes[written - at..]];
            match self.write_some(&rest) {
                Ok(0) => break,
                Ok(count) => {
                    written += count;
                    // A plain socket that accepts a part accepts no more now; an encrypted session accepts some
                    // records at a time.
                    if !self.stream.is_encrypted() {
                        break;
                    }
                }
                // Reading finds out why the socket failed.
                Err(_) => return,
            }
        }
        if written < whole {
            let mut frame = pool.lease(bytes.len());
            let from = written.saturating_sub(HEADER_BYTES);
            frame.bytes_mut()[from..].copy_from_slice(&bytes[from..]);
            out.queue.push_back((header, Some(frame)));
            out.at = written;
            self.note_waiting(&mut out);
        }
    }

    /// Records whether frames wait.
    fn note_waiting(&self, out: &mut SendState) {
        let waits = !out.queue.is_empty();
        self.waiting.store(waits, Ordering::Release);
        if waits {
            out.waits_since.get_or_insert_with(|| self.pacer.now());
            self.pacer.ring();
        } else if let Some(since) = out.waits_since.take() {
            out.waited = out.waited.saturating_add(self.pacer.now().saturating_sub(since));
        }
    }

    /// Returns measurements of this link.
    pub(super) fn path(&self) -> PathStats {
        let (out, held) = (lock(&self.out), self.stream.held());
        let queued: usize =
            out.queue.iter().map(|(_, frame)| HEADER_BYTES + frame.as_ref().map_or(0, Frame::len)).sum();
        let waits = out.waits_since.filter(|_| self.is_open());
        let waits = waits.map_or(Nanos::ZERO, |since| self.pacer.now().saturating_sub(since));
        let known = kernel::ask(self.socket()).unwrap_or_default();
        PathStats {
            round_trip: known.round_trip,
            least_round_trip: known.least_round_trip,
            rate: known.rate,
            rate_is_least: known.rate_is_least,
            packets: known.packets,
            retransmissions: known.retransmissions,
            queued: Bytes((queued.saturating_sub(out.at) + held) as u64 + known.unsent),
            queued_for: out.waited.saturating_add(waits),
        }
    }

    fn enqueue(&self, out: &mut SendState, header: [u8; HEADER_BYTES], frame: Option<Frame>) {
        out.queue.push_back((header, frame));
        if out.queue.len() == 1 {
            self.write(out);
        }
    }

    /// Records that a frame of the tag was taken, and sends the credits that are due. Returns whether reading
    /// was paused and may continue.
    pub(super) fn taken(&self, tag: Tag, inbox: &Inbox) -> bool {
        let credits = lock(&self.taken).taken(tag);
        for credit in credits {
            inbox.count_control(self.peer, HEADER_BYTES, 0);
            self.send_empty(Kind::Credit, credit.tag, credit.frames);
        }
        self.paused.load(Ordering::Acquire) && inbox.unread_bytes(self.peer) < MAX_UNREAD_BYTES
    }

    /// Sends a frame without a payload.
    fn send_empty(&self, kind: Kind, tag: Tag, check: u32) {
        let mut out = lock(&self.out);
        if out.shared_sender.is_some() {
            self.share(&mut out, wire::plain(kind, tag, check, 0), None);
        } else {
            self.enqueue(&mut out, self.header(kind, tag, check, &[]), None);
        }
    }

    pub(super) fn say_goodbye(&self) {
        self.send_empty(Kind::Bye, NO_TAG, 0);
    }

    pub(super) fn end_writing(&self) {
        // An error is ignored: a socket that has failed needs no shutdown.
        let _ = self.socket().shutdown(Shutdown::Write);
    }

    /// Writes as much as the socket accepts; returns whether operations have room again.
    pub(super) fn flush(&self) -> bool {
        let mut out = lock(&self.out);
        // An error is ignored: reading finds out why the socket failed.
        let _ = self.stream.flush_now();
        self.write(&mut out);
        out.queue.is_empty()
    }

    fn write(&self, out: &mut SendState) {
        while !out.queue.is_empty() {
            let mut parts: [&[u8]; 2 * FRAMES_PER_WRITE] = [&[]; 2 * FRAMES_PER_WRITE];
            let mut used = 0;
            let mut skip = out.at;
            for (header, frame) in out.queue.iter().take(FRAMES_PER_WRITE) {
                let payload = frame.as_ref().map_or(&[][..], Frame::bytes);
                for part in [&header[..], payload] {
                    let rest = &part[skip.min(part.len())..];
                    skip -= skip.min(part.len());
                    if !rest.is_empty() {
                        parts[used] = rest;
                        used += 1;
                    }
                }
            }
            match self.write_some(&parts[..used]) {
                Ok(0) => break,
                Ok(written) => {
                    out.at += written;
                    while let Some((_, frame)) = out.queue.front() {
                        let whole = HEADER_BYTES + frame.as_ref().map_or(0, Frame::len);
                        if out.at < whole {
                            break;
                        }
                        out.at -= whole;
                        out.queue.pop_front();
                    }
                }
                Err(error) => {
                    // The socket may still hold data that the peer sent before, perhaps a goodbye. Reading
                    // finds out whether the peer has closed it.
                    if !matches!(error.kind(), ErrorKind::BrokenPipe | ErrorKind::ConnectionReset) {
                        self.write_failure.get_or_init(|| error.kind());
                    }
                    out.queue.clear();
                    out.at = 0;
                }
            }
        }
        self.note_waiting(out);
    }

    /// Writes as much as the socket accepts and the rate allows; at most `2 * FRAMES_PER_WRITE` parts.
    fn write_some(&self, parts: &[&[u8]]) -> io::Result<usize> {
        let all = parts.iter().map(|part| part.len()).sum();
        self.pacer.write(self.peer, all, |mut admitted| {
            let mut slices: [IoSlice<'_>; 2 * FRAMES_PER_WRITE] = std::array::from_fn(|_| IoSlice::new(&[]));
            for (slice, part) in slices.iter_mut().zip(parts) {
                let some = &part[..part.len().min(admitted)];
                admitted -= some.len();
                *slice = IoSlice::new(some);
            }
            self.stream.write_now(&slices[..parts.len()])
        })
    }

    /// Reads what has arrived into the inbox, until [`BYTES_PER_TURN`] bytes are read or no more are there.
    pub(super) fn read(&self, inbox: &Inbox, pool: &Arc<Pool>) {
        let mut incoming = lock(&self.incoming);
        incoming.enough = false;
        let mut bytes = 0;
        loop {
            match self.read_frame(&mut incoming, pool) {
                Ok(Some((header, frame))) => {
                    bytes += frame.len().max(MIN_FRAME_COST);
                    // A complete frame that was already read is still handled, because no poll would report it.
                    incoming.enough |= bytes >= BYTES_PER_TURN;
                    if let Err(e) = self.handle(&mut incoming, &header, frame, inbox, pool) {
                        self.end(inbox, DownReason::Protocol(e));
                        return;
                    }
                }
                Ok(None) => return,
                Err(ReadError::Wire(e)) => {
                    self.end(inbox, DownReason::Protocol(e));
                    return;
                }
                Err(ReadError::Closed) => {
                    // The peer may have given up because nothing arrived.
                    if self.write_failure.get().is_none() {
                        self.cause_of_silence();
                    }
                    self.take_all_shared(&mut incoming, inbox, pool);
                    if incoming.said_goodbye {
                        self.shut();
                    } else {
                        let failure = self.write_failure.get();
                        self.end(inbox, failure.map_or(DownReason::Ended, |kind| DownReason::Broken(*kind)));
                    }
                    return;
                }
                Err(ReadError::Io(e)) => {
                    self.take_all_shared(&mut incoming, inbox, pool);
                    let reason = session_error(&e).map(|e| DownReason::SessionFailed(e.to_string()));
                    self.end(inbox, reason.unwrap_or_else(|| DownReason::Broken(e.kind())));
                    return;
                }
            }
        }
    }

    fn shut(&self) {
        self.open.store(false, Ordering::Release);
        self.waiting.store(false, Ordering::Release);
    }

    fn end(&self, inbox: &Inbox, reason: DownReason) {
        self.shut();
        if matches!(reason, DownReason::Protocol(_) | DownReason::SessionFailed(_)) {
            let _ = self.socket().shutdown(Shutdown::Both);
        }
        inbox.peer_down(self.peer, reason);
    }

    /// Returns the next complete frame; `None` if the socket has no more for now or the turn is over.
    fn read_frame(
        &self,
        incoming: &mut ReceiveState,
        pool: &Arc<Pool>,
    ) -> Result<Option<(Header, Frame)>, ReadError> {
        loop {
            let ReceiveState { header, next, have, body, enough, .. } = incoming;
            match body {
                None if *have == HEADER_BYTES => {
                    let decoded = wire::decode(header).map_err(ReadError::Wire)?;
                    *have = 0;
                    *body = Some((decoded, pool.lease(decoded.length)));
                }
                Some((decoded, _)) if *have >= decoded.length => {
                    *have -= decoded.length;
                    let (decoded, mut frame) = body.take().expect("the match has found a header");
                    let is_sealed = self.stream.is_encrypted();
                    if !is_sealed && wire::checksum(header, frame.bytes()) != decoded.crc {
                        return Err(ReadError::Wire(WireError::Checksum));
                    }
                    if !is_sealed && decoded.length >= KEPT_HEADER_BYTES {
                        frame.came_with = Some(Box::new(*header));
                    }
                    *header = *next;
                    return Ok(Some((decoded, frame)));
                }
                _ if *enough => return Ok(None),
                _ => {
                    let (first, second) = match body {
                        None => (&mut header[*have..], &mut [][..]),
                        Some((_, frame)) => (&mut frame.bytes_mut()[*have..], &mut next[..]),
                    };
                    let asked = first.len() + second.len();
                    match self.stream.read_now(first, second) {
                        Ok(0) => return Err(ReadError::Closed),
                        Ok(n) => {
                            *have += n;
                            *enough = n < asked;
                        }
                        Err(e) if e.kind() == ErrorKind::Interrupted => {}
                        Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(None),
                        Err(e) => return Err(ReadError::Io(e)),
                    }
                }
            }
        }
    }

    fn handle(
        &self,
        incoming: &mut ReceiveState,
        header: &Header,
        mut frame: Frame,
        inbox: &Inbox,
        pool: &Arc<Pool>,
    ) -> Result<(), WireError> {
        match header.kind {
            Kind::Data => {
                frame.check = header.check;
                inbox.deliver(self.peer, header.tag, frame);
            }
            Kind::Credit => {
                inbox.count_control(self.peer, 0, HEADER_BYTES);
                lock(&self.out).in_flight.sub(header.tag, header.check);
                inbox.signal();
            }
            Kind::Bye => {
                let again = std::mem::replace(&mut incoming.said_goodbye, true);
                // Frames may still be in flight on the other links to the peer.
                if !again && self.staying.fetch_sub(1, Ordering::AcqRel) == 1 {
                    inbox.peer_down(self.peer, DownReason::Left);
                }
            }
            Kind::Control => {
                let Control::SharedMemory(near) = Control::decode(frame.bytes())? else {
                    return Err(WireError::Malformed(
                        "control message: only messages about shared memory are allowed on a link",
                    ));
                };
                self.negotiate(incoming, near, pool)?;
                inbox.signal();
            }
        }
        Ok(())
    }
}

enum ReadError {
    Closed,
    Wire(WireError),
    Io(io::Error),
}
