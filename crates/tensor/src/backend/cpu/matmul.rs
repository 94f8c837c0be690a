//! Matrix products of ops, with the elementwise epilogues that run on rows of the result while they are in L1
//! cache.
#![expect(clippy::inline_always, reason = "inlined into the function that enables the vectors")]

use super::gelu::bias_gelu;
use super::gemm::{Epilogue, Init, Mat, MatMut, NoEpilogue, gemm};
use super::pool::Pool;
use super::vector::Vector;
use crate::Gelu;

/// Elementwise operation on finished rows. Its operands have as many columns as the result.
pub(super) enum Fused<'a> {
    None,
    Bias(&'a [f32]),
    Add(&'a [f32]),
    BiasGelu(Gelu, &'a [f32], Option<&'a mut [f32]>),
    BiasAdd(&'a [f32], &'a [f32]),
    Times(&'a [f32]),
}

struct Bias<'a>(&'a [f32]);

impl Epilogue for Bias<'_> {
    #[inline(always)]
    fn row<L: Vector>(&self, _: usize, col: usize, c: &mut [f32]) {
        for (c, b) in c.iter_mut().zip(&self.0[col..]) {
            *c += b;
        }
    }
}

struct Add<'a> {
    residual: &'a [f32],
    cols: usize,
}

impl Epilogue for Add<'_> {
    #[inline(always)]
    fn row<L: Vector>(&self, row: usize, col: usize, c: &mut [f32]) {
        let residual = &self.residual[row * self.cols + col..][..c.len()];
        for (c, r) in c.iter_mut().zip(residual) {
            *c += r;
        }
    }

    #[inline(always)]
    fn beside(&self, row: usize, col: usize) -> Option<*const f32> {
        Some(self.residual.as_ptr().wrapping_add(row * self.cols + col))
    }
}

struct BiasAdd<'a> {
    bias: &'a [f32],
    residual: &'a [f32],
    cols: usize,
}

impl Epilogue for BiasAdd<'_> {
    #[inline(always)]
    fn row<L: Vector>(&self, row: usize, col: usize, c: &mut [f32]) {
        let residual = &self.residual[row * self.cols + col..][..c.len()];
        for ((c, b), r) in c.iter_mut().zip(&self.bias[col..]).zip(residual) {
            *c = *c + b + r;
        }
    }

    #[inline(always)]
    fn beside(&self, row: usize, col: usize) -> Option<*const f32> {
        Some(self.residual.as_ptr().wrapping_add(row * self.cols + col))
    }
}

struct Times<'a> {
    factor: &'a [f32],
    cols: usize,
}

impl Epilogue for Times<'_> {
    #[inline(always)]
    fn row<L: Vector>(&self, row: usize, col: usize, c: &mut [f32]) {
        let factor = &self.factor[row * self.cols + col..][..c.len()];
        for (c, factor) in c.iter_mut().zip(factor) {
            *c *= factor;
        }
    }

    #[inline(always)]
    fn beside(&self, row: usize, col: usize) -> Option<*const f32> {
        Some(self.factor.as_ptr().wrapping_add(row * self.cols + col))
    }
}

struct BiasGelu<'a, const ERF: bool> {
    bias: &'a [f32],
}

impl<const ERF: bool> Epilogue for BiasGelu<'_, ERF> {
    #[inline(always)]
    fn row<L: Vector>(&self, _: usize, col: usize, c: &mut [f32]) {
        #[expect(unsafe_code, reason = "an epilogue runs where the vectors of its level are enabled")]
        // SAFETY: inlined into the function that enables these vectors.
        unsafe {
            bias_gelu::<L, ERF>(c, &self.bias[col..], None);
        }
    }
}

struct BiasGeluSlope<'a, const ERF: bool> {
    bias: &'a [f32],
    slope: *mut f32,
    len: usize,
    cols: usize,
}

#[expect(unsafe_code, reason = "tasks of one product write disjoint segments of a second matrix")]
// SAFETY: `slope` is borrowed exclusively for the product, and the epilogue runs once per element.
unsafe impl<const ERF: bool> Sync for BiasGeluSlope<'_, ERF> {}

impl<const ERF: bool> Epilogue for BiasGeluSlope<'_, ERF> {
    #[inline(always)]
    fn row<L: Vector>(&self, row: usize, col: usize, c: &mut [f32]) {
        let start = row * self.cols + col;
        assert!(start + c.len() <= self.len, "the slope must be as large as the result");
        #[expect(unsafe_code, reason = "tasks of one product write disjoint segments of a second matrix")]
        // SAFETY: in bounds, as just checked; segments of different calls do not overlap.
        let slope = unsafe { std::slice::from_raw_parts_mut(self.slope.add(start), c.len()) };
        #[expect(unsafe_code, reason = "an epilogue runs where the vectors of its level are enabled")]
        // SAFETY: inlined into the function that enables these vectors.
        unsafe {
            bias_gelu::<L, ERF>(c, &self.bias[col..], Some(slope));
        }
    }

    #[inline(always)]
    fn beside(&self, row: usize, col: usize) -> Option<*const f32> {
        Some(self.slope.wrapping_add(row * self.cols + col))
    }
}

/// Computes `c = a b` or `c += a b`, and then applies `fused`.
pub(super) fn matmul(
    pool: &Pool,
    a: Mat<'_>,
    b: Mat<'_>,
    c: &mut [f32],
    (m, n): (usize, usize),
    accumulate: bool,
    fused: Fused<'_>,
) {
    let init = if accumulate { Init::Accumulate } else { Init::Overwrite };
    let c = MatMut::new(c, m, n, n);
    match fused {
        Fused::None => gemm(pool, a, b, c, init, &NoEpilogue),
        Fused::Bias(bias) => gemm(pool, a, b, c, init, &Bias(bias)),
        Fused::Add(residual) => gemm(pool, a, b, c, init, &Add { residual, cols: n }),
        Fused::BiasAdd(bias, residual) => {
            gemm(pool, a, b, c, init, &BiasAdd { bias, residual, cols: n });
        }
        Fused::Times(factor) => gemm(pool, a, b, c, init, &Times { factor, cols: n }),
        Fused::BiasGelu(Gelu::Tanh, bias, slope) => gelu::<false>(pool, (a, b, c, init), n, bias, slope),
        Fused::BiasGelu(Gelu::Erf, bias, slope) => gelu::<true>(pool, (a, b, c, init), n, bias, slope),
    }
}

fn gelu<const ERF: bool>(
    pool: &Pool,
    (a, b, c, init): (Mat<'_>, Mat<'_>, MatMut<'_>, Init),
    cols: usize,
    bias: &[f32],
    slope: Option<&mut [f32]>,
) {
    match slope {
        None => gemm(pool, a, b, c, init, &BiasGelu::<ERF> { bias }),
        Some(slope) => {
            let (len, slope) = (slope.len(), slope.as_mut_ptr());
            gemm(pool, a, b, c, init, &BiasGeluSlope::<ERF> { bias, slope, len, cols });
        }
    }
}
