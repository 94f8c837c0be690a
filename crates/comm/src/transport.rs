//! What a collective needs of a network: [`Transport`], and [`Port`], its non-blocking side as an operation
//! sees it.
//!
//! Reliable and ordered per (peer, tag). It knows bytes, never types, and no collective.

use std::fmt::Debug;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Waker};

use farflung_base::{Bytes, Nanos, PeerId, Pending, PendingOp};

use crate::started::Started;
use crate::{CommError, DownReason, Frame, PathStats};

/// Why nobody leaves or joins a job over MPI.
pub const MPI_IS_FIXED: &str = "MPI ends all processes of a job when one of them is lost, and takes no new ones in; \
                                members come and go over --transport tcp";

/// What a tag's number counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Channel {
    /// Messages of the user, by the user's own numbers.
    User = 0,
    /// Collectives, by their start order.
    Collective = 1,
    /// The news that a context has failed.
    Abort = 2,
    /// Whom a rank waits for, shortly before its deadline.
    Suspect = 3,
}

/// Which conversation a frame belongs to. Frames of one (peer, tag) arrive in the order they were sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Tag {
    /// The communicator.
    pub context: u64,
    /// What `number` counts.
    pub channel: Channel,
    /// Which one.
    pub number: u32,
}

impl Tag {
    /// Before all others.
    pub(crate) const FIRST: Self = Self { context: 0, channel: Channel::User, number: 0 };

    /// A user's message in `context`.
    #[must_use]
    pub const fn user(context: u64, number: u32) -> Self {
        Self { context, channel: Channel::User, number }
    }
}

/// From whom to receive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// One peer.
    Peer(PeerId),
    /// The first frame of any of these; ties go to whom is named first.
    Any(Vec<PeerId>),
}

/// What one peer and this endpoint have exchanged in one direction.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Payloads alone.
    pub payload: Bytes,
    /// Payloads with their framing, and control frames.
    pub wire: Bytes,
    /// Number of frames with a payload.
    pub frames: u64,
}

impl std::ops::AddAssign for Traffic {
    fn add_assign(&mut self, other: Self) {
        self.payload += other.payload;
        self.wire += other.wire;
        self.frames += other.frames;
    }
}

/// Both directions.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Stats {
    /// What this endpoint sent.
    pub sent: Traffic,
    /// What arrived here.
    pub received: Traffic,
}

/// Something that happened to a peer.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum PeerEvent {
    /// It is connected.
    Up(PeerId),
    /// It is gone for good.
    Down(PeerId, DownReason),
}

/// The non-blocking side of a transport, as one operation sees it while it is polled.
///
/// On the simulated network it carries the operation's own clock: taking a frame lifts it to the frame's
/// arrival, and what is sent departs at it.
pub trait Port {
    /// This endpoint.
    fn me(&self) -> PeerId;
    /// The operation's clock.
    fn now(&self) -> Nanos;
    /// Whether [`Port::send`] to this peer may be called now; where not, the task is polled again when it may.
    fn has_room(&mut self, to: PeerId, tag: Tag) -> bool;
    /// Hands a frame to the network.
    ///
    /// # Errors
    /// If the peer is known to be gone or the context was aborted.
    fn send(&mut self, to: PeerId, tag: Tag, frame: Frame) -> Result<(), CommError>;
    /// Sends `bytes`, at most [`FRAME_BYTES`](crate::FRAME_BYTES), as a frame. A network that takes them at
    /// once needs no buffer for them.
    ///
    /// # Errors
    /// As [`Port::send`].
    fn send_bytes(&mut self, to: PeerId, tag: Tag, check: u32, bytes: &[u8]) -> Result<(), CommError>;
    /// The next frame of this peer and tag, if it is there.
    ///
    /// # Errors
    /// If there is none and the peer is gone or the context was aborted, so that there never will be.
    fn take(&mut self, from: PeerId, tag: Tag) -> Result<Option<Frame>, CommError>;
    /// For whom `peer` has said that it waits, in this context if in any, and how far it is there.
    fn suspicion(&self, context: u64, peer: PeerId) -> Option<(PeerId, u32)>;
    /// Whose frames of `tag` have come since the last call, in any order, perhaps more than once: an operation
    /// that waits for many peers need not ask all of them for each frame. `None` where the network does not
    /// know, at the first call, and after bad news of any kind: then all have to be asked.
    fn news(&mut self, _tag: Tag) -> Option<Vec<PeerId>> {
        None
    }
    /// There will be no more calls of [`Port::news`] with this tag.
    fn end_news(&mut self, _tag: Tag) {}
}

