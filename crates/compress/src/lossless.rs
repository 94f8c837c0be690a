//! A lossless last stage: a general-purpose byte compressor applied to another codec's payload where it makes
//! the payload smaller.

use std::fmt;
use std::sync::{Mutex, PoisonError};

use crate::state::state_of;
use crate::wire::{CodecId, HEADER};
use crate::{CompressError, Compressor, Memoryless, Payload, PayloadRef, RoundKey};

/// Number of bytes before the packed body.
const PREFIX: usize = 4;
/// Size in bytes of the sample from the middle of a body. A body longer than two samples is packed only if its
/// sample becomes smaller: many bodies do not, and codes look alike throughout a body.
const SAMPLE: usize = 1 << 16;

/// A general-purpose byte compressor. Each is a feature of this crate; both are on by default.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Packing {
    /// Zstandard (RFC 8878) at its level 1.
    Zstd,
    /// LZ4 block format: saves less than zstd and is several times faster.
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
    /// Returns the packer's number in the wire format.
    fn tag(self) -> u8 {
        match self {
            Self::Zstd => 1,
            Self::Lz4 => 2,
        }
    }

    /// Returns true if the packer is compiled into this build.
    #[must_use]
    pub const fn is_built(self) -> bool {
        match self {
            Self::Zstd => cfg!(feature = "zstd"),
            Self::Lz4 => cfg!(feature = "lz4"),
        }
    }
}

/// A context of zstd, created on first use and then reused.
#[cfg(feature = "zstd")]
struct ScratchBuffer<T>(Option<T>);

#[cfg(feature = "zstd")]
impl<T> Default for ScratchBuffer<T> {
    fn default() -> Self {
        Self(None)
    }
}

#[cfg(feature = "zstd")]
impl<T> fmt::Debug for ScratchBuffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ScratchBuffer").finish_non_exhaustive()
    }
}

#[derive(Debug, Default)]
pub(crate) struct Packer {
    packed: Vec<u8>,
    #[cfg(feature = "zstd")]
    zstd: ScratchBuffer<zstd::zstd_safe::CCtx<'static>>,
}

impl Packer {
    /// Packs `bytes`. Returns `None` if that does not make them fewer.
    fn pack(&mut self, packing: Packing, bytes: &[u8]) -> Option<&[u8]> {
        let out = &mut self.packed;
        let len: usize = match packing {
            #[cfg(feature = "zstd")]
            Packing::Zstd => {
                // A result longer than the input fails, which is fine: it would not be used.
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

    /// Packs a payload in place if that makes it smaller.
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
    zstd: ScratchBuffer<zstd::zstd_safe::DCtx<'static>>,
}

impl Unpacker {
    /// Unpacks `bytes`. Returns `None` if they are not valid, or unpack to more than `bound` bytes; never
    /// writes more than that.
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

    /// Unpacks a payload of `count` elements. The unpacked payload has at most `bound` bytes, header included.
    ///
    /// Errors: [`CompressError::Packed`], and the errors of [`PayloadRef::open`].
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
            return Err(wrong("its prefix is invalid"));
        };
        if tag != packing.tag() {
            return Err(wrong("it was packed by another packer"));
        }
        let plain = self.unpack(packing, packed, bound - HEADER);
        Ok(PayloadRef::nested(
            CodecId(codec),
            count,
            plain.ok_or_else(|| wrong("it is damaged or unpacks to too many bytes"))?,
        ))
    }
}

/// A codec whose payloads are packed if that makes them smaller: a sample of each long payload is tried first,
/// then the whole. A payload that would not become smaller is sent as the codec `C` wrote it, without any added
/// byte.
///
/// Use it as the last stage, around error feedback and not within it. It also decodes payloads of `C` that are
/// not packed. Dense codes gain little, about 6 % for int8 and 15 % for int4 on gradients; sparse and repeating
/// vectors gain much. Packing uses one thread; zstd reaches a fraction of a GB/s.
///
/// Packed bytes may differ between versions of a packer's library; the unpacked bytes do not.
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
    /// Adds `packing` after `inner`.
    ///
    /// Errors: [`CompressError::NotBuilt`] if the packer is not compiled into this build.
    pub fn new(packing: Packing, inner: C) -> Result<Self, CompressError> {
        if packing.is_built() {
            return Ok(Self { inner, packing, packer: Packer::default(), unpacker: Mutex::default() });
        }
        Err(CompressError::NotBuilt { packing })
    }

    /// Returns the wrapped codec.
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

    /// Errors: those of the wrapped codec, and [`CompressError::Packed`].
    fn decompress(&self, p: PayloadRef<'_>, out: &mut [f32]) -> Result<(), CompressError> {
        if p.codec() != CodecId::PACKED {
            return self.inner.decompress(p, out);
        }
        // The lock guards only scratch memory, so its contents after a panic do not matter.
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
