//! Codecs that run on the device, so that only encoded bytes cross the bus. Layout and arithmetic are those of
//! farflung-compress, whose `WIRE.md` specifies them to the bit. A device whose memory is host memory has no
//! codecs of its own: the host's codecs work in place there. Frames, checksums and the handling of invalid data
//! are left to the caller.

pub use farflung_base::Pattern;

use crate::backend::Sum;
use crate::check::Check;
use crate::{DType, Device, Result, Shape, View, ViewMut};

/// Encoding of one element of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Code {
    /// The element's sign; the scale is the mean magnitude of the block.
    SignL1,
    /// The element's sign; the scale is the root mean square of the block.
    SignL2,
    /// A 4-bit integer, rounded to nearest; the scale covers the largest magnitude of the block.
    Int4,
    /// An 8-bit integer, rounded and scaled as [`Code::Int4`].
    Int8,
}

impl Code {
    /// Returns the number of bits of a code.
    #[must_use]
    pub const fn bits(self) -> u32 {
        match self {
            Self::SignL1 | Self::SignL2 => 1,
            Self::Int4 => 4,
            Self::Int8 => 8,
        }
    }

    /// Returns the number of bytes before the codes of a block.
    #[must_use]
    pub const fn header(self) -> usize {
        match self {
            Self::SignL1 | Self::SignL2 => 4,
            Self::Int4 | Self::Int8 => 2,
        }
    }

    /// Returns the parameter byte that a body contains next to the block size.
    const fn parameter(self) -> u8 {
        match self {
            Self::SignL1 | Self::SignL2 => 0,
            Self::Int4 | Self::Int8 => self.bits() as u8,
        }
    }
}

/// Fixed-width codes with a header per block: codecs 5 and 7 of the wire format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct BlockCodec {
    code: Code,
    block: u32,
}

impl BlockCodec {
    /// Maximum number of elements per block.
    pub const MAX_BLOCK: u32 = 1 << 20;

    /// Creates a codec with blocks of `block` elements; `None` unless `block` is in `1..=MAX_BLOCK`.
    #[must_use]
    pub const fn new(code: Code, block: u32) -> Option<Self> {
        if block >= 1 && block <= Self::MAX_BLOCK { Some(Self { code, block }) } else { None }
    }

    /// Returns the encoding of an element.
    #[must_use]
    pub const fn code(self) -> Code {
        self.code
    }

    /// Returns the number of elements per block.
    #[must_use]
    pub const fn block(self) -> u32 {
        self.block
    }

    /// Returns the first four bytes of every body.
    #[must_use]
    pub const fn parameters(self) -> [u8; 4] {
        (self.block | (self.code.parameter() as u32) << 24).to_le_bytes()
    }

    /// Returns the number of bytes of a block with `count` elements.
    pub(crate) const fn block_bytes(self, count: usize) -> usize {
        self.code.header() + count.div_ceil(8 / self.code.bits() as usize)
    }

    /// Returns the number of bytes of a body with `len` elements.
    #[must_use]
    pub const fn bytes(self, len: usize) -> usize {
        let block = self.block as usize;
        let tail = match len % block {
            0 => 0,
            rest => self.block_bytes(rest),
        };
        4_usize.saturating_add((len / block).saturating_mul(self.block_bytes(block))).saturating_add(tail)
    }

    /// Returns the number of u32 words of a body with `len` elements; the last one is padded with zeros.
    #[must_use]
    pub const fn words(self, len: usize) -> usize {
        self.bytes(len).div_ceil(4)
    }
}

/// A mask of one element per stratum of `stride` elements, as defined by codec 17 of the wire format. The
/// indices are a pure function of these fields.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockMask {
    /// How the index within each stratum is chosen.
    pub pattern: Pattern,
    /// Number of elements per stratum, at least 1.
    pub stride: u32,
    /// Phase of the pattern, below the stride; 0 for `Pattern::Random`.
    pub phase: u32,
    /// Number of elements in the mask.
    pub kept: u32,
    /// Number of elements that the pattern selects. It exceeds `kept` if the number of kept elements must be a
    /// multiple of some number.
    pub taken: u32,
    /// Index, among the selected elements, of the first of the `taken - kept` consecutive elements that are
    /// left out.
    pub gap: u32,
    /// Key and stream number of the Philox4x32-10 generator.
    pub stream: [u64; 2],
}

/// The codecs of a device, returned by [`Device::codecs`].
#[derive(Debug, Clone, Copy)]
pub struct Codecs<'a> {
    device: &'a Device,
    kernels: &'a dyn crate::backend::Codecs,
}

