//! The network interface of collectives: [`Transport`], and [`Port`], its non-blocking side for operations.
//!
//! Delivery is reliable, and ordered per (peer, tag). A transport sends bytes, and is independent of types and
//! collectives.

use std::fmt::Debug;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Waker};

use farflung_base::{Bytes, Nanos, PeerId, Pending, PendingOp};

use crate::native::NativeCollectives;
use crate::started::Started;
use crate::{CommError, DownReason, Frame, PathStats};

/// Reason why the members of an MPI job cannot change.
pub const MPI_IS_FIXED: &str = "MPI ends all processes of a job when one of them is lost, and does not admit \
                                new ones; use --transport tcp for members that join and leave";

/// Meaning of a tag's number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Channel {
    /// Messages of the user; the user chooses the numbers.
    User = 0,
    /// Collectives, numbered in the order of their start.
    Collective = 1,
    /// Reports that a context has failed or was cancelled; the number is the peer that failed or cancelled.
    Abort = 2,
    /// Reports the peer that a rank waits for, sent after three quarters of its deadline; the number is that
    /// peer.
    Suspect = 3,
}

/// The conversation that a frame belongs to. Frames of one (peer, tag) arrive in the order in which they were
/// sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Tag {
    /// Id of the communicator.
    pub context: u64,
    /// Meaning of `number`.
    pub channel: Channel,
    /// Number within the channel.
    pub number: u32,
}

impl Tag {
    /// The first tag in the order of tags.
    pub(crate) const FIRST: Self = Self { context: 0, channel: Channel::User, number: 0 };

    /// Returns the tag of a user's message in `context`.
    #[must_use]
    pub const fn user(context: u64, number: u32) -> Self {
        Self { context, channel: Channel::User, number }
    }
}

/// The peers from which a receive accepts a frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// One peer.
    Peer(PeerId),
    /// Any of these peers: the first frame to arrive is taken. If several frames have arrived, the one of the
    /// peer listed first is taken.
    Any(Vec<PeerId>),
}

/// Traffic with one peer in one direction.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Bytes of payloads.
    pub payload: Bytes,
    /// Bytes of payloads, their framing, and control frames.
    pub wire: Bytes,
    /// Number of frames, without control frames.
    pub frames: u64,
}

impl std::ops::AddAssign for Traffic {
    fn add_assign(&mut self, other: Self) {
        self.payload += other.payload;
        self.wire += other.wire;
        self.frames += other.frames;
    }
}

/// Traffic in both directions.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Stats {
    /// Traffic sent by this endpoint.
    pub sent: Traffic,
    /// Traffic received by this endpoint.
    pub received: Traffic,
}

/// A change of a peer's state.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum PeerEvent {
    /// The peer is connected.
    Up(PeerId),
    /// The peer is gone for good.
    Down(PeerId, DownReason),
}

/// The non-blocking side of a transport that an operation uses while it is polled.
///
/// On the simulated network it carries the operation's own clock. Taking a frame raises the clock to the
/// frame's arrival; frames sent depart at that clock.
pub trait Port {
    /// Returns the id of this endpoint.
    fn me(&self) -> PeerId;
    /// Returns the operation's clock.
    fn now(&self) -> Nanos;
    /// Returns whether [`Port::send`] to this peer may be called now. If not, the task is polled again once it
    /// may.
    fn has_room(&mut self, to: PeerId, tag: Tag) -> bool;
    /// Returns whether the network has ever reached this peer. In a network that grows, most ids have no
    /// endpoint yet. A frame to a peer that was not reached is lost.
    fn is_reached(&self, _to: PeerId) -> bool {
        true
    }
    /// Hands a frame to the network.
    ///
    /// # Errors
    /// If the peer is known to be gone, the context was aborted, or the endpoint has ended.
    fn send(&mut self, to: PeerId, tag: Tag, frame: Frame) -> Result<(), CommError>;
    /// Sends `bytes`, at most [`FRAME_BYTES`](crate::FRAME_BYTES), as a frame. A network that can send from
    /// `bytes` directly needs no buffer for them.
    ///
    /// # Errors
    /// Those of [`Port::send`].
    fn send_bytes(&mut self, to: PeerId, tag: Tag, check: u32, bytes: &[u8]) -> Result<(), CommError>;
    /// Takes the next frame of this peer and tag, if it has arrived.
    ///
    /// # Errors
    /// If there is none and none can arrive, because the peer is gone, the context was aborted, or the endpoint
    /// has ended.
    fn take(&mut self, from: PeerId, tag: Tag) -> Result<Option<Frame>, CommError>;
    /// Returns the peer for which `peer` waits, by its latest report, and the progress of `peer`. Without a
    /// report for this context, uses a report for another context.
    fn suspicion(&self, context: u64, peer: PeerId) -> Option<(PeerId, u32)>;
    /// Returns the peers from which frames of `tag` have arrived since the last call, in any order and possibly
    /// with repetitions. An operation that waits for many peers then needs to check only these. Returns `None`
    /// if the network does not keep this list, on the first call, and after any failure: then all peers must be
    /// checked.
    fn senders_with_new_frames(&mut self, _tag: Tag) -> Option<Vec<PeerId>> {
        None
    }
    /// Ends the use of [`Port::senders_with_new_frames`] with this tag.
    fn end_new_frame_tracking(&mut self, _tag: Tag) {}
}

