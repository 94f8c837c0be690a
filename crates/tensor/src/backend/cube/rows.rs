//! Weighted sums of rows that are found by number, and products of rows with such rows.

use cubecl::prelude::*;

use super::block::block_sum;
use super::operand::Operand;
use super::{Cube, u32_of};
use crate::{Result, View, ViewMut};

impl Cube {
    /// Runs [`Op::CombineRows`](crate::Op::CombineRows) on `x` and numbers, factors and what is added.
    pub(super) fn combine_rows(
        &self,
        [x, rows]: [&View<'_>; 2],
        [factors, add]: [Option<&View<'_>>; 2],
        y: &ViewMut<'_>,
    ) -> Result<()> {
        let (len, cols) = (y.len(), y.shape().cols());
        if x.is_empty() || rows.is_empty() {
            let Some(add) = add else {
                let y = self.write(y)?;
                self.fill(&y, len, 0.0);
                self.write_back([y]);
                return Ok(());
            };
            return self.cast(add, y);
        }
        let [len_, cols_, each, bound] = [len, cols, rows.shape().cols(), x.len() / cols].map(u32_of);
        let read = |v: Option<&View<'_>>| v.map(|v| self.read(v)).transpose();
        let (x, rows, y) = (self.read(x)?, self.read(rows)?, self.write(y)?);
        let (factors, add) = (read(factors)?, read(add)?);
        let any = |operand: &Option<Operand>| operand.as_ref().unwrap_or(&x).arg();
        let (count, dim) = self.each(len);
        combine::launch(
            &self.client,
            count,
            dim,
            x.arg(),
            rows.arg(),
            any(&factors),
            any(&add),
            y.arg(),
            len_,
            cols_,
            each,
            bound,
            factors.is_some(),
            add.is_some(),
        );
        self.write_back([x, rows, y].into_iter().chain(factors).chain(add));
        Ok(())
    }

    /// Runs [`Op::RowDots`](crate::Op::RowDots) on `a`, `b` and numbers.
    pub(super) fn row_dots(&self, [a, b, rows]: [&View<'_>; 3], y: &ViewMut<'_>) -> Result<()> {
        let count = y.len();
        let y = self.write(y)?;
        if a.is_empty() || b.is_empty() {
            self.fill(&y, count, 0.0);
            self.write_back([y]);
            return Ok(());
        }
        let sizes = [count, a.shape().cols(), b.shape().rows()].map(u32_of);
        let ([a, b, rows], [len, cols, bound]) = ([self.read(a)?, self.read(b)?, self.read(rows)?], sizes);
        let (grid, dim) = self.row_each(count);
        let (first, second, numbers) = (a.arg(), b.arg(), rows.arg());
        dots::launch(&self.client, grid, dim, first, second, numbers, y.arg(), len, cols, bound, self.units);
        self.write_back([a, b, rows, y]);
        Ok(())
    }
}

/// Computes one element of `y[n] = add[n] + sum over j of factors[n, j] x[rows[n, j]]` per unit (thread).
/// Numbers that are not below `bound` add nothing.
#[cube(launch)]
pub(super) fn combine(
    x: &[f32],
    rows: &[u32],
    factors: &[f32],
    add: &[f32],
    y: &mut [f32],
    len: u32,
    cols: u32,
    each: u32,
    bound: u32,
    #[comptime] weighted: bool,
    #[comptime] adds: bool,
) {
    let at = ABSOLUTE_POS;
    if at < len as usize {
        let cols = cols as usize;
        let first = at / cols * each as usize;
        let mut sum = 0.0f32;
        if comptime!(adds) {
            sum = add[at];
        }
        for j in 0..each {
            let i = first + j as usize;
            let row = rows[i];
            if row < bound {
                let value = x[row as usize * cols + at % cols];
                if comptime!(weighted) {
                    sum += factors[i] * value;
                } else {
                    sum += value;
                }
            }
        }
        y[at] = sum;
    }
}

/// Computes the product of row `i` of `a` with row `rows[i]` of `b`, one cube (workgroup) per row.
#[cube(launch)]
pub(super) fn dots(
    a: &[f32],
    b: &[f32],
    rows: &[u32],
    y: &mut [f32],
    count: u32,
    cols: u32,
    bound: u32,
    #[comptime] units: u32,
) {
    let mut shared = Shared::<[f32]>::new_slice(units as usize);
    let row = CUBE_POS;
    if row < count as usize {
        let cols = cols as usize;
        let wanted = rows[row];
        let other = select(wanted < bound, wanted, 0u32) as usize;
        let mut sum = 0.0f32;
        let mut i = UNIT_POS as usize;
        while i < cols {
            sum += a[row * cols + i] * b[other * cols + i];
            i += units as usize;
        }
        let total = block_sum(&mut shared, sum, units);
        if UNIT_POS == 0 {
            y[row] = select(wanted < bound, total, 0.0);
        }
    }
}
