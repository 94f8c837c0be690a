//! A group of ranks over a transport: creation, settings, and how its operations run and fail. Independent of
//! the network.

mod admission;
mod arrivals;
mod call;
mod collectives;
mod exchanges;
mod membership;
mod messages;
mod meter;
mod native;
mod single_use;

pub use arrivals::WaitMode;
pub use exchanges::shift_one;
pub use meter::Counter;
use meter::{Counters, Meter};
use single_use::FrameOwner;

use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::Poll;

use farflung_base::{Link, Nanos, PeerId, Pending, Rank, Topology};
use tracing::field::Empty;

use crate::Algorithm;
use crate::algorithm::regions;
use crate::coded::CodedBuffer;
use crate::inbox::CANCELLED;
use crate::message::{CancelledReceives, SendQueues};
use crate::operation::Operation;
use crate::plans::Plans;
use crate::steps::cut;
use crate::transport::{Channel, Port, Slot, Stats, Tag, Task, Transport, get, pending, put};
use crate::{Cancel, CommError};

/// State shared by all clones of a communicator.
#[derive(Debug)]
struct Group {
    context: u64,
    me: usize,
    members: Arc<[PeerId]>,
    /// Number of endpoints of the network, including those that are not members.
    peers: usize,
    next: AtomicU32,
    /// Number of times that the communicator was shrunk.
    shrinks: AtomicU32,
    failed: Mutex<Option<Arc<CommError>>>,
    cancelled_receives: CancelledReceives,
    send_queues: SendQueues,
    counters: Mutex<Counters>,
    frames: FrameOwner,
}

impl Group {
    fn new(context: u64, me: usize, members: Arc<[PeerId]>, peers: usize) -> Arc<Self> {
        let zero = AtomicU32::default;
        Arc::new(Self {
            context,
            me,
            members,
            peers,
            next: zero(),
            shrinks: zero(),
            failed: Mutex::default(),
            cancelled_receives: CancelledReceives::default(),
            send_queues: SendQueues::default(),
            counters: Mutex::default(),
            frames: FrameOwner::default(),
        })
    }

    /// Records the first failure and sends it to the other members, so that they need not wait for their
    /// deadlines, and to this rank itself, for its other threads.
    fn fail(&self, error: &CommError, port: &mut dyn Port) {
        let mut failed = self.failed.lock().unwrap_or_else(PoisonError::into_inner);
        if failed.is_some() {
            return;
        }
        *failed = Some(Arc::new(error.clone()));
        drop(failed);
        if matches!(error, CommError::Ended { .. }) {
            return;
        }
        // Members also pass on aborts that they receive: the rank that sent the first abort may leave before
        // its abort has reached all members.
        let me = self.members[self.me];
        let culprit = error.peer().unwrap_or(me);
        let check = if error.is_cancelled() { CANCELLED } else { 0 };
        self.tell(&self.members, Channel::Abort, culprit, check, port);
        let tag = Tag { context: self.context, channel: Channel::Abort, number: culprit.0 };
        // Sending to oneself cannot fail.
        let _ = port.send_bytes(me, tag, check, &[]);
    }

    /// Sends a message about one peer to each of `peers`, except this rank.
    fn tell(&self, peers: &[PeerId], channel: Channel, about: PeerId, check: u32, port: &mut dyn Port) {
        let me = self.members[self.me];
        let tag = Tag { context: self.context, channel, number: about.0 };
        for &peer in peers.iter().filter(|&&peer| peer != me) {
            // An error is ignored: an unreachable peer detects the failure by itself.
            let _ = port.send_bytes(peer, tag, check, &[]);
        }
    }