/// An operation as a state machine that a transport polls.
pub trait Task: Send {
    /// Returns the name of the operation for errors.
    fn name(&self) -> &'static str;
    /// Proceeds as far as possible without blocking. Ready when the operation is complete, whether it succeeded
    /// or failed.
    fn poll(&mut self, port: &mut dyn Port) -> Poll<()>;
    /// Ends the operation with an error from outside: deadline, deadlock, cancellation, or the end of the
    /// endpoint. It is not polled afterwards.
    fn fail(&mut self, error: CommError, port: &mut dyn Port);
    /// Returns the peer that the operation waits for.
    fn waits_for(&self) -> PeerId;
    /// Returns the maximum duration of the operation; [`Nanos::MAX`] means no limit.
    fn limit(&self) -> Nanos;
    /// Returns how long after the operation's start [`Task::warn`] is called; [`Nanos::MAX`] means never.
    fn alarm(&self) -> Nanos {
        Nanos::MAX
    }
    /// Called once, at the time of [`Task::alarm`], when the deadline is near.
    fn warn(&mut self, _port: &mut dyn Port) {}
    /// Returns whether the operation is to end now.
    fn is_cancelled(&self) -> bool {
        false
    }
}

/// An endpoint of a network whose members are `PeerId(0)..PeerId(size)`.
///
/// Only [`Transport::run`] and [`Pending::wait`] block. They use the caller's thread, which then drives the
/// network itself.
pub trait Transport: Debug + Send + Sync {
    /// Returns the id of this endpoint, which does not change.
    fn me(&self) -> PeerId;
    /// Returns the number of endpoints, including this one.
    fn size(&self) -> usize;
    /// Returns the time: virtual, or since the endpoint was created.
    fn now(&self) -> Nanos;
    /// Advances a virtual clock by `by`, the time of modelled compute. Has no effect on real clocks.
    fn advance(&self, by: Nanos);
    /// Returns a buffer of `len` bytes with arbitrary contents.
    fn lease(&self, len: usize) -> Frame;
    /// Runs an operation to its end on this thread.
    fn run(&self, task: &mut dyn Task);
    /// Starts an operation. It proceeds whenever this endpoint waits for anything; on real networks also
    /// between waits. Dropping the returned handle cancels it.
    fn spawn(&self, task: Box<dyn Task>) -> Started;
    /// Returns the traffic with one peer.
    fn traffic(&self, peer: PeerId) -> Stats;
    /// Returns measurements of the path to one peer. `None` if the network does not measure it, or the peer has
    /// not connected yet.
    fn path(&self, _peer: PeerId) -> Option<PathStats> {
        None
    }
    /// Returns the changes of peers' states since the last call.
    fn events(&self) -> Vec<PeerEvent>;
    /// Returns the peer for which `peer` waits, by its latest report. A rank sends such a report when its own
    /// deadline is near.
    fn awaited_by(&self, peer: PeerId) -> Option<PeerId>;
    /// Drops the frames of this context, including those that arrive later.
    fn retire(&self, context: u64);
    /// Drops the frames of a peer that has gone for good. For peers from which no operation will receive any
    /// more; of other peers nothing is dropped.
    fn forget(&self, _peer: PeerId) {}
    /// Returns the reason why the members of this network cannot change. `None` if they can change: then a job
    /// continues after the loss of a member.
    fn fixed(&self) -> Option<&'static str> {
        None
    }
    /// Returns the collectives of the network's own library, if they were chosen in place of ours.
    fn native(&self) -> Option<&dyn NativeCollectives> {
        None
    }
    /// Returns a waker that makes waiting threads of this endpoint check whether their operations are
    /// cancelled.
    fn waker(&self) -> &Waker;

    /// Sends one frame. Completes when the network has accepted it.
    fn send(&self, to: PeerId, tag: Tag, frame: Frame, limit: Nanos) -> Pending<Result<(), CommError>> {
        let slot = Slot::default();
        let task = SendFrame { to, tag, frame: Some(frame), limit, slot: Arc::clone(&slot) };
        pending(self.spawn(Box::new(task)), slot)
    }

    /// Receives one frame of one peer, or of any of a set, and returns it with its sender.
    fn recv(&self, from: Source, tag: Tag, limit: Nanos) -> Pending<Result<(PeerId, Frame), CommError>> {
        let slot = Slot::default();
        let from = match from {
            Source::Peer(peer) => vec![peer],
            Source::Any(peers) => peers,
        };
        if from.is_empty() {
            return Pending::ready(Err(CommError::Argument {
                op: "recv",
                what: "number of sources (minimum)",
                got: 0,
                want: 1,
            }));
        }
        let task = RecvFrame { from, tag, limit, slot: Arc::clone(&slot) };
        pending(self.spawn(Box::new(task)), slot)
    }

    /// Returns the sum of all peers' traffic.
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

/// Place of a task's result, shared with the pending value.
pub(crate) type Slot<T> = Arc<Mutex<Option<Result<T, CommError>>>>;

pub(crate) fn put<T>(slot: &Slot<T>, result: Result<T, CommError>) {
    *slot.lock().unwrap_or_else(PoisonError::into_inner) = Some(result);
}

pub(crate) fn get<T>(slot: &Slot<T>) -> Result<T, CommError> {
    slot.lock()
        .unwrap_or_else(PoisonError::into_inner)
        .take()
        .expect("a task stores its result before it ends")
}

/// Creates the pending value of a spawned task.
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
            // As long as one peer of the set can still send, the loss of another is no failure.
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
