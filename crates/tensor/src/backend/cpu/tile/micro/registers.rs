//! Vector instructions of the kernels: AVX2, AVX-512, and plain arrays for every other CPU.
//!
//! Every method is inlined into a function that enables the target features of its instruction set, so that
//! generic code over [`Registers`] compiles to that set.

use super::{Kernel, Tile, micro};
use crate::backend::cpu::simd;
use crate::backend::cpu::vector::Vector;

/// Number of columns that one [`Registers::transpose`] processes.
pub(in crate::backend::cpu) const BLOCK: usize = 8;

/// One instruction set, with the tile shape that suits its registers.
///
/// # Safety
/// Methods may only run on a CPU that has the instructions, inlined into a function that enables them.
pub(in crate::backend::cpu) trait Registers {
    /// A vector of `LANES` floats.
    type V: Copy;
    const LANES: usize;
    /// Operations that epilogues may use.
    type Level: Vector;
    /// Rows of a full tile: at most 8, and either 6 or 8 as [`Registers::transpose`] requires.
    const MR: usize;
    /// Maximum stride between columns of A at which contiguous columns are read in place instead of packed.
    /// With larger strides, columns map to too few lines of L1 cache. The default is 0 (always pack), because
    /// narrow tiles read each line more often.
    const NEAR_COLUMNS: usize = 0;
    /// Columns of a full tile: two vectors.
    const NR: usize = 2 * Self::LANES;

    unsafe fn zero() -> Self::V;
    unsafe fn splat(p: *const f32) -> Self::V;
    unsafe fn load(p: *const f32) -> Self::V;
    unsafe fn store(p: *mut f32, v: Self::V);
    /// Loads the first `n < LANES` elements; the memory after them is not accessed.
    unsafe fn load_part(p: *const f32, n: usize) -> Self::V;
    unsafe fn store_part(p: *mut f32, n: usize, v: Self::V);
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V;
    /// Returns `a * b + c`, fused if the CPU supports it.
    unsafe fn mul_add(a: Self::V, b: Self::V, c: Self::V) -> Self::V;

    /// Computes `dst[k * pitch + i] = src[i * stride + k]` for `k < BLOCK` and `i < rows`, zero for `rows <= i
    /// < width`. May write up to `BLOCK` elements from each `dst[k * pitch]` on, in ascending order of `k`.
    unsafe fn transpose(
        src: *const f32,
        stride: usize,
        rows: usize,
        dst: *mut f32,
        pitch: usize,
        width: usize,
    );

    /// Returns the kernel for a tile of `rows` rows and `vectors` vectors that reads A by columns or by rows.
    fn kernel(rows: usize, vectors: usize, columns: bool) -> Kernel;

    /// Returns the kernel for a full tile that packs B as it reads it.
    fn packing_kernel(columns: bool) -> Kernel;
}

/// Defines [`Registers::kernel`] and [`Registers::packing_kernel`] from the instances of a kernel function
/// `$f`.
macro_rules! kernels {
    ($f:ident, [$($r:literal)*]) => {
        fn kernel(rows: usize, vectors: usize, columns: bool) -> Kernel {
            match (rows, vectors, columns) {
                $(
                    ($r, 1, true) => $f::<$r, 1, true, false>,
                    ($r, 1, false) => $f::<$r, 1, false, false>,
                    ($r, 2, true) => $f::<$r, 2, true, false>,
                    ($r, 2, false) => $f::<$r, 2, false, false>,
                )*
                _ => unreachable!("tiles have 1 to MR rows and 1 or 2 vectors"),
            }
        }
        fn packing_kernel(columns: bool) -> Kernel {
            if columns { $f::<{ Self::MR }, 2, true, true> } else { $f::<{ Self::MR }, 2, false, true> }
        }
    };
}

/// Any CPU: arrays, which the compiler turns into the target's vectors.
pub(in crate::backend::cpu) struct Portable;

impl Registers for Portable {
    type V = [f32; 4];
    const LANES: usize = 4;
    type Level = simd::Portable;
    // 16 accumulators for the 32 registers of NEON; 12 if the CPU may have only 16 registers.
    const MR: usize = if cfg!(target_arch = "aarch64") { 8 } else { 6 };

