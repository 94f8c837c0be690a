//! Layer norm and RMS norm, and their gradients, row by row while a row is in cache.

use std::ops::Range;

use super::parts::rows_per_task;
use super::pool::Pool;
use super::reduce::sum_rows_of;
use super::simd::{Isa, Level, simd};
use crate::{Norm, NormKind};

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

/// Writes the normalised rows. `RMS` is a constant so that the loops of neither kind do the other's work.
#[inline(always)]
#[expect(clippy::inline_always, reason = "inlined into the function that enables the vectors")]
fn forward_row<L: Level, const RMS: bool>(
    eps: f32,
    x: &[f32],
    gain: &[f32],
    bias: Option<&[f32]>,
    y: &mut [f32],
    stats: &mut [f32],
) {
    let cols = x.len();
    let scale = 1.0 / cols as f32;
    let (gain, y) = (&gain[..cols], &mut y[..cols]);
    let mean = if RMS { 0.0 } else { sum_by(x, x, x, |x, _, _| x) * scale };
    let centred = |x: f32| if RMS { x } else { x - mean };
    let var = sum_by(x, x, x, |x, _, _| centred(x) * centred(x)) * scale;
    let rstd = 1.0 / (var + eps).sqrt();
    match bias.map(|bias| &bias[..cols]) {
        Some(bias) => {
            for i in 0..cols {
                y[i] = L::mul_add(centred(x[i]) * rstd, gain[i], bias[i]);
            }
        }
        None => {
            for i in 0..cols {
                y[i] = centred(x[i]) * rstd * gain[i];
            }
        }
    }
    stats[0] = mean;
    stats[1] = rstd;
}

simd! {
    fn forward_rows<L: Level>(norm: Norm, x: &[f32], gain: &[f32], bias: Option<&[f32]>, y: &mut [f32], stats: &mut [f32]) {
        let cols = gain.len();
        for ((x, y), stats) in x.chunks_exact(cols).zip(y.chunks_exact_mut(cols)).zip(stats.chunks_exact_mut(2)) {
            match norm.kind {
                NormKind::Layer => forward_row::<L, false>(norm.eps, x, gain, bias, y, stats),
                NormKind::Rms => forward_row::<L, true>(norm.eps, x, gain, bias, y, stats),
            }
        }
    }
}

/// Writes the input gradient of one row; `stats` are its mean and reciprocal denominator.
#[inline(always)]
#[expect(clippy::inline_always, reason = "inlined into the function that enables the vectors")]
fn input_row<const RMS: bool>(
    x: &[f32],
    gain: &[f32],
    [mean, rstd]: [f32; 2],
    dy: &[f32],
    residual: Option<&[f32]>,
    dx: &mut [f32],
) {
    let cols = x.len();
    let scale = 1.0 / cols as f32;
    let (gain, dy, dx) = (&gain[..cols], &dy[..cols], &mut dx[..cols]);
    let normalised = |x: f32| if RMS { x * rstd } else { (x - mean) * rstd };
    let a = if RMS { 0.0 } else { sum_by(dy, gain, x, |dy, gain, _| dy * gain) * scale };
    let b = sum_by(dy, gain, x, |dy, gain, x| dy * gain * normalised(x)) * scale;
    let slope = |dy: f32, gain: f32, x: f32| {
        let centred = if RMS { dy * gain } else { dy * gain - a };
        rstd * (centred - normalised(x) * b)
    };
    match residual.map(|residual| &residual[..cols]) {
        Some(residual) => {
            for i in 0..cols {
                dx[i] = residual[i] + slope(dy[i], gain[i], x[i]);
            }
        }
        None => {
            for i in 0..cols {
                dx[i] = slope(dy[i], gain[i], x[i]);
            }
        }
    }
}

simd! {
    #[expect(clippy::too_many_arguments, reason = "the operands of one op")]
    fn input_rows<L: Level>(
        kind: NormKind, x: &[f32], gain: &[f32], stats: &[f32], dy: &[f32], residual: Option<&[f32]>, dx: &mut [f32],
    ) {
        let cols = gain.len();
        for (r, ((x, dy), dx)) in x.chunks_exact(cols).zip(dy.chunks_exact(cols)).zip(dx.chunks_exact_mut(cols)).enumerate() {
            let stats = [stats[2 * r], stats[2 * r + 1]];
            let residual = residual.map(|all| &all[r * cols..][..cols]);
            match kind {
                NormKind::Layer => input_row::<false>(x, gain, stats, dy, residual, dx),
                NormKind::Rms => input_row::<true>(x, gain, stats, dy, residual, dx),
            }
        }
    }
}

simd! {
    /// Adds the weight gradients of some rows to `sums`, which is `[gain | bias]`, or `[gain]` without a bias.
    fn weight_rows<L: Level>(cols: usize, x: &[f32], stats: &[f32], dy: &[f32], sums: &mut [f32]) {
        let (gain, bias) = sums.split_at_mut(cols);
        for (r, (x, dy)) in x.chunks_exact(cols).zip(dy.chunks_exact(cols)).enumerate() {
            let (mean, rstd) = (stats[2 * r], stats[2 * r + 1]);
            if bias.is_empty() {
                for i in 0..cols {
                    gain[i] = L::mul_add(dy[i], (x[i] - mean) * rstd, gain[i]);
                }
                continue;
            }
            for i in 0..cols {
                gain[i] = L::mul_add(dy[i], (x[i] - mean) * rstd, gain[i]);
                bias[i] += dy[i];
            }
        }
    }
}

pub(super) fn forward(
    pool: &Pool,
    norm: Norm,
    x: &[f32],
    gain: &[f32],
    bias: Option<&[f32]>,
    y: &mut [f32],
    stats: &mut [f32],
) {
    let (cols, isa) = (gain.len(), Isa::detect());
    if cols == 0 {
        return stats.fill(0.0);
    }
    let rows = rows_per_task(cols);
    pool.for_chunks([(y, rows * cols), (stats, rows * 2)], |t, [y, stats]| {
        forward_rows(isa, norm, &x[t * rows * cols..][..y.len()], gain, bias, y, stats);
    });
}

#[expect(clippy::too_many_arguments, reason = "the operands of one op")]
pub(super) fn input(
    pool: &Pool,
    kind: NormKind,
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
        input_rows(isa, kind, &x[part(x)], gain, &stats[t * rows * 2..], &dy[part(dy)], residual, dx);
    });
}

pub(super) fn weight(
    pool: &Pool,
    x: &[f32],
    stats: &[f32],
    dy: &[f32],
    d_gain: &mut [f32],
    d_bias: Option<&mut [f32]>,
    accumulate: bool,
) {
    let (cols, isa) = (d_gain.len(), Isa::detect());
    let total = x.len().checked_div(cols).unwrap_or(0);
    let add = |rows: Range<usize>, sums: &mut [f32]| {
        let part = rows.start * cols..rows.end * cols;
        weight_rows(isa, cols, &x[part.clone()], &stats[rows.start * 2..rows.end * 2], &dy[part], sums);
    };
    match d_bias {
        Some(d_bias) => sum_rows_of(pool, total, 2 * cols, accumulate, [d_gain, d_bias], add),
        None => sum_rows_of(pool, total, cols, accumulate, [d_gain], add),
    }
}
