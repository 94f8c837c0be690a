//! Counts the bytes that an operation moved and the time that it waited for each peer. Counting does not change
//! the operation.

use std::collections::BTreeMap;
use std::task::Poll;

use farflung_base::{Bytes, Nanos, PeerId};
use tracing::Span;

use crate::transport::{Port, Tag};
use crate::{Algorithm, CommError, Frame};

/// Totals of one kind of operation on one communicator.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Counter {
    /// Number of calls that have ended, with a result or an error.
    pub calls: u64,
    /// Number of calls that failed.
    pub failed: u64,
    /// Payload bytes sent to other ranks.
    pub sent: Bytes,
    /// Payload bytes received from other ranks.
    pub received: Bytes,
    /// Time from start to end, summed over all calls.
    pub took: Nanos,
    /// The part of that time in which operations were blocked, by the peer that they waited for.
    pub waited: BTreeMap<PeerId, Nanos>,
}

impl Counter {
    /// Returns the peer with the longest wait, and that time.
    #[must_use]
    pub fn slowest(&self) -> Option<(PeerId, Nanos)> {
        self.waited.iter().map(|(peer, time)| (*peer, *time)).max_by_key(|&(peer, time)| (time, peer))
    }

    pub(super) fn add(&mut self, one: &Self) {
        self.calls += one.calls;
        self.failed += one.failed;
        self.sent += one.sent;
        self.received += one.received;
        self.took = self.took.saturating_add(one.took);
        for (peer, time) in &one.waited {
            self.wait(*peer, *time);
        }
    }

    fn wait(&mut self, peer: PeerId, time: Nanos) {
        let sum = self.waited.entry(peer).or_default();
        *sum = sum.saturating_add(time);
    }
}

/// Counters by operation, and for all-reduces also by algorithm.
pub(super) type Counters = BTreeMap<(&'static str, Option<Algorithm>), Counter>;

/// Counter of one running operation.
#[derive(Debug)]
pub(super) struct Meter {
    pub(super) counter: Counter,
    /// Trace span of the operation; waits are spans within it.
    span: Span,
    began: Option<Nanos>,
    waits: Option<Wait>,
}

/// A wait in progress: the operation is blocked.
#[derive(Debug)]
struct Wait {
    since: Nanos,
    peer: PeerId,
    /// Trace span that ends with the wait.
    _span: Span,
}

impl Meter {
    pub(super) fn new(span: Span) -> Self {
        Self { counter: Counter::default(), span, began: None, waits: None }
    }

    /// Polls an operation, and counts the frames that pass through the port.
    pub(super) fn poll<T>(
        &mut self,
        port: &mut dyn Port,
        poll: impl FnOnce(&mut dyn Port) -> (Poll<T>, PeerId),
    ) -> Poll<T> {
        self.began.get_or_insert_with(|| port.now());
        let mut metered = Metered { port, counter: &mut self.counter, moved: None };
        let entered = self.span.enter();
        let (result, waits_for) = poll(&mut metered);
        drop(entered);
        let moved = metered.moved.or_else(|| result.is_ready().then(|| port.now()));
        if let Some(moved) = moved
            && let Some(Wait { since, peer, .. }) = self.waits.take()
        {
            self.counter.wait(peer, moved.saturating_sub(since));
        }
        if result.is_pending() && self.waits.is_none() {
            let span = tracing::debug_span!(parent: &self.span, "wait", peer = waits_for.0);
            self.waits = Some(Wait { since: port.now(), peer: waits_for, _span: span });
        }
        result
    }

    /// Ends the measurement of the operation and returns its counter.
    pub(super) fn end(&mut self, now: Nanos, failed: bool) -> &Counter {
        if let Some(Wait { since, peer, .. }) = self.waits.take() {
            self.counter.wait(peer, now.saturating_sub(since));
        }
        self.span.record("sent", self.counter.sent.0).record("received", self.counter.received.0);
        self.span.record("failed", failed);
        self.counter.calls = 1;
        self.counter.failed = u64::from(failed);
        self.counter.took = now.saturating_sub(self.began.unwrap_or(now));
        &self.counter
    }
}

struct Metered<'a> {
    port: &'a mut dyn Port,
    counter: &'a mut Counter,
    /// Time at which the operation sent or received its first frame of this poll.
    moved: Option<Nanos>,
}

impl Metered<'_> {
    fn moves(&mut self) {
        if self.moved.is_none() {
            self.moved = Some(self.port.now());
        }
    }

    fn sends(&mut self, to: PeerId, bytes: usize) {
        self.moves();
        if to != self.port.me() {
            self.counter.sent += Bytes(bytes as u64);
        }
    }
}

impl Port for Metered<'_> {
    fn me(&self) -> PeerId {
        self.port.me()
    }
    fn now(&self) -> Nanos {
        self.port.now()
    }
    fn has_room(&mut self, to: PeerId, tag: Tag) -> bool {
        self.port.has_room(to, tag)
    }
    fn is_reached(&self, to: PeerId) -> bool {
        self.port.is_reached(to)
    }
    fn send(&mut self, to: PeerId, tag: Tag, frame: Frame) -> Result<(), CommError> {
        self.sends(to, frame.len());
        self.port.send(to, tag, frame)
    }
    fn send_bytes(&mut self, to: PeerId, tag: Tag, check: u32, bytes: &[u8]) -> Result<(), CommError> {
        self.sends(to, bytes.len());
        self.port.send_bytes(to, tag, check, bytes)
    }
    fn take(&mut self, from: PeerId, tag: Tag) -> Result<Option<Frame>, CommError> {
        let taken = self.port.take(from, tag)?;
        if let Some(frame) = &taken {
            self.moves();
            if from != self.port.me() {
                self.counter.received += Bytes(frame.len() as u64);
            }
        }
        Ok(taken)
    }
    fn suspicion(&self, context: u64, peer: PeerId) -> Option<(PeerId, u32)> {
        self.port.suspicion(context, peer)
    }
    fn senders_with_new_frames(&mut self, tag: Tag) -> Option<Vec<PeerId>> {
        self.port.senders_with_new_frames(tag)
    }
    fn end_new_frame_tracking(&mut self, tag: Tag) {
        self.port.end_new_frame_tracking(tag);
    }
}
