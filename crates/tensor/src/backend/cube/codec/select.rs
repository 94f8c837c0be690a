//! Sums with a check for finite values, mask indices, gather and scatter.

use cubecl::prelude::*;

use super::exact::{INFINITE, MAGNITUDE, sum};
use crate::codec::Pattern;

/// Computes `y = x + with` or `y = x - with`, or only checks the values. Any unit (thread) that finds a value
/// that is not finite sets `verdict` to 1.
#[cube(launch)]
pub(super) fn sums(
    x: &[u32],
    with: &[u32],
    y: &mut [u32],
    verdict: &mut [u32],
    len: u32,
    #[comptime] adds: bool,
    #[comptime] minus: bool,
) {
    if (ABSOLUTE_POS as u32) < len {
        let mut bits = x[ABSOLUTE_POS];
        if comptime!(adds) {
            let mut other = with[ABSOLUTE_POS];
            if comptime!(minus) {
                other ^= 0x8000_0000u32;
            }
            bits = sum(bits, other);
            y[ABSOLUTE_POS] = bits;
        }
        if (bits & MAGNITUDE) >= INFINITE {
            verdict[0] = 1u32;
        }
    }
}

/// Key and number of a stream of Philox4x32-10.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(super) struct Stream {
    key_low: u32,
    key_high: u32,
    low: u32,
    high: u32,
}

/// Returns `bound * u` rounded down, where `u` in `[0, 1)` has as its 64 bits the first two words of block
/// `index`.
#[cube]
fn below(stream: &Stream, index: u32, bound: u32) -> u32 {
    let mut a = index;
    let mut b = 0u32;
    let mut c = stream.low;
    let mut d = stream.high;
    let mut k = stream.key_low;
    let mut l = stream.key_high;
    for _ in 0..10u32 {
        let p_high = u32::mul_hi(a, 0xd251_1f53u32);
        let p_low = a * 0xd251_1f53u32;
        let q_high = u32::mul_hi(c, 0xcd9e_8d57u32);
        let q_low = c * 0xcd9e_8d57u32;
        a = q_high ^ b ^ k;
        b = q_low;
        c = p_high ^ d ^ l;
        d = p_low;
        k += 0x9e37_79b9u32;
        l += 0xbb67_ae85u32;
    }
    let low = a * bound;
    let carried = low + u32::mul_hi(b, bound);
    u32::mul_hi(a, bound) + u32::cast_from(carried < low)
}

/// Writes the indices of a mask: one per stratum, without the `left_out` strata from the `gap`th on.
#[cube(launch)]
pub(super) fn mask(
    indices: &mut [u32],
    stream: &Stream,
    stride: u32,
    phase: u32,
    gap: u32,
    left_out: u32,
    kept: u32,
    #[comptime] pattern: Pattern,
) {
    let at = ABSOLUTE_POS as u32;
    if at < kept {
        let stratum = select(at < gap, at, at + left_out);
        let mut within = phase;
        if comptime!(!matches!(pattern, Pattern::Rolling)) {
            within = below(stream, stratum, stride);
        }
        if comptime!(matches!(pattern, Pattern::Permuted)) {
            // Both are below the stride, but their sum may overflow.
            let moved = within + phase;
            within = select(moved < within || moved >= stride, moved - stride, moved);
        }
        indices[ABSOLUTE_POS] = stratum * stride + within;
    }
}

/// Computes `y = x[indices]`.
#[cube(launch)]
pub(super) fn gather(x: &[u32], indices: &[u32], y: &mut [u32], len: u32, kept: u32) {
    if (ABSOLUTE_POS as u32) < kept {
        let index = indices[ABSOLUTE_POS];
        y[ABSOLUTE_POS] = x[u32::min(index, len - 1) as usize];
    }
}

/// Computes `y[indices] = x`. All indices are different.
#[cube(launch)]
pub(super) fn put(x: &[u32], indices: &[u32], y: &mut [u32], len: u32, kept: u32) {
    if (ABSOLUTE_POS as u32) < kept {
        let index = indices[ABSOLUTE_POS];
        if index < len {
            y[index as usize] = x[ABSOLUTE_POS];
        }
    }
}
