//! Codecs of vectors in a device's memory, so that only what they make crosses the bus. Their bytes are those of
//! farflung-compress, whose `WIRE.md` fixes layout and arithmetic to the bit. A device whose memory is the host's has none: the
//! host's codecs work there in place. It refuses to know frames, checksums, and what to do with a refusal.

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
    /// Starts to encode `x` (f32), or with a residual (before, after) `x + before`, of which `after` gets what is lost.
    ///
    /// `out` is u32, `[1 + codec.words(x.len())]`: a word that is 0, or 1 if some value is not finite, which makes the
    /// rest, and what is lost, unspecified; then the body, little-endian.
    pub fn encode(
        &self,
        codec: BlockCodec,
        x: View<'_>,
        residual: Option<(View<'_>, ViewMut<'_>)>,
        mut out: ViewMut<'_>,
    ) -> Result<()> {
        let check = Check { device: self.device, op: "encode" };
        let shape = check.typed(&x, DType::F32)?;
        if let Some((before, after)) = &residual {
            check.flat(before, DType::F32, shape)?;
            check.flat(after, DType::F32, shape)?;
        }
        check.flat(&out, DType::U32, 1 + codec.words(shape.len()))?;
        if shape.is_empty() {
            return out.write(&[0, u32::from_le_bytes(codec.parameters())]);
        }
        self.kernels.encode(codec, x, residual, out)
    }

    /// Starts to decode `body`, which is untrusted, into all of `y` (f32).
    ///
    /// `body` is u32, `[codec.words(y.len())]`, and begins with the codec's own parameters, which the caller has checked.
    /// `verdict` is u32, `[1]`: 0, or 1 if there is something that no encoder writes, which makes `y` unspecified.
    pub fn decode(
        &self,
        codec: BlockCodec,
        body: View<'_>,
        y: ViewMut<'_>,
        mut verdict: ViewMut<'_>,
    ) -> Result<()> {
        let check = Check { device: self.device, op: "decode" };
        let shape: Shape = check.typed(&y, DType::F32)?;
        check.flat(&body, DType::U32, codec.words(shape.len()))?;
        check.flat(&verdict, DType::U32, 1)?;
        if shape.is_empty() {
            return verdict.write(&[0_u32]);
        }
        self.kernels.decode(codec, body, y, verdict)
    }
}
