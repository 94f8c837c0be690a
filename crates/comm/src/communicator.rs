//! A group of ranks over a transport: what its calls have in common. It knows no network.

mod admission;
mod arrivals;
mod call;
mod collectives;
mod exchanges;
mod membership;
mod messages;
mod meter;

pub use arrivals::Look;
pub use exchanges::shift_one;
pub use meter::Counter;
use meter::{Counters, Meter};

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
use crate::message::{Torn, Turns};
use crate::operation::Operation;
use crate::plans::Plans;
use crate::steps::cut;
use crate::transport::{Channel, Port, Slot, Stats, Tag, Task, Transport, get, pending, put};
use crate::{Cancel, CommError};

/// What all clones of a communicator share.
#[derive(Debug)]
struct Group {
    context: u64,
    me: usize,
    members: Arc<[PeerId]>,
    /// Endpoints of the network, members or not.
    peers: usize,
    next: AtomicU32,
    /// How often it was shrunk.
    shrinks: AtomicU32,
    failed: Mutex<Option<Arc<CommError>>>,
    torn: Torn,
    turns: Turns,
    counters: Mutex<Counters>,
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
            torn: Torn::default(),
            turns: Turns::default(),
            counters: Mutex::default(),
        })
    }

    /// Notes the first failure and tells the others, so that they need not wait for their deadlines; and this
    /// rank's own other threads.
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
        // An abort is passed on too: this rank may leave before the one that began has reached everybody.
        let me = self.members[self.me];
        let culprit = error.peer().unwrap_or(me);
        let check = if error.is_cancelled() { CANCELLED } else { 0 };
        self.tell(&self.members, Channel::Abort, culprit, check, port);
        let tag = Tag { context: self.context, channel: Channel::Abort, number: culprit.0 };
        // A frame to oneself always arrives.
        let _ = port.send_bytes(me, tag, check, &[]);
    }

    /// Tells the others of these peers about one.
    fn tell(&self, peers: &[PeerId], channel: Channel, about: PeerId, check: u32, port: &mut dyn Port) {
        let me = self.members[self.me];
        let tag = Tag { context: self.context, channel, number: about.0 };
        for &peer in peers.iter().filter(|&&peer| peer != me) {
            // A peer that cannot be told has its own way of noticing.
            let _ = port.send_bytes(peer, tag, check, &[]);
        }
    }

    /// Who is to blame when this rank has waited for `first` in vain: whoever waits has said for whom, so the
    /// way leads to a rank that says nothing. Where it leads round in a circle, nobody is silent and a link
    /// is: the one whose far end is furthest ahead, so that it must have sent what did not come.
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
        let ahead = |pair: &&[(PeerId, u32)]| i64::from(pair[1].1) - i64::from(pair[0].1);
        let broken = round.windows(2).filter(|pair| ahead(pair) >= 0).max_by_key(ahead);
        let me = self.members[self.me];
        broken.map_or(first, |pair| if pair[1].0 == me { pair[0].0 } else { pair[1].0 })
    }
}

/// A body with its name, deadline and result; ends its group where it is a collective that fails.
struct Guard<B: Operation> {
    name: &'static str,
    body: Option<B>,
    group: Arc<Group>,
    /// Whether the group fails with it.
    collective: bool,
    limit: Nanos,
    cancel: Cancel,
    meter: Meter,
    slot: Slot<B::Output>,
}

impl<B: Operation> Guard<B> {
    /// Adds what the operation did to what its communicator has done.
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
                let body = self.body.take().expect("it was there");
                put(&self.slot, Ok(body.finish()));
            }
            Poll::Ready(Err(error)) => self.fail(error, port),
        }
        Poll::Ready(())
    }
    fn fail(&mut self, mut error: CommError, port: &mut dyn Port) {
        if let Some(body) = &mut self.body {
            body.cut(port);
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
            // Whoever waits for this rank in another group follows the way from here.
            let all: Vec<PeerId> = (0..self.group.peers as u32).map(PeerId).collect();
            self.group.tell(&all, Channel::Suspect, body.waits_for(), body.progress(), port);
        }
    }
    fn is_cancelled(&self) -> bool {
        self.cancel.is_cancelled()
    }
}

/// Marks contexts of members that somebody else has decided on.
const DECLARED: u64 = 6;

/// Ranks `0..size` over a transport, with collectives that are matched by the order in which each rank starts
/// them.
///
/// Clones are the same communicator. After a failed collective it is poisoned: every later call fails with
/// the reason. Results come back whole or not at all; a slice that was worked on in place is filled with NaN
/// (integers: their greatest value) instead.
#[derive(Debug, Clone)]
pub struct Communicator {
    transport: Arc<dyn Transport>,
    group: Arc<Group>,
    deadline: Nanos,
    cancel: Cancel,
    plans: Arc<Plans>,
}

