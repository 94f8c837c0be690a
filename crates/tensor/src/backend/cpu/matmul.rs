//! Matrix products of whole ops: operand forms, and the epilogues that work on rows of the result while they are in
//! the first-level cache.
#![expect(clippy::inline_always, reason = "inlined into the function that enables the vectors")]

use super::gemm::{Epilogue, Init, Mat, MatMut, NoEpilogue, gemm};
use super::pool::Pool;
use super::simd::Portable;
use super::vmath;

/// sqrt(2 / pi).
const ROOT_2_OVER_PI: f32 = 0.797_884_6;
const CUBIC: f32 = 0.044_715;

/// The tanh form of GELU (Hendrycks and Gimpel 2016). One rounding per operation on every processor.
#[inline(always)]
pub(super) fn gelu(x: f32) -> f32 {
    let t = vmath::tanh::<Portable>(ROOT_2_OVER_PI * (x + CUBIC * x * x * x));
    0.5 * x * (1.0 + t)
}

/// Derivative of [`gelu`].
#[inline(always)]
pub(super) fn gelu_grad(x: f32) -> f32 {
    let t = vmath::tanh::<Portable>(ROOT_2_OVER_PI * (x + CUBIC * x * x * x));
    let inner = ROOT_2_OVER_PI * (1.0 + 3.0 * CUBIC * x * x);
    0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * inner
}

/// What an op does with its finished rows; slices of whole matrices as wide as the result.
pub(super) enum Fused<'a> {
    None,
    Bias(&'a [f32]),
    BiasGelu(&'a [f32], &'a mut [f32]),
    BiasAdd(&'a [f32], &'a [f32]),
    GeluGrad(&'a [f32]),
}

struct Bias<'a>(&'a [f32]);

impl Epilogue for Bias<'_> {
    #[inline(always)]
    fn row(&self, _: usize, col: usize, c: &mut [f32]) {
        for (c, b) in c.iter_mut().zip(&self.0[col..]) {
            *c += b;
        }
    }
}

struct BiasAdd<'a> {
    bias: &'a [f32],
    residual: &'a [f32],
    cols: usize,
}

impl Epilogue for BiasAdd<'_> {
    #[inline(always)]
    fn row(&self, row: usize, col: usize, c: &mut [f32]) {
        let residual = &self.residual[row * self.cols + col..][..c.len()];
        for ((c, b), r) in c.iter_mut().zip(&self.bias[col..]).zip(residual) {
            *c = *c + b + r;
        }
    }
}

struct GeluGrad<'a> {
    pre: &'a [f32],
    cols: usize,
}

impl Epilogue for GeluGrad<'_> {
    #[inline(always)]
    fn row(&self, row: usize, col: usize, c: &mut [f32]) {
        let pre = &self.pre[row * self.cols + col..][..c.len()];
        for (c, &x) in c.iter_mut().zip(pre) {
            *c *= gelu_grad(x);
        }
    }
}

struct BiasGelu<'a> {
    bias: &'a [f32],
    pre: *mut f32,
    len: usize,
    cols: usize,
}

#[expect(unsafe_code, reason = "tasks of one product write disjoint segments of a second matrix")]
// SAFETY: `pre` is borrowed exclusively for the product, and the epilogue is called once for each element.
unsafe impl Sync for BiasGelu<'_> {}

impl Epilogue for BiasGelu<'_> {
    #[inline(always)]
    fn row(&self, row: usize, col: usize, c: &mut [f32]) {
        let start = row * self.cols + col;
        assert!(start + c.len() <= self.len, "pre is as large as the result");
        #[expect(unsafe_code, reason = "tasks of one product write disjoint segments of a second matrix")]
        // SAFETY: in bounds as just checked; the segments of different calls do not overlap.
        let pre = unsafe { std::slice::from_raw_parts_mut(self.pre.add(start), c.len()) };
        for ((c, b), pre) in c.iter_mut().zip(&self.bias[col..]).zip(pre) {
            let x = *c + b;
            *pre = x;
            *c = gelu(x);
        }
    }
}

/// `c = a b` (or `+=`), then `fused`.
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
        Fused::BiasAdd(bias, residual) => {
            gemm(pool, a, b, c, init, &BiasAdd { bias, residual, cols: n });
        }
        Fused::GeluGrad(pre) => gemm(pool, a, b, c, init, &GeluGrad { pre, cols: n }),
        Fused::BiasGelu(bias, pre) => {
            let (len, pre) = (pre.len(), pre.as_mut_ptr());
            gemm(pool, a, b, c, init, &BiasGelu { bias, pre, len, cols: n });
        }
    }
}
