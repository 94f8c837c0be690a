//! Codecs of vectors in a device's memory, so that only what they make crosses the bus. Their bytes are those
//! of farflung-compress, whose `WIRE.md` fixes layout and arithmetic to the bit. A device whose memory is the
//! host's has none: the host's codecs work there in place. It refuses to know frames, checksums, and what to do
//! with a refusal.

pub use farflung_base::Pattern;

use crate::backend::Sum;
use crate::check::Check;
use crate::{DType, Device, Result, Shape, View, ViewMut};

/// What stands for an element of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Code {
    /// Its sign, under the block's mean magnitude.
    SignL1,
    /// Its sign, under the root of the block's mean square.
    SignL2,
    /// An integer of four bits, rounded to nearest, under a scale that covers the block's largest magnitude.
    Int4,
    /// One of eight bits, likewise.
    Int8,
}

impl Code {
    /// Bits of a code.
    #[must_use]
    pub const fn bits(self) -> u32 {
        match self {
            Self::SignL1 | Self::SignL2 => 1,
            Self::Int4 => 4,
            Self::Int8 => 8,
        }
    }

    /// Bytes before the codes of a block.
    #[must_use]
    pub const fn header(self) -> usize {
        match self {
            Self::SignL1 | Self::SignL2 => 4,
            Self::Int4 | Self::Int8 => 2,
        }
    }

    /// The parameter that a body names beside its block.
    const fn parameter(self) -> u8 {
        match self {
            Self::SignL1 | Self::SignL2 => 0,
            Self::Int4 | Self::Int8 => self.bits() as u8,
        }
    }
}

/// Codes of a fixed width under a header for each block: codecs 5 and 7 of the wire format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct BlockCodec {
    code: Code,
    block: u32,
}

impl BlockCodec {
    /// The largest block.
    pub const MAX_BLOCK: u32 = 1 << 20;

    /// Codes in blocks of so many elements; `None` unless `block` is in `1..=MAX_BLOCK`.
    #[must_use]
    pub const fn new(code: Code, block: u32) -> Option<Self> {
        if block >= 1 && block <= Self::MAX_BLOCK { Some(Self { code, block }) } else { None }
    }

    /// What stands for an element.
    #[must_use]
    pub const fn code(self) -> Code {
        self.code
    }

    /// Elements of a block.
    #[must_use]
    pub const fn block(self) -> u32 {
        self.block
    }

    /// The four bytes that every body begins with.
    #[must_use]
    pub const fn parameters(self) -> [u8; 4] {
        (self.block | (self.code.parameter() as u32) << 24).to_le_bytes()
    }

    /// Bytes of a block of so many elements.
    pub(crate) const fn block_bytes(self, count: usize) -> usize {
        self.code.header() + count.div_ceil(8 / self.code.bits() as usize)
    }

    /// Bytes of the body of so many elements.
    #[must_use]
    pub const fn bytes(self, len: usize) -> usize {
        let block = self.block as usize;
        let tail = match len % block {
            0 => 0,
            rest => self.block_bytes(rest),
        };
        4_usize.saturating_add((len / block).saturating_mul(self.block_bytes(block))).saturating_add(tail)
    }

    /// Words of that body, the last one filled up with zeros.
    #[must_use]
    pub const fn words(self, len: usize) -> usize {
        self.bytes(len).div_ceil(4)
    }
}

/// One element of each stratum of `stride`, as codec 17 of the wire format says it: a pure function of these
/// fields.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DrawnMask {
    /// Which of a stratum.
    pub pattern: Pattern,
    /// Elements of a stratum, at least 1.
    pub stride: u32,
    /// Below the stride; 0 if random.
    pub phase: u32,
    /// How many elements of a vector are in the mask.
    pub kept: u32,
    /// How many the pattern takes of a vector, which is more where their number must be a multiple of
    /// something.
    pub taken: u32,
    /// Of what the pattern takes, where that begins which is left out.
    pub gap: u32,
    /// Key and number of the stream of Philox4x32-10 from which elements are drawn.
    pub stream: [u64; 2],
}

