//! `SwiGLU` and its gradient.
#![expect(unsafe_code, reason = "vector instructions; each function states what it relies on")]
#![expect(clippy::inline_always, reason = "vector code must take the target features of its caller")]

use std::f32::consts::LOG2_E;

use super::pool::Pool;
use super::simd::{Isa, simd};
use super::vector::{LANES, Vector, exp2};

/// Number of independent vectors computed at the same time, as in [`super::gelu`].
const SIDE: usize = 4;
/// Number of elements computed at the same time.
const GROUP: usize = SIDE * LANES;
/// Number of elements per task: a multiple of [`GROUP`].
const CHUNK: usize = 16 * 1024;

/// Returns `x s` and its derivative `s (1 + x s')`, for `s = sigmoid(x)` and `s' = sigmoid(-x)`.
///
/// Error: at most 4e-7, absolute for results below 1, else relative. The value of minus infinity is 0, and NaN
/// stays NaN.
///
/// # Safety
/// As for [`Vector`].
#[inline(always)]
unsafe fn silu<L: Vector>(x: [L::V; SIDE]) -> ([L::V; SIDE], [L::V; SIDE]) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        let one = L::splat(1.0);
        let mut z = x;
        for i in 0..SIDE {
            // Both sigmoids come from e^-|x| = 2^z, which cannot overflow, and without cancellation. This order
            // of operands propagates NaN.
            z[i] = L::mul(L::splat(LOG2_E), L::min(L::sub(L::splat(0.0), x[i]), x[i]));
        }
        L::in_step(&mut z);
        let e = exp2::<L, SIDE>(z);
        let (mut greater, mut value, mut slope) = (x, x, x);
        for i in 0..SIDE {
            greater[i] = L::div(one, L::add(one, e[i]));
        }
        L::in_step(&mut greater);
        for i in 0..SIDE {
            let less = L::mul(e[i], greater[i]);
            let of_x = L::by_sign(x[i], less, greater[i]);
            let of_minus_x = L::by_sign(x[i], greater[i], less);
            // Infinity times 0 would be NaN.
            let above = L::max(L::splat(f32::MIN), x[i]);
            let finite = L::min(L::splat(f32::MAX), above);
            value[i] = L::mul(above, of_x);
            slope[i] = L::mul(of_x, L::fma(finite, of_minus_x, one));
        }
        (value, slope)
    }
}

/// Loads a group of elements.
///
/// # Safety
/// As for [`Vector`]. The pointer must be valid for [`GROUP`] elements; so for [`store`].
#[inline(always)]
unsafe fn load<L: Vector>(from: *const f32) -> [L::V; SIDE] {
    // SAFETY: guaranteed by the caller.
    std::array::from_fn(|i| unsafe { L::load(from.add(i * LANES)) })
}

/// Stores the products of two groups.
///
/// # Safety
/// As for [`load`].
#[inline(always)]
unsafe fn store_products<L: Vector>(a: [L::V; SIDE], b: [L::V; SIDE], to: *mut f32) {
    for i in 0..SIDE {
        // SAFETY: guaranteed by the caller.
        unsafe { L::store(to.add(i * LANES), L::mul(a[i], b[i])) }
    }
}

/// Computes one group of [`forward`].
///
/// # Safety
/// As for [`load`].
#[inline(always)]
unsafe fn forward_group<L: Vector>([gate, up]: [*const f32; 2], y: *mut f32) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        let (value, _) = silu::<L>(load::<L>(gate));
        store_products::<L>(value, load::<L>(up), y);
    }
}

/// Computes one group of [`backward`].
///
/// # Safety
/// As for [`load`].
#[inline(always)]
unsafe fn backward_group<L: Vector>([gate, up, dy]: [*mut f32; 3]) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        let (value, slope) = silu::<L>(load::<L>(gate));
        let (factor, d) = (load::<L>(up), load::<L>(dy));
        let mut scaled = d;
        for i in 0..SIDE {
            scaled[i] = L::mul(d[i], factor[i]);
        }
        store_products::<L>(scaled, slope, gate);
        store_products::<L>(d, value, up);
        store_products::<L>(value, factor, dy);
    }
}

/// Copies the elements after the last whole group into a group, padded with zeros.
fn padded(x: &[f32]) -> [f32; GROUP] {
    let mut group = [0.0; GROUP];
    group[..x.len()].copy_from_slice(x);
    group
}

simd! {
    fn forward_chunk<L: Level + Vector>(gate: &[f32], up: &[f32], y: &mut [f32]) {
        let (gate, up) = (&gate[..y.len()], &up[..y.len()]);
        let whole = y.len() / GROUP * GROUP;
        for at in (0..whole).step_by(GROUP) {
            // SAFETY: a group of elements follows `at`; this function is compiled for the level.
            unsafe { forward_group::<L>([&gate[at..], &up[at..]].map(<[f32]>::as_ptr), y[at..].as_mut_ptr()) }
        }
        // The rest is padded to a whole group, so that a result does not depend on the element's position.
        if whole < y.len() {
            let (from, mut to) = ([padded(&gate[whole..]), padded(&up[whole..])], [0.0; GROUP]);
            // SAFETY: the arrays are whole groups; this function is compiled for the level.
            unsafe { forward_group::<L>(from.each_ref().map(|x| x.as_ptr()), to.as_mut_ptr()) }
            let rest = y.len() - whole;
            y[whole..].copy_from_slice(&to[..rest]);
        }
    }
}