    /// Returns the peer at fault after this rank has waited for `first` until its deadline. Each waiting rank
    /// has reported to all which peer it waits for. These reports form a chain that begins at `first`. If the
    /// chain ends at a rank without a report, that rank is at fault. If the chain is a cycle, every rank in it
    /// waits, so a link must be broken: the one on which the awaited rank is furthest ahead of the waiting
    /// rank, because the awaited rank must already have sent the missing data. Returns the awaited rank of that
    /// link, or the waiting one if the awaited one is this rank.
    fn root_of_waiting(&self, first: PeerId, progress: u32, port: &dyn Port) -> PeerId {
        let mut way = vec![(self.members[self.me], progress)];
        let mut at = first;
        while way.iter().all(|&(seen, _)| seen != at) {
            let Some((next, far)) = port.suspicion(self.context, at) else { return at };
            way.push((at, far));
            at = next;
        }
        let round = way.iter().skip_while(|&&(seen, _)| seen != at);
        let mut round: Vec<_> = round.copied().collect();
        round.extend(round.first().copied());
        // The numbers wrap around in long runs, and ranks are never half of their range apart.
        let ahead = |pair: &&[(PeerId, u32)]| pair[1].1.wrapping_sub(pair[0].1).cast_signed();
        let broken = round.windows(2).filter(|pair| ahead(pair) >= 0).max_by_key(ahead);
        let me = self.members[self.me];
        broken.map_or(first, |pair| if pair[1].0 == me { pair[0].0 } else { pair[1].0 })
    }
}

/// An operation with its name, deadline and result. If the operation is a collective and fails, its group fails
/// too.
struct Guard<B: Operation> {
    name: &'static str,
    body: Option<B>,
    group: Arc<Group>,
    /// Whether the group fails if the operation fails.
    collective: bool,
    limit: Nanos,
    cancel: Cancel,
    meter: Meter,
    slot: Slot<B::Output>,
}

impl<B: Operation> Guard<B> {
    /// Adds the operation's counters to those of its communicator.
    fn count(&mut self, now: Nanos, failed: bool) {
        let algorithm = self.body.as_ref().and_then(Operation::algorithm);
        let one = self.meter.end(now, failed);
        let (op, Counter { sent, received, took, .. }) = (self.name, one);
        if tracing::enabled!(tracing::Level::DEBUG) {
            let slowest = one.slowest().map(|(peer, waited)| format!("{waited} for {peer}"));
            tracing::debug!(op, ?algorithm, %sent, %received, %took, slowest, "ended");
        }
        let mut all = self.group.counters.lock().unwrap_or_else(PoisonError::into_inner);
        all.entry((op, algorithm)).or_default().add(one);
    }
}

impl<B: Operation> Task for Guard<B>
where
    B::Output: Send,
{
    fn name(&self) -> &'static str {
        self.name
    }
    fn poll(&mut self, port: &mut dyn Port) -> Poll<()> {
        let body = self.body.as_mut().expect("a task is not polled after its end");
        let polled = self.meter.poll(port, |port| (body.poll(port), body.waits_for()));
        match polled {
            Poll::Pending => return Poll::Pending,
            Poll::Ready(Ok(())) => {
                self.count(port.now(), false);
                let body = self.body.take().expect("the body is present until the task ends");
                put(&self.slot, Ok(body.finish()));
            }
            Poll::Ready(Err(error)) => self.fail(error, port),
        }
        Poll::Ready(())
    }
    fn fail(&mut self, mut error: CommError, port: &mut dyn Port) {
        if let Some(body) = &mut self.body {
            body.abandon(port);
        }
        if let (CommError::Deadline { peer, .. }, Some(body)) = (&mut error, &self.body)
            && body.needs_one()
        {
            *peer = self.group.root_of_waiting(*peer, body.progress(), port);
        }
        if self.collective {
            self.group.fail(&error, port);
        }
        self.count(port.now(), true);
        tracing::debug!(op = self.name, %error, "failed");
        self.body = None;
        put(&self.slot, Err(error));
    }
    fn waits_for(&self) -> PeerId {
        self.body.as_ref().map_or(PeerId(0), Operation::waits_for)
    }
    fn limit(&self) -> Nanos {
        self.limit
    }
    fn alarm(&self) -> Nanos {
        let waits = self.limit < Nanos::MAX && self.body.as_ref().is_some_and(Operation::needs_one);
        if waits { Nanos(self.limit.0 - self.limit.0 / 4) } else { Nanos::MAX }
    }
    fn warn(&mut self, port: &mut dyn Port) {
        if let Some(body) = &self.body {
            // Sent to all endpoints, because a rank of another group may wait for this rank and needs the
            // report too.
            let all = (0..self.group.peers as u32).map(PeerId);
            let all: Vec<PeerId> = all.filter(|&peer| port.is_reached(peer)).collect();
            self.group.tell(&all, Channel::Suspect, body.waits_for(), body.progress(), port);
        }
    }
    fn is_cancelled(&self) -> bool {
        self.cancel.is_cancelled()
    }
}

