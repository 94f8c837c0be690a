//! Magnitudes of floats as integers: the largest of a vector, and whether all are finite.

/// Writes `x + e` to `out` and returns the bits of the largest magnitude in it, as [`max_magnitude`] does.
#[expect(clippy::inline_always, reason = "part of kernels")]
#[inline(always)]
pub(crate) fn sum(x: &[f32], e: &[f32], out: &mut [f32]) -> i32 {
    let mut max = 0;
    for ((sum, x), e) in out.iter_mut().zip(x).zip(e) {
        *sum = x + e;
        max = max.max(magnitude(*sum));
    }
    max
}

/// Returns the bits of the largest magnitude.
///
/// Magnitudes have the same order as their bits. Infinity is above all finite magnitudes, and NaN above
/// infinity.
#[expect(clippy::inline_always, reason = "part of kernels")]
#[inline(always)]
pub(crate) fn max_magnitude(x: &[f32]) -> i32 {
    x.iter().fold(0, |max, x| max.max(magnitude(*x)))
}

/// Returns the bits of `|x|`, as `i32` because some instruction sets (SSE2) compare signed integers only.
#[expect(clippy::inline_always, reason = "part of kernels")]
#[inline(always)]
pub(crate) fn magnitude(x: f32) -> i32 {
    (x.to_bits() & 0x7fff_ffff).cast_signed()
}

/// The [`magnitude`] of infinity; that of NaN is larger.
pub(crate) const INFINITE: i32 = f32::INFINITY.to_bits().cast_signed();
