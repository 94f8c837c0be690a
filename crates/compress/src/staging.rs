//! A staging buffer for loops that write long vectors (decoded values, residuals): values are computed in a
//! small buffer that stays in the cache, then written to the vector with non-temporal stores, while the next
//! ones are computed. Does not depend on any codec.

use crate::simd::{Avx2Token, Level, NonTemporalStores};

/// Size of the buffer, in values.
const BUFFER: usize = 4096;

/// The buffer of a vector that is long enough for non-temporal stores; otherwise values are computed in place.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "it is made once for a vector, on the stack")]
pub(crate) enum StagingBuffer {
    /// Values are computed in the vector itself.
    InPlace,
    /// Values are computed here and then copied to the vector.
    Staged {
        /// The buffer.
        values: [f32; BUFFER],
        /// Writes to the vector with non-temporal stores.
        stream: NonTemporalStores,
    },
}

impl StagingBuffer {
    /// Returns the buffer for a vector of `len` values, of which at most `most` are computed at a time.
    pub(crate) fn new(level: Level, len: usize, most: usize) -> Self {
        match NonTemporalStores::for_len(level, len) {
            Some(stream) if most <= BUFFER => Self::Staged { values: [0.0; BUFFER], stream },
            _ => Self::InPlace,
        }
    }

    /// Returns the token with which AVX2 loops decode straight to `out`, or `None` as [`Avx2Token::new`] does.
    #[expect(clippy::inline_always, reason = "part of kernels")]
    #[inline(always)]
    pub(crate) fn avx2_token(&self, level: Level, out: &[f32]) -> Option<Avx2Token> {
        let stream = match self {
            Self::InPlace => None,
            Self::Staged { stream, .. } => Some(stream),
        };
        Avx2Token::new(level, stream, out)
    }

    /// Returns where to compute the values of `out`, and how to copy them there.
    #[expect(clippy::inline_always, reason = "part of kernels")]
    #[inline(always)]
    pub(crate) fn target<'a>(&'a mut self, out: &'a mut [f32]) -> (&'a mut [f32], CopyBack<'a>) {
        match self {
            Self::InPlace => (out, CopyBack(None)),
            Self::Staged { values, stream } => (&mut values[..out.len()], CopyBack(Some((stream, out)))),
        }
    }
}

/// Copies values from the staging buffer to the vector.
pub(crate) struct CopyBack<'a>(Option<(&'a NonTemporalStores, &'a mut [f32])>);

impl CopyBack<'_> {
    /// Copies computed values to index `at` of the vector; does nothing if they were computed in place.
    #[expect(clippy::inline_always, reason = "part of kernels")]
    #[inline(always)]
    pub(crate) fn write(&mut self, at: usize, values: &[f32]) {
        if let Some((stream, out)) = &mut self.0 {
            stream.copy(values, &mut out[at..][..values.len()]);
        }
    }
}
