//! Kernels over raw words: copies of bytes at any offset, and conversion between f32 and the 16-bit floats, two
//! of which share a word because not every device has such types.

#![expect(
    clippy::manual_is_multiple_of,
    reason = "kernels know operators, not the standard library's methods"
)]

use cubecl::prelude::*;

/// Byte `at` of a buffer of words.
#[cube]
pub(super) fn byte(x: &[u32], at: u32) -> u32 {
    (x[(at / 4) as usize] >> (at % 4 * 8)) & 0xff
}

/// `to[to_at..][..len] = from[from_at..][..len]` in bytes; a unit writes one word and keeps the bytes beside
/// the range.
#[cube(launch)]
pub(super) fn copy_words(from: &[u32], to: &mut [u32], from_at: u32, to_at: u32, len: u32) {
    let word = ABSOLUTE_POS as u32 + to_at / 4;
    let end = to_at + len;
    if word * 4 < end {
        let first = word * 4;
        if first >= to_at && first + 4 <= end && (from_at + first - to_at) % 4 == 0 {
            to[word as usize] = from[((from_at + first - to_at) / 4) as usize];
        } else {
            let mut value = to[word as usize];
            #[unroll]
            for i in 0..4u32 {
                let at = first + i;
                if at >= to_at && at < end {
                    let shift = i * 8;
                    value = (value & !(0xffu32 << shift)) | (byte(from, from_at + at - to_at) << shift);
                }
            }
            to[word as usize] = value;
        }
    }
}

/// `y = value`.
#[cube(launch)]
pub(super) fn fill(y: &mut [f32], value: f32) {
    if ABSOLUTE_POS < y.len() {
        y[ABSOLUTE_POS] = value;
    }
}

/// To bf16, to nearest, ties to even; NaN stays NaN.
#[cube]
fn to_bf16(x: f32) -> u32 {
    let bits = u32::reinterpret(x);
    let rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    select((bits & 0x7fff_ffff) > 0x7f80_0000, (bits >> 16) | 0x40, rounded)
}

/// To f16, to nearest, ties to even; NaN stays NaN.
#[cube]
fn to_f16(x: f32) -> u32 {
    let bits = u32::reinterpret(x);
    let sign = (bits >> 16) & 0x8000;
    let rest = bits & 0x7fff_ffff;
    let mut out = 0x7c00u32;
    if rest > 0x7f80_0000 {
        // As the host does: quiet, with the upper bits of the payload.
        out = 0x7e00 | ((rest >> 13) & 0x3ff);
    } else if rest < 0x3880_0000 {
        // Below 2^-14: a count of 2^-24.
        let exponent = rest >> 23;
        out = 0u32;
        if exponent >= 102 {
            let mantissa = (rest & 0x7f_ffff) | 0x80_0000;
            let shift = 126 - exponent;
            let half = 1u32 << (shift - 1);
            let low = mantissa & ((1u32 << shift) - 1);
            let value = mantissa >> shift;
            let up = low > half || (low == half && value % 2 == 1);
            out = value + u32::cast_from(up);
        }
    } else if rest < 0x477f_f000 {
        let rebased = rest - 0x3800_0000;
        out = (rebased + 0xfff + ((rebased >> 13) & 1)) >> 13;
    }
    sign | out
}

/// The bits of either.
#[cube]
fn half(x: f32, #[comptime] bf16: bool) -> u32 {
    if comptime!(bf16) { to_bf16(x) } else { to_f16(x) }
}

/// From f16; exact.
#[cube]
fn from_f16(half: u32) -> f32 {
    let sign = (half & 0x8000) << 16;
    let exponent = (half >> 10) & 0x1f;
    let mantissa = half & 0x3ff;
    let mut bits = ((exponent + 112) << 23) | (mantissa << 13);
    if exponent == 31 {
        bits = 0x7f80_0000 | (mantissa << 13);
    } else if exponent == 0 {
        bits = u32::reinterpret(f32::cast_from(mantissa) * 5.960_464_5e-8);
    }
    f32::reinterpret(sign | bits)
}

/// From the bits of either; exact.
#[cube]
fn widened(half: u32, #[comptime] bf16: bool) -> f32 {
    if comptime!(bf16) { f32::reinterpret(half << 16) } else { from_f16(half) }
}

/// Packs two f32, times `scale`, a word; of an odd count, the upper half of the last word stays as it is.
#[cube(launch)]
pub(super) fn narrow(x: &[f32], y: &mut [u32], scale: f32, len: u32, #[comptime] bf16: bool) {
    let at = ABSOLUTE_POS as u32 * 2;
    if at < len {
        let low = half(x[at as usize] * scale, bf16);
        let mut high = y[ABSOLUTE_POS] >> 16;
        if at + 1 < len {
            high = half(x[at as usize + 1] * scale, bf16);
        }
        y[ABSOLUTE_POS] = low | (high << 16);
    }
}

/// `y` is what is left of `x` in 16 bits, as a multiple of one over `scale`.
#[cube(launch)]
pub(super) fn round(x: &[f32], y: &mut [f32], scale: f32, len: u32, #[comptime] bf16: bool) {
    if ABSOLUTE_POS < len as usize {
        y[ABSOLUTE_POS] = widened(half(x[ABSOLUTE_POS] * scale, bf16), bf16) / scale;
    }
}

/// Unpacks two f32 a word.
#[cube(launch)]
pub(super) fn widen(x: &[u32], y: &mut [f32], len: u32, #[comptime] bf16: bool) {
    let at = ABSOLUTE_POS as u32;
    if at < len {
        let half = (x[(at / 2) as usize] >> (at % 2 * 16)) & 0xffff;
        y[ABSOLUTE_POS] = widened(half, bf16);
    }
}
