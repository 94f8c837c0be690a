//! Safe wrappers of the loops that are written with AVX2 intrinsics, behind a token that proves that the
//! processor has AVX2.
#![expect(unsafe_code, reason = "calls of functions compiled for AVX2; a token proves that it was detected")]

#[cfg(target_arch = "x86_64")]
use super::avx2;
use super::{Level, NonTemporalStores};
use crate::scale::Scale;

/// Proof that AVX2 and F16C were detected at run time. Its methods give the same bits as the portable kernels.
#[derive(Debug, Clone, Copy)]
pub struct Avx2Token {
    stream: bool,
}

impl Avx2Token {
    /// Returns a token for loops that write to `out`, with non-temporal stores if there is a `stream`.
    ///
    /// Returns `None` if the processor has no AVX2, or if there is a `stream` and `out` is not aligned to 16
    /// bytes.
    #[expect(clippy::inline_always, reason = "part of kernels")]
    #[inline(always)]
    pub(crate) fn new(level: Level, stream: Option<&NonTemporalStores>, out: &[f32]) -> Option<Self> {
        let stream = stream.is_some();
        (level.avx2 && (!stream || aligned(out))).then_some(Self { stream })
    }
}

/// Returns true if `out` is aligned for non-temporal stores of 16 bytes.
fn aligned(out: &[f32]) -> bool {
    out.as_ptr().addr().is_multiple_of(16)
}

/// Defines a method for each decoder. It decodes whole runs only, and returns the number of elements decoded
/// and whether one of their codes is invalid.
macro_rules! decoders {
    ($($(#[$doc:meta])* $name:ident($fit:ty), $run:literal;)*) => {
        #[cfg(target_arch = "x86_64")]
        impl Avx2Token {
            $($(#[$doc])*
            pub(crate) fn $name(self, fit: $fit, codes: &[u8], out: &mut [f32]) -> (usize, bool) {
                let stream = self.stream && aligned(out);
                let out = out.as_chunks_mut::<$run>().0;
                // SAFETY: an `Avx2Token` is made only where the processor has AVX2 and F16C; non-temporal
                // stores are used only if `out` is aligned.
                let refused = unsafe {
                    if stream {
                        avx2::$name::<true>(fit, codes, out)
                    } else {
                        avx2::$name::<false>(fit, codes, out)
                    }
                };
                ($run * out.len(), refused)
            })*
        }

        #[cfg(not(target_arch = "x86_64"))]
        impl Avx2Token {
            $(pub(crate) fn $name(self, _: $fit, _: &[u8], _: &mut [f32]) -> (usize, bool) {
                (0, false)
            })*
        }
    };
}

decoders! {
    /// Decodes binary16, little-endian.
    f16(()), 16;
    /// Decodes bfloat16, the upper halves of f32, little-endian.
    bf16(()), 16;
    /// Decodes codes of eight bits, multiplied by the scale. The code -128 is invalid.
    int8(Scale), 32;
    /// Decodes codes of four bits, multiplied by the scale. The code -8 is invalid.
    int4(Scale), 64;
    /// Decodes signs into the scale with that sign.
    sign(f32), 256;
}

/// Defines a method for each encoder of finite values. It encodes whole runs only, and returns the number of
/// elements encoded.
macro_rules! encoders {
    ($($name:ident, $lose:ident($fit:ty), $run:literal;)*) => {
        #[cfg(target_arch = "x86_64")]
        impl Avx2Token {
            $(pub(crate) fn $name(self, fit: $fit, values: FiniteValues<'_>, codes: &mut [u8]) -> usize {
                // SAFETY: an `Avx2Token` is made only where the processor has AVX2.
                unsafe {
                    match values {
                        FiniteValues::Read(x) => {
                            let x = x.as_chunks::<$run>().0;
                            avx2::$name(fit, x, codes);
                            $run * x.len()
                        }
                        FiniteValues::IntoResidual(v) => {
                            let v = v.as_chunks_mut::<$run>().0;
                            avx2::$lose(fit, v, codes);
                            $run * v.len()
                        }
                    }
                }
            })*
        }

        #[cfg(not(target_arch = "x86_64"))]
        impl Avx2Token {
            $(pub(crate) fn $name(self, _: $fit, _: FiniteValues<'_>, _: &mut [u8]) -> usize {
                0
            })*
        }
    };
}

encoders! {
    encode_int8, residual_int8(Scale), 32;
    encode_int4, residual_int4(Scale), 64;
    encode_sign, residual_sign(f32), 256;
}

/// Finite values to encode.
#[derive(Debug)]
pub enum FiniteValues<'a> {
    /// Values that are only read.
    Read(&'a [f32]),
    /// Values that are replaced by their quantization error.
    IntoResidual(&'a mut [f32]),
}

#[cfg(target_arch = "x86_64")]
impl Avx2Token {
    /// Encodes values as binary16, saturated. Returns the number of values encoded and their largest magnitude,
    /// as [`crate::magnitude::max_magnitude`].
    #[expect(clippy::unused_self, reason = "the token proves that AVX2 was detected")]
    pub(crate) fn encode_f16(self, x: &[f32], codes: &mut [u8]) -> (usize, i32) {
        let x = x.as_chunks::<8>().0;
        // SAFETY: an `Avx2Token` is made only where the processor has AVX2 and F16C.
        (8 * x.len(), unsafe { avx2::encode_f16(x, codes) })
    }
}

#[cfg(not(target_arch = "x86_64"))]
impl Avx2Token {
    pub(crate) fn encode_f16(self, _: &[f32], _: &mut [u8]) -> (usize, i32) {
        (0, 0)
    }
}
