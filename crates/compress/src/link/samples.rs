//! What is held of a sample: its length, and how its values lie in few bytes. Knows no store and no wire.

use crate::cast::Format;
use crate::chunked::{Chunks, Pass};
use crate::f16::Binary16;
use crate::noise::Noise;
use crate::simd::Level;
use crate::values::Values;
use crate::wire::CodecId;
use crate::{CompressError, Int4, Int8};

/// Values under one scale where a sample is held in few bits.
const BLOCK: u32 = 64;

/// Samples of one length, and how they are held: two bytes a value, or one, or half of one.
///
/// ```
/// use farflung_compress::link::Samples;
///
/// assert_eq!(Samples::f16(128 * 128).bytes(), 32_768);
/// assert_eq!(Samples::int8(128 * 128).bytes(), 16_896); // two more bytes for each 64 values
/// assert_eq!(Samples::int4(128 * 128).bytes(), 8_704);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Samples {
    len: usize,
    held: Held,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Held {
    F16,
    Int8,
    Int4,
}

/// As f16.
impl From<usize> for Samples {
    fn from(len: usize) -> Self {
        Self::f16(len)
    }
}

impl Samples {
    /// Of `len` values, held as they were decoded.
    #[must_use]
    pub const fn f16(len: usize) -> Self {
        Self { len, held: Held::F16 }
    }

    /// Held as [`Int8`] in blocks of 64: half of the bytes. Changes are a little larger, by what that loses.
    #[must_use]
    pub const fn int8(len: usize) -> Self {
        Self { len, held: Held::Int8 }
    }

    /// Held as [`Int4`] in blocks of 64: about a quarter of the bytes. Changes never become smaller than what
    /// that loses, 7 % of a block's largest, and the activation that is decoded is off by the codec's share of
    /// it.
    #[must_use]
    pub const fn int4(len: usize) -> Self {
        Self { len, held: Held::Int4 }
    }

    /// Values of a sample.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "it is one sample's length, not a collection's")]
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Bytes of a sample.
    #[must_use]
    pub fn bytes(&self) -> usize {
        match self.held {
            Held::F16 => self.len.saturating_mul(2),
            Held::Int8 => int8().bytes(self.len),
            Held::Int4 => int4().bytes(self.len),
        }
    }

    /// The number on the wire and in files.
    pub(super) fn tag(&self) -> u8 {
        match self.held {
            Held::F16 => 0,
            Held::Int8 => 8,
            Held::Int4 => 4,
        }
    }

    /// Writes `values`, which are finite, as they are to be held.
    pub(super) fn write(&self, values: &[f32], out: &mut [u8]) {
        let noise = Noise::of_halves([0; 2]);
        match self.held {
            Held::F16 => {
                for (code, value) in out.as_chunks_mut().0.iter_mut().zip(values) {
                    *code = Binary16::encode(*value);
                }
            }
            Held::Int8 => {
                _ = int8().encode(&mut Pass::short(Level::detect()), 0, Values::Read(values), out, noise);
            }
            Held::Int4 => {
                _ = int4().encode(&mut Pass::short(Level::detect()), 0, Values::Read(values), out, noise);
            }
        }
    }

    /// Reads what is held.
    ///
    /// Errors: bytes that [`Self::write`] does not write.
    pub(super) fn read(&self, bytes: &[u8], out: &mut [f32]) -> Result<(), CompressError> {
        match self.held {
            Held::F16 => read_f16(bytes, out),
            Held::Int8 => int8().decode(&mut Pass::short(Level::detect()), 0, bytes, out),
            Held::Int4 => int4().decode(&mut Pass::short(Level::detect()), 0, bytes, out),
        }
    }

    pub(super) fn check_tag(&self, found: u8) -> Result<(), CompressError> {
        if found == self.tag() {
            return Ok(());
        }
        Err(CompressError::Parameter { codec: CodecId::AQ_SGD, wanted: self.tag(), found })
    }
}

/// Reads binary16 of an untrusted origin.
pub(super) fn read_f16(bytes: &[u8], out: &mut [f32]) -> Result<(), CompressError> {
    let codes = bytes.as_chunks().0;
    if let Some(index) = codes.iter().position(|code| Binary16::refused(*code)) {
        return Err(CompressError::Code { index, code: u16::from_le_bytes(codes[index]).into() });
    }
    for (out, code) in out.iter_mut().zip(codes) {
        *out = Binary16::decode(*code);
    }
    Ok(())
}

fn int8() -> impl Chunks {
    Int8::new(BLOCK).expect("a block that is allowed").chunks
}

fn int4() -> impl Chunks {
    Int4::new(BLOCK).expect("a block that is allowed").chunks
}
