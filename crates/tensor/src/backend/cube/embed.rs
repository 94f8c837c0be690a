//! Embedding, and its gradient summed in token order.

use cubecl::prelude::*;

use super::positions::{Given, Places, PositionOperands};
use super::{Cube, u32_of};
use crate::op::TokenPositions;
use crate::{Result, TensorError, View, ViewMut};

impl Cube {
    /// `y` is not empty.
    pub(super) fn embed(
        &self,
        (tokens, first): (&View<'_>, Option<u32>),
        positions: &TokenPositions<'_>,
        tokens_table: &View<'_>,
        positions_table: Option<&View<'_>>,
        y: &ViewMut<'_>,
    ) -> Result<()> {
        let vocabulary = tokens_table.shape().rows();
        if vocabulary == 0 {
            return Err(TensorError::IdOutOfRange { op: "embed", id: 0, position: 0, bound: 0 });
        }
        let (len, cols) = (y.len(), y.shape().cols());
        let places = positions_table.map(|table| table.shape().rows());
        let at = PositionOperands::read(self, positions, y.shape().dims()[1], places)?;
        let (ids, table) = (self.read(tokens)?, self.read(tokens_table)?);
        let positions = positions_table.map(|table| self.read(table)).transpose()?;
        let y = self.write(y)?;
        if first.is_none() {
            self.check_ids("embed", &ids, tokens.len(), vocabulary);
        }
        let (count, dim) = self.each(len);
        gather::launch(
            &self.client,
            count,
            dim,
            ids.arg(),
            table.arg(),
            positions.as_ref().unwrap_or(&table).arg(),
            at.each(&ids),
            y.arg(),
            u32_of(len),
            u32_of(cols),
            u32_of(vocabulary),
            first.unwrap_or(0),
            at.places(),
            positions.is_some(),
            at.given,
        );
        self.write_back([ids, table, y].into_iter().chain(positions).chain(at.into_operand()));
        Ok(())
    }

    /// `dy` is not empty.
    pub(super) fn embed_grad(
        &self,
        (tokens, first): (&View<'_>, Option<u32>),
        positions: &TokenPositions<'_>,
        dy: &View<'_>,
        (d_tokens_table, d_positions_table): (&ViewMut<'_>, Option<ViewMut<'_>>),
    ) -> Result<()> {
        let vocabulary = d_tokens_table.shape().rows();
        let (rows, cols, length) = (dy.shape().rows(), dy.shape().cols(), dy.shape().dims()[1]);
        let places = d_positions_table.as_ref().map(|table| table.shape().rows());
        let at = PositionOperands::read(self, positions, length, places)?;
        // The rows that are written: of equal positions in all sequences, of all in documents, or any.
        let written = match at.given {
            Given::Nothing => at.start..at.start + length,
            Given::Starts => 0..at.start + length,
            Given::Positions => 0..at.rows,
        };
        let own = |all: ViewMut<'_>| self.write(&all.part(written.start * cols, [written.len(), cols])?);
        let (ids, dy) = (self.read(tokens)?, self.read(dy)?);
        let table = self.write(d_tokens_table)?;
        let positions = d_positions_table.map(own).transpose()?;
        if first.is_none() {
            self.check_ids("embed_grad", &ids, rows, vocabulary);
        }
        let (count, dim) = self.row_each(rows);
        let (client, n, c) = (&self.client, u32_of(rows), u32_of(cols));
        let (i, d, t, all) = (ids.arg(), dy.arg(), table.arg(), u32_of(vocabulary));
        scatter::launch(client, count, dim, i, d, t, n, c, all, first.unwrap_or(0), self.units);
        match (&positions, at.given) {
            (Some(to), Given::Starts | Given::Positions) => {
                let scratch = self.scratch(rows * 4)?;
                let each = Self::whole(&scratch);
                at.write(self, &ids, &each, rows);
                let (count, dim) = self.row_each(rows);
                let (i, d, t, all) = (each.arg(), dy.arg(), to.arg(), u32_of(written.len()));
                scatter::launch(client, count, dim, i, d, t, n, c, all, 0, self.units);
                self.pool.give(scratch);
            }
            (Some(to), Given::Nothing) => {
                let (count, dim) = self.each(length * cols);
                let (d, to) = (dy.arg(), to.arg());
                scatter_positions::launch(client, count, dim, d, to, n, c, u32_of(length));
            }
            (None, _) => {}
        }
        self.write_back([ids, dy, table].into_iter().chain(positions).chain(at.into_operand()));
        Ok(())
    }
}

/// Records the first id that is not below `bound` as `[op, id, position, bound]`, unless a fault is recorded
/// already. Runs in one cube (workgroup).
#[cube(launch)]
pub(super) fn check_ids(
    ids: &[u32],
    fault: &mut [u32],
    len: u32,
    bound: u32,
    op: u32,
    #[comptime] units: u32,
) {
    let mut shared = Shared::<[u32]>::new_slice(units as usize);
    let unit = UNIT_POS as usize;
    let mut first = len;
    let mut i = UNIT_POS;
    while i < len {
        if ids[i as usize] >= bound {
            first = u32::min(first, i);
        }
        i += units;
    }
    shared[unit] = first;
    sync_cube();
    if UNIT_POS == 0 {
        let mut least = len;
        for u in 0..units {
            least = u32::min(least, shared[u as usize]);
        }
        if least < len && fault[0] == 0 {
            fault[0] = op;
            fault[1] = ids[least as usize];
            fault[2] = least;
            fault[3] = bound;
        }
    }
}

/// Copies the ids' rows of the table, whose first row is that of id `first`, plus the rows of the positions if
/// `add`. `each` is what is `given` for each token.
#[cube(launch)]
fn gather(
    ids: &[u32],
    table: &[f32],
    positions: &[f32],
    each: &[u32],
    y: &mut [f32],
    len: u32,
    cols: u32,
    vocabulary: u32,
    first: u32,
    places: Places,
    #[comptime] add: bool,
    #[comptime] given: Given,
) {
    let at = ABSOLUTE_POS;
    if at < len as usize {
        let cols = cols as usize;
        let row = at / cols;
        let col = at % cols;
        // Of an id below `first` the difference wraps.
        let wanted = ids[row] - first;
        let inside = ids[row] >= first && wanted < vocabulary;
        let id = select(inside, wanted, 0u32) as usize;
        let value = select(inside, table[id * cols + col], 0.0);
        if comptime!(add) {
            let position = places.of(each, row as u32, given) as usize;
            y[at] = value + positions[position * cols + col];
        } else {
            y[at] = value;
        }
    }
}

/// Adds the rows of `dy` to their ids' rows of the table, whose first row is that of id `first`. The cube
/// (workgroup) of an id's first row sums all rows of that id, in order.
#[cube(launch)]
fn scatter(
    ids: &[u32],
    dy: &[f32],
    d_table: &mut [f32],
    rows: u32,
    cols: u32,
    vocabulary: u32,
    first: u32,
    #[comptime] units: u32,
) {
    let mut seen = Shared::<[u32]>::new_slice(units as usize);
    let row = CUBE_POS as u32;
    if row < rows {
        let id = ids[row as usize];
        let mut earlier = 0u32;
        let mut i = UNIT_POS;
        while i < row {
            earlier += u32::cast_from(ids[i as usize] == id);
            i += units;
        }
        seen[UNIT_POS as usize] = earlier;
        sync_cube();
        let mut before = 0u32;
        for u in 0..units {
            before += seen[u as usize];
        }
        // Of an id below `first` the difference wraps.
        let wanted = id - first;
        if before == 0 && id >= first && wanted < vocabulary {
            let mut col = UNIT_POS;
            while col < cols {
                let to = (wanted * cols + col) as usize;
                let mut sum = d_table[to];
                for r in row..rows {
                    if ids[r as usize] == id {
                        sum += dy[(r * cols + col) as usize];
                    }
                }
                d_table[to] = sum;
                col += units;
            }
        }
    }
}

/// Adds the rows of `dy` to their positions' rows of the table, in order.
#[cube(launch)]
fn scatter_positions(dy: &[f32], d_positions: &mut [f32], rows: u32, cols: u32, tokens: u32) {
    let at = ABSOLUTE_POS as u32;
    if at < tokens * cols {
        let mut sum = d_positions[ABSOLUTE_POS];
        let mut row = at / cols;
        while row < rows {
            sum += dy[(row * cols + at % cols) as usize];
            row += tokens;
        }
        d_positions[ABSOLUTE_POS] = sum;
    }
}
