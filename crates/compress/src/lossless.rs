//! A last stage that loses nothing: a general compressor of bytes over another codec's payload, where it helps.
//! Knows no codec.

use std::fmt;
use std::sync::{Mutex, PoisonError};

use crate::state::state_of;
use crate::wire::{CodecId, HEADER};
use crate::{CompressError, Compressor, Memoryless, Payload, PayloadRef, RoundKey};

/// Bytes before the packed body.
const PREFIX: usize = 4;
/// Bytes from the middle of a body that are tried first: codes look alike throughout, and most cannot be
/// packed.
const SAMPLE: usize = 1 << 16;

/// A general compressor of bytes. Each is a feature of this crate; both are on by default.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Packing {
    /// Zstandard (RFC 8878) at its level 1.
    Zstd,
    /// A block of LZ4: less is saved, several times faster.
    Lz4,
}

impl fmt::Display for Packing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Zstd => "zstd",
            Self::Lz4 => "lz4",
        })
    }
}

impl Packing {
    /// The number on the wire.
    fn tag(self) -> u8 {
        match self {
            Self::Zstd => 1,
            Self::Lz4 => 2,
        }
    }

    /// Whether this build has it.
    #[must_use]
    pub const fn is_built(self) -> bool {
        match self {
            Self::Zstd => cfg!(feature = "zstd"),
            Self::Lz4 => cfg!(feature = "lz4"),
        }
    }
}

/// A packer's own memory, which it makes on the first use and keeps.
#[cfg(feature = "zstd")]
struct Memory<T>(Option<T>);

#[cfg(feature = "zstd")]
impl<T> Default for Memory<T> {
    fn default() -> Self {
        Self(None)
    }
}

#[cfg(feature = "zstd")]
impl<T> fmt::Debug for Memory<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Memory").finish_non_exhaustive()
    }
}

#[derive(Debug, Default)]
pub(crate) struct Packer {
    packed: Vec<u8>,
    #[cfg(feature = "zstd")]
    zstd: Memory<zstd::zstd_safe::CCtx<'static>>,
}

impl Packer {
    /// `bytes`, packed. `None` if they do not become fewer.
    fn pack(&mut self, packing: Packing, bytes: &[u8]) -> Option<&[u8]> {
        let out = &mut self.packed;
        let len: usize = match packing {
            #[cfg(feature = "zstd")]
            Packing::Zstd => {
                // Too long a result does not fit, and is not wanted.
                out.resize(bytes.len(), 0);
                let context = self.zstd.0.get_or_insert_with(zstd::zstd_safe::CCtx::create);
                context.compress(out.as_mut_slice(), bytes, 1).ok()
            }
            #[cfg(feature = "lz4")]
            Packing::Lz4 => {
                out.resize(lz4_flex::block::get_maximum_output_size(bytes.len()), 0);
                lz4_flex::block::compress_into(bytes, out).ok()
            }
            #[cfg(not(all(feature = "zstd", feature = "lz4")))]
            _ => None,
        }?;
        (len < bytes.len()).then_some(&out[..len])
    }

    /// Packs a payload where that makes it smaller.
    pub(crate) fn pack_payload(&mut self, packing: Packing, out: &mut Payload) {
        let plain = out.view();
        let body = plain.body();
        if body.len() > 2 * SAMPLE {
            let middle = &body[body.len() / 2 - SAMPLE / 2..][..SAMPLE];
            if self.pack(packing, middle).is_none() {
                return;
            }
        }
        let Some(packed) = self.pack(packing, body) else { return };
        if PREFIX + packed.len() < body.len() {
            let (prefix, count) = ([packing.tag(), plain.codec().0, 0, 0], plain.count() as usize);
            out.fill_with(CodecId::PACKED, count, &[&prefix, packed]);
        }
    }
}

#[derive(Debug, Default)]
pub(crate) struct Unpacker {
    unpacked: Vec<u8>,
    #[cfg(feature = "zstd")]
    zstd: Memory<zstd::zstd_safe::DCtx<'static>>,
}

impl Unpacker {
    /// What was packed. `None` if nothing was, or more than `bound` bytes, which are never exceeded.
    fn unpack(&mut self, packing: Packing, bytes: &[u8], bound: usize) -> Option<&[u8]> {
        let out = &mut self.unpacked;
        out.resize(bound, 0);
        let len: usize = match packing {
            #[cfg(feature = "zstd")]
            Packing::Zstd => {
                let context = self.zstd.0.get_or_insert_with(zstd::zstd_safe::DCtx::create);
                context.decompress(out.as_mut_slice(), bytes).ok()
            }
            #[cfg(feature = "lz4")]
            Packing::Lz4 => lz4_flex::block::decompress_into(bytes, out).ok(),
            #[cfg(not(all(feature = "zstd", feature = "lz4")))]
            _ => {
                let _ = bytes;
                None
            }
        }?;
        Some(&out[..len])
    }

