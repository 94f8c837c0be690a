//! Which sequences a rank trains on at a step: a pure function of (seed, step, rank), so that a run resumes
//! from its step counter alone, and any number of workers sees what one worker with the whole batch would see.

use std::fs;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use farflung_base::Philox;

use super::epochs::Epochs;
use super::tokens::Split;
use crate::ZooError;

/// A rank's share of each step's batch: sequences `rank * batch..(rank + 1) * batch` of `world * batch`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shard {
    /// This worker.
    pub rank: usize,
    /// All workers.
    pub world: usize,
    /// Sequences per worker and step.
    pub batch: usize,
}

impl Shard {
    /// One worker that takes the whole batch.
    #[must_use]
    pub const fn whole(batch: usize) -> Self {
        Self { rank: 0, world: 1, batch }
    }

    fn validate(self) -> Result<(), ZooError> {
        let wrong = |field, value, expected: &str| {
            Err(ZooError::Sampler { field, value, expected: expected.to_owned() })
        };
        match self {
            Self { world: 0, .. } => wrong("world", 0, "at least 1"),
            Self { rank, world, .. } if rank >= world => {
                wrong("rank", rank, &format!("below the world size of {world}"))
            }
            Self { batch: 0, .. } => wrong("batch", 0, "at least 1"),
            Self { batch, world, .. } if batch.checked_mul(world).is_none() => {
                wrong("batch", batch, "a product with `world` that fits the machine's words")
            }
            _ => Ok(()),
        }
    }

    const fn global_batch(self) -> usize {
        self.world * self.batch
    }
}

/// A recorded list of offsets, one row of `columns` sequences per step, to replay the batches of another
/// program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Offsets {
    columns: usize,
    values: Vec<i64>,
}

impl Offsets {
    /// Reads a file of little-endian `i64`, `[steps, columns]`, as numpy's `tofile` writes it.
    ///
    /// Errors: [`ZooError::Io`]; [`ZooError::TokenFile`] if the length is not a whole number of rows.
    pub fn read(path: &Path, columns: usize) -> Result<Self, ZooError> {
        let bytes = fs::read(path).map_err(ZooError::io("read", path))?;
        let (values, _) = bytes.as_chunks();
        let offsets = Self::new(columns, values.iter().map(|&b| i64::from_le_bytes(b)).collect());
        let row = columns as u64 * 8;
        let rest = bytes.len() as u64 % row.max(1);
        if rest != 0 {
            let (path, field) = (path.to_owned(), "length in bytes, modulo a row");
            return Err(ZooError::TokenFile { path, field, found: rest, expected: 0 });
        }
        offsets
    }

    /// Offsets from memory, row after row.
    ///
    /// Errors: [`ZooError::Sampler`] if there is not a whole number of rows.
    pub fn new(columns: usize, values: Vec<i64>) -> Result<Self, ZooError> {
        if columns == 0 || !values.len().is_multiple_of(columns) {
            let expected = format!("a divisor of the {} offsets", values.len());
            return Err(ZooError::Sampler { field: "columns", value: columns, expected });
        }
        Ok(Self { columns, values })
    }

    /// Number of steps.
    #[must_use]
    pub const fn steps(&self) -> usize {
        self.values.len() / self.columns
    }

    /// Cuts after `steps` rows (or at the end, if there are fewer): first those, then the rest.
    #[must_use]
    pub fn split_at(mut self, steps: usize) -> (Self, Self) {
        let at = steps.min(self.steps()) * self.columns;
        let rest = self.values.split_off(at);
        let columns = self.columns;
        (self, Self { columns, values: rest })
    }
}

/// Where the offsets of a step come from.
#[derive(Debug, Clone)]
enum Source {
    Random(Philox),
    Within(Philox, Within),
    Epochs(Epochs),
    Recorded(Offsets),
}

/// The offsets at which a sequence lies within one of some ranges.
#[derive(Debug, Clone)]
struct Within {
    ranges: Arc<[Range<usize>]>,
    /// Offsets in the ranges up to and with each.
    ends: Arc<[u64]>,
}

