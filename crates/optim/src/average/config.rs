//! Configuration of averages, and the buckets into which it cuts a layout.

use std::ops::Range;

use farflung_base::Algorithm;
use farflung_comm::Communicator;
use farflung_tensor::{Device, ParamLayout};

use super::bucket::{Bucket, Slot, cut};
use super::bucket_protocols::BucketProtocols;
use super::coding::Coding;
use super::shards::Shards;
use crate::OptimError;

/// Configuration of averages.
#[derive(Debug, Clone)]
pub struct AverageConfig {
    /// Encoding of values: plain f32 (`none`), a codec, or a protocol. Plain values, and those that a protocol
    /// exchanges, are averaged by the communicator's own all-reduce.
    pub codec: Coding,
    /// Algorithm that reduces a codec's bytes: one of [`Algorithm::CODED`], or `auto`, which is the cheapest of
    /// them except the ring, on the communicator's links.
    pub algorithm: Algorithm,
    /// Largest size of a bucket in bytes of f32; a larger parameter is a bucket alone.
    pub bucket_bytes: usize,
    /// Number of parts of a round that can be sent at different times, by
    /// [`Average::start_fragment`](super::Average::start_fragment). They are runs of neighbouring parameters
    /// with about the same number of elements, from the layout's end to its start. At least 1.
    pub fragments: usize,
    /// Number of rounds at the beginning that send plain f32, before [`AverageConfig::codec`] is used: lossy
    /// codecs lose more in the first steps than later.
    pub warmup: u64,
    /// Number of rounds after the first [`AverageConfig::warmup`] ones in which a codec that keeps a share of
    /// the elements, such as `dgc:0.001`, keeps more: a quarter, then a quarter of that and so on, each share
    /// for the same number of rounds. 0 disables it.
    pub density_warmup: u64,
    /// Whether buckets are sent as soon as they are ready, rather than all at the end.
    pub overlap: bool,
    /// Seed of codecs that draw random numbers.
    pub seed: u64,
    /// Ranges of whole parameters of the layout that are averaged over other ranks than the rest: an entry for
    /// each set of holders. These are fewer ranks, such as those of the same experts or of the same module of
    /// several paths, or more, where each rank has a piece of the rest. They are in buckets of their own.
    pub apart: Vec<Vec<Range<usize>>>,
    /// The range of the flat buffers that each rank updates: only its mean reaches the rank, and the rest of
    /// the buffer stays. What is in [`AverageConfig::apart`] is averaged for all. Contributions are added in
    /// rank order, whatever the algorithm. `None`: all ranks get the mean of all.
    pub shards: Option<Shards>,
}

impl Default for AverageConfig {
    /// Returns plain f32 in buckets of 4 MiB that overlap with computation. A codec's bytes are reduced by a
    /// scatter-gather of equal shards.
    fn default() -> Self {
        Self {
            codec: Coding::default(),
            algorithm: Algorithm::Direct,
            bucket_bytes: 4 << 20,
            fragments: 1,
            warmup: 0,
            density_warmup: 0,
            overlap: true,
            seed: 0,
            apart: Vec::new(),
            shards: None,
        }
    }
}

impl AverageConfig {
    pub(super) fn check_shards(
        &self,
        comm: &Communicator,
        device: &Device,
        layout: &ParamLayout,
    ) -> Result<(), OptimError> {
        let Some(shards) = &self.shards else { return Ok(()) };
        let refuse = |value: usize, expected| {
            let (transform, field, value) = ("average", "shards", value as f64);
            Err(OptimError::Setting { transform, field, value, expected })
        };
        if shards.ranks() != comm.size() {
            return refuse(shards.ranks(), "one for each rank");
        }
        if shards.whole() != layout.len() {
            return refuse(shards.whole(), "the elements of the layout, padding included");
        }
        let plain = self.codec.streams(device)?.is_none() && self.codec.protocols().is_none();
        if plain { Ok(()) } else { refuse(shards.ranks(), "none with a codec of averages") }
    }

    pub(super) fn cut(&self, layout: &ParamLayout) -> (Vec<Slot>, Vec<Bucket>) {
        cut(layout, self.bucket_bytes, self.fragments, &self.apart)
    }

    /// Returns the number of elements of each bucket of a layout, in the order in which buckets are sent.
    #[must_use]
    pub fn buckets(&self, layout: &ParamLayout) -> Vec<usize> {
        self.cut(layout).1.iter().map(|bucket| bucket.len).collect()
    }

    /// Returns for each bucket, in the same order, the entry of [`AverageConfig::apart`] that its parameters
    /// are in; `None` if all ranks hold them.
    #[must_use]
    pub fn apart_buckets(&self, layout: &ParamLayout) -> Vec<Option<usize>> {
        self.cut(layout).1.iter().map(|bucket| bucket.apart).collect()
    }

    /// Returns for each bucket, in the same order, the ranges of the flat buffer whose elements are in it.
    #[must_use]
    pub fn bucket_ranges(&self, layout: &ParamLayout) -> Vec<Vec<Range<usize>>> {
        self.cut(layout).1.iter().map(|bucket| bucket.pieces().to_vec()).collect()
    }

    /// Returns the number of values in each exchange of each bucket, in the order of
    /// [`AverageConfig::buckets`]; `None` if no protocol is used.
    #[must_use]
    pub fn exchanges(&self, layout: &ParamLayout) -> Option<Vec<Vec<usize>>> {
        let make = self.codec.protocols()?;
        let (slots, buckets) = self.cut(layout);
        let of = |bucket: usize| {
            let slots = slots.iter().filter(|slot| slot.bucket == bucket);
            BucketProtocols::new(slots, &*make, self.seed).sizes().to_vec()
        };
        Some((0..buckets.len()).map(of).collect())
    }

    /// Returns for each bucket after which of `ranges` it is sent. The ranges become final in this order; a
    /// bucket is sent once its parameters and those of all buckets before it are final. The index is the number
    /// of ranges if that never happens.
    #[must_use]
    pub fn ready_after(&self, layout: &ParamLayout, ranges: &[Range<usize>]) -> Vec<usize> {
        let (slots, buckets) = self.cut(layout);
        let mut ready = vec![0; buckets.len()];
        for slot in slots {
            let whole = |range: &Range<usize>| range.start <= slot.range.start && slot.range.end <= range.end;
            let at = ranges.iter().position(whole).unwrap_or(ranges.len());
            ready[slot.bucket] = at.max(ready[slot.bucket]);
        }
        for i in 1..ready.len() {
            ready[i] = ready[i].max(ready[i - 1]);
        }
        ready
    }
}
