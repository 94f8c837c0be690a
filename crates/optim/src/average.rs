//! The mean of flat buffers over all ranks. Buffers are cut into buckets that are sent while the rest is still
//! being computed, through a codec if one is set. This module does not depend on models, schedules or networks:
//! the caller marks ranges as ready and gets means back.

mod apart;
mod bucket;
mod coder;
mod coding;
mod config;
mod density;
mod held;
mod bucket_protocols;
mod bucket_reduction;
mod residual_layout;
mod saved;
mod shards;
mod state_buffers;

use std::collections::VecDeque;
use std::ops::Range;

use farflung_base::{Bytes, Nanos};
use farflung_comm::{Communicator, ReduceOp};
use farflung_tensor::{Device, MemoryKind, ParamLayout, Shape, Tensor, TensorError};

use crate::OptimError;
use apart::holders;
use bucket::{Bucket, Fetch, Slot};
use bucket_protocols::BucketProtocols;
use bucket_reduction::{BucketReduction, PendingBucket, ReductionStep};
use coder::Codecs;
use density::DensityWarmup;
use shards::OwnedBucket;

pub use apart::ApartHolders;
pub use coding::{Coding, MakeCompressor, MakeProtocol};
pub use config::AverageConfig;
pub use shards::Shards;
pub(crate) use shards::with_part;

/// Averages flat buffers of one layout over the ranks of a communicator.
///
/// Only parameters are sent, packed: `4 * layout.count()` bytes with codec `none`. Padding stays unchanged.
/// Buckets are cut from the end of the buffer to its start, the order in which gradients become final. Every
/// rank starts them in that order, even if ranges became ready in another. All ranks must use the same layout
/// and config.
///
/// A round is prepared by [`Averaging::finish`]. [`Average::commit`] makes it final, after all ranks [`agree`]d
/// to take the step; without it the codecs' residuals stay as they were. If a codec rejects a value of a shard,
/// because it is not finite or too large, the shard is sent as plain f32 and its residual stays as it was. All
/// ranks then see the same mean, and skip the step together if that is not finite.
///
/// If the device has kernels for the codec ([`crate::device_codec`]), its memory holds the residuals, values
/// are encoded, summed and decoded there, and only bytes cross the bus. Otherwise values are downloaded first.
/// The bytes are the same, so ranks may use different kinds of devices.
///
/// Means are not weighted. If each rank scales its loss by [`token_weight`], the mean is the gradient of the
/// mean loss over all tokens, even if ranks hold unequal numbers of tokens.
///
/// ```
/// use std::sync::Arc;
///
/// use farflung_comm::{Communicator, memory};
/// use farflung_optim::{Average, AverageConfig, agree};
/// use farflung_tensor::{Device, ParamLayout, Shape};
///
/// let rank = |endpoint: Arc<memory::Memory>| {
///     let layout = ParamLayout::new(["a", "b"].map(|n| (n.to_owned(), Shape::from([3, 5]))));
///     let comm = Communicator::new(endpoint);
///     let config = AverageConfig { bucket_bytes: 60, ..AverageConfig::default() };
///     let cpu = Device::cpu(1)?;
///     let mut average = Average::new(comm.clone(), &cpu, &layout, config)?;
///     let mut grads = cpu.tensor(&vec![comm.rank().0 as f32; layout.len()], layout.len())?;
///
///     let mut averaging = average.begin();
///     averaging.ready(64..128, &grads)?; // `b` leaves now, while the gradient of `a` is computed
///     averaging.ready(0..64, &grads)?;
///     let averaged = averaging.finish(&mut grads)?;
///     assert_eq!((averaged.buckets, averaged.payload.0), (2, 4 * 30));
///     if agree(&comm, true)? { average.commit() } else { average.rollback() }
///     assert_eq!(grads.to_vec::<f32>()?[..15], [0.5; 15]);
///     Ok::<_, farflung_optim::OptimError>(())
/// };
/// std::thread::scope(|scope| {
///     for endpoint in memory::cluster(2) {
///         scope.spawn(move || rank(endpoint).unwrap());
///     }
/// });
/// ```
///
/// Sources: Li et al. 2020, "PyTorch Distributed", section 3.2 (buckets in backward order); Tang et al. 2021,
/// "1-bit Adam", section 5 (error feedback on both sides of the reduction).
#[derive(Debug)]
pub struct Average {
    comm: Communicator,
    /// The ranks that hold the parameters of each entry of [`AverageConfig::apart`].
    apart: Vec<ApartHolders>,
    config: AverageConfig,
    len: usize,
    slots: Vec<Slot>,
    buckets: Vec<Bucket>,
    /// Device that holds the flat buffers.
    device: Device,
    /// How each bucket is averaged.
    reductions: Vec<BucketReduction>,
    /// How each bucket will be averaged after the warm-up; `None` once the warm-up is over.
    warm: Option<Vec<BucketReduction>>,
    /// Density warm-up of a selecting codec.
    density: Option<DensityWarmup>,
    /// Stage of the density warm-up that `reductions` was made for.
    stage: usize,
    /// Buckets that are being downloaded from a device; they follow those in flight.
    fetching: VecDeque<Fetch>,
    in_flight: Vec<PendingBucket>,
    round: u64,
    /// Number of buckets of this round that have arrived.
    arrived: usize,
    /// Range of the arrived buckets that are not committed yet.
    uncommitted: Range<usize>,
}

