//! Collectives that give each rank other values than it passed: gather, scatter, all-to-all, neighbour
//! exchange.

use std::ops::Range;

use farflung_base::{Pending, Rank};

use super::Communicator;
use super::call::Call;
use crate::CommError;
use crate::all_to_all::pairwise_all_to_all;
use crate::butterfly::{direct_gather, direct_scatter};
use crate::element::{Element, ReduceOp};
use crate::owners::{gather_from_owners, scatter_to_owners, uneven_all_to_all};
use crate::plans::Kind;
use crate::reduction::Reduction;
use crate::steps::{Merge, Program, Step};

/// A call with a buffer of its own, and the range of the buffer that is the result.
struct Moved<T> {
    call: Call<T>,
    buffer: Vec<T>,
    result: Range<usize>,
}

impl Communicator {
    fn moved<T: Element>(&self, moved: Result<Moved<T>, CommError>) -> Result<Vec<T>, CommError> {
        let Moved { call, mut buffer, result } = moved?;
        self.in_place(call, &mut buffer)?;
        Ok(cut_out(buffer, &result))
    }

    fn start_moved<T: Element>(
        &self,
        moved: Result<Moved<T>, CommError>,
    ) -> Pending<Result<Vec<T>, CommError>> {
        match moved {
            Ok(Moved { call, buffer, result }) => {
                self.owned(Ok(call), buffer).map(move |done| done.map(|buffer| cut_out(buffer, &result)))
            }
            Err(error) => Pending::ready(Err(error)),
        }
    }

    fn gathered<T: Element>(&self, own: &[T], counts: &[usize], root: Rank) -> Result<Moved<T>, CommError> {
        const NAME: &str = "gather";
        self.root(NAME, root)?;
        let len = counts.iter().fold(0_usize, |sum, &count| sum.saturating_add(count));
        self.counts(NAME, counts, len)?;
        if own.len() != counts[self.group.me] {
            let (got, want) = (own.len(), counts[self.group.me]);
            return Err(CommError::Argument { op: NAME, what: "number of elements of this rank", got, want });
        }
        let program = direct_gather(self.rank(), self.size(), root);
        if self.rank() != root {
            let call = Call::moving(NAME, self.only_own(program, own.len()), 0);
            return Ok(Moved { call, buffer: own.to_vec(), result: 0..0 });
        }
        let mut buffer = vec![T::zeroed(); len];
        let start = counts[..self.group.me].iter().sum::<usize>();
        buffer[start..start + own.len()].copy_from_slice(own);
        Ok(Moved { call: Call::moving(NAME, program.with_counts(counts), 0), buffer, result: 0..len })
    }

    /// Returns the `own` values of all ranks at the root, concatenated in rank order; `None` on other ranks.
    /// `counts` are the lengths of all ranks' `own`.
    pub fn gather<T: Element>(
        &self,
        own: &[T],
        counts: &[usize],
        root: Rank,
    ) -> Result<Option<Vec<T>>, CommError> {
        let all = self.moved(self.gathered(own, counts, root))?;
        Ok((self.rank() == root).then_some(all))
    }

    /// Starts a [`Communicator::gather`].
    pub fn start_gather<T: Element>(
        &self,
        own: &[T],
        counts: &[usize],
        root: Rank,
    ) -> Pending<Result<Option<Vec<T>>, CommError>> {
        let is_root = self.rank() == root;
        self.start_moved(self.gathered(own, counts, root))
            .map(move |all| all.map(|all| is_root.then_some(all)))
    }

    fn scattered<T: Element>(&self, data: &[T], counts: &[usize], root: Rank) -> Result<Moved<T>, CommError> {
        const NAME: &str = "scatter";
        self.root(NAME, root)?;
        let program = direct_scatter(self.rank(), self.size(), root);
        let len = counts.iter().fold(0_usize, |sum, &count| sum.saturating_add(count));
        self.counts(NAME, counts, if self.rank() == root { data.len() } else { len })?;
        let own = counts[self.group.me];
        if self.rank() != root {
            let call = Call::moving(NAME, self.only_own(program, own), 0);
            return Ok(Moved { call, buffer: vec![T::zeroed(); own], result: 0..own });
        }
        let start = counts[..self.group.me].iter().sum::<usize>();
        let call = Call::moving(NAME, program.with_counts(counts), 0);
        Ok(Moved { call, buffer: data.to_vec(), result: start..start + own })
    }

    /// Returns this rank's `counts[rank]` elements of the root's `data`; on other ranks, `data` is ignored.
    pub fn scatter<T: Element>(&self, data: &[T], counts: &[usize], root: Rank) -> Result<Vec<T>, CommError> {
        self.moved(self.scattered(data, counts, root))
    }

