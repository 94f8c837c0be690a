//! `SwiGLU` and its gradient, one element per unit (thread).

use cubecl::prelude::*;

/// `x sigmoid(x)` and its derivative.
#[derive(CubeType, Clone, Copy)]
struct Silu {
    value: f32,
    slope: f32,
}

/// Computes both from `e^-|x|`, which cannot overflow, and without cancellation.
#[cube]
fn silu(x: f32) -> Silu {
    let e = f32::exp(-f32::abs(x));
    let greater = 1.0 / (1.0 + e);
    let less = e * greater;
    let of_x = select(x < 0.0, less, greater);
    let of_minus_x = select(x < 0.0, greater, less);
    Silu { value: x * of_x, slope: of_x * (1.0 + x * of_minus_x) }
}

/// Computes `y = silu(gate) up`.
#[cube(launch)]
pub(super) fn forward(gate: &[f32], up: &[f32], y: &mut [f32], len: u32) {
    if ABSOLUTE_POS < len as usize {
        y[ABSOLUTE_POS] = silu(gate[ABSOLUTE_POS]).value * up[ABSOLUTE_POS];
    }
}

/// Overwrites `gate` and `up` by their gradients, and `dy` by the output of [`forward`].
#[cube(launch)]
pub(super) fn backward(gate: &mut [f32], up: &mut [f32], dy: &mut [f32], len: u32) {
    if ABSOLUTE_POS < len as usize {
        let Silu { value, slope } = silu(gate[ABSOLUTE_POS]);
        let factor = up[ABSOLUTE_POS];
        let d = dy[ABSOLUTE_POS];
        gate[ABSOLUTE_POS] = d * factor * slope;
        up[ABSOLUTE_POS] = d * value;
        dy[ABSOLUTE_POS] = value * factor;
    }
}