/// Statistics of a round of averaging.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Averaged {
    /// Number of buckets.
    pub buckets: usize,
    /// Number of elements averaged.
    pub elements: usize,
    /// Bytes of this rank's own values, each encoded once. An exchange of equal shards sends `2 (n - 1) / n`
    /// times as many.
    pub payload: Bytes,
    /// Time that [`Averaging::finish`] waited, by the transport's clock: communication that did not overlap
    /// with computation.
    pub wait: Nanos,
}

impl Average {
    /// Creates an average for flat buffers of `layout` on `device`, over all ranks of `comm`.
    ///
    /// Errors: [`OptimError::Setting`] if `bucket_bytes` or `fragments` is 0, or if shards are not those of the
    /// communicator's ranks and the layout; [`OptimError::Comm`] if the algorithm cannot reduce a codec's
    /// bytes.
    pub fn new(
        comm: Communicator,
        device: &Device,
        layout: &ParamLayout,
        config: AverageConfig,
    ) -> Result<Self, OptimError> {
        Self::with_apart(comm, Vec::new(), device, layout, config)
    }

    /// Creates an average as [`Average::new`] does, in which the parameters of each entry of
    /// [`AverageConfig::apart`] are averaged over the ranks of the entry of `apart` with the same number.
    /// Without one, they are averaged over the ranks of `comm`.
    ///
    /// Errors: as [`Average::new`].
    pub fn with_apart(
        comm: Communicator,
        apart: Vec<ApartHolders>,
        device: &Device,
        layout: &ParamLayout,
        config: AverageConfig,
    ) -> Result<Self, OptimError> {
        for (field, value) in [("bucket_bytes", config.bucket_bytes), ("fragments", config.fragments)] {
            if value == 0 {
                let (transform, expected) = ("average", "above 0");
                return Err(OptimError::Setting { transform, field, value: 0.0, expected });
            }
        }
        config.check_shards(&comm, device, layout)?;
        let (slots, buckets) = config.cut(layout);
        let mut average = Self {
            density: DensityWarmup::new(&config.codec, config.density_warmup),
            stage: 0,
            comm,
            apart,
            config,
            len: layout.len(),
            slots,
            fetching: VecDeque::new(),
            in_flight: Vec::with_capacity(buckets.len()),
            buckets,
            device: device.counting_for(MemoryKind::Messages),
            reductions: Vec::new(),
            warm: None,
            round: 0,
            arrived: 0,
            uncommitted: 0..0,
        };
        let reductions = average.new_reductions(0)?;
        average.take(reductions);
        Ok(average)
    }

