//! Messages of any length as frames. All frames are full except the last, so no length is sent, and none has to
//! be trusted. If the sender cancels a message that it has sent in part, it ends it with an empty frame that is
//! marked as a cancellation. If the receiver cancels one that has arrived in part, it drops the rest when it
//! arrives. In both cases the tag can be used for the next message.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};

use farflung_base::{PeerId, Rank};

use crate::operation::{Operation, progress};
use crate::transport::{Port, Tag};
use crate::{CommError, FRAME_BYTES};

/// Maximum length of a message that is accepted, in bytes.
pub const MAX_MESSAGE: usize = 1 << 30;

/// Check word of the frame that ends a cancelled message.
const CANCELLATION: u32 = 1;

/// Cancelled receives of messages whose remaining frames must still be dropped, by sender and number of the
/// tag.
#[derive(Debug, Clone, Default)]
pub(crate) struct CancelledReceives(Arc<Mutex<BTreeSet<(PeerId, u32)>>>);

impl CancelledReceives {
    /// Returns the receiver of the next message of this peer and tag. It first drops the rest of a cancelled
    /// one, if any.
    pub(crate) fn next_receiver(&self, from: PeerId, tag: Tag) -> Incoming {
        let torn = self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(&(from, tag.number));
        Incoming { drops_rest: torn, ..Incoming::default() }
    }

    /// Records a cancelled receive, if a part of its message has arrived and the remaining frames have not.
    pub(crate) fn record(&self, from: PeerId, tag: Tag, incoming: &Incoming) {
        if incoming.drops_rest || !incoming.done && !incoming.bytes.is_empty() {
            self.0.lock().unwrap_or_else(PoisonError::into_inner).insert((from, tag.number));
        }
    }
}

/// Started messages by receiver and number of the tag, in the order of their start. Each is sent completely
/// before the next, even if the network gets room while waiting messages are being polled.
#[derive(Debug, Clone, Default)]
pub(crate) struct SendQueues(Arc<Mutex<Queues>>);

#[derive(Debug, Default)]
struct Queues {
    next: u64,
    waiting: BTreeMap<(PeerId, u32), VecDeque<u64>>,
}

impl SendQueues {
    fn lock(&self) -> MutexGuard<'_, Queues> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a message that starts now to its queue and returns its place. Dropping the place wakes `waker` if
    /// other messages wait behind it.
    pub(crate) fn enqueue(&self, to: PeerId, tag: Tag, waker: &Waker) -> QueueEntry {
        let mut queues = self.lock();
        let (key, number) = ((to, tag.number), queues.next);
        queues.next += 1;
        queues.waiting.entry(key).or_default().push_back(number);
        QueueEntry { queues: self.clone(), key, number, waker: waker.clone() }
    }
}

/// Place of a message in the queue of its receiver and tag. Dropping it removes the message from the queue.
pub(crate) struct QueueEntry {
    queues: SendQueues,
    key: (PeerId, u32),
    number: u64,
    waker: Waker,
}

impl QueueEntry {
    /// Returns whether all messages started earlier have ended.
    fn is_first(&self) -> bool {
        self.queues.lock().waiting.get(&self.key).is_some_and(|queue| queue.front() == Some(&self.number))
    }
}

impl Drop for QueueEntry {
    fn drop(&mut self) {
        let mut queues = self.queues.lock();
        let Some(queue) = queues.waiting.get_mut(&self.key) else { return };
        queue.retain(|&number| number != self.number);
        if queue.is_empty() {
            queues.waiting.remove(&self.key);
        } else {
            drop(queues);
            self.waker.wake_by_ref();
        }
    }
}

/// A message that is being sent.
#[derive(Default)]
pub(crate) struct Outgoing {
    pub(crate) bytes: Arc<Vec<u8>>,
    at: usize,
    done: bool,
}

impl Outgoing {
    pub(crate) fn new(bytes: Arc<Vec<u8>>) -> Self {
        Self { bytes, at: 0, done: false }
    }

    /// Sends as much as the network accepts; returns whether all is sent.
    pub(crate) fn poll(
        &mut self,
        port: &mut dyn Port,
        to: PeerId,
        tag: Tag,
        check: u32,
    ) -> Result<bool, CommError> {
        while !self.done && port.has_room(to, tag) {
            let part = &self.bytes[self.at..self.bytes.len().min(self.at + FRAME_BYTES)];
            self.at += part.len();
            self.done = part.len() < FRAME_BYTES;
            port.send_bytes(to, tag, check, part)?;
        }
        Ok(self.done)
    }

    /// Ends a message that was sent in part with a cancellation frame.
    fn send_cancellation(&self, port: &mut dyn Port, to: PeerId, tag: Tag) {
        if self.at > 0 && !self.done {
            // An error is ignored: a peer that is gone does not wait for this frame.
            let _ = port.send_bytes(to, tag, CANCELLATION, &[]);
        }
    }
}

