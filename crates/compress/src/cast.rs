//! Codecs that convert each element on its own: plain f32 and the two 16-bit formats. They share one loop; each
//! format is a pair of pure functions.

use std::marker::PhantomData;

use crate::CompressError;
use crate::chunked::{Chunked, Chunks, Pass};
use crate::magnitude::{INFINITE, magnitude};
use crate::noise::Noise;
use crate::simd::{Avx2Token, Kernel};
use crate::staging::StagingBuffer;
use crate::values::Values;
use crate::wire::CodecId;

/// A number format. `encode`, `decode` and `is_invalid` must be branch-free and `#[inline(always)]`, so that
/// the loops are vectorized.
pub trait Format: Copy + std::fmt::Debug + Send + Sync {
    /// Number of the codec in the wire format.
    const ID: CodecId;
    /// True if the format keeps every bit pattern, NaN and infinity included.
    const EXACT: bool = false;
    /// The bytes of one element.
    type Bytes: Copy + AsRef<[u8]> + bytemuck::Pod;
    /// Rounds a finite number to nearest, ties to even. A number that would round to infinity becomes the
    /// largest finite value of the format.
    fn encode(x: f32) -> Self::Bytes;
    /// Decodes an element exactly.
    fn decode(bytes: Self::Bytes) -> f32;
    /// Returns true if no encoder writes these bytes.
    fn is_invalid(bytes: Self::Bytes) -> bool;
    /// Encodes some of the first elements with AVX2. Returns their number and the bits of their largest
    /// magnitude.
    fn encode_avx2(_: Avx2Token, _: &[f32], _: &mut [u8]) -> (usize, i32) {
        (0, 0)
    }
    /// Decodes some of the first elements with AVX2. Returns their number, and whether an element is one that
    /// no encoder writes.
    fn decode_avx2(_: Avx2Token, _: &[u8], _: &mut [f32]) -> (usize, bool) {
        (0, false)
    }
}

/// Encodes every element on its own, in the format `F`.
#[derive(Debug, Clone, Copy)]
pub struct Cast<F>(PhantomData<F>);

impl<F: Format> Chunked<Cast<F>> {
    /// Creates the codec.
    #[must_use]
    pub fn new() -> Self {
        Self::of(Cast(PhantomData))
    }
}

impl<F: Format> Default for Chunked<Cast<F>> {
    fn default() -> Self {
        Self::new()
    }
}

impl<F: Format> Chunks for Cast<F> {
    const ID: CodecId = F::ID;

    fn unit(&self) -> usize {
        1
    }

    fn bytes(&self, len: usize) -> usize {
        len.saturating_mul(size_of::<F::Bytes>())
    }

    fn encode(&self, pass: &mut Pass, _: usize, values: Values<'_>, out: &mut [u8], _: Noise) -> bool {
        let Pass { level, staging } = pass;
        match values {
            Values::Read(x) => {
                let (done, max) = level.avx2_token().map_or((0, 0), |token| F::encode_avx2(token, x, out));
                let out = bytemuck::cast_slice_mut(out);
                let refused = level.run(Encode::<F> { x: &x[done..], out: &mut out[done..] });
                !F::EXACT && (refused || max >= INFINITE)
            }
            Values::Feedback { x, e, next } => {
                let out = bytemuck::cast_slice_mut(out);
                level.run(EncodeResidual::<F> { x, e, next, out, staging })
            }
        }
    }

    fn decode(&self, pass: &mut Pass, at: usize, bytes: &[u8], out: &mut [f32]) -> Result<(), CompressError> {
        let codes: &[F::Bytes] = bytemuck::cast_slice(bytes);
        let Pass { level, staging } = pass;
        let token = staging.avx2_token(*level, out);
        let (done, refused) = token.map_or((0, false), |token| F::decode_avx2(token, bytes, out));
        if refused | level.run(Decode::<F> { codes: &codes[done..], out: &mut out[done..], staging }) {
            let index =
                codes.iter().position(|c| F::is_invalid(*c)).expect("the kernel found a rejected code");
            let code = codes[index].as_ref().iter().rev().fold(0, |code, byte| code << 8 | u32::from(*byte));
            return Err(CompressError::Code { index: at + index, code });
        }
        Ok(())
    }
}

/// Kernel: `out = C(x)`. Returns true if a value in `x` is not finite.
struct Encode<'a, F: Format> {
    x: &'a [f32],
    out: &'a mut [F::Bytes],
}

impl<F: Format> Kernel for Encode<'_, F> {
    type Output = bool;

    #[expect(clippy::inline_always, reason = "a kernel is compiled for its caller's instruction set")]
    #[inline(always)]
    fn run(self) -> bool {
        let mut max = 0;
        for (out, &x) in self.out.iter_mut().zip(self.x) {
            max = max.max(magnitude(x));
            *out = F::encode(x);
        }
        max >= INFINITE
    }
}

/// Number of elements that are computed in the staging buffer, if one is used, before they are copied to the
/// vector.
const RUN: usize = 512;

/// Kernel: `v = x + e; out = C(v); next = v - D(C(v))`. Returns true if some `v` is not finite.
struct EncodeResidual<'a, F: Format> {
    x: &'a [f32],
    e: &'a [f32],
    next: &'a mut [f32],
    out: &'a mut [F::Bytes],
    staging: &'a mut StagingBuffer,
}

impl<F: Format> Kernel for EncodeResidual<'_, F> {
    type Output = bool;

    #[expect(clippy::inline_always, reason = "a kernel is compiled for its caller's instruction set")]
    #[inline(always)]
    fn run(self) -> bool {
        let mut max = 0;
        let runs = self.x.chunks(RUN).zip(self.e.chunks(RUN));
        for (((x, e), next), out) in runs.zip(self.next.chunks_mut(RUN)).zip(self.out.chunks_mut(RUN)) {
            let (values, mut copy_back) = self.staging.target(next);
            for (((out, x), e), value) in out.iter_mut().zip(x).zip(e).zip(&mut *values) {
                let v = x + e;
                max = max.max(magnitude(v));
                let code = F::encode(v);
                *out = code;
                *value = v - F::decode(code);
            }
            copy_back.write(0, values);
        }
        max >= INFINITE
    }
}

/// Kernel: `out = D(codes)`. Returns true if no encoder writes one of the codes.
struct Decode<'a, F: Format> {
    codes: &'a [F::Bytes],
    out: &'a mut [f32],
    staging: &'a mut StagingBuffer,
}

impl<F: Format> Kernel for Decode<'_, F> {
    type Output = bool;

    #[expect(clippy::inline_always, reason = "a kernel is compiled for its caller's instruction set")]
    #[inline(always)]
    fn run(self) -> bool {
        let mut bad = false;
        for (out, codes) in self.out.chunks_mut(RUN).zip(self.codes.chunks(RUN)) {
            let (values, mut copy_back) = self.staging.target(out);
            for (value, code) in values.iter_mut().zip(codes) {
                bad |= F::is_invalid(*code);
                *value = F::decode(*code);
            }
            copy_back.write(0, values);
        }
        bad
    }
}