impl Within {
    fn new(ranges: &Arc<[Range<usize>]>, context: usize) -> Self {
        let mut all = 0;
        let ends = ranges.iter().map(|range| {
            all += range.len().saturating_sub(context) as u64;
            all
        });
        Self { ends: ends.collect(), ranges: Arc::clone(ranges) }
    }

    /// How many there are.
    fn count(&self) -> u64 {
        self.ends.last().copied().unwrap_or(0)
    }

    /// The offset of a number below [`Within::count`].
    fn offset(&self, number: u64) -> usize {
        let at = self.ends.partition_point(|&end| end <= number);
        let before = if at == 0 { 0 } else { self.ends[at - 1] };
        self.ranges[at].start + (number - before) as usize
    }
}

/// Draws batches from a split.
///
/// ```
/// use farflung_zoo::data::{Corpus, HoldOut, Sampler, Shard};
/// use farflung_zoo::tokenizer::Byte;
///
/// let corpus = Corpus::from_bytes("fox", b"the quick brown fox jumps over the lazy dog", &Byte)?;
/// let (training, _) = corpus.split(HoldOut::Standard)?;
/// let sampler = Sampler::random(training, 7, Shard::whole(2), 8)?;
/// let (mut inputs, mut targets) = (Vec::new(), Vec::new());
/// sampler.batch(0, &mut inputs, &mut targets)?;
/// assert_eq!(inputs[1..8], targets[..7]);
/// # Ok::<(), farflung_zoo::ZooError>(())
/// ```
#[derive(Debug, Clone)]
pub struct Sampler {
    split: Split,
    shard: Shard,
    context: usize,
    source: Source,
}

impl Sampler {
    /// Windows of `context` tokens (and the token after them) at offsets uniform in `0..=len - context - 1`.
    ///
    /// Sequence `i` of the global batch of step `s` is drawn at position `p = s * world * batch + i` (modulo
    /// 2^64) of the seed's Philox stream, so the union over the ranks is what one worker with `world * batch`
    /// sequences draws. Its offset is
    ///
    /// ```text
    /// w      = philox4x32_10(counter = [p, p >> 32, t, t >> 32], key = [seed, seed >> 32])   words of 32 bits
    /// offset = floor((w[0] * 2^32 + w[1]) * (len - context) / 2^64)
    /// ```
    ///
    /// where `t` is the stream `0x0072_656c_706d_6173`: the bytes `"sampler\0"`, least significant first. See
    /// [`Philox`]. In training, `s` counts microbatches: that of microbatch `m` of an optimizer step is
    /// `step * microbatches + m`.
    ///
    /// Errors: [`ZooError::TooShort`] if the split has fewer than `context + 1` tokens; [`ZooError::Sampler`].
    pub fn random(split: Split, seed: u64, shard: Shard, context: usize) -> Result<Self, ZooError> {
        let source = Source::Random(Philox::new(seed, STREAM));
        Self::new(split, shard, context, source)
    }

    /// As [`Sampler::random`], but only windows that lie within one of some ranges of the split: what a
    /// replica has of [`Shards`](super::Shards). Sequences have the same numbers as without ranges, and each
    /// offset is as likely as any other.
    ///
    /// Errors: as [`Sampler::random`]; [`ZooError::TooShort`] if no range has `context + 1` tokens.
    ///
    /// # Panics
    /// If a range ends beyond the split.
    pub fn within(
        split: Split,
        ranges: &Arc<[Range<usize>]>,
        seed: u64,
        shard: Shard,
        context: usize,
    ) -> Result<Self, ZooError> {
        let end = ranges.iter().map(|range| range.end).max().unwrap_or(0);
        assert!(end <= split.len(), "a range ends at {end} of {}", split.len());
        let mut sampler = Self::new(split, shard, context, Source::Random(Philox::new(seed, STREAM)))?;
        let within = Within::new(ranges, context);
        if within.count() == 0 {
            let tokens = ranges.iter().map(Range::len).max().unwrap_or(0);
            let (split, needed) = (sampler.split.name, context.saturating_add(1));
            return Err(ZooError::TooShort { split, tokens, needed });
        }
        sampler.source = Source::Within(Philox::new(seed, STREAM), within);
        Ok(sampler)
    }

