//! The innermost kernel: one tile of C, held in registers over a block of k.
//!
//! Each element is one chain of multiply-adds in ascending k, whatever the tile: that is why the bits of a product do
//! not depend on how it was cut. It refuses to know whether A was packed or is read where it lies.
#![expect(clippy::needless_range_loop, reason = "indices are those of the formula")]

use super::LINE;
use super::isa::Isa;

/// One call of a kernel.
pub(super) struct Tile {
    /// Length of the block of k.
    pub(super) k: usize,
    /// By columns: element (i, k) at `k * a_stride + i`, as in a packed block. By rows: at `i * a_stride + k`.
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
pub(super) unsafe fn micro<I: Isa, const R: usize, const N: usize, const COLUMNS: bool>(tile: &Tile) {
    let (mut b, k, stride) = (tile.b, tile.k, tile.a_stride);
    for i in 0..R {
        for line in (0..N * I::LANES).step_by(LINE) {
            I::prefetch(tile.c.add(i * tile.c_stride + line));
        }
    }
    let mut rows: [*const f32; R] =
        std::array::from_fn(|i| tile.a.wrapping_add(if COLUMNS { i } else { i * stride }));
    let column = if COLUMNS { stride } else { 1 };
    let mut acc = [[I::zero(); N]; R];
    for _ in 0..k / 4 {
        step::<I, R, N>(&mut acc, &rows, 0, b);
        step::<I, R, N>(&mut acc, &rows, column, b.add(I::NR));
        step::<I, R, N>(&mut acc, &rows, 2 * column, b.add(2 * I::NR));
        step::<I, R, N>(&mut acc, &rows, 3 * column, b.add(3 * I::NR));
        rows = rows.map(|row| row.wrapping_add(4 * column));
        b = b.add(4 * I::NR);
    }
    for _ in 0..k % 4 {
        step::<I, R, N>(&mut acc, &rows, 0, b);
        rows = rows.map(|row| row.wrapping_add(column));
        b = b.add(I::NR);
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
unsafe fn step<I: Isa, const R: usize, const N: usize>(
    acc: &mut [[I::V; N]; R],
    rows: &[*const f32; R],
    at: usize,
    b: *const f32,
) {
    let mut row_b = [I::zero(); N];
    for j in 0..N {
        row_b[j] = I::load(b.add(j * I::LANES));
    }
    for i in 0..R {
        let x = I::splat(rows[i].add(at));
        for j in 0..N {
            acc[i][j] = I::mul_add(x, row_b[j], acc[i][j]);
        }
    }
}
