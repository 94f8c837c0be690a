//! Positions of tokens, and what depends on them.

use crate::View;

/// Positions of an op's tokens, counted from where their documents begin.
#[derive(Debug, Clone, Copy)]
pub enum TokenPositions<'a> {
    /// Tokens follow each other.
    From {
        /// Position of each sequence's first token.
        start: usize,
        /// Where documents begin: a token's position is counted from there.
        documents: Option<View<'a>>,
    },
    /// u32 `[B, T]`: the position of each token. The CPU rejects one that the table of positions does not
    /// have ([`TensorError::PositionOutOfRange`](crate::TensorError::PositionOutOfRange)); GPUs take it as
    /// the table's last.
    At(View<'a>),
}

/// Rotary position embedding (Su et al. 2021) of the first `R` values of each head of queries and keys: the
/// pair `(x[i], x[i + R / 2])` is rotated by the angle of pair `i` at the token's position.
#[derive(Debug, Clone, Copy)]
pub struct Rotary<'a> {
    /// `[positions, R]`: of each position, `R / 2` cosines and then as many sines.
    pub table: View<'a>,
    /// Positions of the tokens.
    pub positions: TokenPositions<'a>,
}
