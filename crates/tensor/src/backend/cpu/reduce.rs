//! Reductions in an order that depends only on the shape: sums of blocks of rows, then the sum of the blocks in
//! order.

use std::cell::Cell;
use std::ops::Range;

use super::pool::Pool;
use super::simd::{Isa, simd};
use crate::op::Op;

/// Number of rows per partial result.
const BLOCK: usize = 128;
/// Number of sums of squares that a thread computes at a time.
const CHUNKS: usize = 32;

thread_local! {
    /// Partial results of this thread's current reduction. The buffer is kept between calls.
    static PARTIALS: Cell<Vec<f32>> = const { Cell::new(Vec::new()) };
}

/// Sums the rows of a matrix with `width` columns, and writes the total to the slices `out` (or adds it), whose
/// lengths add up to `width`. `add(rows, sums)` adds a range of rows to `sums`.
pub(super) fn sum_rows_of<const N: usize>(
    pool: &Pool,
    rows: usize,
    width: usize,
    accumulate: bool,
    out: [&mut [f32]; N],
    add: impl Fn(Range<usize>, &mut [f32]) + Sync,
) {
    // Take the buffer instead of borrowing it: if the caller is a thread of another pool, it may start a second
    // reduction while it waits.
    let mut partials = PARTIALS.take();
    partials.clear();
    partials.resize(rows.div_ceil(BLOCK) * width, 0.0);
    pool.for_chunks([(&mut partials, width)], |t, [sums]| {
        add(t * BLOCK..((t + 1) * BLOCK).min(rows), sums);
    });
    let mut start = 0;
    for out in out {
        if !accumulate {
            out.fill(0.0);
        }
        for sums in partials.chunks_exact(width.max(1)) {
            for (o, s) in out.iter_mut().zip(&sums[start..]) {
                *o += s;
            }
        }
        start += out.len();
    }
    PARTIALS.set(partials);
}

simd! {
    fn add_rows<L: Level>(cols: usize, x: &[f32], sums: &mut [f32]) {
        let sums = &mut sums[..cols];
        for x in x.chunks_exact(cols) {
            for (s, x) in sums.iter_mut().zip(x) {
                *s += x;
            }
        }
    }
}

simd! {
    fn squares<L: Level>(x: &[f32]) -> f64 {
        let mut lanes = [0.0_f32; 32];
        let whole = x.len() / 32 * 32;
        for x in x[..whole].chunks_exact(32) {
            for (lane, x) in lanes.iter_mut().zip(x) {
                *lane = L::mul_add(*x, *x, *lane);
            }
        }
        for (lane, x) in lanes.iter_mut().zip(&x[whole..]) {
            *lane = L::mul_add(*x, *x, *lane);
        }
        lanes.iter().map(|&l| f64::from(l)).sum::<f64>()
    }
}

/// Sums each column of `x` into `y`, or adds the sums to `y`.
pub(super) fn sum_rows(pool: &Pool, x: &[f32], y: &mut [f32], accumulate: bool) {
    let (cols, isa) = (y.len(), Isa::detect());
    let rows = x.len().checked_div(cols).unwrap_or(0);
    sum_rows_of(pool, rows, cols, accumulate, [y], |rows, sums| {
        add_rows(isa, cols, &x[rows.start * cols..rows.end * cols], sums);
    });
}

/// Computes the sum of squares of each chunk of `x`.
pub(super) fn sum_squares(pool: &Pool, x: &[f32], partials: &mut [f32]) {
    let isa = Isa::detect();
    pool.for_chunks([(partials, CHUNKS)], |t, [out]| {
        let x = &x[t * CHUNKS * Op::SQUARES_CHUNK..];
        for (sum, x) in out.iter_mut().zip(x.chunks(Op::SQUARES_CHUNK)) {
            *sum = squares(isa, x) as f32;
        }
    });
}
