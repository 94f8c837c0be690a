//! Matrix products of f32: `C = A B` or `C += A B`, with any transposition and size, and with an elementwise
//! epilogue on rows of C that are still in cache.
//!
//! The kernels follow BLIS: panels of A and B are packed into cache and multiplied tile by tile in registers,
//! with AVX2 or AVX-512 if the CPU has them. Each element of C is summed in an order that depends only on k: in
//! blocks of at most 384, each a chain of multiply-adds. Its bits therefore do not depend on the number
//! of threads, on strides and transposition, or on its position in the matrix.
//!
//! Source: Van Zee and van de Geijn 2015, "BLIS: A Framework for Rapidly Instantiating BLAS Functionality".
//! Differs: a panel of B is packed at its first use (if its columns are contiguous, by the kernel that uses
//! it), while the memory of the next panel is prefetched.
#![expect(unsafe_code, reason = "vector instructions, and disjoint parts of C written by several threads")]
#![expect(unsafe_op_in_unsafe_fn, reason = "kernels are unsafe throughout; each states what it relies on")]
#![expect(clippy::inline_always, reason = "instructions must end up inside the function that enables them")]

mod pack;
mod region;
#[cfg(test)]
mod tests;

use std::ops::Range;

use super::pool::Pool;
use super::simd::{Isa, Tag};
use super::tile::{Full, Portable};
use super::vector::Vector;
use region::{Product, region};

/// A read-only matrix: element (i, j) is at `data[i * row_stride + j * col_stride]`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mat<'a> {
    data: &'a [f32],
    rows: usize,
    cols: usize,
    row_stride: usize,
    col_stride: usize,
}

/// Returns the number of elements from the first to the last of `count` strided steps in each dimension; `None`
/// on overflow.
fn span(dims: &[(usize, usize)]) -> Option<usize> {
    if dims.iter().any(|&(count, _)| count == 0) {
        return Some(0);
    }
    dims.iter().try_fold(1_usize, |sum, &(count, stride)| sum.checked_add((count - 1).checked_mul(stride)?))
}

impl<'a> Mat<'a> {
    /// Creates a matrix. Panics if an element would be outside `data`.
    pub(crate) fn new(
        data: &'a [f32],
        rows: usize,
        cols: usize,
        row_stride: usize,
        col_stride: usize,
    ) -> Self {
        let need = span(&[(rows, row_stride), (cols, col_stride)]);
        assert!(need.is_some_and(|need| need <= data.len()), "matrix exceeds its data");
        Self { data, rows, cols, row_stride, col_stride }
    }

    /// Creates a matrix with rows of `cols` contiguous elements, `ld` apart.
    pub(crate) fn row_major(data: &'a [f32], rows: usize, cols: usize, ld: usize) -> Self {
        Self::new(data, rows, cols, ld, 1)
    }

    /// Returns the transpose.
    pub(crate) const fn t(self) -> Self {
        let Self { data, rows, cols, row_stride, col_stride } = self;
        Self { data, rows: cols, cols: rows, row_stride: col_stride, col_stride: row_stride }
    }
}

/// A writable matrix: rows of `cols` contiguous elements, `ld` apart.
#[derive(Debug)]
pub(crate) struct MatMut<'a> {
    data: &'a mut [f32],
    rows: usize,
    cols: usize,
    ld: usize,
}

impl<'a> MatMut<'a> {
    /// Creates a matrix. Panics if a row would be outside `data` or overlap the next one.
    pub(crate) fn new(data: &'a mut [f32], rows: usize, cols: usize, ld: usize) -> Self {
        let need = span(&[(rows, ld), (cols, 1)]);
        assert!(need.is_some_and(|need| need <= data.len()), "matrix exceeds its data");
        assert!(rows <= 1 || ld >= cols, "rows overlap");
        Self { data, rows, cols, ld }
    }
}

/// How the product is combined with the contents of C.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Init {
    /// `C = A B`.
    Overwrite,
    /// `C += A B`.
    Accumulate,
}

/// Elementwise operation on C when its sums are complete.
pub(crate) trait Epilogue: Sync {
    /// Processes a segment of a row; `c[0]` is element (`row`, `col`). Each element is passed once. It is
    /// called inside the function that enables the CPU's vector instructions: mark it `#[inline(always)]`, so
    /// that its loops use them.
    fn row<L: Vector>(&self, row: usize, col: usize, c: &mut [f32]);

    /// Returns the address of element (`row`, `col`) of a second matrix that [`Epilogue::row`] accesses. It is
    /// prefetched while the product is computed.
    #[inline(always)]
    fn beside(&self, _row: usize, _col: usize) -> Option<*const f32> {
        None
    }
}

/// The epilogue that leaves C unchanged.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NoEpilogue;

