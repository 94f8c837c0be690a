//! What layers communicate. A layer sees this trait alone: where a model is not cut, nothing is exchanged
//! ([`Alone`]); a dry run counts ([`Counted`]); the exchange over ranks is another crate's.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Add;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};

use farflung_base::PendingOp;
pub use farflung_base::{Axis, Pending};
use farflung_tensor::{DType, Device, Op, Shape, Tensor, TensorError};

use crate::{AxisShare, ZooError};

/// The exchanges of a layer with the other ranks along an axis. All ranks along the axis call the same
/// functions in the same order, with tensors whose shapes differ at most by the lengths of pieces. A sum has
/// the same bits on each rank.
pub trait Exchange: fmt::Debug + Send + Sync {
    /// Returns the number of ranks along an axis.
    fn size(&self, axis: Axis) -> usize;

    /// Returns this rank's number along an axis.
    fn rank(&self, axis: Axis) -> usize;

    /// Replaces the values by their sum over all ranks.
    ///
    /// Errors: [`ZooError::Exchange`], for example if a rank is lost.
    fn all_reduce(&self, axis: Axis, values: &mut Tensor) -> Result<(), ZooError>;

    /// Replaces the values by their maximum over all ranks.
    ///
    /// Errors: as [`Exchange::all_reduce`].
    fn all_reduce_max(&self, axis: Axis, values: &mut Tensor) -> Result<(), ZooError>;

    /// Returns the pieces of all ranks, joined along dimension `dim`, where they have these lengths.
    ///
    /// Errors: as [`Exchange::all_reduce`]; [`ZooError::Tensor`] for a piece of another length.
    fn gather(&self, axis: Axis, piece: &Tensor, dim: usize, lengths: &[usize]) -> Result<Tensor, ZooError>;

    /// Returns this rank's piece of the sum over all ranks. Pieces have these lengths along dimension `dim`.
    ///
    /// Errors: as [`Exchange::gather`].
    fn scatter(&self, axis: Axis, whole: Tensor, dim: usize, lengths: &[usize]) -> Result<Tensor, ZooError>;

    /// Sends each rank one of the equal pieces along dimension `split`, and returns the pieces that this rank
    /// receives, joined along dimension `join`.
    ///
    /// Errors: as [`Exchange::gather`].
    fn all_to_all(&self, axis: Axis, values: Tensor, split: usize, join: usize) -> Result<Tensor, ZooError>;

    /// Starts to send `values` to the next rank along an axis, from the last to the first, and returns what the
    /// rank before sends: as many values, in the same shape.
    ///
    /// Errors: as [`Exchange::gather`], also of the result.
    fn pass_on(&self, axis: Axis, values: &Tensor) -> Result<Pending<Result<Tensor, ZooError>>, ZooError>;

    /// Sends rows to each rank: of `rows`, `[M, C]`, the first ones to the first rank, and so on. `counts` has
    /// for each rank the numbers of rows that it gets, as many numbers as it likes, such as one for each expert
    /// there; rows behind them are not sent. Ranks need not know how many rows others send; `known` is how many
    /// arrive, where the rank knows it.
    ///
    /// Errors: as [`Exchange::gather`]; [`ZooError::Config`] for more rows than there are.
    fn all_to_all_rows(
        &self,
        axis: Axis,
        rows: &Tensor,
        counts: &[Vec<u32>],
        known: Option<usize>,
    ) -> Result<ArrivedRows, ZooError>;
}

/// The rows that a rank receives ([`Exchange::all_to_all_rows`]).
#[derive(Debug)]
pub struct ArrivedRows {
    /// The rows `[M, C]` by sender.
    pub rows: Tensor,
    /// The numbers that each sender gave for them.
    pub counts: Vec<Vec<u32>>,
}

/// Returns how many rows each rank gets.
///
/// Errors: [`ZooError::Config`] if there are not so many, or `counts` are not for all ranks.
pub fn rows_for(rows: Shape, counts: &[Vec<u32>], ranks: usize) -> Result<Vec<usize>, ZooError> {
    check_pieces_of(counts.len(), ranks)?;
    let each: Vec<usize> = counts.iter().map(|of_rank| of_rank.iter().map(|&n| n as usize).sum()).collect();
    let all: usize = each.iter().sum();
    if all > rows.rows() {
        let expected = "at most as many rows as there are";
        return Err(ZooError::Config { field: "rows", value: all, expected });
    }
    Ok(each)
}