impl Communicator {
    /// All members of the transport's network, in the order of their ids. Deadline 60 s, [`Algorithm::Ring`],
    /// and a declared topology of 1 Gbit/s and 200 us.
    #[must_use]
    pub fn new(transport: Arc<dyn Transport>) -> Self {
        let (size, me) = (transport.size(), transport.me().index());
        let members = (0..size as u32).map(PeerId).collect();
        Self::of(transport, me, members, 0, Nanos::from_millis(60_000))
    }

    /// These members of the transport's network, this endpoint among them, in this order. All of them call it
    /// with the same members and the same `context`, a number that no other communicator of this network is
    /// made with. No message is sent: each member has to know the list already.
    ///
    /// # Errors
    /// [`CommError::Argument`] for a member that the network does not have, and if this endpoint is none.
    pub fn of_members(
        transport: Arc<dyn Transport>,
        members: &[PeerId],
        context: u64,
    ) -> Result<Self, CommError> {
        const OP: &str = "communicator";
        let (me, size) = (transport.me(), transport.size());
        if let Some(unknown) = members.iter().find(|member| member.index() >= size) {
            return Err(CommError::Argument { op: OP, what: "member", got: unknown.index(), want: size });
        }
        let Some(me) = members.iter().position(|&member| member == me) else {
            return Err(CommError::Argument { op: OP, what: "members with this one", got: 0, want: 1 });
        };
        let context = mix(mix(0, DECLARED), context);
        Ok(Self::of(transport, me, members.into(), context, Nanos::from_millis(60_000)))
    }

    /// So many members, this rank among them, with the ring and the default topology.
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

    /// How long its calls wait for other ranks.
    #[must_use]
    pub const fn deadline(&self) -> Nanos {
        self.deadline
    }

    /// The same communicator, whose calls give up after `deadline`.
    #[must_use]
    pub fn with_deadline(self, deadline: Nanos) -> Self {
        Self { deadline, ..self }
    }

    /// The same communicator, whose calls, [`Communicator::shrink`] among them, end when `cancel` is used,
    /// from whatever thread: with [`CommError::Cancelled`] here and, where one was a collective, with
    /// [`CommError::CancelledBy`] and this rank's name on the others. Clones that were not given it go on, to
    /// shrink, for instance: nobody is lost.
    ///
    /// On simulated links a rank's own thread cancels at the rank's clock, any other at whatever time the
    /// network has come to: that alone is not the same in every run.
    #[must_use]
    pub fn with_cancel(self, cancel: &Cancel) -> Self {
        cancel.tell(self.transport.waker());
        Self { cancel: cancel.clone(), ..self }
    }

    /// The same communicator, whose calls this switch ends too, beside the one that it has.
    #[must_use]
    pub fn with_other_cancel(self, cancel: &Cancel) -> Self {
        let either = self.cancel.or(cancel);
        self.with_cancel(&either)
    }

    /// The same communicator with another all-reduce. All ranks must choose alike.
    #[must_use]
    pub fn with_algorithm(self, algorithm: Algorithm) -> Self {
        let plans = self.plans.with_algorithm(algorithm);
        Self { plans: Arc::new(plans), ..self }
    }

    /// The same communicator with declared links, of which [`Algorithm::Auto`], broadcast and reduce make
    /// their choice. All ranks must declare alike.
    ///
    /// # Errors
    /// If the topology has another number of ranks.
    pub fn with_topology(self, topology: Topology) -> Result<Self, CommError> {
        if topology.size() != self.size() {
            let (got, want) = (topology.size(), self.size());
            return Err(CommError::Argument { op: "communicator", what: "topology size", got, want });
        }
        let plans = self.plans.with_topology(topology);
        Ok(Self { plans: Arc::new(plans), ..self })
    }

    /// The same communicator with the regions of [`Algorithm::Hierarchical`], instead of those that the
    /// declared links show. Communicators that are split from it find theirs anew. All ranks must declare
    /// alike.
    ///
    /// # Errors
    /// If not each rank is in one region.
    pub fn with_regions(self, regions: Vec<Vec<Rank>>) -> Result<Self, CommError> {
        let mut members: Vec<usize> = regions.iter().flatten().map(|rank| rank.index()).collect();
        members.sort_unstable();
        if !members.iter().copied().eq(0..self.size()) || regions.iter().any(Vec::is_empty) {
            let (got, want) = (members.len(), self.size());
            return Err(CommError::Argument { op: "communicator", what: "ranks in regions", got, want });
        }
        let plans = self.plans.with_regions(regions);
        Ok(Self { plans: Arc::new(plans), ..self })
    }

