//! Softmax cross-entropy, one cube (workgroup) per row. The gradient overwrites the logits.

use cubecl::prelude::*;

use super::block::{block_max, block_sum};

#[cube(launch)]
pub(super) fn cross_entropy(
    logits: &mut [f32],
    targets: &[u32],
    weights: &[f32],
    losses: &mut [f32],
    rows: u32,
    cols: u32,
    scale: f32,
    #[comptime] weighted: bool,
    #[comptime] grad: bool,
    #[comptime] units: u32,
) {
    let mut shared = Shared::<[f32]>::new_slice(units as usize);
    let row = CUBE_POS;
    if row < rows as usize {
        let cols = cols as usize;
        let at = row * cols;
        // An out-of-range target has been recorded by `check_ids`; read column 0 instead of out of bounds.
        let wanted = targets[row] as usize;
        let target = select(wanted < cols, wanted, 0usize);
        let mut weight = 1.0f32;
        if comptime!(weighted) {
            weight = weights[row];
        }
        let mut largest = logits[at];
        let mut i = UNIT_POS as usize;
        while i < cols {
            largest = f32::max(largest, logits[at + i]);
            i += units as usize;
        }
        let top = block_max(&mut shared, largest, units);
        let mut sum = 0.0f32;
        i = UNIT_POS as usize;
        while i < cols {
            sum += f32::exp(logits[at + i] - top);
            i += units as usize;
        }
        let total = block_sum(&mut shared, sum, units);
        if UNIT_POS == 0 {
            let loss = f32::ln(total) - (logits[at + target] - top);
            losses[row] = select(weight == 0.0, 0.0, loss * weight);
        }
        if comptime!(grad) {
            // One unit (thread) has read the target's logit above; another unit overwrites it below.
            sync_cube();
            let inverse = 1.0 / total;
            i = UNIT_POS as usize;
            while i < cols {
                let p = f32::exp(logits[at + i] - top) * inverse;
                let slope = select(i == target, p - 1.0, p) * (scale * weight);
                logits[at + i] = select(weight == 0.0, 0.0, slope);
                i += units as usize;
            }
        }
    }
}
