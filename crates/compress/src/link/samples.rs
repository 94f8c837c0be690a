//! The length of samples, and the format in which a store holds them. This module does not depend on stores or
//! the wire format.

use crate::cast::Format;
use crate::chunked::{Chunks, Pass};
use crate::f16::Binary16;
use crate::noise::Noise;
use crate::simd::Level;
use crate::values::Values;
use crate::wire::CodecId;
use crate::{CompressError, Int4, Int8};

/// Number of values with one scale, for samples that are stored in eight or four bits.
const BLOCK: u32 = 64;

/// Samples of one length, and the format in which they are stored: two bytes, one byte or half a byte for each
/// value.
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
    held: StorageFormat,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum StorageFormat {
    F16,
    Int8,
    Int4,
}

/// Stores the samples as f16.
impl From<usize> for Samples {
    fn from(len: usize) -> Self {
        Self::f16(len)
    }
}

impl Samples {
    /// Samples of `len` values, stored as f16, as they were decoded.
    #[must_use]
    pub const fn f16(len: usize) -> Self {
        Self { len, held: StorageFormat::F16 }
    }

    /// Samples stored as [`Int8`] in blocks of 64, which takes about half of the bytes. Changes are a little
    /// larger, by the quantization error of the copy.
    #[must_use]
    pub const fn int8(len: usize) -> Self {
        Self { len, held: StorageFormat::Int8 }
    }

    /// Samples stored as [`Int4`] in blocks of 64, which takes about a quarter of the bytes. Changes never
    /// become smaller than the quantization error of the copy, which is 7 % of a block's largest value. The
    /// error of a decoded activation therefore never becomes smaller than the codec's relative error times
    /// that.
    #[must_use]
    pub const fn int4(len: usize) -> Self {
        Self { len, held: StorageFormat::Int4 }
    }

    /// Returns the number of values in a sample.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "it is one sample's length, not a collection's")]
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Returns the number of bytes that a stored sample takes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        match self.held {
            StorageFormat::F16 => self.len.saturating_mul(2),
            StorageFormat::Int8 => int8().bytes(self.len),
            StorageFormat::Int4 => int4().bytes(self.len),
        }
    }

    /// Returns the format's number in the wire format and in files.
    pub(super) fn tag(&self) -> u8 {
        match self.held {
            StorageFormat::F16 => 0,
            StorageFormat::Int8 => 8,
            StorageFormat::Int4 => 4,
        }
    }

    /// Writes the finite `values` in the storage format.
    pub(super) fn write(&self, values: &[f32], out: &mut [u8]) {
        let noise = Noise::of_halves([0; 2]);
        match self.held {
            StorageFormat::F16 => {
                for (code, value) in out.as_chunks_mut().0.iter_mut().zip(values) {
                    *code = Binary16::encode(*value);
                }
            }
            StorageFormat::Int8 => {
                _ = int8().encode(&mut Pass::short(Level::detect()), 0, Values::Read(values), out, noise);
            }
            StorageFormat::Int4 => {
                _ = int4().encode(&mut Pass::short(Level::detect()), 0, Values::Read(values), out, noise);
            }
        }
    }

    /// Reads a stored sample.
    ///
    /// Errors: if [`Self::write`] could not have written the bytes.
    pub(super) fn read(&self, bytes: &[u8], out: &mut [f32]) -> Result<(), CompressError> {
        match self.held {
            StorageFormat::F16 => read_f16(bytes, out),
            StorageFormat::Int8 => int8().decode(&mut Pass::short(Level::detect()), 0, bytes, out),
            StorageFormat::Int4 => int4().decode(&mut Pass::short(Level::detect()), 0, bytes, out),
        }
    }

    pub(super) fn check_tag(&self, found: u8) -> Result<(), CompressError> {
        if found == self.tag() {
            return Ok(());
        }
        Err(CompressError::Parameter { codec: CodecId::AQ_SGD, wanted: self.tag(), found })
    }
}

/// Decodes untrusted binary16 values.
pub(super) fn read_f16(bytes: &[u8], out: &mut [f32]) -> Result<(), CompressError> {
    let codes = bytes.as_chunks().0;
    if let Some(index) = codes.iter().position(|code| Binary16::is_invalid(*code)) {
        return Err(CompressError::Code { index, code: u16::from_le_bytes(codes[index]).into() });
    }
    for (out, code) in out.iter_mut().zip(codes) {
        *out = Binary16::decode(*code);
    }
    Ok(())
}

fn int8() -> impl Chunks {
    Int8::new(BLOCK).expect("the block size is allowed").chunks
}

fn int4() -> impl Chunks {
    Int4::new(BLOCK).expect("the block size is allowed").chunks
}