/// A message that is being received.
#[derive(Default)]
pub(crate) struct Incoming {
    pub(crate) bytes: Vec<u8>,
    done: bool,
    /// Whether the rest of a cancelled message must be dropped first.
    drops_rest: bool,
}

impl Incoming {
    /// Takes the frames that have arrived; returns whether the message is complete.
    pub(crate) fn poll(
        &mut self,
        port: &mut dyn Port,
        op: &'static str,
        peer: PeerId,
        tag: Tag,
        check: u32,
    ) -> Result<bool, CommError> {
        while !self.done {
            let Some(frame) = port.take(peer, tag)? else { break };
            let last = frame.len() < FRAME_BYTES;
            if self.drops_rest {
                self.drops_rest = !last;
                continue;
            }
            if frame.check != check {
                if last {
                    self.bytes.clear();
                }
                return Err(match frame.check {
                    CANCELLATION => CommError::CancelledBy { op, peer },
                    _ => CommError::Mismatch { op, peer, want: 0, got: frame.len() },
                });
            }
            if self.bytes.len() + frame.len() > MAX_MESSAGE {
                return Err(CommError::TooLong { op, peer, max: MAX_MESSAGE });
            }
            self.bytes.extend_from_slice(frame.bytes());
            self.done = last;
        }
        Ok(self.done)
    }
}

/// Exchange of messages between all members: sends one to each and receives one from each, all at the same
/// time. The message to this rank itself is not sent over the network.
pub(crate) struct Exchange {
    pub(crate) name: &'static str,
    pub(crate) me: usize,
    pub(crate) members: Arc<[PeerId]>,
    pub(crate) tag: Tag,
    pub(crate) check: u32,
    out: Vec<Outgoing>,
    incoming: Vec<Incoming>,
    /// Whether all of `out` is sent.
    sent: bool,
    /// Number of incomplete messages in `incoming`.
    missing: usize,
}

impl Exchange {
    /// Creates an exchange in which `out[j]` is sent to rank `j`.
    pub(crate) fn new(
        name: &'static str,
        me: usize,
        members: Arc<[PeerId]>,
        tag: Tag,
        check: u32,
        out: Vec<Arc<Vec<u8>>>,
    ) -> Self {
        let mut incoming: Vec<Incoming> = out.iter().map(|_| Incoming::default()).collect();
        incoming[me] = Incoming { bytes: out[me].to_vec(), done: true, drops_rest: false };
        let mut out: Vec<_> = out.into_iter().map(Outgoing::new).collect();
        out[me].done = true;
        let missing = members.len() - 1;
        Self { name, me, members, tag, check, out, incoming, sent: false, missing }
    }

    /// Returns the received messages, ordered by rank.
    pub(crate) fn take(&mut self) -> Vec<Vec<u8>> {
        self.incoming.iter_mut().map(|i| std::mem::take(&mut i.bytes)).collect()
    }

    pub(crate) fn step(&mut self, port: &mut dyn Port) -> Result<bool, CommError> {
        let moved = self.send(port).and_then(|()| self.receive(port));
        let done = moved.map(|()| self.sent && self.missing == 0);
        if done.as_ref().map_or(true, |&done| done) {
            port.end_new_frame_tracking(self.tag);
        }
        done
    }

    fn send(&mut self, port: &mut dyn Port) -> Result<(), CommError> {
        if self.sent {
            return Ok(());
        }
        let n = self.members.len();
        self.sent = true;
        // Each rank starts with its neighbour, so that not all send to the same rank first.
        for i in (1..n).map(|i| (self.me + i) % n) {
            self.sent &= self.out[i].poll(port, self.members[i], self.tag, self.check)?;
        }
        Ok(())
    }

    /// Takes the frames that have arrived: of the peers that the network reports to have new frames, or of all
    /// peers if the network gives no such report.
    fn receive(&mut self, port: &mut dyn Port) -> Result<(), CommError> {
        let n = self.members.len();
        let Some(news) = port.senders_with_new_frames(self.tag) else {
            return (1..n).try_for_each(|i| self.receive_from(port, (self.me + n - i) % n));
        };
        let behind = |peer| Some((self.me + n - self.members.iter().position(|member| *member == peer)?) % n);
        let mut news: Vec<usize> = news.into_iter().filter_map(behind).collect();
        // Sorted, so that the order is the same as when all peers are checked.
        news.sort_unstable();
        news.into_iter().try_for_each(|i| self.receive_from(port, (self.me + n - i) % n))
    }

    fn receive_from(&mut self, port: &mut dyn Port, i: usize) -> Result<(), CommError> {
        let incoming = &mut self.incoming[i];
        let here = incoming.done;
        let done = incoming.poll(port, self.name, self.members[i], self.tag, self.check)?;
        self.missing -= usize::from(done && !here);
        Ok(())
    }
}

