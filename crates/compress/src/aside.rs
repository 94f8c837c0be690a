//! A place beside a long vector, where its values are made before they are written past the caches, a few at a
//! time: while the memory takes some, the next ones are computed. Knows no codec.

use crate::simd::{Hand, Level, Stream};

/// The most values that are made at a time.
const ASIDE: usize = 4096;

/// The place, if the vector is long enough; else values are made where they belong.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "it is made once for a vector, on the stack")]
pub(crate) enum Aside {
    /// Values are made in place.
    Not,
    /// Values are made here.
    There {
        /// The memory.
        values: [f32; ASIDE],
        /// The way from here to the vector.
        stream: Stream,
    },
}

impl Aside {
    /// For a vector of so many elements, of which at most so many are made at a time.
    pub(crate) fn new(level: Level, len: usize, most: usize) -> Self {
        match Stream::for_len(level, len) {
            Some(stream) if most <= ASIDE => Self::There { values: [0.0; ASIDE], stream },
            _ => Self::Not,
        }
    }

    /// Leave to decode straight to `out` by hand.
    #[expect(clippy::inline_always, reason = "part of kernels")]
    #[inline(always)]
    pub(crate) fn hand(&self, level: Level, out: &[f32]) -> Option<Hand> {
        let stream = match self {
            Self::Not => None,
            Self::There { stream, .. } => Some(stream),
        };
        Hand::new(level, stream, out)
    }

    /// Where to make the values of `out`, and the way from there.
    #[expect(clippy::inline_always, reason = "part of kernels")]
    #[inline(always)]
    pub(crate) fn lend<'a>(&'a mut self, out: &'a mut [f32]) -> (&'a mut [f32], Way<'a>) {
        match self {
            Self::Not => (out, Way(None)),
            Self::There { values, stream } => (&mut values[..out.len()], Way(Some((stream, out)))),
        }
    }
}

/// How values get from aside to their place.
pub(crate) struct Way<'a>(Option<(&'a Stream, &'a mut [f32])>);

impl Way<'_> {
    /// Copies values that are done and belong at `at`, unless they were made there.
    #[expect(clippy::inline_always, reason = "part of kernels")]
    #[inline(always)]
    pub(crate) fn take(&mut self, at: usize, values: &[f32]) {
        if let Some((stream, out)) = &mut self.0 {
            stream.copy(values, &mut out[at..][..values.len()]);
        }
    }
}