/// Constant that is mixed into the context ids of communicators made by `of_members`, so that they differ from
/// other ids.
const DECLARED: u64 = 6;

/// Ranks `0..size` over a transport. Collectives are matched by the order in which each rank starts them.
///
/// Clones share one communicator. After a failed collective it is poisoned: every later collective fails with
/// [`CommError::Poisoned`], which holds the first error; messages still work. Results are returned complete or
/// not at all. If a collective on a slice in place fails after its start, the slice is filled with NaN
/// (integers: their greatest value).
#[derive(Debug, Clone)]
pub struct Communicator {
    transport: Arc<dyn Transport>,
    group: Arc<Group>,
    deadline: Nanos,
    cancel: Cancel,
    plans: Arc<Plans>,
}

impl Communicator {
    /// Creates a communicator of all members of the transport's network, in the order of their ids. Its
    /// deadline is 60 s, its algorithm [`Algorithm::Ring`], and its declared topology 1 Gbit/s and 200 us.
    #[must_use]
    pub fn new(transport: Arc<dyn Transport>) -> Self {
        let (size, me) = (transport.size(), transport.me().index());
        let members = (0..size as u32).map(PeerId).collect();
        Self::of(transport, me, members, 0, Nanos::from_millis(60_000))
    }

    /// Creates a communicator of these members of the transport's network, in this order; this endpoint must be
    /// one of them. All members must call it with the same list and the same `context`, a number that is used
    /// for no other communicator of this network. It sends no message: each member must already have the list.
    ///
    /// # Errors
    /// [`CommError::Argument`] if a member is not in the network, or this endpoint is not a member.
    pub fn of_members(
        transport: Arc<dyn Transport>,
        members: &[PeerId],
        context: u64,
    ) -> Result<Self, CommError> {
        const OP: &str = "communicator";
        let (me, size) = (transport.me(), transport.size());
        if let Some(unknown) = members.iter().find(|member| member.index() >= size) {
            return Err(CommError::Argument {
                op: OP,
                what: "member (must be below the number of endpoints)",
                got: unknown.index(),
                want: size,
            });
        }
        let Some(me) = members.iter().position(|&member| member == me) else {
            return Err(CommError::Argument {
                op: OP,
                what: "number of members that are this endpoint",
                got: 0,
                want: 1,
            });
        };
        let context = mix(mix(0, DECLARED), context);
        Ok(Self::of(transport, me, members.into(), context, Nanos::from_millis(60_000)))
    }

    /// Creates a communicator of these members, with the ring algorithm and the default topology.
    fn of(
        transport: Arc<dyn Transport>,
        me: usize,
        members: Arc<[PeerId]>,
        context: u64,
        deadline: Nanos,
    ) -> Self {
        let [.., (_, bandwidth, us), _] = Link::NAMED;
        let link = Link { bandwidth: farflung_base::Bandwidth(bandwidth), latency: Nanos::from_micros(us) };
        let topology = Topology::uniform(members.len(), link);
        let group = Group::new(context, me, members, transport.size());
        Self {
            transport,
            group,
            deadline,
            cancel: Cancel::new(),
            plans: Arc::new(Plans::new(Rank(me as u32), Algorithm::default(), topology)),
        }
    }

    /// Returns the deadline of each call: how long it waits for other ranks.
    #[must_use]
    pub const fn deadline(&self) -> Nanos {
        self.deadline
    }

