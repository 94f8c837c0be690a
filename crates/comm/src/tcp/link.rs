//! One socket to one peer: frames out of a queue, frames into the inbox, credits both ways.

use std::collections::{BTreeMap, VecDeque};
use std::io::{self, ErrorKind, IoSlice, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use farflung_base::PeerId;

use super::{HELD, QUEUED};
use crate::inbox::{Inbox, WINDOW};
use crate::transport::Tag;
use crate::wire::{self, HEADER_BYTES, Header, Kind, NO_TAG};
use crate::{DownReason, Frame, Pool, WireError};

/// Frames taken for which one credit is sent.
const CREDIT: u32 = 8;
/// Frames read of one socket before the others have their turn.
const TURN: usize = 16;
/// Tags for which frames are counted.
const COUNTED: usize = 1024;

#[derive(Debug)]
pub(super) struct Link {
    pub(super) peer: PeerId,
    pub(super) stream: TcpStream,
    out: Mutex<Out>,
    incoming: Mutex<In>,
    taken: Mutex<Counts>,
    /// Until the peer has ended its side, or the socket broke.
    open: AtomicBool,
    /// The queue is not empty.
    waiting: AtomicBool,
    /// Too much of it lies unread.
    paused: AtomicBool,
}

/// Frames per tag. Old tags that were never counted down to nothing are forgotten.
#[derive(Debug, Default)]
struct Counts(BTreeMap<Tag, u32>);

impl Counts {
    fn add(&mut self, tag: Tag) -> &mut u32 {
        if self.0.len() > COUNTED {
            let first = Tag { number: 0, ..tag };
            let old = self.0.range(first..tag).next().map(|(old, _)| *old);
            old.or_else(|| self.0.keys().next().copied()).and_then(|old| self.0.remove(&old));
        }
        let count = self.0.entry(tag).or_insert(0);
        *count += 1;
        count
    }

    fn sub(&mut self, tag: Tag, by: u32) {
        if let Some(count) = self.0.get_mut(&tag) {
            *count = count.saturating_sub(by);
            if *count == 0 {
                self.0.remove(&tag);
            }
        }
    }
}

#[derive(Debug, Default)]
struct Out {
    queue: VecDeque<([u8; HEADER_BYTES], Option<Frame>)>,
    /// Bytes of the first that are written.
    at: usize,
    /// Frames without a credit.
    in_flight: Counts,
}

#[derive(Debug)]
struct In {
    header: [u8; HEADER_BYTES],
    /// Bytes of the header, then of the payload, that have been read.
    have: usize,
    body: Option<(Header, Frame)>,
    said_goodbye: bool,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Link {
    pub(super) fn new(peer: PeerId, stream: TcpStream) -> Self {
        Self {
            peer,
            stream,
            out: Mutex::default(),
            incoming: Mutex::new(In { header: [0; HEADER_BYTES], have: 0, body: None, said_goodbye: false }),
            taken: Mutex::default(),
            open: AtomicBool::new(true),
            waiting: AtomicBool::new(false),
            paused: AtomicBool::new(false),
        }
    }

    pub(super) fn is_open(&self) -> bool {
        self.open.load(Ordering::Acquire)
    }

    pub(super) fn wants_to_write(&self) -> bool {
        self.waiting.load(Ordering::Acquire)
    }

    /// Whether to read while `held` bytes lie unread.
    pub(super) fn may_read(&self, held: usize) -> bool {
        self.paused.store(held >= HELD, Ordering::Release);
        held < HELD
    }

    pub(super) fn has_room(&self, tag: Tag) -> bool {
        let out = lock(&self.out);
        out.queue.len() < QUEUED && out.in_flight.0.get(&tag).is_none_or(|&n| (n as usize) < WINDOW)
    }

    /// Queues a frame and writes what the socket takes.
    pub(super) fn push(&self, tag: Tag, frame: Frame) {
        let header = wire::encode(Kind::Data, tag, frame.check, frame.bytes());
        let mut out = lock(&self.out);
        out.in_flight.add(tag);
        self.enqueue(&mut out, header, Some(frame));
    }

    fn enqueue(&self, out: &mut Out, header: [u8; HEADER_BYTES], frame: Option<Frame>) {
        out.queue.push_back((header, frame));
        if out.queue.len() == 1 {
            self.write(out);
        }
    }

    /// A frame of the tag was taken: sends a credit for every eight. Returns whether a paused peer may be read again.
    pub(super) fn taken(&self, tag: Tag, inbox: &Inbox) -> bool {
        let mut taken = lock(&self.taken);
        if *taken.add(tag) >= CREDIT {
            taken.sub(tag, CREDIT);
            drop(taken);
            let header = wire::encode(Kind::Credit, tag, CREDIT, &[]);
            inbox.count_control(self.peer, HEADER_BYTES, 0);
            self.enqueue(&mut lock(&self.out), header, None);
        }
        self.paused.load(Ordering::Acquire) && inbox.held(self.peer) < HELD
    }

    pub(super) fn say_goodbye(&self) {
        let header = wire::encode(Kind::Bye, NO_TAG, 0, &[]);
        self.enqueue(&mut lock(&self.out), header, None);
    }

    pub(super) fn end_writing(&self) {
        // Where the socket is broken already there is nothing to end.
        let _ = self.stream.shutdown(Shutdown::Write);
    }

    /// Writes what the socket takes; returns whether there is room again for operations.
    pub(super) fn flush(&self) -> bool {
        let mut out = lock(&self.out);
        self.write(&mut out);
        out.queue.len() < QUEUED
    }

    fn write(&self, out: &mut Out) {
        while !out.queue.is_empty() {
            let mut slices: [IoSlice<'_>; 2 * QUEUED] = std::array::from_fn(|_| IoSlice::new(&[]));
            let mut used = 0;
            let mut skip = out.at;
            for (header, frame) in out.queue.iter().take(QUEUED) {
                let payload = frame.as_ref().map_or(&[][..], Frame::bytes);
                for part in [&header[..], payload] {
                    let rest = &part[skip.min(part.len())..];
                    skip -= skip.min(part.len());
                    if !rest.is_empty() {
                        slices[used] = IoSlice::new(rest);
                        used += 1;
                    }
                }
            }
            match (&self.stream).write_vectored(&slices[..used]) {
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
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) if e.kind() == ErrorKind::WouldBlock => break,
                Err(_) => {
                    // What the peer sent before may still lie in the socket, a goodbye perhaps: reading finds the reason.
                    out.queue.clear();
                    out.at = 0;
                }
            }
        }
        self.waiting.store(!out.queue.is_empty(), Ordering::Release);
    }

    /// Reads what is there, at most a turn's frames, into the inbox.
    pub(super) fn read(&self, inbox: &Inbox, pool: &std::sync::Arc<Pool>) {
        let mut incoming = lock(&self.incoming);
        for _ in 0..TURN {
            match self.read_frame(&mut incoming, pool) {
                Ok(Some((header, frame))) => {
                    if let Err(e) = self.handle(&mut incoming, &header, frame, inbox) {
                        self.end(inbox, DownReason::Protocol(e));
                        return;
                    }
                }
                Ok(None) => return,
                Err(End::Wire(e)) => {
                    self.end(inbox, DownReason::Protocol(e));
                    return;
                }
                Err(End::Closed) => {
                    let reason = if incoming.said_goodbye { DownReason::Left } else { DownReason::Ended };
                    self.end(inbox, reason);
                    return;
                }
                Err(End::Io(e)) => {
                    self.end(inbox, DownReason::Broken(e.kind()));
                    return;
                }
            }
        }
    }

    fn end(&self, inbox: &Inbox, reason: DownReason) {
        self.open.store(false, Ordering::Release);
        self.waiting.store(false, Ordering::Release);
        if matches!(reason, DownReason::Protocol(_)) {
            let _ = self.stream.shutdown(Shutdown::Both);
        }
        inbox.peer_down(self.peer, reason);
    }

    /// The next whole frame, or none where the socket has no more for now.
    fn read_frame(
        &self,
        incoming: &mut In,
        pool: &std::sync::Arc<Pool>,
    ) -> Result<Option<(Header, Frame)>, End> {
        loop {
            let In { header, have, body, .. } = incoming;
            let rest = match body {
                None => &mut header[*have..],
                Some((_, frame)) => &mut frame.bytes_mut()[*have..],
            };
            if !rest.is_empty() {
                match (&self.stream).read(rest) {
                    Ok(0) => return Err(End::Closed),
                    Ok(n) => *have += n,
                    Err(e) if e.kind() == ErrorKind::Interrupted => {}
                    Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(None),
                    Err(e) => return Err(End::Io(e)),
                }
            }
            match body {
                None if *have == HEADER_BYTES => {
                    let decoded = wire::decode(header).map_err(End::Wire)?;
                    *have = 0;
                    *body = Some((decoded, pool.lease(decoded.length)));
                }
                Some((decoded, _)) if *have == decoded.length => {
                    *have = 0;
                    let (decoded, frame) = body.take().expect("it was matched");
                    if wire::checksum(header, frame.bytes()) != decoded.crc {
                        return Err(End::Wire(WireError::Checksum));
                    }
                    return Ok(Some((decoded, frame)));
                }
                _ => {}
            }
        }
    }

    fn handle(
        &self,
        incoming: &mut In,
        header: &Header,
        mut frame: Frame,
        inbox: &Inbox,
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
                incoming.said_goodbye = true;
                inbox.peer_down(self.peer, DownReason::Left);
            }
            Kind::Control => return Err(WireError::Kind(header.kind as u8)),
        }
        Ok(())
    }
}

enum End {
    Closed,
    Wire(WireError),
    Io(io::Error),
}