/// Returns `shape` with another length along one dimension.
///
/// Errors: [`ZooError::Tensor`] if there is no such dimension.
pub fn with_length(shape: Shape, dim: usize, length: usize) -> Result<Shape, ZooError> {
    let mut dims = shape.dims().to_vec();
    let Some(there) = dims.get_mut(dim) else { return Err(mismatch(shape, Shape::from(dim))) };
    *there = length;
    Ok(Shape::new(&dims)?)
}

/// Checks that a tensor has this length along a dimension.
///
/// Errors: [`ZooError::Tensor`] with both shapes.
pub fn check_length(shape: Shape, dim: usize, length: usize) -> Result<(), ZooError> {
    let expected = with_length(shape, dim, length)?;
    if expected == shape { Ok(()) } else { Err(mismatch(shape, expected)) }
}

/// Checks that there is a length for each rank.
///
/// Errors: [`ZooError::Config`].
pub const fn check_pieces(lengths: &[usize], ranks: usize) -> Result<(), ZooError> {
    check_pieces_of(lengths.len(), ranks)
}

const fn check_pieces_of(pieces: usize, ranks: usize) -> Result<(), ZooError> {
    if pieces == ranks {
        return Ok(());
    }
    let expected = "one length for each rank along the axis";
    Err(ZooError::Config { field: "pieces", value: pieces, expected })
}

fn mismatch(lhs: Shape, rhs: Shape) -> ZooError {
    TensorError::ShapeMismatch { op: "exchange along an axis", lhs, rhs }.into()
}

/// The exchange of a rank that is alone along each axis: nothing is sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Alone;

impl Exchange for Alone {
    fn size(&self, _axis: Axis) -> usize {
        1
    }

    fn rank(&self, _axis: Axis) -> usize {
        0
    }

    fn all_reduce(&self, _axis: Axis, _values: &mut Tensor) -> Result<(), ZooError> {
        Ok(())
    }

    fn all_reduce_max(&self, _axis: Axis, _values: &mut Tensor) -> Result<(), ZooError> {
        Ok(())
    }

    fn gather(&self, _axis: Axis, piece: &Tensor, dim: usize, lengths: &[usize]) -> Result<Tensor, ZooError> {
        check_length(piece.shape(), dim, lengths.iter().sum())?;
        let mut same = piece.device().empty(piece.dtype(), piece.shape())?;
        piece.device().run(Op::Cast { x: piece.view(), y: same.view_mut() })?;
        Ok(same)
    }

    fn scatter(&self, _axis: Axis, whole: Tensor, dim: usize, lengths: &[usize]) -> Result<Tensor, ZooError> {
        check_length(whole.shape(), dim, lengths.iter().sum())?;
        Ok(whole)
    }

    fn all_to_all(&self, _axis: Axis, values: Tensor, split: usize, join: usize) -> Result<Tensor, ZooError> {
        with_length(values.shape(), split.max(join), 1)?;
        Ok(values)
    }

    fn pass_on(&self, _axis: Axis, values: &Tensor) -> Result<Pending<Result<Tensor, ZooError>>, ZooError> {
        let mut same = values.device().empty(values.dtype(), values.shape())?;
        values.device().run(Op::Cast { x: values.view(), y: same.view_mut() })?;
        Ok(Pending::ready(Ok(same)))
    }

    fn all_to_all_rows(
        &self,
        _axis: Axis,
        rows: &Tensor,
        counts: &[Vec<u32>],
        _known: Option<usize>,
    ) -> Result<ArrivedRows, ZooError> {
        let own = [rows_for(rows.shape(), counts, 1)?[0], rows.shape().cols()];
        let mut same = rows.device().empty(rows.dtype(), own)?;
        rows.device().run(Op::Cast { x: rows.view().part(0, own)?, y: same.view_mut() })?;
        Ok(ArrivedRows { rows: same, counts: counts.to_vec() })
    }
}

/// The exchange of a dry run: results have their shapes, nothing is sent, and the bytes are counted that this
/// rank would send.
///
/// Of `n` bytes, `k` ranks send `2 n (k - 1) / k` each in an all-reduce, and `n (k - 1) / k` in an all-to-all;
/// in a gather each sends its piece to the others, and in a scatter all but its own piece. These are the bytes
/// of a ring with equal pieces, and of direct exchanges.
#[derive(Debug)]
pub struct Counted {
    shares: BTreeMap<Axis, AxisShare>,
    sent: Mutex<AxisBytes>,
    /// The exchanges in their order.
    exchanges: Arc<Mutex<Vec<CountedExchange>>>,
}

