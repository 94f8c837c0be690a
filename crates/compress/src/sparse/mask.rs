//! Masks that all ranks derive from the same key. Only values are sent, no indices, and payloads with equal
//! masks can be summed element by element.

pub use farflung_base::Pattern;

use super::{Scatter, Selection, check_indexable};
use crate::compressor::{Memoryless, add, check_errors, check_finite};
use crate::noise::Noise;
use crate::simd::Level;
use crate::wire::CodecId;
use crate::{CompressError, Compressor, Payload, PayloadRef, RoundKey, State};

/// A mask that takes one of every `stride` elements, the same on all ranks. The vector is divided into strata
/// of `stride` consecutive elements. In a short last stratum nothing is taken if the drawn position is beyond
/// its end, so that all elements are taken equally often.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Mask {
    /// The rule that chooses an element of each stratum.
    pub pattern: Pattern,
    /// Number of elements in a stratum; 0 counts as 1.
    pub stride: u32,
    /// The number of elements taken is rounded down to a multiple of this (0 counts as 1). The elements left
    /// out are consecutive in the mask and change from round to round.
    pub multiple: u32,
}

impl Mask {
    /// Creates a mask of one in `stride` elements.
    #[must_use]
    pub const fn one_in(pattern: Pattern, stride: u32) -> Self {
        Self { pattern, stride, multiple: 1 }
    }

    /// Returns the largest number of elements taken from `len`.
    fn most(self, len: usize) -> usize {
        let strata = len.div_ceil(self.stride.max(1) as usize);
        strata - strata % self.multiple.max(1) as usize
    }
}

/// The mask of one round: a pure function of the fields in the wire format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RoundMask {
    mask: Mask,
    kept: u32,
    gap: u32,
    phase: u32,
    noise: Noise,
}

impl RoundMask {
    /// Number of bytes before the values' body.
    pub const BYTES: usize = 36;

    /// Draws the mask of a vector of `len` elements in the round of `key`.
    #[must_use]
    pub fn new(mask: Mask, key: RoundKey, len: usize) -> Self {
        let mask = Mask { stride: mask.stride.max(1), multiple: mask.multiple.max(1), ..mask };
        let stride = u64::from(mask.stride);
        let (epoch, phase) = match mask.pattern {
            Pattern::Rolling | Pattern::Permuted => (key.round / stride, key.round % stride),
            Pattern::Random => (key.round, 0),
        };
        let noise = Noise::shared(RoundKey { round: epoch, ..key });
        let mut drawn = Self { mask, kept: 0, gap: 0, phase: phase as u32, noise };
        let all = drawn.taken(len);
        drawn.kept = (all - all % mask.multiple as usize) as u32;
        // The gap is drawn for each round, even if the pattern uses one noise stream for a whole epoch.
        let place = Noise::shared(RoundKey { shard: !key.shard, ..key }).below(0, u64::from(drawn.kept) + 1);
        drawn.gap = if drawn.kept as usize == all { 0 } else { place as u32 };
        drawn
    }

    /// Returns the pattern and the stride. [`Mask::multiple`] is the encoder's, and 1 after decoding.
    #[must_use]
    pub const fn mask(&self) -> Mask {
        self.mask
    }

    /// Returns the number of elements in the mask.
    #[must_use]
    pub const fn kept(&self) -> u32 {
        self.kept
    }

    /// Returns the position of the first element left out, counted among all elements that the pattern takes.
    #[must_use]
    pub const fn gap(&self) -> u32 {
        self.gap
    }

    /// Returns the offset that the pattern adds in each stratum.
    #[must_use]
    pub const fn phase(&self) -> u32 {
        self.phase
    }

    /// Returns the key and the number of the [`farflung_base::Philox`] stream that positions are drawn from.
    #[must_use]
    pub fn stream(&self) -> [u64; 2] {
        self.noise.halves()
    }

    /// Returns the number of elements that the pattern takes: one of each stratum, but possibly none of a short
    /// last one.
    #[must_use]
    pub fn taken(&self, len: usize) -> usize {
        let stride = self.mask.stride as usize;
        match (len / stride, len % stride) {
            (full, 0) => full,
            (full, rest) => full + usize::from(self.place(full as u64) < rest as u64),
        }
    }

    /// Returns the position that the pattern takes in a stratum.
    fn place(&self, stratum: u64) -> u64 {
        let stride = u64::from(self.mask.stride);
        match self.mask.pattern {
            Pattern::Rolling => u64::from(self.phase),
            Pattern::Random => self.noise.below(stratum, stride),
            Pattern::Permuted => (self.noise.below(stratum, stride) + u64::from(self.phase)) % stride,
        }
    }

    /// Returns the indices of the mask, ascending: those that the pattern takes, without the elements left out.
    fn indices(self, len: usize) -> impl Iterator<Item = usize> {
        let (gap, stride) = (self.gap as usize, self.mask.stride as usize);
        // The pattern takes an element of each of the first `taken` strata. Of these, the strata `gap..after`
        // are left out.
        let taken = self.taken(len);
        let after = gap + taken.saturating_sub(self.kept as usize);
        (0..gap).chain(after..taken).map(move |j| j * stride + self.place(j as u64) as usize)
    }

