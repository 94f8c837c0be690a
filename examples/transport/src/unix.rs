//! A transport over pairs of Unix sockets. A transport is a [`Driver`]: it sends frames, and puts those that
//! arrive into its endpoint's [`Inbox`]. Collectives, deadlines and lost peers are handled above it.

use std::fmt;
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Instant;

use farflung_base::{Nanos, PeerId};
use farflung_comm::{
    BlockedFor, Channel, DownReason, Driver, Endpoint, FRAME_BYTES, Frame, Inbox, Pool, Tag, WINDOW, Wake,
};

/// Header of a frame: context, channel, number, check word, length.
const HEADER: usize = 8 + 1 + 4 + 4 + 4;

/// An endpoint over Unix sockets.
pub type Unix = Endpoint<UnixDriver>;

/// Creates `n` endpoints that are connected to each other, `PeerId(0)` first.
pub fn cluster(n: usize) -> io::Result<Vec<Arc<Unix>>> {
    let mut streams: Vec<Vec<Option<UnixStream>>> = (0..n).map(|_| (0..n).map(|_| None).collect()).collect();
    for a in 0..n {
        for b in 0..a {
            let (one, other) = UnixStream::pair()?;
            (streams[a][b], streams[b][a]) = (Some(one), Some(other));
        }
    }
    let start = Instant::now();
    let endpoint = |(me, streams): (usize, Vec<Option<UnixStream>>)| {
        let (inbox, pool) = (Arc::new(Inbox::new(n)), Pool::new());
        let links = streams.into_iter().enumerate().map(|(peer, stream)| {
            stream.map(|stream| Link::new(PeerId(peer as u32), stream, &inbox, &pool)).transpose()
        });
        let me = PeerId(me as u32);
        let driver =
            UnixDriver { me, links: links.collect::<io::Result<_>>()?, inbox: Arc::clone(&inbox), start };
        Ok(Arc::new(Endpoint::new(me, driver, inbox, pool)))
    };
    streams.into_iter().enumerate().map(endpoint).collect()
}

/// Connection to one peer: a thread that writes and a thread that reads.
struct Link {
    /// `None` once the endpoint is closed.
    queue: Mutex<Option<Sender<(Tag, Frame)>>>,
    /// Number of frames that the writing thread has not sent yet.
    queued: Arc<AtomicUsize>,
}

impl Link {
    fn new(peer: PeerId, stream: UnixStream, inbox: &Arc<Inbox>, pool: &Arc<Pool>) -> io::Result<Self> {
        let (queue, frames) = channel();
        let queued = Arc::new(AtomicUsize::new(0));
        let (reader, inbox, pool) = (stream.try_clone()?, Arc::clone(inbox), Arc::clone(pool));
        let (counter, woken) = (Arc::clone(&queued), Arc::clone(&inbox));
        thread::spawn(move || write_all(stream, frames, &counter, &woken));
        thread::spawn(move || {
            let reason = match read_all(reader, peer, &inbox, &pool) {
                Ok(()) => DownReason::Left,
                Err(error) => DownReason::Broken(error.kind()),
            };
            inbox.peer_down(peer, reason);
        });
        Ok(Self { queue: Mutex::new(Some(queue)), queued })
    }

    fn send(&self, tag: Tag, frame: Frame) {
        let queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(queue) = &*queue {
            self.queued.fetch_add(1, Ordering::Relaxed);
            // Fails if the writing thread has ended because the connection broke; the reading thread reports
            // the loss.
            let _ = queue.send((tag, frame));
        }
    }
}

/// Writes frames until the endpoint is closed or the connection breaks.
fn write_all(mut stream: UnixStream, frames: Receiver<(Tag, Frame)>, queued: &AtomicUsize, inbox: &Inbox) {
    for (tag, frame) in frames {
        let mut header = Vec::with_capacity(HEADER);
        header.extend(tag.context.to_le_bytes());
        header.push(tag.channel as u8);
        header.extend(tag.number.to_le_bytes());
        header.extend(frame.check.to_le_bytes());
        header.extend((frame.len() as u32).to_le_bytes());
        if stream.write_all(&header).and_then(|()| stream.write_all(frame.bytes())).is_err() {
            break;
        }
        queued.fetch_sub(1, Ordering::Relaxed);
        // An operation may wait for room.
        inbox.signal();
    }
    let _ = stream.shutdown(std::net::Shutdown::Write);
}

/// Puts the frames of a peer into the inbox until the peer closes its side.
fn read_all(mut stream: UnixStream, peer: PeerId, inbox: &Inbox, pool: &Arc<Pool>) -> io::Result<()> {
    let mut header = [0; HEADER];
    loop {
        // A peer that leaves closes between two frames.
        if stream.read(&mut header[..1])? == 0 {
            return Ok(());
        }
        stream.read_exact(&mut header[1..])?;
        let word = |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().expect("four bytes"));
        let context = u64::from_le_bytes(header[..8].try_into().expect("eight bytes"));
        let channels = [Channel::User, Channel::Collective, Channel::Abort, Channel::Suspect];
        let channel = channels.get(usize::from(header[8])).copied().ok_or(io::ErrorKind::InvalidData)?;
        let len = word(17) as usize;
        if len > FRAME_BYTES {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let mut frame = pool.lease(len);
        stream.read_exact(frame.bytes_mut())?;
        frame.check = word(13);
        inbox.deliver(peer, Tag { context, channel, number: word(9) }, frame);
    }
}

/// The network of one endpoint.
pub struct UnixDriver {
    me: PeerId,
    /// By peer; `None` for this endpoint itself.
    links: Vec<Option<Link>>,
    inbox: Arc<Inbox>,
    start: Instant,
}

impl fmt::Debug for UnixDriver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UnixDriver").field("me", &self.me).finish_non_exhaustive()
    }
}

impl Driver for UnixDriver {
    fn submit(&self, to: PeerId, tag: Tag, _: Nanos, frame: Frame) {
        match &self.links[to.index()] {
            Some(link) => link.send(tag, frame),
            None => self.inbox.deliver(self.me, tag, frame),
        }
    }

    fn has_room(&self, to: PeerId, _: Tag) -> bool {
        let queued = |link: &Link| link.queued.load(Ordering::Relaxed);
        self.links[to.index()].as_ref().is_none_or(|link| queued(link) < WINDOW || self.inbox.is_down(to))
    }

    fn taken(&self, _: PeerId, _: Tag, _: usize) {}

    fn now(&self) -> Nanos {
        self.start.elapsed().into()
    }

    fn block(&self, inbox: &Inbox, seen: u64, until: Nanos, role: BlockedFor) -> Wake {
        inbox.park(seen, role, || until.saturating_sub(self.now()), None);
        Wake::Moved
    }

    fn has_background(&self) -> bool {
        true
    }

    fn close(&self, _: &Inbox) {
        for link in self.links.iter().flatten() {
            link.queue.lock().unwrap_or_else(PoisonError::into_inner).take();
        }
    }
}