/// A tensor that a rank before would have sent: it is made, and the wait for it recorded, when it is waited
/// for.
struct Arriving {
    like: (Device, DType, Shape),
    index: usize,
    exchanges: Arc<Mutex<Vec<CountedExchange>>>,
}

impl Arriving {
    fn take(&self) -> Result<Tensor, ZooError> {
        let mut exchanges = self.exchanges.lock().unwrap_or_else(PoisonError::into_inner);
        exchanges.push(CountedExchange::Arrived(self.index));
        let (device, dtype, shape) = &self.like;
        Ok(device.empty(*dtype, *shape)?)
    }
}

impl PendingOp<Result<Tensor, ZooError>> for Arriving {
    fn poll(&mut self, _: &mut Context<'_>) -> Poll<Result<Tensor, ZooError>> {
        Poll::Ready(self.take())
    }

    fn wait(self: Box<Self>) -> Result<Tensor, ZooError> {
        self.take()
    }
}

/// An exchange that was counted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CountedExchange {
    /// A sum, or a maximum, of this many values along an axis.
    AllReduce(Axis, usize),
    /// A gather along an axis, of pieces of these numbers of values.
    Gather(Axis, Vec<usize>),
    /// A scatter of a sum along an axis, into pieces of these numbers of values.
    Scatter(Axis, Vec<usize>),
    /// Values in equal pieces from each rank to each along an axis: their number on a rank.
    AllToAll(Axis, usize),
    /// Values that went to the next rank along an axis: their number.
    PassOn(Axis, usize),
    /// The wait for the values of the rank before, of the [`CountedExchange::PassOn`] with this index.
    Arrived(usize),
    /// Rows that were sent along the view of experts.
    Rows(CountedRows),
}

/// An exchange of rows that was counted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CountedRows {
    /// Number of values of a row.
    pub cols: usize,
    /// Number of rows to each rank, this one included.
    pub rows: Vec<usize>,
    /// Number of numbers that go to each rank with them.
    pub numbers: Vec<usize>,
}

/// Bytes by axis.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct AxisBytes([u64; AXES]);

/// The axes along which layers exchange, and the views of experts and of heads.
const AXES: usize = Axis::ALL.len() + 2;

impl AxisBytes {
    /// Returns the bytes along an axis.
    #[must_use]
    pub const fn along(&self, axis: Axis) -> u64 {
        self.0[axis as usize]
    }

    const fn count(&mut self, axis: Axis, bytes: u64) {
        self.0[axis as usize] += bytes;
    }
}

impl Add for AxisBytes {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self(std::array::from_fn(|axis| self.0[axis] + other.0[axis]))
    }
}

impl Counted {
    /// Starts at zero. Along an axis without a share, the rank is alone.
    #[must_use]
    pub fn new(shares: impl IntoIterator<Item = (Axis, AxisShare)>) -> Self {
        Self { shares: shares.into_iter().collect(), sent: Mutex::default(), exchanges: Arc::default() }
    }

