//! The innermost kernel: one tile of C, held in registers over a block of k.
//!
//! Each element is one chain of multiply-adds in ascending k, whatever the tile: that is why the bits of a product do
//! not depend on how it was cut. It refuses to know how A and B were laid out before packing.
#![expect(clippy::needless_range_loop, reason = "indices are those of the formula")]

use super::isa::Isa;

/// One call of a kernel.
pub(super) struct Tile {
    /// Length of the block of k.
    pub(super) k: usize,
    /// Packed: element (i, k) at `k * MR + i`. In place: at `i * a_stride + k`.
    pub(super) a: *const f32,
    pub(super) a_stride: usize,
    /// Packed: element (k, j) at `k * NR + j`.
    pub(super) b: *const f32,
    /// Element (i, j) at `i * c_stride + j`.
    pub(super) c: *mut f32,
    pub(super) c_stride: usize,
    /// Columns of C that exist; the kernel's vectors cover them and less than one vector more.
    pub(super) columns: usize,
    /// Whether C is added to, rather than overwritten.
    pub(super) accumulate: bool,
}

/// A kernel for one shape of tile.
///
/// # Safety
/// The CPU has the kernel's instructions, and the tile's pointers are valid for its shape.
pub(super) type Kernel = unsafe fn(&Tile);

/// `C (+)= A B` for a tile of `R` rows and `N` vectors.
///
/// No closure here holds an instruction: it would not inherit the caller's features.
#[inline(always)]
pub(super) unsafe fn micro<I: Isa, const R: usize, const N: usize, const PACKED: bool>(tile: &Tile) {
    let (a, b, k) = (tile.a, tile.b, tile.k);
    for i in 0..R {
        I::prefetch(tile.c.add(i * tile.c_stride));
    }
    let rows: [*const f32; R] =
        std::array::from_fn(|i| a.wrapping_add(if PACKED { i } else { i * tile.a_stride }));
    let mut acc = [[I::zero(); N]; R];
    let mut at = 0;
    while at + 4 <= k {
        step::<I, R, N, PACKED>(&mut acc, &rows, b, at);
        step::<I, R, N, PACKED>(&mut acc, &rows, b, at + 1);
        step::<I, R, N, PACKED>(&mut acc, &rows, b, at + 2);
        step::<I, R, N, PACKED>(&mut acc, &rows, b, at + 3);
        at += 4;
    }
    while at < k {
        step::<I, R, N, PACKED>(&mut acc, &rows, b, at);
        at += 1;
    }

    let rest = tile.columns - (N - 1) * I::LANES;
    for i in 0..R {
        for j in 0..N {
            let c = tile.c.add(i * tile.c_stride + j * I::LANES);
            let v = acc[i][j];
            if j + 1 < N || rest == I::LANES {
                I::store(c, if tile.accumulate { I::add(I::load(c), v) } else { v });
            } else {
                I::store_part(c, rest, if tile.accumulate { I::add(I::load_part(c, rest), v) } else { v });
            }
        }
    }
}

/// One k: a row of B times a column of A.
#[inline(always)]
unsafe fn step<I: Isa, const R: usize, const N: usize, const PACKED: bool>(
    acc: &mut [[I::V; N]; R],
    rows: &[*const f32; R],
    b: *const f32,
    k: usize,
) {
    let mut row_b = [I::zero(); N];
    for j in 0..N {
        row_b[j] = I::load(b.add(k * I::NR + j * I::LANES));
    }
    for i in 0..R {
        let x = I::splat(rows[i].add(if PACKED { k * I::MR } else { k }));
        for j in 0..N {
            acc[i][j] = I::mul_add(x, row_b[j], acc[i][j]);
        }
    }
}
