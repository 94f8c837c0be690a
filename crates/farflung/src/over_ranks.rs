//! The exchanges of layers over ranks: what [`Exchange`] asks for, by collectives of communicators.
//!
//! Two threads hold one block's heads and columns each; both have the loss of the whole model:
//!
//! ```
//! use std::sync::Arc;
//!
//! use farflung::OverRanks;
//! use farflung_base::Axis;
//! use farflung_comm::{Communicator, memory};
//! use farflung_tensor::Device;
//! use farflung_zoo::{AxisShare, Input, Output, Stage, Targets, gpt2};
//!
//! let model = gpt2(2, 4, 16, 8, 11)?;
//! let cpu = Device::cpu(1)?;
//! let loss = |stage: &Stage| {
//!     let (ids, targets) = (stage.tokens(&[1, 2, 3, 4], 4)?, stage.tokens(&[2, 3, 4, 5], 4)?);
//!     let (output, _) =
//!         stage.forward(&stage.init(1337)?, Input::Tokens(ids), Some(Targets::all(&targets, 0.25)))?;
//!     let Output::Losses(losses) = output else { unreachable!("the last stage gives losses") };
//!     Ok::<_, farflung_zoo::ZooError>(losses.to_vec::<f32>()?.iter().sum::<f32>())
//! };
//! let whole = loss(&Stage::whole(&model, &cpu)?)?;
//! let (model, loss) = (&model, &loss);
//! let piece = |(rank, comm)| {
//!     let over = OverRanks::new([(Axis::Tensor, comm)]);
//!     let axis = (AxisShare::new(rank, vec![3, 1])?, Arc::new(over) as _);
//!     loss(&Stage::piece(model, 0..2, &Device::cpu(1)?, axis)?)
//! };
//! let losses: Vec<f32> = std::thread::scope(|scope| {
//!     let comms = memory::cluster(2).into_iter().map(|end| Communicator::new(end)).enumerate();
//!     let ranks: Vec<_> = comms.map(|rank| scope.spawn(move || piece(rank))).collect();
//!     ranks.into_iter().map(|rank| rank.join().expect("no rank panics")).collect::<Result<_, _>>()
//! })?;
//! assert!(losses.iter().all(|loss| (loss - whole).abs() < 1e-4));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use std::collections::BTreeMap;
use std::future::Future as _;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::task::{Context, Poll};

use farflung_base::{Axis, Nanos, Pending, PendingOp, Rank};
use farflung_comm::{CommError, Communicator, ReduceOp};
use farflung_compress::link::LinkSpec;
use farflung_tensor::{Shape, Tensor};
use farflung_zoo::exchange::{
    Alone, ArrivedRows, Exchange, all_to_all_shape, check_length, check_pieces, rows_for, with_length,
};
use farflung_zoo::{AxisShare, Cut, ZooError};

use crate::floats::{floats, le_bytes};
use crate::row_messages::RowMessages;

/// A rank's exchanges with others, by a communicator for each axis. Along other axes the rank is alone.
#[derive(Debug, Clone)]
pub struct OverRanks {
    axes: BTreeMap<Axis, Communicator>,
    /// The codec of rows that are sent to others, and the seed of codecs that draw random numbers.
    rows: (LinkSpec, u64),
    /// Number of tensors that were passed on.
    passed: Arc<AtomicU32>,
    /// Time for which sums and exchanges of rows were waited for.
    waited: Arc<AtomicU64>,
}

impl OverRanks {
    /// Makes the exchanges of a rank. Its number along an axis is that in the axis's communicator.
    #[must_use]
    pub fn new(axes: impl IntoIterator<Item = (Axis, Communicator)>) -> Self {
        Self {
            axes: axes.into_iter().collect(),
            rows: (LinkSpec::default(), 0),
            passed: Arc::default(),
            waited: Arc::default(),
        }
    }

    /// Returns the exchanges with a codec for rows that go to other ranks ([`Exchange::all_to_all_rows`]): one
    /// without memory, such as `f16` or `int8`.
    #[must_use]
    pub fn with_row_codec(self, codec: LinkSpec, seed: u64) -> Self {
        Self { rows: (codec, seed), ..self }
    }

