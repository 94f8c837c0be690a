//! Few elements, at full or reduced precision: which are kept, where they are, and what they are, through a codec of their
//! own.

mod amount;
mod bits;
mod index;
mod mask;
mod select;

pub use amount::Amount;
pub use index::IndexCoding;
pub use mask::{Mask, Masked, Pattern};
pub use select::Select;

use crate::chunked::{INFINITE, sum};
use crate::compressor::{Memoryless, check_lengths};
use crate::simd::{Kernel, Level};
use crate::wire::CodecId;
use crate::{CompressError, Compressor, Payload, PayloadRef, RoundKey, State};
use index::{Chunking, Coding};
use select::Finder;

/// Bytes before the indices.
const PREFIX: usize = 20;

/// The selected elements of a vector: their indices in the smallest coding, and their values through the codec `C`.
///
/// What is not selected decodes as zero. The bytes are `20 +` those of the indices `+` those of the values without a header.
/// A vector has fewer than 2^32 elements. NaN and infinity are refused, selected or not.
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
    finder: Finder,
    kept: Vec<u32>,
    coded: Vec<u8>,
    values: Values,
}

/// Values on their way through the inner codec.
#[derive(Debug, Clone, Default)]
struct Values {
    plain: Vec<f32>,
    payload: Payload,
    decoded: Vec<f32>,
}

impl Values {
    /// Encodes `values` into `payload`; an element that is refused is named by its index in the whole vector.
    fn encode<C: Compressor>(
        &mut self,
        inner: &mut C,
        key: RoundKey,
        index: impl Fn(usize) -> usize,
    ) -> Result<(), CompressError> {
        inner.compress(&self.plain, key, &mut self.payload).map_err(|error| match error {
            CompressError::NonFinite { index: i, value } => {
                CompressError::NonFinite { index: index(i), value }
            }
            error => error,
        })
    }

    /// Subtracts what the payload says from `next`, at `index` of each value.
    fn subtract<C: Compressor>(
        &mut self,
        inner: &C,
        next: &mut [f32],
        index: impl Fn(usize) -> usize,
    ) -> Result<(), CompressError> {
        self.decoded.resize(self.plain.len(), 0.0);
        inner.decompress(self.payload.view(), &mut self.decoded)?;
        for (i, decoded) in self.decoded.iter().enumerate() {
            next[index(i)] -= decoded;
        }
        Ok(())
    }

    fn body(&self) -> PayloadRef<'_> {
        self.payload.view()
    }
}

impl<C: Memoryless> Sparse<C> {
    /// Keeps what `select` says, and sends it through `inner`.
    ///
    /// Errors: [`CompressError::BlockSize`] for chunks of nothing; [`CompressError::NonFinite`] for a threshold that is
    /// not finite.
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
            finder: Finder::default(),
            kept: Vec::new(),
            coded: Vec::new(),
            values: Values::default(),
        })
    }

    /// With indices in that coding, rather than in the smallest.
    #[must_use]
    pub fn indices(self, indices: IndexCoding) -> Self {
        Self { indices, ..self }
    }

    fn encode(&mut self, x: &[f32], key: RoundKey, out: &mut Payload) -> Result<(), CompressError> {
        out.clear();
        if u32::try_from(x.len()).is_err() {
            return Err(CompressError::TooLong { len: x.len(), max: u32::MAX as usize });
        }
        let Self { kept, values, .. } = self;
        self.finder.find(self.level, self.select, x, kept)?;
        values.plain.clear();
        values.plain.extend(kept.iter().map(|i| x[*i as usize]));
        values.encode(&mut self.inner, key, |i| kept[i] as usize)?;

        let chunking = self.select.chunking(x.len(), kept.len());
        let coding = Coding::choose(self.indices, kept, x.len(), chunking);
        self.coded.clear();
        coding.write(kept, x.len(), chunking, &mut self.coded);
        let (inner, indices) = (values.body(), &self.coded);
        let mut prefix = [0; PREFIX];
        prefix[..4].copy_from_slice(&(kept.len() as u32).to_le_bytes());
        prefix[4..8].copy_from_slice(&(indices.len() as u32).to_le_bytes());
        prefix[8..12].copy_from_slice(&(chunking.chunk as u32).to_le_bytes());
        prefix[12..16].copy_from_slice(&(chunking.kept as u32).to_le_bytes());
        prefix[16..18].copy_from_slice(&coding.tag());
        prefix[18] = inner.codec().0;
        out.fill_with(CodecId::SPARSE, x.len(), &[&prefix, indices, inner.body()]);
        Ok(())
    }
}

impl<C: Memoryless> State for Sparse<C> {}
impl<C: Memoryless> Memoryless for Sparse<C> {}

