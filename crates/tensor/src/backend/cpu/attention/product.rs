//! Matrix products held in registers, a tile of at most [`MR`] by [`NR`] at a time, and the panels that they read.
//! It refuses to know heads, masks and where tensors live.
#![expect(
    unsafe_code,
    reason = "vector instructions and unchecked indexing; each entry point checks its bounds"
)]
#![expect(clippy::inline_always, reason = "vector code must take the target features of its caller")]

use std::ops::Range;

use super::super::simd::simd;
use super::super::vector::{LANES, Vector};
use super::rows::{Rows, RowsMut};

/// Rows of a full tile.
pub(super) const MR: usize = 6;
/// Columns of a tile.
pub(super) const NR: usize = 2 * LANES;

/// Calls a function that is generic over a level and the rows of a tile.
macro_rules! by_rows {
    ($rows:expr, $f:ident::<$level:ident>($($arg:expr),* $(,)?)) => {
        match $rows {
            6 => $f::<$level, 6>($($arg),*),
            5 => $f::<$level, 5>($($arg),*),
            4 => $f::<$level, 4>($($arg),*),
            3 => $f::<$level, 3>($($arg),*),
            2 => $f::<$level, 2>($($arg),*),
            _ => $f::<$level, 1>($($arg),*),
        }
    };
}

/// The left operand of a product: element (i, k) is at `i * row + k * col`.
#[derive(Clone, Copy)]
pub(super) struct Left<'a> {
    pub(super) data: &'a [f32],
    pub(super) row: usize,
    pub(super) col: usize,
}

/// The right operand, in panels of [`NR`] columns: element (k, j) is at `j / NR * panel + k * NR + j % NR`.
#[derive(Clone, Copy)]
pub(super) struct Right<'a> {
    pub(super) data: &'a [f32],
    pub(super) panel: usize,
}

/// Sizes of a product.
#[derive(Clone, Copy)]
pub(super) struct Size {
    /// At most [`MR`].
    pub(super) rows: usize,
    /// Terms of each sum.
    pub(super) depth: usize,
    pub(super) columns: usize,
}

impl Size {
    /// Where the operands begin; panics unless they hold what a product of this size reads.
    fn check(self, a: Left<'_>, b: Right<'_>) -> (*const f32, *const f32) {
        let Self { rows, depth, columns } = self;
        assert!((1..=MR).contains(&rows) && depth > 0 && columns > 0, "a product has a size");
        assert!((rows - 1) * a.row + (depth - 1) * a.col < a.data.len(), "A is too short");
        assert!((columns.div_ceil(NR) - 1) * b.panel + depth * NR <= b.data.len(), "B is too short");
        (a.data.as_ptr(), b.data.as_ptr())
    }
}

/// `R` rows of `A B` and the columns of one panel: one chain of multiply-adds for each element, in ascending k.
///
/// # Safety
/// As [`Vector`]; both operands are valid for `k`.
#[inline(always)]
unsafe fn tile<L: Vector, const R: usize>(
    a: *const f32,
    (row, col): (usize, usize),
    b: *const f32,
    k: usize,
) -> [[L::V; 2]; R] {
    // SAFETY: the caller's promise.
    unsafe {
        let mut acc = [[L::splat(0.0); 2]; R];
        let rows: [*const f32; R] = std::array::from_fn(|i| a.wrapping_add(i * row));
        let mut at = 0;
        while at + 2 <= k {
            step::<L, R>(&mut acc, &rows, at * col, b.add(at * NR));
            step::<L, R>(&mut acc, &rows, (at + 1) * col, b.add((at + 1) * NR));
            at += 2;
        }
        if at < k {
            step::<L, R>(&mut acc, &rows, at * col, b.add(at * NR));
        }
        acc
    }
}

