//! How buffers are averaged, as data, and what follows from it for a layout.

use std::ops::Range;

use farflung_base::Algorithm;
use farflung_tensor::ParamLayout;

use super::bucket::{Bucket, Slot, cut};
use super::coding::Coding;
use super::rounds::Rounds;

/// How buffers are averaged.
#[derive(Debug, Clone)]
pub struct AverageConfig {
    /// What travels: plain f32 (`none`, reduced as the communicator does), a codec's bytes, or what a protocol
    /// exchanges (plain, as well).
    pub codec: Coding,
    /// How a codec's bytes are reduced: one of [`Algorithm::CODED`], or `auto`, the cheapest on the
    /// communicator's links.
    pub algorithm: Algorithm,
    /// Most f32 bytes of a bucket; a larger parameter is a bucket alone.
    pub bucket_bytes: usize,
    /// Parts of a round that can leave at different times, by
    /// [`Average::start_fragment`](super::Average::start_fragment): runs of neighbouring parameters with about
    /// the same number of elements, from the layout's end to its start. At least 1.
    pub fragments: usize,
    /// Rounds at the beginning that travel as plain f32, before [`AverageConfig::codec`] holds: from the first
    /// step on, lossy codecs lose more than later.
    pub warmup: u64,
    /// Rounds after these in which a codec that keeps a share of the elements, such as `dgc:0.001`, keeps more:
    /// a quarter, then a quarter of that and so on, each share for as many rounds. 0 is none.
    pub density_warmup: u64,
    /// Whether buckets start as soon as they are ready, rather than all at the end.
    pub overlap: bool,
    /// Seed of the codecs that draw.
    pub seed: u64,
}

impl Default for AverageConfig {
    /// Plain f32, buckets of 4 MiB, overlapped; a codec's bytes by a scatter-gather of equal shards.
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
        }
    }
}

impl AverageConfig {
    pub(super) fn cut(&self, layout: &ParamLayout) -> (Vec<Slot>, Vec<Bucket>) {
        cut(layout, self.bucket_bytes, self.fragments)
    }

    /// Elements of each bucket into which a layout is cut, in the order in which they travel.
    #[must_use]
    pub fn buckets(&self, layout: &ParamLayout) -> Vec<usize> {
        self.cut(layout).1.iter().map(|bucket| bucket.len).collect()
    }

    /// Values of each bucket's exchanges where a protocol averages them, in the order of
    /// [`AverageConfig::buckets`]; `None` where none does.
    #[must_use]
    pub fn exchanges(&self, layout: &ParamLayout) -> Option<Vec<Vec<usize>>> {
        let make = self.codec.protocols()?;
        let (slots, buckets) = self.cut(layout);
        let of = |bucket: usize| {
            let slots = slots.iter().filter(|slot| slot.bucket == bucket);
            Rounds::new(slots, &*make, self.seed).sizes().to_vec()
        };
        Some((0..buckets.len()).map(of).collect())
    }

    /// For each bucket, after which of some ranges of a layout, which become final in this order, it leaves:
    /// when its parameters are all final and those of the buckets before it too. The number of ranges where
    /// that never is.
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