simd! {
    fn backward_chunk<L: Level + Vector>(gate: &mut [f32], up: &mut [f32], dy: &mut [f32]) {
        let len = dy.len();
        let mut all = [&mut gate[..len], &mut up[..len], dy];
        let whole = len / GROUP * GROUP;
        for at in (0..whole).step_by(GROUP) {
            // SAFETY: a group of elements follows `at`; this function is compiled for the level.
            unsafe { backward_group::<L>(all.each_mut().map(|x| x[at..].as_mut_ptr())) }
        }
        if whole < len {
            let mut rest = all.each_ref().map(|x| padded(&x[whole..]));
            // SAFETY: the arrays are whole groups; this function is compiled for the level.
            unsafe { backward_group::<L>(rest.each_mut().map(|x| x.as_mut_ptr())) }
            for (to, from) in all.iter_mut().zip(&rest) {
                to[whole..].copy_from_slice(&from[..len - whole]);
            }
        }
    }
}

/// Computes `y = silu(gate) up`.
pub(super) fn forward(pool: &Pool, gate: &[f32], up: &[f32], y: &mut [f32]) {
    let isa = Isa::detect();
    pool.for_chunks([(y, CHUNK)], |t, [y]| {
        let part = t * CHUNK..t * CHUNK + y.len();
        forward_chunk(isa, &gate[part.clone()], &up[part], y);
    });
}

/// Overwrites `gate` and `up` by their gradients, and `dy` by the output of [`forward`], to the bit.
pub(super) fn backward(pool: &Pool, gate: &mut [f32], up: &mut [f32], dy: &mut [f32]) {
    let isa = Isa::detect();
    pool.for_chunks([(gate, CHUNK), (up, CHUNK), (dy, CHUNK)], |_, [gate, up, dy]| {
        backward_chunk(isa, gate, up, dy);
    });
}

#[cfg(test)]
mod tests {
    use super::super::simd::Isa;
    use super::{backward_chunk, forward_chunk};

    #[test]
    fn silu_and_its_derivative_are_close_everywhere() {
        for isa in [Isa::detect(), Isa::PORTABLE] {
            let mut worst = (0.0_f64, 0.0_f64);
            for bits in (1e-30_f32.to_bits()..f32::INFINITY.to_bits()).step_by(2999) {
                for x in [f32::from_bits(bits), -f32::from_bits(bits)] {
                    let (mut gate, mut up, mut dy) = ([x], [1.0], [1.0]);
                    backward_chunk(isa, &mut gate, &mut up, &mut dy);
                    let x = f64::from(x);
                    let (s, less) = (1.0 / (1.0 + (-x).exp()), 1.0 / (1.0 + x.exp()));
                    let error = |got: f32, want: f64| (f64::from(got) - want).abs() / want.abs().max(1.0);
                    worst =
                        (worst.0.max(error(up[0], x * s)), worst.1.max(error(gate[0], s * (1.0 + x * less))));
                }
            }
            println!("silu {isa:?} {worst:?}");
            assert!(worst.0 < 4e-7 && worst.1 < 4e-7, "{isa:?}: {worst:?}");
        }
    }

    #[test]
    fn limits() {
        let (inf, nan) = (f32::INFINITY, f32::NAN);
        for isa in [Isa::detect(), Isa::PORTABLE] {
            let gate = [-1e30, -inf, f32::MIN, -104.0, 0.0, -0.0, 104.0, 1e30, f32::MAX, inf, nan, -nan];
            let (mut slope, mut value, mut dy, mut y) = (gate, [1.0; 12], [1.0; 12], [0.0; 12]);
            forward_chunk(isa, &gate, &[1.0; 12], &mut y);
            backward_chunk(isa, &mut slope, &mut value, &mut dy);
            assert_eq!((&y[..10], &y[..10]), (&value[..10], &dy[..10]), "{isa:?}");
            assert_eq!((&y[..3], &y[4..10]), (&[0.0; 3][..], &[0.0, 0.0, 104.0, 1e30, f32::MAX, inf][..]));
            assert_eq!((&slope[..3], &slope[4..10]), (&[0.0; 3][..], &[0.5, 0.5, 1.0, 1.0, 1.0, 1.0][..]));
            assert!(y[3].abs() < 1e-37 && slope[3].abs() < 1e-37, "{isa:?}");
            assert!([y, value, slope, dy].iter().all(|v| v[10].is_nan() && v[11].is_nan()), "{isa:?}");
        }
    }
}