/// One k: a column of A times a row of B.
#[inline(always)]
unsafe fn step<L: Vector, const R: usize>(
    acc: &mut [[L::V; 2]; R],
    rows: &[*const f32; R],
    a: usize,
    b: *const f32,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let (b0, b1) = (L::load(b), L::load(b.add(LANES)));
        for (acc, row) in acc.iter_mut().zip(rows) {
            let x = L::splat(*row.add(a));
            acc[0] = L::fma(x, b0, acc[0]);
            acc[1] = L::fma(x, b1, acc[1]);
        }
    }
}

simd! {
    /// `C = A B`, written up to the end of the last panel that `columns` reach into.
    pub(super) fn multiply<L: Level + Vector>(size: Size, a: Left<'_>, b: Right<'_>, c: RowsMut<'_>) {
        #[inline(always)]
        unsafe fn rows<L: Vector, const R: usize>(
            size: Size,
            (a, strides): (*const f32, (usize, usize)),
            (b, panel): (*const f32, usize),
            (c, c_row): (*mut f32, usize),
        ) {
            for p in 0..size.columns.div_ceil(NR) {
                // SAFETY: the caller's promise.
                unsafe {
                    let acc = tile::<L, R>(a, strides, b.add(p * panel), size.depth);
                    for (i, acc) in acc.into_iter().enumerate() {
                        let c = c.add(i * c_row + p * NR);
                        L::store(c, acc[0]);
                        L::store(c.add(LANES), acc[1]);
                    }
                }
            }
        }
        let (at_a, at_b) = size.check(a, b);
        let c = { c }.span(size.rows, size.columns.next_multiple_of(NR));
        let (b, row) = ((at_b, b.panel), a.row);
        // SAFETY: the operands hold what is read and written; this function is compiled for the level.
        unsafe {
            assert!(a.col == 1, "rows of A are contiguous");
            by_rows!(size.rows, rows::<L>(size, (at_a, (row, 1)), b, c));
        }
    }
}

/// What becomes of a row of C when a product is added to it.
#[derive(Clone, Copy)]
pub(super) struct Share {
    /// What the row is multiplied by.
    pub(super) old: f32,
    /// What the product's row is multiplied by.
    pub(super) new: f32,
}

/// Blends a row of a tile into a row of C.
///
/// # Safety
/// As [`Vector`]; `c` is valid for the row.
#[inline(always)]
unsafe fn put<L: Vector>(row: [L::V; 2], c: *mut f32, overwrite: bool, share: Share) {
    // SAFETY: the caller's promise.
    unsafe {
        for (i, v) in row.into_iter().enumerate() {
            let c = c.add(i * LANES);
            let v = L::mul(L::splat(share.new), v);
            L::store(c, if overwrite { v } else { L::fma(L::splat(share.old), L::load(c), v) });
        }
    }
}

simd! {
    /// `C = old C + new A B`, with factors for each row, or `C = new A B` where `C` holds nothing yet.
    pub(super) fn blend<L: Level + Vector>(
        size: Size,
        a: Left<'_>,
        b: Right<'_>,
        c: RowsMut<'_>,
        overwrite: bool,
        shares: &[Share; MR],
    ) {
        #[inline(always)]
        unsafe fn rows<L: Vector, const R: usize>(
            size: Size,
            (a, strides): (*const f32, (usize, usize)),
            (b, panel): (*const f32, usize),
            (c, c_row): (*mut f32, usize),
            overwrite: bool,
            shares: &[Share; MR],
        ) {
            for j in (0..size.columns).step_by(NR) {
                let width = (size.columns - j).min(NR);
                // SAFETY: the caller's promise; a part of a row of a tile goes through a whole one.
                unsafe {
                    let acc = tile::<L, R>(a, strides, b.add(j / NR * panel), size.depth);
                    for (i, (acc, share)) in acc.into_iter().zip(shares).enumerate() {
                        let c = c.add(i * c_row + j);
                        if width == NR {
                            put::<L>(acc, c, overwrite, *share);
                        } else {
                            let mut part = [0.0; NR];
                            part.as_mut_ptr().copy_from_nonoverlapping(c, width);
                            put::<L>(acc, part.as_mut_ptr(), overwrite, *share);
                            c.copy_from_nonoverlapping(part.as_ptr(), width);
                        }
                    }
                }
            }
        }
        let (at_a, at_b) = size.check(a, b);
        let c = { c }.span(size.rows, size.columns);
        let b = (at_b, b.panel);
        // SAFETY: the operands hold what is read and written; this function is compiled for the level.
        unsafe {
            // The stride that is known to be 1 makes for shorter loops.
            if a.col == 1 {
                by_rows!(size.rows, rows::<L>(size, (at_a, (a.row, 1)), b, c, overwrite, shares));
            } else {
                assert!(a.row == 1, "A is contiguous in one direction");
                by_rows!(size.rows, rows::<L>(size, (at_a, (1, a.col)), b, c, overwrite, shares));
            }
        }
    }
}

