//! The collectives over typed buffers.

use std::ops::Range;
use std::sync::Arc;

use farflung_base::{Bytes, Pending, Rank};

use super::{Communicator, check_word};
use crate::Algorithm;
use crate::CommError;
use crate::algorithm::AllReduce;
use crate::all_to_all::pairwise_all_to_all;
use crate::butterfly::{direct_gather, direct_scatter};
use crate::element::{Element, ReduceOp};
use crate::interpret::Interpreter;
use crate::plain::Plain;
use crate::plans::{Kind, Plan};
use crate::ring::{ring_all_gather, ring_reduce_scatter};
use crate::steps::{Merge, Program, Step};
use crate::tree::dissemination_barrier;

/// How the values of a collective are combined where none are.
const NONE: ReduceOp = ReduceOp::Sum;

impl Communicator {
    /// `len` is what all ranks have in common of the buffers' lengths.
    fn interpreter<T: Element, S: AsRef<[T]> + AsMut<[T]> + Send>(
        &self,
        name: &'static str,
        plan: Plan,
        data: S,
        op: ReduceOp,
        len: usize,
    ) -> Result<Interpreter<Plain<T, S>>, CommError> {
        T::supports(op, name)?;
        let Plan { program, algorithm, passing } = plan;
        let shape = ((program.lanes.len() as u64) << 32 | program.blocks as u64).to_le_bytes();
        let check = check_word(name, len, &[&[T::CODE, op as u8][..], &shape].concat());
        let tag = self.next_tags(program.lanes.len())?;
        let plain = Plain::new(&program, passing, data, op);
        let members = Arc::clone(&self.group.members);
        Ok(Interpreter::new(name, program, algorithm, plain, (tag, check), members))
    }

    fn in_place<T: Element>(
        &self,
        name: &'static str,
        plan: impl Into<Plan>,
        data: &mut [T],
        op: ReduceOp,
        len: usize,
    ) -> Result<(), CommError> {
        let (plan, bytes, rank) = (plan.into(), size_of_val(data), self.group.me);
        let algorithm = plan.algorithm.map(tracing::field::display);
        let _span = tracing::debug_span!("collective", op = name, algorithm, bytes, rank).entered();
        let body = self.interpreter(name, plan, &mut *data, op, len)?;
        let result = self.run(name, body, true).map(|_| ());
        if result.is_err() {
            data.fill(T::INVALID);
        }
        result
    }

    fn owned<T: Element>(
        &self,
        name: &'static str,
        plan: Plan,
        data: Vec<T>,
        op: ReduceOp,
    ) -> Pending<Result<Vec<T>, CommError>> {
        tracing::debug!(op = name, bytes = size_of_val(&data[..]), rank = self.group.me, "started");
        let len = data.len();
        match self.interpreter::<T, Vec<T>>(name, plan, data, op, len) {
            Ok(body) => self.start(name, body, true),
            Err(e) => Pending::ready(Err(e)),
        }
    }

    fn plan<T>(&self, kind: Kind, data: &[T]) -> Plan {
        self.plans.plan(kind, data.len(), Bytes(size_of_val(data) as u64))
    }

    fn root(&self, op: &'static str, root: Rank) -> Result<(), CommError> {
        self.member(op, root).map(|_| ())
    }

    /// One count for each rank, which add up to `len`.
    fn counts(&self, op: &'static str, counts: &[usize], len: usize) -> Result<(), CommError> {
        if counts.len() != self.size() {
            let (got, want) = (counts.len(), self.size());
            return Err(CommError::Argument { op, what: "number of counts", got, want });
        }
        match counts.iter().try_fold(0_usize, |sum, &count| sum.checked_add(count)) {
            Some(sum) if sum == len => Ok(()),
            sum => {
                let got = sum.unwrap_or(usize::MAX);
                Err(CommError::Argument { op, what: "sum of the counts", got, want: len })
            }
        }
    }

