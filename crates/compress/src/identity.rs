//! The codec that loses nothing: four bytes an element, every bit pattern kept.

use crate::compressor::check_lengths;
use crate::simd::{Kernel, Level};
use crate::wire::{CodecId, HEADER};
use crate::{CompressError, Compressor, Payload, PayloadRef, RoundKey, State};

/// Elements between two updates of the checksum: few enough that input and output stay in the first-level cache.
const CHUNK: usize = 2048;

/// `f32` as it is, little-endian. `4n` bytes for `n` elements; the error is zero.
///
/// NaN and infinity pass through `compress` bit by bit. With feedback they are refused, as by every codec: a residual
/// must stay finite.
#[derive(Debug, Clone)]
pub struct F32 {
    level: Level,
}

impl F32 {
    /// The codec.
    #[must_use]
    pub fn new() -> Self {
        Self { level: Level::detect() }
    }

    #[cfg(test)]
    pub(crate) fn portable() -> Self {
        Self { level: Level::PORTABLE }
    }
}

impl Default for F32 {
    fn default() -> Self {
        Self::new()
    }
}

impl State for F32 {}

impl Compressor for F32 {
    fn compress(&mut self, x: &[f32], _: RoundKey, out: &mut Payload) -> Result<(), CompressError> {
        out.fill(CodecId::F32, x.len(), size_of_val(x), |body, crc| {
            // One large copy may bypass the cache; that is faster than to go by chunks and hash each while it is hot.
            write(x, body);
            crc.update(body);
            Ok(())
        })
    }

    fn compress_residual(
        &mut self,
        x: &[f32],
        e: &[f32],
        next: &mut [f32],
        _: RoundKey,
        out: &mut Payload,
    ) -> Result<(), CompressError> {
        check_lengths(x, e, next).inspect_err(|_| out.clear())?;
        out.fill(CodecId::F32, x.len(), size_of_val(x), |body, crc| {
            let chunks = body.chunks_mut(4 * CHUNK).zip(x.chunks(CHUNK)).zip(e.chunks(CHUNK));
            for (i, (((out, x), e), next)) in chunks.zip(next.chunks_mut(CHUNK)).enumerate() {
                if self.level.run(Sum { x, e, out: next }) {
                    return Err(first_non_finite(next, i * CHUNK));
                }
                write(next, out);
                crc.update(out);
                next.fill(0.0);
            }
            Ok(())
        })
    }

    fn decompress(&self, p: PayloadRef<'_>, out: &mut [f32]) -> Result<(), CompressError> {
        let body = p.open_exact(CodecId::F32, out.len(), size_of_val(out))?;
        for (out, bytes) in out.iter_mut().zip(body.as_chunks().0) {
            *out = f32::from_le_bytes(*bytes);
        }
        Ok(())
    }

    fn max_payload(&self, len: usize) -> usize {
        len.saturating_mul(4).saturating_add(HEADER)
    }
}

fn write(x: &[f32], out: &mut [u8]) {
    if cfg!(target_endian = "little") {
        out.copy_from_slice(bytemuck::cast_slice(x));
        return;
    }
    for (out, x) in out.as_chunks_mut().0.iter_mut().zip(x) {
        *out = x.to_le_bytes();
    }
}

/// `out = x + e`; true if something in it is not finite.
pub(crate) struct Sum<'a> {
    pub(crate) x: &'a [f32],
    pub(crate) e: &'a [f32],
    pub(crate) out: &'a mut [f32],
}

impl Kernel for Sum<'_> {
    type Output = bool;

    #[expect(clippy::inline_always, reason = "a kernel is compiled for its caller's instruction set")]
    #[inline(always)]
    fn run(self) -> bool {
        let mut bad = 0;
        for ((sum, x), e) in self.out.iter_mut().zip(self.x).zip(self.e) {
            *sum = x + e;
            bad |= non_finite(*sum);
        }
        bad >> 31 != 0
    }
}

/// Bit 31 is set if `x` is NaN or infinite; the other bits are anything. Values combine with `|`.
#[expect(clippy::inline_always, reason = "part of kernels")]
#[inline(always)]
pub(crate) fn non_finite(x: f32) -> u32 {
    (x.to_bits() & 0x7fff_ffff) + 0x0080_0000
}

/// The error for the first element of `v` that is not finite; `v` begins at `offset` of the whole vector.
pub(crate) fn first_non_finite(v: &[f32], offset: usize) -> CompressError {
    let at = v.iter().position(|v| !v.is_finite()).expect("the caller saw one in this chunk");
    CompressError::NonFinite { index: offset + at, value: v[at] }
}