impl<C: Memoryless> Compressor for Sparse<C> {
    fn compress(&mut self, x: &[f32], key: RoundKey, out: &mut Payload) -> Result<(), CompressError> {
        self.encode(x, key, out)
    }

    fn compress_residual(
        &mut self,
        x: &[f32],
        e: &[f32],
        next: &mut [f32],
        key: RoundKey,
        out: &mut Payload,
    ) -> Result<(), CompressError> {
        check_lengths(x, e, next).inspect_err(|_| out.clear())?;
        self.level.run(Add { x, e, next });
        self.encode(next, key, out)?;
        let Self { inner, values, kept, .. } = self;
        values.subtract(inner, next, |i| kept[i] as usize).inspect_err(|_| out.clear())
    }

    fn decompress(&self, p: PayloadRef<'_>, out: &mut [f32]) -> Result<(), CompressError> {
        let body = p.open(CodecId::SPARSE, out.len())?;
        let wrong = |wanted: usize| CompressError::BodyLength {
            codec: CodecId::SPARSE,
            count: out.len(),
            wanted: wanted as u64,
            found: body.len() as u64,
        };
        let (prefix, rest) = body.split_first_chunk::<PREFIX>().ok_or_else(|| wrong(PREFIX))?;
        let word = |at: usize| {
            u32::from_le_bytes([prefix[at], prefix[at + 1], prefix[at + 2], prefix[at + 3]]) as usize
        };
        let (kept, indices, chunking) = (word(0), word(4), Chunking { chunk: word(8), kept: word(12) });
        let coding = Coding::of_tag([prefix[16], prefix[17]])?;
        if kept > out.len() || chunking.chunk == 0 || prefix[19] != 0 {
            return Err(CompressError::Indices { why: "are more than the elements" });
        }
        let (indices, values) =
            rest.split_at_checked(indices).ok_or_else(|| wrong(PREFIX.saturating_add(indices)))?;
        let mut spread = Spread::new(&self.inner, CodecId(prefix[18]), values, kept, out)?;
        coding.read(indices, kept, spread.len(), chunking, |index| spread.put(index))?;
        spread.finish()
    }

    fn max_payload(&self, len: usize) -> usize {
        let kept = self.select.most(len);
        let indices = Coding::most(self.indices, kept, len, self.select.chunking(len, kept));
        self.inner.max_payload(kept).saturating_add(PREFIX).saturating_add(indices)
    }
}

/// `next = x + e`.
struct Add<'a> {
    x: &'a [f32],
    e: &'a [f32],
    next: &'a mut [f32],
}

impl Kernel for Add<'_> {
    type Output = bool;

    #[expect(clippy::inline_always, reason = "a kernel is compiled for its caller's instruction set")]
    #[inline(always)]
    fn run(self) -> bool {
        sum(self.x, self.e, self.next) >= INFINITE
    }
}

/// Moves values from the end of a vector to ascending indices, and zeros what lies between: no other memory is needed,
/// because the value at `n - k + j` is read before anything at or behind it is written.
struct Spread<'a> {
    out: &'a mut [f32],
    /// Where the next value lies.
    from: usize,
    /// The first element that is not written yet.
    next: usize,
}

impl<'a> Spread<'a> {
    /// Decodes the values to the end of `out`.
    fn new<C: Compressor>(
        inner: &C,
        codec: CodecId,
        values: &[u8],
        kept: usize,
        out: &'a mut [f32],
    ) -> Result<Self, CompressError> {
        let from = out.len() - kept;
        inner.decompress(PayloadRef::nested(codec, kept, values), &mut out[from..])?;
        // Plain f32 passes everything; what encoders of selections write is finite.
        if let Some(index) = out[from..].iter().position(|value| !value.is_finite()) {
            return Err(CompressError::Code { index, code: out[from + index].to_bits() });
        }
        Ok(Self { out, from, next: 0 })
    }

    fn len(&self) -> usize {
        self.out.len()
    }

    #[inline]
    fn put(&mut self, index: u64) -> Result<(), CompressError> {
        let at = index as usize;
        // An index beyond its value's place leaves no room for the values after it.
        if at < self.next || index > self.from as u64 || self.from == self.out.len() {
            return Err(CompressError::Indices { why: "are not ascending, or lie outside of the vector" });
        }
        let value = self.out[self.from];
        self.out[self.next..at].fill(0.0);
        self.out[at] = value;
        self.next = at + 1;
        self.from += 1;
        Ok(())
    }

    /// Zeros what lies behind the last value.
    fn finish(self) -> Result<(), CompressError> {
        if self.from < self.out.len() {
            return Err(CompressError::Indices { why: "are fewer than the values" });
        }
        self.out[self.next..].fill(0.0);
        Ok(())
    }
}
