//! The innermost kernel of matrix products: computes one tile of C, held in registers over a block of k.
//!
//! Each element is one chain of multiply-adds in ascending k, for every tile shape. Therefore the bits of a
//! product do not depend on how it was divided into tiles. A may be packed or read in place.
#![expect(clippy::needless_range_loop, reason = "indices are those of the formula")]

pub(super) mod registers;

use super::{LINE, MOST_ROWS, prefetch};
use registers::Registers;

/// Arguments of a kernel.
pub(in super::super) struct Tile<'a> {
    /// Length of the block of k.
    pub(in super::super) k: usize,
    /// A. If read by columns (as in a packed block), element (i, k) is at `k * a_stride + i`; if by rows,
    /// at `i * a_stride + k`.
    pub(in super::super) a: *const f32,
    pub(in super::super) a_stride: usize,
    /// Packed B: element (k, j) is at `k * NR + j`.
    pub(in super::super) b: *mut f32,
    /// B in its original place, for a kernel that packs it: element (k, j) is at `k * b_stride + j`.
    pub(in super::super) b_from: *const f32,
    pub(in super::super) b_stride: usize,
    /// C: element (i, j) is at `i * c_stride + j`.
    pub(in super::super) c: *mut f32,
    pub(in super::super) c_stride: usize,
    /// Number of columns of C in the tile. Only the last of the kernel's vectors may be partly used.
    pub(in super::super) columns: usize,
    pub(in super::super) update: Update<'a>,
}

/// How the product is combined with C.
#[derive(Clone, Copy)]
pub(in super::super) enum Update<'a> {
    /// `C = A B`.
    Overwrite,
    /// `C = C + A B`.
    Add,
    /// `C = new A B`, with one `new` per row.
    Scaled(&'a [RowFactors; MOST_ROWS]),
    /// `C = old C + new A B`, with one `old` and one `new` per row.
    Blend(&'a [RowFactors; MOST_ROWS]),
}

/// Factors with which a row of a product is combined with a row of C.
#[derive(Debug, Clone, Copy)]
pub(in super::super) struct RowFactors {
    /// Factor of C's row.
    pub(in super::super) old: f32,
    /// Factor of the product's row.
    pub(in super::super) new: f32,
}

/// A kernel for one tile shape.
///
/// # Safety
/// The CPU must have the kernel's instructions, and the tile's pointers must be valid for its shape.
pub(in super::super) type Kernel = unsafe fn(&Tile<'_>);

/// Computes a tile of `R` rows and `N` vectors, and updates C. With `PACKS`, B is read in its original place
/// and packed in passing; the multiply-adds hide the cost.
///
/// Closures must not contain vector instructions: they would not inherit the caller's target features.
#[inline(always)]
pub(in super::super) unsafe fn micro<
    I: Registers,
    const R: usize,
    const N: usize,
    const COLUMNS: bool,
    const PACKS: bool,
>(
    tile: &Tile<'_>,
) {
    let (k, stride) = (tile.k, tile.a_stride);
    let mut b = if PACKS {
        RowOfB { at: tile.b_from, stride: tile.b_stride, packed: tile.b }
    } else {
        RowOfB { at: tile.b, stride: I::NR, packed: tile.b }
    };
    for i in 0..R {
        for line in (0..N * I::LANES).step_by(LINE) {
            prefetch(tile.c.wrapping_add(i * tile.c_stride + line));
        }
    }
    let mut rows: [*const f32; R] =
        std::array::from_fn(|i| tile.a.wrapping_add(if COLUMNS { i } else { i * stride }));
    let column = if COLUMNS { stride } else { 1 };
    let mut acc = [[I::zero(); N]; R];
    for _ in 0..k / 4 {
        step::<I, R, N, PACKS>(&mut acc, &rows, 0, b);
        step::<I, R, N, PACKS>(&mut acc, &rows, column, b.after::<I>(1));
        step::<I, R, N, PACKS>(&mut acc, &rows, 2 * column, b.after::<I>(2));
        step::<I, R, N, PACKS>(&mut acc, &rows, 3 * column, b.after::<I>(3));
        advance(&mut rows, 4 * column);
        b = b.after::<I>(4);
    }
    for _ in 0..k % 4 {
        step::<I, R, N, PACKS>(&mut acc, &rows, 0, b);
        advance(&mut rows, column);
        b = b.after::<I>(1);
    }

    let rest = tile.columns - (N - 1) * I::LANES;
    for i in 0..R {
        for j in 0..N {
            let c = tile.c.add(i * tile.c_stride + j * I::LANES);
            if j + 1 < N || rest == I::LANES {
                let old = if tile.update.reads() { I::load(c) } else { I::zero() };
                I::store(c, tile.update.value::<I>(i, old, acc[i][j]));
            } else {
                let old = if tile.update.reads() { I::load_part(c, rest) } else { I::zero() };
                I::store_part(c, rest, tile.update.value::<I>(i, old, acc[i][j]));
            }
        }
    }
}

impl Update<'_> {
    /// Returns the update with factors per row. For the `first` product, C has no valid contents and is
    /// overwritten.
    pub(in super::super) const fn shares(shares: &[RowFactors; MOST_ROWS], first: bool) -> Update<'_> {
        if first { Update::Scaled(shares) } else { Update::Blend(shares) }
    }

    /// Returns whether the update reads C.
    #[inline(always)]
    const fn reads(self) -> bool {
        matches!(self, Self::Add | Self::Blend(_))
    }

    /// Returns the value to store in row `i`.
    #[inline(always)]
    unsafe fn value<I: Registers>(self, i: usize, old: I::V, product: I::V) -> I::V {
        match self {
            Self::Overwrite => product,
            Self::Add => I::add(old, product),
            Self::Scaled(shares) => I::mul(I::splat(&raw const shares[i].new), product),
            Self::Blend(shares) => {
                let product = I::mul(I::splat(&raw const shares[i].new), product);
                I::mul_add(I::splat(&raw const shares[i].old), old, product)
            }
        }
    }
}

/// A row of B: where it is read, and where it is packed to.
#[derive(Clone, Copy)]
struct RowOfB {
    at: *const f32,
    stride: usize,
    packed: *mut f32,
}

impl RowOfB {
    /// Returns the row `k` rows after this one.
    #[inline(always)]
    fn after<I: Registers>(self, k: usize) -> Self {
        let at = self.at.wrapping_add(k * self.stride);
        Self { at, packed: self.packed.wrapping_add(k * I::NR), ..self }
    }
}

/// Advances the pointers by `by` elements. A loop, because `map` on arrays is not inlined in crates built
/// without link-time optimisation.
#[inline(always)]
fn advance<const R: usize>(rows: &mut [*const f32; R], by: usize) {
    for row in rows {
        *row = row.wrapping_add(by);
    }
}

/// Adds one step of k: the outer product of a column of A and a row of B.
#[inline(always)]
unsafe fn step<I: Registers, const R: usize, const N: usize, const PACKS: bool>(
    acc: &mut [[I::V; N]; R],
    rows: &[*const f32; R],
    at: usize,
    b: RowOfB,
) {
    let mut row_b = [I::zero(); N];
    for j in 0..N {
        row_b[j] = I::load(b.at.add(j * I::LANES));
        if PACKS {
            I::store(b.packed.add(j * I::LANES), row_b[j]);
        }
    }
    for i in 0..R {
        let x = I::splat(rows[i].add(at));
        for j in 0..N {
            acc[i][j] = I::mul_add(x, row_b[j], acc[i][j]);
        }
    }
}
