//! Matrix products one register tile high, and packing of their right operands.
#![expect(
    unsafe_code,
    reason = "vector instructions and unchecked indexing; each entry point checks its bounds"
)]

use std::ops::Range;

use super::super::simd::{Isa, simd};
use super::super::tile::{Tile, Update, prefetch};
use super::super::vector::{LANES, Vector};
use super::rows::{Rows, RowsMut};

/// Left operand of a product: element (i, k) is at `i * row + k * col`.
#[derive(Clone, Copy)]
pub(super) struct Left<'a> {
    pub(super) data: &'a [f32],
    pub(super) row: usize,
    pub(super) col: usize,
}

/// Right operand of a product, in panels as wide as a tile: element (k, j) is at
/// `j / width * panel + k * width + j % width`.
#[derive(Clone, Copy)]
pub(super) struct Right<'a> {
    pub(super) data: &'a [f32],
    pub(super) panel: usize,
}

/// Sizes of a product.
#[derive(Clone, Copy)]
pub(super) struct Size {
    /// At most the rows of a tile.
    pub(super) rows: usize,
    /// Number of terms of each sum.
    pub(super) depth: usize,
    pub(super) columns: usize,
}

/// Computes `A B`, one row of tiles, and updates C. Panics if an operand is too short.
pub(super) fn multiply(isa: Isa, size: Size, a: Left<'_>, b: Right<'_>, c: RowsMut<'_>, update: Update<'_>) {
    let (full, Size { rows, depth, columns }) = (isa.tile(), size);
    assert!(
        (1..=full.rows).contains(&rows) && depth > 0 && columns > 0,
        "a product must have 1 to a tile's number of rows, and a depth and columns above 0"
    );
    assert!((rows - 1) * a.row + (depth - 1) * a.col < a.data.len(), "A is too short");
    let panels = columns.div_ceil(full.columns);
    assert!((panels - 1) * b.panel + depth * full.columns <= b.data.len(), "B is too short");
    assert!(a.row == 1 || a.col == 1, "A must be contiguous in one direction");
    let by_columns = a.col != 1;
    let (c, c_stride) = { c }.span(rows, columns);
    let b_at = b.data.as_ptr().cast_mut();
    let mut tile = Tile {
        k: depth,
        a: a.data.as_ptr(),
        a_stride: if by_columns { a.col } else { a.row },
        b: b_at,
        b_from: b_at,
        b_stride: full.columns,
        c,
        c_stride,
        columns: full.columns,
        update,
    };
    for panel in 0..panels {
        tile.columns = (columns - panel * full.columns).min(full.columns);
        // SAFETY: the operands are long enough, as checked above; kernels only read B.
        unsafe {
            tile.b = b_at.add(panel * b.panel);
            tile.c = c.add(panel * full.columns);
            isa.kernel(rows, tile.columns.div_ceil(full.lanes()), by_columns)(&tile);
        }
    }
}

/// Number of rows to prefetch ahead. The rows of a head are strided, and the CPU does not predict them.
const AHEAD: usize = 12;

simd! {
    /// Copies rows into panels of a right operand, `wide` columns each and `panel` apart. Missing columns of
    /// the last panel are zero.
    pub(super) fn pack<L: Level + Vector>(
        from: Rows<'_>, rows: &Range<usize>, panels: &mut [f32], wide: usize, panel: usize,
    ) {
        let Rows { stride, width, .. } = from;
        let src = from.span(rows);
        assert!(wide.is_multiple_of(LANES), "panels must be a whole number of vectors wide");
        assert!((width.div_ceil(wide) - 1) * panel + rows.len() * wide <= panels.len(), "the panels are too short");
        let dst = panels.as_mut_ptr();
        for t in 0..rows.len() {
            from.lines(rows.start + t + AHEAD).for_each(prefetch);
            for (p, start) in (0..width).step_by(wide).enumerate() {
                for j in (0..wide).step_by(LANES) {
                    let here = width.saturating_sub(start + j).min(LANES);
                    // SAFETY: the rows and the panels are long enough, as checked; this function is compiled
                    // for the level.
                    unsafe {
                        let src = src.as_ptr().wrapping_add(t * stride + start + j);
                        let dst = dst.add(p * panel + t * wide + j);
                        if here == LANES {
                            L::store(dst, L::load(src));
                        } else {
                            dst.copy_from_nonoverlapping(src, here);
                            dst.add(here).write_bytes(0, LANES - here);
                        }
                    }
                }
            }
        }
    }
}

simd! {
    /// Copies at most `wide` rows into the columns of one panel of a right operand. Missing columns are zero.
    pub(super) fn pack_transposed<L: Level + Vector>(from: Rows<'_>, rows: &Range<usize>, panel: &mut [f32], wide: usize) {
        let Rows { stride, width, .. } = from;
        let src = from.span(rows);
        let panel = &mut panel[..width * wide];
        assert!(wide.is_multiple_of(LANES), "panels must be a whole number of vectors wide");
        for t in (0..wide).step_by(LANES) {
            let here = rows.len().saturating_sub(t).min(LANES);
            for i in 0..LANES {
                from.lines(rows.start + t + wide + i).for_each(prefetch);
            }
            let whole = if here == LANES { width / LANES * LANES } else { 0 };
            for j in (0..whole).step_by(LANES) {
                // SAFETY: eight rows from `t` on are in bounds, and the panel has `width` rows; this function
                // is compiled for the level.
                unsafe {
                    L::transpose(src.as_ptr().add(t * stride + j), stride, panel.as_mut_ptr().add(j * wide + t), wide);
                }
            }
            for j in whole..width {
                for i in 0..LANES {
                    panel[j * wide + t + i] = if i < here { src[(t + i) * stride + j] } else { 0.0 };
                }
            }
        }
    }
}