/// An operation as a state machine that a transport drives.
pub trait Task: Send {
    /// Its name in errors.
    fn name(&self) -> &'static str;
    /// Goes on as far as it can without blocking; ready when it is over, well or not.
    fn poll(&mut self, port: &mut dyn Port) -> Poll<()>;
    /// Ends it with an error from outside: its deadline, a deadlock, cancellation. It is not polled again.
    fn fail(&mut self, error: CommError, port: &mut dyn Port);
    /// The peer without which it cannot go on.
    fn waits_for(&self) -> PeerId;
    /// How long it may take from its start; [`Nanos::MAX`] is for ever.
    fn limit(&self) -> Nanos;
    /// How long after its start it is [warned](Task::warn), where it wants to be.
    fn alarm(&self) -> Nanos {
        Nanos::MAX
    }
    /// Its deadline is near.
    fn warn(&mut self, _port: &mut dyn Port) {}
    /// Whether it is to end now.
    fn is_cancelled(&self) -> bool {
        false
    }
}

/// An endpoint of a network whose members are `PeerId(0)..PeerId(size)`.
///
/// Blocking happens in [`Transport::run`] and [`Pending::wait`] only, on the caller's thread, which then drives
/// the network itself.
pub trait Transport: Debug + Send + Sync {
    /// This endpoint's stable name.
    fn me(&self) -> PeerId;
    /// Number of endpoints, this one included.
    fn size(&self) -> usize;
    /// The clock: virtual, or since the endpoint was made.
    fn now(&self) -> Nanos;
    /// Lets `by` pass on a virtual clock: modelled compute. Real clocks pass by themselves.
    fn advance(&self, by: Nanos);
    /// A buffer of `len` bytes.
    fn lease(&self, len: usize) -> Frame;
    /// Runs an operation to its end on this thread.
    fn run(&self, task: &mut dyn Task);
    /// Starts an operation that proceeds whenever this endpoint waits for anything, and between waits where the
    /// network is real. Dropping the job cancels it.
    fn spawn(&self, task: Box<dyn Task>) -> Started;
    /// What was exchanged with one peer.
    fn traffic(&self, peer: PeerId) -> Stats;
    /// How the path to one peer does; none where the network does not measure it, and before the peer has come.
    fn path(&self, _peer: PeerId) -> Option<PathStats> {
        None
    }
    /// What happened to peers since the last call.
    fn events(&self) -> Vec<PeerEvent>;
    /// For whom a peer has last said that it waits: it says so when its own deadline is near.
    fn waits_of(&self, peer: PeerId) -> Option<PeerId>;
    /// Drops what has arrived for this context, and what still will.
    fn retire(&self, context: u64);
    /// Why the members of its communicators cannot change, where that is so: a job that loses one is over.
    fn fixed(&self) -> Option<&'static str> {
        None
    }
    /// Makes the threads that wait here look whether what they wait for is to end.
    fn waker(&self) -> &Waker;

    /// Sends one frame; done when the network has taken it.
    fn send(&self, to: PeerId, tag: Tag, frame: Frame, limit: Nanos) -> Pending<Result<(), CommError>> {
        let slot = Slot::default();
        let task = SendFrame { to, tag, frame: Some(frame), limit, slot: Arc::clone(&slot) };
        pending(self.spawn(Box::new(task)), slot)
    }

    /// Receives one frame of one peer or any of a set, and says whose it is.
    fn recv(&self, from: Source, tag: Tag, limit: Nanos) -> Pending<Result<(PeerId, Frame), CommError>> {
        let slot = Slot::default();
        let from = match from {
            Source::Peer(peer) => vec![peer],
            Source::Any(peers) => peers,
        };
        if from.is_empty() {
            return Pending::ready(Err(CommError::Argument { op: "recv", what: "sources", got: 0, want: 1 }));
        }
        let task = RecvFrame { from, tag, limit, slot: Arc::clone(&slot) };
        pending(self.spawn(Box::new(task)), slot)
    }

    /// All peers' traffic together.
    fn stats(&self) -> Stats {
        let mut all = Stats::default();
        for peer in 0..self.size() as u32 {
            let one = self.traffic(PeerId(peer));
            all.sent += one.sent;
            all.received += one.received;
        }
        all
    }
}

