//! Selection by magnitude: the largest elements of the vector or of each chunk, or those above a threshold.
//! This module does not depend on any encoding.

use super::amount::Amount;
use super::index::Chunking;
use crate::CompressError;
use crate::magnitude::{INFINITE, magnitude, max_magnitude};
use crate::simd::{Kernel, Level};
use crate::threads;

/// A rule that chooses elements by their magnitude.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum Select {
    /// Exactly the largest elements. Of equal magnitudes, those with lower indices are kept.
    ///
    /// Source: Stich et al. 2018, "Sparsified SGD with Memory".
    Largest(Amount),
    /// The `kept` largest elements of each chunk of the vector (the last chunk may be short).
    PerChunk {
        /// Number of elements in a chunk; at least 1.
        chunk: u32,
        /// Number of elements that are kept of each chunk.
        kept: u32,
    },
    /// All elements that reach a threshold estimated from a sample. Their number is about the amount, and at
    /// most 1.3 times it; if more are found, the largest are kept. The sample is every 101st element.
    ///
    /// Source: Lin et al. 2018, "Deep Gradient Compression", section 3.1. Differs: the threshold is not adapted
    /// again.
    Sampled(Amount),
    /// All elements whose magnitude is at least the magnitude of this number. Their number has no limit.
    Threshold(f32),
}

impl Select {
    /// Returns the largest number of elements that are kept of `len`.
    #[must_use]
    pub fn most(&self, len: usize) -> usize {
        match *self {
            Self::Largest(amount) => amount.of(len),
            Self::PerChunk { chunk, kept } => {
                Chunking { chunk: chunk as usize, kept: kept as usize }.total(len)
            }
            Self::Sampled(amount) => limit(amount.of(len), len),
            Self::Threshold(_) => len,
        }
    }

    /// Returns the chunks that the coding of the indices of `kept` elements uses.
    pub(crate) fn chunking(&self, len: usize, kept: usize) -> Chunking {
        match *self {
            Self::PerChunk { chunk, kept } => Chunking { chunk: chunk as usize, kept: kept as usize },
            _ => Chunking::whole(len, kept),
        }
    }
}

/// Returns the largest number of elements that [`Select::Sampled`] keeps for an amount of `kept`.
fn limit(kept: usize, len: usize) -> usize {
    (kept.saturating_mul(13) / 10).min(len)
}

/// Distance between two neighbouring elements of the sample of [`Select::Sampled`].
const STRIDE: usize = 101;
/// Approximate size of the sample from which [`Finder::find`] estimates its first threshold.
const SAMPLE: usize = 1 << 13;
/// Number of elements that are tested together.
const RUN: usize = 256;
/// Largest number of hits in a run of [`RUN`] elements that are extracted one by one. With more hits, every
/// element is tested again.
const FEW: usize = 32;

/// Finds the selected elements on several threads, and keeps its buffers for the next call.
#[derive(Debug, Clone, Default)]
pub(crate) struct Finder {
    /// Buffers of each thread. There is at least one after the first use.
    scratch: Vec<Scratch>,
}

/// Buffers of one thread.
#[derive(Debug, Clone, Default)]
struct Scratch {
    /// [`key`]s of the candidates, in the order of their indices.
    candidates: Vec<u64>,
    /// Copy of the candidates that is reordered to find the smallest one to keep.
    order: Vec<u64>,
    sample: Vec<u32>,
    /// Keys of the elements selected in this thread's chunks.
    found: Vec<u64>,
}

/// Returns a key that is larger for a larger magnitude, and of equal magnitudes for a lower index. Magnitude,
/// index and sign of the element can be read back from it.
fn key(x: f32, index: usize) -> u64 {
    let bits = x.to_bits();
    // The shift by 33 drops the sign from the top; it is stored in the lowest bit.
    u64::from(bits) << 33 | u64::from(!(index as u32)) << 1 | u64::from(bits >> 31)
}

fn magnitude_of(key: u64) -> i32 {
    (key >> 33) as i32
}

fn index(key: u64) -> u32 {
    !((key >> 1) as u32)
}

fn value(key: u64) -> f32 {
    f32::from_bits((key >> 33) as u32 | (key as u32) << 31)
}

/// Output of a selection: ascending indices and their values.
#[derive(Debug)]
pub(crate) struct Chosen<'a> {
    pub(crate) indices: &'a mut Vec<u32>,
    pub(crate) values: &'a mut Vec<f32>,
}

impl Chosen<'_> {
    fn extend(&mut self, keys: &[u64]) {
        self.indices.extend(keys.iter().map(|key| index(*key)));
        self.values.extend(keys.iter().map(|key| value(*key)));
    }
}

