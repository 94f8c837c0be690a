//! Selections: indices that stay on the device, what stands there, and what is put there.

use cubecl::prelude::*;

use super::exact::{INFINITE, MAGNITUDE, sum};
use crate::codec::Pattern;

/// `y = x + with`, or `x - with`, or only a look at `x`; `verdict` becomes 1 if something is not finite, by
/// whoever sees it.
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

/// What identifies a stream of Philox4x32-10.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(super) struct Stream {
    key_low: u32,
    key_high: u32,
    low: u32,
    high: u32,
}

/// `bound u`, rounded down, where `u` in `[0, 1)` has the 64 bits of the first two words of block `index`.
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

/// The indices of a mask: of each stratum one, but for those that are left out from the `gap`th on.
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
            // Both are below the stride; their sum may wrap.
            let moved = within + phase;
            within = select(moved < within || moved >= stride, moved - stride, moved);
        }
        indices[ABSOLUTE_POS] = stratum * stride + within;
    }
}

/// `y = x[indices]`.
#[cube(launch)]
pub(super) fn gather(x: &[u32], indices: &[u32], y: &mut [u32], len: u32, kept: u32) {
    if (ABSOLUTE_POS as u32) < kept {
        let index = indices[ABSOLUTE_POS];
        y[ABSOLUTE_POS] = x[u32::min(index, len - 1) as usize];
    }
}

/// `y[indices] = x`, for indices that are all different.
#[cube(launch)]
pub(super) fn put(x: &[u32], indices: &[u32], y: &mut [u32], len: u32, kept: u32) {
    if (ABSOLUTE_POS as u32) < kept {
        let index = indices[ABSOLUTE_POS];
        if index < len {
            y[index as usize] = x[ABSOLUTE_POS];
        }
    }
}
