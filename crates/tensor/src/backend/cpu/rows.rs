//! Weighted sums of rows that are found by number, and products of rows with such rows.

use super::parts::rows_per_task;
use super::pool::Pool;
use super::simd::{Isa, simd};

simd! {
    fn add_row<L: Level>(factor: f32, x: &[f32], y: &mut [f32]) {
        for (y, x) in y.iter_mut().zip(x) {
            *y = L::mul_add(factor, *x, *y);
        }
    }
}

simd! {
    fn dot<L: Level>(a: &[f32], b: &[f32]) -> f32 {
        let mut lanes = [0.0_f32; 32];
        let whole = a.len() / 32 * 32;
        for (a, b) in a[..whole].chunks_exact(32).zip(b.chunks_exact(32)) {
            for ((lane, a), b) in lanes.iter_mut().zip(a).zip(b) {
                *lane = L::mul_add(*a, *b, *lane);
            }
        }
        for ((lane, a), b) in lanes.iter_mut().zip(&a[whole..]).zip(&b[whole..]) {
            *lane = L::mul_add(*a, *b, *lane);
        }
        lanes.iter().sum()
    }
}

/// Returns row `index` of a matrix; `None` if it has no such row.
fn row(x: &[f32], cols: usize, index: u32) -> Option<&[f32]> {
    x.get((index as usize).checked_mul(cols)?..)?.get(..cols)
}

/// Computes `y[n] = add[n] + sum over j of factors[n, j] x[rows[n, j]]`. `each` is the number of rows that are
/// summed.
pub(super) fn combine(
    pool: &Pool,
    x: &[f32],
    (rows, each): (&[u32], usize),
    factors: Option<&[f32]>,
    add: Option<&[f32]>,
    y: &mut [f32],
) {
    let (cols, isa) = ((y.len() * each).checked_div(rows.len()).unwrap_or(0), Isa::detect());
    if cols == 0 {
        return;
    }
    let of_task = rows_per_task(cols);
    pool.for_chunks([(y, of_task * cols)], |t, [y]| {
        for (r, y) in y.chunks_exact_mut(cols).enumerate() {
            let n = t * of_task + r;
            match add {
                Some(add) => y.copy_from_slice(&add[n * cols..][..cols]),
                None => y.fill(0.0),
            }
            for (i, &index) in rows.iter().enumerate().skip(n * each).take(each) {
                if let Some(x) = row(x, cols, index) {
                    add_row(isa, factors.map_or(1.0, |factors| factors[i]), x, y);
                }
            }
        }
    });
}

/// Computes `y[i]`, the product of row `i` of `a` with row `rows[i]` of `b`.
pub(super) fn dots(pool: &Pool, a: &[f32], b: &[f32], rows: &[u32], y: &mut [f32]) {
    let (cols, isa) = (a.len().checked_div(rows.len()).unwrap_or(0), Isa::detect());
    let of_task = rows_per_task(cols);
    pool.for_chunks([(y, of_task)], |t, [y]| {
        for (r, y) in y.iter_mut().enumerate() {
            let i = t * of_task + r;
            *y = row(b, cols, rows[i]).map_or(0.0, |b| dot(isa, &a[i * cols..][..cols], b));
        }
    });
}
