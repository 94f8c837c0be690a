//! Positions of tokens in their documents.

use super::IN_HOST;
use super::documents::starts;
use crate::op::TokenPositions;
use crate::{Result, TensorError};

/// Where the tokens of sequences of equal length are in their documents.
#[derive(Debug, Clone, Copy)]
pub(super) enum Positions<'a> {
    /// Tokens follow each other.
    From {
        /// Position of each sequence's first token.
        start: usize,
        /// Number of tokens of each sequence.
        len: usize,
        /// Where the document of each token begins; `None` for 0.
        documents: Option<&'a [u32]>,
    },
    /// The position of each token.
    At(&'a [u32]),
}

impl<'a> Positions<'a> {
    /// Reads the positions of sequences of `len` tokens, which are below `bound`, the number of rows of a
    /// table of positions, if there is one.
    ///
    /// Errors: [`TensorError::Documents`], [`TensorError::PositionOutOfRange`].
    pub(super) fn read(
        op: &'static str,
        positions: &TokenPositions<'a>,
        len: usize,
        bound: Option<usize>,
    ) -> Result<Self> {
        match positions {
            TokenPositions::From { start, documents } => {
                let documents = starts(op, documents.as_ref(), *start, len)?;
                Ok(Self::From { start: *start, len, documents })
            }
            TokenPositions::At(view) => {
                let all: &[u32] = view.host().expect(IN_HOST);
                if let Some(bound) = bound
                    && let Some(token) = all.iter().position(|&position| position as usize >= bound)
                {
                    return Err(TensorError::PositionOutOfRange { op, token, position: all[token], bound });
                }
                Ok(Self::At(all))
            }
        }
    }

    /// Returns the position of a token, counted over all sequences.
    pub(super) fn of(self, token: usize) -> usize {
        match self {
            Self::From { start, len, documents } => {
                start + token % len - documents.map_or(0, |documents| documents[token] as usize)
            }
            Self::At(all) => all[token] as usize,
        }
    }
}