    /// The all-reduce that this communicator uses for a buffer of `bytes`.
    #[must_use]
    pub fn algorithm(&self, bytes: Bytes) -> Algorithm {
        self.plans.algorithm().resolve(bytes, self.plans.topology())
    }

    /// Reduces `data` over all ranks, in place; every rank ends with the same bits.
    pub fn all_reduce<T: Element>(&self, data: &mut [T], op: ReduceOp) -> Result<(), CommError> {
        let (program, len) = (self.plan(Kind::AllReduce, data), data.len());
        self.in_place("all_reduce", program, data, op, len)
    }

    /// Starts an all-reduce, which goes on while the caller computes.
    pub fn start_all_reduce<T: Element>(
        &self,
        data: Vec<T>,
        op: ReduceOp,
    ) -> Pending<Result<Vec<T>, CommError>> {
        self.owned("all_reduce", self.plan(Kind::AllReduce, &data), data, op)
    }

    /// An all-reduce by a program of one's own: one that leaves every rank with everything. All ranks pass theirs of
    /// the same collective.
    ///
    /// # Errors
    /// [`CommError::Argument`] if the program was made for another length.
    pub fn all_reduce_by<T: Element>(
        &self,
        program: Program,
        data: &mut [T],
        op: ReduceOp,
    ) -> Result<(), CommError> {
        let len = data.len();
        let made_for = program.bounds.as_ref().map_or(Some(len), |bounds| bounds.last().copied());
        if made_for != Some(len) {
            let (got, want) = (made_for.unwrap_or(0), len);
            return Err(CommError::Argument { op: "all_reduce", what: "length of the program", got, want });
        }
        self.in_place("all_reduce", program, data, op, len)
    }

    /// Reduces over all ranks so that the own [shard](Self::shard), which is returned, holds the result. The rest of
    /// `data` is spoilt.
    pub fn reduce_scatter<T: Element>(
        &self,
        data: &mut [T],
        op: ReduceOp,
    ) -> Result<Range<usize>, CommError> {
        let (program, len) = (self.plan(Kind::ReduceScatter, data), data.len());
        self.in_place("reduce_scatter", program, data, op, len)?;
        Ok(self.shard(len))
    }

    /// Starts a [`Communicator::reduce_scatter`].
    pub fn start_reduce_scatter<T: Element>(
        &self,
        data: Vec<T>,
        op: ReduceOp,
    ) -> Pending<Result<Vec<T>, CommError>> {
        self.owned("reduce_scatter", self.plan(Kind::ReduceScatter, &data), data, op)
    }

    /// [`Communicator::reduce_scatter`] with shards of `counts` elements.
    pub fn reduce_scatter_v<T: Element>(
        &self,
        data: &mut [T],
        counts: &[usize],
        op: ReduceOp,
    ) -> Result<Range<usize>, CommError> {
        let (name, len) = ("reduce_scatter_v", data.len());
        self.counts(name, counts, len)?;
        let program = ring_reduce_scatter(self.rank(), self.size()).with_counts(counts);
        self.in_place(name, program, data, op, len)?;
        let start = counts[..self.group.me].iter().sum::<usize>();
        Ok(start..start + counts[self.group.me])
    }

    /// Fills `data` with every rank's [shard](Self::shard); the own one is the input.
    pub fn all_gather<T: Element>(&self, data: &mut [T]) -> Result<(), CommError> {
        let (program, len) = (self.plan(Kind::AllGather, data), data.len());
        self.in_place("all_gather", program, data, NONE, len)
    }

    /// Starts a [`Communicator::all_gather`].
    pub fn start_all_gather<T: Element>(&self, data: Vec<T>) -> Pending<Result<Vec<T>, CommError>> {
        self.owned("all_gather", self.plan(Kind::AllGather, &data), data, NONE)
    }

