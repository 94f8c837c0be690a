//! Collectives on the caller's buffer: reductions, scans, all-gather, broadcast and barrier.

use std::ops::Range;

use farflung_base::{Bytes, Pending, Rank};

use super::Communicator;
use super::call::Call;
use crate::Algorithm;
use crate::CommError;
use crate::algorithm::AllReduce;
use crate::element::Element;
use crate::native::NativeKind;
use crate::ordered::ordered_reduce_scatter;
use crate::plans::Kind;
use crate::reduction::Reduction;
use crate::ring::{ring_all_gather, ring_reduce_scatter};
use crate::steps::Program;
use crate::tree::dissemination_barrier;

impl Communicator {
    /// Returns the algorithm of an all-reduce of `bytes` with a reduction that commutes.
    #[must_use]
    pub fn algorithm(&self, bytes: Bytes) -> Algorithm {
        self.plans.algorithm().resolve(bytes, self.plans.topology())
    }

    /// Creates the call of a reduction: of kind `any` if it commutes, of kind `ordered` if not.
    fn reducing<T: Element>(
        &self,
        name: &'static str,
        [any, ordered]: [Kind; 2],
        op: Reduction<T>,
        len: usize,
    ) -> Call<T> {
        let plan = self.plan::<T>(if op.commutes() { any } else { ordered }, len);
        Call { name, plan, op, len, native: None }
    }

    fn all_reducing<T: Element>(&self, op: Reduction<T>, len: usize) -> Call<T> {
        let kinds = [Kind::AllReduce, Kind::OrderedAllReduce];
        self.reducing("all_reduce", kinds, op, len).or_by(NativeKind::AllReduce)
    }

    /// Reduces `data` over all ranks, in place. All ranks get the same result, bit for bit.
    pub fn all_reduce<T: Element>(
        &self,
        data: &mut [T],
        op: impl Into<Reduction<T>>,
    ) -> Result<(), CommError> {
        self.in_place(self.all_reducing(op.into(), data.len()), data)
    }

    /// Starts a [`Communicator::all_reduce`], which runs while the caller computes.
    pub fn start_all_reduce<T: Element>(
        &self,
        data: Vec<T>,
        op: impl Into<Reduction<T>>,
    ) -> Pending<Result<Vec<T>, CommError>> {
        self.owned(Ok(self.all_reducing(op.into(), data.len())), data)
    }

    /// Creates the call of an all-reduce by the caller's program.
    fn by_program<T: Element>(program: Program, op: Reduction<T>, len: usize) -> Result<Call<T>, CommError> {
        let made_for = program.bounds.as_ref().map_or(Some(len), |bounds| bounds.last().copied());
        if made_for != Some(len) {
            let (got, want) = (made_for.unwrap_or(0), len);
            return Err(CommError::Argument { op: "all_reduce", what: "length of the program", got, want });
        }
        Ok(Call { name: "all_reduce", plan: program.into(), op, len, native: None })
    }

    /// Runs an all-reduce by the caller's program. The program must leave the whole result on every rank, and
    /// keep the order of ranks if the reduction does not commute. All ranks must pass their programs of the
    /// same collective.
    ///
    /// # Errors
    /// [`CommError::Argument`] if the program was made for another length.
    pub fn all_reduce_by<T: Element>(
        &self,
        program: Program,
        data: &mut [T],
        op: impl Into<Reduction<T>>,
    ) -> Result<(), CommError> {
        self.in_place(Self::by_program(program, op.into(), data.len())?, data)
    }

    /// Starts a [`Communicator::all_reduce_by`].
    pub fn start_all_reduce_by<T: Element>(
        &self,
        program: Program,
        data: Vec<T>,
        op: impl Into<Reduction<T>>,
    ) -> Pending<Result<Vec<T>, CommError>> {
        self.owned(Self::by_program(program, op.into(), data.len()), data)
    }

    fn scattering<T: Element>(&self, op: Reduction<T>, len: usize) -> Call<T> {
        let kinds = [Kind::ReduceScatter, Kind::OrderedReduceScatter];
        self.reducing("reduce_scatter", kinds, op, len).or_by(NativeKind::ReduceScatter)
    }

