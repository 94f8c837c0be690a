//! Exact IEEE 754 arithmetic on the bits of f32, for every device. GPUs may flush subnormals to zero, round
//! quotients and roots incorrectly, or fuse a product with the following sum.

use cubecl::prelude::*;

/// Mask of all bits but the sign. Magnitudes are ordered as their bits are.
pub(super) const MAGNITUDE: u32 = 0x7fff_ffff;
/// Bits of infinity.
pub(super) const INFINITE: u32 = 0x7f80_0000;
const SIGN: u32 = 0x8000_0000;
/// Bits of the smallest normal number; also one unit of the exponent field.
const NORMAL: u32 = 0x0080_0000;
/// Bits of 2^-60. Sums of smaller magnitudes are computed 2^64 times as large. In any other sum, flushing a
/// subnormal operand to zero does not change the result.
pub(super) const SMALL: u32 = (127 - 60) << 23;
/// Bits to add to multiply by 2^64.
pub(super) const SCALE_BITS: u32 = 64 << 23;

/// 2^-85: the value of one unit of a subnormal number (2^-149), times 2^64.
const COUNT: f32 = f32::from_bits((127 - 85) << 23);

/// Prevents fusing the product with a following sum. `zero` is 0, but the compiler does not know it.
#[cube]
pub(super) fn rounded(product: f32, zero: u32) -> f32 {
    f32::reinterpret(u32::reinterpret(product) ^ zero)
}

/// Returns the bits of `2^64 x`, for a magnitude below [`SMALL`]. Exact, and never subnormal.
#[cube]
pub(super) fn scale_up(x: u32) -> u32 {
    let magnitude = x & MAGNITUDE;
    let counted = u32::reinterpret(f32::cast_from(magnitude) * f32::new(COUNT));
    select(magnitude >= NORMAL, x + SCALE_BITS, (x & SIGN) | counted)
}

/// Returns the bits of `2^-64 x`, if `x` is a multiple of 2^-85.
#[cube]
fn scale_down(x: u32) -> u32 {
    let magnitude = x & MAGNITUDE;
    let count =
        u32::cast_from(f32::reinterpret(u32::min(magnitude, NORMAL + SCALE_BITS)) * f32::new(1.0 / COUNT));
    select(magnitude >= NORMAL + SCALE_BITS, x - SCALE_BITS, (x & SIGN) | count)
}

/// Returns the bits of `a + b`.
#[cube]
pub(super) fn sum(a: u32, b: u32) -> u32 {
    let small = u32::max(a & MAGNITUDE, b & MAGNITUDE) < SMALL;
    let mut bits = u32::reinterpret(f32::reinterpret(a) + f32::reinterpret(b));
    if small {
        bits = scale_down(u32::reinterpret(f32::reinterpret(scale_up(a)) + f32::reinterpret(scale_up(b))));
    }
    bits
}

/// Returns the bits of `a * b`, not fused with a following sum. `a` must be 0, or normal and below 2 in
/// magnitude; then every product that is subnormal or has a subnormal `b` is computed by `counted`.
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

/// Returns the bits of a product of two magnitudes whose exponent fields add up to less than 128. Such a
/// product is subnormal or little larger, so its bits are a count of multiples of 2^-149.
#[cube]
fn counted(m: u32, n: u32) -> u32 {
    let a = (m & (NORMAL - 1)) | select(m >= NORMAL, NORMAL, 0u32);
    let b = (n & (NORMAL - 1)) | select(n >= NORMAL, NORMAL, 0u32);
    let mut high = u32::mul_hi(a, b);
    let mut low = a * b;
    // Shift out the bits below 2^-149 of the 48-bit product, and use them for rounding.
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

/// Returns the bits of `a / b` by long division. Operands and quotient must be positive normal numbers.
#[cube]
pub(super) fn quotient(a: u32, b: u32) -> u32 {
    let divisor = (b & (NORMAL - 1)) | NORMAL;
    let mut rest = (a & (NORMAL - 1)) | NORMAL;
    // Biased difference of the exponents.
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
    // The last of the 25 binary digits is only for rounding.
    let up = (digits & 1) & (u32::cast_from(rest != 0) | ((digits >> 1) & 1));
    (exponent << 23) + (digits >> 1) + up - NORMAL
}

/// Returns the bits of the square root of a positive normal number, digit by digit.
#[cube]
pub(super) fn root(x: u32) -> u32 {
    let exponent = x >> 23;
    let mut rest = (x & (NORMAL - 1)) | NORMAL;
    // The unbiased exponent (field minus 127) is even if the field is odd.
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
    // Biased half of the exponent, minus the leading unit that the digits contain.
    ((digits + up) >> 1) + 0x3f00_0000 + (((exponent + 1) / 2) << 23) - SCALE_BITS
}