    /// The payload of so many elements, of at most `bound` bytes, that was packed.
    ///
    /// Errors: [`CompressError::Packed`]; those of a frame that does not fit.
    pub(crate) fn open(
        &mut self,
        packing: Packing,
        p: PayloadRef<'_>,
        count: usize,
        bound: usize,
    ) -> Result<PayloadRef<'_>, CompressError> {
        let wrong = |why| CompressError::Packed { packing, why };
        let body = p.open(CodecId::PACKED, count)?;
        let Some((&[tag, codec, 0, 0], packed)) = body.split_first_chunk::<PREFIX>() else {
            return Err(wrong("does not begin as it should"));
        };
        if tag != packing.tag() {
            return Err(wrong("was packed by another one"));
        }
        let plain = self.unpack(packing, packed, bound - HEADER);
        Ok(PayloadRef::nested(CodecId(codec), count, plain.ok_or_else(|| wrong("cannot be unpacked"))?))
    }
}

/// A codec whose payloads are packed where that makes them smaller: tried on a sample of each, then on all of
/// it. What would not become smaller is sent as the codec `C` made it, at no byte more.
///
/// It is the last stage: around feedback, not within it, and nothing goes around it (a type says so). It
/// decodes payloads of `C` that are not packed too. Codes at full entropy gain little: about 6 % of int8 and 15
/// % of int4 on gradients; sparse and repeating vectors gain much. One thread packs, at a fraction of a GB/s of
/// bytes for zstd.
///
/// Packed bytes may differ between versions of a packer's library; what they unpack to does not.
///
/// ```
/// use farflung_compress::{Compressor, Int8, Lossless, Packing, Payload, RoundKey};
///
/// let mut codec = Lossless::new(Packing::Zstd, Int8::new(256)?)?;
/// let (x, mut payload, mut out) = (vec![1.0; 4096], Payload::new(), vec![0.0; 4096]);
/// codec.compress(&x, RoundKey::default(), &mut payload)?;
/// assert!(payload.as_bytes().len() < 128);
/// codec.decompress(payload.view(), &mut out)?;
/// # Ok::<(), farflung_compress::CompressError>(())
/// ```
#[derive(Debug)]
pub struct Lossless<C> {
    pub(crate) inner: C,
    packing: Packing,
    packer: Packer,
    unpacker: Mutex<Unpacker>,
}

impl<C: Compressor> Lossless<C> {
    /// `packing` behind `inner`.
    ///
    /// Errors: [`CompressError::NotBuilt`] if this build does not have it.
    pub fn new(packing: Packing, inner: C) -> Result<Self, CompressError> {
        if packing.is_built() {
            return Ok(Self { inner, packing, packer: Packer::default(), unpacker: Mutex::default() });
        }
        Err(CompressError::NotBuilt { packing })
    }

    /// The codec.
    #[must_use]
    pub fn inner(&self) -> &C {
        &self.inner
    }
}

state_of!([C: Compressor] Lossless<C>, self => self.inner);

impl<C: Memoryless> Memoryless for Lossless<C> {}

impl<C: Compressor> Compressor for Lossless<C> {
    fn compress(&mut self, x: &[f32], key: RoundKey, out: &mut Payload) -> Result<(), CompressError> {
        self.inner.compress(x, key, out)?;
        self.packer.pack_payload(self.packing, out);
        Ok(())
    }

    /// Errors: those of the codec; [`CompressError::Packed`].
    fn decompress(&self, p: PayloadRef<'_>, out: &mut [f32]) -> Result<(), CompressError> {
        if p.codec() != CodecId::PACKED {
            return self.inner.decompress(p, out);
        }
        // Only memory: it does not matter what a panicking thread left in it.
        let mut unpacker = self.unpacker.lock().unwrap_or_else(PoisonError::into_inner);
        let bound = self.inner.max_payload(out.len());
        self.inner.decompress(unpacker.open(self.packing, p, out.len(), bound)?, out)
    }

    fn max_payload(&self, len: usize) -> usize {
        self.inner.max_payload(len)
    }

    fn set_threads(&mut self, threads: usize) {
        self.inner.set_threads(threads);
    }
}
