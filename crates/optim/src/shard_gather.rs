//! Gathers of ranges of flat buffers of which each rank keeps a shard alone (Rajbhandari et al. 2020, "ZeRO",
//! stage 3): a range is there for as long as it is needed.

use std::ops::Range;

use farflung_base::Pending;
use farflung_comm::{CommError, Communicator};
use farflung_tensor::Tensor;

use crate::average::with_part;
use crate::{OptimError, Shards};

impl Shards {
    /// Starts to gather a range of the flat buffers from the ranks that have it. `own` has this rank's shard
    /// alone, all of it. A collective: all ranks must start the same ranges in the same order.
    ///
    /// ```
    /// use std::sync::Arc;
    ///
    /// use farflung_comm::{Communicator, memory};
    /// use farflung_optim::Shards;
    /// use farflung_tensor::Device;
    ///
    /// let rank = |endpoint: Arc<memory::Memory>| {
    ///     let comm = Communicator::new(endpoint);
    ///     let own: &[f32] = if comm.rank().0 == 0 { &[1.0, 2.0, 3.0] } else { &[4.0] };
    ///     let own = Device::cpu(1)?.tensor(own, own.len())?;
    ///     let coming = Shards::new([3, 1]).start_gather(&comm, &(1..4), &own)?;
    ///     assert_eq!(coming.wait()?, [2.0, 3.0, 4.0]);
    ///     Ok::<_, farflung_optim::OptimError>(())
    /// };
    /// std::thread::scope(|scope| {
    ///     for endpoint in memory::cluster(2) {
    ///         scope.spawn(move || rank(endpoint).unwrap());
    ///     }
    /// });
    /// ```
    ///
    /// Errors: those of the device.
    ///
    /// # Panics
    /// If `own` or the communicator has another size.
    pub fn start_gather(
        &self,
        comm: &Communicator,
        range: &Range<usize>,
        own: &Tensor,
    ) -> Result<GatheredRange, OptimError> {
        let me = comm.rank().index();
        let sizes = (own.shape().len(), comm.size());
        assert_eq!(sizes, (self.of(me).len(), self.ranks()), "a shard of this rank and these ranks");
        let there = self.within(range);
        let lengths = there.lengths();
        let mut values = vec![0.0; lengths.iter().sum()];
        let mut at = lengths[..me].iter().sum::<usize>();
        for piece in self.of(me).within(range) {
            with_part(own, piece.own(), |part| values[at..at + part.len()].copy_from_slice(part))?;
            at += piece.flat.len();
        }
        let place = |piece: &Range<usize>| piece.start - range.start..piece.end - range.start;
        let places = there.ranges().map(place).collect();
        Ok(GatheredRange { places, values: comm.start_gather_from_owners(values, &lengths) })
    }
}

/// A range of flat buffers on its way from the ranks that have shards of it.
#[derive(Debug)]
#[must_use = "the values are on their way"]
pub struct GatheredRange {
    /// The places in the range of what arrives, in its order.
    places: Vec<Range<usize>>,
    values: Pending<Result<Vec<f32>, CommError>>,
}

impl GatheredRange {
    /// Waits for the values, in the order of the flat buffers.
    ///
    /// Errors: a peer that was lost.
    pub fn wait(self) -> Result<Vec<f32>, OptimError> {
        let values = self.values.wait()?;
        if self.places.is_sorted_by_key(|place| place.start) {
            return Ok(values);
        }
        let (mut ordered, mut at) = (vec![0.0; values.len()], 0);
        for place in self.places {
            let part = &values[at..at + place.len()];
            at += part.len();
            ordered[place].copy_from_slice(part);
        }
        Ok(ordered)
    }
}