impl Finder {
    /// Writes the elements that `select` chooses from `x` to `out`, using up to `threads` threads.
    ///
    /// Errors: [`CompressError::NonFinite`] for the first element that is not finite.
    pub(crate) fn find(
        &mut self,
        level: Level,
        threads: usize,
        select: Select,
        x: &[f32],
        mut out: Chosen<'_>,
    ) -> Result<(), CompressError> {
        out.indices.clear();
        out.values.clear();
        let pieces = threads::threads_for(threads, x.len());
        if self.scratch.len() < pieces {
            self.scratch.resize_with(pieces, Scratch::default);
        }
        let scratch = &mut self.scratch[..pieces];
        match select {
            Select::Largest(amount) => largest(scratch, level, x, 0, amount.of(x.len()))?,
            Select::PerChunk { chunk, kept } => {
                return per_chunk(scratch, level, x, (chunk as usize, kept as usize), out);
            }
            Select::Sampled(amount) => {
                let (kept, sample) = (amount.of(x.len()), &mut scratch[0].sample);
                sample.clear();
                sample.extend(x.iter().step_by(STRIDE).map(|x| magnitude(*x).cast_unsigned()));
                let wanted = kept.div_ceil(STRIDE).clamp(1, sample.len().max(1));
                let (threshold, most) = (nth_largest(sample, wanted), limit(kept, x.len()));
                scan(scratch, level, x, 0, threshold, most)?;
                scratch[0].shrink(most);
            }
            Select::Threshold(threshold) => scan(scratch, level, x, 0, magnitude(threshold), x.len())?,
        }
        out.extend(&scratch[0].candidates);
        Ok(())
    }
}

/// Selects the `kept` largest elements of each chunk. Threads get nearly equal numbers of chunks.
fn per_chunk(
    scratch: &mut [Scratch],
    level: Level,
    x: &[f32],
    (chunk, kept): (usize, usize),
    mut out: Chosen<'_>,
) -> Result<(), CompressError> {
    let each = x.len().div_ceil(chunk).div_ceil(scratch.len()).max(1) * chunk;
    let find = |(i, (x, scratch)): (usize, (&[f32], &mut Scratch))| {
        scratch.found.clear();
        for (j, part) in x.chunks(chunk).enumerate() {
            largest(std::slice::from_mut(scratch), level, part, i * each + j * chunk, kept.min(part.len()))?;
            let Scratch { found, candidates, .. } = scratch;
            found.extend_from_slice(candidates);
        }
        Ok(())
    };
    let pieces = x.len().div_ceil(each);
    threads::try_each(x.chunks(each).zip(&mut *scratch).enumerate(), find)?;
    for scratch in &scratch[..pieces] {
        out.extend(&scratch.found);
    }
    Ok(())
}

/// Makes the `kept` largest elements the candidates of the first of `scratch`, with `offset` added to their
/// indices.
fn largest(
    scratch: &mut [Scratch],
    level: Level,
    x: &[f32],
    offset: usize,
    kept: usize,
) -> Result<(), CompressError> {
    let mut threshold = scratch[0].guess(x, kept);
    loop {
        scan(scratch, level, x, offset, threshold, kept)?;
        if scratch[0].candidates.len() >= kept {
            break;
        }
        // The estimated threshold was too high: divide it by four and try again.
        threshold = threshold.saturating_sub(2 << 23).max(0);
    }
    scratch[0].shrink(kept);
    Ok(())
}

/// Makes all elements that reach `threshold` candidates of the first of `scratch`. Elements that cannot be
/// among the `most` largest may be left out.
fn scan(
    scratch: &mut [Scratch],
    level: Level,
    x: &[f32],
    offset: usize,
    threshold: i32,
    most: usize,
) -> Result<(), CompressError> {
    let each = x.len().div_ceil(scratch.len()).max(1);
    let pieces = x.len().div_ceil(each);
    threads::try_each(x.chunks(each).zip(&mut *scratch).enumerate(), |(i, (x, scratch))| {
        scratch.scan(level, x, offset + i * each, threshold, most)
    })?;
    match &mut scratch[..pieces] {
        [] => scratch[0].candidates.clear(),
        [first, others @ ..] => {
            for other in others {
                first.candidates.extend_from_slice(&other.candidates);
            }
        }
    }
    Ok(())
}

impl Scratch {
    /// Estimates a magnitude that at least `kept` elements reach with high probability, and few more.
    fn guess(&mut self, x: &[f32], kept: usize) -> i32 {
        let stride = (x.len() / SAMPLE).max(8);
        if x.len() < 2 * RUN || kept == 0 {
            return 0;
        }
        self.sample.clear();
        self.sample.extend(x.iter().step_by(stride).map(|x| magnitude(*x).cast_unsigned()));
        // The expected number of samples among the kept elements, plus four standard deviations.
        let mean = self.sample.len() as f64 * kept as f64 / x.len() as f64;
        let wanted = (mean + 4.0 * mean.sqrt()).ceil() as usize + 1;
        if wanted >= self.sample.len() { 0 } else { nth_largest(&mut self.sample, wanted) }
    }

