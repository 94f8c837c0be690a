//! Stores the frames that have arrived at an endpoint, and has the condition variable on which the endpoint's
//! threads sleep. Independent of the network and of operations.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use farflung_base::{Bytes, Nanos, PeerId};

use crate::sizes::HEADER_BYTES;
use crate::transport::{Channel, PeerEvent, Stats, Tag};
use crate::{CommError, DownReason, Frame};

/// Maximum number of frames of one (peer, tag) that may be in flight or unread. Its sender then waits.
pub const WINDOW: usize = 32;

/// Reason why a thread blocks on an inbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BlockedFor {
    /// The thread waits for the result of an operation.
    Result,
    /// The thread drives operations in the background, and stops as soon as another thread waits for a result.
    Background,
}

/// Frames by sender and tag, state of the peers, and a counter of the changes that are signalled to threads.
pub struct Inbox {
    /// Number of signalled changes. Incremented under the lock, read without it.
    signal: AtomicU64,
    state: Mutex<State>,
    moved: Condvar,
    /// Number of times that a waiting thread polls before it sleeps.
    polls: u32,
    /// Iterations of a spin loop in each poll, before the thread yields.
    spins: u32,
}

/// Result of [`Inbox::idle`]: what the background thread must do next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Idle {
    Work,
    End,
}

/// Whether an operation of this endpoint waits for the frame or failure that arrived.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub(crate) enum Awaited {
    Wanted,
    None,
}

struct State {
    /// Number of threads that wait for a result.
    waiting: u32,
    /// Number of threads that sleep on `moved`.
    asleep: u32,
    /// Whether a thread drives the network, outside of this lock.
    driving: bool,
    ended: bool,
    frames: HashMap<(PeerId, Tag), VecDeque<Frame>>,
    /// Pairs (peer, tag) for which an operation found no frame, so that it waits for one. `None` if every
    /// arrival is signalled.
    awaited: Option<BTreeSet<(PeerId, Tag)>>,
    /// Peers whose frames arrived since the last call of [`Inbox::senders_with_new_frames`], for each tag that
    /// it was called with.
    new_frame_senders: BTreeMap<Tag, Vec<PeerId>>,
    /// Empty queues, kept so that a new tag allocates nothing.
    spare: Vec<VecDeque<Frame>>,
    peers: Vec<Peer>,
    /// The latest [`REMEMBERED`] aborts.
    aborted: VecDeque<Abort>,
    /// Contexts whose frames are dropped, the latest last.
    retired: VecDeque<u64>,
    events: VecDeque<PeerEvent>,
}

/// The end of a context (the messages of one communicator) because of a failure or a cancellation.
struct Abort {
    context: u64,
    /// The peer that reported the end.
    by: PeerId,
    culprit: PeerId,
    /// Whether the culprit cancelled the operation, rather than failed.
    cancelled: bool,
}

#[derive(Default)]
struct Peer {
    down: Option<DownReason>,
    stats: Stats,
    /// Bytes of memory of this peer's frames that no operation has taken yet.
    unread_bytes: usize,
    /// Latest reports of this peer about whom it waits for: the context, the awaited peer, and this peer's
    /// progress in the context. At most [`REMEMBERED`].
    suspicions: VecDeque<(u64, PeerId, u32)>,
}

/// Returns the bytes of memory that are counted for a frame. The 512 bytes cover the `Frame` value and its own
/// queue, so that empty frames are counted too.
const fn weight(frame: &Frame) -> usize {
    frame.len() + 512
}

/// Number of polls before a thread sleeps; together they take about 30 us.
const POLLS_BEFORE_SLEEP: u32 = 32;

/// Number of iterations of the spin loop in each poll; together they take one or two microseconds.
const SPINS: u32 = 64;

/// Check word of an abort that reports a cancellation: the culprit has not failed.
pub(crate) const CANCELLED: u32 = 1;

/// Maximum number of aborted contexts, of retired contexts, and of each peer's suspicions that are kept.
const REMEMBERED: usize = 64;

/// Appends an entry; removes the oldest if there are [`REMEMBERED`].
fn remember<T>(memory: &mut VecDeque<T>, entry: T) {
    if memory.len() == REMEMBERED {
        memory.pop_front();
    }
    memory.push_back(entry);
}

