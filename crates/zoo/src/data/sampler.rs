//! Sampling of training sequences. The batch is a pure function of (seed, step, rank): a run resumes from its
//! step counter alone, and any number of workers together draws what one worker with the whole batch would
//! draw.

mod evaluation;
mod examples;
#[cfg(test)]
mod tests;

use std::fs;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use farflung_base::Philox;

use super::batch::Batch;
use super::epochs::Epochs;
use super::examples::ExampleRows;
use super::objective::{Denoised, Denoising, Objective};
use super::token_rows::TokenRows;
use super::tokens::Split;
use crate::ZooError;

/// A rank's part of each step's batch: sequences `rank * batch..(rank + 1) * batch` of `world * batch`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shard {
    /// Rank of this worker.
    pub rank: usize,
    /// Number of workers.
    pub world: usize,
    /// Number of sequences per worker and step.
    pub batch: usize,
}

impl Shard {
    /// Returns the shard of a single worker, which has the whole batch.
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
                wrong("batch", batch, "a number whose product with `world` fits in a machine word")
            }
            _ => Ok(()),
        }
    }

    const fn global_batch(self) -> usize {
        self.world * self.batch
    }
}

/// A recorded list of offsets, with one row of `columns` sequences per step. With it, the batches of another
/// program can be replayed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Offsets {
    columns: usize,
    values: Vec<i64>,
}

impl Offsets {
    /// Reads a file of little-endian `i64` values, `[steps, columns]`, as written by numpy's `tofile`.
    ///
    /// Errors: [`ZooError::Io`]; [`ZooError::OffsetsLength`] if the length is not a whole number of rows;
    /// [`ZooError::Sampler`] if `columns` is zero.
    pub fn read(path: &Path, columns: usize) -> Result<Self, ZooError> {
        let bytes = fs::read(path).map_err(ZooError::io("read", path))?;
        let (values, _) = bytes.as_chunks();
        let offsets = Self::new(columns, values.iter().map(|&b| i64::from_le_bytes(b)).collect());
        let row = columns as u64 * 8;
        let found = bytes.len() as u64;
        if !found.is_multiple_of(row.max(1)) {
            return Err(ZooError::OffsetsLength { path: path.to_owned(), found, row });
        }
        offsets
    }

    /// Creates offsets from values in memory, row after row.
    ///
    /// Errors: [`ZooError::Sampler`] if `columns` is zero or the last row is incomplete.
    pub fn new(columns: usize, values: Vec<i64>) -> Result<Self, ZooError> {
        if columns == 0 || !values.len().is_multiple_of(columns) {
            let expected = format!("a divisor of the {} offsets", values.len());
            return Err(ZooError::Sampler { field: "columns", value: columns, expected });
        }
        Ok(Self { columns, values })
    }

    /// Returns the number of steps.
    #[must_use]
    pub const fn steps(&self) -> usize {
        self.values.len() / self.columns
    }

    /// Returns the offset of a sequence; `None` after the last one.
    fn at(&self, sequence: u64) -> Option<usize> {
        let at = usize::try_from(sequence).ok()?;
        self.values.get(at).map(|&offset| offset as usize)
    }

    /// Splits after `steps` rows (or at the end, if there are fewer) and returns both parts.
    #[must_use]
    pub fn split_at(mut self, steps: usize) -> (Self, Self) {
        let at = steps.min(self.steps()) * self.columns;
        let rest = self.values.split_off(at);
        let columns = self.columns;
        (self, Self { columns, values: rest })
    }
}

/// Source of the offsets of a step.
#[derive(Debug, Clone)]
enum Source {
    Random(Philox),
    Within(Philox, Within),
    Epochs(Epochs),
    Recorded(Offsets),
    /// The windows of an evaluation that belong to one path. Sequences after the last one have no targets.
    Routed(Offsets),
    /// Rows of examples in shuffled epochs.
    Examples(Arc<ExampleRows>, Epochs),
    /// The rows of an evaluation. Sequences after the last one have no targets.
    SomeExamples(Arc<ExampleRows>, Offsets),
    /// Sequence `n` is row `n % lanes`.
    Rows {
        rows: Arc<TokenRows>,
        lanes: u64,
    },
}