    /// Starts a [`Communicator::scatter`].
    pub fn start_scatter<T: Element>(
        &self,
        data: &[T],
        counts: &[usize],
        root: Rank,
    ) -> Pending<Result<Vec<T>, CommError>> {
        self.start_moved(self.scattered(data, counts, root))
    }

    /// Returns the program over a buffer that holds only this rank's own block.
    fn only_own(&self, program: Program, len: usize) -> Program {
        let mut counts = vec![0; self.size()];
        counts[self.group.me] = len;
        program.with_counts(&counts)
    }

    fn exchanged<T: Element>(&self, data: &[T]) -> Result<Moved<T>, CommError> {
        const NAME: &str = "all_to_all";
        let (n, len) = (self.size(), data.len());
        if !len.is_multiple_of(n) {
            return Err(CommError::Argument {
                op: NAME,
                what: "remainder of the length divided by the number of ranks",
                got: len % n,
                want: 0,
            });
        }
        let call = Call::moving(NAME, self.plan::<T>(Kind::AllToAll, 2 * len), len);
        Ok(Moved { call, buffer: [data, data].concat(), result: len..2 * len })
    }

    /// Sends part `j` of `data` to rank `j`, and returns the parts received, in rank order. All parts of all
    /// ranks have the same length.
    pub fn all_to_all<T: Element>(&self, data: &[T]) -> Result<Vec<T>, CommError> {
        self.moved(self.exchanged(data))
    }

    /// Starts a [`Communicator::all_to_all`].
    pub fn start_all_to_all<T: Element>(&self, data: &[T]) -> Pending<Result<Vec<T>, CommError>> {
        self.start_moved(self.exchanged(data))
    }

    fn exchanged_v<T: Element>(
        &self,
        data: &[T],
        sent: &[usize],
        received: &[usize],
        program: impl Fn() -> Program,
    ) -> Result<Moved<T>, CommError> {
        const NAME: &str = "all_to_all_v";
        self.counts(NAME, sent, data.len())?;
        let len = received.iter().fold(0_usize, |sum, &count| sum.saturating_add(count));
        self.counts(NAME, received, len)?;
        if sent[self.group.me] != received[self.group.me] {
            let (got, want) = (received[self.group.me], sent[self.group.me]);
            return Err(CommError::Argument {
                op: NAME,
                what: "number of elements that this rank receives from itself",
                got,
                want,
            });
        }
        let mut buffer = data.to_vec();
        buffer.resize(data.len() + len, T::zeroed());
        Ok(Moved { call: Call::moving(NAME, program(), 0), buffer, result: data.len()..data.len() + len })
    }

    /// Sends `sent[j]` elements of `data` to rank `j`, and returns the elements received, in rank order:
    /// `received[j]` from rank `j`. The parts of `data` are consecutive.
    pub fn all_to_all_v<T: Element>(
        &self,
        data: &[T],
        sent: &[usize],
        received: &[usize],
    ) -> Result<Vec<T>, CommError> {
        self.start_all_to_all_v(data, sent, received).wait()
    }

    /// Starts a [`Communicator::all_to_all_v`].
    pub fn start_all_to_all_v<T: Element>(
        &self,
        data: &[T],
        sent: &[usize],
        received: &[usize],
    ) -> Pending<Result<Vec<T>, CommError>> {
        let pairwise =
            || pairwise_all_to_all(self.rank(), self.size()).with_counts(&[sent, received].concat());
        self.start_moved(self.exchanged_v(data, sent, received, pairwise))
    }

    /// Like [`Communicator::start_all_to_all_v`], in one latency: all parts are on their way at once, and those
    /// without elements take no message.
    pub fn start_uneven_all_to_all<T: Element>(
        &self,
        data: &[T],
        sent: &[usize],
        received: &[usize],
    ) -> Pending<Result<Vec<T>, CommError>> {
        let at_once = || uneven_all_to_all(self.rank(), sent, received);
        self.start_moved(self.exchanged_v(data, sent, received, at_once))
    }

