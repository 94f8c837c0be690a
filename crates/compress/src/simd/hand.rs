//! Leave to encode and decode in a processor's own instructions, where it has them.
#![expect(unsafe_code, reason = "functions for instructions that a Hand vouches for")]

#[cfg(target_arch = "x86_64")]
use super::avx2;
use super::{Level, Stream};
use crate::int::Scale;

/// Leave to use the loops that are written for one processor, which are nothing but x86-64's with AVX2. They
/// give the same bits as the kernels.
#[derive(Debug, Clone, Copy)]
pub struct Hand {
    stream: bool,
}

impl Hand {
    /// For values that begin at `out`, and are stored past the caches if there is a stream: `None` if the
    /// processor has no such loops, or cannot store there.
    #[expect(clippy::inline_always, reason = "part of kernels")]
    #[inline(always)]
    pub(crate) fn new(level: Level, stream: Option<&Stream>, out: &[f32]) -> Option<Self> {
        let stream = stream.is_some();
        (level.avx2 && (!stream || aligned(out))).then_some(Self { stream })
    }
}

/// Whether half a register can be stored there past the caches.
fn aligned(out: &[f32]) -> bool {
    out.as_ptr().addr().is_multiple_of(16)
}

/// Gives each decoder its method: how many elements it decoded, which are all but a run that is not full, and
/// whether a code of these is refused.
macro_rules! decoders {
    ($($(#[$doc:meta])* $name:ident($fit:ty), $run:literal;)*) => {
        #[cfg(target_arch = "x86_64")]
        impl Hand {
            $($(#[$doc])*
            pub(crate) fn $name(self, fit: $fit, codes: &[u8], out: &mut [f32]) -> (usize, bool) {
                let stream = self.stream && aligned(out);
                let out = out.as_chunks_mut::<$run>().0;
                // SAFETY: a `Hand` is made only where the processor has AVX2 and F16C; what is streamed is
                // aligned.
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
        impl Hand {
            $(pub(crate) fn $name(self, _: $fit, _: &[u8], _: &mut [f32]) -> (usize, bool) {
                (0, false)
            })*
        }
    };
}

decoders! {
    /// Binary16, little-endian.
    f16(()), 16;
    /// The upper halves of f32, little-endian.
    bf16(()), 16;
    /// Codes of eight bits times the scale; -128 is refused.
    int8(Scale), 32;
    /// Runs of codes of four bits times the scale; -8 is refused.
    int4(Scale), 64;
    /// Runs of signs of the scale.
    sign(f32), 256;
}

/// Gives each encoder its method, for finite values: how many it encoded, which are all but a run that is not
/// full.
macro_rules! encoders {
    ($($name:ident, $lose:ident($fit:ty), $run:literal;)*) => {
        #[cfg(target_arch = "x86_64")]
        impl Hand {
            $(pub(crate) fn $name(self, fit: $fit, values: Lossy<'_>, codes: &mut [u8]) -> usize {
                // SAFETY: a `Hand` is made only where the processor has AVX2.
                unsafe {
                    match values {
                        Lossy::Read(x) => {
                            let x = x.as_chunks::<$run>().0;
                            avx2::$name(fit, x, codes);
                            $run * x.len()
                        }
                        Lossy::Lose(v) => {
                            let v = v.as_chunks_mut::<$run>().0;
                            avx2::$lose(fit, v, codes);
                            $run * v.len()
                        }
                    }
                }
            })*
        }

        #[cfg(not(target_arch = "x86_64"))]
        impl Hand {
            $(pub(crate) fn $name(self, _: $fit, _: Lossy<'_>, _: &mut [u8]) -> usize {
                0
            })*
        }
    };
}

encoders! {
    encode_int8, lose_int8(Scale), 32;
    encode_int4, lose_int4(Scale), 64;
    encode_sign, lose_sign(f32), 256;
}

/// Finite values to be encoded.
#[derive(Debug)]
pub enum Lossy<'a> {
    /// That stay.
    Read(&'a [f32]),
    /// That become what their codes do not say.
    Lose(&'a mut [f32]),
}

#[cfg(target_arch = "x86_64")]
impl Hand {
    /// Binary16 of values, saturated: how many it encoded, and the largest magnitude among these as
    /// [`crate::chunked::max_magnitude`] gives it.
    #[expect(clippy::unused_self, reason = "whoever has a Hand may")]
    pub(crate) fn encode_f16(self, x: &[f32], codes: &mut [u8]) -> (usize, i32) {
        let x = x.as_chunks::<8>().0;
        // SAFETY: a `Hand` is made only where the processor has AVX2 and F16C.
        (8 * x.len(), unsafe { avx2::encode_f16(x, codes) })
    }
}

#[cfg(not(target_arch = "x86_64"))]
impl Hand {
    pub(crate) fn encode_f16(self, _: &[f32], _: &mut [u8]) -> (usize, i32) {
        (0, 0)
    }
}
