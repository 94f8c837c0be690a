//! The arithmetic of one tile of attention: small matrix products held in registers, transposes, and the two passes over
//! rows of scores. It refuses to know heads, masks and where tensors live.
#![expect(
    unsafe_code,
    reason = "vector instructions and unchecked indexing; each entry point checks its bounds"
)]
#![expect(clippy::inline_always, reason = "vector code must take the target features of its caller")]

use std::ops::Range;

use super::super::simd::{Level, Portable, simd};
use super::super::vmath;

/// Floats in a vector.
const LANES: usize = 8;
/// Rows of a register tile.
const MR: usize = 6;
/// Columns of a register tile; matrices are padded to it.
pub(super) const NR: usize = 2 * LANES;

/// Vectors of eight floats.
///
/// # Safety
/// Methods may only be inlined into the copy that [`simd!`] compiles for this level; pointers must be valid for eight
/// floats.
trait Vector: Level {
    type V: Copy;
    unsafe fn zero() -> Self::V;
    unsafe fn splat(x: f32) -> Self::V;
    unsafe fn load(p: *const f32) -> Self::V;
    unsafe fn store(p: *mut f32, v: Self::V);
    unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V;
    /// `a` where it is greater, else `b`.
    unsafe fn max(a: Self::V, b: Self::V) -> Self::V;
    /// `dst[j * pitch + i] = src[i * stride + j]` for `i` and `j` below eight.
    unsafe fn transpose(src: *const f32, stride: usize, dst: *mut f32, pitch: usize);
}

