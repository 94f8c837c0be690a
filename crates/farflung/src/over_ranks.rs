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

use farflung_base::Axis;
use farflung_comm::{CommError, Communicator, ReduceOp};
use farflung_tensor::{Shape, Tensor};
use farflung_zoo::ZooError;
use farflung_zoo::exchange::{Exchange, all_to_all_shape, check_length, check_pieces, with_length};

/// A rank's exchanges with others, by a communicator for each axis. Along other axes the rank is alone.
#[derive(Debug, Clone)]
pub struct OverRanks {
    axes: BTreeMap<Axis, Communicator>,
}

impl OverRanks {
    /// Makes the exchanges of a rank. Its number along an axis is that in the axis's communicator.
    #[must_use]
    pub fn new(axes: impl IntoIterator<Item = (Axis, Communicator)>) -> Self {
        Self { axes: axes.into_iter().collect() }
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
        let Some(comm) = self.among(axis) else { return Ok(()) };
        if let Some(values) = values.host_mut::<f32>() {
            return comm.all_reduce(values, ReduceOp::Sum).map_err(failed(axis));
        }
        let mut sum = values.to_vec::<f32>()?;
        comm.all_reduce(&mut sum, ReduceOp::Sum).map_err(failed(axis))?;
        Ok(values.write(&sum)?)
    }

    fn gather(&self, axis: Axis, piece: Tensor, dim: usize, lengths: &[usize]) -> Result<Tensor, ZooError> {
        check_pieces(lengths, self.size(axis))?;
        check_length(piece.shape(), dim, lengths[self.rank(axis)])?;
        let Some(comm) = self.among(axis) else { return Ok(piece) };
        let whole = with_length(piece.shape(), dim, lengths.iter().sum())?;
        let runs = Runs::new(whole, dim);
        let counts = runs.counts(lengths);
        let start: usize = counts[..comm.rank().index()].iter().sum();
        let mut packed = vec![0.0; whole.len()];
        packed[start..][..piece.shape().len()].copy_from_slice(&piece.to_vec::<f32>()?);
        comm.all_gather_v(&mut packed, &counts).map_err(failed(axis))?;
        Ok(piece.device().tensor(&runs.joined(&packed, lengths), whole)?)
    }

    fn scatter(&self, axis: Axis, whole: Tensor, dim: usize, lengths: &[usize]) -> Result<Tensor, ZooError> {
        check_pieces(lengths, self.size(axis))?;
        check_length(whole.shape(), dim, lengths.iter().sum())?;
        let Some(comm) = self.among(axis) else { return Ok(whole) };
        let runs = Runs::new(whole.shape(), dim);
        let mut packed = runs.split(&whole.to_vec::<f32>()?, lengths);
        let own =
            comm.reduce_scatter_v(&mut packed, &runs.counts(lengths), ReduceOp::Sum).map_err(failed(axis))?;
        let piece = with_length(whole.shape(), dim, lengths[comm.rank().index()])?;
        Ok(whole.device().tensor(&packed[own], piece)?)
    }

    fn all_to_all(&self, axis: Axis, values: Tensor, split: usize, join: usize) -> Result<Tensor, ZooError> {
        let shape = all_to_all_shape(values.shape(), self.size(axis), (split, join))?;
        let Some(comm) = self.among(axis) else { return Ok(values) };
        let pieces = comm.size();
        let equal = |shape: Shape, dim: usize| vec![shape.dims()[dim] / pieces; pieces];
        let lengths = equal(values.shape(), split);
        let packed = Runs::new(values.shape(), split).split(&values.to_vec::<f32>()?, &lengths);
        let received = comm.all_to_all(&packed).map_err(failed(axis))?;
        let joined = Runs::new(shape, join).joined(&received, &equal(shape, join));
        Ok(values.device().tensor(&joined, shape)?)
    }
}

/// A tensor as rows of `length` runs of neighbouring elements, which pieces divide.
struct Runs {
    rows: usize,
    length: usize,
    run: usize,
}

impl Runs {
    fn new(shape: Shape, dim: usize) -> Self {
        let (outer, inner) = shape.dims().split_at(dim);
        Self { rows: outer.iter().product(), length: inner[0], run: inner[1..].iter().product() }
    }

    /// Returns the number of elements of each piece.
    fn counts(&self, lengths: &[usize]) -> Vec<usize> {
        lengths.iter().map(|length| self.rows * length * self.run).collect()
    }

    /// Calls `copy` with the start in the tensor, the start among the pieces one behind the other, and the
    /// length of all runs of the pieces.
    fn each(&self, lengths: &[usize], mut copy: impl FnMut(usize, usize, usize)) {
        let (mut begin, mut packed) = (0, 0);
        for length in lengths {
            for row in 0..self.rows {
                copy((row * self.length + begin) * self.run, packed, length * self.run);
                packed += length * self.run;
            }
            begin += length;
        }
    }

    /// Returns the pieces one behind the other.
    fn split(&self, values: &[f32], lengths: &[usize]) -> Vec<f32> {
        let mut packed = vec![0.0; values.len()];
        self.each(lengths, |from, to, len| packed[to..][..len].copy_from_slice(&values[from..][..len]));
        packed
    }

    /// Returns the tensor of the pieces one behind the other.
    fn joined(&self, packed: &[f32], lengths: &[usize]) -> Vec<f32> {
        let mut values = vec![0.0; packed.len()];
        self.each(lengths, |to, from, len| values[to..][..len].copy_from_slice(&packed[from..][..len]));
        values
    }
}
