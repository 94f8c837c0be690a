//! The streams to a peer: one per tag, each with a task that writes it.
//!
//! Each collective has its own tag, and nothing tells when a tag is used for the last time. So at most [`OPEN`]
//! idle streams stay open; beyond that, the stream that was idle for the longest time is ended. If its tag is
//! used again, it gets a new stream, which is written after the peer has received all of the old one. So frames
//! of one (peer, tag) keep their order.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ::iroh::endpoint::SendStream;
use farflung_base::{Bytes, Nanos};
use tokio::runtime::Handle;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use super::Peer;
use crate::Frame;
use crate::inbox::WINDOW;
use crate::memory::real_start;
use crate::sizes::HEADER_BYTES;
use crate::transport::Tag;
use crate::wire::{self, Kind};

/// Number of open streams above which idle ones are ended.
const OPEN: usize = 64;
/// Greatest number of frames of a tag that may wait to be written.
const QUEUED: usize = WINDOW / 4;

/// A frame with its header.
type Framed = ([u8; HEADER_BYTES], Frame);

#[derive(Debug, Default)]
pub(super) struct Outgoing(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    /// Whether frames are no longer accepted.
    finished: bool,
    streams: BTreeMap<Tag, Stream>,
    /// Streams that were ended, with their numbers, until the peer has received all their frames.
    ending: BTreeMap<Tag, (u64, JoinHandle<()>)>,
    /// Number of frames pushed, used to find the stream that was idle for the longest time.
    used: u64,
    opened: u64,
    queue: Queue,
}

/// Bytes that wait to be written to all streams of a peer, and how long.
#[derive(Debug, Default)]
struct Queue {
    bytes: u64,
    /// Time since which bytes have been waiting; `None` if none wait.
    since: Option<Instant>,
    /// Total time that bytes waited before `since`.
    waited: Duration,
}

impl Queue {
    fn add(&mut self, bytes: usize) {
        self.bytes += bytes as u64;
        self.since.get_or_insert_with(real_start);
    }

    fn remove(&mut self, bytes: usize) {
        self.bytes = self.bytes.saturating_sub(bytes as u64);
        if self.bytes == 0 {
            self.waited = self.waiting();
            self.since = None;
        }
    }

    /// Returns the total time that bytes have waited so far.
    fn waiting(&self) -> Duration {
        self.waited + self.since.map_or(Duration::ZERO, |since| since.elapsed())
    }
}

/// A stream that is open, or will be opened once the old one of its tag has ended.
#[derive(Debug)]
struct Stream {
    frames: mpsc::UnboundedSender<Framed>,
    /// Number of frames not written yet.
    queued: Arc<AtomicUsize>,
    writer: JoinHandle<()>,
    number: u64,
    used: u64,
}

impl Outgoing {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn opened(&self) -> u64 {
        self.lock().opened
    }

    /// Returns the bytes that wait to be written, and the total time since the connection began during which
    /// there were any.
    pub(super) fn waiting(&self) -> (Bytes, Nanos) {
        let state = self.lock();
        (Bytes(state.queue.bytes), state.queue.waiting().into())
    }

    fn written(&self, bytes: usize) {
        self.lock().queue.remove(bytes);
    }

    pub(super) fn has_room(&self, tag: Tag) -> bool {
        self.lock().streams.get(&tag).is_none_or(|stream| stream.queued.load(Ordering::Acquire) < QUEUED)
    }

    pub(super) fn push(&self, peer: &Arc<Peer>, handle: &Handle, tag: Tag, frame: Frame) {
        let header = wire::encode(Kind::Data, tag, frame.check, frame.bytes());
        let mut state = self.lock();
        if state.finished {
            return;
        }
        state.used += 1;
        let now = state.used;
        if !state.streams.contains_key(&tag) {
            state.end_idle();
            let stream = state.open(peer, handle, tag);
            state.streams.insert(tag, stream);
        }
        let bytes = HEADER_BYTES + frame.len();
        if let Some(stream) = state.streams.get_mut(&tag) {
            stream.used = now;
            stream.queued.fetch_add(1, Ordering::AcqRel);
            // Fails if the writer has ended because the connection was lost. The inbox gets that from
            // `Peer::listen`.
            if stream.frames.send((header, frame)).is_ok() {
                state.queue.add(bytes);
            }
        }
    }