    /// Reduces `data` over all ranks, and returns the range of this rank's [shard](Self::shard), which then
    /// holds the result. Other elements of `data` hold unspecified values.
    pub fn reduce_scatter<T: Element>(
        &self,
        data: &mut [T],
        op: impl Into<Reduction<T>>,
    ) -> Result<Range<usize>, CommError> {
        self.in_place(self.scattering(op.into(), data.len()), data)?;
        Ok(self.shard(data.len()))
    }

    /// Starts a [`Communicator::reduce_scatter`].
    pub fn start_reduce_scatter<T: Element>(
        &self,
        data: Vec<T>,
        op: impl Into<Reduction<T>>,
    ) -> Pending<Result<Vec<T>, CommError>> {
        self.owned(Ok(self.scattering(op.into(), data.len())), data)
    }

    fn scattering_v<T: Element>(
        &self,
        counts: &[usize],
        op: Reduction<T>,
        len: usize,
    ) -> Result<Call<T>, CommError> {
        let name = "reduce_scatter_v";
        self.counts(name, counts, len)?;
        let program = if op.commutes() { ring_reduce_scatter } else { ordered_reduce_scatter };
        let program = program(self.rank(), self.size()).with_counts(counts);
        Ok(Call { name, plan: program.into(), op, len, native: None })
    }

    /// Runs [`Communicator::reduce_scatter`] with shards of `counts[rank]` elements.
    pub fn reduce_scatter_v<T: Element>(
        &self,
        data: &mut [T],
        counts: &[usize],
        op: impl Into<Reduction<T>>,
    ) -> Result<Range<usize>, CommError> {
        self.in_place(self.scattering_v(counts, op.into(), data.len())?, data)?;
        let start = counts[..self.group.me].iter().sum::<usize>();
        Ok(start..start + counts[self.group.me])
    }

    /// Starts a [`Communicator::reduce_scatter_v`].
    pub fn start_reduce_scatter_v<T: Element>(
        &self,
        data: Vec<T>,
        counts: &[usize],
        op: impl Into<Reduction<T>>,
    ) -> Pending<Result<Vec<T>, CommError>> {
        self.owned(self.scattering_v(counts, op.into(), data.len()), data)
    }

    fn gathering<T: Element>(&self, len: usize) -> Call<T> {
        Call::moving("all_gather", self.plan::<T>(Kind::AllGather, len), len).or_by(NativeKind::AllGather)
    }

    /// Fills `data` with the [shards](Self::shard) of all ranks. The input is this rank's own shard in `data`.
    pub fn all_gather<T: Element>(&self, data: &mut [T]) -> Result<(), CommError> {
        self.in_place(self.gathering(data.len()), data)
    }

    /// Starts a [`Communicator::all_gather`].
    pub fn start_all_gather<T: Element>(&self, data: Vec<T>) -> Pending<Result<Vec<T>, CommError>> {
        self.owned(Ok(self.gathering(data.len())), data)
    }

    fn gathering_v<T: Element>(&self, counts: &[usize], len: usize) -> Result<Call<T>, CommError> {
        let name = "all_gather_v";
        self.counts(name, counts, len)?;
        Ok(Call::moving(name, ring_all_gather(self.rank(), self.size()).with_counts(counts), len))
    }

    /// Fills `data` with `counts[rank]` elements of each rank, in rank order. The input is this rank's own part
    /// of `data`.
    pub fn all_gather_v<T: Element>(&self, data: &mut [T], counts: &[usize]) -> Result<(), CommError> {
        self.in_place(self.gathering_v(counts, data.len())?, data)
    }

    /// Starts a [`Communicator::all_gather_v`].
    pub fn start_all_gather_v<T: Element>(
        &self,
        data: Vec<T>,
        counts: &[usize],
    ) -> Pending<Result<Vec<T>, CommError>> {
        self.owned(self.gathering_v(counts, data.len()), data)
    }

    fn broadcasting<T: Element>(&self, root: Rank, len: usize) -> Result<Call<T>, CommError> {
        self.root("broadcast", root)?;
        let call = Call::moving("broadcast", self.plan::<T>(Kind::Broadcast(root), len), len);
        Ok(call.or_by(NativeKind::Broadcast(root)))
    }