    /// Returns the time for which sums and exchanges of rows were waited for since the last call, by the
    /// transport's clock.
    pub(crate) fn take_waited(&self) -> Nanos {
        Nanos(self.waited.swap(0, Ordering::Relaxed))
    }

    /// Combines the values of all ranks along an axis.
    fn reduce(&self, axis: Axis, values: &mut Tensor, by: ReduceOp) -> Result<(), ZooError> {
        let Some(comm) = self.among(axis) else { return Ok(()) };
        let begun = comm.now();
        if let Some(values) = values.host_mut::<f32>() {
            comm.all_reduce(values, by).map_err(failed(axis))?;
        } else {
            let mut all = values.to_vec::<f32>()?;
            comm.all_reduce(&mut all, by).map_err(failed(axis))?;
            values.write(&all)?;
        }
        self.count_wait(comm, begun);
        Ok(())
    }

    /// Adds the time since an exchange began to the time waited.
    fn count_wait(&self, comm: &Communicator, begun: Nanos) {
        self.waited.fetch_add(comm.now().saturating_sub(begun).0, Ordering::Relaxed);
    }

    /// Returns the communicator of an axis with several ranks.
    fn among(&self, axis: Axis) -> Option<&Communicator> {
        self.axes.get(&axis).filter(|comm| comm.size() > 1)
    }
}

fn failed(axis: Axis) -> impl FnOnce(CommError) -> ZooError {
    move |source| ZooError::Exchange { axis, source: Box::new(source) }
}

impl Exchange for OverRanks {
    fn size(&self, axis: Axis) -> usize {
        self.axes.get(&axis).map_or(1, Communicator::size)
    }

    fn rank(&self, axis: Axis) -> usize {
        self.axes.get(&axis).map_or(0, |comm| comm.rank().index())
    }

    fn all_reduce(&self, axis: Axis, values: &mut Tensor) -> Result<(), ZooError> {
        self.reduce(axis, values, ReduceOp::Sum)
    }

    fn all_reduce_max(&self, axis: Axis, values: &mut Tensor) -> Result<(), ZooError> {
        self.reduce(axis, values, ReduceOp::Max)
    }

    fn gather(&self, axis: Axis, piece: &Tensor, dim: usize, lengths: &[usize]) -> Result<Tensor, ZooError> {
        check_pieces(lengths, self.size(axis))?;
        check_length(piece.shape(), dim, lengths[self.rank(axis)])?;
        let Some(comm) = self.among(axis) else { return Alone.gather(axis, piece, dim, lengths) };
        let begun = comm.now();
        let whole = with_length(piece.shape(), dim, lengths.iter().sum())?;
        let pieces = Pieces::new(axis, whole, dim, lengths)?;
        let counts = pieces.counts();
        let start: usize = counts[..comm.rank().index()].iter().sum();
        let mut packed = vec![0.0; whole.len()];
        packed[start..][..piece.shape().len()].copy_from_slice(&piece.to_vec::<f32>()?);
        comm.all_gather_v(&mut packed, &counts).map_err(failed(axis))?;
        self.count_wait(comm, begun);
        Ok(piece.device().tensor(&pieces.joined(&packed), whole)?)
    }

    fn scatter(&self, axis: Axis, whole: Tensor, dim: usize, lengths: &[usize]) -> Result<Tensor, ZooError> {
        check_pieces(lengths, self.size(axis))?;
        check_length(whole.shape(), dim, lengths.iter().sum())?;
        let Some(comm) = self.among(axis) else { return Ok(whole) };
        let begun = comm.now();
        let pieces = Pieces::new(axis, whole.shape(), dim, lengths)?;
        let mut packed = pieces.split(&whole.to_vec::<f32>()?);
        let own =
            comm.reduce_scatter_v(&mut packed, &pieces.counts(), ReduceOp::Sum).map_err(failed(axis))?;
        self.count_wait(comm, begun);
        let piece = with_length(whole.shape(), dim, lengths[comm.rank().index()])?;
        Ok(whole.device().tensor(&packed[own], piece)?)
    }