/// The valid offsets of sequences within some ranges, numbered consecutively.
#[derive(Debug, Clone)]
struct Within {
    ranges: Arc<[Range<usize>]>,
    /// For each range, number of valid offsets in it and in all ranges before.
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

    /// Returns the number of valid offsets.
    fn count(&self) -> u64 {
        self.ends.last().copied().unwrap_or(0)
    }

    /// Returns the offset with this number, which must be below [`Within::count`].
    fn offset(&self, number: u64) -> usize {
        let at = self.ends.partition_point(|&end| end <= number);
        let before = if at == 0 { 0 } else { self.ends[at - 1] };
        self.ranges[at].start + (number - before) as usize
    }
}

/// Draws batches of sequences from a split.
///
/// ```
/// use farflung_zoo::data::{Corpus, HoldOut, Sampler, Shard};
/// use farflung_zoo::tokenizer::Byte;
///
/// let corpus = Corpus::from_bytes("fox", b"the quick brown fox jumps over the lazy dog", &Byte)?;
/// let (training, _) = corpus.split(HoldOut::Standard)?;
/// let sampler = Sampler::random(training, 7, Shard::whole(2), 8)?;
/// let batch = sampler.batch(0)?;
/// assert_eq!(batch.inputs[1..8], batch.targets[..7]);
/// # Ok::<(), farflung_zoo::ZooError>(())
/// ```
#[derive(Debug, Clone)]
pub struct Sampler {
    split: Split,
    shard: Shard,
    context: usize,
    source: Source,
    /// Whether sequences are divided at the borders of documents.
    divided: bool,
    /// Number of targets at the beginning of each sequence that do not count, at most `context`.
    skipped: usize,
    /// How windows become sequences; `None` if they are sequences.
    denoising: Option<Denoising>,
}

impl Sampler {
    /// Creates a sampler of random windows: `context` tokens (and the token after them) at offsets uniform in
    /// `0..=len - context - 1`.
    ///
    /// Sequence `i` of the global batch of step `s` is drawn at position `p = s * world * batch + i` (modulo
    /// 2^64) of the seed's Philox stream. The sequences of all ranks together are therefore those of one worker
    /// with `world * batch` sequences. The offset is
    ///
    /// ```text
    /// w      = philox4x32_10(counter = [p, p >> 32, t, t >> 32], key = [seed, seed >> 32])   words of 32 bits
    /// offset = floor((w[0] * 2^32 + w[1]) * (len - context) / 2^64)
    /// ```
    ///
    /// where `t` is the stream `0x0072_656c_706d_6173`: the bytes `"sampler\0"`, least significant first. See
    /// [`Philox`]. In training, `s` counts microbatches: microbatch `m` of an optimizer step has
    /// `s = step * microbatches + m`.
    ///
    /// Errors: [`ZooError::TooShort`] if the split has fewer than `context + 1` tokens; [`ZooError::Sampler`].
    pub fn random(split: Split, seed: u64, shard: Shard, context: usize) -> Result<Self, ZooError> {
        let source = Source::Random(Philox::new(seed, STREAM));
        Self::new(split, shard, context, source)
    }

