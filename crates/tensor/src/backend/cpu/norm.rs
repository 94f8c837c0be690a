//! Layer norm and its gradients, row by row while a row is in cache.

use super::parts::rows_per_task;
use super::pool::Pool;
use super::reduce::sum_rows_of;
use super::simd::{Isa, simd};
use crate::op::Op;

/// Number of partial sums of a row. Fixed, so that the order of additions is fixed.
const LANES: usize = 16;

/// Sums `f` over the elements of three slices of equal length, in [`LANES`] chains. Zipped chunks avoid bounds
/// checks, which would prevent vectorisation.
#[inline(always)]
#[expect(clippy::inline_always, reason = "inlined into the function that enables the vectors")]
fn sum_by(a: &[f32], b: &[f32], c: &[f32], f: impl Fn(f32, f32, f32) -> f32) -> f32 {
    let mut lanes = [0.0_f32; LANES];
    let (a, b, c) = (a.chunks_exact(LANES), b.chunks_exact(LANES), c.chunks_exact(LANES));
    let tail = a.remainder().iter().zip(b.remainder()).zip(c.remainder());
    for ((a, b), c) in a.zip(b).zip(c) {
        for l in 0..LANES {
            lanes[l] += f(a[l], b[l], c[l]);
        }
    }
    for (lane, ((&a, &b), &c)) in lanes.iter_mut().zip(tail) {
        *lane += f(a, b, c);
    }
    let mut width = LANES / 2;
    while width > 0 {
        for l in 0..width {
            lanes[l] += lanes[l + width];
        }
        width /= 2;
    }
    lanes[0]
}

simd! {
    fn forward_rows<L: Level>(cols: usize, x: &[f32], gain: &[f32], bias: &[f32], y: &mut [f32], stats: &mut [f32]) {
        let scale = 1.0 / cols as f32;
        for ((x, y), stats) in x.chunks_exact(cols).zip(y.chunks_exact_mut(cols)).zip(stats.chunks_exact_mut(2)) {
            let (gain, bias) = (&gain[..cols], &bias[..cols]);
            let mean = sum_by(x, x, x, |x, _, _| x) * scale;
            let var = sum_by(x, x, x, |x, _, _| (x - mean) * (x - mean)) * scale;
            let rstd = 1.0 / (var + Op::LAYER_NORM_EPS).sqrt();
            for i in 0..cols {
                y[i] = L::mul_add((x[i] - mean) * rstd, gain[i], bias[i]);
            }
            stats[0] = mean;
            stats[1] = rstd;
        }
    }
}

simd! {
    #[expect(clippy::too_many_arguments, reason = "the operands of one op")]
    fn input_rows<L: Level>(
        cols: usize, x: &[f32], gain: &[f32], stats: &[f32], dy: &[f32], residual: Option<&[f32]>, dx: &mut [f32],
    ) {
        let scale = 1.0 / cols as f32;
        let gain = &gain[..cols];
        for (r, ((x, dy), dx)) in x.chunks_exact(cols).zip(dy.chunks_exact(cols)).zip(dx.chunks_exact_mut(cols)).enumerate() {
            let (mean, rstd) = (stats[2 * r], stats[2 * r + 1]);
            let a = sum_by(dy, gain, x, |dy, gain, _| dy * gain) * scale;
            let b = sum_by(dy, gain, x, |dy, gain, x| dy * gain * ((x - mean) * rstd)) * scale;
            match residual.map(|all| &all[r * cols..][..cols]) {
                Some(past) => for i in 0..cols {
                    dx[i] = past[i] + rstd * (dy[i] * gain[i] - a - (x[i] - mean) * rstd * b);
                },
                None => for i in 0..cols {
                    dx[i] = rstd * (dy[i] * gain[i] - a - (x[i] - mean) * rstd * b);
                },
            }
        }
    }
}

simd! {
    /// Adds the weight gradients of some rows to `sums`, which is `[gain | bias]`.
    fn weight_rows<L: Level>(cols: usize, x: &[f32], stats: &[f32], dy: &[f32], sums: &mut [f32]) {
        let (gain, bias) = sums.split_at_mut(cols);
        for (r, (x, dy)) in x.chunks_exact(cols).zip(dy.chunks_exact(cols)).enumerate() {
            let (mean, rstd) = (stats[2 * r], stats[2 * r + 1]);
            for i in 0..cols {
                gain[i] = L::mul_add(dy[i], (x[i] - mean) * rstd, gain[i]);
                bias[i] += dy[i];
            }
        }
    }
}

pub(super) fn forward(pool: &Pool, x: &[f32], gain: &[f32], bias: &[f32], y: &mut [f32], stats: &mut [f32]) {
    let (cols, isa) = (gain.len(), Isa::detect());
    if cols == 0 {
        return stats.fill(0.0);
    }
    let rows = rows_per_task(cols);
    pool.for_chunks([(y, rows * cols), (stats, rows * 2)], |t, [y, stats]| {
        forward_rows(isa, cols, &x[t * rows * cols..][..y.len()], gain, bias, y, stats);
    });
}

pub(super) fn input(
    pool: &Pool,
    x: &[f32],
    gain: &[f32],
    stats: &[f32],
    dy: &[f32],
    residual: Option<&[f32]>,
    dx: &mut [f32],
) {
    let (cols, isa) = (gain.len(), Isa::detect());
    let rows = rows_per_task(cols);
    pool.for_chunks([(dx, rows * cols)], |t, [dx]| {
        let at = t * rows * cols;
        let part = |v: &'_ [f32]| at..at + dx.len().min(v.len());
        let residual = residual.map(|r| &r[part(r)]);
        input_rows(isa, cols, &x[part(x)], gain, &stats[t * rows * 2..], &dy[part(dy)], residual, dx);
    });
}

pub(super) fn weight(
    pool: &Pool,
    x: &[f32],
    stats: &[f32],
    dy: &[f32],
    d_gain: &mut [f32],
    d_bias: &mut [f32],
    accumulate: bool,
) {
    let (cols, isa) = (d_gain.len(), Isa::detect());
    let total = x.len().checked_div(cols).unwrap_or(0);
    sum_rows_of(pool, total, 2 * cols, accumulate, [d_gain, d_bias], |rows, sums| {
        let part = rows.start * cols..rows.end * cols;
        weight_rows(isa, cols, &x[part.clone()], &stats[rows.start * 2..rows.end * 2], &dy[part], sums);
    });
}