    /// Fills `data` with every rank's `counts[rank]` elements, one after the other; the own ones are the input.
    pub fn all_gather_v<T: Element>(&self, data: &mut [T], counts: &[usize]) -> Result<(), CommError> {
        let (name, len) = ("all_gather_v", data.len());
        self.counts(name, counts, len)?;
        let program = ring_all_gather(self.rank(), self.size()).with_counts(counts);
        self.in_place(name, program, data, NONE, len)
    }

    /// Overwrites `data` with the root's: by a tree or a chain, whichever the declared topology makes cheaper.
    pub fn broadcast<T: Element>(&self, data: &mut [T], root: Rank) -> Result<(), CommError> {
        self.root("broadcast", root)?;
        let (program, len) = (self.plan(Kind::Broadcast(root), data), data.len());
        self.in_place("broadcast", program, data, NONE, len)
    }

    /// Reduces `data` over all ranks into the root's. The others' `data` is spoilt.
    pub fn reduce<T: Element>(&self, data: &mut [T], op: ReduceOp, root: Rank) -> Result<(), CommError> {
        self.root("reduce", root)?;
        let (program, len) = (self.plan(Kind::Reduce(root), data), data.len());
        self.in_place("reduce", program, data, op, len)
    }

    /// Everyone's `own` at the root, one after the other in the order of ranks; nothing elsewhere. `counts` are the
    /// lengths of all.
    pub fn gather<T: Element>(
        &self,
        own: &[T],
        counts: &[usize],
        root: Rank,
    ) -> Result<Option<Vec<T>>, CommError> {
        const NAME: &str = "gather";
        self.root(NAME, root)?;
        self.counts(NAME, counts, counts.iter().sum())?;
        if own.len() != counts[self.group.me] {
            let (got, want) = (own.len(), counts[self.group.me]);
            return Err(CommError::Argument { op: NAME, what: "length", got, want });
        }
        let program = direct_gather(self.rank(), self.size(), root);
        if self.rank() != root {
            self.in_place(NAME, self.only_own(program, own.len()), &mut own.to_vec(), NONE, 0)?;
            return Ok(None);
        }
        let mut all = vec![T::zeroed(); counts.iter().sum()];
        let start = counts[..self.group.me].iter().sum::<usize>();
        all[start..start + own.len()].copy_from_slice(own);
        self.in_place(NAME, program.with_counts(counts), &mut all, NONE, 0)?;
        Ok(Some(all))
    }

    /// This rank's `counts[rank]` elements of the root's `data`, which no other rank looks at.
    pub fn scatter<T: Element>(&self, data: &[T], counts: &[usize], root: Rank) -> Result<Vec<T>, CommError> {
        const NAME: &str = "scatter";
        self.root(NAME, root)?;
        let program = direct_scatter(self.rank(), self.size(), root);
        if self.rank() != root {
            self.counts(NAME, counts, counts.iter().sum())?;
            let mut own = vec![T::zeroed(); counts[self.group.me]];
            self.in_place(NAME, self.only_own(program, own.len()), &mut own, NONE, 0)?;
            return Ok(own);
        }
        self.counts(NAME, counts, data.len())?;
        let mut all = data.to_vec();
        self.in_place(NAME, program.with_counts(counts), &mut all, NONE, 0)?;
        let start = counts[..self.group.me].iter().sum::<usize>();
        Ok(all[start..start + counts[self.group.me]].to_vec())
    }

    /// A program over a buffer that is the own block and nothing else.
    fn only_own(&self, program: Program, len: usize) -> Program {
        let mut counts = vec![0; self.size()];
        counts[self.group.me] = len;
        program.with_counts(&counts)
    }

    /// Sends the `j`-th part of `data` to rank `j` and returns what the ranks sent here, in their order. All parts of all
    /// ranks are equally long.
    pub fn all_to_all<T: Element>(&self, data: &[T]) -> Result<Vec<T>, CommError> {
        const NAME: &str = "all_to_all";
        let (n, len) = (self.size(), data.len());
        if !len.is_multiple_of(n) {
            return Err(CommError::Argument {
                op: NAME,
                what: "length beyond whole parts",
                got: len % n,
                want: 0,
            });
        }
        let mut both = [data, data].concat();
        let program = self.plan(Kind::AllToAll, &both);
        self.in_place(NAME, program, &mut both, NONE, len)?;
        Ok(both.split_off(len))
    }