impl fmt::Debug for Inbox {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Inbox(signal {})", self.change_count())
    }
}

impl Inbox {
    /// Creates an empty inbox for an endpoint of a network with `size` members.
    #[must_use]
    pub fn new(size: usize) -> Self {
        let state = State {
            waiting: 0,
            asleep: 0,
            driving: false,
            ended: false,
            frames: HashMap::new(),
            awaited: None,
            new_frame_senders: BTreeMap::new(),
            spare: Vec::new(),
            peers: (0..size).map(|_| Peer::default()).collect(),
            aborted: VecDeque::new(),
            retired: VecDeque::new(),
            events: VecDeque::new(),
        };
        Self {
            signal: AtomicU64::new(0),
            state: Mutex::new(state),
            moved: Condvar::new(),
            polls: POLLS_BEFORE_SLEEP,
            spins: 0,
        }
    }

    /// Makes waiting threads sleep at once. For an endpoint on a machine with more ranks than cores: a polling
    /// thread takes the core from the rank that it waits for, and the system moves threads that wake up to free
    /// cores, but not threads that poll.
    #[must_use]
    pub fn without_polling(self) -> Self {
        Self { polls: 0, ..self }
    }

    /// Makes the inbox record the (peer, tag) pairs for which an operation found no frame. For a network that
    /// uses [`Inbox::deliver_quietly`].
    #[must_use]
    pub(crate) fn selective(mut self) -> Self {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        state.awaited = Some(BTreeSet::new());
        self
    }