/// Rows between the one that is copied and the one that is asked for: rows of a head lie apart, and the CPU does not see
/// that they follow.
const AHEAD: usize = 12;

/// Asks for a row.
///
/// # Safety
/// As [`Vector`], but the row need not be there.
#[inline(always)]
unsafe fn fetch<L: Vector>(row: *const f32, width: usize) {
    for j in (0..width).step_by(NR) {
        // SAFETY: the caller's promise.
        unsafe { L::prefetch(row.wrapping_add(j)) };
    }
}

simd! {
    /// Copies rows into panels of a right operand, `panel` apart; columns that are missing from the last panel are zero.
    pub(super) fn pack<L: Level + Vector>(from: Rows<'_>, rows: &Range<usize>, panels: &mut [f32], panel: usize) {
        let Rows { stride, width, .. } = from;
        let src = from.span(rows);
        assert!((width.div_ceil(NR) - 1) * panel + rows.len() * NR <= panels.len(), "the panels are too short");
        let dst = panels.as_mut_ptr();
        for t in 0..rows.len() {
            // SAFETY: this function is compiled for the level.
            unsafe { fetch::<L>(src.as_ptr().wrapping_add((t + AHEAD) * stride), width) };
            for j in (0..width).step_by(NR) {
                let here = (width - j).min(NR);
                // SAFETY: the rows are there, and the panels hold them; this function is compiled for the level.
                unsafe {
                    let (src, dst) = (src.as_ptr().add(t * stride + j), dst.add(j / NR * panel + t * NR));
                    if here == NR {
                        L::store(dst, L::load(src));
                        L::store(dst.add(LANES), L::load(src.add(LANES)));
                    } else {
                        dst.copy_from_nonoverlapping(src, here);
                        dst.add(here).write_bytes(0, NR - here);
                    }
                }
            }
        }
    }
}

simd! {
    /// Copies at most [`NR`] rows into the columns of one panel of a right operand; columns that are missing are zero.
    pub(super) fn pack_transposed<L: Level + Vector>(from: Rows<'_>, rows: &Range<usize>, panel: &mut [f32]) {
        let Rows { stride, width, .. } = from;
        let src = from.span(rows);
        let panel = &mut panel[..width * NR];
        for t in (0..NR).step_by(LANES) {
            let here = rows.len().saturating_sub(t).min(LANES);
            for i in 0..LANES {
                // SAFETY: this function is compiled for the level.
                unsafe { fetch::<L>(src.as_ptr().wrapping_add((t + NR + i) * stride), width) };
            }
            let whole = if here == LANES { width / LANES * LANES } else { 0 };
            for j in (0..whole).step_by(LANES) {
                // SAFETY: eight rows from `t` on are there, and the panel has `width` of them; this function is compiled
                // for the level.
                unsafe {
                    L::transpose(src.as_ptr().add(t * stride + j), stride, panel.as_mut_ptr().add(j * NR + t), NR);
                }
            }
            for j in whole..width {
                for i in 0..LANES {
                    panel[j * NR + t + i] = if i < here { src[(t + i) * stride + j] } else { 0.0 };
                }
            }
        }
    }
}
