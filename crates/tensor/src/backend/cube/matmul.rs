//! Elementwise kernels that run on the result of a matrix product.

use cubecl::prelude::*;

/// Returns the sigmoid of `2 sqrt(2 / pi) (x + 0.044715 x^3)`. In the tanh form, `gelu(x)` is x times this.
#[cube]
fn gelu_sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + f32::exp(-(x * (1.595_769 + 0.071_354_814 * x * x))))
}

/// Largest slope of the exponent that [`gelu_slope`] multiplies with. Larger ones only occur where the sigmoid
/// is exactly 0 or 1. There the product is 0, unless this factor is infinite.
const STEEPEST: f32 = 1e38;

/// The greatest and the least finite value.
const GREATEST: f32 = f32::MAX;
const LEAST: f32 = f32::MIN;

/// Returns `x`, and the greatest finite value for an infinity: infinity times 0 would be NaN.
#[cube]
fn finite(x: f32) -> f32 {
    f32::max(f32::min(x, f32::new(GREATEST)), f32::new(LEAST))
}

/// Returns `gelu(x)`, given `s = gelu_sigmoid(x)`. NaN stays NaN, since `s` is NaN.
#[cube]
fn gelu_value(x: f32, s: f32) -> f32 {
    f32::max(x, f32::new(LEAST)) * s
}

/// Returns `gelu'(x)`, given `s = gelu_sigmoid(x)`. Where `s` is 0 or 1, the slope equals `s`: the formula has
/// no exponential, which could be infinite.
#[cube]
fn gelu_slope(x: f32, s: f32) -> f32 {
    let steepness = 1.595_769 + 0.214_064_44 * x * x;
    s + finite(x) * s * (1.0 - s) * f32::min(steepness, f32::new(STEEPEST))
}

/// Returns `exp(-x^2 / 2)`, for finite `x`.
#[cube]
fn bell(x: f32) -> f32 {
    f32::exp(-(0.5 * f32::min(x * x, f32::new(GREATEST))))
}

/// Returns the distribution function of the normal distribution, given `bell(x)`: Abramowitz and Stegun 1964,
/// 7.1.26. Of `-|x|` it has no cancellation.
#[cube]
fn normal_share(x: f32, bell: f32) -> f32 {
    let t = 1.0 / (1.0 + 0.231_641_9 * f32::abs(x));
    let sum = (((0.530_702_7 * t - 0.726_576) * t + 0.710_706_9) * t - 0.142_248_37) * t + 0.127_414_8;
    let tail = sum * t * bell;
    select(x < 0.0, tail, 1.0 - tail)
}

/// Computes `c += bias`.
#[cube(launch)]
pub(super) fn add_bias(c: &mut [f32], bias: &[f32], len: u32, cols: u32) {
    if ABSOLUTE_POS < len as usize {
        c[ABSOLUTE_POS] += bias[ABSOLUTE_POS % cols as usize];
    }
}

/// Computes `c = gelu(c + bias)`, and `slope = gelu'(c + bias)` if `keep`, in the form with `erf` or with
/// tanh.
#[cube(launch)]
pub(super) fn add_bias_gelu(
    c: &mut [f32],
    bias: &[f32],
    slope: &mut [f32],
    len: u32,
    cols: u32,
    #[comptime] keep: bool,
    #[comptime] erf: bool,
) {
    if ABSOLUTE_POS < len as usize {
        let x = c[ABSOLUTE_POS] + bias[ABSOLUTE_POS % cols as usize];
        if comptime!(erf) {
            let near = finite(x);
            let e = bell(near);
            let s = normal_share(near, e);
            c[ABSOLUTE_POS] = gelu_value(x, s);
            if comptime!(keep) {
                slope[ABSOLUTE_POS] = s + near * e * 0.398_942_3;
            }
        } else {
            let s = gelu_sigmoid(x);
            c[ABSOLUTE_POS] = gelu_value(x, s);
            if comptime!(keep) {
                slope[ABSOLUTE_POS] = gelu_slope(x, s);
            }
        }
    }
}

/// Computes `c += bias + residual`.
#[cube(launch)]
pub(super) fn add_bias_residual(c: &mut [f32], bias: &[f32], residual: &[f32], len: u32, cols: u32) {
    if ABSOLUTE_POS < len as usize {
        c[ABSOLUTE_POS] += bias[ABSOLUTE_POS % cols as usize] + residual[ABSOLUTE_POS];
    }
}

/// Computes `c *= factor`, elementwise: `factor` is a matrix.
#[cube(launch)]
pub(super) fn times(c: &mut [f32], factor: &[f32], len: u32) {
    if ABSOLUTE_POS < len as usize {
        c[ABSOLUTE_POS] *= factor[ABSOLUTE_POS];
    }
}

/// Computes `c *= factor`, with one factor for all elements.
#[cube(launch)]
pub(super) fn scale(c: &mut [f32], factor: f32, len: u32) {
    if ABSOLUTE_POS < len as usize {
        c[ABSOLUTE_POS] *= factor;
    }
}

/// Computes `c += factor x`, with one factor for all elements.
#[cube(launch)]
pub(super) fn add(c: &mut [f32], x: &[f32], factor: f32, len: u32) {
    if ABSOLUTE_POS < len as usize {
        c[ABSOLUTE_POS] += x[ABSOLUTE_POS] * factor;
    }
}