    /// Windows that do not overlap, in shuffled epochs: window `w` begins at token `w * context`. Of `lanes`
    /// sequences, those of one step, each has `floor(windows / lanes)` windows of its own and takes them in
    /// another order in each epoch; the last `windows mod lanes` are left out. So a sequence's samples recur
    /// where it is trained, and however a step's sequences are shared out, a step trains on the same ones.
    ///
    /// [`Sampler::window`] numbers them: what is kept by sample, such as AQ-SGD's activations, goes by that.
    ///
    /// Errors: as [`Sampler::random`]; [`ZooError::Sampler`] for fewer windows than lanes.
    pub fn epochs(
        split: Split,
        seed: u64,
        shard: Shard,
        context: usize,
        lanes: u64,
    ) -> Result<Self, ZooError> {
        let mut sampler = Self::new(split, shard, context, Source::Random(Philox::new(seed, STREAM)))?;
        let windows = (sampler.split.len() as u64 - 1) / context as u64;
        let Some(epochs) = Epochs::new(seed, lanes, windows) else {
            let value = usize::try_from(lanes).unwrap_or(usize::MAX);
            let expected = format!("at most {windows}, the windows of {context} tokens that the data has");
            return Err(ZooError::Sampler { field: "sequences of a step", value, expected });
        };
        sampler.source = Source::Epochs(epochs);
        Ok(sampler)
    }

    /// Replays recorded offsets; a row has `world * batch` of them.
    ///
    /// Errors: as [`Sampler::random`], and [`ZooError::OffsetOutOfRange`].
    pub fn recorded(split: Split, offsets: Offsets, shard: Shard, context: usize) -> Result<Self, ZooError> {
        let sampler = Self::new(split, shard, context, Source::Recorded(offsets))?;
        let Source::Recorded(offsets) = &sampler.source else { return Ok(sampler) };
        if offsets.columns != shard.global_batch() {
            let expected = format!("{}, the offsets in a row", offsets.columns);
            let value = shard.global_batch();
            return Err(ZooError::Sampler { field: "world x batch", value, expected });
        }
        let last = sampler.last_offset();
        let wrong = |&offset: &i64| usize::try_from(offset).map_or(true, |o| o > last);
        if let Some(index) = offsets.values.iter().position(wrong) {
            let offset = offsets.values[index];
            return Err(ZooError::OffsetOutOfRange { index, offset, last });
        }
        Ok(sampler)
    }

    /// `steps` batches of windows spread evenly over the split from its first to its last, the same at every
    /// call: what a validation loss is measured on. Window `i` of all `count = steps * world * batch` begins at
    /// `floor(i * (len - context - 1) / (count - 1))`, a single one at 0.
    ///
    /// Errors: as [`Sampler::random`].
    pub fn evaluation(split: Split, shard: Shard, context: usize, steps: usize) -> Result<Self, ZooError> {
        let columns = shard.global_batch();
        let empty = Source::Recorded(Offsets { columns: columns.max(1), values: Vec::new() });
        let mut sampler = Self::new(split, shard, context, empty)?;
        let last = sampler.last_offset() as u128;
        let count = columns * steps;
        let spread = |i: usize| (i as u128 * last / (count as u128 - 1).max(1)) as i64;
        sampler.source = Source::Recorded(Offsets { columns, values: (0..count).map(spread).collect() });
        Ok(sampler)
    }

    fn new(split: Split, shard: Shard, context: usize, source: Source) -> Result<Self, ZooError> {
        shard.validate()?;
        if context == 0 {
            let expected = "at least 1".to_owned();
            return Err(ZooError::Sampler { field: "context", value: 0, expected });
        }
        if split.len() <= context {
            let (tokens, needed) = (split.len(), context.saturating_add(1));
            return Err(ZooError::TooShort { split: split.name, tokens, needed });
        }
        Ok(Self { split, shard, context, source })
    }