    /// Returns the communicator with another deadline: its calls fail after `deadline`.
    #[must_use]
    pub fn with_deadline(self, deadline: Nanos) -> Self {
        Self { deadline, ..self }
    }

    /// Returns the communicator with another cancel switch. When `cancel` is used, by any thread, the
    /// communicator's calls end, [`Communicator::shrink`] included: with [`CommError::Cancelled`] on this rank
    /// and, if the call was a collective, with [`CommError::CancelledBy`] and this rank's id on the others.
    /// Clones without this switch continue to work, for instance to shrink, because no rank was lost.
    ///
    /// On simulated links, a cancellation by the rank's own thread happens at the rank's clock. One by another
    /// thread happens at the time that the network has reached, which differs between runs.
    #[must_use]
    pub fn with_cancel(self, cancel: &Cancel) -> Self {
        cancel.tell(self.transport.waker());
        Self { cancel: cancel.clone(), ..self }
    }

    /// Returns the communicator with a second cancel switch, in addition to its present one.
    #[must_use]
    pub fn with_other_cancel(self, cancel: &Cancel) -> Self {
        let either = self.cancel.or(cancel);
        self.with_cancel(&either)
    }

    /// Returns the communicator with another all-reduce algorithm. All ranks must choose the same one.
    #[must_use]
    pub fn with_algorithm(self, algorithm: Algorithm) -> Self {
        let plans = self.plans.with_algorithm(algorithm);
        Self { plans: Arc::new(plans), ..self }
    }

    /// Returns the communicator with a declared topology. Where a collective has several programs, the one with
    /// the least predicted time on this topology is used; all-reduce, reduce-scatter, all-gather and all-to-all
    /// choose between algorithms only with [`Algorithm::Auto`]. The topology also gives the regions and shares
    /// of all-reduces. All ranks must declare the same one.
    ///
    /// # Errors
    /// If the topology has a different number of ranks.
    pub fn with_topology(self, topology: Topology) -> Result<Self, CommError> {
        if topology.size() != self.size() {
            let (got, want) = (topology.size(), self.size());
            return Err(CommError::Argument {
                op: "communicator",
                what: "number of ranks of the topology",
                got,
                want,
            });
        }
        let plans = self.plans.with_topology(topology);
        Ok(Self { plans: Arc::new(plans), ..self })
    }

    /// Returns the communicator with these regions for [`Algorithm::Hierarchical`], instead of those derived
    /// from the declared links. Communicators that are split from it derive their own regions. All ranks must
    /// declare the same ones.
    ///
    /// # Errors
    /// If the regions do not contain each rank exactly once, or one is empty.
    pub fn with_regions(self, regions: Vec<Vec<Rank>>) -> Result<Self, CommError> {
        let mut members: Vec<usize> = regions.iter().flatten().map(|rank| rank.index()).collect();
        members.sort_unstable();
        if !members.iter().copied().eq(0..self.size()) || regions.iter().any(Vec::is_empty) {
            let (got, want) = (members.len(), self.size());
            return Err(CommError::Argument {
                op: "communicator",
                what: "number of ranks in the regions (each rank once, no empty region)",
                got,
                want,
            });
        }
        let plans = self.plans.with_regions(regions);
        Ok(Self { plans: Arc::new(plans), ..self })
    }

    /// Returns groups of ranks that are near each other: those of [`Communicator::with_regions`], or those
    /// derived from the declared links.
    #[must_use]
    pub fn regions(&self) -> Vec<Vec<Rank>> {
        self.plans.regions().map_or_else(|| regions(self.plans.topology()), <[_]>::to_vec)
    }

    /// Describes a buffer of `len` values for a codec on the declared links. The codec encodes `n` values to at
    /// most `payload(n)` bytes.
    #[must_use]
    pub fn coded_buffer<'a>(&'a self, len: usize, payload: &'a dyn Fn(usize) -> usize) -> CodedBuffer<'a> {
        CodedBuffer { len, payload, topology: self.plans.topology(), regions: self.plans.regions() }
    }

