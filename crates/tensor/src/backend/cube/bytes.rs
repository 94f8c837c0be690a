//! Kernels on raw words: byte copies at any offset, and conversions between f32 and the 16-bit floats. Two
//! 16-bit floats share a word, because not every device has 16-bit types.

#![expect(
    clippy::manual_is_multiple_of,
    reason = "CubeCL kernels support operators, but not methods of the standard library"
)]

use cubecl::prelude::*;

/// Returns byte `at` of a buffer of words.
#[cube]
pub(super) fn byte(x: &[u32], at: u32) -> u32 {
    (x[(at / 4) as usize] >> (at % 4 * 8)) & 0xff
}

/// Copies `to[to_at..][..len] = from[from_at..][..len]`, in bytes. Each unit (thread) writes one word and
/// preserves the bytes outside the range. `operand.rs` bounds `len`, so that no sum exceeds 32 bits.
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

/// Sets all elements of `y` to `value`.
#[cube(launch)]
pub(super) fn fill(y: &mut [f32], value: f32) {
    if ABSOLUTE_POS < y.len() {
        y[ABSOLUTE_POS] = value;
    }
}

/// Converts to bf16, to nearest, ties to even. NaN stays NaN.
#[cube]
fn to_bf16(x: f32) -> u32 {
    let bits = u32::reinterpret(x);
    let rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    select((bits & 0x7fff_ffff) > 0x7f80_0000, (bits >> 16) | 0x40, rounded)
}

/// Converts to f16, to nearest, ties to even. NaN stays NaN.
#[cube]
fn to_f16(x: f32) -> u32 {
    let bits = u32::reinterpret(x);
    let sign = (bits >> 16) & 0x8000;
    let rest = bits & 0x7fff_ffff;
    let mut out = 0x7c00u32;
    if rest > 0x7f80_0000 {
        // NaN, as the host converts it: quiet, with the upper bits of the payload.
        out = 0x7e00 | ((rest >> 13) & 0x3ff);
    } else if rest < 0x3880_0000 {
        // Subnormal in f16: a multiple of 2^-24.
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

/// Converts to the bits of bf16 or f16.
#[cube]
fn half(x: f32, #[comptime] bf16: bool) -> u32 {
    if comptime!(bf16) { to_bf16(x) } else { to_f16(x) }
}

/// Converts from f16, exactly.
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

/// Converts from the bits of bf16 or f16, exactly.
#[cube]
fn half_to_f32(half: u32, #[comptime] bf16: bool) -> f32 {
    if comptime!(bf16) { f32::reinterpret(half << 16) } else { from_f16(half) }
}

/// Converts `x * scale` to 16 bits and packs two values per word. If `len` is odd, the upper half of the last
/// word is unchanged.
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

/// Rounds `x * scale` to 16 bits and divides the result by `scale`.
#[cube(launch)]
pub(super) fn round(x: &[f32], y: &mut [f32], scale: f32, len: u32, #[comptime] bf16: bool) {
    if ABSOLUTE_POS < len as usize {
        y[ABSOLUTE_POS] = half_to_f32(half(x[ABSOLUTE_POS] * scale, bf16), bf16) / scale;
    }
}

/// Unpacks two 16-bit floats per word to f32.
#[cube(launch)]
pub(super) fn widen(x: &[u32], y: &mut [f32], len: u32, #[comptime] bf16: bool) {
    let at = ABSOLUTE_POS as u32;
    if at < len {
        let half = (x[(at / 2) as usize] >> (at % 2 * 16)) & 0xffff;
        y[ABSOLUTE_POS] = half_to_f32(half, bf16);
    }
}