    /// Makes waiting threads spin before they yield. For an endpoint on a machine with a core for each peer:
    /// there, the awaited frame arrives sooner than a yield returns.
    #[must_use]
    pub(crate) fn with_spinning(self) -> Self {
        Self { spins: SPINS, ..self }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn notify(&self, state: &State) {
        self.signal.fetch_add(1, Ordering::Release);
        if state.asleep > 0 {
            self.moved.notify_all();
        }
    }

    pub(crate) fn size(&self) -> usize {
        self.lock().peers.len()
    }

    /// Counts a change and wakes sleeping threads.
    pub fn signal(&self) {
        self.notify(&self.lock());
    }

    /// Returns the counter of signalled changes.
    #[must_use]
    pub fn change_count(&self) -> u64 {
        self.signal.load(Ordering::Acquire)
    }

    /// Stores a frame that has arrived. A frame on [`Channel::Abort`] ends its context.
    pub fn deliver(&self, from: PeerId, tag: Tag, frame: Frame) {
        let mut state = self.lock();
        Self::receive(&mut state, from, tag, frame);
        self.notify(&state);
    }

    /// Stores a frame like [`Inbox::deliver`], for a [`selective`](Inbox::selective) inbox. Signals only if an
    /// operation has already asked for a frame of this peer and tag, or if the frame ends its context. After
    /// any other frame, polling would change nothing.
    pub(crate) fn deliver_quietly(&self, from: PeerId, tag: Tag, frame: Frame) -> Awaited {
        let mut state = self.lock();
        let looked_for = state.awaited.as_mut().is_some_and(|wanted| wanted.remove(&(from, tag)));
        Self::receive(&mut state, from, tag, frame);
        if !looked_for && tag.channel != Channel::Abort {
            return Awaited::None;
        }
        self.notify(&state);
        Awaited::Wanted
    }

    fn receive(state: &mut State, from: PeerId, tag: Tag, frame: Frame) {
        let received = &mut state.peers[from.index()].stats.received;
        received.payload += Bytes(frame.len() as u64);
        received.wire += Bytes((frame.len() + HEADER_BYTES) as u64);
        received.frames += 1;
        Self::put(state, from, tag, frame);
    }

    /// Stores a frame that this endpoint sent to itself. Such frames are not counted as traffic.
    pub(crate) fn deliver_own(&self, from: PeerId, tag: Tag, frame: Frame) {
        let mut state = self.lock();
        Self::put(&mut state, from, tag, frame);
        self.notify(&state);
    }

    fn put(state: &mut State, from: PeerId, tag: Tag, frame: Frame) {
        if tag.channel == Channel::Abort {
            // The number of an abort's tag is the culprit. If there is no such rank, the sender counts as the
            // culprit.
            let known = (tag.number as usize) < state.peers.len();
            let culprit = if known { PeerId(tag.number) } else { from };
            if !state.aborted.iter().any(|abort| abort.context == tag.context) {
                let cancelled = frame.check == CANCELLED;
                let abort = Abort { context: tag.context, by: from, culprit, cancelled };
                remember(&mut state.aborted, abort);
            }
            state.new_frame_senders.clear();
        } else if tag.channel == Channel::Suspect {
            remember(
                &mut state.peers[from.index()].suspicions,
                (tag.context, PeerId(tag.number), frame.check),
            );
        } else if !state.retired.contains(&tag.context) {
            state.peers[from.index()].unread_bytes += weight(&frame);
            let State { frames, spare, new_frame_senders: news, .. } = state;
            if let Some(news) = news.get_mut(&tag) {
                news.push(from);
            }
            frames.entry((from, tag)).or_insert_with(|| spare.pop().unwrap_or_default()).push_back(frame);
        }
    }

    /// Marks a peer as gone for good. Only the first reason is kept.
    pub fn peer_down(&self, peer: PeerId, reason: DownReason) {
        // Ignored: `peer_down_quietly` has already woken the sleeping threads.
        let _ = self.peer_down_quietly(peer, reason);
    }

    /// Marks a peer as gone, like [`Inbox::peer_down`]. Returns whether an operation waits for a frame of that
    /// peer.
    pub(crate) fn peer_down_quietly(&self, peer: PeerId, reason: DownReason) -> Awaited {
        let mut state = self.lock();
        let entry = &mut state.peers[peer.index()];
        if entry.down.is_none() {
            entry.down = Some(reason.clone());
            state.events.push_back(PeerEvent::Down(peer, reason));
            state.new_frame_senders.clear();
            self.notify(&state);
        }
        let next = |wanted: &BTreeSet<(PeerId, Tag)>| wanted.range((peer, Tag::FIRST)..).next().copied();
        let looked_for = state.awaited.as_ref().and_then(next).is_some_and(|(next, _)| next == peer);
        if looked_for { Awaited::Wanted } else { Awaited::None }
    }

    /// Records that a peer has connected.
    pub fn peer_up(&self, peer: PeerId) {
        let mut state = self.lock();
        state.events.push_back(PeerEvent::Up(peer));
        self.notify(&state);
    }

    /// Returns whether a peer is gone.
    #[must_use]
    pub fn is_down(&self, peer: PeerId) -> bool {
        self.lock().peers[peer.index()].down.is_some()
    }

    /// Returns the number of frames of one (peer, tag) that were not taken yet.
    #[must_use]
    pub fn queued(&self, from: PeerId, tag: Tag) -> usize {
        self.lock().frames.get(&(from, tag)).map_or(0, VecDeque::len)
    }

    /// Returns the bytes of memory of a peer's frames that were not taken yet.
    #[must_use]
    pub fn unread_bytes(&self, from: PeerId) -> usize {
        self.lock().peers[from.index()].unread_bytes
    }

    /// Counts bytes on the wire that carry no payload.
    pub fn count_control(&self, peer: PeerId, sent: usize, received: usize) {
        let mut state = self.lock();
        let stats = &mut state.peers[peer.index()].stats;
        stats.sent.wire += Bytes(sent as u64);
        stats.received.wire += Bytes(received as u64);
    }

    pub(crate) fn traffic(&self, peer: PeerId) -> Stats {
        self.lock().peers[peer.index()].stats
    }

    pub(crate) fn events(&self) -> Vec<PeerEvent> {
        self.lock().events.drain(..).collect()
    }

    fn check_alive(state: &State, op: &'static str, peer: PeerId, tag: Tag) -> Result<(), CommError> {
        if state.ended {
            return Err(CommError::Ended { op });
        }
        // User messages in an aborted context still pass, so that the surviving ranks can communicate.
        if tag.channel == Channel::Collective
            && let Some(&Abort { by, culprit, cancelled, .. }) =
                state.aborted.iter().find(|abort| abort.context == tag.context)
        {
            let cancelled = cancelled.then_some(CommError::CancelledBy { op, peer: culprit });
            return Err(cancelled.unwrap_or(CommError::Aborted { op, by, culprit }));
        }
        match &state.peers[peer.index()].down {
            Some(reason) => Err(CommError::PeerDown { op, peer, reason: reason.clone() }),
            None => Ok(()),
        }
    }

    pub(crate) fn count_sent(
        &self,
        op: &'static str,
        to: PeerId,
        tag: Tag,
        len: usize,
    ) -> Result<(), CommError> {
        let mut state = self.lock();
        Self::check_alive(&state, op, to, tag)?;
        let sent = &mut state.peers[to.index()].stats.sent;
        sent.payload += Bytes(len as u64);
        sent.wire += Bytes((len + HEADER_BYTES) as u64);
        sent.frames += 1;
        Ok(())
    }

    /// Takes the next frame of (peer, tag). Returns the frame, and the number of such frames that are left.
    pub(crate) fn take(
        &self,
        op: &'static str,
        from: PeerId,
        tag: Tag,
    ) -> Result<Option<(Frame, usize)>, CommError> {
        let mut state = self.lock();
        if let Entry::Occupied(mut queue) = state.frames.entry((from, tag))
            && let Some(frame) = queue.get_mut().pop_front()
        {
            let left = queue.get().len();
            if left == 0 {
                let queue = queue.remove();
                state.spare.push(queue);
            }
            state.peers[from.index()].unread_bytes -= weight(&frame);
            return Ok(Some((frame, left)));
        }
        // The failure is checked last, because frames that arrived before it are still valid.
        Self::check_alive(&state, op, from, tag)?;
        if let Some(wanted) = &mut state.awaited {
            wanted.insert((from, tag));
        }
        Ok(None)
    }

    /// See [`Port::senders_with_new_frames`](crate::transport::Port::senders_with_new_frames).
    pub(crate) fn senders_with_new_frames(&self, tag: Tag) -> Option<Vec<PeerId>> {
        let mut state = self.lock();
        state.awaited.as_ref()?;
        if let Some(news) = state.new_frame_senders.get_mut(&tag) {
            return Some(std::mem::take(news));
        }
        state.new_frame_senders.insert(tag, Vec::new());
        None
    }

    /// See [`Port::end_new_frame_tracking`](crate::transport::Port::end_new_frame_tracking).
    pub(crate) fn end_new_frame_tracking(&self, tag: Tag) {
        self.lock().new_frame_senders.remove(&tag);
    }

    /// Returns the peer for which `peer` waits in a context, by its latest report, and the progress of `peer`.
    /// Without a report for this context, uses a report for any context: a rank that waits in another group
    /// does not proceed in this one.
    pub(crate) fn suspicion(&self, context: u64, peer: PeerId) -> Option<(PeerId, u32)> {
        let state = self.lock();
        let said = &state.peers.get(peer.index())?.suspicions;
        let here = said.iter().rev().find(|said| said.0 == context);
        here.or_else(|| said.back()).map(|said| (said.1, said.2))
    }

    /// Returns the peer for which `peer` waits in any context, by its latest report.
    pub(crate) fn awaited_by(&self, peer: PeerId) -> Option<PeerId> {
        self.lock().peers.get(peer.index())?.suspicions.back().map(|said| said.1)
    }

    /// Drops the frames of a context, including those that arrive later, until [`REMEMBERED`] further contexts
    /// have been retired.
    pub(crate) fn retire(&self, context: u64) {
        let mut state = self.lock();
        let State { frames, peers, retired, awaited: wanted, new_frame_senders: news, .. } = &mut *state;
        frames.retain(|(from, tag), queue| {
            if tag.context != context {
                return true;
            }
            peers[from.index()].unread_bytes -= queue.iter().map(weight).sum::<usize>();
            false
        });
        news.clear();
        if let Some(wanted) = wanted {
            wanted.retain(|(_, tag)| tag.context != context);
        }
        remember(retired, context);
        self.notify(&state);
    }

    /// Drops the frames of a peer that has gone, and its reports. Its traffic stays counted.
    pub(crate) fn forget(&self, peer: PeerId) {
        let mut state = self.lock();
        let State { frames, peers, .. } = &mut *state;
        let entry = &mut peers[peer.index()];
        if entry.down.is_none() {
            return;
        }
        frames.retain(|(from, _), _| *from != peer);
        entry.unread_bytes = 0;
        entry.suspicions = VecDeque::new();
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.lock().ended
    }

    /// Ends the endpoint: all operations in progress fail.
    pub fn end(&self) {
        let mut state = self.lock();
        state.ended = true;
        state.new_frame_senders.clear();
        self.signal.fetch_add(1, Ordering::Release);
        self.moved.notify_all();
    }

    /// Counts a waiting thread. Returns whether another thread drives the network and may have to be woken.
    pub(crate) fn begin_wait(&self) -> bool {
        let mut state = self.lock();
        state.waiting += 1;
        if state.asleep > 0 {
            self.moved.notify_all();
        }
        state.driving
    }

    pub(crate) fn end_wait(&self) {
        let mut state = self.lock();
        state.waiting -= 1;
        if state.asleep > 0 {
            self.moved.notify_all();
        }
    }

    /// Sleeps until there is work for the background thread, or the endpoint ends.
    pub(crate) fn idle(&self, has_jobs: impl Fn() -> bool) -> Idle {
        let mut state = self.lock();
        loop {
            if state.ended {
                return Idle::End;
            }
            let seen = self.change_count();
            if state.waiting == 0 {
                // This lock is released first, because the lock of the job list must not be taken while it is
                // held.
                drop(state);
                if has_jobs() {
                    return Idle::Work;
                }
                state = self.lock();
                if self.change_count() != seen || state.ended {
                    continue;
                }
            }
            state.asleep += 1;
            state = self.moved.wait(state).unwrap_or_else(PoisonError::into_inner);
            state.asleep -= 1;
        }
    }

    /// Sleeps until the counter is greater than `seen`, for `timeout`, or until the endpoint ends. A thread
    /// that waits for a result first polls a few times and yields in between, because the result is often
    /// about to arrive and waking up takes longer. If `drive` is given and no other thread drives the network,
    /// this thread drives it instead of sleeping.
    pub fn park(
        &self,
        seen: u64,
        role: BlockedFor,
        timeout: impl Fn() -> Nanos,
        drive: Option<&dyn Fn(Nanos)>,
    ) {
        let looks = if role == BlockedFor::Result { self.polls } else { 0 };
        let spin = || {
            (0..self.spins).any(|_| {
                std::hint::spin_loop();
                self.change_count() != seen
            });
        };
        if drive.is_none() && self.poll_for_change(seen, looks, spin) {
            return;
        }
        let mut state = self.lock();
        loop {
            let gives_way = role == BlockedFor::Background && state.waiting > 0;
            let left = timeout();
            if self.change_count() != seen || state.ended || gives_way || left == Nanos::ZERO {
                return;
            }
            match drive {
                Some(drive) if !state.driving => {
                    state.driving = true;
                    drop(state);
                    if !self.poll_for_change(seen, looks, || drive(Nanos::ZERO)) {
                        drive(left);
                    }
                    state = self.lock();
                    state.driving = false;
                    if state.asleep > 0 {
                        self.moved.notify_all();
                    }
                }
                _ => {
                    state.asleep += 1;
                    let nap = Duration::from(left.min(Nanos::from_millis(3_600_000)));
                    state = self.moved.wait_timeout(state, nap).unwrap_or_else(PoisonError::into_inner).0;
                    state.asleep -= 1;
                }
            }
        }
    }

    /// Calls `look` up to `looks` times. Returns whether the counter has become greater than `seen`.
    fn poll_for_change(&self, seen: u64, looks: u32, look: impl Fn()) -> bool {
        (0..looks).any(|_| {
            look();
            let moved = self.change_count() != seen;
            if !moved {
                std::thread::yield_now();
            }
            moved
        })
    }

    /// Returns whether some thread drives the network now.
    #[must_use]
    pub fn is_driven(&self) -> bool {
        self.lock().driving
    }
}