    fn all_to_all(&self, axis: Axis, values: Tensor, split: usize, join: usize) -> Result<Tensor, ZooError> {
        let shape = all_to_all_shape(values.shape(), self.size(axis), (split, join))?;
        let Some(comm) = self.among(axis) else { return Ok(values) };
        let pieces = comm.size();
        let equal = |shape: Shape, dim: usize| vec![shape.dims()[dim] / pieces; pieces];
        let lengths = equal(values.shape(), split);
        let packed = Pieces::new(axis, values.shape(), split, &lengths)?.split(&values.to_vec::<f32>()?);
        let begun = comm.now();
        // All messages are on their way at once, so that their latencies do not add up.
        let each = (packed.len() / pieces).max(1);
        let mut messages: Vec<Vec<u8>> = packed.chunks(each).map(le_bytes).collect();
        messages.resize(pieces, Vec::new());
        let received = comm.all_to_all_bytes(messages).map_err(failed(axis))?;
        self.count_wait(comm, begun);
        let mut all = Vec::with_capacity(packed.len());
        for message in &received {
            all.extend(sent_floats(axis, message, packed.len() / pieces)?);
        }
        let joined = Pieces::new(axis, shape, join, &equal(shape, join))?.joined(&all);
        Ok(values.device().tensor(&joined, shape)?)
    }

    fn pass_on(&self, axis: Axis, values: &Tensor) -> Result<Pending<Result<Tensor, ZooError>>, ZooError> {
        let Some(comm) = self.among(axis) else { return Alone.pass_on(axis, values) };
        let ring = comm.size() as u32;
        let (next, before) = (Rank((comm.rank().0 + 1) % ring), Rank((comm.rank().0 + ring - 1) % ring));
        let tag = self.passed.fetch_add(1, Ordering::Relaxed) % TAGS;
        let arriving = comm.start_recv(before, tag);
        let leaving = comm.start_send(next, tag, le_bytes(&values.to_vec::<f32>()?));
        let (device, shape) = (values.device().clone(), values.shape());
        let made = arriving.map(move |bytes| {
            let bytes = bytes.map_err(failed(axis))?;
            leaving.wait().map_err(failed(axis))?;
            Ok(device.tensor(&sent_floats(axis, &bytes, shape.len())?, shape)?)
        });
        Ok(Pending::new(Timed { made, comm: comm.clone(), waited: Arc::clone(&self.waited) }))
    }

    fn all_to_all_rows(
        &self,
        axis: Axis,
        rows: &Tensor,
        counts: &[Vec<u32>],
        known: Option<usize>,
    ) -> Result<ArrivedRows, ZooError> {
        let Some(comm) = self.among(axis) else { return Alone.all_to_all_rows(axis, rows, counts, known) };
        let cols = rows.shape().cols();
        let each = rows_for(rows.shape(), counts, comm.size())?;
        let values = rows.to_vec::<f32>()?;
        let wrong = |source: Box<dyn std::error::Error + Send + Sync>| ZooError::Exchange { axis, source };
        let (codec, seed) = self.rows;
        let forms = |spec| RowMessages::new(spec, cols, seed).map_err(|error| wrong(error.into()));
        let (mut coded, mut plain) = (forms(codec)?, forms(LinkSpec::default())?);
        let mut rest = &values[..];
        let mut messages = Vec::with_capacity(comm.size());
        for ((to, &rows), counts) in each.iter().enumerate().zip(counts) {
            let (own, behind) = rest.split_at(rows * cols);
            // What stays here is not encoded.
            let form = if to == comm.rank().index() { &mut plain } else { &mut coded };
            messages.push(form.write(own, counts).map_err(|error| wrong(error.into()))?);
            rest = behind;
        }
        let begun = comm.now();
        let received = comm.all_to_all_bytes(messages).map_err(failed(axis))?;
        self.count_wait(comm, begun);
        let (mut all, mut counts) = (Vec::new(), Vec::new());
        for (from, message) in received.iter().enumerate() {
            let form = if from == comm.rank().index() { &mut plain } else { &mut coded };
            let of_rank = form
                .read(message, &mut all)
                .map_err(|problem| wrong(format!("the rows that rank {from} sent: {problem}").into()))?;
            counts.push(of_rank);
        }
        let came = all.len().checked_div(cols).unwrap_or(0);
        if let Some(known) = known.filter(|&known| known != came) {
            return Err(wrong(format!("{came} rows came back, not {known}").into()));
        }
        let arrived = [came, cols];
        Ok(ArrivedRows { rows: rows.device().tensor(&all, arrived)?, counts })
    }
}