    /// The greatest offset that leaves room for a sequence and its targets.
    fn last_offset(&self) -> usize {
        self.split.len() - self.context - 1
    }

    /// This worker's share of each batch.
    #[must_use]
    pub const fn shard(&self) -> Shard {
        self.shard
    }

    /// Tokens in a sequence.
    #[must_use]
    pub const fn context(&self) -> usize {
        self.context
    }

    /// Steps that can be asked for; `None` if there is no end.
    #[must_use]
    pub const fn steps(&self) -> Option<usize> {
        match &self.source {
            Source::Random(_) | Source::Within(..) | Source::Epochs(_) => None,
            Source::Recorded(offsets) => Some(offsets.steps()),
        }
    }

    /// Windows that come again in each epoch; `None` where sequences are not numbered windows.
    #[must_use]
    pub const fn windows(&self) -> Option<u64> {
        match &self.source {
            Source::Epochs(epochs) => Some(epochs.windows()),
            Source::Random(_) | Source::Within(..) | Source::Recorded(_) => None,
        }
    }

    /// The stable number of a sequence's window, below [`Sampler::windows`]: the same tokens whenever it comes
    /// again.
    #[must_use]
    pub fn window(&self, sequence: u64) -> Option<u64> {
        match &self.source {
            Source::Epochs(epochs) => Some(epochs.window(sequence)),
            Source::Random(_) | Source::Within(..) | Source::Recorded(_) => None,
        }
    }

    /// The offset of a sequence, counted from the first of step 0 over all ranks.
    fn offset(&self, sequence: u64) -> Result<usize, ZooError> {
        match &self.source {
            Source::Random(philox) => Ok(philox.below(sequence, self.last_offset() as u64 + 1) as usize),
            Source::Within(philox, within) => Ok(within.offset(philox.below(sequence, within.count()))),
            Source::Epochs(epochs) => Ok(epochs.window(sequence) as usize * self.context),
            Source::Recorded(offsets) => {
                let offset = usize::try_from(sequence).ok().and_then(|i| offsets.values.get(i));
                let columns = self.shard.global_batch() as u64;
                let (step, steps) = (sequence / columns, offsets.steps() as u64);
                Ok(*offset.ok_or(ZooError::StepNotRecorded { step, steps })? as usize)
            }
        }
    }

    /// This worker's batch of a step: `inputs` and `targets` become `[batch, context]` tokens, row after row,
    /// the targets one token ahead.
    ///
    /// Errors: [`ZooError::StepNotRecorded`] for a step past the end of recorded or evaluation offsets.
    pub fn batch(&self, step: u64, inputs: &mut Vec<u32>, targets: &mut Vec<u32>) -> Result<(), ZooError> {
        let Shard { rank, batch, .. } = self.shard;
        let first = step.wrapping_mul(self.shard.global_batch() as u64).wrapping_add((rank * batch) as u64);
        self.sequences(first, batch, inputs, targets)
    }

    /// `count` sequences from number `first` on, whichever rank they belong to: `inputs` and `targets` become
    /// `[count, context]` tokens, row after row, the targets one token ahead. Sequences are numbered from 0 at
    /// step 0, over all ranks of a step and then step by step.
    ///
    /// Errors: [`ZooError::StepNotRecorded`] for a sequence past the end of recorded or evaluation offsets.
    pub fn sequences(
        &self,
        first: u64,
        count: usize,
        inputs: &mut Vec<u32>,
        targets: &mut Vec<u32>,
    ) -> Result<(), ZooError> {
        inputs.clear();
        targets.clear();
        for index in 0..count as u64 {
            let offset = self.offset(first.wrapping_add(index))?;
            self.split.append_to(offset, self.context, inputs);
            self.split.append_to(offset + 1, self.context, targets);
        }
        Ok(())
    }
}

/// The sampler's stream of a seed; tensors of a model start from streams counted from 0.
const STREAM: u64 = u64::from_le_bytes(*b"sampler\0");
