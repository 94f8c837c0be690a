//! What the two 16-bit casts share: the loops over a chunk, and the frame around them. Knows no format: that is a
//! [`Format`], two pure functions.

use crate::compressor::check_lengths;
use crate::identity::{first_non_finite, non_finite};
use crate::simd::{Kernel, Level};
use crate::wire::{CodecId, HEADER};
use crate::{CompressError, Payload, PayloadRef};

/// Elements between two updates of the checksum: few enough that all the buffers stay in the first-level cache.
const CHUNK: usize = 2048;

/// A 16-bit floating-point format. Both functions must be branch-free and `#[inline(always)]`, so that the loops
/// become vector code.
pub(crate) trait Format: Copy {
    const ID: CodecId;
    /// The exponent's bits; all of them set means NaN or infinity.
    const EXPONENT: u16;
    /// Rounds a finite number to nearest, ties to even; what would round to infinity becomes the largest finite one.
    fn encode(x: f32) -> u16;
    /// Exact.
    fn decode(bits: u16) -> f32;
}

pub(crate) fn compress<F: Format>(level: Level, x: &[f32], out: &mut Payload) -> Result<(), CompressError> {
    out.fill(F::ID, x.len(), 2 * x.len(), |body, crc| {
        for (i, (out, x)) in body.chunks_mut(2 * CHUNK).zip(x.chunks(CHUNK)).enumerate() {
            if level.run(Encode::<F> { x, out, format: std::marker::PhantomData }) {
                return Err(first_non_finite(x, i * CHUNK));
            }
            crc.update(out);
        }
        Ok(())
    })
}

pub(crate) fn compress_residual<F: Format>(
    level: Level,
    x: &[f32],
    e: &[f32],
    next: &mut [f32],
    out: &mut Payload,
) -> Result<(), CompressError> {
    check_lengths(x, e, next).inspect_err(|_| out.clear())?;
    out.fill(F::ID, x.len(), 2 * x.len(), |body, crc| {
        let chunks = body.chunks_mut(2 * CHUNK).zip(x.chunks(CHUNK)).zip(e.chunks(CHUNK));
        for (i, (((out, x), e), next)) in chunks.zip(next.chunks_mut(CHUNK)).enumerate() {
            let format = std::marker::PhantomData;
            if level.run(EncodeResidual::<F> { x, e, next, out, format }) {
                // The kernel has overwritten `next`; the sum is made again to find the culprit.
                next.iter_mut().zip(x).zip(e).for_each(|((next, x), e)| *next = x + e);
                return Err(first_non_finite(next, i * CHUNK));
            }
            crc.update(out);
        }
        Ok(())
    })
}

pub(crate) fn decompress<F: Format>(
    level: Level,
    p: PayloadRef<'_>,
    out: &mut [f32],
) -> Result<(), CompressError> {
    let body = p.open_exact(F::ID, out.len(), 2 * out.len())?;
    for (i, (out, body)) in out.chunks_mut(CHUNK).zip(body.chunks(2 * CHUNK)).enumerate() {
        if level.run(Decode::<F> { body, out, format: std::marker::PhantomData }) {
            let mut codes = body.as_chunks().0.iter().map(|b| u16::from_le_bytes(*b));
            let at = codes.clone().position(|c| c & F::EXPONENT == F::EXPONENT).expect("the kernel saw one");
            let code = codes.nth(at).expect("it was just found there");
            return Err(CompressError::Code { index: i * CHUNK + at, code: u32::from(code) });
        }
    }
    Ok(())
}

pub(crate) fn max_payload(len: usize) -> usize {
    len.saturating_mul(2).saturating_add(HEADER)
}

/// `out = C(x)`; true if something in `x` is not finite.
struct Encode<'a, F> {
    x: &'a [f32],
    out: &'a mut [u8],
    format: std::marker::PhantomData<F>,
}

impl<F: Format> Kernel for Encode<'_, F> {
    type Output = bool;

    #[expect(clippy::inline_always, reason = "a kernel is compiled for its caller's instruction set")]
    #[inline(always)]
    fn run(self) -> bool {
        let mut bad = 0;
        for (out, &x) in self.out.as_chunks_mut().0.iter_mut().zip(self.x) {
            bad |= non_finite(x);
            *out = F::encode(x).to_le_bytes();
        }
        bad >> 31 != 0
    }
}

/// `v = x + e; out = C(v); next = v - D(C(v))`; true if some `v` is not finite.
struct EncodeResidual<'a, F> {
    x: &'a [f32],
    e: &'a [f32],
    next: &'a mut [f32],
    out: &'a mut [u8],
    format: std::marker::PhantomData<F>,
}

impl<F: Format> Kernel for EncodeResidual<'_, F> {
    type Output = bool;

    #[expect(clippy::inline_always, reason = "a kernel is compiled for its caller's instruction set")]
    #[inline(always)]
    fn run(self) -> bool {
        let mut bad = 0;
        let out = self.out.as_chunks_mut().0.iter_mut();
        for (((out, x), e), next) in out.zip(self.x).zip(self.e).zip(self.next) {
            let v = x + e;
            bad |= non_finite(v);
            let code = F::encode(v);
            *out = code.to_le_bytes();
            *next = v - F::decode(code);
        }
        bad >> 31 != 0
    }
}

/// `out = D(body)`; true if a code is not finite.
struct Decode<'a, F> {
    body: &'a [u8],
    out: &'a mut [f32],
    format: std::marker::PhantomData<F>,
}

impl<F: Format> Kernel for Decode<'_, F> {
    type Output = bool;

    #[expect(clippy::inline_always, reason = "a kernel is compiled for its caller's instruction set")]
    #[inline(always)]
    fn run(self) -> bool {
        let mut bad = false;
        for (out, bytes) in self.out.iter_mut().zip(self.body.as_chunks().0) {
            let code = u16::from_le_bytes(*bytes);
            bad |= code & F::EXPONENT == F::EXPONENT;
            *out = F::decode(code);
        }
        bad
    }
}