    /// The ranks in groups that are near each other: those of [`Communicator::with_regions`], else those that
    /// the declared links show.
    #[must_use]
    pub fn regions(&self) -> Vec<Vec<Rank>> {
        self.plans.regions().map_or_else(|| regions(self.plans.topology()), <[_]>::to_vec)
    }

    /// A buffer of `len` values of which a codec makes at most so many bytes, on the declared links.
    #[must_use]
    pub fn coded_buffer<'a>(&'a self, len: usize, payload: &'a dyn Fn(usize) -> usize) -> CodedBuffer<'a> {
        CodedBuffer { len, payload, topology: self.plans.topology(), regions: self.plans.regions() }
    }

    /// This rank.
    #[must_use]
    pub fn rank(&self) -> Rank {
        Rank(self.group.me as u32)
    }
    /// Number of ranks.
    #[must_use]
    pub fn size(&self) -> usize {
        self.group.members.len()
    }
    /// The network underneath.
    #[must_use]
    pub const fn transport(&self) -> &Arc<dyn Transport> {
        &self.transport
    }
    /// The transport's clock.
    #[must_use]
    pub fn now(&self) -> Nanos {
        self.transport.now()
    }
    /// Lets virtual time pass: modelled compute.
    pub fn advance(&self, by: Nanos) {
        self.transport.advance(by);
    }
    /// What the whole endpoint sent and received.
    #[must_use]
    pub fn stats(&self) -> Stats {
        self.transport.stats()
    }
    /// What the operations of this communicator have done, by name, and all-reduces by algorithm as well:
    /// bytes, time, and for whom they waited. Those under way are not in it.
    #[must_use]
    pub fn counters(&self) -> Vec<(&'static str, Option<Algorithm>, Counter)> {
        let counters = self.group.counters.lock().unwrap_or_else(PoisonError::into_inner);
        counters.iter().map(|(&(op, algorithm), counter)| (op, algorithm, counter.clone())).collect()
    }
    /// The part of a flat buffer of `len` elements that is this rank's share: see [`Communicator::shard_of`].
    #[must_use]
    pub fn shard(&self, len: usize) -> Range<usize> {
        self.shard_of(self.rank(), len)
    }
    /// The part of a flat buffer of `len` elements that is a rank's share: that of rank `r` of `n` is
    /// `floor(len * r / n)..floor(len * (r + 1) / n)`. Shards lie in the order of ranks and cover the buffer;
    /// their lengths differ by one at most, and some are empty where `len < n`. The longer ones are not the
    /// first ones.
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

    /// Why this communicator does not work any more, where it does not.
    pub fn check(&self) -> Result<(), CommError> {
        match &*self.group.failed.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(first) => Err(CommError::Poisoned(Arc::clone(first))),
            None => Ok(()),
        }
    }

    /// The tag of the next collective, and `lanes - 1` after it.
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

    /// Runs a body on this thread.
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

    /// Ranks with the same color make a communicator of their own, in the order of their keys. A collective.
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
        Ok(self.among(&ranks, mix(mix(mix(self.group.context, 1), u64::from(epoch)), u64::from(color))))
    }

    /// A communicator of these ranks, this one among them, in this order.
    fn among(&self, ranks: &[usize], context: u64) -> Self {
        let me = ranks.iter().position(|&rank| rank == self.group.me).expect("this rank is among them");
        let members = ranks.iter().map(|&rank| self.group.members[rank]).collect();
        let declared = self.plans.topology();
        let ranks: Vec<Rank> = ranks.iter().map(|&rank| Rank(rank as u32)).collect();
        let topology = declared.among(&ranks);
        let plans = Plans::new(Rank(me as u32), self.plans.algorithm(), topology);
        let group = Group::new(context, me, members, self.group.peers);
        Self { group, plans: Arc::new(plans), ..self.clone() }
    }
}

/// A word that ranks in the same collective compute alike.
fn check_word(name: &str, len: usize, facts: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(name.as_bytes());
    hasher.update(&(len as u64).to_le_bytes());
    hasher.update(facts);
    hasher.finalize()
}

/// One round of splitmix64 over a pair, for context ids that do not meet.
const fn mix(a: u64, b: u64) -> u64 {
    let mut x = (a ^ b.wrapping_mul(0xD6E8_FEB8_6659_FD93)).wrapping_add(0x9E37_79B9_7F4A_7C15);
    x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}
