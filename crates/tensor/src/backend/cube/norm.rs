//! Layer norm and RMS norm, one cube (workgroup) per row. Weight gradients are sums over columns.

use cubecl::prelude::*;

use super::block::block_sum;

/// Computes the statistics of each row, and the normalised row. The mean of an RMS norm is 0.
#[cube(launch)]
pub(super) fn forward(
    x: &[f32],
    gain: &[f32],
    bias: &[f32],
    y: &mut [f32],
    stats: &mut [f32],
    rows: u32,
    cols: u32,
    eps: f32,
    #[comptime] rms: bool,
    #[comptime] add: bool,
    #[comptime] units: u32,
) {
    let mut shared = Shared::<[f32]>::new_slice(units as usize);
    let row = CUBE_POS;
    if row < rows as usize {
        let cols = cols as usize;
        let at = row * cols;
        let scale = 1.0 / f32::cast_from(cols);
        let mut mean = 0.0f32;
        let mut i = UNIT_POS as usize;
        if comptime!(!rms) {
            let mut sum = 0.0f32;
            while i < cols {
                sum += x[at + i];
                i += units as usize;
            }
            mean = block_sum(&mut shared, sum, units) * scale;
        }
        let mut squares = 0.0f32;
        i = UNIT_POS as usize;
        while i < cols {
            let d = x[at + i] - mean;
            squares += d * d;
            i += units as usize;
        }
        let var = block_sum(&mut shared, squares, units) * scale;
        let rstd = 1.0 / f32::sqrt(var + eps);
        i = UNIT_POS as usize;
        while i < cols {
            let scaled = (x[at + i] - mean) * rstd * gain[i];
            if comptime!(add) {
                y[at + i] = scaled + bias[i];
            } else {
                y[at + i] = scaled;
            }
            i += units as usize;
        }
        if UNIT_POS == 0 {
            stats[2 * row] = mean;
            stats[2 * row + 1] = rstd;
        }
    }
}

/// Computes the gradient of the input, plus `residual` if `add`.
#[cube(launch)]
pub(super) fn input(
    x: &[f32],
    gain: &[f32],
    stats: &[f32],
    dy: &[f32],
    residual: &[f32],
    dx: &mut [f32],
    rows: u32,
    cols: u32,
    #[comptime] rms: bool,
    #[comptime] add: bool,
    #[comptime] units: u32,
) {
    let mut shared = Shared::<[f32]>::new_slice(units as usize);
    let row = CUBE_POS;
    if row < rows as usize {
        let cols = cols as usize;
        let at = row * cols;
        let scale = 1.0 / f32::cast_from(cols);
        let mean = stats[2 * row];
        let rstd = stats[2 * row + 1];
        let mut plain = 0.0f32;
        let mut along = 0.0f32;
        let mut i = UNIT_POS as usize;
        while i < cols {
            let d = dy[at + i] * gain[i];
            plain += d;
            along += d * ((x[at + i] - mean) * rstd);
            i += units as usize;
        }
        let mut a = 0.0f32;
        if comptime!(!rms) {
            a = block_sum(&mut shared, plain, units) * scale;
        }
        let b = block_sum(&mut shared, along, units) * scale;
        i = UNIT_POS as usize;
        while i < cols {
            let d = rstd * (dy[at + i] * gain[i] - a - (x[at + i] - mean) * rstd * b);
            if comptime!(add) {
                dx[at + i] = residual[at + i] + d;
            } else {
                dx[at + i] = d;
            }
            i += units as usize;
        }
    }
}

/// Computes partial sums of the weight gradients over `chunk` rows each: `[chunks, 2, cols]`, gain then bias;
/// `[chunks, cols]` without a bias.
#[cube(launch)]
pub(super) fn weight_parts(
    x: &[f32],
    stats: &[f32],
    dy: &[f32],
    parts: &mut [f32],
    rows: u32,
    cols: u32,
    chunk: u32,
    #[comptime] with_bias: bool,
) {
    let cols = cols as usize;
    let part = ABSOLUTE_POS / cols;
    let col = ABSOLUTE_POS % cols;
    let first = part * chunk as usize;
    if first < rows as usize {
        let last = u32::min(rows, first as u32 + chunk) as usize;
        let mut gain = 0.0f32;
        let mut bias = 0.0f32;
        for row in first..last {
            let d = dy[row * cols + col];
            gain += d * ((x[row * cols + col] - stats[2 * row]) * stats[2 * row + 1]);
            bias += d;
        }
        if comptime!(with_bias) {
            parts[part * 2 * cols + col] = gain;
            parts[part * 2 * cols + cols + col] = bias;
        } else {
            parts[part * cols + col] = gain;
        }
    }
}
