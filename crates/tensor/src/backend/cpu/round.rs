//! Rounds the operands of matrix products to 16 bits, as a device with 16-bit operands does.

use std::cell::Cell;

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use super::pool::Pool;
use crate::Precision;

/// Number of elements per task.
const TASK: usize = 1 << 14;
/// Number of elements per conversion; they stay in L1 cache between the two conversions.
const BLOCK: usize = 512;

thread_local! {
    /// Rounded operands of this thread's current product. The buffers are kept between calls.
    static ROUNDED: Cell<[Vec<f32>; 2]> = const { Cell::new([Vec::new(), Vec::new()]) };
}

/// Calls `product` with both operands rounded: each is multiplied by its scale, rounded to 16 bits, and divided
/// by the scale. If the precision is f32, the operands are passed unchanged.
pub(super) fn rounded(
    pool: &Pool,
    precision: Precision,
    operands: [&[f32]; 2],
    scales: [f32; 2],
    product: impl FnOnce([&[f32]; 2]),
) {
    if precision == Precision::F32 {
        return product(operands);
    }
    // Take the buffers instead of borrowing them: if the caller is a thread of another pool, it may start a
    // second product while it waits.
    let mut buffers = ROUNDED.take();
    for ((x, scale), to) in operands.into_iter().zip(scales).zip(&mut buffers) {
        to.resize(x.len(), 0.0);
        pool.for_chunks([(to, TASK)], |t, [to]| round(precision, &x[t * TASK..][..to.len()], scale, to));
    }
    let [a, b] = &buffers;
    product([a, b]);
    ROUNDED.set(buffers);
}

/// Rounds `x * scale` to 16 bits and divides the result by `scale`.
fn round(precision: Precision, x: &[f32], scale: f32, to: &mut [f32]) {
    for (x, to) in x.chunks(BLOCK).zip(to.chunks_mut(BLOCK)) {
        for (to, x) in to.iter_mut().zip(x) {
            *to = x * scale;
        }
        if precision == Precision::Bf16 {
            let mut narrow = [bf16::ZERO; BLOCK];
            let narrow = &mut narrow[..x.len()];
            narrow.convert_from_f32_slice(to);
            narrow.convert_to_f32_slice(to);
        } else {
            let mut narrow = [f16::ZERO; BLOCK];
            let narrow = &mut narrow[..x.len()];
            narrow.convert_from_f32_slice(to);
            narrow.convert_to_f32_slice(to);
        }
        for to in to {
            *to *= 1.0 / scale;
        }
    }
}