/// Returns the values of a message.
///
/// Errors: [`ZooError::Exchange`] for another number than `count`.
fn sent_floats(axis: Axis, message: &[u8], count: usize) -> Result<Vec<f32>, ZooError> {
    let wrong = || format!("{} bytes came, not {}", message.len(), size_of::<f32>() * count);
    floats(message, count).ok_or_else(|| ZooError::Exchange { axis, source: wrong().into() })
}

/// Number of tags that messages along a ring use in turn: more than are in flight at a time.
const TAGS: u32 = 64;

/// A tensor that arrives, with the count of the time for which it is waited for.
struct Timed {
    made: Pending<Result<Tensor, ZooError>>,
    comm: Communicator,
    waited: Arc<AtomicU64>,
}

impl PendingOp<Result<Tensor, ZooError>> for Timed {
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<Tensor, ZooError>> {
        Pin::new(&mut self.made).poll(cx)
    }

    fn wait(self: Box<Self>) -> Result<Tensor, ZooError> {
        let Self { made, comm, waited } = *self;
        let begun = comm.now();
        let tensor = made.wait();
        waited.fetch_add(comm.now().saturating_sub(begun).0, Ordering::Relaxed);
        tensor
    }

    fn is_ready(&self) -> bool {
        self.made.is_ready()
    }
}

/// The pieces of a tensor along a dimension, one for each rank.
struct Pieces {
    shape: Shape,
    cut: Cut,
    shares: Vec<AxisShare>,
}

impl Pieces {
    /// Cuts a shape into pieces of these lengths along dimension `dim`.
    ///
    /// Errors: [`ZooError::Config`] if all lengths are 0, or one does not fit into 32 bits.
    fn new(axis: Axis, shape: Shape, dim: usize, lengths: &[usize]) -> Result<Self, ZooError> {
        let length = shape.dims()[dim];
        let weight = |&length: &usize| {
            let expected = "at most the largest number of 32 bits";
            u32::try_from(length).map_err(|_| ZooError::Config { field: "piece", value: length, expected })
        };
        let weights = lengths.iter().map(weight).collect::<Result<_, _>>()?;
        let shares = AxisShare::new(0, weights)?.all().collect();
        Ok(Self { shape, cut: Cut::Along { axis, dim, units: length, sections: vec![length] }, shares })
    }

    /// Returns the number of elements of each piece.
    fn counts(&self) -> Vec<usize> {
        let count = |share| self.cut.shape(self.shape.dims(), share).iter().product();
        self.shares.iter().map(count).collect()
    }

    /// Returns the pieces one behind the other.
    fn split(&self, values: &[f32]) -> Vec<f32> {
        let mut packed = vec![0.0; values.len()];
        let mut rest = &mut packed[..];
        for (share, count) in self.shares.iter().zip(self.counts()) {
            let (piece, behind) = rest.split_at_mut(count);
            self.cut.take(self.shape.dims(), share, values, piece);
            rest = behind;
        }
        packed
    }

    /// Returns the tensor of the pieces one behind the other.
    fn joined(&self, mut packed: &[f32]) -> Vec<f32> {
        let mut values = vec![0.0; packed.len()];
        for (share, count) in self.shares.iter().zip(self.counts()) {
            let (piece, behind) = packed.split_at(count);
            self.cut.put(self.shape.dims(), share, piece, &mut values);
            packed = behind;
        }
        values
    }
}
