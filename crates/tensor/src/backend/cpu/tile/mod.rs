//! Tiles of a matrix product that are held in registers: what products of any size and attention are made of.
//! It refuses to know blocks, threads and what a tile is part of.
#![expect(unsafe_code, reason = "vector instructions")]
#![expect(unsafe_op_in_unsafe_fn, reason = "kernels are unsafe throughout; each states what it relies on")]
#![expect(clippy::inline_always, reason = "instructions must end up inside the function that enables them")]

mod micro;
mod registers;

pub(super) use micro::{Kernel, Share, Tile, Update};
#[cfg(target_arch = "x86_64")]
pub(super) use registers::{Avx2, Avx512};
pub(super) use registers::{BLOCK, Portable, Registers};

use super::simd::{Isa, Tag};

/// Floats of a cache line.
pub(super) const LINE: usize = 16;
/// Rows of the highest tile.
pub(super) const MOST_ROWS: usize = 8;

/// Asks for the cache line of `p`, which need not be valid, to be used soon.
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

/// As [`prefetch`], without disturbing the first-level cache.
#[inline(always)]
pub(super) fn prefetch_far(p: *const f32) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: as above.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T1>(p.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = p;
}

/// A full tile.
#[derive(Debug, Clone, Copy)]
pub(super) struct Full {
    pub(super) rows: usize,
    /// Two vectors: at most two cache lines.
    pub(super) columns: usize,
}

impl Full {
    const fn of<I: Registers>() -> Self {
        const { assert!(I::MR <= MOST_ROWS && I::NR <= 2 * LINE) };
        Self { rows: I::MR, columns: I::NR }
    }

    /// Floats of a vector.
    pub(super) const fn lanes(self) -> usize {
        self.columns / 2
    }
}

impl Isa {
    /// The tile that suits its registers.
    pub(super) const fn tile(self) -> Full {
        match self.tag() {
            Tag::Portable => Full::of::<Portable>(),
            #[cfg(target_arch = "x86_64")]
            Tag::Avx2 => Full::of::<Avx2>(),
            #[cfg(target_arch = "x86_64")]
            Tag::Avx512 => Full::of::<Avx512>(),
        }
    }

    /// [`Registers::kernel`]: this machine has the instructions that it needs.
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