    /// Returns this rank.
    #[must_use]
    pub fn rank(&self) -> Rank {
        Rank(self.group.me as u32)
    }
    /// Returns the number of ranks.
    #[must_use]
    pub fn size(&self) -> usize {
        self.group.members.len()
    }
    /// Returns the endpoints of the ranks, by rank.
    #[must_use]
    pub fn members(&self) -> &[PeerId] {
        &self.group.members
    }
    /// Returns the network.
    #[must_use]
    pub const fn transport(&self) -> &Arc<dyn Transport> {
        &self.transport
    }
    /// Returns the time on the transport's clock, real or virtual.
    #[must_use]
    pub fn now(&self) -> Nanos {
        self.transport.now()
    }
    /// Advances this rank's virtual clock by `by`, the duration of a computation that is only modelled. Real
    /// clocks do not change.
    pub fn advance(&self, by: Nanos) {
        self.transport.advance(by);
    }
    /// Returns the bytes and frames sent and received by the whole endpoint.
    #[must_use]
    pub fn stats(&self) -> Stats {
        self.transport.stats()
    }
    /// Returns counters of the operations of this communicator that have ended, by name, and for all-reduces
    /// also by algorithm: bytes, time, and the peers that they waited for.
    #[must_use]
    pub fn counters(&self) -> Vec<(&'static str, Option<Algorithm>, Counter)> {
        let counters = self.group.counters.lock().unwrap_or_else(PoisonError::into_inner);
        counters.iter().map(|(&(op, algorithm), counter)| (op, algorithm, counter.clone())).collect()
    }
    /// Returns the range of a flat buffer of `len` elements that belongs to this rank: see
    /// [`Communicator::shard_of`].
    #[must_use]
    pub fn shard(&self, len: usize) -> Range<usize> {
        self.shard_of(self.rank(), len)
    }
    /// Returns the range of a flat buffer of `len` elements that belongs to a rank. For rank `r` of `n` it is
    /// `floor(len * r / n)..floor(len * (r + 1) / n)`. Shards are in the order of ranks and cover the buffer;
    /// their lengths differ by at most one, and some are empty if `len < n`. The longer ones are not always the
    /// first.
    ///
    /// ```
    /// use farflung_base::Rank;
    /// use farflung_comm::{Communicator, memory};
    ///
    /// let comm = Communicator::new(memory::cluster(4).remove(1));
    /// assert_eq!([0, 1, 2, 3].map(|r| comm.shard_of(Rank(r), 10)), [0..2, 2..5, 5..7, 7..10]);
    /// assert_eq!(comm.shard(10), 2..5);
    /// assert_eq!([0, 1, 2, 3].map(|r| comm.shard_of(Rank(r), 2)), [0..0, 0..1, 1..1, 1..2]);
    /// ```
    #[must_use]
    pub fn shard_of(&self, rank: Rank, len: usize) -> Range<usize> {
        cut(len, rank.index(), self.size())..cut(len, rank.index() + 1, self.size())
    }

