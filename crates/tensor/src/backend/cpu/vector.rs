//! Vectors of eight floats, for AVX2 and for every other CPU.
#![expect(unsafe_code, reason = "vector instructions; each function states what it relies on")]
#![expect(clippy::inline_always, reason = "vector code must take the target features of its caller")]

use super::simd::{Level, Portable};

/// Number of floats in a vector.
pub(super) const LANES: usize = 8;

/// 1.5 * 2^23. Adding it to a float below 2^22 rounds the float to an integer, which is then in the low bits of
/// the sum.
const ROUND: f32 = 12_582_912.0;

/// Operations on vectors of eight floats.
///
/// # Safety
/// Methods may only be inlined into a function that enables the instructions of this level, such as the copy
/// that [`simd!`](super::simd::simd) compiles for it. Pointers must be valid for eight floats.
pub(super) trait Vector: Level {
    type V: Copy;
    unsafe fn splat(x: f32) -> Self::V;
    unsafe fn load(p: *const f32) -> Self::V;
    unsafe fn store(p: *mut f32, v: Self::V);
    /// Returns `a * b + c`, fused if the level has FMA.
    unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn sub(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn div(a: Self::V, b: Self::V) -> Self::V;
    /// Returns `2^n` per lane, given lanes [`ROUND`]` + n` with `-127 <= n <= 127`; 0 for -127.
    unsafe fn power(t: Self::V) -> Self::V;
    /// Returns `a` if it is greater, else `b`, per lane.
    unsafe fn max(a: Self::V, b: Self::V) -> Self::V;
    /// Returns `a` if it is less, else `b`, per lane.
    unsafe fn min(a: Self::V, b: Self::V) -> Self::V;
    /// Prevents the compiler from moving the computation of these vectors past this point; the values do not
    /// change. It keeps independent chains of instructions interleaved. The compiler would otherwise order them
    /// one after the other to save registers, and the CPU would not look far enough ahead to run them in
    /// parallel.
    unsafe fn in_step<const N: usize>(v: &mut [Self::V; N]);
    /// Returns the first `n <= 8` lanes of `v`, and the remaining lanes of `rest`.
    unsafe fn first(n: usize, v: Self::V, rest: Self::V) -> Self::V;
    /// Returns `a` where `x` has a minus sign, else `b`, per lane.
    unsafe fn by_sign(x: Self::V, a: Self::V, b: Self::V) -> Self::V;
    /// Transposes 8 by 8: `dst[j * pitch + i] = src[i * stride + j]`.
    unsafe fn transpose(src: *const f32, stride: usize, dst: *mut f32, pitch: usize);
}

/// Returns `2^x` of each lane of several vectors, within 1.5 ulp (2 without FMA) for `x <= 127`. Below -126.5
/// the result is 0. NaN stays NaN.
///
/// Source: the coefficients minimise the greatest relative error, 2.6e-9, of a polynomial that is 1 at 0.
///
/// # Safety
/// As for [`Vector`].
#[inline(always)]
pub(super) unsafe fn exp2<L: Vector, const N: usize>(x: [L::V; N]) -> [L::V; N] {
    const COEFFICIENTS: [f32; 7] =
        [1.559_467_8e-4, 1.340_664_3e-3, 9.617_693e-3, 5.550_310_4e-2, 2.402_265_2e-1, 6.931_472_4e-1, 1.0];
    // SAFETY: guaranteed by the caller.
    unsafe {
        let (mut power, mut f) = (x, x);
        for i in 0..N {
            // This order of operands propagates NaN.
            f[i] = L::max(L::splat(-127.0), x[i]);
            power[i] = L::add(f[i], L::splat(ROUND));
        }
        L::in_step(&mut power);
        let mut p = [L::splat(COEFFICIENTS[0]); N];
        for i in 0..N {
            f[i] = L::sub(f[i], L::sub(power[i], L::splat(ROUND)));
        }
        for c in &COEFFICIENTS[1..] {
            for i in 0..N {
                p[i] = L::fma(p[i], f[i], L::splat(*c));
            }
            L::in_step(&mut p);
        }
        for i in 0..N {
            p[i] = L::mul(p[i], L::power(power[i]));
        }
        p
    }
}

/// Returns the sum of the lanes, always added in the same order.
///
/// # Safety
/// As for [`Vector`].
#[inline(always)]
pub(super) unsafe fn sum<L: Vector>(v: L::V) -> f32 {
    let mut x = [0.0; LANES];
    // SAFETY: the array has eight floats.
    unsafe { L::store(x.as_mut_ptr(), v) };
    ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7]))
}

/// Returns the greatest lane.
///
/// # Safety
/// As for [`Vector`].
#[inline(always)]
pub(super) unsafe fn greatest<L: Vector>(v: L::V) -> f32 {
    let larger = |a: f32, b: f32| if a > b { a } else { b };
    let mut x = [0.0; LANES];
    // SAFETY: the array has eight floats.
    unsafe { L::store(x.as_mut_ptr(), v) };
    larger(larger(larger(x[0], x[4]), larger(x[2], x[6])), larger(larger(x[1], x[5]), larger(x[3], x[7])))
}