/// The codecs of a device: [`Device::codecs`].
#[derive(Debug, Clone, Copy)]
pub struct Codecs<'a> {
    device: &'a Device,
    kernels: &'a dyn crate::backend::Codecs,
}

impl Device {
    /// Codecs of vectors here; none where the memory is the host's.
    #[must_use]
    pub fn codecs(&self) -> Option<Codecs<'_>> {
        self.backend().codecs().map(|kernels| Codecs { device: self, kernels })
    }
}

impl Codecs<'_> {
    const fn check(&self, op: &'static str) -> Check<'_> {
        Check { device: self.device, op }
    }

    /// Starts to encode `x` (f32), or `x + before`; `lost`, if wanted, gets what the bytes lose.
    ///
    /// `out` is u32, `[1 + codec.words(x.len())]`: a word that is 0, or 1 if some value is not finite, which
    /// makes the rest, and what is lost, unspecified; then the body, little-endian.
    pub fn encode(
        &self,
        codec: BlockCodec,
        x: View<'_>,
        before: Option<View<'_>>,
        lost: Option<ViewMut<'_>>,
        mut out: ViewMut<'_>,
    ) -> Result<()> {
        let check = self.check("encode");
        let shape = check.typed(&x, DType::F32)?;
        before.as_ref().map_or(Ok(()), |before| check.flat(before, DType::F32, shape))?;
        lost.as_ref().map_or(Ok(()), |lost| check.flat(lost, DType::F32, shape))?;
        check.flat(&out, DType::U32, 1 + codec.words(shape.len()))?;
        if shape.is_empty() {
            return out.write(&[0, u32::from_le_bytes(codec.parameters())]);
        }
        self.kernels.encode(codec, x, before, lost, out)
    }

    /// Starts to decode `body`, which is untrusted, into all of `y` (f32).
    ///
    /// `body` is u32, `[codec.words(y.len())]`, and begins with the codec's own parameters, which the caller
    /// has checked. `verdict` is u32, `[1]`: 0, or 1 if there is something that no encoder writes, which makes
    /// `y` unspecified.
    pub fn decode(
        &self,
        codec: BlockCodec,
        body: View<'_>,
        y: ViewMut<'_>,
        mut verdict: ViewMut<'_>,
    ) -> Result<()> {
        let check = self.check("decode");
        let shape = check.typed(&y, DType::F32)?;
        check.flat(&body, DType::U32, codec.words(shape.len()))?;
        check.flat(&verdict, DType::U32, 1)?;
        if shape.is_empty() {
            return verdict.write(&[0_u32]);
        }
        self.kernels.decode(codec, body, y, verdict)
    }

    /// Starts `y = x + before` (f32), with subnormals on every device. `verdict` is u32, `[1]`: 0, or 1 if a
    /// sum is not finite.
    pub fn sum(&self, x: View<'_>, before: View<'_>, y: ViewMut<'_>, verdict: ViewMut<'_>) -> Result<()> {
        self.look(&self.check("sum"), x, Some(Sum::Plus(before, y)), verdict)
    }

    /// Starts `y = x - sent`, as [`Self::sum`].
    pub fn difference(
        &self,
        x: View<'_>,
        sent: View<'_>,
        y: ViewMut<'_>,
        verdict: ViewMut<'_>,
    ) -> Result<()> {
        self.look(&self.check("difference"), x, Some(Sum::Minus(sent, y)), verdict)
    }

    /// Starts to look whether all of `x` (f32) is finite. `verdict` is u32, `[1]`: 0, or 1 if not.
    pub fn finite(&self, x: View<'_>, verdict: ViewMut<'_>) -> Result<()> {
        self.look(&self.check("finite"), x, None, verdict)
    }

    fn look(
        &self,
        check: &Check<'_>,
        x: View<'_>,
        sum: Option<Sum<'_>>,
        mut verdict: ViewMut<'_>,
    ) -> Result<()> {
        let shape = check.typed(&x, DType::F32)?;
        if let Some(Sum::Plus(with, y) | Sum::Minus(with, y)) = &sum {
            check.flat(with, DType::F32, shape)?;
            check.flat(y, DType::F32, shape)?;
        }
        check.flat(&verdict, DType::U32, 1)?;
        if x.is_empty() { verdict.write(&[0_u32]) } else { self.kernels.look(x, sum, verdict) }
    }

    /// Starts to write where the largest magnitudes of `x` (f32) are: `kept` of each `chunk` elements, or all
    /// where there are not so many, as in the last chunk, which may be short. Indices are u32, as many as that
    /// makes, ascending. Of equal magnitudes the lower indices are kept; NaN is larger than all numbers. A
    /// chunk of 0 counts as 1.
    pub fn largest(&self, x: View<'_>, chunk: usize, kept: usize, indices: ViewMut<'_>) -> Result<()> {
        let check = self.check("largest");
        let (len, chunk) = (check.typed(&x, DType::F32)?.len(), chunk.max(1));
        check.flat(&indices, DType::U32, len / chunk * kept.min(chunk) + kept.min(len % chunk))?;
        if indices.is_empty() { Ok(()) } else { self.kernels.largest(x, chunk, kept, indices) }
    }

    /// Starts the transform of each full run of `side * side` elements of `x` (f32) as a square `X`, row by
    /// row: `y` is `(A X) A^T`, or `(A^T X) A` if `inverse`, and what fills no square stays as it is. The
    /// matrix `A` is f32, `[side, side]`, with magnitudes below 2. Sums go over the index in order from 0, with
    /// subnormals, nothing fused.
    pub fn squares(&self, x: View<'_>, matrix: View<'_>, inverse: bool, y: ViewMut<'_>) -> Result<()> {
        let check = self.check("squares");
        let (shape, square) = (check.typed(&x, DType::F32)?, check.typed(&matrix, DType::F32)?);
        check.flat(&y, DType::F32, shape)?;
        let side = square.cols();
        if square.dims() != [side, side] || side == 0 {
            return check.mismatch(square, Shape::from([side, side]));
        }
        if x.is_empty() { Ok(()) } else { self.kernels.squares(x, matrix, inverse, y) }
    }

    /// Starts to write the indices of a mask, ascending. `indices` is u32, `[mask.kept]`.
    pub fn mask(&self, mask: DrawnMask, indices: ViewMut<'_>) -> Result<()> {
        self.check("mask").flat(&indices, DType::U32, mask.kept as usize)?;
        if indices.is_empty() { Ok(()) } else { self.kernels.mask(mask, indices) }
    }

    /// Starts `y = x[indices]` (f32). Indices are u32, as many as `y` has elements; one behind the end counts
    /// as the last.
    pub fn gather(&self, x: View<'_>, indices: View<'_>, y: ViewMut<'_>) -> Result<()> {
        let check = self.check("gather");
        let (from, to) = (check.typed(&x, DType::F32)?, check.typed(&y, DType::F32)?);
        check.flat(&indices, DType::U32, to)?;
        if to.is_empty() {
            return Ok(());
        }
        if from.is_empty() {
            return check.mismatch(from, to);
        }
        self.kernels.gather(x, indices, y)
    }

    /// Starts `y[indices] = x` (f32), for indices that are all different: u32, as many as `x` has elements; one
    /// behind the end is passed over.
    pub fn put(&self, x: View<'_>, indices: View<'_>, y: ViewMut<'_>) -> Result<()> {
        let check = self.check("put");
        let from = check.typed(&x, DType::F32)?;
        check.flat(&indices, DType::U32, from)?;
        check.typed(&y, DType::F32)?;
        if from.is_empty() || y.is_empty() { Ok(()) } else { self.kernels.put(x, indices, y) }
    }
}
