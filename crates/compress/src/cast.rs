//! The codecs that cast each element alone: plain f32 and the two 16-bit formats. One loop for all three; a format is
//! two pure functions.

use std::marker::PhantomData;

use crate::CompressError;
use crate::chunked::{Chunked, Chunks, INFINITE, Values, magnitude};
use crate::noise::Noise;
use crate::simd::{Kernel, Level};
use crate::wire::CodecId;

/// A number format. The functions must be branch-free and `#[inline(always)]`, so that the loops become vector code.
pub trait Format: Copy + std::fmt::Debug + Send + Sync {
    /// The number on the wire.
    const ID: CodecId;
    /// Whether it keeps every bit pattern, NaN and infinity too.
    const EXACT: bool = false;
    /// The bytes of an element.
    type Bytes: Copy + AsRef<[u8]> + bytemuck::Pod;
    /// Rounds a finite number to nearest, ties to even; what would round to infinity becomes the largest finite one.
    fn encode(x: f32) -> Self::Bytes;
    /// Exact.
    fn decode(bytes: Self::Bytes) -> f32;
    /// Whether no encoder writes this.
    fn refused(bytes: Self::Bytes) -> bool;
}

/// Every element alone, in the format `F`.
#[derive(Debug, Clone, Copy)]
pub struct Cast<F>(PhantomData<F>);

impl<F: Format> Chunked<Cast<F>> {
    /// The codec.
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

    fn encode(&self, level: Level, _: usize, values: Values<'_>, out: &mut [u8], _: Noise) -> bool {
        let out = bytemuck::cast_slice_mut(out);
        match values {
            Values::Read(x) => level.run(Encode::<F> { x, out }) && !F::EXACT,
            Values::Feedback { x, e, next } => level.run(EncodeResidual::<F> { x, e, next, out }),
        }
    }

    fn decode(&self, level: Level, at: usize, bytes: &[u8], out: &mut [f32]) -> Result<(), CompressError> {
        let codes: &[F::Bytes] = bytemuck::cast_slice(bytes);
        if level.run(Decode::<F> { codes, out }) {
            let index = codes.iter().position(|c| F::refused(*c)).expect("the kernel saw one");
            let code = codes[index].as_ref().iter().rev().fold(0, |code, byte| code << 8 | u32::from(*byte));
            return Err(CompressError::Code { index: at + index, code });
        }
        Ok(())
    }
}

/// `out = C(x)`; true if something in `x` is not finite.
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

/// `v = x + e; out = C(v); next = v - D(C(v))`; true if some `v` is not finite.
struct EncodeResidual<'a, F: Format> {
    x: &'a [f32],
    e: &'a [f32],
    next: &'a mut [f32],
    out: &'a mut [F::Bytes],
}

impl<F: Format> Kernel for EncodeResidual<'_, F> {
    type Output = bool;

    #[expect(clippy::inline_always, reason = "a kernel is compiled for its caller's instruction set")]
    #[inline(always)]
    fn run(self) -> bool {
        let mut max = 0;
        for (((out, x), e), next) in self.out.iter_mut().zip(self.x).zip(self.e).zip(self.next) {
            let v = x + e;
            max = max.max(magnitude(v));
            let code = F::encode(v);
            *out = code;
            *next = v - F::decode(code);
        }
        max >= INFINITE
    }
}

/// `out = D(codes)`; true if a code is refused.
struct Decode<'a, F: Format> {
    codes: &'a [F::Bytes],
    out: &'a mut [f32],
}

impl<F: Format> Kernel for Decode<'_, F> {
    type Output = bool;

    #[expect(clippy::inline_always, reason = "a kernel is compiled for its caller's instruction set")]
    #[inline(always)]
    fn run(self) -> bool {
        let mut bad = false;
        for (out, code) in self.out.iter_mut().zip(self.codes) {
            bad |= F::refused(*code);
            *out = F::decode(*code);
        }
        bad
    }
}