    /// Sends `sent[j]` elements of `data`, which lie one part after the other, to rank `j`, and returns what the ranks
    /// sent here, in their order: `received[j]` elements of rank `j`.
    pub fn all_to_all_v<T: Element>(
        &self,
        data: &[T],
        sent: &[usize],
        received: &[usize],
    ) -> Result<Vec<T>, CommError> {
        const NAME: &str = "all_to_all_v";
        self.counts(NAME, sent, data.len())?;
        let len = received.iter().sum();
        self.counts(NAME, received, len)?;
        if sent[self.group.me] != received[self.group.me] {
            let (got, want) = (received[self.group.me], sent[self.group.me]);
            return Err(CommError::Argument { op: NAME, what: "own count", got, want });
        }
        let mut both = data.to_vec();
        both.resize(data.len() + len, T::zeroed());
        let program = pairwise_all_to_all(self.rank(), self.size()).with_counts(&[sent, received].concat());
        self.in_place(NAME, program, &mut both, NONE, 0)?;
        Ok(both.split_off(data.len()))
    }

    /// Sends `data` to each neighbour and returns theirs, in the order of `neighbors`. Whoever names a rank is named by
    /// it, and no rank twice; all have equally much. For a ring `neighbors` are the two ranks next to this one, for
    /// gossip in pairs the [partner](shift_one) of the round; a rank without neighbours takes part with none.
    pub fn neighbor_exchange<T: Element>(
        &self,
        data: &[T],
        neighbors: &[Rank],
    ) -> Result<Vec<Vec<T>>, CommError> {
        const NAME: &str = "neighbor_exchange";
        for (i, &rank) in neighbors.iter().enumerate() {
            self.member(NAME, rank)?;
            if rank == self.rank() || neighbors[..i].contains(&rank) {
                let (got, want) = (rank.index(), self.size());
                return Err(CommError::Argument { op: NAME, what: "neighbor named twice", got, want });
            }
        }
        let (len, parts) = (data.len(), neighbors.len() + 1);
        let step = Step {
            sends: neighbors.iter().map(|&to| (to, 0..1)).collect(),
            recvs: (1..).zip(neighbors).map(|(i, &from)| (from, i..i + 1, Merge::Copy)).collect(),
            ..Step::default()
        };
        let mut all = data.repeat(parts);
        let mut program = Program::new(parts, vec![step]).with_counts(&vec![len; parts]);
        // Ranks may have different numbers of neighbours: what they have in common is one exchange.
        program.blocks = 1;
        self.in_place(NAME, program, &mut all, NONE, len)?;
        let mut chunks = all.chunks(len.max(1)).skip(1).map(<[T]>::to_vec);
        Ok(neighbors.iter().map(|_| chunks.next().unwrap_or_default()).collect())
    }

    /// Returns when every rank has called it.
    pub fn barrier(&self) -> Result<(), CommError> {
        let program = dissemination_barrier(self.rank(), self.size());
        self.in_place::<f32>("barrier", program, &mut [], NONE, 0)
    }
}

/// The partner of a rank in round `round` of gossip in pairs, where each rank of one half meets each of the other; `None`
/// where it sits out.
///
/// Source: bagua's decentralized "shift one" peer selection.
#[must_use]
pub fn shift_one(rank: Rank, size: usize, round: usize) -> Option<Rank> {
    let half = size / 2;
    let me = rank.index();
    if half == 0 || me >= 2 * half {
        return None;
    }
    let partner = if me < half { half + (me + round) % half } else { (me + half - round % half) % half };
    Some(Rank(partner as u32))
}