    /// Returns the bytes since the last call, by axis.
    pub fn take(&self) -> AxisBytes {
        std::mem::take(&mut self.sent.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Returns the exchanges since the last call, which no values are on their way of. Those of a rank alone
    /// are left out.
    pub fn take_exchanges(&self) -> Vec<CountedExchange> {
        std::mem::take(&mut self.exchanges.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Records an exchange of pieces of these lengths along a dimension, of tensors that are else like `shape`.
    fn record_pieces(
        &self,
        exchange: fn(Axis, Vec<usize>) -> CountedExchange,
        axis: Axis,
        shape: Shape,
        (dim, lengths): (usize, &[usize]),
    ) -> Result<(), ZooError> {
        if self.size(axis) > 1 {
            let values = lengths.iter().map(|&length| Ok(with_length(shape, dim, length)?.len()));
            self.record(exchange(axis, values.collect::<Result<_, ZooError>>()?));
        }
        Ok(())
    }

    /// Records an exchange, and returns its index since they were last taken.
    fn record(&self, exchange: CountedExchange) -> usize {
        let mut exchanges = self.exchanges.lock().unwrap_or_else(PoisonError::into_inner);
        exchanges.push(exchange);
        exchanges.len() - 1
    }

    fn add(&self, axis: Axis, bytes: u64) {
        self.sent.lock().unwrap_or_else(PoisonError::into_inner).count(axis, bytes);
    }

    /// Returns the part of `bytes` that is not this rank's own, of equal pieces.
    fn others(&self, axis: Axis, bytes: u64) -> u64 {
        let ranks = self.size(axis) as u64;
        bytes / ranks * (ranks - 1) + bytes % ranks * (ranks - 1) / ranks
    }
}

fn bytes(tensor: &Tensor) -> u64 {
    (tensor.shape().len() * tensor.dtype().size()) as u64
}

impl Exchange for Counted {
    fn size(&self, axis: Axis) -> usize {
        self.shares.get(&axis).map_or(1, AxisShare::ranks)
    }

    fn rank(&self, axis: Axis) -> usize {
        self.shares.get(&axis).map_or(0, AxisShare::rank)
    }

    fn all_reduce(&self, axis: Axis, values: &mut Tensor) -> Result<(), ZooError> {
        self.add(axis, 2 * self.others(axis, bytes(values)));
        if self.size(axis) > 1 {
            self.record(CountedExchange::AllReduce(axis, values.shape().len()));
        }
        Ok(())
    }

    fn all_reduce_max(&self, axis: Axis, values: &mut Tensor) -> Result<(), ZooError> {
        self.all_reduce(axis, values)
    }

    fn gather(&self, axis: Axis, piece: &Tensor, dim: usize, lengths: &[usize]) -> Result<Tensor, ZooError> {
        check_pieces(lengths, self.size(axis))?;
        check_length(piece.shape(), dim, lengths[self.rank(axis)])?;
        self.add(axis, bytes(piece) * (self.size(axis) as u64 - 1));
        self.record_pieces(CountedExchange::Gather, axis, piece.shape(), (dim, lengths))?;
        let whole = with_length(piece.shape(), dim, lengths.iter().sum())?;
        Ok(piece.device().empty(piece.dtype(), whole)?)
    }

    fn scatter(&self, axis: Axis, whole: Tensor, dim: usize, lengths: &[usize]) -> Result<Tensor, ZooError> {
        check_pieces(lengths, self.size(axis))?;
        check_length(whole.shape(), dim, lengths.iter().sum())?;
        let own = lengths[self.rank(axis)];
        let piece = whole.device().empty(whole.dtype(), with_length(whole.shape(), dim, own)?)?;
        self.add(axis, bytes(&whole) - bytes(&piece));
        self.record_pieces(CountedExchange::Scatter, axis, whole.shape(), (dim, lengths))?;
        Ok(piece)
    }

    fn all_to_all(&self, axis: Axis, values: Tensor, split: usize, join: usize) -> Result<Tensor, ZooError> {
        let ranks = self.size(axis);
        let shape = all_to_all_shape(values.shape(), ranks, (split, join))?;
        self.add(axis, self.others(axis, bytes(&values)));
        if ranks > 1 {
            self.record(CountedExchange::AllToAll(axis, shape.len()));
        }
        Ok(values.device().empty(values.dtype(), shape)?)
    }

    fn pass_on(&self, axis: Axis, values: &Tensor) -> Result<Pending<Result<Tensor, ZooError>>, ZooError> {
        let like = (values.device().clone(), values.dtype(), values.shape());
        if self.size(axis) == 1 {
            return Ok(Pending::ready(Ok(like.0.empty(like.1, like.2)?)));
        }
        self.add(axis, bytes(values));
        let index = self.record(CountedExchange::PassOn(axis, values.shape().len()));
        Ok(Pending::new(Arriving { like, index, exchanges: Arc::clone(&self.exchanges) }))
    }

    fn all_to_all_rows(
        &self,
        axis: Axis,
        rows: &Tensor,
        counts: &[Vec<u32>],
        known: Option<usize>,
    ) -> Result<ArrivedRows, ZooError> {
        let (rank, cols) = (self.rank(axis), rows.shape().cols());
        let each = rows_for(rows.shape(), counts, self.size(axis))?;
        let messages = each.iter().zip(counts).enumerate();
        let sent = messages.map(|(to, (&rows, counts))| match to {
            _ if to == rank => 0,
            _ => row_message_bytes(rows, cols, counts.len()) as u64,
        });
        self.add(axis, sent.sum());
        let numbers = counts.iter().map(Vec::len).collect();
        let counted = CountedRows { cols, rows: each.clone(), numbers };
        if self.size(axis) > 1 {
            self.record(CountedExchange::Rows(counted));
        }
        // Unless it is known, others send as many as this rank keeps.
        let arrived = [known.unwrap_or(each[rank] * self.size(axis)), cols];
        let rows = rows.device().empty(rows.dtype(), arrived)?;
        Ok(ArrivedRows { rows, counts: vec![counts[rank].clone(); self.size(axis)] })
    }
}

/// Returns the bytes of a message of [`Exchange::all_to_all_rows`]: the number of counts, the counts, and the
/// rows in f32.
#[must_use]
pub const fn row_message_bytes(rows: usize, cols: usize, counts: usize) -> usize {
    size_of::<u32>() * (1 + counts) + size_of::<f32>() * rows * cols
}

/// Returns the shape of the result of [`Exchange::all_to_all`] between `ranks` ranks.
///
/// Errors: [`ZooError::Tensor`] if there are no equal pieces.
pub fn all_to_all_shape(
    shape: Shape,
    ranks: usize,
    (split, join): (usize, usize),
) -> Result<Shape, ZooError> {
    let length = |dim: usize| shape.dims().get(dim).copied().ok_or(mismatch(shape, Shape::from(dim)));
    let piece = length(split)? / ranks;
    check_length(shape, split, piece * ranks)?;
    let cut = with_length(shape, split, piece)?;
    with_length(cut, join, cut.dims().get(join).copied().unwrap_or_default() * ranks)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dry_run_has_the_shapes_and_counts_what_a_rank_sends() {
        let device = Device::sizes();
        let shares = [(Axis::Tensor, AxisShare::new(1, vec![2, 1, 1]).unwrap())];
        let counted = Counted::new(shares);
        assert_eq!((counted.size(Axis::Tensor), counted.rank(Axis::Tensor)), (3, 1));
        assert_eq!((counted.size(Axis::Data), counted.rank(Axis::Data)), (1, 0));
        let tensor = |shape: [usize; 3]| device.zeros(shape).unwrap();
        let sent = || counted.take().along(Axis::Tensor);
        counted.all_reduce(Axis::Tensor, &mut tensor([2, 6, 4])).unwrap();
        assert_eq!(sent(), 2 * 48 * 4 * 2 / 3);
        let whole = counted.gather(Axis::Tensor, &tensor([2, 2, 4]), 1, &[3, 2, 1]).unwrap();
        assert_eq!((whole.shape().dims(), sent()), (&[2, 6, 4][..], 2 * 16 * 4));
        let piece = counted.scatter(Axis::Tensor, whole, 1, &[3, 2, 1]).unwrap();
        assert_eq!((piece.shape().dims(), sent()), (&[2, 2, 4][..], 32 * 4));
        let passed = counted.pass_on(Axis::Tensor, &tensor([2, 6, 4])).unwrap().wait().unwrap();
        assert_eq!((passed.shape().dims(), sent()), (&[2, 6, 4][..], 48 * 4));
        let turned = counted.all_to_all(Axis::Tensor, tensor([2, 6, 4]), 1, 2).unwrap();
        assert_eq!((turned.shape().dims(), sent()), (&[2, 2, 12][..], 32 * 4));
        // Along the other axes the rank is alone.
        counted.all_reduce(Axis::Data, &mut tensor([2, 6, 4])).unwrap();
        assert_eq!(counted.take(), AxisBytes::default());
        assert!(counted.gather(Axis::Tensor, &tensor([2, 3, 4]), 1, &[3, 2, 1]).is_err());
        assert!(counted.all_to_all(Axis::Tensor, tensor([2, 4, 4]), 1, 2).is_err());
        assert!(counted.scatter(Axis::Tensor, tensor([2, 5, 4]), 3, &[5]).is_err());
    }

    #[test]
    fn a_rank_alone_has_what_it_gives() {
        let device = Device::cpu(1).unwrap();
        let tensor = || device.tensor(&[1.0_f32, 2.0, 3.0, 4.0], [1, 4]).unwrap();
        let mut sum = tensor();
        Alone.all_reduce(Axis::Tensor, &mut sum).unwrap();
        for same in [
            sum,
            Alone.gather(Axis::Tensor, &tensor(), 1, &[4]).unwrap(),
            Alone.scatter(Axis::Tensor, tensor(), 1, &[4]).unwrap(),
            Alone.all_to_all(Axis::Tensor, tensor(), 0, 1).unwrap(),
            Alone.pass_on(Axis::Context, &tensor()).unwrap().wait().unwrap(),
        ] {
            assert_eq!(same.to_vec::<f32>().unwrap(), [1.0, 2.0, 3.0, 4.0]);
        }
        assert!(Alone.gather(Axis::Tensor, &tensor(), 1, &[3]).is_err());
    }
}