/// Where a task leaves its result for whoever holds the pending value.
pub(crate) type Slot<T> = Arc<Mutex<Option<Result<T, CommError>>>>;

pub(crate) fn put<T>(slot: &Slot<T>, result: Result<T, CommError>) {
    *slot.lock().unwrap_or_else(PoisonError::into_inner) = Some(result);
}

pub(crate) fn get<T>(slot: &Slot<T>) -> Result<T, CommError> {
    slot.lock()
        .unwrap_or_else(PoisonError::into_inner)
        .take()
        .expect("a task leaves its result when it is over")
}

/// The pending value of a spawned task.
pub(crate) fn pending<T: Send + 'static>(job: Started, slot: Slot<T>) -> Pending<Result<T, CommError>> {
    struct Op<T> {
        job: Started,
        slot: Slot<T>,
    }
    impl<T: Send> PendingOp<Result<T, CommError>> for Op<T> {
        fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<T, CommError>> {
            self.job.poll(cx).map(|()| get(&self.slot))
        }
        fn wait(self: Box<Self>) -> Result<T, CommError> {
            self.job.wait();
            get(&self.slot)
        }
        fn is_ready(&self) -> bool {
            self.job.is_over()
        }
    }
    Pending::new(Op { job, slot })
}

struct SendFrame {
    to: PeerId,
    tag: Tag,
    frame: Option<Frame>,
    limit: Nanos,
    slot: Slot<()>,
}

impl Task for SendFrame {
    fn name(&self) -> &'static str {
        "send"
    }
    fn poll(&mut self, port: &mut dyn Port) -> Poll<()> {
        if !port.has_room(self.to, self.tag) {
            return Poll::Pending;
        }
        let frame = self.frame.take().expect("a task is not polled after its end");
        put(&self.slot, port.send(self.to, self.tag, frame));
        Poll::Ready(())
    }
    fn fail(&mut self, error: CommError, _: &mut dyn Port) {
        put(&self.slot, Err(error));
    }
    fn waits_for(&self) -> PeerId {
        self.to
    }
    fn limit(&self) -> Nanos {
        self.limit
    }
}

struct RecvFrame {
    from: Vec<PeerId>,
    tag: Tag,
    limit: Nanos,
    slot: Slot<(PeerId, Frame)>,
}

impl Task for RecvFrame {
    fn name(&self) -> &'static str {
        "recv"
    }
    fn poll(&mut self, port: &mut dyn Port) -> Poll<()> {
        let mut gone = None;
        for &peer in &self.from {
            match port.take(peer, self.tag) {
                Ok(Some(frame)) => {
                    put(&self.slot, Ok((peer, frame)));
                    return Poll::Ready(());
                }
                Ok(None) => {}
                Err(e) => gone = gone.map_or(Some((e.clone(), 1)), |(first, n)| Some((first, n + 1))),
            }
        }
        match gone {
            // As long as one of the set can still answer, the loss of another is no failure.
            Some((error, n)) if n == self.from.len() => {
                put(&self.slot, Err(error));
                Poll::Ready(())
            }
            _ => Poll::Pending,
        }
    }
    fn fail(&mut self, error: CommError, _: &mut dyn Port) {
        put(&self.slot, Err(error));
    }
    fn waits_for(&self) -> PeerId {
        self.from[0]
    }
    fn limit(&self) -> Nanos {
        self.limit
    }
}