    /// Returns the bytes before the values' body.
    #[must_use]
    pub fn write(&self, inner: CodecId) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        (bytes[0], bytes[1]) = (self.mask.pattern as u8, inner.0);
        let words = [self.mask.stride, self.kept, self.gap, self.phase];
        for (bytes, word) in bytes[4..20].as_chunks_mut().0.iter_mut().zip(words) {
            *bytes = word.to_le_bytes();
        }
        for (bytes, half) in bytes[20..].as_chunks_mut().0.iter_mut().zip(self.noise.halves()) {
            *bytes = half.to_le_bytes();
        }
        bytes
    }

    /// Reads the untrusted bytes that [`Self::write`] returned, for a vector of `len` elements.
    ///
    /// Errors: [`CompressError::Indices`].
    pub fn read(bytes: &[u8; Self::BYTES], len: usize) -> Result<(Self, CodecId), CompressError> {
        let wrong = Err(CompressError::Indices { why: "belong to a mask that no encoder writes" });
        let word = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let half = |at: usize| u64::from(word(at + 4)) << 32 | u64::from(word(at));
        let pattern = match bytes[0] {
            0 => Pattern::Rolling,
            1 => Pattern::Permuted,
            2 => Pattern::Random,
            _ => return wrong,
        };
        let mask = Mask { pattern, stride: word(4), multiple: 1 };
        let noise = Noise::of_halves([half(20), half(28)]);
        let drawn = Self { mask, kept: word(8), gap: word(12), phase: word(16), noise };
        let phases = if pattern == Pattern::Random { 1 } else { mask.stride };
        if bytes[2..4] != [0, 0] || mask.stride == 0 || drawn.phase >= phases || drawn.gap > drawn.kept {
            return wrong;
        }
        if drawn.kept as usize > len || drawn.kept as usize > drawn.taken(len) {
            return wrong;
        }
        Ok((drawn, CodecId(bytes[1])))
    }
}

/// Sends the elements of a mask, encoded by the codec `C`. The other elements decode as zero.
///
/// The payload has 36 bytes and the values' body: the mask is sent as its key, not as indices. A vector must
/// have fewer than 2^32 elements. NaN and infinity are rejected, whether in the mask or not; so are values
/// whose product with the stride overflows in an unbiased mask.
///
/// Sources: Wangni et al. 2018, "Gradient Sparsification"; Wang et al. 2023, "`CocktailSGD`" (rolling and
/// permuted masks). Differs: a random mask draws one element of each stratum, so that its size is fixed and its
/// indices are ascending.
///
/// ```
/// use farflung_compress::{Amount, Compressor, Int4, Mask, Masked, Pattern, Select, Sparse};
///
/// // CocktailSGD: random-k over top-k over four bits.
/// let top = Sparse::new(Select::Largest(Amount::millionths(200_000).multiple_of(128)), Int4::new(128)?)?;
/// let mask = Mask { pattern: Pattern::Rolling, stride: 10, multiple: 128 };
/// assert!(Masked::new(mask, top).max_payload(1 << 18) < 6200);
/// # Ok::<(), farflung_compress::CompressError>(())
/// ```
#[derive(Debug, Clone)]
pub struct Masked<C> {
    mask: Mask,
    inner: C,
    unbiased: bool,
    level: Level,
    kept: Selection,
}

impl<C: Memoryless> Masked<C> {
    /// Creates the codec that sends the mask's elements, encoded by `inner`. Use it with error feedback.
    #[must_use]
    pub fn new(mask: Mask, inner: C) -> Self {
        Self { mask, inner, unbiased: false, level: Level::detect(), kept: Selection::default() }
    }

    /// Creates the codec that sends the elements of a random mask multiplied by `stride`, so that the expected
    /// decoded value is the input. It cannot have error feedback, which would count the scale as an error.
    #[must_use]
    pub fn unbiased(stride: u32, inner: C) -> Self {
        Self { unbiased: true, ..Self::new(Mask::one_in(Pattern::Random, stride), inner) }
    }

    fn encode(&mut self, x: &[f32], key: RoundKey, out: &mut Payload) -> Result<(), CompressError> {
        out.clear();
        check_indexable(x)?;
        let largest = f32::from_bits(check_finite(x)?.cast_unsigned());
        let drawn = RoundMask::new(self.mask, key, x.len());
        let scale = if self.unbiased { self.mask.stride.max(1) as f32 } else { 1.0 };
        self.kept.indices.clear();
        self.kept.indices.extend(drawn.indices(x.len()).map(|i| i as u32));
        self.kept.values.clear();
        self.kept.values.extend(self.kept.indices.iter().map(|i| x[*i as usize] * scale));
        if !(largest * scale).is_finite()
            && let Some(at) = self.kept.values.iter().position(|value| !value.is_finite())
        {
            let index = self.kept.indices[at] as usize;
            let what = "its product with the mask's stride";
            return Err(CompressError::Overflow { index, value: x[index], what });
        }
        let inner = self.kept.encode(&mut self.inner, x, key)?;
        out.fill_with(CodecId::MASKED, x.len(), &[&drawn.write(inner.codec()), inner.body()]);
        Ok(())
    }
}