    /// Adds the values of all ranks in rank order: rank `r` gets those of `counts[r]` elements of `data`, in
    /// its own part of the result. The other elements of the result are unspecified. The order of the sum does
    /// not depend on who gets an element, so that a sum is the same bit for bit under any `counts`.
    pub fn start_reduce_scatter_in_order<T: Element>(
        &self,
        data: Vec<T>,
        counts: &[usize],
        op: impl Into<Reduction<T>>,
    ) -> Pending<Result<Vec<T>, CommError>> {
        const NAME: &str = "reduce_scatter_in_order";
        let (n, me, op) = (self.size(), self.group.me, op.into());
        let checked = self.counts(NAME, counts, data.len()).and_then(|()| op.is_defined(NAME));
        if let Err(error) = checked {
            return Pending::ready(Err(error));
        }
        let own = counts[..me].iter().sum::<usize>()..counts[..=me].iter().sum::<usize>();
        let (all, mut buffer, is_mean) = (data.len(), data, op.is_mean());
        // Callers keep the buffer for the next sum: growing would double it.
        buffer.reserve_exact(own.len());
        buffer.resize(all + own.len(), T::zeroed());
        let program = scatter_to_owners(self.rank(), counts);
        let sum = if is_mean { ReduceOp::Sum.into() } else { op };
        let call = Call { name: NAME, plan: program.into(), op: sum, len: all, native: None };
        self.owned(Ok(call), buffer).map(move |done| {
            let mut buffer = done?;
            if is_mean {
                T::divide(&mut buffer[all..], n);
            }
            buffer.copy_within(all.., own.start);
            buffer.truncate(all);
            Ok(buffer)
        })
    }

    /// Fills `data` with `counts[rank]` elements of each rank, in rank order, in one latency: an
    /// [`Communicator::all_gather_v`] for parts of unequal lengths, which a ring passes on as slowly as the
    /// longest. The input is this rank's own part of `data`.
    pub fn start_gather_from_owners<T: Element>(
        &self,
        data: Vec<T>,
        counts: &[usize],
    ) -> Pending<Result<Vec<T>, CommError>> {
        const NAME: &str = "gather_from_owners";
        let len = data.len();
        let program = self.counts(NAME, counts, len).map(|()| gather_from_owners(self.rank(), counts));
        self.owned(program.map(|program| Call::moving(NAME, program, len)), data)
    }

    fn met<T: Element>(&self, data: &[T], neighbors: &[Rank]) -> Result<Moved<T>, CommError> {
        const NAME: &str = "neighbor_exchange";
        for (i, &rank) in neighbors.iter().enumerate() {
            self.member(NAME, rank)?;
            if rank == self.rank() || neighbors[..i].contains(&rank) {
                let (got, want) = (rank.index(), self.size());
                return Err(CommError::Argument {
                    op: NAME,
                    what: "neighbor that is this rank itself or is listed twice",
                    got,
                    want,
                });
            }
        }
        let (len, parts) = (data.len(), neighbors.len() + 1);
        let step = Step {
            sends: neighbors.iter().map(|&to| (to, 0..1)).collect(),
            recvs: (1..).zip(neighbors).map(|(i, &from)| (from, i..i + 1, Merge::Copy)).collect(),
            ..Step::default()
        };
        let mut program = Program::new(parts, vec![step]).with_counts(&vec![len; parts]);
        // Ranks may have different numbers of neighbours, but compare the number of blocks; so all use 1.
        program.blocks = 1;
        let (buffer, result) = (data.repeat(parts), len..len * parts);
        Ok(Moved { call: Call::moving(NAME, program, len), buffer, result })
    }

    /// Sends `data` to each neighbour, and returns theirs in the order of `neighbors`. If a rank names another,
    /// that one must name it too; no rank is named twice; all `data` have the same length. For a ring,
    /// `neighbors` are the two ranks next to this one; for gossip in pairs, the [partner](shift_one) of the
    /// round. A rank without neighbours passes an empty list.
    pub fn neighbor_exchange<T: Element>(
        &self,
        data: &[T],
        neighbors: &[Rank],
    ) -> Result<Vec<Vec<T>>, CommError> {
        let theirs = self.moved(self.met(data, neighbors))?;
        Ok(parts(&theirs, neighbors.len()))
    }

    /// Starts a [`Communicator::neighbor_exchange`].
    pub fn start_neighbor_exchange<T: Element>(
        &self,
        data: &[T],
        neighbors: &[Rank],
    ) -> Pending<Result<Vec<Vec<T>>, CommError>> {
        let count = neighbors.len();
        self.start_moved(self.met(data, neighbors))
            .map(move |theirs| theirs.map(|theirs| parts(&theirs, count)))
    }
}

/// Returns a part of a buffer, reusing the buffer if the part is at its start.
fn cut_out<T>(mut buffer: Vec<T>, part: &Range<usize>) -> Vec<T> {
    buffer.truncate(part.end);
    if part.start > 0 { buffer.split_off(part.start) } else { buffer }
}

/// Splits values into `count` parts of equal length.
fn parts<T: Clone>(all: &[T], count: usize) -> Vec<Vec<T>> {
    let len = all.len() / count.max(1);
    (0..count).map(|i| all[i * len..(i + 1) * len].to_vec()).collect()
}

/// Returns the partner of a rank in round `round` of gossip in pairs; `None` if it has none in this round. Over
/// `size / 2` rounds, each rank of the first half meets each rank of the second half.
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
