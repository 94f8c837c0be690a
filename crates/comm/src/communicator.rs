//! A group of ranks over a transport, and the calls that users make. It knows no network.

use std::marker::PhantomData;
use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::Poll;

use farflung_base::{Bytes, Link, Nanos, PeerId, Pending, Rank, Topology};

use crate::coded::{Coded, CodedReduce, Coder};
use crate::cost::{Algorithm, cost};
use crate::element::{Element, ReduceOp};
use crate::interpret::{Interpreter, Progress};
use crate::message::{Exchange, Incoming, Outgoing, RecvMessage, SendMessage};
use crate::ring::{ring_all_gather, ring_reduce_scatter};
use crate::steps::{Program, cut};
use crate::transport::{Channel, Port, Slot, Stats, Tag, Task, Transport, get, pending, put};
use crate::tree::{binomial_broadcast, chain_broadcast, dissemination_barrier};
use crate::{CommError, Frame};

/// An operation without its frame: deadline, failure and result are the [`Guard`]'s.
pub(crate) trait Body: Send {
    type Output;
    fn poll(&mut self, port: &mut dyn Port) -> Poll<Result<(), CommError>>;
    fn waits_for(&self) -> PeerId;
    fn finish(self) -> Self::Output;
}

/// What all clones of a communicator share.
#[derive(Debug)]
struct Group {
    context: u64,
    me: usize,
    members: Arc<[PeerId]>,
    next: AtomicU32,
    failed: Mutex<Option<Arc<CommError>>>,
}

impl Group {
    /// Notes the first failure and tells the others, so that they need not wait for their deadlines.
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
        let tag = Tag { context: self.context, channel: Channel::Abort, number: culprit.0 };
        for &peer in self.members.iter().filter(|&&peer| peer != me) {
            let frame: Frame = port.lease(0);
            // A peer that cannot be told has its own way of noticing.
            let _ = port.send(peer, tag, frame);
        }
    }
}

/// A body with its name, deadline and result; ends its group where it fails, if it belongs to one.
struct Guard<B: Body> {
    name: &'static str,
    body: Option<B>,
    group: Option<Arc<Group>>,
    limit: Nanos,
    slot: Slot<B::Output>,
}

impl<B: Body> Task for Guard<B>
where
    B::Output: Send,
{
    fn name(&self) -> &'static str {
        self.name
    }
    fn poll(&mut self, port: &mut dyn Port) -> Poll<()> {
        let body = self.body.as_mut().expect("a task is not polled after its end");
        match body.poll(port) {
            Poll::Pending => return Poll::Pending,
            Poll::Ready(Ok(())) => {
                let body = self.body.take().expect("it was there");
                put(&self.slot, Ok(body.finish()));
            }
            Poll::Ready(Err(error)) => self.fail(error, port),
        }
        Poll::Ready(())
    }
    fn fail(&mut self, error: CommError, port: &mut dyn Port) {
        if let Some(group) = &self.group {
            group.fail(&error, port);
        }
        tracing::debug!(op = self.name, %error, "failed");
        self.body = None;
        put(&self.slot, Err(error));
    }
    fn waits_for(&self) -> PeerId {
        self.body.as_ref().map_or(PeerId(0), Body::waits_for)
    }
    fn limit(&self) -> Nanos {
        self.limit
    }
}

/// Ranks `0..size` over a transport, with collectives that are matched by the order in which each rank starts them.
///
/// Clones are the same communicator. After a failed collective it is poisoned: every later call fails with the reason.
/// Results come back whole or not at all; a slice that was worked on in place is filled with NaN (`u64::MAX`) instead.
#[derive(Debug, Clone)]
pub struct Communicator {
    transport: Arc<dyn Transport>,
    group: Arc<Group>,
    deadline: Nanos,
    algorithm: Algorithm,
    topology: Arc<Topology>,
}

impl Communicator {
    /// All members of the transport's network, in the order of their ids. Deadline 60 s, [`Algorithm::Ring`], and a
    /// declared topology of 1 Gbit/s and 200 us.
    #[must_use]
    pub fn new(transport: Arc<dyn Transport>) -> Self {
        let size = transport.size();
        let me = transport.me().index();
        let members = (0..size as u32).map(PeerId).collect();
        let [.., (_, bandwidth, us), _] = Link::NAMED;
        let link = Link { bandwidth: farflung_base::Bandwidth(bandwidth), latency: Nanos::from_micros(us) };
        Self {
            transport,
            group: Arc::new(Group {
                context: 0,
                me,
                members,
                next: AtomicU32::new(0),
                failed: Mutex::default(),
            }),
            deadline: Nanos::from_millis(60_000),
            algorithm: Algorithm::default(),
            topology: Arc::new(Topology::uniform(size, link)),
        }
    }