    /// Creates a sampler like [`Sampler::random`], but only of windows within one of some ranges of the split,
    /// such as a replica's ranges in [`Shards`](super::Shards). Sequences are numbered as without ranges, and
    /// all valid offsets are equally likely.
    ///
    /// Errors: those of [`Sampler::random`]; [`ZooError::TooShort`] if no range has `context + 1` tokens.
    ///
    /// # Panics
    /// If a range ends after the split's end.
    pub fn within(
        split: Split,
        ranges: &Arc<[Range<usize>]>,
        seed: u64,
        shard: Shard,
        context: usize,
    ) -> Result<Self, ZooError> {
        let end = ranges.iter().map(|range| range.end).max().unwrap_or(0);
        assert!(end <= split.len(), "a range ends at token {end} of a split of {} tokens", split.len());
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

    /// Creates a sampler of shuffled epochs of non-overlapping windows: window `w` begins at token
    /// `w * context`. A step has `lanes` sequences. Each lane has its own `floor(windows / lanes)` windows and
    /// takes them in a new order in each epoch; the last `windows mod lanes` windows are not used.
    ///
    /// A lane's windows recur on the lane, so data that a trainer stores per window (such as AQ-SGD's
    /// activations, with the number of [`Sampler::window`] as key) stays local. The windows of a step do not
    /// depend on how lanes are distributed over ranks.
    ///
    /// Errors: those of [`Sampler::random`]; [`ZooError::Sampler`] if there are fewer windows than lanes.
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
            let expected =
                format!("at most {windows}, the number of windows of {context} tokens in the data");
            return Err(ZooError::Sampler { field: "sequences of a step", value, expected });
        };
        sampler.source = Source::Epochs(epochs);
        Ok(sampler)
    }

    /// Creates a sampler that replays recorded offsets. A row must have `world * batch` of them.
    ///
    /// Errors: those of [`Sampler::random`], and [`ZooError::OffsetOutOfRange`].
    pub fn recorded(split: Split, offsets: Offsets, shard: Shard, context: usize) -> Result<Self, ZooError> {
        let sampler = Self::new(split, shard, context, Source::Recorded(offsets))?;
        let Source::Recorded(offsets) = &sampler.source else { return Ok(sampler) };
        if offsets.columns != shard.global_batch() {
            let expected = format!("{}, the number of offsets in a row", offsets.columns);
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

    /// Creates a sampler of rows: each step has all of them once. A step has `lanes` sequences over all ranks;
    /// sequences beyond the last row have no targets.
    ///
    /// Errors: [`ZooError::Sampler`]; [`ZooError::Rows`] if the rows are longer than `context`.
    ///
    /// # Panics
    /// If the split is no rows ([`Split::rows`]).
    pub fn rows(split: Split, shard: Shard, context: usize, lanes: u64) -> Result<Self, ZooError> {
        let rows = Arc::clone(split.rows().expect("a sampler of rows is one of a split that is rows"));
        rows.check(usize::MAX, context)?;
        if lanes < rows.count() as u64 {
            let value = usize::try_from(lanes).unwrap_or(usize::MAX);
            let expected = format!("at least {}, the number of rows", rows.count());
            return Err(ZooError::Sampler { field: "sequences of a step", value, expected });
        }
        Self::checked(split, shard, context, Source::Rows { rows, lanes })
    }

    fn new(split: Split, shard: Shard, context: usize, source: Source) -> Result<Self, ZooError> {
        if context > 0 && split.len() <= context {
            shard.validate()?;
            let (tokens, needed) = (split.len(), context.saturating_add(1));
            return Err(ZooError::TooShort { split: split.name, tokens, needed });
        }
        Self::checked(split, shard, context, source)
    }

    fn checked(split: Split, shard: Shard, context: usize, source: Source) -> Result<Self, ZooError> {
        shard.validate()?;
        if context == 0 {
            let expected = "at least 1".to_owned();
            return Err(ZooError::Sampler { field: "context", value: 0, expected });
        }
        Ok(Self { split, shard, context, source, divided: false, skipped: 0, denoising: None })
    }

    /// Divides sequences at the borders of the split's documents ([`Split::documents`]): batches then say where
    /// documents begin, and the last token of a document has no target. A document that began before its
    /// sequence begins with it. Rows are divided if they were read so ([`TokenRows::read_packed`]).
    #[must_use]
    pub fn by_documents(self) -> Self {
        Self { divided: true, ..self }
    }

    /// Leaves out the first `count` targets of each sequence: their weight is 0, so that they count nowhere.
    /// All of a sequence's targets are left out if there are no more. Of rows, those of each row.
    ///
    /// Tokens that choose a path must not also be predicted by it. A [`TextRouter`](super::TextRouter) with a
    /// prefix of `n` tokens sees the first `n - 1` targets, since a sequence's first token is no target.
    #[must_use]
    pub fn without_first_targets(self, count: usize) -> Self {
        Self { skipped: count.min(self.context), ..self }
    }

    /// Makes sequences of an objective from windows, for a model with `vocab` tokens: batches then say where
    /// prefixes end, and only what follows a prefix are targets. A window always becomes the same sequence,
    /// which depends on the seed and on the window's place in the split alone. A sequence that is shorter than
    /// the context is filled up with token 0 of weight 0. Rows and examples are not changed: they have
    /// prefixes if they were made so ([`TokenRows::read_prefixed`], [`ExampleRows::new`]).
    ///
    /// The ids of the objective itself, the last [`Objective::own_ids`] of the vocabulary, must not be in the
    /// split.
    ///
    /// Errors: [`ZooError::Sampler`] if the context or the vocabulary is too small for the objective, or if
    /// documents are kept apart.
    pub fn with_objective(mut self, objective: Objective, seed: u64, vocab: usize) -> Result<Self, ZooError> {
        if objective == Objective::Causal {
            return Ok(self);
        }
        if self.divided && !self.split.has_examples() {
            let (field, expected) = ("documents kept apart", format!("0 with the objective {objective}"));
            return Err(ZooError::Sampler { field, value: 1, expected });
        }
        let denoising = Denoising::new(objective, seed, self.context, vocab)?;
        let is_text = self.split.rows().is_none() && !self.split.has_examples();
        self.denoising = is_text.then_some(denoising);
        Ok(self)
    }

    /// Returns the greatest valid offset of a sequence with its targets.
    fn last_offset(&self) -> usize {
        self.split.len() - self.context - 1
    }

    /// Returns this worker's part of each batch.
    #[must_use]
    pub const fn shard(&self) -> Shard {
        self.shard
    }

    /// Returns the number of tokens per sequence.
    #[must_use]
    pub const fn context(&self) -> usize {
        self.context
    }

    /// Returns the number of available steps; `None` if it is unlimited.
    #[must_use]
    pub const fn steps(&self) -> Option<usize> {
        match &self.source {
            Source::Random(_) | Source::Within(..) | Source::Epochs(_) | Source::Examples(..) => None,
            Source::Recorded(offsets) | Source::Routed(offsets) | Source::SomeExamples(_, offsets) => {
                Some(offsets.values.len().div_ceil(offsets.columns))
            }
            Source::Rows { lanes, .. } => Some((*lanes as usize).div_ceil(self.shard.global_batch())),
        }
    }

    /// Returns the number of windows per epoch; `None` if the sampler does not number windows.
    #[must_use]
    pub const fn windows(&self) -> Option<u64> {
        match &self.source {
            Source::Epochs(epochs) | Source::Examples(_, epochs) => Some(epochs.windows()),
            _ => None,
        }
    }

    /// Returns the number of a sequence's window, below [`Sampler::windows`]; `None` if the sampler does not
    /// number windows. A window has the same tokens and the same number in every epoch.
    #[must_use]
    pub fn window(&self, sequence: u64) -> Option<u64> {
        match &self.source {
            Source::Epochs(epochs) | Source::Examples(_, epochs) => Some(epochs.window(sequence)),
            _ => None,
        }
    }

    /// Returns the offset of a sequence; `None` if it has no targets. Sequences are numbered from the first of
    /// step 0 over all ranks.
    fn offset(&self, sequence: u64) -> Result<Option<usize>, ZooError> {
        Ok(Some(match &self.source {
            Source::Random(philox) => philox.below(sequence, self.last_offset() as u64 + 1) as usize,
            Source::Within(philox, within) => within.offset(philox.below(sequence, within.count())),
            Source::Epochs(epochs) => epochs.window(sequence) as usize * self.context,
            Source::Recorded(offsets) => {
                let (columns, all) = (self.shard.global_batch(), offsets.values.len());
                if sequence >= all.next_multiple_of(columns) as u64 {
                    let (step, steps) = (sequence / columns as u64, all.div_ceil(columns) as u64);
                    return Err(ZooError::StepNotRecorded { step, steps });
                }
                return Ok(offsets.at(sequence));
            }
            Source::Routed(offsets) => return Ok(offsets.at(sequence)),
            Source::Rows { .. } | Source::Examples(..) | Source::SomeExamples(..) => return Ok(None),
        }))
    }

    /// Draws this worker's batch of a step: `batch` sequences.
    ///
    /// Errors: [`ZooError::StepNotRecorded`] for a step after the end of recorded or evaluation offsets.
    pub fn batch(&self, step: u64) -> Result<Batch, ZooError> {
        let Shard { rank, batch, .. } = self.shard;
        let first = step.wrapping_mul(self.shard.global_batch() as u64).wrapping_add((rank * batch) as u64);
        self.sequences(first, batch)
    }

    /// Draws `count` sequences from number `first` on, independent of ranks. Sequences are numbered from 0 at
    /// step 0, over all ranks of a step and then step by step.
    ///
    /// Errors: [`ZooError::StepNotRecorded`] for a sequence after the end of recorded or evaluation offsets.
    pub fn sequences(&self, first: u64, count: usize) -> Result<Batch, ZooError> {
        let mut batch = Batch { length: self.context, ..Batch::default() };
        for index in 0..count as u64 {
            let sequence = first.wrapping_add(index);
            match &self.source {
                Source::Rows { rows, lanes } => rows.append_to(sequence % lanes, &mut batch),
                Source::Examples(rows, _) | Source::SomeExamples(rows, _) => {
                    rows.append_to(self.row_of_examples(sequence), &mut batch);
                }
                _ => self.append_window(self.offset(sequence)?, &mut batch),
            }
            if let Some(weights) = &mut batch.weights {
                let first = weights.len() - self.context;
                weights[first..first + self.skipped].fill(0.0);
            }
        }
        Ok(batch)
    }

    /// Appends the sequence at an offset to a batch. A sequence without targets, which has no offset, has the
    /// tokens of the first window.
    fn append_window(&self, offset: Option<usize>, batch: &mut Batch) {
        let is_whole = !self.divided && self.skipped == 0 && self.denoising.is_none();
        if offset.is_none() || batch.weights.is_some() || !is_whole {
            let before = batch.inputs.len();
            let weights = batch.weights.get_or_insert_with(|| vec![1.0; before]);
            let weight = if offset.is_some() { 1.0 } else { 0.0 };
            weights.extend(std::iter::repeat_n(weight, self.context));
        }
        let offset = offset.unwrap_or(0);
        self.split.append_to(offset, self.context, &mut batch.inputs);
        self.split.append_to(offset + 1, self.context, &mut batch.targets);
        if self.divided {
            self.divide_last(offset, batch);
        }
        if let Some(denoising) = &self.denoising {
            self.denoise_last(denoising, offset, batch);
        }
    }

    /// Makes a sequence of the last window of a batch, which begins at `offset`.
    fn denoise_last(&self, denoising: &Denoising, offset: usize, batch: &mut Batch) {
        let first = batch.inputs.len() - self.context;
        let mut window = batch.inputs.split_off(first);
        window.extend(batch.targets.last());
        batch.targets.truncate(first);
        let Denoised { tokens, prefix } = denoising.sequence(offset, &window);
        let filled = first + tokens.len() - 1;
        batch.inputs.extend_from_slice(&tokens[..tokens.len() - 1]);
        batch.targets.extend_from_slice(&tokens[1..]);
        batch.inputs.resize(first + self.context, 0);
        batch.targets.resize(first + self.context, 0);
        if let Some(weights) = &mut batch.weights {
            weights[first..first + prefix - 1].fill(0.0);
            weights[filled..].fill(0.0);
        }
        batch.prefixes.get_or_insert_default().resize(first + self.context, prefix as u32);
    }

    /// Returns whether batches say where documents begin.
    #[must_use]
    pub fn is_divided(&self) -> bool {
        match &self.source {
            Source::Rows { rows, .. } => rows.rows().documents.is_some(),
            Source::Examples(..) | Source::SomeExamples(..) => true,
            _ => self.divided,
        }
    }

    /// Returns whether batches say where prefixes end.
    #[must_use]
    pub fn has_prefixes(&self) -> bool {
        match &self.source {
            Source::Rows { rows, .. } => rows.rows().prefixes.is_some(),
            Source::Examples(rows, _) | Source::SomeExamples(rows, _) => rows.has_prefixes(),
            _ => self.denoising.is_some(),
        }
    }

    /// Divides the last sequence of a batch, which begins at `offset`, at the borders of documents.
    fn divide_last(&self, offset: usize, batch: &mut Batch) {
        let first = batch.inputs.len() - self.context;
        let documents = batch.documents.get_or_insert_default();
        documents.resize(first + self.context, 0);
        for border in self.borders_after(offset, 0) {
            let begins = border - offset;
            documents[first + begins.min(self.context)..].fill(begins as u32);
            if let Some(weights) = &mut batch.weights {
                weights[first + begins - 1] = 0.0;
            }
        }
    }

    /// Returns the borders of documents after the first token of the sequence at `offset`, up to its last
    /// target, without those at its first `skipped` targets.
    fn borders_after(&self, offset: usize, skipped: usize) -> impl ExactSizeIterator<Item = usize> {
        self.split.borders(offset + 1 + skipped..offset + self.context + 1)
    }

    /// Returns the number of targets that count in the sequence at `offset`.
    fn counted_at(&self, offset: usize) -> f64 {
        if let Some(denoising) = &self.denoising {
            let last = denoising.targets(offset);
            return last.len().saturating_sub(self.skipped.saturating_sub(last.start)) as f64;
        }
        let borders = if self.divided { self.borders_after(offset, self.skipped).len() } else { 0 };
        (self.context - self.skipped - borders) as f64
    }

    /// Returns the number of targets that count in `count` sequences from number `first` on: a pure function
    /// of the numbers, which every rank can compute for all ranks.
    ///
    /// Errors: as [`Sampler::sequences`].
    pub fn counted(&self, first: u64, count: u64) -> Result<f64, ZooError> {
        match &self.source {
            Source::Random(_) | Source::Within(..) | Source::Epochs(_)
                if !self.divided && self.denoising.is_none() =>
            {
                Ok(count as f64 * (self.context - self.skipped) as f64)
            }
            Source::Rows { rows, lanes } => {
                let of = |index| rows.counted(first.wrapping_add(index) % lanes, self.skipped);
                Ok((0..count).map(of).sum())
            }
            Source::Examples(rows, _) | Source::SomeExamples(rows, _) => {
                let of = |index| rows.counted(self.row_of_examples(first.wrapping_add(index)), self.skipped);
                Ok((0..count).map(of).sum())
            }
            _ => {
                let of = |index| {
                    let offset = self.offset(first.wrapping_add(index))?;
                    Ok(offset.map_or(0.0, |offset| self.counted_at(offset)))
                };
                (0..count).map(of).sum()
            }
        }
    }
}

/// Stream of the sampler's random numbers. Streams of a model's tensors are counted from 0.
const STREAM: u64 = u64::from_le_bytes(*b"sampler\0");
