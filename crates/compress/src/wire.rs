//! The frame of every payload: a header with lengths and a checksum, then a body. `WIRE.md` is the
//! specification. This module does not depend on any codec; a body is plain bytes here.

use std::fmt;

use crc32fast::Hasher;

use crate::CompressError;

/// The first four bytes of a payload.
pub const MAGIC: [u8; 4] = *b"ffcz";
/// The version of the wire format that this build writes and reads.
pub const VERSION: u8 = 1;
/// Number of bytes before the body.
pub const HEADER: usize = 28;
/// Number of header bytes that the checksum covers: all but the checksum itself.
const HASHED: usize = 24;

/// A codec's number in the wire format. Numbers are never reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct CodecId(pub u8);

/// Defines each codec's constant, number and name.
macro_rules! codecs {
    ($($(#[$doc:meta])* $constant:ident = $number:literal, $name:literal;)*) => {
        impl CodecId {
            $($(#[$doc])* pub const $constant: Self = Self($number);)*
        }

        impl fmt::Display for CodecId {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                let name = match *self {
                    $(Self::$constant => $name,)*
                    _ => "unknown",
                };
                write!(f, "{} ({name})", self.0)
            }
        }
    };
}

codecs! {
    /// [`crate::F32`].
    F32 = 1, "f32";
    /// [`crate::F16`].
    F16 = 2, "f16";
    /// [`crate::Bf16`].
    BF16 = 3, "bf16";
    /// [`crate::int::IntBlock`], of any width.
    INT = 5, "int";
    /// [`crate::uint::UintBlock`], of any width.
    UINT = 6, "uint";
    /// [`crate::Sign`].
    SIGN = 7, "sign";
    /// [`crate::minifloat::MinifloatBlock`], of any format.
    MINIFLOAT = 8, "minifloat";
    /// [`crate::Natural`].
    NATURAL = 9, "natural";
    /// [`crate::MinMaxUint8`].
    MIN_MAX = 10, "min-max";
    /// [`crate::Codebook`], of any width.
    CODEBOOK = 11, "codebook";
    /// [`crate::Sparse`].
    SPARSE = 16, "sparse";
    /// [`crate::Masked`].
    MASKED = 17, "masked";
    /// [`crate::Dct`].
    DCT = 18, "dct";
    /// [`crate::link::AqSgd`].
    AQ_SGD = 24, "aq-sgd";
    /// [`crate::Lossless`], for payloads that it made smaller.
    PACKED = 32, "packed";
    /// A codec implemented outside of this crate.
    OWN = 255, "a caller's own";
}

/// An encoded vector in a reusable buffer. Filling it again with as many bytes or fewer does not allocate.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Payload {
    bytes: Vec<u8>,
    codec: CodecId,
    count: u64,
}

impl Payload {
    /// Creates an empty payload, to be filled by a codec.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the whole frame, ready to be sent. It is empty before the first `compress`, and after one that
    /// failed.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Returns the whole frame without a copy.
    #[must_use]
    pub fn into_bytes(self) -> Vec<u8> {
        self.bytes
    }

    /// Returns the payload for a decoder. It was encoded in this process, so its header is not checked again.
    #[must_use]
    pub fn view(&self) -> PayloadRef<'_> {
        let body = self.bytes.get(HEADER..).unwrap_or_default();
        PayloadRef { codec: self.codec, count: self.count, body }
    }

    /// Empties the payload and keeps its allocation.
    pub fn clear(&mut self) {
        self.bytes.clear();
        (self.codec, self.count) = (CodecId::default(), 0);
    }

    /// Lets `write` fill a body of exactly `body` bytes, and completes the frame. For codecs outside of this
    /// crate, such as a device's. If `write` fails, the payload is left empty.
    ///
    /// Errors: those of `write`.
    pub fn seal<E>(
        &mut self,
        codec: CodecId,
        count: usize,
        body: usize,
        write: impl FnOnce(&mut [u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        self.fill(codec, count, body, |body, crc| {
            write(body)?;
            crc.update(body);
            Ok(())
        })
    }

    /// Like [`Self::seal`], but `write` must pass each part of the body to the hasher, in order, which it can
    /// do while the part is still in the cache.
    pub(crate) fn fill<E>(
        &mut self,
        codec: CodecId,
        count: usize,
        body: usize,
        write: impl FnOnce(&mut [u8], &mut Hasher) -> Result<(), E>,
    ) -> Result<(), E> {
        // Only growth is filled with zeros; the bytes of the last payload are overwritten.
        self.bytes.resize(HEADER + body, 0);
        (self.codec, self.count) = (codec, count as u64);
        let (header, body) = self.bytes.split_at_mut(HEADER);
        header[..4].copy_from_slice(&MAGIC);
        header[4] = VERSION;
        header[5] = codec.0;
        header[6..8].copy_from_slice(&[0, 0]);
        header[8..16].copy_from_slice(&self.count.to_le_bytes());
        header[16..24].copy_from_slice(&(body.len() as u64).to_le_bytes());
        let mut crc = Hasher::new();
        crc.update(&header[..HASHED]);
        let result = write(body, &mut crc);
        header[HASHED..].copy_from_slice(&crc.finalize().to_le_bytes());
        if result.is_err() {
            self.clear();
        }
        result
    }
}

impl Payload {
    /// Writes a frame whose body is the concatenation of `parts`.
    pub(crate) fn fill_with(&mut self, codec: CodecId, count: usize, parts: &[&[u8]]) {
        let len = parts.iter().map(|part| part.len()).sum();
        let sealed: Result<(), std::convert::Infallible> = self.fill(codec, count, len, |mut body, crc| {
            for part in parts {
                let (here, rest) = body.split_at_mut(part.len());
                here.copy_from_slice(part);
                crc.update(part);
                body = rest;
            }
            Ok(())
        });
        let Ok(()) = sealed;
    }

    /// Returns the codec that encoded the payload, or 0 if it is empty.
    #[must_use]
    pub fn codec(&self) -> CodecId {
        self.codec
    }

    /// Changes the payload to one of `codec`, whose body is `prefix` and then the old body.
    pub(crate) fn wrap(&mut self, codec: CodecId, prefix: [u8; 4]) {
        let (len, count) = (self.bytes.len() - HEADER, self.count as usize);
        self.bytes.resize(HEADER + 4 + len, 0);
        self.bytes.copy_within(HEADER..HEADER + len, HEADER + 4);
        let sealed: Result<(), std::convert::Infallible> = self.seal(codec, count, 4 + len, |body| {
            body[..4].copy_from_slice(&prefix);
            Ok(())
        });
        let Ok(()) = sealed;
    }
}

/// A payload in borrowed bytes, with its header already checked. The body is not copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PayloadRef<'a> {
    codec: CodecId,
    count: u64,
    body: &'a [u8],
}

impl<'a> PayloadRef<'a> {
    /// Reads the header of received bytes, which must be exactly one payload.
    ///
    /// Errors: [`CompressError::FrameLength`], [`CompressError::Magic`], [`CompressError::Version`],
    /// [`CompressError::Flags`], [`CompressError::Checksum`]. It never allocates, whatever the header says.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, CompressError> {
        let found = bytes.len() as u64;
        let (header, body) = bytes
            .split_first_chunk::<HEADER>()
            .ok_or(CompressError::FrameLength { wanted: HEADER as u64, found })?;
        let [m0, m1, m2, m3, version, codec, f0, f1, rest @ ..] = *header;
        if [m0, m1, m2, m3] != MAGIC {
            return Err(CompressError::Magic { found: [m0, m1, m2, m3], wanted: MAGIC });
        }
        if version != VERSION {
            return Err(CompressError::Version { found: version, wanted: VERSION });
        }
        let flags = u16::from_le_bytes([f0, f1]);
        if flags != 0 {
            return Err(CompressError::Flags { found: flags });
        }
        let [c0, c1, c2, c3, c4, c5, c6, c7, l0, l1, l2, l3, l4, l5, l6, l7, s0, s1, s2, s3] = rest;
        let count = u64::from_le_bytes([c0, c1, c2, c3, c4, c5, c6, c7]);
        let length = u64::from_le_bytes([l0, l1, l2, l3, l4, l5, l6, l7]);
        let wanted = length.saturating_add(HEADER as u64);
        if found != wanted {
            return Err(CompressError::FrameLength { wanted, found });
        }
        let mut crc = Hasher::new();
        crc.update(&header[..HASHED]);
        crc.update(body);
        let (wanted, found) = (crc.finalize(), u32::from_le_bytes([s0, s1, s2, s3]));
        if found != wanted {
            return Err(CompressError::Checksum { wanted, found });
        }
        Ok(Self { codec: CodecId(codec), count, body })
    }

    /// Creates a payload from a body that is nested in another body.
    pub(crate) fn nested(codec: CodecId, count: usize, body: &'a [u8]) -> Self {
        Self { codec, count: count as u64, body }
    }

    /// Returns the codec that encoded the payload, or 0 for an empty [`Payload`].
    #[must_use]
    pub fn codec(&self) -> CodecId {
        self.codec
    }

    /// Returns the number of elements according to the header. It is untrusted: compare it with the expected
    /// number before you allocate.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Returns the bytes after the header.
    #[must_use]
    pub fn body(&self) -> &'a [u8] {
        self.body
    }

    /// Returns the body if the payload is of `codec` and holds `out` elements.
    pub(crate) fn open(&self, codec: CodecId, out: usize) -> Result<&'a [u8], CompressError> {
        if self.codec != codec {
            return Err(CompressError::WrongCodec { wanted: codec, found: self.codec });
        }
        if self.count != out as u64 {
            return Err(CompressError::CountMismatch { wanted: out, found: self.count });
        }
        Ok(self.body)
    }
}

/// Checks that a body has the length that its codec writes for `count` elements.
pub(crate) fn check_body(
    codec: CodecId,
    count: usize,
    wanted: usize,
    found: usize,
) -> Result<(), CompressError> {
    if wanted == found {
        return Ok(());
    }
    Err(CompressError::BodyLength { codec, count, wanted: wanted as u64, found: found as u64 })
}
