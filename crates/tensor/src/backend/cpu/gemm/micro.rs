//! The innermost kernel: one tile of C, held in registers over a block of k.
//!
//! Each element is one chain of multiply-adds in ascending k, whatever the tile: that is why the bits of a product do
//! not depend on how it was cut. It refuses to know how A and B were laid out before packing.

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
#[inline(always)]
pub(super) unsafe fn micro<I: Isa, const R: usize, const N: usize, const PACKED: bool>(tile: &Tile) {
    let (a, b, k) = (tile.a, tile.b, tile.k);
    let c_row = |i: usize| tile.c.add(i * tile.c_stride);
    for i in 0..R {
        I::prefetch(c_row(i));
    }
    let rows: [*const f32; R] =
        std::array::from_fn(|i| if PACKED { a.add(i) } else { a.add(i * tile.a_stride) });
    let mut acc = [[I::zero(); N]; R];
    let mut step = |k: usize| {
        let row_b: [I::V; N] = std::array::from_fn(|j| I::load(b.add(k * I::NR + j * I::LANES)));
        for (acc, row) in acc.iter_mut().zip(rows) {
            let x = I::splat(row.add(if PACKED { k * I::MR } else { k }));
            for (acc, b) in acc.iter_mut().zip(row_b) {
                *acc = I::mul_add(x, b, *acc);
            }
        }
    };
    let mut at = 0;
    while at + 4 <= k {
        step(at);
        step(at + 1);
        step(at + 2);
        step(at + 3);
        at += 4;
    }
    while at < k {
        step(at);
        at += 1;
    }

    if tile.columns == N * I::LANES {
        for (i, acc) in acc.into_iter().enumerate() {
            for (j, v) in acc.into_iter().enumerate() {
                let c = c_row(i).add(j * I::LANES);
                I::store(c, if tile.accumulate { I::add(I::load(c), v) } else { v });
            }
        }
    } else {
        let rest = tile.columns - (N - 1) * I::LANES;
        for (i, acc) in acc.into_iter().enumerate() {
            for (j, v) in acc.into_iter().enumerate() {
                let c = c_row(i).add(j * I::LANES);
                if j + 1 < N {
                    I::store(c, if tile.accumulate { I::add(I::load(c), v) } else { v });
                } else {
                    I::store_part(
                        c,
                        rest,
                        if tile.accumulate { I::add(I::load_part(c, rest), v) } else { v },
                    );
                }
            }
        }
    }
}
