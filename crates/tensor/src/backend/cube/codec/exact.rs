//! Arithmetic with the bits of IEEE 754 on every device: some flush subnormals, round quotients and roots a
//! little off, or fuse a product with the sum after it.

use cubecl::prelude::*;

/// Without the sign: among magnitudes the order of bits is the order of numbers.
pub(super) const MAGNITUDE: u32 = 0x7fff_ffff;
/// The bits of infinity.
pub(super) const INFINITE: u32 = 0x7f80_0000;
const SIGN: u32 = 0x8000_0000;
/// The bits of the smallest normal number, and of an exponent's unit.
const NORMAL: u32 = 0x0080_0000;
/// The bits of 2^-60: sums of magnitudes below it are made 2^64 times as large, and any other sum has no
/// subnormal in it that matters.
pub(super) const SMALL: u32 = (127 - 60) << 23;
/// The exponent of 2^64, as bits.
pub(super) const LIFT: u32 = 64 << 23;

/// A subnormal number counts 2^-149, and 2^64 times as large, this.
const COUNT: f32 = f32::from_bits((127 - 85) << 23);

/// A product that is not fused with the sum after it: no compiler knows that `zero` is 0.
#[cube]
pub(super) fn rounded(product: f32, zero: u32) -> f32 {
    f32::reinterpret(u32::reinterpret(product) ^ zero)
}

/// The bits of `2^64 x`, of a magnitude below [`SMALL`]; exact, and never subnormal.
#[cube]
pub(super) fn lifted(x: u32) -> u32 {
    let magnitude = x & MAGNITUDE;
    let counted = u32::reinterpret(f32::cast_from(magnitude) * f32::new(COUNT));
    select(magnitude >= NORMAL, x + LIFT, (x & SIGN) | counted)
}

/// The bits of `2^-64 x`, if it is a multiple of 2^-85.
#[cube]
fn lowered(x: u32) -> u32 {
    let magnitude = x & MAGNITUDE;
    let count = u32::cast_from(f32::reinterpret(u32::min(magnitude, NORMAL + LIFT)) * f32::new(1.0 / COUNT));
    select(magnitude >= NORMAL + LIFT, x - LIFT, (x & SIGN) | count)
}

/// The bits of `a + b`.
#[cube]
pub(super) fn sum(a: u32, b: u32) -> u32 {
    let small = u32::max(a & MAGNITUDE, b & MAGNITUDE) < SMALL;
    let mut bits = u32::reinterpret(f32::reinterpret(a) + f32::reinterpret(b));
    if small {
        bits = lowered(u32::reinterpret(f32::reinterpret(lifted(a)) + f32::reinterpret(lifted(b))));
    }
    bits
}

/// The bits of `a * b`, not fused with the sum after it, for an `a` below 2 in magnitude: a subnormal `b` makes
/// no product that is normal.
#[cube]
pub(super) fn product(a: u32, b: u32, zero: u32) -> u32 {
    let mut bits = u32::reinterpret(f32::reinterpret(a) * f32::reinterpret(b)) ^ zero;
    let m = a & MAGNITUDE;
    let n = b & MAGNITUDE;
    if (m >> 23) + (n >> 23) < 128 && m != 0 && n != 0 {
        bits = ((a ^ b) & SIGN) | counted(m, n);
    }
    bits
}

/// The bits of a product of two magnitudes whose exponents' fields add up to less than 128: it is hardly above
/// the subnormals, where bits count multiples of 2^-149.
#[cube]
fn counted(m: u32, n: u32) -> u32 {
    let a = (m & (NORMAL - 1)) | select(m >= NORMAL, NORMAL, 0u32);
    let b = (n & (NORMAL - 1)) | select(n >= NORMAL, NORMAL, 0u32);
    let mut high = u32::mul_hi(a, b);
    let mut low = a * b;
    // Of 48 digits those below 2^-149 are for rounding.
    let shift = 151 - u32::max(m >> 23, 1) - u32::max(n >> 23, 1);
    let mut half = 0u32;
    let mut rest = 0u32;
    for _ in 0..u32::min(shift, 50) {
        rest |= half;
        half = low & 1;
        low = (low >> 1) | (high << 31);
        high >>= 1u32;
    }
    low + (half & (rest | (low & 1)))
}

/// The bits of `a / b`, of positive normal numbers with a normal quotient, digit by digit.
#[cube]
pub(super) fn quotient(a: u32, b: u32) -> u32 {
    let divisor = (b & (NORMAL - 1)) | NORMAL;
    let mut rest = (a & (NORMAL - 1)) | NORMAL;
    // The difference of the exponents, biased.
    let mut exponent = (a >> 23) + 127 - (b >> 23);
    if rest < divisor {
        rest <<= 1u32;
        exponent -= 1u32;
    }
    let mut digits = 0u32;
    for _ in 0..25u32 {
        let fits = rest >= divisor;
        digits = (digits << 1) | u32::cast_from(fits);
        rest = (rest - select(fits, divisor, 0u32)) << 1;
    }
    // Of 25 digits the last one is for rounding.
    let up = (digits & 1) & (u32::cast_from(rest != 0) | ((digits >> 1) & 1));
    (exponent << 23) + (digits >> 1) + up - NORMAL
}

/// The bits of the root of a positive normal number, digit by digit.
#[cube]
pub(super) fn root(x: u32) -> u32 {
    let exponent = x >> 23;
    let mut rest = (x & (NORMAL - 1)) | NORMAL;
    // The exponent without its bias of 127 is even where the field is odd.
    rest <<= 2u32 - (exponent & 1);
    let mut digits = 0u32;
    let mut twice = 0u32;
    let mut digit = 0x0100_0000u32;
    for _ in 0..25u32 {
        let tried = twice + digit;
        if tried <= rest {
            twice = tried + digit;
            rest -= tried;
            digits += digit;
        }
        rest <<= 1u32;
        digit >>= 1u32;
    }
    let up = u32::cast_from(rest != 0) & digits & 1;
    // Half of the exponent, biased: the digits carry a unit of their own.
    ((digits + up) >> 1) + 0x3f00_0000 + (((exponent + 1) / 2) << 23) - LIFT
}