    #[inline(always)]
    unsafe fn zero() -> Self::V {
        [0.0; 4]
    }
    #[inline(always)]
    unsafe fn splat(p: *const f32) -> Self::V {
        [*p; 4]
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self::V {
        p.cast::<[f32; 4]>().read_unaligned()
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, v: Self::V) {
        p.cast::<[f32; 4]>().write_unaligned(v);
    }
    #[inline(always)]
    unsafe fn load_part(p: *const f32, n: usize) -> Self::V {
        let mut v = [0.0; 4];
        p.copy_to_nonoverlapping(v.as_mut_ptr(), n);
        v
    }
    #[inline(always)]
    unsafe fn store_part(p: *mut f32, n: usize, v: Self::V) {
        p.copy_from_nonoverlapping(v.as_ptr(), n);
    }
    #[inline(always)]
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V {
        [a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3]]
    }
    #[inline(always)]
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V {
        [a[0] * b[0], a[1] * b[1], a[2] * b[2], a[3] * b[3]]
    }
    #[inline(always)]
    unsafe fn mul_add(a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        // Fused if the baseline has the instruction; otherwise `mul_add` would be a slow library call.
        if cfg!(target_arch = "aarch64") || cfg!(target_feature = "fma") {
            [
                a[0].mul_add(b[0], c[0]),
                a[1].mul_add(b[1], c[1]),
                a[2].mul_add(b[2], c[2]),
                a[3].mul_add(b[3], c[3]),
            ]
        } else {
            [a[0] * b[0] + c[0], a[1] * b[1] + c[1], a[2] * b[2] + c[2], a[3] * b[3] + c[3]]
        }
    }

    #[inline(always)]
    unsafe fn transpose(
        src: *const f32,
        stride: usize,
        rows: usize,
        dst: *mut f32,
        pitch: usize,
        width: usize,
    ) {
        for k in 0..BLOCK {
            for i in 0..width {
                *dst.add(k * pitch + i) = if i < rows { *src.add(i * stride + k) } else { 0.0 };
            }
        }
    }

    kernels!(portable, [1 2 3 4 5 6 7 8]);
}

unsafe fn portable<const R: usize, const N: usize, const C: bool, const P: bool>(tile: &Tile<'_>) {
    micro::<Portable, R, N, C, P>(tile);
}

