//! The mean of gradients of which each rank keeps a shard alone (Rajbhandari et al. 2020, "ZeRO", stage 2):
//! ranges are sent to the ranks that update them as they become final, a few windows at a time, and are then
//! added to the shard.

use std::collections::VecDeque;
use std::ops::Range;

use farflung_base::Pending;
use farflung_comm::{CommError, Communicator, ReduceOp};
use farflung_tensor::{Op, ProgramBuilder, Tensor, TensorError};

use crate::average::with_part;
use crate::{OptimError, Shards};

/// Sums ranges of flat buffers over the ranks of a communicator, each into the shard of its owner.
/// Contributions are added in rank order, so that the sums do not depend on who updates what.
///
/// All ranks must start the same ranges in the same order. A rank holds [`Shards::IN_FLIGHT`] windows at a
/// time, whatever the length of the buffers.
///
/// ```
/// use std::sync::Arc;
///
/// use farflung_comm::{Communicator, memory};
/// use farflung_optim::{ShardReduction, Shards};
/// use farflung_tensor::Device;
///
/// let rank = |endpoint: Arc<memory::Memory>| {
///     let comm = Communicator::new(endpoint);
///     let (cpu, me) = (Device::cpu(1)?, comm.rank().index());
///     let shards = Shards::new([3, 1]);
///     let mut own = cpu.zeros(shards.of(me).len())?;
///     let mut reduction = ShardReduction::new(comm, shards, 2);
///     let unit = cpu.tensor(&[me as f32, 10.0, 20.0], 3)?;
///     reduction.start(1..4, &unit, false, &mut own)?; // elements 1 and 2 are of rank 0, element 3 of rank 1
///     reduction.finish(&mut own)?;
///     assert_eq!(own.to_vec::<f32>()?, if me == 0 { vec![0.0, 0.5, 10.0] } else { vec![20.0] });
///     Ok::<_, farflung_optim::OptimError>(())
/// };
/// std::thread::scope(|scope| {
///     for endpoint in memory::cluster(2) {
///         scope.spawn(move || rank(endpoint).unwrap());
///     }
/// });
/// ```
#[derive(Debug)]
pub struct ShardReduction {
    comm: Communicator,
    shards: Shards,
    most: usize,
    going: VecDeque<Window>,
}

/// Values on their way to their owners.
#[derive(Debug)]
struct Window {
    /// The places in the shard of what this rank gets, which is in the values from `first` on.
    into: Vec<Range<usize>>,
    first: usize,
    /// Whether it is added to what the shard has, instead of overwriting it.
    adds: bool,
    values: Pending<Result<Vec<f32>, CommError>>,
}

impl ShardReduction {
    /// Creates a reduction into shards of the ranks of `comm`, in windows of about `most` elements.
    ///
    /// # Panics
    /// If there is not one shard for each rank.
    #[must_use]
    pub fn new(comm: Communicator, shards: Shards, most: usize) -> Self {
        assert_eq!(shards.ranks(), comm.size(), "one shard for each rank");
        Self { comm, shards, most, going: VecDeque::new() }
    }

    /// Starts the mean of a range of the flat buffers, whose values `unit` has. What arrives meanwhile goes to
    /// `own`, this rank's shard: it is added there if `adds`, and overwrites values otherwise.
    ///
    /// Errors: a peer that was lost; those of the device.
    ///
    /// # Panics
    /// If `unit` or `own` has another length.
    pub fn start(
        &mut self,
        range: Range<usize>,
        unit: &Tensor,
        adds: bool,
        own: &mut Tensor,
    ) -> Result<(), OptimError> {
        assert_eq!(unit.shape().len(), range.len(), "the values of the range");
        let me = self.comm.rank().index();
        assert_eq!(own.shape().len(), self.shards.of(me).len(), "the sums of the shard");
        for window in self.shards.within(&range).windows(self.most) {
            while self.going.len() >= Shards::IN_FLIGHT {
                self.arrive(own)?;
            }
            let lengths = window.lengths();
            let mut values = Vec::with_capacity(lengths.iter().sum());
            for piece in window.ranges() {
                let place = piece.start - range.start..piece.end - range.start;
                with_part(unit, place, |part| values.extend_from_slice(part))?;
            }
            let first = lengths[..me].iter().sum::<usize>();
            let own = window.of(me).ranges().iter().flat_map(|range| self.shards.of(me).within(range));
            self.going.push_back(Window {
                into: own.map(|piece| piece.own()).collect(),
                first,
                adds,
                values: self.comm.start_reduce_scatter_in_order(values, &lengths, ReduceOp::Mean),
            });
        }
        Ok(())
    }

    /// Waits for all that was started.
    ///
    /// Errors: as [`ShardReduction::start`].
    pub fn finish(&mut self, own: &mut Tensor) -> Result<(), OptimError> {
        while !self.going.is_empty() {
            self.arrive(own)?;
        }
        Ok(())
    }

    /// Drops what is on its way, with the step.
    pub fn clear(&mut self) {
        self.going.clear();
    }

    /// Waits for the oldest window.
    fn arrive(&mut self, own: &mut Tensor) -> Result<(), OptimError> {
        let Some(Window { into, first, adds, values }) = self.going.pop_front() else { return Ok(()) };
        let (values, mut at) = (values.wait()?, first);
        for range in into {
            let part = &values[at..at + range.len()];
            at += range.len();
            if adds {
                add(own, range, part)?;
            } else {
                own.view_mut().part(range.start, range.len())?.write(part)?;
            }
        }
        Ok(())
    }
}

/// Adds values to a range of a buffer.
fn add(y: &mut Tensor, range: Range<usize>, values: &[f32]) -> Result<(), OptimError> {
    if let Some(y) = y.host_mut::<f32>() {
        y[range].iter_mut().zip(values).for_each(|(y, value)| *y += value);
        return Ok(());
    }
    let mut p = ProgramBuilder::new();
    let (own, more) = (p.load(0), p.read(0));
    let sum = p.add(own, more);
    p.store(0, sum);
    let (program, device) = (&p.build()?, y.device().clone());
    let x = device.tensor(values, values.len())?;
    let y = y.view_mut().part(range.start, range.len())?;
    let run: Result<(), TensorError> =
        device.run(Op::Map { program, scalars: &[], reads: &[x.view()], writes: &mut [y] });
    Ok(run?)
}
