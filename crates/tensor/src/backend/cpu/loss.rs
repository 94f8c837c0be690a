//! Softmax cross-entropy, row by row, of whole rows or of pieces of them. The gradient overwrites the logits.

#![expect(clippy::inline_always, reason = "vector code must take the target features of its caller")]

use super::pool::Pool;
use super::simd::{Isa, Level, simd};
use super::vmath;

/// Returns the largest value; minus infinity of none.
#[inline(always)]
fn largest(x: &[f32]) -> f32 {
    let mut tops = [f32::NEG_INFINITY; 16];
    let whole = x.len() / 16 * 16;
    for x in x[..whole].chunks_exact(16) {
        for (top, &x) in tops.iter_mut().zip(x) {
            *top = if x > *top { x } else { *top };
        }
    }
    tops.iter().chain(&x[whole..]).fold(f32::NEG_INFINITY, |a, &b| if b > a { b } else { a })
}

/// Returns partial sums of `exp(x - top)`.
#[inline(always)]
fn exp_sums<L: Level>(x: &[f32], top: f32) -> [f32; 16] {
    let mut sums = [0.0_f32; 16];
    let whole = x.len() / 16 * 16;
    for x in x[..whole].chunks_exact(16) {
        for (sum, &x) in sums.iter_mut().zip(x) {
            *sum += vmath::exp::<L>(x - top);
        }
    }
    for (sum, &x) in sums.iter_mut().zip(&x[whole..]) {
        *sum += vmath::exp::<L>(x - top);
    }
    sums
}

simd! {
    /// Returns the largest value of a piece of a row, and the sum of `exp(x - largest)`.
    fn row_stats<L: Level>(x: &[f32]) -> [f32; 2] {
        let top = largest(x);
        let sum = exp_sums::<L>(x, top).iter().map(|&s| f64::from(s)).sum::<f64>();
        [top, sum as f32]
    }
}

simd! {
    /// Overwrites a piece of a row by `exp(x - log_sum) * scale`.
    fn row_shares<L: Level>(x: &mut [f32], log_sum: f32, scale: f32) {
        for x in x {
            *x = vmath::exp::<L>(*x - log_sum) * scale;
        }
    }
}

/// Returns the place of a target in a piece of a row of `cols` columns that begins at column `first`.
fn in_piece(target: u32, first: u32, cols: usize) -> Option<usize> {
    target.checked_sub(first).map(|at| at as usize).filter(|&at| at < cols)
}

/// Computes the statistics of a piece of all rows: see [`Op::LogitStats`](crate::Op::LogitStats).
pub(super) fn stats(pool: &Pool, logits: &[f32], (targets, first): (&[u32], u32), stats: &mut [f32]) {
    let isa = Isa::detect();
    let cols = logits.len().checked_div(targets.len()).unwrap_or(0);
    let rows = super::parts::rows_per_task(cols);
    pool.for_chunks([(stats, rows * 3)], |t, [stats]| {
        for (r, stats) in stats.chunks_exact_mut(3).enumerate() {
            let row = t * rows + r;
            let x = &logits[row * cols..][..cols];
            let [top, sum] = row_stats(isa, x);
            let picked = in_piece(targets[row], first, cols).map_or(0.0, |at| x[at]);
            stats.copy_from_slice(&[top, sum, picked]);
        }
    });
}

/// Overwrites a piece of all rows by its gradient: see [`Op::LogitGrad`](crate::Op::LogitGrad).
pub(super) fn part_grad(
    pool: &Pool,
    logits: &mut [f32],
    (targets, first): (&[u32], u32),
    weights: Option<&[f32]>,
    log_sums: &[f32],
    scale: f32,
) {
    let isa = Isa::detect();
    let cols = logits.len().checked_div(targets.len()).unwrap_or(0);
    let rows = super::parts::rows_per_task(cols);
    pool.for_chunks([(logits, rows * cols)], |t, [logits]| {
        for (r, x) in logits.chunks_exact_mut(cols.max(1)).enumerate() {
            let row = t * rows + r;
            let weight = weights.map_or(1.0, |weights| weights[row]);
            if weight == 0.0 {
                x.fill(0.0);
                continue;
            }
            row_shares(isa, x, log_sums[row], scale * weight);
            if let Some(at) = in_piece(targets[row], first, cols) {
                x[at] -= scale * weight;
            }
        }
    });
}

simd! {
    /// Returns the loss of one row. If `scale` is given, overwrites the logits with
    /// `(softmax - onehot) * scale`.
    fn row_loss<L: Level>(x: &mut [f32], target: usize, scale: Option<f32>) -> f32 {
        let (top, whole) = (largest(x), x.len() / 16 * 16);
        let picked = x[target];
        let mut sums = [0.0_f32; 16];
        if scale.is_some() {
            let (head, tail) = x.split_at_mut(whole);
            for x in head.chunks_exact_mut(16) {
                for (sum, x) in sums.iter_mut().zip(x) {
                    *x = vmath::exp::<L>(*x - top);
                    *sum += *x;
                }
            }
            for (sum, x) in sums.iter_mut().zip(tail) {
                *x = vmath::exp::<L>(*x - top);
                *sum += *x;
            }
        } else {
            sums = exp_sums::<L>(x, top);
        }
        let sum = sums.iter().map(|&s| f64::from(s)).sum::<f64>();
        if let Some(scale) = scale {
            let factor = (f64::from(scale) / sum) as f32;
            for x in x.iter_mut() {
                *x *= factor;
            }
            x[target] -= scale;
        }
        (sum.ln() + f64::from(top) - f64::from(picked)) as f32
    }
}

/// Computes the weighted losses of all rows. Targets must be below the number of columns.
pub(super) fn cross_entropy(
    pool: &Pool,
    logits: &mut [f32],
    targets: &[u32],
    weights: Option<&[f32]>,
    losses: &mut [f32],
    scale: Option<f32>,
) {
    let isa = Isa::detect();
    let cols = logits.len().checked_div(targets.len()).unwrap_or(0);
    let rows = super::parts::rows_per_task(cols);
    pool.for_chunks([(logits, rows * cols), (losses, rows)], |t, [logits, losses]| {
        for (r, (x, loss)) in logits.chunks_exact_mut(cols).zip(losses).enumerate() {
            let row = t * rows + r;
            let weight = weights.map_or(1.0, |weights| weights[row]);
            if weight == 0.0 {
                *loss = 0.0;
                if scale.is_some() {
                    x.fill(0.0);
                }
            } else {
                *loss = row_loss(isa, x, targets[row] as usize, scale.map(|scale| scale * weight)) * weight;
            }
        }
    });
}