impl Vector for Portable {
    type V = [f32; LANES];
    #[inline(always)]
    unsafe fn zero() -> Self::V {
        [0.0; LANES]
    }
    #[inline(always)]
    unsafe fn splat(x: f32) -> Self::V {
        [x; LANES]
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self::V {
        // SAFETY: the caller's promise.
        unsafe { p.cast::<Self::V>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, v: Self::V) {
        // SAFETY: the caller's promise.
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
    unsafe fn max(a: Self::V, b: Self::V) -> Self::V {
        std::array::from_fn(|i| if a[i] > b[i] { a[i] } else { b[i] })
    }
    #[inline(always)]
    unsafe fn transpose(src: *const f32, stride: usize, dst: *mut f32, pitch: usize) {
        for j in 0..LANES {
            for i in 0..LANES {
                // SAFETY: the caller's promise.
                unsafe { *dst.add(j * pitch + i) = *src.add(i * stride + j) }
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod avx2 {
    use std::arch::x86_64::{
        __m256, _mm256_add_ps, _mm256_fmadd_ps, _mm256_loadu_ps, _mm256_max_ps, _mm256_permute2f128_ps,
        _mm256_set1_ps, _mm256_setzero_ps, _mm256_shuffle_ps, _mm256_storeu_ps, _mm256_unpackhi_ps,
        _mm256_unpacklo_ps,
    };

    use super::super::super::simd::Avx2;
    use super::Vector;

    // SAFETY (of every block below): the caller promises AVX2, FMA and valid pointers.
    #[expect(clippy::undocumented_unsafe_blocks, reason = "one comment above serves all of these wrappers")]
    impl Vector for Avx2 {
        type V = __m256;
        #[inline(always)]
        unsafe fn zero() -> __m256 {
            unsafe { _mm256_setzero_ps() }
        }
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
        unsafe fn max(a: __m256, b: __m256) -> __m256 {
            unsafe { _mm256_max_ps(a, b) }
        }
        #[inline(always)]
        unsafe fn transpose(src: *const f32, stride: usize, dst: *mut f32, pitch: usize) {
            unsafe {
                let r: [__m256; 8] = std::array::from_fn(|i| _mm256_loadu_ps(src.add(i * stride)));
                // Pairs of rows, then fours, within each half of the register; then the halves.
                for k in 0..2 {
                    let pair = |i: usize| {
                        let (a, b) = (r[i], r[i + 1]);
                        if k == 0 { _mm256_unpacklo_ps(a, b) } else { _mm256_unpackhi_ps(a, b) }
                    };
                    let (p0, p2, p4, p6) = (pair(0), pair(2), pair(4), pair(6));
                    let (a, b) = (_mm256_shuffle_ps(p0, p2, 0x44), _mm256_shuffle_ps(p4, p6, 0x44));
                    let (c, d) = (_mm256_shuffle_ps(p0, p2, 0xee), _mm256_shuffle_ps(p4, p6, 0xee));
                    let row = |j: usize| dst.add((2 * k + j) * pitch);
                    _mm256_storeu_ps(row(0), _mm256_permute2f128_ps(a, b, 0x20));
                    _mm256_storeu_ps(row(1), _mm256_permute2f128_ps(c, d, 0x20));
                    _mm256_storeu_ps(row(4), _mm256_permute2f128_ps(a, b, 0x31));
                    _mm256_storeu_ps(row(5), _mm256_permute2f128_ps(c, d, 0x31));
                }
            }
        }
    }
}

/// Operands of [`product`]: `C (+)= A B`.
pub(super) struct Product<'a> {
    /// Rows of `C`.
    pub(super) rows: usize,
    /// Element (i, k) of `A` is at `i * a_row + k * a_col`.
    pub(super) a: &'a [f32],
    pub(super) a_row: usize,
    pub(super) a_col: usize,
    /// Element (k, j) is at `k * b_row + j`.
    pub(super) b: &'a [f32],
    pub(super) b_row: usize,
    /// Element (i, j) is at `i * c_row + j`.
    pub(super) c: &'a mut [f32],
    pub(super) c_row: usize,
    /// Whether to add to `C` rather than overwrite it.
    pub(super) accumulate: bool,
}

/// One register tile: `R` rows of `C` and `NR` columns.
///
/// # Safety
/// As [`Vector`]; `k > 0`, and the pointers are valid for the tile.
#[inline(always)]
#[expect(clippy::too_many_arguments, reason = "the operands of one product")]
unsafe fn tile<L: Vector, const R: usize>(
    a: *const f32,
    (a_row, a_col): (usize, usize),
    b: *const f32,
    b_row: usize,
    c: *mut f32,
    c_row: usize,
    k: usize,
    accumulate: bool,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let mut acc = [[L::zero(); 2]; R];
        for k in 0..k {
            let b = b.add(k * b_row);
            let (b0, b1) = (L::load(b), L::load(b.add(LANES)));
            for (i, acc) in acc.iter_mut().enumerate() {
                let x = L::splat(*a.add(i * a_row + k * a_col));
                acc[0] = L::fma(x, b0, acc[0]);
                acc[1] = L::fma(x, b1, acc[1]);
            }
        }
        for (i, acc) in acc.into_iter().enumerate() {
            for (j, v) in acc.into_iter().enumerate() {
                let c = c.add(i * c_row + j * LANES);
                L::store(c, if accumulate { L::add(v, L::load(c)) } else { v });
            }
        }
    }
}

simd! {
    /// Computes `C (+)= A B` where `span` says so: given rows of `C`, it returns the range of `k` to sum over and the number
    /// of columns that are wanted (rounded up to [`NR`] here).
    pub(super) fn product<L: Level + Vector>(
        p: Product<'_>,
        span: &dyn Fn(Range<usize>) -> (Range<usize>, usize),
    ) {
        let Product { rows, a, a_row, a_col, b, b_row, c, c_row, accumulate } = p;
        let blocks = || (0..rows).step_by(MR).map(|i| i..rows.min(i + MR));
        let widest = blocks().map(|r| span(r).1).max().unwrap_or(0);
        for j in (0..widest).step_by(NR) {
            for r in blocks() {
                let (k, cols) = span(r.clone());
                if j >= cols || k.is_empty() {
                    continue;
                }
                let (last, last_k) = (r.end - 1, k.end - 1);
                assert!(last * a_row + last_k * a_col < a.len(), "A is too short");
                assert!(last_k * b_row + j + NR <= b.len(), "B is too short");
                assert!(last * c_row + j + NR <= c.len(), "C is too short");
                // SAFETY: the last element of each operand's tile lies within its slice, and offsets only grow with the
                // indices; this function is compiled for the level.
                unsafe {
                    let a = a.as_ptr().add(r.start * a_row + k.start * a_col);
                    let b = b.as_ptr().add(k.start * b_row + j);
                    let c = c.as_mut_ptr().add(r.start * c_row + j);
                    let (at, n) = ((a_row, a_col), k.len());
                    match r.len() {
                        6 => tile::<L, 6>(a, at, b, b_row, c, c_row, n, accumulate),
                        5 => tile::<L, 5>(a, at, b, b_row, c, c_row, n, accumulate),
                        4 => tile::<L, 4>(a, at, b, b_row, c, c_row, n, accumulate),
                        3 => tile::<L, 3>(a, at, b, b_row, c, c_row, n, accumulate),
                        2 => tile::<L, 2>(a, at, b, b_row, c, c_row, n, accumulate),
                        _ => tile::<L, 1>(a, at, b, b_row, c, c_row, n, accumulate),
                    }
                }
            }
        }
    }
}

simd! {
    /// `dst[j * pitch + i] = src[i * stride + j]` for `i < rows`, `j < cols`.
    pub(super) fn transpose<L: Level + Vector>(
        src: &[f32],
        stride: usize,
        rows: usize,
        cols: usize,
        dst: &mut [f32],
        pitch: usize,
    ) {
        if rows == 0 || cols == 0 {
            return;
        }
        assert!((rows - 1) * stride + cols <= src.len(), "the source is too short");
        assert!((cols - 1) * pitch + rows <= dst.len(), "the destination is too short");
        let (whole_rows, whole_cols) = (rows / LANES * LANES, cols / LANES * LANES);
        for j in (0..whole_cols).step_by(LANES) {
            for i in (0..whole_rows).step_by(LANES) {
                // SAFETY: the block lies within both matrices, whose last elements were checked above; this function is
                // compiled for the level.
                unsafe {
                    let (src, dst) = (src.as_ptr().add(i * stride + j), dst.as_mut_ptr().add(j * pitch + i));
                    L::transpose(src, stride, dst, pitch);
                }
            }
        }
        for i in 0..rows {
            for j in if i < whole_rows { whole_cols } else { 0 }..cols {
                dst[j * pitch + i] = src[i * stride + j];
            }
        }
    }
}

/// Sum of the lanes, always in the same order.
fn sum(v: [f32; LANES]) -> f32 {
    ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]))
}

simd! {
    /// Replaces the scores `s` by `e^(s - top)` where `top` is the greatest of them and of `top`; returns it and the sum of
    /// the results. Elements of minus infinity become 0.
    pub(super) fn softmax_row<L: Level + Vector>(s: &mut [f32], top: f32) -> (f32, f32) {
        assert!(s.len().is_multiple_of(LANES), "rows are padded to whole vectors");
        let mut lanes = [top; LANES];
        // SAFETY: chunks and `lanes` have eight floats; this function is compiled for the level.
        unsafe {
            let mut tops = L::load(lanes.as_ptr());
            for s in s.chunks_exact(LANES) {
                tops = L::max(L::load(s.as_ptr()), tops);
            }
            L::store(lanes.as_mut_ptr(), tops);
        }
        let top = lanes.into_iter().fold(top, f32::max);
        // A loop of its own, which the vectoriser takes only without a sum in it.
        for s in &mut *s {
            *s = vmath::exp::<L>(*s - top);
        }
        // SAFETY: as above.
        unsafe {
            let mut sums = L::zero();
            for s in s.chunks_exact(LANES) {
                sums = L::add(sums, L::load(s.as_ptr()));
            }
            L::store(lanes.as_mut_ptr(), sums);
        }
        (top, sum(lanes))
    }
}

simd! {
    /// Replaces the scores `s` by probabilities `p = e^(s - lse)`, and `dp` by the gradient of the scores, `p (dp - mean)`.
    pub(super) fn softmax_grad_row<L: Level>(s: &mut [f32], dp: &mut [f32], lse: f32, mean: f32) {
        for (s, dp) in s.iter_mut().zip(dp) {
            *s = vmath::exp::<L>(*s - lse);
            *dp = *s * (*dp - mean);
        }
    }
}

simd! {
    /// `dst = scale * src`.
    pub(super) fn scaled<L: Level>(dst: &mut [f32], src: &[f32], scale: f32) {
        for (dst, src) in dst.iter_mut().zip(src) {
            *dst = scale * src;
        }
    }
}

simd! {
    /// `dst *= scale`.
    pub(super) fn scale<L: Level>(dst: &mut [f32], scale: f32) {
        for dst in dst {
            *dst *= scale;
        }
    }
}

simd! {
    /// Inner product.
    pub(super) fn dot<L: Level>(a: &[f32], b: &[f32]) -> f32 {
        let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
        let mut sums = [0.0; LANES];
        for (a, b) in a.iter().zip(b) {
            for (sum, (&a, &b)) in sums.iter_mut().zip(a.iter().zip(b)) {
                *sum = L::mul_add(a, b, *sum);
            }
        }
        a_rest.iter().zip(b_rest).fold(sum(sums), |sum, (&a, &b)| L::mul_add(a, b, sum))
    }
}