impl Epilogue for NoEpilogue {
    #[inline(always)]
    fn row<L: Vector>(&self, _: usize, _: usize, _: &mut [f32]) {}
}

/// A batch of `count.0 * count.1` independent products of equal shape. Product (i, j) starts
/// `i * s.0 + j * s.1` elements after the first one in each operand's data, where `s` is the field of the
/// operand.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Batch {
    pub(crate) count: (usize, usize),
    pub(crate) a: (usize, usize),
    pub(crate) b: (usize, usize),
    pub(crate) c: (usize, usize),
}

/// Computes `C = A B` or `C += A B`, then applies the epilogue.
///
/// Shapes: `a` is `[m, k]`, `b` is `[k, n]`, `c` is `[m, n]`; panics if they do not match.
pub(crate) fn gemm<E: Epilogue>(
    pool: &Pool,
    a: Mat<'_>,
    b: Mat<'_>,
    c: MatMut<'_>,
    init: Init,
    epilogue: &E,
) {
    let one = Batch { count: (1, 1), a: (0, 0), b: (0, 0), c: (0, 0) };
    gemm_batched(pool, one, a, b, c, init, epilogue);
}

/// Returns the bytes that a thread packs for a whole product `[m, k] [k, n]` with portable tiles. With vector
/// instructions the number differs by a few cache lines, and AVX-512 packs no transposed A with a small `m`. A
/// thread keeps the memory of its largest product.
pub(crate) fn packed_bytes((m, n, k): (usize, usize, usize), a_transposed: bool) -> usize {
    let a_strides = if a_transposed { (1, m) } else { (k, 1) };
    region::packed::<Portable>(a_strides, k, m, n) * size_of::<f32>()
}

/// Computes one product per member of a batch; `a`, `b` and `c` describe the first one.
///
/// The epilogue's row numbers run through the batch: row `i` of product (x, y) is `(x * count.1 + y) * m + i`.
///
/// Panics if shapes do not match, an operand exceeds its data, or two elements of C coincide.
pub(crate) fn gemm_batched<E: Epilogue>(
    pool: &Pool,
    batch: Batch,
    a: Mat<'_>,
    b: Mat<'_>,
    c: MatMut<'_>,
    init: Init,
    epilogue: &E,
) {
    gemm_with(Isa::detect(), pool, batch, a, b, c, init, epilogue);
}

/// Runs [`region`] compiled for an instruction set.
///
/// # Safety
/// As for [`region`].
unsafe fn region_of<E: Epilogue>(
    isa: Isa,
    p: &Product,
    rows: Range<usize>,
    columns: Range<usize>,
    epilogue: &E,
) {
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma")]
    unsafe fn avx2<E: Epilogue>(p: &Product, rows: Range<usize>, columns: Range<usize>, epilogue: &E) {
        region::<super::tile::Avx2, E>(p, rows, columns, epilogue);
    }
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f,avx2,fma")]
    unsafe fn avx512<E: Epilogue>(p: &Product, rows: Range<usize>, columns: Range<usize>, epilogue: &E) {
        region::<super::tile::Avx512, E>(p, rows, columns, epilogue);
    }
    match isa.tag() {
        Tag::Portable => region::<Portable, E>(p, rows, columns, epilogue),
        #[cfg(target_arch = "x86_64")]
        Tag::Avx2 => avx2(p, rows, columns, epilogue),
        #[cfg(target_arch = "x86_64")]
        Tag::Avx512 => avx512(p, rows, columns, epilogue),
    }
}

/// Pointers to the operands, shared by the tasks of one call.
struct Shared(Product);

// SAFETY: A and B are only read, and tasks write disjoint parts of C.
unsafe impl Sync for Shared {}