    /// Sets how buckets are averaged from now on. During the warm-up they are averaged as plain f32, and
    /// `reductions` is kept for later.
    fn take(&mut self, reductions: Vec<BucketReduction>) {
        let plain = |bucket: &Bucket| BucketReduction::Plain(bucket.len);
        (self.reductions, self.warm) = if self.round < self.config.warmup {
            (self.buckets.iter().map(plain).collect(), Some(reductions))
        } else {
            (reductions, None)
        };
        for (bucket, reduction) in self.buckets.iter_mut().zip(&self.reductions) {
            match reduction {
                BucketReduction::Plain(_) | BucketReduction::Rounds(_) => {
                    bucket.place(std::slice::from_ref(&(0..bucket.len)));
                }
                BucketReduction::Owned(owned) => {
                    bucket.place(std::slice::from_ref(&(0..bucket.len)));
                    bucket.own = Some(owned.own());
                }
                BucketReduction::Coded(codecs) => bucket.place(&codecs.blocks()),
            }
        }
    }

    /// Returns the stage of the density warm-up in a round.
    fn stage_of(&self, round: u64) -> usize {
        self.density.map_or(0, |density| density.stage(round.saturating_sub(self.config.warmup)))
    }

    /// Changes to the codec of this round's stage of the density warm-up, if the codecs are still those of an
    /// earlier stage. The new codecs take over the state of the old ones.
    fn change_density(&mut self) -> Result<(), OptimError> {
        let stage = self.stage_of(self.round);
        let between = self.in_flight.is_empty() && self.fetching.is_empty() && self.uncommitted.is_empty();
        if stage == self.stage || !between || self.round < self.config.warmup {
            return Ok(());
        }
        let saved = self.save("")?;
        let mut reductions = self.new_reductions(stage)?;
        let get = |name: &str| saved.iter().find(|(n, _)| n == name).map(|(_, values)| values.as_slice());
        for (bucket, reduction) in reductions.iter_mut().enumerate() {
            reduction.restore(&format!("bucket{bucket}."), &get)?;
            reduction.begin(self.round);
        }
        self.stage = stage;
        self.take(reductions);
        Ok(())
    }

    /// Builds the reduction of each bucket, with the codec of a stage.
    fn new_reductions(&self, stage: usize) -> Result<Vec<BucketReduction>, OptimError> {
        let staged = self.density.map(|density| density.codec(stage));
        let config = &AverageConfig {
            codec: staged.unwrap_or_else(|| self.config.codec.clone()),
            ..self.config.clone()
        };
        let (streams, protocols) = (config.codec.streams(&self.device)?, config.codec.protocols());
        let apart = (!self.apart.is_empty()).then(|| AverageConfig {
            algorithm: ApartHolders::algorithm(config.algorithm),
            ..config.clone()
        });
        let reduction = |(index, bucket): (usize, &Bucket)| {
            let comm = holders(&self.comm, &self.apart, bucket);
            if !self.apart.is_empty() && comm.size() == 1 {
                // A lossy codec would only change the values.
                return Ok(BucketReduction::Plain(bucket.len));
            }
            if let (Some(shards), None) = (&config.shards, bucket.apart) {
                let counts = shards.counts(bucket.pieces());
                return Ok(BucketReduction::Owned(OwnedBucket::new(counts, comm)));
            }
            let config = apart.as_ref().filter(|_| bucket.apart.is_some()).unwrap_or(config);
            Ok(match (&streams, &protocols) {
                (Some(streams), _) => {
                    BucketReduction::Coded(Codecs::new(comm, streams, config, bucket.number, bucket.len)?)
                }
                (None, Some(make)) => {
                    let slots = self.slots.iter().filter(|slot| slot.bucket == index);
                    BucketReduction::Rounds(BucketProtocols::new(slots, &**make, config.seed))
                }
                (None, None) => BucketReduction::Plain(bucket.len),
            })
        };
        self.buckets.iter().enumerate().map(reduction).collect()
    }

