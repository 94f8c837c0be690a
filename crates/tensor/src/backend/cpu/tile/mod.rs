//! Register tiles of matrix products, used by products of any size and by attention.
#![expect(unsafe_code, reason = "vector instructions")]
#![expect(unsafe_op_in_unsafe_fn, reason = "kernels are unsafe throughout; each states what it relies on")]
#![expect(clippy::inline_always, reason = "instructions must end up inside the function that enables them")]

mod micro;

#[cfg(target_arch = "x86_64")]
pub(super) use micro::registers::{Avx2, Avx512};
pub(super) use micro::registers::{BLOCK, Portable, Registers};
pub(super) use micro::{Kernel, RowFactors, Tile, Update};

use super::simd::{Isa, Tag};

/// Number of floats in a cache line.
pub(super) const LINE: usize = 16;
/// Maximum number of rows of a tile.
pub(super) const MOST_ROWS: usize = 8;

/// Prefetches the cache line of `p` into L1 cache. `p` need not be valid.
#[inline(always)]
pub(super) fn prefetch(p: *const f32) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every CPU of this architecture has the instruction, and it never faults.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(p.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = p;
}

/// Prefetches into L2 cache and leaves L1 unchanged.
#[inline(always)]
pub(super) fn prefetch_far(p: *const f32) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: as in `prefetch`.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T1>(p.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = p;
}

/// Shape of a full tile.
#[derive(Debug, Clone, Copy)]
pub(super) struct Full {
    pub(super) rows: usize,
    /// Two vectors, which are at most two cache lines.
    pub(super) columns: usize,
}

impl Full {
    const fn of<I: Registers>() -> Self {
        const { assert!(I::MR <= MOST_ROWS && I::NR <= 2 * LINE) };
        Self { rows: I::MR, columns: I::NR }
    }

    /// Returns the number of floats in a vector.
    pub(super) const fn lanes(self) -> usize {
        self.columns / 2
    }
}

impl Isa {
    /// Returns the shape of a full tile for this instruction set.
    pub(super) const fn tile(self) -> Full {
        match self.tag() {
            Tag::Portable => Full::of::<Portable>(),
            #[cfg(target_arch = "x86_64")]
            Tag::Avx2 => Full::of::<Avx2>(),
            #[cfg(target_arch = "x86_64")]
            Tag::Avx512 => Full::of::<Avx512>(),
        }
    }

    /// Returns [`Registers::kernel`] of this instruction set. `self` proves that the CPU has the instructions.
    pub(super) fn kernel(self, rows: usize, vectors: usize, columns: bool) -> Kernel {
        match self.tag() {
            Tag::Portable => Portable::kernel(rows, vectors, columns),
            #[cfg(target_arch = "x86_64")]
            Tag::Avx2 => Avx2::kernel(rows, vectors, columns),
            #[cfg(target_arch = "x86_64")]
            Tag::Avx512 => Avx512::kernel(rows, vectors, columns),
        }
    }
}
