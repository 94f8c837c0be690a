//! Sparse codecs: they send few elements of a vector, at full or reduced precision. A payload holds the
//! selected indices, and the values encoded by another codec.

mod amount;
mod bits;
mod index;
mod mask;
mod sparse_indices;
mod select;

pub use amount::Amount;
pub use index::IndexCoding;
pub use mask::{Mask, Masked, Pattern, RoundMask};
pub use select::Select;
pub use sparse_indices::SparseIndices;

use crate::compressor::{Memoryless, add, check_errors};
use crate::simd::{Level, NonTemporalStores};
use crate::wire::CodecId;
use crate::{CompressError, Compressor, Payload, PayloadRef, RoundKey, State};
use index::Coding;
use select::{Chosen, Finder};
use sparse_indices::{MISSING_INDICES, PREFIX, UNORDERED};

/// Sends the selected elements of a vector: their indices in the smallest coding, and their values encoded by
/// the codec `C`.
///
/// Elements that are not selected decode as zero. The payload has 20 bytes, the indices, and the values' body.
/// A vector must have fewer than 2^32 elements. NaN and infinity are rejected, whether selected or not.
///
/// ```
/// use farflung_compress::{Amount, Compressor, F32, Int4, Payload, RoundKey, Select, Sparse};
///
/// // The largest percent as f32; the largest 64 of each 4096 in four bits.
/// let mut top = Sparse::new(Select::Largest(Amount::millionths(10_000)), F32::new())?;
/// let chunks = Sparse::new(Select::PerChunk { chunk: 4096, kept: 64 }, Int4::new(64)?)?;
/// assert_eq!(chunks.max_payload(4096), 28 + 20 + 64 * 12 / 8 + 4 + 2 + 64 / 2);
///
/// let (mut x, mut payload, mut out) = (vec![0.0; 1000], Payload::new(), vec![1.0; 1000]);
/// (x[3], x[500]) = (-2.0, 0.5);
/// top.compress(&x, RoundKey::default(), &mut payload)?;
/// top.decompress(payload.view(), &mut out)?;
/// assert_eq!(out, x);
/// # Ok::<(), farflung_compress::CompressError>(())
/// ```
#[derive(Debug, Clone)]
pub struct Sparse<C> {
    select: Select,
    indices: IndexCoding,
    inner: C,
    level: Level,
    threads: usize,
    finder: Finder,
    kept: Selection,
    /// Encoded prefix and indices, which come before the values.
    places: Vec<u8>,
}

/// The selected elements, and buffers of the inner codec.
#[derive(Debug, Clone, Default)]
struct Selection {
    /// Indices of the selected elements, ascending.
    indices: Vec<u32>,
    values: Vec<f32>,
    payload: Payload,
    decoded: Vec<f32>,
}

impl Selection {
    /// Encodes the values, which were selected from `x`. An error names the index of a rejected value in `x`.
    fn encode<C: Compressor>(
        &mut self,
        inner: &mut C,
        x: &[f32],
        key: RoundKey,
    ) -> Result<PayloadRef<'_>, CompressError> {
        let result = inner.compress(&self.values, key, &mut self.payload);
        result.map_err(|error| error.moved(|index| self.indices[index] as usize, x))?;
        Ok(self.payload.view())
    }

    /// Subtracts the decoded values from `next`. If it fails, `out` is empty.
    fn subtract<C: Compressor>(
        &mut self,
        inner: &C,
        next: &mut [f32],
        out: &mut Payload,
    ) -> Result<(), CompressError> {
        self.decoded.resize(self.values.len(), 0.0);
        inner.decompress(self.payload.view(), &mut self.decoded).inspect_err(|_| out.clear())?;
        for (index, decoded) in self.indices.iter().zip(&self.decoded) {
            next[*index as usize] -= decoded;
        }
        Ok(())
    }
}

/// Checks that the vector's indices fit in 32 bits.
fn check_indexable(x: &[f32]) -> Result<(), CompressError> {
    if u32::try_from(x.len()).is_ok() {
        return Ok(());
    }
    Err(CompressError::TooLong { len: x.len(), max: u32::MAX as usize })
}

impl<C: Memoryless> Sparse<C> {
    /// Creates the codec that selects elements by `select` and encodes their values by `inner`.
    ///
    /// Errors: [`CompressError::BlockSize`] for a chunk size of 0; [`CompressError::NonFinite`] for a threshold
    /// that is not finite.
    pub fn new(select: Select, inner: C) -> Result<Self, CompressError> {
        match select {
            Select::PerChunk { chunk: 0, .. } => {
                return Err(CompressError::BlockSize { found: 0, max: u32::MAX });
            }
            Select::Threshold(value) if !value.is_finite() => {
                return Err(CompressError::NonFinite { index: 0, value });
            }
            _ => {}
        }
        Ok(Self {
            select,
            indices: IndexCoding::Smallest,
            inner,
            level: Level::detect(),
            threads: 1,
            finder: Finder::default(),
            kept: Selection::default(),
            places: Vec::new(),
        })
    }