    /// The same communicator, whose calls give up after `deadline`.
    #[must_use]
    pub fn with_deadline(self, deadline: Nanos) -> Self {
        Self { deadline, ..self }
    }

    /// The same communicator with another all-reduce. All ranks must choose alike.
    #[must_use]
    pub fn with_algorithm(self, algorithm: Algorithm) -> Self {
        Self { algorithm, ..self }
    }

    /// The same communicator with declared links, of which [`Algorithm::Auto`] and broadcast make their choice. All
    /// ranks must declare alike.
    ///
    /// # Errors
    /// If the topology has another number of ranks.
    pub fn with_topology(self, topology: Topology) -> Result<Self, CommError> {
        if topology.size() != self.size() {
            let (got, want) = (topology.size(), self.size());
            return Err(CommError::Argument { op: "communicator", what: "topology size", got, want });
        }
        Ok(Self { topology: Arc::new(topology), ..self })
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
    /// The part of a flat buffer of `len` elements that is this rank's share.
    #[must_use]
    pub fn shard(&self, len: usize) -> Range<usize> {
        self.shard_of(self.rank(), len)
    }
    /// The part of a flat buffer of `len` elements that is a rank's share.
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

    /// The tag of the next collective.
    fn next_tag(&self) -> Result<Tag, CommError> {
        self.check()?;
        let number = self.group.next.fetch_add(1, Ordering::Relaxed);
        Ok(Tag { context: self.group.context, channel: Channel::Collective, number })
    }

    fn guard<B: Body>(&self, name: &'static str, body: B, collective: bool) -> Guard<B> {
        let group = collective.then(|| Arc::clone(&self.group));
        Guard { name, body: Some(body), group, limit: self.deadline, slot: Slot::default() }
    }

    /// Runs a body on this thread.
    fn run<B: Body>(&self, name: &'static str, body: B, collective: bool) -> Result<B::Output, CommError>
    where
        B::Output: Send,
    {
        let mut guard = self.guard(name, body, collective);
        self.transport.run(&mut guard);
        get(&guard.slot)
    }

    fn start<B: Body + 'static>(
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

    fn interpreter<T: Element, S: AsRef<[T]>>(
        &self,
        name: &'static str,
        program: Program,
        data: S,
        op: ReduceOp,
    ) -> Result<Interpreter<T, S>, CommError> {
        T::supports(op, name)?;
        let len = data.as_ref().len();
        let facts = [&[T::CODE, op as u8][..], &(program.blocks as u64).to_le_bytes()];
        Ok(Interpreter {
            name,
            check: check_word(name, len, &facts.concat()),
            tag: self.next_tag()?,
            program,
            data,
            op,
            members: Arc::clone(&self.group.members),
            cursor: 0,
            sent: Progress::default(),
            received: Progress::default(),
            element: PhantomData,
        })
    }

    fn in_place<T: Element>(
        &self,
        name: &'static str,
        program: Program,
        data: &mut [T],
        op: ReduceOp,
    ) -> Result<(), CommError> {
        let bytes = size_of_val(data);
        let _span = tracing::debug_span!("collective", op = name, bytes, rank = self.group.me).entered();
        let body = self.interpreter(name, program, &mut *data, op)?;
        let result = self.run(name, body, true).map(|_| ());
        if result.is_err() {
            data.fill(T::INVALID);
        }
        result
    }

    fn owned<T: Element>(
        &self,
        name: &'static str,
        program: Program,
        data: Vec<T>,
        op: ReduceOp,
    ) -> Pending<Result<Vec<T>, CommError>> {
        tracing::debug!(op = name, bytes = size_of_val(&data[..]), rank = self.group.me, "started");
        match self.interpreter::<T, Vec<T>>(name, program, data, op) {
            Ok(body) => self.start(name, body, true),
            Err(e) => Pending::ready(Err(e)),
        }
    }

    /// The all-reduce that this communicator uses for a buffer of `bytes`.
    #[must_use]
    pub fn algorithm(&self, bytes: Bytes) -> Algorithm {
        self.algorithm.resolve(bytes, &self.topology)
    }

    fn all_reduce_program<T>(&self, data: &[T]) -> Program {
        self.algorithm(Bytes(size_of_val(data) as u64)).program(self.rank(), self.size())
    }

    /// Reduces `data` over all ranks, in place; every rank ends with the same bits.
    pub fn all_reduce<T: Element>(&self, data: &mut [T], op: ReduceOp) -> Result<(), CommError> {
        self.in_place("all_reduce", self.all_reduce_program(data), data, op)
    }

    /// Starts an all-reduce, which goes on while the caller computes.
    pub fn start_all_reduce<T: Element>(
        &self,
        data: Vec<T>,
        op: ReduceOp,
    ) -> Pending<Result<Vec<T>, CommError>> {
        self.owned("all_reduce", self.all_reduce_program(&data), data, op)
    }

    /// Reduces over all ranks so that the own [shard](Self::shard), which is returned, holds the result. The rest of
    /// `data` is spoilt.
    pub fn reduce_scatter<T: Element>(
        &self,
        data: &mut [T],
        op: ReduceOp,
    ) -> Result<Range<usize>, CommError> {
        let program = ring_reduce_scatter(self.rank(), self.size());
        self.in_place("reduce_scatter", program, data, op)?;
        Ok(self.shard(data.len()))
    }

    /// Starts a [`Communicator::reduce_scatter`].
    pub fn start_reduce_scatter<T: Element>(
        &self,
        data: Vec<T>,
        op: ReduceOp,
    ) -> Pending<Result<Vec<T>, CommError>> {
        self.owned("reduce_scatter", ring_reduce_scatter(self.rank(), self.size()), data, op)
    }

    /// Fills `data` with every rank's [shard](Self::shard); the own one is the input.
    pub fn all_gather<T: Element>(&self, data: &mut [T]) -> Result<(), CommError> {
        self.in_place("all_gather", ring_all_gather(self.rank(), self.size()), data, ReduceOp::Sum)
    }

    /// Starts a [`Communicator::all_gather`].
    pub fn start_all_gather<T: Element>(&self, data: Vec<T>) -> Pending<Result<Vec<T>, CommError>> {
        self.owned("all_gather", ring_all_gather(self.rank(), self.size()), data, ReduceOp::Sum)
    }

    /// Overwrites `data` with the root's: by a tree or a chain, whichever the declared topology makes cheaper.
    pub fn broadcast<T: Element>(&self, data: &mut [T], root: Rank) -> Result<(), CommError> {
        let n = self.size();
        if root.index() >= n {
            return Err(CommError::Argument { op: "broadcast", what: "root", got: root.index(), want: n });
        }
        let bytes = Bytes(size_of_val(data) as u64);
        let price = |program: &dyn Fn(Rank) -> Program| {
            let programs: Vec<_> = (0..n as u32).map(|rank| program(Rank(rank))).collect();
            cost(&programs, bytes, &self.topology)
        };
        let mut best = (price(&|rank| binomial_broadcast(rank, n, root)), None);
        for blocks in [4, 16, 64] {
            // A block is worth a message of its own only from a few pages on.
            if bytes.0 / blocks as u64 >= 16 * 1024 {
                best = best.min((price(&|rank| chain_broadcast(rank, n, root, blocks)), Some(blocks)));
            }
        }
        let program = match best.1 {
            None => binomial_broadcast(self.rank(), n, root),
            Some(blocks) => chain_broadcast(self.rank(), n, root, blocks),
        };
        self.in_place("broadcast", program, data, ReduceOp::Sum)
    }

    /// Returns when every rank has called it.
    pub fn barrier(&self) -> Result<(), CommError> {
        let program = dissemination_barrier(self.rank(), self.size());
        self.in_place::<f32>("barrier", program, &mut [], ReduceOp::Sum)
    }

    fn exchange(&self, name: &'static str, out: Vec<Arc<Vec<u8>>>) -> Result<Exchange, CommError> {
        if out.len() != self.size() {
            let (got, want) = (out.len(), self.size());
            return Err(CommError::Argument { op: name, what: "number of messages", got, want });
        }
        let tag = self.next_tag()?;
        let members = Arc::clone(&self.group.members);
        Ok(Exchange::new(name, self.group.me, members, tag, check_word(name, 0, &[]), out))
    }

    /// The same message for every rank.
    fn to_all(&self, bytes: Vec<u8>) -> Vec<Arc<Vec<u8>>> {
        let bytes = Arc::new(bytes);
        (0..self.size()).map(|_| Arc::clone(&bytes)).collect()
    }

    /// Everyone's bytes, of any lengths, in rank order.
    pub fn all_gather_bytes(&self, bytes: Vec<u8>) -> Result<Vec<Vec<u8>>, CommError> {
        const NAME: &str = "all_gather_bytes";
        self.run(NAME, self.exchange(NAME, self.to_all(bytes))?, true)
    }

    /// Starts a [`Communicator::all_gather_bytes`].
    pub fn start_all_gather_bytes(&self, bytes: Vec<u8>) -> Pending<Result<Vec<Vec<u8>>, CommError>> {
        const NAME: &str = "all_gather_bytes";
        match self.exchange(NAME, self.to_all(bytes)) {
            Ok(body) => self.start(NAME, body, true),
            Err(e) => Pending::ready(Err(e)),
        }
    }

    /// Sends `out[j]` to rank `j` and returns what the ranks sent here, in their order.
    pub fn all_to_all_bytes(&self, out: Vec<Vec<u8>>) -> Result<Vec<Vec<u8>>, CommError> {
        const NAME: &str = "all_to_all_bytes";
        let out = out.into_iter().map(Arc::new).collect();
        self.run(NAME, self.exchange(NAME, out)?, true)
    }

    /// Starts an all-reduce that travels as `coder`'s bytes; gives the coder back with the result. A sum or a mean.
    pub fn start_all_reduce_coded(
        &self,
        data: Vec<f32>,
        op: ReduceOp,
        coder: Box<dyn Coder>,
    ) -> Pending<Result<Coded, CommError>> {
        const NAME: &str = "all_reduce_coded";
        if !matches!(op, ReduceOp::Sum | ReduceOp::Mean) {
            return Pending::ready(Err(CommError::Unsupported { op: NAME, element: "coded f32" }));
        }
        let tag = match self.next_tag() {
            Ok(tag) => tag,
            Err(e) => return Pending::ready(Err(e)),
        };
        let check = check_word(NAME, data.len(), &[op as u8]);
        let members = Arc::clone(&self.group.members);
        let body = CodedReduce::new(NAME, data, op, coder, self.group.me, members, tag, check);
        self.start(NAME, body, true)
    }

    fn member(&self, op: &'static str, rank: Rank) -> Result<PeerId, CommError> {
        let members = &self.group.members;
        let argument = CommError::Argument { op, what: "rank", got: rank.index(), want: members.len() };
        members.get(rank.index()).copied().ok_or(argument)
    }

    fn outgoing(&self, to: Rank, tag: u32, data: Vec<u8>) -> Result<SendMessage, CommError> {
        let to = self.member("send", to)?;
        let tag = Tag::user(self.group.context, tag);
        Ok(SendMessage { to, tag, out: Outgoing::new(Arc::new(data)) })
    }

    fn incoming(&self, from: Rank, tag: u32) -> Result<RecvMessage, CommError> {
        let from = self.member("recv", from)?;
        let tag = Tag::user(self.group.context, tag);
        Ok(RecvMessage { from, tag, incoming: Incoming::default() })
    }

    /// Sends bytes to a rank; returns when the network has taken them. Messages neither poison a communicator nor mind
    /// that it is poisoned.
    pub fn send(&self, to: Rank, tag: u32, data: &[u8]) -> Result<(), CommError> {
        self.run("send", self.outgoing(to, tag, data.to_vec())?, false)
    }

    /// Starts to send bytes to a rank.
    pub fn start_send(&self, to: Rank, tag: u32, data: Vec<u8>) -> Pending<Result<(), CommError>> {
        match self.outgoing(to, tag, data) {
            Ok(body) => self.start("send", body, false),
            Err(e) => Pending::ready(Err(e)),
        }
    }

    /// Receives bytes from a rank. One receive at a time of each rank and tag.
    pub fn recv(&self, from: Rank, tag: u32) -> Result<Vec<u8>, CommError> {
        self.run("recv", self.incoming(from, tag)?, false)
    }

    /// Starts to receive bytes from a rank.
    pub fn start_recv(&self, from: Rank, tag: u32) -> Pending<Result<Vec<u8>, CommError>> {
        match self.incoming(from, tag) {
            Ok(body) => self.start("recv", body, false),
            Err(e) => Pending::ready(Err(e)),
        }
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
        let me =
            same.iter().position(|&(_, rank)| rank == self.group.me).expect("its own color is among them");
        let members = same.iter().map(|&(_, rank)| self.group.members[rank]).collect();
        let mut topology = Topology::uniform(same.len(), Link::FREE);
        for (i, &(_, a)) in same.iter().enumerate() {
            topology.set_port(Rank(i as u32), self.topology.port(Rank(a as u32)));
            for (j, &(_, b)) in same.iter().enumerate() {
                let link = self.topology.link(Rank(a as u32), Rank(b as u32));
                topology.set_link(Rank(i as u32), Rank(j as u32), link);
            }
        }
        let context = mix(mix(mix(self.group.context, 1), u64::from(epoch)), u64::from(color));
        let group = Group { context, me, members, next: AtomicU32::new(0), failed: Mutex::default() };
        Ok(Self { group: Arc::new(group), topology: Arc::new(topology), ..self.clone() })
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
