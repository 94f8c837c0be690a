//! Softmax cross-entropy, row by row. The gradient overwrites the logits.

use super::pool::Pool;
use super::simd::{Isa, simd};
use super::vmath;

simd! {
    /// Returns the loss of one row. If `scale` is given, overwrites the logits with
    /// `(softmax - onehot) * scale`.
    fn row_loss<L: Level>(x: &mut [f32], target: usize, scale: Option<f32>) -> f32 {
        let mut tops = [f32::NEG_INFINITY; 16];
        let whole = x.len() / 16 * 16;
        for x in x[..whole].chunks_exact(16) {
            for (top, &x) in tops.iter_mut().zip(x) {
                *top = if x > *top { x } else { *top };
            }
        }
        let top = tops.iter().chain(&x[whole..]).fold(f32::NEG_INFINITY, |a, &b| if b > a { b } else { a });
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
            for x in x[..whole].chunks_exact(16) {
                for (sum, &x) in sums.iter_mut().zip(x) {
                    *sum += vmath::exp::<L>(x - top);
                }
            }
            for (sum, &x) in sums.iter_mut().zip(&x[whole..]) {
                *sum += vmath::exp::<L>(x - top);
            }
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