    /// Sets the coding of the indices. The default is the smallest one.
    #[must_use]
    pub fn indices(self, indices: IndexCoding) -> Self {
        Self { indices, ..self }
    }

    fn encode(&mut self, x: &[f32], key: RoundKey, out: &mut Payload) -> Result<(), CompressError> {
        out.clear();
        check_indexable(x)?;
        let Selection { indices, values, .. } = &mut self.kept;
        self.finder.find(self.level, self.threads, self.select, x, Chosen { indices, values })?;
        let codec = self.kept.encode(&mut self.inner, x, key)?.codec();
        let Selection { indices, payload, .. } = &self.kept;
        self.places.clear();
        self.select.write(self.indices, indices, x.len(), codec, &mut self.places);
        out.fill_with(CodecId::SPARSE, x.len(), &[&self.places, payload.view().body()]);
        Ok(())
    }
}

impl<C: Memoryless> State for Sparse<C> {}

impl<C: Memoryless> Memoryless for Sparse<C> {
    fn compress_residual(
        &mut self,
        x: &[f32],
        e: &[f32],
        next: &mut [f32],
        key: RoundKey,
        out: &mut Payload,
    ) -> Result<(), CompressError> {
        let largest = add(x, e, next, out)?;
        self.encode(next, key, out)?;
        self.kept.subtract(&self.inner, next, out)?;
        check_errors(largest, x, e, next, out)
    }
}

impl<C: Memoryless> Compressor for Sparse<C> {
    fn compress(&mut self, x: &[f32], key: RoundKey, out: &mut Payload) -> Result<(), CompressError> {
        self.encode(x, key, out)
    }

    fn decompress(&self, p: PayloadRef<'_>, out: &mut [f32]) -> Result<(), CompressError> {
        let body = p.open(CodecId::SPARSE, out.len())?;
        let places = SparseIndices::read(body, out.len())?;
        let (inner, values, kept) = (places.inner(), places.values(), places.kept());
        let mut spread = Scatter::new(self.level, &self.inner, inner, values, kept, out)?;
        places.each(|index| spread.put(index))?;
        spread.finish()
    }

    fn max_payload(&self, len: usize) -> usize {
        let kept = self.select.most(len);
        let indices = Coding::most(self.indices, kept, len, self.select.chunking(len, kept));
        self.inner.max_payload(kept).saturating_add(PREFIX).saturating_add(indices)
    }

    fn set_threads(&mut self, threads: usize) {
        self.threads = threads.max(1);
        self.inner.set_threads(threads);
    }
}

/// Number of elements that are collected before they are written.
const WINDOW: usize = 1024;

/// Moves values from the end of a vector to ascending indices and writes zeros between them. It needs no second
/// vector, because the value at `n - k + j` is read before anything at or after it is written.
struct Scatter<'a> {
    out: &'a mut [f32],
    /// Index of the next value.
    from: usize,
    /// Smallest index that the next value may go to.
    next: usize,
    /// Index of the window's first element in `out`.
    start: usize,
    window: [f32; WINDOW],
    stream: Option<NonTemporalStores>,
}

impl<'a> Scatter<'a> {
    /// Decodes the values to the end of `out`.
    fn new<C: Compressor>(
        level: Level,
        inner: &C,
        codec: CodecId,
        values: &[u8],
        kept: usize,
        out: &'a mut [f32],
    ) -> Result<Self, CompressError> {
        let from = out.len() - kept;
        inner.decompress(PayloadRef::nested(codec, kept, values), &mut out[from..])?;
        // The codec `none` decodes any number, but the encoders of selections write only finite ones.
        if let Some(index) = out[from..].iter().position(|value| !value.is_finite()) {
            return Err(CompressError::Code { index, code: out[from + index].to_bits() });
        }
        let stream = NonTemporalStores::for_len(level, out.len());
        Ok(Self { out, from, next: 0, start: 0, window: [0.0; WINDOW], stream })
    }

    #[inline]
    fn put(&mut self, index: u64) -> Result<(), CompressError> {
        // If an index is larger than the position of its value, there is no room left for the values after it.
        if index < self.next as u64 || index > self.from as u64 || self.from == self.out.len() {
            return Err(UNORDERED);
        }
        let (at, value) = (index as usize, self.out[self.from]);
        while at - self.start >= WINDOW {
            self.write();
        }
        self.window[at - self.start] = value;
        self.next = at + 1;
        self.from += 1;
        Ok(())
    }

    /// Writes the window, and begins the next one.
    fn write(&mut self) {
        let len = WINDOW.min(self.out.len() - self.start);
        let (window, out) = (&mut self.window[..len], &mut self.out[self.start..][..len]);
        match &self.stream {
            Some(stream) => stream.copy(window, out),
            None => out.copy_from_slice(window),
        }
        window.fill(0.0);
        self.start += len;
    }

    /// Writes the last window and zeros to the end of the vector.
    fn finish(mut self) -> Result<(), CompressError> {
        if self.from < self.out.len() {
            return Err(MISSING_INDICES);
        }
        while self.start < self.out.len() {
            self.write();
        }
        Ok(())
    }
}