#[cfg(target_arch = "x86_64")]
pub(in crate::backend::cpu) use x86::{Avx2, Avx512};

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{BLOCK, Kernel, Registers, Tile, micro, simd};
    #[allow(
        clippy::wildcard_imports,
        reason = "names of instructions; the lint is silent in test builds"
    )]
    use std::arch::x86_64::*;

    /// `MASK[8 - n..]` enables the first `n` of 8 lanes, for partial loads and stores.
    static MASK: [i32; 16] = [-1, -1, -1, -1, -1, -1, -1, -1, 0, 0, 0, 0, 0, 0, 0, 0];
    static ZEROS: [f32; BLOCK] = [0.0; BLOCK];

    /// Methods that both vector widths share, given the names of their instructions.
    macro_rules! vectors {
        ($v:ty: $zero:ident, $load:ident, $store:ident, $add:ident, $mul:ident, $fma:ident) => {
            type V = $v;
            #[inline(always)]
            unsafe fn zero() -> $v {
                $zero()
            }
            #[inline(always)]
            unsafe fn load(p: *const f32) -> $v {
                $load(p)
            }
            #[inline(always)]
            unsafe fn store(p: *mut f32, v: $v) {
                $store(p, v);
            }
            #[inline(always)]
            unsafe fn add(a: $v, b: $v) -> $v {
                $add(a, b)
            }
            #[inline(always)]
            unsafe fn mul(a: $v, b: $v) -> $v {
                $mul(a, b)
            }
            #[inline(always)]
            unsafe fn mul_add(a: $v, b: $v, c: $v) -> $v {
                $fma(a, b, c)
            }
            #[inline(always)]
            unsafe fn transpose(
                src: *const f32,
                stride: usize,
                rows: usize,
                dst: *mut f32,
                pitch: usize,
                _: usize,
            ) {
                transpose_8x8(src, stride, rows, dst, pitch);
            }
        };
    }

    /// 16 registers of 8 floats: 6 rows of 2 vectors as accumulators, and 3 registers for operands.
    pub(in crate::backend::cpu) struct Avx2;

    impl Registers for Avx2 {
        vectors!(__m256: _mm256_setzero_ps, _mm256_loadu_ps, _mm256_storeu_ps, _mm256_add_ps, _mm256_mul_ps, _mm256_fmadd_ps);
        const LANES: usize = 8;
        type Level = simd::Avx2;
        const MR: usize = 6;

        #[inline(always)]
        unsafe fn splat(p: *const f32) -> __m256 {
            _mm256_broadcast_ss(&*p)
        }
        #[inline(always)]
        unsafe fn load_part(p: *const f32, n: usize) -> __m256 {
            _mm256_maskload_ps(p, _mm256_loadu_si256(MASK.as_ptr().add(8 - n).cast()))
        }
        #[inline(always)]
        unsafe fn store_part(p: *mut f32, n: usize, v: __m256) {
            _mm256_maskstore_ps(p, _mm256_loadu_si256(MASK.as_ptr().add(8 - n).cast()), v);
        }
        kernels!(avx2, [1 2 3 4 5 6]);
    }

    #[target_feature(enable = "avx2,fma")]
    unsafe fn avx2<const R: usize, const N: usize, const C: bool, const P: bool>(tile: &Tile<'_>) {
        micro::<Avx2, R, N, C, P>(tile);
    }

    /// 32 registers of 16 floats. 8 rows of 2 vectors keep both multipliers busy and match the 8 by 8
    /// transpose.
    pub(in crate::backend::cpu) struct Avx512;

    impl Registers for Avx512 {
        vectors!(__m512: _mm512_setzero_ps, _mm512_loadu_ps, _mm512_storeu_ps, _mm512_add_ps, _mm512_mul_ps, _mm512_fmadd_ps);
        const LANES: usize = 16;
        type Level = simd::Avx2;
        const MR: usize = 8;
        const NEAR_COLUMNS: usize = 512;

        #[inline(always)]
        unsafe fn splat(p: *const f32) -> __m512 {
            _mm512_set1_ps(*p)
        }
        #[inline(always)]
        unsafe fn load_part(p: *const f32, n: usize) -> __m512 {
            _mm512_maskz_loadu_ps((1 << n) - 1, p)
        }
        #[inline(always)]
        unsafe fn store_part(p: *mut f32, n: usize, v: __m512) {
            _mm512_mask_storeu_ps(p, (1 << n) - 1, v);
        }
        kernels!(avx512, [1 2 3 4 5 6 7 8]);
    }

    #[target_feature(enable = "avx512f,avx2,fma")]
    unsafe fn avx512<const R: usize, const N: usize, const C: bool, const P: bool>(tile: &Tile<'_>) {
        micro::<Avx512, R, N, C, P>(tile);
    }

    /// Implements [`Registers::transpose`] with AVX. Half rows are loaded into their final halves, so that only
    /// unpacks and shuffles remain.
    #[inline(always)]
    unsafe fn transpose_8x8(src: *const f32, stride: usize, rows: usize, dst: *mut f32, pitch: usize) {
        let row: [*const f32; 8] =
            std::array::from_fn(|i| if i < rows { src.wrapping_add(i * stride) } else { ZEROS.as_ptr() });
        for at in [0, 4] {
            let r0 = pair(row[0].add(at), row[4].add(at));
            let r1 = pair(row[1].add(at), row[5].add(at));
            let r2 = pair(row[2].add(at), row[6].add(at));
            let r3 = pair(row[3].add(at), row[7].add(at));
            let (lo01, hi01) = (_mm256_unpacklo_ps(r0, r1), _mm256_unpackhi_ps(r0, r1));
            let (lo23, hi23) = (_mm256_unpacklo_ps(r2, r3), _mm256_unpackhi_ps(r2, r3));
            let dst = dst.add(at * pitch);
            _mm256_storeu_ps(dst, _mm256_shuffle_ps::<0x44>(lo01, lo23));
            _mm256_storeu_ps(dst.add(pitch), _mm256_shuffle_ps::<0xEE>(lo01, lo23));
            _mm256_storeu_ps(dst.add(2 * pitch), _mm256_shuffle_ps::<0x44>(hi01, hi23));
            _mm256_storeu_ps(dst.add(3 * pitch), _mm256_shuffle_ps::<0xEE>(hi01, hi23));
        }
    }

    #[inline(always)]
    unsafe fn pair(lo: *const f32, hi: *const f32) -> __m256 {
        _mm256_insertf128_ps::<1>(_mm256_castps128_ps256(_mm_loadu_ps(lo)), _mm_loadu_ps(hi))
    }
}