impl<C: Memoryless> State for Masked<C> {}

impl<C: Memoryless> Memoryless for Masked<C> {
    /// Errors: [`CompressError::UnbiasedFeedback`] for an unbiased mask.
    fn compress_residual(
        &mut self,
        x: &[f32],
        e: &[f32],
        next: &mut [f32],
        key: RoundKey,
        out: &mut Payload,
    ) -> Result<(), CompressError> {
        if self.unbiased {
            out.clear();
            return Err(CompressError::UnbiasedFeedback);
        }
        let largest = add(x, e, next, out)?;
        self.encode(next, key, out)?;
        self.kept.subtract(&self.inner, next, out)?;
        check_errors(largest, x, e, next, out)
    }
}

impl<C: Memoryless> Compressor for Masked<C> {
    fn compress(&mut self, x: &[f32], key: RoundKey, out: &mut Payload) -> Result<(), CompressError> {
        self.encode(x, key, out)
    }

    fn decompress(&self, p: PayloadRef<'_>, out: &mut [f32]) -> Result<(), CompressError> {
        let body = p.open(CodecId::MASKED, out.len())?;
        let Some((prefix, values)) = body.split_first_chunk() else {
            let (wanted, found) = (RoundMask::BYTES as u64, body.len() as u64);
            return Err(CompressError::BodyLength {
                codec: CodecId::MASKED,
                count: out.len(),
                wanted,
                found,
            });
        };
        let (drawn, codec) = RoundMask::read(prefix, out.len())?;
        let kept = drawn.kept as usize;
        let len = out.len();
        let mut spread = Scatter::new(self.level, &self.inner, codec, values, kept, out)?;
        drawn.indices(len).try_for_each(|index| spread.put(index as u64))?;
        spread.finish()
    }

    fn max_payload(&self, len: usize) -> usize {
        self.inner.max_payload(self.mask.most(len)).saturating_add(RoundMask::BYTES)
    }

    fn set_threads(&mut self, threads: usize) {
        self.inner.set_threads(threads);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn indices(mask: Mask, round: u64, len: usize) -> Vec<usize> {
        let key = RoundKey { seed: 3, round, ..RoundKey::default() };
        RoundMask::new(mask, key, len).indices(len).collect()
    }

    #[test]
    fn rolling_and_permuted_masks_send_everything_once_in_stride_rounds() {
        for pattern in [Pattern::Rolling, Pattern::Permuted] {
            for len in [0, 1, 9, 10, 11, 1003] {
                let mut sent = vec![0; len];
                for round in 20..30 {
                    for i in indices(Mask::one_in(pattern, 10), round, len) {
                        sent[i] += 1;
                    }
                }
                assert_eq!(sent, vec![1; len], "{pattern:?}");
            }
        }
    }

    #[test]
    fn a_random_mask_draws_all_elements_alike() {
        let (len, rounds) = (1003, 20_000);
        let mut sent = vec![0_u32; len];
        for round in 0..rounds {
            for i in indices(Mask::one_in(Pattern::Random, 10), round, len) {
                sent[i] += 1;
            }
        }
        // Each count has mean 2000 and standard deviation 42; this bounds the largest of a thousand.
        assert!(sent.iter().all(|n| n.abs_diff(2000) < 190), "{:?}", sent.iter().max());
    }

    #[test]
    fn a_multiple_leaves_out_another_part_each_time() {
        let mask = Mask { pattern: Pattern::Rolling, stride: 10, multiple: 128 };
        let mut left_out = vec![0; 1 << 18];
        for round in 0..400 {
            let kept = indices(mask, round, 1 << 18);
            assert_eq!(kept.len(), 26_112);
            assert!(kept.is_sorted());
            let mut all = indices(Mask::one_in(Pattern::Rolling, 10), round, 1 << 18);
            all.retain(|i| kept.binary_search(i).is_err());
            for i in all {
                left_out[i] += 1;
            }
        }
        assert!(left_out.iter().all(|n| *n < 40), "{:?}", left_out.iter().max());
    }

    #[test]
    fn what_a_mask_writes_is_read() {
        for pattern in [Pattern::Rolling, Pattern::Permuted, Pattern::Random] {
            let drawn = RoundMask::new(Mask { pattern, stride: 7, multiple: 4 }, RoundKey::default(), 1000);
            let bytes = drawn.write(CodecId::F32);
            let (again, inner) = RoundMask::read(&bytes, 1000).unwrap();
            assert_eq!(inner, CodecId::F32);
            assert!(again.indices(1000).eq(drawn.indices(1000)));
            assert_eq!(drawn.indices(1000).count(), drawn.kept as usize);
        }
    }
}
