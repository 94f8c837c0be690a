//! The input of an encoder: plain values, or values plus the residual of error feedback.

use crate::CompressError;

/// Values to encode, plain or with the residual of earlier steps.
#[derive(Debug)]
pub enum Values<'a> {
    /// Plain values.
    Read(&'a [f32]),
    /// Values `x + e` with error feedback; the quantization error is written to `next`.
    Feedback {
        /// The input.
        x: &'a [f32],
        /// The residual of earlier steps.
        e: &'a [f32],
        /// The residual for the next step.
        next: &'a mut [f32],
    },
}

impl Values<'_> {
    /// Returns the number of values.
    #[expect(clippy::inline_always, reason = "part of kernels")]
    #[inline(always)]
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Read(x) | Self::Feedback { x, .. } => x.len(),
        }
    }

    #[expect(clippy::inline_always, reason = "part of kernels")]
    #[inline(always)]
    pub(crate) fn split_at(self, mid: usize) -> (Self, Self) {
        match self {
            Self::Read(x) => {
                let (a, b) = x.split_at(mid);
                (Self::Read(a), Self::Read(b))
            }
            Self::Feedback { x, e, next } => {
                let ((xa, xb), (ea, eb), (na, nb)) =
                    (x.split_at(mid), e.split_at(mid), next.split_at_mut(mid));
                (Self::Feedback { x: xa, e: ea, next: na }, Self::Feedback { x: xb, e: eb, next: nb })
            }
        }
    }

    /// Reborrows.
    pub(crate) fn reborrow(&mut self) -> Values<'_> {
        match self {
            Self::Read(x) => Values::Read(x),
            Self::Feedback { x, e, next } => Values::Feedback { x, e, next },
        }
    }

    /// Returns the error for the first value that is not finite, or else for the first element of `next` that
    /// is not finite.
    ///
    /// `offset` is the index of the first value in the whole vector.
    pub(crate) fn value_error(&self, offset: usize) -> CompressError {
        let value = |i: usize| match self {
            Self::Read(x) => x[i],
            Self::Feedback { x, e, .. } => x[i] + e[i],
        };
        if let Some(at) = (0..self.len()).find(|i| !value(*i).is_finite()) {
            return CompressError::NonFinite { index: offset + at, value: value(at) };
        }
        let lost = match self {
            Self::Read(_) => None,
            Self::Feedback { next, .. } => next.iter().position(|lost| !lost.is_finite()),
        };
        let at = lost.expect("the caller found a value that is not finite");
        CompressError::Overflow { index: offset + at, value: value(at), what: "its compression error" }
    }
}