    /// Returns the failure that poisoned this communicator as an error, if there was one.
    pub fn check(&self) -> Result<(), CommError> {
        match &*self.group.failed.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(first) => Err(CommError::Poisoned(Arc::clone(first))),
            None => Ok(()),
        }
    }

    /// Reserves `lanes` consecutive tags for a collective and returns the first.
    fn next_tags(&self, lanes: usize) -> Result<Tag, CommError> {
        self.check()?;
        let number = self.group.next.fetch_add(lanes as u32, Ordering::Relaxed);
        Ok(Tag { context: self.group.context, channel: Channel::Collective, number })
    }

    fn guard<B: Operation>(&self, name: &'static str, body: B, collective: bool) -> Guard<B> {
        let (algorithm, rank) = (body.algorithm().map(tracing::field::display), self.group.me);
        let span = if collective {
            tracing::debug_span!(
                "collective",
                op = name,
                algorithm,
                rank,
                sent = Empty,
                received = Empty,
                failed = Empty
            )
        } else {
            tracing::debug_span!("message", op = name, rank, sent = Empty, received = Empty, failed = Empty)
        };
        let (meter, slot) = (Meter::new(span), Slot::default());
        let (group, cancel) = (Arc::clone(&self.group), self.cancel.clone());
        Guard { name, body: Some(body), group, collective, limit: self.deadline, cancel, meter, slot }
    }

    /// Runs an operation on this thread.
    fn run<B: Operation>(&self, name: &'static str, body: B, collective: bool) -> Result<B::Output, CommError>
    where
        B::Output: Send,
    {
        let mut guard = self.guard(name, body, collective);
        self.transport.run(&mut guard);
        get(&guard.slot)
    }

    fn start<B: Operation + 'static>(
        &self,
        name: &'static str,
        body: B,
        collective: bool,
    ) -> Pending<Result<B::Output, CommError>>
    where
        B::Output: Send + 'static,
    {
        let guard = self.guard(name, body, collective);
        let slot = Arc::clone(&guard.slot);
        pending(self.transport.spawn(Box::new(guard)), slot)
    }

    /// Splits the communicator: ranks with the same color form a new communicator, in the order of their keys,
    /// with equal keys in the order of their ranks. All ranks must call it.
    pub fn split(&self, color: u32, key: u32) -> Result<Self, CommError> {
        let mut mine = color.to_le_bytes().to_vec();
        mine.extend(key.to_le_bytes());
        let epoch = self.group.next.load(Ordering::Relaxed);
        let mut same = Vec::new();
        for (rank, bytes) in self.all_gather_bytes(mine)?.iter().enumerate() {
            let &[c0, c1, c2, c3, k0, k1, k2, k3] = &bytes[..] else {
                let (peer, got) = (self.group.members[rank], bytes.len());
                return Err(CommError::Mismatch { op: "split", peer, want: 8, got });
            };
            if u32::from_le_bytes([c0, c1, c2, c3]) == color {
                same.push((u32::from_le_bytes([k0, k1, k2, k3]), rank));
            }
        }
        same.sort_unstable();
        let ranks: Vec<usize> = same.into_iter().map(|(_, rank)| rank).collect();
        let context = mix(mix(mix(self.group.context, 1), u64::from(epoch)), u64::from(color));
        let new = self.among(&ranks, context);
        if let Some(library) = self.transport.native() {
            // All ranks have entered this function, or this one would not have the colors of all.
            library.add_group(context, &new.group.members);
        }
        Ok(new)
    }

    /// Creates a communicator of these ranks, in this order. This rank must be one of them.
    fn among(&self, ranks: &[usize], context: u64) -> Self {
        let me = ranks
            .iter()
            .position(|&rank| rank == self.group.me)
            .expect("this rank is one of the new communicator's ranks");
        let members = ranks.iter().map(|&rank| self.group.members[rank]).collect();
        let declared = self.plans.topology();
        let ranks: Vec<Rank> = ranks.iter().map(|&rank| Rank(rank as u32)).collect();
        let topology = declared.among(&ranks);
        let plans = Plans::new(Rank(me as u32), self.plans.algorithm(), topology);
        let group = Group::new(context, me, members, self.group.peers);
        if self.group.frames.is_set() {
            group.frames.set(&self.transport);
        }
        Self { group, plans: Arc::new(plans), ..self.clone() }
    }
}

/// Returns the check word of a collective: ranks that run the same collective compute the same word.
fn check_word(name: &str, len: usize, facts: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(name.as_bytes());
    hasher.update(&(len as u64).to_le_bytes());
    hasher.update(facts);
    hasher.finalize()
}

/// One round of splitmix64 over a pair; makes equal context ids of different communicators unlikely.
const fn mix(a: u64, b: u64) -> u64 {
    let mut x = (a ^ b.wrapping_mul(0xD6E8_FEB8_6659_FD93)).wrapping_add(0x9E37_79B9_7F4A_7C15);
    x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}