    /// Ends all streams. The returned tasks end once the peer has received all frames.
    pub(super) fn finish(&self) -> Vec<JoinHandle<()>> {
        let mut state = self.lock();
        state.finished = true;
        let streams = std::mem::take(&mut state.streams).into_values().map(|stream| stream.writer);
        streams.chain(std::mem::take(&mut state.ending).into_values().map(|(_, writer)| writer)).collect()
    }

    /// Removes a stream that was ended, after the peer has received all its frames.
    fn ended(&self, tag: Tag, number: u64) {
        let mut state = self.lock();
        if state.ending.get(&tag).is_some_and(|(ending, _)| *ending == number) {
            state.ending.remove(&tag);
        }
    }
}

impl State {
    /// Ends the streams that were idle for the longest time, to make room for another.
    fn end_idle(&mut self) {
        while self.streams.len() >= OPEN {
            let is_idle = |stream: &Stream| stream.queued.load(Ordering::Acquire) == 0;
            let idle = self.streams.iter().filter(|(_, stream)| is_idle(stream));
            let Some(tag) = idle.min_by_key(|(_, stream)| stream.used).map(|(tag, _)| *tag) else { return };
            if let Some(Stream { writer, number, .. }) = self.streams.remove(&tag) {
                self.ending.insert(tag, (number, writer));
            }
        }
    }

    fn open(&mut self, peer: &Arc<Peer>, handle: &Handle, tag: Tag) -> Stream {
        self.opened += 1;
        let number = self.opened;
        let before = self.ending.remove(&tag).map(|(_, writer)| writer);
        let (frames, coming) = mpsc::unbounded_channel();
        let queued = Arc::new(AtomicUsize::new(0));
        let (peer, waiting) = (Arc::clone(peer), Arc::clone(&queued));
        let writer = handle.spawn(async move {
            if let Some(before) = before {
                // Its result is ignored: the old stream has ended, successfully or not.
                let _ = before.await;
            }
            // Fails if the connection is lost, which `Peer::listen` reports.
            let _ = write(&peer, coming, &waiting).await;
            peer.outgoing().ended(tag, number);
        });
        Stream { frames, queued, writer, number, used: 0 }
    }
}

/// Writes the frames of one tag until there are no more, and waits until the peer has received all of them.
async fn write(
    peer: &Peer,
    mut frames: mpsc::UnboundedReceiver<Framed>,
    queued: &AtomicUsize,
) -> std::io::Result<()> {
    let (mut send, mut recv) = peer.connection().open_bi().await?;
    while let Some((header, frame)) = frames.recv().await {
        for bytes in [&header[..], frame.bytes()] {
            write_paced(peer, &mut send, bytes).await?;
        }
        if queued.fetch_sub(1, Ordering::AcqRel) == QUEUED {
            // The queue was full before this, so an operation may wait for room.
            peer.intake().signal();
        }
    }
    send.finish().map_err(std::io::Error::other)?;
    // The peer finishes its half once all frames are in its inbox.
    recv.read_to_end(0).await.map_err(std::io::Error::other)?;
    Ok(())
}

/// Writes bytes as fast as the rates allow.
async fn write_paced(peer: &Peer, send: &mut SendStream, mut bytes: &[u8]) -> std::io::Result<()> {
    while !bytes.is_empty() {
        let (now, later) = bytes.split_at(peer.admitted(bytes.len()).await);
        send.write_all(now).await?;
        peer.outgoing().written(now.len());
        bytes = later;
    }
    Ok(())
}
