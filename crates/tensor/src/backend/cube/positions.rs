//! Positions of tokens in their documents.

use cubecl::prelude::*;

use super::operand::Operand;
use super::{Cube, u32_of};
use crate::Result;
use crate::op::TokenPositions;

/// What a kernel is given for each token, as a compile-time argument.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Given {
    Nothing,
    /// Where its document begins.
    Starts,
    /// Its position.
    Positions,
}

/// Where the tokens of sequences are.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(super) struct Places {
    /// Number of tokens of each sequence, and the position of the first.
    tokens: u32,
    start: u32,
    /// Greatest position.
    last: u32,
}

#[cube]
impl Places {
    /// Returns the position of a token, counted over all sequences.
    pub(super) fn of(&self, each: &[u32], token: u32, #[comptime] given: Given) -> u32 {
        let mut position = self.start + token % self.tokens;
        if comptime!(given == Given::Starts) {
            position -= u32::min(each[token as usize], position);
        }
        if comptime!(given == Given::Positions) {
            position = u32::min(each[token as usize], self.last);
        }
        position
    }
}

/// Writes the position of each of `count` tokens.
#[cube(launch)]
fn positions(each: &[u32], to: &mut [u32], count: u32, places: Places, #[comptime] given: Given) {
    let at = ABSOLUTE_POS as u32;
    if at < count {
        to[ABSOLUTE_POS] = places.of(each, at, given);
    }
}

/// Positions as operands of kernels.
pub(super) struct PositionOperands {
    pub(super) given: Given,
    each: Option<Operand>,
    tokens: usize,
    /// Position of each sequence's first token.
    pub(super) start: usize,
    /// Number of rows of the table of positions.
    pub(super) rows: usize,
}

impl PositionOperands {
    /// `tokens` is the number of tokens of each sequence, and `rows` that of the table of positions. Without
    /// a table nothing is read.
    pub(super) fn read(
        cube: &Cube,
        positions: &TokenPositions<'_>,
        tokens: usize,
        rows: Option<usize>,
    ) -> Result<Self> {
        let Some(rows) = rows else { return Ok(Self::none(tokens)) };
        let (given, each, start) = match positions {
            TokenPositions::From { start, documents: None } => (Given::Nothing, None, *start),
            TokenPositions::From { start, documents: Some(starts) } => {
                (Given::Starts, Some(cube.read(starts)?), *start)
            }
            TokenPositions::At(positions) => (Given::Positions, Some(cube.read(positions)?), 0),
        };
        Ok(Self { given, each, tokens, start, rows })
    }

    /// Those of tokens whose positions no kernel reads.
    pub(super) const fn none(tokens: usize) -> Self {
        Self { given: Given::Nothing, each: None, tokens, start: 0, rows: 0 }
    }

    /// Returns the sizes.
    pub(super) fn places(&self) -> PlacesLaunch {
        let [tokens, start, last] = [self.tokens, self.start, self.rows.saturating_sub(1)].map(u32_of);
        PlacesLaunch::new(tokens, start, last)
    }

    /// Returns the argument for what is given for each token: `other`, which no kernel reads as such, if
    /// nothing is.
    pub(super) fn each(&self, other: &Operand) -> BufferArg {
        self.each.as_ref().unwrap_or(other).arg()
    }

    /// Writes the position of each of `count` tokens to `to`; `other` as in [`each`](Self::each).
    pub(super) fn write(&self, cube: &Cube, other: &Operand, to: &Operand, count: usize) {
        let (grid, dim) = cube.each(count);
        let (each, n) = (self.each(other), u32_of(count));
        positions::launch(&cube.client, grid, dim, each, to.arg(), n, self.places(), self.given);
    }

    /// Returns the operand, to be released.
    pub(super) fn into_operand(self) -> Option<Operand> {
        self.each
    }
}