    /// Begins a round. Rolls back an earlier round that was not committed.
    pub fn begin(&mut self) -> Averaging<'_> {
        self.open();
        Averaging { average: self, finished: false }
    }

    /// Begins a round as [`Average::begin`] does, for a caller that cannot hold the borrow. The caller marks
    /// ranges with [`Average::ready`] and ends the round with [`Average::finish_all`]. A round that was not
    /// ended is dropped when the next one begins.
    pub fn open(&mut self) {
        // Drops what is left of a round that was never finished.
        self.fetching.clear();
        self.in_flight.clear();
        self.rollback();
        self.arrived = 0;
        for slot in &mut self.slots {
            slot.ready = false;
        }
        for bucket in &mut self.buckets {
            bucket.missing = bucket.params;
        }
        for reduction in &self.reductions {
            reduction.begin(self.round);
        }
    }

    /// Marks a range as ready, like [`Averaging::ready`], in a round that [`Average::open`] began.
    ///
    /// Errors: those of [`Averaging::ready`].
    pub fn ready(&mut self, range: Range<usize>, flat: &Tensor) -> Result<(), OptimError> {
        self.check(flat)?;
        self.change_density()?;
        self.mark(range)?;
        if self.config.overlap { self.start(flat) } else { Ok(()) }
    }

    /// Averages a whole buffer at once, such as DiLoCo's delta. The round must be committed like any other.
    ///
    /// Errors: those of [`Averaging::finish`].
    pub fn all(&mut self, flat: &mut Tensor) -> Result<Averaged, OptimError> {
        self.start_all(flat)?;
        self.finish_all(flat)
    }

    /// Begins a round of a whole buffer whose values are final, and does not wait for it.
    /// [`Average::finish_all`] ends the round. A round that was not ended is dropped when the next one begins.
    ///
    /// Errors: [`OptimError::Tensor`] if the buffer has another length.
    pub fn start_all(&mut self, flat: &Tensor) -> Result<(), OptimError> {
        self.open();
        let begun = self.ready(0..self.len, flat);
        if begun.is_err() {
            self.rollback();
        }
        begun
    }

    /// Ends the round that [`Average::start_all`] or [`Average::open`] began: waits for all buckets, then
    /// writes the means into `flat`.
    ///
    /// Errors: those of [`Averaging::finish`].
    pub fn finish_all(&mut self, flat: &mut Tensor) -> Result<Averaged, OptimError> {
        Averaging { average: self, finished: false }.finish(flat)
    }

    /// Makes the buckets that arrived final, after all ranks agreed on the step. Does nothing if there are
    /// none.
    pub fn commit(&mut self) {
        let committed = std::mem::take(&mut self.uncommitted);
        if !committed.is_empty() {
            self.round += u64::from(self.arrived == self.buckets.len());
            self.reductions[committed].iter_mut().for_each(BucketReduction::commit);
            if self.round == self.config.warmup
                && let Some(reductions) = self.warm.take()
            {
                self.take(reductions);
            }
        }
    }

    /// Undoes the changes that arrived but uncommitted buckets made to the codecs' state, after the step was
    /// abandoned.
    pub fn rollback(&mut self) {
        self.uncommitted = 0..0;
        self.reductions.iter_mut().for_each(BucketReduction::rollback);
    }

    /// Returns the ranges of a fragment's elements in the flat buffer, in the order of the layout.
    #[must_use]
    pub fn fragment(&self, fragment: usize) -> Vec<Range<usize>> {
        let buckets = self.buckets.iter().filter(|bucket| bucket.fragment == fragment);
        let mut pieces: Vec<_> = buckets.flat_map(Bucket::pieces).cloned().collect();
        pieces.sort_unstable_by_key(|piece| piece.start);
        pieces
    }

    /// Sends a fragment of `flat`, whose values are final, and does not wait for it. The round must be
    /// [open](Average::open). Fragments must be sent in order; earlier ones that were not sent are skipped. All
    /// ranks must do the same.
    ///
    /// Errors: those of [`Averaging::ready`].
    pub fn start_fragment(&mut self, fragment: usize, flat: &Tensor) -> Result<(), OptimError> {
        self.check(flat)?;
        self.change_density()?;
        if self.in_flight.is_empty() && self.fetching.is_empty() {
            self.arrived = self.buckets.partition_point(|bucket| bucket.fragment < fragment);
        }
        for piece in self.fragment(fragment) {
            self.mark(piece)?;
        }
        self.start(flat)?;
        self.send(self.fetching.len())
    }

    /// Waits for the fragments that were sent, then writes their means into `flat`: all of them, or none.
    ///
    /// Errors: those of [`Averaging::finish`].
    pub fn finish_fragments(&mut self, flat: &mut Tensor) -> Result<Averaged, OptimError> {
        self.check(flat)?;
        self.arrive(flat)
    }

    /// Waits for the buckets in flight and writes their means into `flat`.
    fn arrive(&mut self, flat: &mut Tensor) -> Result<Averaged, OptimError> {
        let began = self.comm.now();
        let mut travelling: Vec<_> = self.in_flight.drain(..).map(Some).collect();
        let newly_averaged = self.arrived..self.arrived + travelling.len();
        // Buckets with several exchanges continue in their order, which is the same on all ranks.
        while travelling.iter().any(Option::is_some) {
            let (reductions, buckets) =
                (&mut self.reductions[newly_averaged.clone()], &mut self.buckets[newly_averaged.clone()]);
            for ((pending, reduction), bucket) in travelling.iter_mut().zip(reductions).zip(buckets) {
                let Some(packed) = pending.take().map(PendingBucket::wait) else { continue };
                let comm = holders(&self.comm, &self.apart, bucket);
                match reduction.advance(comm, packed?)? {
                    ReductionStep::Mean(packed) => bucket.packed = Some(packed),
                    ReductionStep::Goes(next) => *pending = Some(next),
                }
            }
        }
        let wait = self.comm.now().saturating_sub(began);
        for bucket in &mut self.buckets[newly_averaged.clone()] {
            bucket.unpack(flat)?;
            if let Some(apart) = bucket.apart.and_then(|group| self.apart.get(group)) {
                bucket.weigh(flat, apart.factor)?;
            }
        }
        let elements = self.buckets[newly_averaged.clone()].iter().map(|b| b.len).sum();
        let payload = Bytes(self.reductions[newly_averaged.clone()].iter().map(BucketReduction::sent).sum());
        let averaged = Averaged { buckets: newly_averaged.len(), elements, payload, wait };
        tracing::debug!(
            buckets = averaged.buckets,
            payload_bytes = payload.0,
            wait_ns = wait.0,
            round = self.round,
            "averaged"
        );
        self.arrived = newly_averaged.end;
        self.uncommitted = if self.uncommitted.is_empty() {
            newly_averaged
        } else {
            self.uncommitted.start..newly_averaged.end
        };
        Ok(averaged)
    }

    /// Returns the number of rounds committed so far.
    #[must_use]
    pub const fn round(&self) -> u64 {
        self.round
    }

    /// Returns the communicator over whose ranks it averages.
    #[must_use]
    pub const fn communicator(&self) -> &Communicator {
        &self.comm
    }

    fn check(&self, flat: &Tensor) -> Result<(), OptimError> {
        if flat.shape().len() == self.len {
            return Ok(());
        }
        let (op, lhs, rhs) = ("average", flat.shape(), Shape::from(self.len));
        Err(TensorError::ShapeMismatch { op, lhs, rhs }.into())
    }

    /// Marks the parameters in `range` as final.
    fn mark(&mut self, range: Range<usize>) -> Result<(), OptimError> {
        if range.end > self.len {
            let (op, start, end, len) = ("average", range.start, range.end, self.len);
            return Err(TensorError::OutOfBounds { op, start, end, len }.into());
        }
        let first = self.slots.partition_point(|s| s.range.end <= range.start);
        let count = self.slots[first..].partition_point(|s| s.range.start < range.end);
        let slots = &mut self.slots[first..first + count];
        for slot in &*slots {
            let problem = if slot.range.start < range.start || slot.range.end > range.end {
                "marked ready only in part"
            } else if slot.ready {
                "marked ready twice in one round"
            } else {
                continue;
            };
            return Err(OptimError::Ready { parameter: slot.name.clone(), problem });
        }
        for slot in slots {
            slot.ready = true;
            self.buckets[slot.bucket].missing -= 1;
        }
        Ok(())
    }

    /// Starts to download the complete buckets, up to the first incomplete one, and sends the buckets whose
    /// download an earlier call started. The device has continued to compute since then, so this wait is short.
    /// Once the last bucket is complete, all are sent, so that ranks on different kinds of devices have started
    /// the same collectives when the last range becomes ready.
    fn start(&mut self, flat: &Tensor) -> Result<(), OptimError> {
        let earlier = self.fetching.len();
        loop {
            let next = self.arrived + self.in_flight.len() + self.fetching.len();
            let Some(bucket) = self.buckets.get_mut(next).filter(|b| b.missing == 0) else { break };
            let reduction = &self.reductions[next];
            self.fetching.push_back(bucket.fetch(flat, |len| reduction.empty(len))?);
        }
        let all = self.arrived + self.in_flight.len() + self.fetching.len() == self.buckets.len();
        self.send(if all { self.fetching.len() } else { earlier })
    }

    /// Sends the first `due` of the buckets that are being downloaded, and the next ones if they are already
    /// there.
    fn send(&mut self, due: usize) -> Result<(), OptimError> {
        for sent in 0.. {
            let Some(fetch) = self.fetching.pop_front_if(|fetch| sent < due || fetch.is_ready()) else {
                break;
            };
            let next = self.arrived + self.in_flight.len();
            let comm = holders(&self.comm, &self.apart, &self.buckets[next]);
            let pending = self.reductions[next].start(comm, fetch.wait()?)?;
            self.in_flight.push(pending);
        }
        Ok(())
    }
}