#[expect(clippy::too_many_arguments, reason = "the public call and the instruction set, which tests choose")]
fn gemm_with<E: Epilogue>(
    isa: Isa,
    pool: &Pool,
    batch: Batch,
    a: Mat<'_>,
    b: Mat<'_>,
    c: MatMut<'_>,
    init: Init,
    epilogue: &E,
) {
    let MatMut { data: c, rows: m, cols: n, ld } = c;
    let k = a.cols;
    assert!(a.rows == m && b.cols == n && b.rows == k, "shapes of a product do not match");
    let count = batch
        .count
        .0
        .checked_mul(batch.count.1)
        .expect("the number of products in a batch fits in a `usize`");
    if m == 0 || n == 0 || count == 0 {
        return;
    }
    check_batch(&batch, &a, &b, (c.len(), m, n, ld));
    let shared = Shared(Product {
        a: a.data.as_ptr(),
        a_strides: (a.row_stride, a.col_stride),
        b: b.data.as_ptr(),
        b_strides: (b.row_stride, b.col_stride),
        c: c.as_mut_ptr(),
        c_stride: ld,
        k,
        accumulate: init == Init::Accumulate,
        first_row: 0,
    });
    let Full { rows: mr, columns: nr } = isa.tile();
    let (cuts_m, cuts_n) = cuts(pool.threads(), count, (m, n, k), (mr, nr));
    let shared = &shared;
    pool.run(count * cuts_m * cuts_n, |task| {
        let (index, part) = (task / (cuts_m * cuts_n), task % (cuts_m * cuts_n));
        let (x, y) = (index / batch.count.1, index % batch.count.1);
        let rows = share(m, mr, cuts_m, part % cuts_m);
        let columns = share(n, nr, cuts_n, part / cuts_m);
        // SAFETY: the operands contain every element of every member of the batch, as checked; no two elements
        // of C coincide; tasks write disjoint parts of C; and the machine has the instructions.
        unsafe {
            let product = Product {
                a: shared.0.a.add(x * batch.a.0 + y * batch.a.1),
                b: shared.0.b.add(x * batch.b.0 + y * batch.b.1),
                c: shared.0.c.add(x * batch.c.0 + y * batch.c.1),
                first_row: index * m,
                ..shared.0
            };
            region_of(isa, &product, rows, columns, epilogue);
        }
    });
}

/// Panics unless every member of the batch is within its data and no two elements of C coincide.
fn check_batch(batch: &Batch, a: &Mat<'_>, b: &Mat<'_>, (c_len, m, n, ld): (usize, usize, usize, usize)) {
    let (x, y) = batch.count;
    let fits = |len: usize, strides: (usize, usize), rows: (usize, usize), cols: (usize, usize)| {
        span(&[(x, strides.0), (y, strides.1), rows, cols]).is_some_and(|need| need <= len)
    };
    assert!(
        fits(a.data.len(), batch.a, (a.rows, a.row_stride), (a.cols, a.col_stride)),
        "batch of A exceeds its data"
    );
    assert!(
        fits(b.data.len(), batch.b, (b.rows, b.row_stride), (b.cols, b.col_stride)),
        "batch of B exceeds its data"
    );
    assert!(fits(c_len, batch.c, (m, ld), (n, 1)), "batch of C exceeds its data");
    // No elements coincide if each stride is at least the span of all smaller strides.
    let mut dims = [(n, 1), (m, ld), (x, batch.c.0), (y, batch.c.1)];
    dims.sort_unstable_by_key(|&(count, stride)| (count > 1, stride));
    for i in 0..dims.len() {
        let (count, stride) = dims[i];
        let inner = span(&dims[..i]).expect("C was checked to fit in its data");
        assert!(count == 1 || stride >= inner, "elements of C overlap");
    }
}

/// Returns part `index` of `cuts` nearly equal parts of `0..whole`. Boundaries are multiples of `unit`.
fn share(whole: usize, unit: usize, cuts: usize, index: usize) -> Range<usize> {
    let units = whole.div_ceil(unit);
    let at = |index: usize| (units * index / cuts * unit).min(whole);
    at(index)..at(index + 1)
}

/// Returns the number of parts into which the rows and the columns of each product are divided, so that
/// `threads` threads finish at about the same time.
fn cuts(
    threads: usize,
    count: usize,
    (m, n, k): (usize, usize, usize),
    (mr, nr): (usize, usize),
) -> (usize, usize) {
    /// Minimum number of multiply-adds for which a second thread pays off.
    const SMALL: usize = 1 << 19;
    let work = m.saturating_mul(n).saturating_mul(k);
    if threads == 1 || count >= 4 * threads || work.saturating_mul(count) < SMALL {
        return (1, 1);
    }
    let (tiles_m, tiles_n) = (m.div_ceil(mr), n.div_ceil(nr));
    let most = threads.min(work / (SMALL / 4)).max(1);
    // Time of the slowest thread per step of k, in multiply-adds of one lane: its tiles, and its packing of A
    // and B.
    let price = |cuts_m: usize, cuts_n: usize| {
        let rounds = (count * cuts_m * cuts_n).div_ceil(threads);
        let (rows, cols) = (tiles_m.div_ceil(cuts_m) * mr, tiles_n.div_ceil(cuts_n) * nr);
        rounds * (rows * cols + 8 * rows + 5 * cols)
    };
    (1..=most.min(tiles_m))
        .flat_map(|cuts_m| {
            [(cuts_m, (most / cuts_m).min(tiles_n)), (cuts_m, most.div_ceil(cuts_m).min(tiles_n))]
        })
        .min_by_key(|&(cuts_m, cuts_n)| price(cuts_m, cuts_n))
        .unwrap_or((1, 1))
}