    /// Overwrites `data` with that of the root, by a tree or a chain, whichever is cheaper on the declared
    /// topology.
    pub fn broadcast<T: Element>(&self, data: &mut [T], root: Rank) -> Result<(), CommError> {
        self.in_place(self.broadcasting(root, data.len())?, data)
    }

    /// Starts a [`Communicator::broadcast`].
    pub fn start_broadcast<T: Element>(
        &self,
        data: Vec<T>,
        root: Rank,
    ) -> Pending<Result<Vec<T>, CommError>> {
        self.owned(self.broadcasting(root, data.len()), data)
    }

    fn reducing_to<T: Element>(
        &self,
        root: Rank,
        op: Reduction<T>,
        len: usize,
    ) -> Result<Call<T>, CommError> {
        self.root("reduce", root)?;
        Ok(self.reducing("reduce", [Kind::Reduce(root), Kind::OrderedReduce(root)], op, len))
    }

    /// Reduces `data` over all ranks into the root's `data`. On other ranks `data` then holds unspecified
    /// values.
    pub fn reduce<T: Element>(
        &self,
        data: &mut [T],
        op: impl Into<Reduction<T>>,
        root: Rank,
    ) -> Result<(), CommError> {
        self.in_place(self.reducing_to(root, op.into(), data.len())?, data)
    }

    /// Starts a [`Communicator::reduce`].
    pub fn start_reduce<T: Element>(
        &self,
        data: Vec<T>,
        op: impl Into<Reduction<T>>,
        root: Rank,
    ) -> Pending<Result<Vec<T>, CommError>> {
        self.owned(self.reducing_to(root, op.into(), data.len()), data)
    }

    fn scanning<T: Element>(
        &self,
        name: &'static str,
        kind: Kind,
        op: Reduction<T>,
        len: usize,
    ) -> Result<Call<T>, CommError> {
        if op.is_mean() {
            return Err(CommError::Unsupported { op: name, reduction: "mean", element: T::NAME });
        }
        Ok(Call { name, plan: self.plan::<T>(kind, len), op, len, native: None })
    }

    /// Overwrites `data` with the reduction over the ranks 0 to this one, in rank order; by recursive doubling
    /// or a chain, whichever is cheaper on the declared topology.
    ///
    /// # Errors
    /// [`CommError::Unsupported`] for a mean.
    pub fn scan<T: Element>(&self, data: &mut [T], op: impl Into<Reduction<T>>) -> Result<(), CommError> {
        self.in_place(self.scanning("scan", Kind::Scan, op.into(), data.len())?, data)
    }

    /// Starts a [`Communicator::scan`].
    pub fn start_scan<T: Element>(
        &self,
        data: Vec<T>,
        op: impl Into<Reduction<T>>,
    ) -> Pending<Result<Vec<T>, CommError>> {
        self.owned(self.scanning("scan", Kind::Scan, op.into(), data.len()), data)
    }

    /// Overwrites `data` with the reduction over the ranks before this one, in rank order. On rank 0 `data` is
    /// unchanged.
    ///
    /// # Errors
    /// [`CommError::Unsupported`] for a mean.
    pub fn exclusive_scan<T: Element>(
        &self,
        data: &mut [T],
        op: impl Into<Reduction<T>>,
    ) -> Result<(), CommError> {
        self.in_place(self.scanning("exclusive_scan", Kind::ExclusiveScan, op.into(), data.len())?, data)
    }

    /// Starts a [`Communicator::exclusive_scan`].
    pub fn start_exclusive_scan<T: Element>(
        &self,
        data: Vec<T>,
        op: impl Into<Reduction<T>>,
    ) -> Pending<Result<Vec<T>, CommError>> {
        self.owned(self.scanning("exclusive_scan", Kind::ExclusiveScan, op.into(), data.len()), data)
    }

    fn meeting(&self) -> Call<f32> {
        Call::moving("barrier", dissemination_barrier(self.rank(), self.size()), 0)
    }

    /// Blocks until every rank has called it.
    pub fn barrier(&self) -> Result<(), CommError> {
        self.in_place(self.meeting(), &mut [])
    }

    /// Starts a [`Communicator::barrier`], which completes when every rank has started it.
    pub fn start_barrier(&self) -> Pending<Result<(), CommError>> {
        self.owned(Ok(self.meeting()), Vec::new()).map(|met| met.map(drop))
    }
}