impl Vector for Portable {
    type V = [f32; LANES];
    #[inline(always)]
    unsafe fn splat(x: f32) -> Self::V {
        [x; LANES]
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self::V {
        // SAFETY: guaranteed by the caller.
        unsafe { p.cast::<Self::V>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, v: Self::V) {
        // SAFETY: guaranteed by the caller.
        unsafe { p.cast::<Self::V>().write_unaligned(v) }
    }
    #[inline(always)]
    unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        std::array::from_fn(|i| a[i] * b[i] + c[i])
    }
    #[inline(always)]
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V {
        std::array::from_fn(|i| a[i] + b[i])
    }
    #[inline(always)]
    unsafe fn sub(a: Self::V, b: Self::V) -> Self::V {
        std::array::from_fn(|i| a[i] - b[i])
    }
    #[inline(always)]
    unsafe fn power(t: Self::V) -> Self::V {
        t.map(|t| f32::from_bits((t.to_bits() << 23).wrapping_add(127 << 23)))
    }
    #[inline(always)]
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V {
        std::array::from_fn(|i| a[i] * b[i])
    }
    #[inline(always)]
    unsafe fn div(a: Self::V, b: Self::V) -> Self::V {
        std::array::from_fn(|i| a[i] / b[i])
    }
    #[inline(always)]
    unsafe fn max(a: Self::V, b: Self::V) -> Self::V {
        std::array::from_fn(|i| if a[i] > b[i] { a[i] } else { b[i] })
    }
    #[inline(always)]
    unsafe fn min(a: Self::V, b: Self::V) -> Self::V {
        std::array::from_fn(|i| if a[i] < b[i] { a[i] } else { b[i] })
    }
    #[inline(always)]
    unsafe fn in_step<const N: usize>(_: &mut [Self::V; N]) {}
    #[inline(always)]
    unsafe fn first(n: usize, v: Self::V, rest: Self::V) -> Self::V {
        std::array::from_fn(|i| if i < n { v[i] } else { rest[i] })
    }
    #[inline(always)]
    unsafe fn by_sign(x: Self::V, a: Self::V, b: Self::V) -> Self::V {
        std::array::from_fn(|i| if x[i].is_sign_negative() { a[i] } else { b[i] })
    }
    #[inline(always)]
    unsafe fn transpose(src: *const f32, stride: usize, dst: *mut f32, pitch: usize) {
        for j in 0..LANES {
            for i in 0..LANES {
                // SAFETY: guaranteed by the caller.
                unsafe { *dst.add(j * pitch + i) = *src.add(i * stride + j) }
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod avx2 {
    use std::arch::asm;
    use std::arch::x86_64::{
        __m256, _mm_loadu_ps, _mm256_add_epi32, _mm256_add_ps, _mm256_blendv_ps, _mm256_castps_si256,
        _mm256_castps128_ps256, _mm256_castsi256_ps, _mm256_div_ps, _mm256_fmadd_ps, _mm256_insertf128_ps,
        _mm256_loadu_ps, _mm256_max_ps, _mm256_min_ps, _mm256_mul_ps, _mm256_set1_epi32, _mm256_set1_ps,
        _mm256_shuffle_ps, _mm256_slli_epi32, _mm256_storeu_ps, _mm256_sub_ps, _mm256_unpackhi_ps,
        _mm256_unpacklo_ps,
    };

    use super::super::simd::Avx2;
    use super::{LANES, Vector};

    /// `FIRST[LANES - n..]` is a mask of the first `n` lanes, in the sign bits.
    static FIRST: [f32; 2 * LANES] = {
        let mut signs = [0.0; 2 * LANES];
        let mut i = 0;
        while i < LANES {
            signs[i] = -0.0;
            i += 1;
        }
        signs
    };

    /// Executes nothing, but the compiler must assume that the register changes.
    #[inline]
    #[target_feature(enable = "avx")]
    fn hold(mut v: __m256) -> __m256 {
        // SAFETY: the assembly is only a comment.
        unsafe { asm!("/* {0} */", inout(ymm_reg) v, options(nomem, nostack, preserves_flags)) }
        v
    }

    // SAFETY (of every block below): the caller guarantees AVX2, FMA, valid pointers, and `n <= 8`.
    #[expect(clippy::undocumented_unsafe_blocks, reason = "one comment above serves all of these wrappers")]
    impl Vector for Avx2 {
        type V = __m256;
        #[inline(always)]
        unsafe fn splat(x: f32) -> __m256 {
            unsafe { _mm256_set1_ps(x) }
        }
        #[inline(always)]
        unsafe fn load(p: *const f32) -> __m256 {
            unsafe { _mm256_loadu_ps(p) }
        }
        #[inline(always)]
        unsafe fn store(p: *mut f32, v: __m256) {
            unsafe { _mm256_storeu_ps(p, v) }
        }
        #[inline(always)]
        unsafe fn fma(a: __m256, b: __m256, c: __m256) -> __m256 {
            unsafe { _mm256_fmadd_ps(a, b, c) }
        }
        #[inline(always)]
        unsafe fn add(a: __m256, b: __m256) -> __m256 {
            unsafe { _mm256_add_ps(a, b) }
        }
        #[inline(always)]
        unsafe fn sub(a: __m256, b: __m256) -> __m256 {
            unsafe { _mm256_sub_ps(a, b) }
        }
        #[inline(always)]
        unsafe fn power(t: __m256) -> __m256 {
            unsafe {
                let bits = _mm256_slli_epi32(_mm256_castps_si256(t), 23);
                _mm256_castsi256_ps(_mm256_add_epi32(bits, _mm256_set1_epi32(127 << 23)))
            }
        }
        #[inline(always)]
        unsafe fn mul(a: __m256, b: __m256) -> __m256 {
            unsafe { _mm256_mul_ps(a, b) }
        }
        #[inline(always)]
        unsafe fn div(a: __m256, b: __m256) -> __m256 {
            unsafe { _mm256_div_ps(a, b) }
        }
        #[inline(always)]
        unsafe fn max(a: __m256, b: __m256) -> __m256 {
            unsafe { _mm256_max_ps(a, b) }
        }
        #[inline(always)]
        unsafe fn min(a: __m256, b: __m256) -> __m256 {
            unsafe { _mm256_min_ps(a, b) }
        }
        #[inline(always)]
        unsafe fn in_step<const N: usize>(v: &mut [__m256; N]) {
            for v in v {
                *v = unsafe { hold(*v) };
            }
        }
        #[inline(always)]
        unsafe fn first(n: usize, v: __m256, rest: __m256) -> __m256 {
            unsafe { _mm256_blendv_ps(rest, v, _mm256_loadu_ps(FIRST.as_ptr().add(LANES - n))) }
        }
        #[inline(always)]
        unsafe fn by_sign(x: __m256, a: __m256, b: __m256) -> __m256 {
            unsafe { _mm256_blendv_ps(b, a, x) }
        }
        #[inline(always)]
        unsafe fn transpose(src: *const f32, stride: usize, dst: *mut f32, pitch: usize) {
            unsafe {
                // Half rows are loaded into their final halves, so that only unpacks and shuffles within halves
                // remain.
                for at in [0, 4] {
                    let mut r = [_mm256_set1_ps(0.0); 4];
                    for (i, r) in r.iter_mut().enumerate() {
                        let low = src.add(i * stride + at);
                        *r = _mm256_castps128_ps256(_mm_loadu_ps(low));
                        *r = _mm256_insertf128_ps(*r, _mm_loadu_ps(low.add(4 * stride)), 1);
                    }
                    let (lo01, hi01) = (_mm256_unpacklo_ps(r[0], r[1]), _mm256_unpackhi_ps(r[0], r[1]));
                    let (lo23, hi23) = (_mm256_unpacklo_ps(r[2], r[3]), _mm256_unpackhi_ps(r[2], r[3]));
                    let dst = dst.add(at * pitch);
                    _mm256_storeu_ps(dst, _mm256_shuffle_ps(lo01, lo23, 0x44));
                    _mm256_storeu_ps(dst.add(pitch), _mm256_shuffle_ps(lo01, lo23, 0xee));
                    _mm256_storeu_ps(dst.add(2 * pitch), _mm256_shuffle_ps(hi01, hi23, 0x44));
                    _mm256_storeu_ps(dst.add(3 * pitch), _mm256_shuffle_ps(hi01, hi23, 0xee));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::simd::{Isa, simd};
    use super::{LANES, Vector, exp2};

    simd! {
        fn powers<L: Level + Vector>(x: &mut [f32; LANES]) {
            // SAFETY: the array has eight floats, and this function is compiled for the level.
            unsafe { L::store(x.as_mut_ptr(), exp2::<L, 1>([L::load(x.as_ptr())])[0]) }
        }
    }

    #[test]
    fn powers_of_two_are_close_everywhere() {
        for isa in [Isa::detect(), Isa::PORTABLE] {
            let mut worst = 0.0_f64;
            for start in (-126_000_i32..127_000).step_by(LANES) {
                let x: [f32; LANES] = std::array::from_fn(|i| 1e-3 * (start as f32 + i as f32));
                let mut y = x;
                powers(isa, &mut y);
                for (x, y) in x.into_iter().zip(y) {
                    worst = worst.max((f64::from(y) / f64::from(x).exp2() - 1.0).abs());
                }
            }
            assert!(worst < 2.5e-7, "{isa:?}: {worst}");
            let mut y = [0.0, 1.0, -127.0, -1e30, f32::NEG_INFINITY, f32::NAN, -f32::NAN, f32::from_bits(!0)];
            powers(isa, &mut y);
            assert_eq!(y[..5], [1.0, 2.0, 0.0, 0.0, 0.0], "{isa:?}");
            assert!(y[5..].iter().all(|y| y.is_nan()), "{isa:?}");
        }
    }
}