/// A round of averaging in progress. Dropping it unfinished cancels the buckets in flight, after which the
/// communicator can no longer be used, and leaves the codecs' state as it was.
#[derive(Debug)]
#[must_use = "dropping a round of averaging cancels it"]
pub struct Averaging<'a> {
    average: &'a mut Average,
    finished: bool,
}

impl Averaging<'_> {
    /// Marks `range` of `flat` as final for this round; with [`AverageConfig::overlap`], starts the buckets
    /// that can be sent. A range may include padding, and whole parameters; each becomes ready once.
    ///
    /// Errors: [`OptimError::Ready`] if a parameter becomes ready twice or only in part; [`OptimError::Tensor`]
    /// if it has another length or the range exceeds it. [`Averaging::finish`] has those of collectives.
    pub fn ready(&mut self, range: Range<usize>, flat: &Tensor) -> Result<(), OptimError> {
        self.average.ready(range, flat)
    }

    /// Waits for all buckets, then writes the means into `flat`: all of them, or none.
    ///
    /// Errors: [`OptimError::Ready`] if a parameter never became ready, [`OptimError::Comm`] if a rank failed.
    /// `flat` is unchanged then, and the round is rolled back.
    pub fn finish(mut self, flat: &mut Tensor) -> Result<Averaged, OptimError> {
        let average = &mut *self.average;
        average.check(flat)?;
        if let Some(slot) = average.slots.iter().find(|s| !s.ready) {
            let problem = "not marked ready before the end of the round";
            return Err(OptimError::Ready { parameter: slot.name.clone(), problem });
        }
        average.start(flat)?;
        let averaged = average.arrive(flat)?;
        self.finished = true;
        Ok(averaged)
    }
}

impl Drop for Averaging<'_> {
    fn drop(&mut self) {
        if !self.finished {
            self.average.fetching.clear();
            self.average.in_flight.clear();
            self.average.rollback();
        }
    }
}

/// Returns whether `ok` is true on all ranks: the vote between preparing a step and committing it. This is a
/// collective of eight bytes.
pub fn agree(comm: &Communicator, ok: bool) -> Result<bool, OptimError> {
    let mut vote = [u64::from(ok)];
    comm.all_reduce(&mut vote, ReduceOp::Min)?;
    Ok(vote[0] == 1)
}

/// Returns the factor by which each rank scales its summed loss, so that the plain mean over ranks is the mean
/// over the tokens of all ranks: `world / global_tokens`.
#[must_use]
pub fn token_weight(world: usize, global_tokens: u64) -> f32 {
    (world as f64 / global_tokens as f64) as f32
}
