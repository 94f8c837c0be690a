//! Column sums and sums of squares. The order of additions depends only on the shape and the number of units.

use cubecl::prelude::*;

use super::block::block_sum;

/// Sums each column over `chunk` rows: `y[part, col]`. `x` has rows of `stride` elements, of which the `cols`
/// columns from `start` on are summed.
#[cube(launch)]
pub(super) fn sum_columns(
    x: &[f32],
    y: &mut [f32],
    rows: u32,
    cols: u32,
    stride: u32,
    start: u32,
    chunk: u32,
    #[comptime] accumulate: bool,
) {
    let part = ABSOLUTE_POS / cols as usize;
    let col = ABSOLUTE_POS % cols as usize;
    let first = part * chunk as usize;
    if first < rows as usize {
        let last = u32::min(rows, first as u32 + chunk) as usize;
        let mut sum = 0.0f32;
        for row in first..last {
            sum += x[row * stride as usize + start as usize + col];
        }
        if comptime!(accumulate) {
            y[ABSOLUTE_POS] += sum;
        } else {
            y[ABSOLUTE_POS] = sum;
        }
    }
}

/// Computes the sum of squares of each chunk, with one cube (workgroup) per chunk.
#[cube(launch)]
pub(super) fn sum_squares(
    x: &[f32],
    parts: &mut [f32],
    len: u32,
    #[comptime] chunk: u32,
    #[comptime] units: u32,
) {
    let mut shared = Shared::<[f32]>::new_slice(units as usize);
    if CUBE_POS < parts.len() {
        let first = CUBE_POS as u32 * chunk;
        let last = u32::min(len, first + chunk);
        let mut sum = 0.0f32;
        let mut i = first + UNIT_POS;
        while i < last {
            let v = x[i as usize];
            sum += v * v;
            i += units;
        }
        let total = block_sum(&mut shared, sum, units);
        if UNIT_POS == 0 {
            parts[CUBE_POS] = total;
        }
    }
}