impl Device {
    /// Returns the device's codecs; `None` if its memory is host memory, and for [`Device::sizes`].
    #[must_use]
    pub fn codecs(&self) -> Option<Codecs<'_>> {
        self.backend().codecs().map(|kernels| Codecs { device: self, kernels })
    }
}

impl Codecs<'_> {
    const fn check(&self, op: &'static str) -> Check<'_> {
        Check { device: self.device, op }
    }

    /// Starts to encode `x` (f32), or `x + before`. `lost`, if given, receives the encoding error: the input
    /// minus its decoded value.
    ///
    /// `out` is u32, `[1 + codec.words(x.len())]`. Its first word is 0, or 1 if some value is not finite; then
    /// the rest, and `lost`, are unspecified. The body follows, little-endian.
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

    /// Starts to decode the untrusted `body` into all of `y` (f32).
    ///
    /// `body` is u32, `[codec.words(y.len())]`, and begins with the codec's own parameters, which the caller
    /// has checked. `verdict` is u32, `[1]`: 0, or 1 if the body contains something that no encoder writes;
    /// then `y` is unspecified.
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
        self.check_finite(&self.check("sum"), x, Some(Sum::Plus(before, y)), verdict)
    }

    /// Starts `y = x - sent`, with subnormals and `verdict` as in [`Self::sum`].
    pub fn difference(
        &self,
        x: View<'_>,
        sent: View<'_>,
        y: ViewMut<'_>,
        verdict: ViewMut<'_>,
    ) -> Result<()> {
        self.check_finite(&self.check("difference"), x, Some(Sum::Minus(sent, y)), verdict)
    }

    /// Starts to check whether all of `x` (f32) is finite. `verdict` is u32, `[1]`: 0 if so, else 1.
    pub fn finite(&self, x: View<'_>, verdict: ViewMut<'_>) -> Result<()> {
        self.check_finite(&self.check("finite"), x, None, verdict)
    }

    fn check_finite(
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
        if x.is_empty() { verdict.write(&[0_u32]) } else { self.kernels.check_finite(x, sum, verdict) }
    }

    /// Starts to find the largest magnitudes of `x` (f32): `kept` in each chunk of `chunk` elements, or all
    /// elements of a chunk that has no more. The last chunk may be short.
    ///
    /// `indices` is u32 and receives the indices of all chunks, ascending. Among equal magnitudes the lower
    /// index is kept. NaN is larger than all numbers. A `chunk` of 0 counts as 1.
    pub fn largest(&self, x: View<'_>, chunk: usize, kept: usize, indices: ViewMut<'_>) -> Result<()> {
        let check = self.check("largest");
        let (len, chunk) = (check.typed(&x, DType::F32)?.len(), chunk.max(1));
        check.flat(&indices, DType::U32, len / chunk * kept.min(chunk) + kept.min(len % chunk))?;
        if indices.is_empty() { Ok(()) } else { self.kernels.largest(x, chunk, kept, indices) }
    }

    /// Starts to transform each full run of `side * side` elements of `x` (f32), taken as a square matrix `X`
    /// row by row: `y` is `(A X) A^T`, or `(A^T X) A` if `inverse`. Elements after the last full square are
    /// copied.
    ///
    /// `matrix` is `A`, f32, `[side, side]`, with elements that are 0, or normal and below 2 in magnitude. Sums
    /// run over the index in order from 0, with subnormals and without fused operations.
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
    pub fn mask(&self, mask: BlockMask, indices: ViewMut<'_>) -> Result<()> {
        self.check("mask").flat(&indices, DType::U32, mask.kept as usize)?;
        if indices.is_empty() { Ok(()) } else { self.kernels.mask(mask, indices) }
    }

    /// Starts `y = x[indices]` (f32). `indices` is u32 with as many elements as `y`. An index beyond the end
    /// reads the last element.
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

    /// Starts `y[indices] = x` (f32). `indices` is u32 with as many elements as `x`, all different. An index
    /// beyond the end is ignored.
    pub fn put(&self, x: View<'_>, indices: View<'_>, y: ViewMut<'_>) -> Result<()> {
        let check = self.check("put");
        let from = check.typed(&x, DType::F32)?;
        check.flat(&indices, DType::U32, from)?;
        check.typed(&y, DType::F32)?;
        if from.is_empty() || y.is_empty() { Ok(()) } else { self.kernels.put(x, indices, y) }
    }
}