    /// Runs one thread's part of [`scan`].
    fn scan(
        &mut self,
        level: Level,
        x: &[f32],
        offset: usize,
        threshold: i32,
        most: usize,
    ) -> Result<(), CompressError> {
        self.candidates.clear();
        // If the candidates exceed this number, only the largest are kept, and the threshold is raised.
        let room = 2 * most + RUN;
        let (mut at, mut threshold) = (0, threshold);
        while at < x.len() {
            let index = offset + at;
            let scan = Scan { x: &x[at..], index, threshold, room, found: &mut self.candidates };
            let (seen, max) = level.run(scan);
            if max >= INFINITE {
                let index = x
                    .iter()
                    .position(|x| !x.is_finite())
                    .expect("the kernel found a value that is not finite");
                return Err(CompressError::NonFinite { index: offset + index, value: x[index] });
            }
            at += seen;
            if at < x.len() {
                self.shrink(most);
                let least = self.candidates.iter().min().map_or(0, |key| magnitude_of(*key));
                // Later elements of equal magnitude have higher indices, so they are not selected.
                threshold = threshold.max(least.saturating_add(1));
            }
        }
        Ok(())
    }

    /// Keeps the `kept` largest candidates, in their order.
    fn shrink(&mut self, kept: usize) {
        if self.candidates.len() <= kept {
            return;
        }
        if kept == 0 {
            self.candidates.clear();
            return;
        }
        self.order.clear();
        self.order.extend_from_slice(&self.candidates);
        let at = self.order.len() - kept;
        let (_, least, _) = self.order.select_nth_unstable(at);
        let least = *least;
        self.candidates.retain(|key| *key >= least);
    }
}

/// Returns the `n`th largest of the magnitudes, counted from 1, or 0 if there is none.
fn nth_largest(sample: &mut [u32], n: usize) -> i32 {
    match sample.len().checked_sub(n) {
        Some(at) if at < sample.len() => sample.select_nth_unstable(at).1.cast_signed(),
        _ => 0,
    }
}

/// Kernel: appends the keys of elements that reach a threshold, until there are more than `room`. Returns the
/// number of elements read, and the bits of the largest magnitude among them.
struct Scan<'a> {
    x: &'a [f32],
    /// Index of the first element.
    index: usize,
    threshold: i32,
    room: usize,
    found: &'a mut Vec<u64>,
}

impl Kernel for Scan<'_> {
    type Output = (usize, i32);

    #[expect(clippy::inline_always, reason = "a kernel is compiled for its caller's instruction set")]
    #[inline(always)]
    fn run(self) -> (usize, i32) {
        let Self { x, index, threshold, room, found } = self;
        let mut max = 0;
        for (i, run) in x.chunks(RUN).enumerate() {
            let start = index + i * RUN;
            let (flags, largest) = match run.as_array() {
                Some(run) => flags(run, threshold),
                None => ([u32::MAX; 8], max_magnitude(run)),
            };
            max = max.max(largest);
            let hits: u32 = flags.iter().map(|flags| flags.count_ones()).sum();
            if hits > FEW as u32 {
                for (j, x) in run.iter().enumerate() {
                    if magnitude(*x) >= threshold {
                        found.push(key(*x, start + j));
                    }
                }
            } else if hits > 0 {
                let (mut at, mut count) = ([0; FEW], 0);
                for (j, mut flags) in flags.into_iter().enumerate() {
                    while flags != 0 {
                        at[count] = 8 * flags.trailing_zeros() as usize + j;
                        count += 1;
                        flags &= flags - 1;
                    }
                }
                // The hits were found lane by lane; they must be in ascending order.
                at[..count].sort_unstable();
                found.extend(at[..count].iter().map(|j| key(run[*j], start + j)));
            }
            if found.len() > room {
                return (i * RUN + run.len(), max);
            }
        }
        (x.len(), max)
    }
}

/// Returns flags and the bits of the largest magnitude. Bit `i` of word `j` is set if element `8 i + j` reaches
/// the threshold.
#[expect(clippy::inline_always, reason = "part of kernels")]
#[inline(always)]
fn flags(run: &[f32; RUN], threshold: i32) -> ([u32; 8], i32) {
    let (mut flags, mut max) = ([0; 8], [0; 8]);
    for eight in run.as_chunks::<8>().0 {
        for ((flags, max), x) in flags.iter_mut().zip(&mut max).zip(eight) {
            let magnitude = magnitude(*x);
            *flags = *flags >> 1 | u32::from(magnitude >= threshold) << 31;
            *max = magnitude.max(*max);
        }
    }
    (flags, max.into_iter().fold(0, i32::max))
}