impl Operation for Exchange {
    type Output = Vec<Vec<u8>>;

    fn poll(&mut self, port: &mut dyn Port) -> Poll<Result<(), CommError>> {
        match self.step(port) {
            Ok(true) => Poll::Ready(Ok(())),
            Ok(false) => Poll::Pending,
            Err(e) => Poll::Ready(Err(e)),
        }
    }
    fn waits_for(&self) -> PeerId {
        let silent = self.incoming.iter().position(|i| !i.done);
        let deaf = || self.out.iter().position(|o| !o.done);
        self.members[silent.or_else(deaf).unwrap_or(self.me)]
    }
    fn progress(&self) -> u32 {
        progress(self.tag, 0)
    }
    fn finish(mut self) -> Self::Output {
        self.take()
    }
}

/// One message to one peer.
pub(crate) struct SendMessage {
    pub(crate) to: PeerId,
    pub(crate) tag: Tag,
    pub(crate) out: Outgoing,
    pub(crate) queue_entry: QueueEntry,
}

impl Operation for SendMessage {
    type Output = ();
    fn poll(&mut self, port: &mut dyn Port) -> Poll<Result<(), CommError>> {
        if !self.queue_entry.is_first() {
            return Poll::Pending;
        }
        match self.out.poll(port, self.to, self.tag, 0) {
            Ok(true) => Poll::Ready(Ok(())),
            Ok(false) => Poll::Pending,
            Err(e) => Poll::Ready(Err(e)),
        }
    }
    fn waits_for(&self) -> PeerId {
        self.to
    }
    fn abandon(&mut self, port: &mut dyn Port) {
        self.out.send_cancellation(port, self.to, self.tag);
    }
    fn finish(self) {}
}

/// One message from one peer.
pub(crate) struct RecvMessage {
    pub(crate) from: PeerId,
    pub(crate) tag: Tag,
    pub(crate) incoming: Incoming,
    pub(crate) cancelled: CancelledReceives,
}

impl Operation for RecvMessage {
    type Output = Vec<u8>;
    fn poll(&mut self, port: &mut dyn Port) -> Poll<Result<(), CommError>> {
        match self.incoming.poll(port, "recv", self.from, self.tag, 0) {
            Ok(true) => Poll::Ready(Ok(())),
            Ok(false) => Poll::Pending,
            Err(e) => Poll::Ready(Err(e)),
        }
    }
    fn waits_for(&self) -> PeerId {
        self.from
    }
    fn abandon(&mut self, _: &mut dyn Port) {
        self.cancelled.record(self.from, self.tag, &self.incoming);
    }
    fn finish(self) -> Vec<u8> {
        self.incoming.bytes
    }
}

/// One message from the peer whose message arrives first. As long as one of the peers can still send, the loss
/// of another is no failure.
pub(crate) struct RecvAny {
    /// The peers, and the part of each one's message that has arrived. Once a frame has arrived, the list has
    /// only the sender of this frame.
    pub(crate) from: Vec<(Rank, PeerId, Incoming)>,
    pub(crate) tag: Tag,
    pub(crate) cancelled: CancelledReceives,
}

impl Operation for RecvAny {
    type Output = (Rank, Vec<u8>);
    fn poll(&mut self, port: &mut dyn Port) -> Poll<Result<(), CommError>> {
        let (mut gone, mut lost) = (None, 0);
        for i in 0..self.from.len() {
            let (_, peer, incoming) = &mut self.from[i];
            match incoming.poll(port, "recv_any", *peer, self.tag, 0) {
                Ok(done) if done || !incoming.bytes.is_empty() => {
                    let first = self.from.swap_remove(i);
                    let others = std::mem::replace(&mut self.from, vec![first]);
                    for (_, peer, other) in &others {
                        self.cancelled.record(*peer, self.tag, other);
                    }
                    return if done { Poll::Ready(Ok(())) } else { Poll::Pending };
                }
                Ok(_) => {}
                Err(e) => {
                    gone = gone.or(Some(e));
                    lost += 1;
                }
            }
        }
        match gone {
            Some(e) if lost == self.from.len() => Poll::Ready(Err(e)),
            _ => Poll::Pending,
        }
    }
    fn waits_for(&self) -> PeerId {
        self.from[0].1
    }
    fn needs_one(&self) -> bool {
        self.from.len() == 1
    }
    fn abandon(&mut self, _: &mut dyn Port) {
        for (_, peer, incoming) in &self.from {
            self.cancelled.record(*peer, self.tag, incoming);
        }
    }
    fn finish(mut self) -> Self::Output {
        let (rank, _, incoming) = self.from.swap_remove(0);
        (rank, incoming.bytes)
    }
}
