//! Elementary functions that the vectoriser can see through: straight-line f32 code without branches, calls or tables.
//! It refuses to know about slices; the loops are the caller's (inside [`super::simd::simd`]).
#![expect(clippy::inline_always, reason = "the loop around a call is vectorised only if the call is inlined")]

use std::f32::consts::{LN_2, LOG2_E};

use super::simd::Level;

/// 1.5 * 2^23: adding it to a float below 2^22 leaves the nearest integer in the low bits of the sum.
const ROUND: f32 = 12_582_912.0;
/// ln 2 in two parts; the first has 10 significant bits, so its product with an exponent is exact.
const LN2_HI: f32 = 0.693_359_4;
const LN2_LO: f32 = -2.121_944_4e-4;

/// Splits `x` into `n ln 2 + r` with `|r| <= ln 2 / 2`; returns the integer `n` and `e^r - 1`.
/// Source: the coefficients of Cephes' `expf`.
#[inline(always)]
fn reduce<L: Level>(x: f32) -> (i32, f32) {
    let t = L::mul_add(x, LOG2_E, ROUND);
    let n = t - ROUND;
    let r = L::mul_add(n, -LN2_LO, L::mul_add(n, -LN2_HI, x));
    let p = L::mul_add(r, 1.987_569_1e-4, 1.398_199_9e-3);
    let p = L::mul_add(r, p, 8.333_452e-3);
    let p = L::mul_add(r, p, 4.166_579_6e-2);
    let p = L::mul_add(r, p, 1.666_666_5e-1);
    let p = L::mul_add(r, p, 0.5);
    (t.to_bits().wrapping_sub(ROUND.to_bits()).cast_signed(), L::mul_add(r * r, p, r))
}

/// `e^x` within 1 ulp with FMA, 2 without. Results below [`f32::MIN_POSITIVE`] are 0; `e^inf = inf`; NaN stays NaN.
#[inline(always)]
pub(crate) fn exp<L: Level>(x: f32) -> f32 {
    /// The least and the greatest argument whose result is a normal number.
    const MIN: f32 = -87.336_54;
    const MAX: f32 = 88.722_83;
    let (n, p) = reduce::<L>(x);
    // Adding to the exponent's bits reaches 2^128 (1 - eps), where 2^n itself would overflow.
    let y = f32::from_bits((1.0 + p).to_bits().wrapping_add((n << 23).cast_unsigned()));
    let y = if x < MIN { 0.0 } else { y };
    if x <= MAX { y } else { x * f32::INFINITY }
}

/// GELU in its tanh form, and its derivative: `x s` and `s (1 + x (1 - s) y')` for `s = sigmoid(y)` and
/// `y = 2 sqrt(2 / pi) (x + 0.044715 x^3)`, since `(1 + tanh(y / 2)) / 2 = sigmoid(y)`. Within 4e-7 of the
/// larger of 1 and their own size for `|x|` up to 1e10; NaN stays NaN.
///
/// Source: Hendrycks and Gimpel 2016, "Gaussian Error Linear Units".
#[inline(always)]
pub(crate) fn gelu<L: Level>(x: f32) -> (f32, f32) {
    /// 2 sqrt(2 / pi), and 0.044715 times that.
    const LINEAR: f32 = 1.595_769;
    const CUBIC: f32 = 0.071_354_814;
    /// Beyond it the sigmoid is 0 or 1, and 2 to this power is still a normal number.
    const MAX: f32 = 126.0;
    let square = x * x;
    // The exponent of `e^-y = 2^z`.
    let z = -x * L::mul_add(CUBIC * LOG2_E, square, LINEAR * LOG2_E);
    // Not `clamp`, whose choice for NaN the vectoriser would have to keep with two instructions more.
    let z = if z > MAX { MAX } else { z };
    let z = if z < -MAX { -MAX } else { z };
    let e = exp2::<L>(z);
    let s = 1.0 / (1.0 + e);
    let value = x * s;
    let inner = L::mul_add(3.0 * CUBIC, square, LINEAR);
    (value, s * L::mul_add(value * e, inner, 1.0))
}

/// `2^x` for `|x| <= 126` within 2 ulp; anything for another `x`, but NaN for NaN. Its two halves of a polynomial (the
/// Taylor series, whose remainder is 2e-8 where `|r| <= 1/2`) are computed side by side.
#[inline(always)]
fn exp2<L: Level>(x: f32) -> f32 {
    const TAYLOR: [f32; 7] =
        [1.0, LN_2, 0.240_226_5, 0.055_504_11, 0.009_618_129, 0.001_333_355_8, 0.000_154_035_3];
    let t = x + ROUND;
    let r = x - (t - ROUND);
    let square = r * r;
    let low = L::mul_add(r, TAYLOR[1], TAYLOR[0]);
    let middle = L::mul_add(r, TAYLOR[3], TAYLOR[2]);
    let high = L::mul_add(square, TAYLOR[6], L::mul_add(r, TAYLOR[5], TAYLOR[4]));
    let p = L::mul_add(square, L::mul_add(square, high, middle), low);
    f32::from_bits(p.to_bits().wrapping_add(t.to_bits() << 23))
}

#[cfg(test)]
mod tests {
    use super::super::simd::{Isa, simd};

    simd! {
        fn exps<L: Level>(x: &mut [f32]) {
            for x in x {
                *x = super::exp::<L>(*x);
            }
        }
    }

    simd! {
        fn gelus<L: Level>(x: &mut [f32], slope: &mut [f32]) {
            for (x, slope) in x.iter_mut().zip(slope) {
                (*x, *slope) = super::gelu::<L>(*x);
            }
        }
    }

    const ISAS: [fn() -> Isa; 2] = [Isa::detect, || Isa::PORTABLE];

    /// Error of `got` in units of the last place of `want`.
    fn ulps(got: f32, want: f64) -> f64 {
        let nearest = want as f32;
        let ulp = f64::from(nearest.abs().next_up()) - f64::from(nearest.abs());
        (f64::from(got) - want).abs() / ulp
    }

    /// The greatest error in ulps of `f` over every `step`th float whose magnitude lies between `lo` and `hi`.
    fn worst(f: fn(Isa, &mut [f32]), exact: fn(f64) -> f64, isa: Isa, lo: f32, hi: f32) -> f64 {
        let xs: Vec<f32> = (lo.to_bits()..hi.to_bits())
            .step_by(499)
            .map(f32::from_bits)
            .flat_map(|x| [x, -x])
            .filter(|&x| exact(f64::from(x)).abs() >= f64::from(f32::MIN_POSITIVE))
            .collect();
        let mut ys = xs.clone();
        f(isa, &mut ys);
        xs.iter().zip(&ys).map(|(&x, &y)| ulps(y, exact(f64::from(x)))).fold(0.0, f64::max)
    }

    #[test]
    fn exp_is_close_everywhere() {
        for isa in ISAS {
            let w = worst(exps, f64::exp, isa(), 1e-8, 88.722_83);
            println!("exp {:?} {w}", isa());
            assert!(w <= 2.0, "{:?}: {w} ulp", isa());
        }
    }

    /// GELU and its derivative by the definition, without cancellation on either side of zero.
    fn exact_gelu(x: f64) -> (f64, f64) {
        let (k, c) = ((2.0 / std::f64::consts::PI).sqrt(), 0.044_715);
        let s = 1.0 / (1.0 + (-2.0 * k * (x + c * x.powi(3))).exp());
        (x * s, s + x * s * (1.0 - s) * 2.0 * k * (1.0 + 3.0 * c * x * x))
    }

    #[test]
    fn gelu_and_its_derivative_are_close_everywhere() {
        for isa in ISAS {
            let mut worst = (0.0_f64, 0.0_f64);
            for bits in (1e-30_f32.to_bits()..1e10_f32.to_bits()).step_by(2999) {
                for x in [f32::from_bits(bits), -f32::from_bits(bits)] {
                    let (mut value, mut slope) = ([x], [0.0]);
                    gelus(isa(), &mut value, &mut slope);
                    let (v, s) = exact_gelu(f64::from(x));
                    let error = |got: f32, want: f64| (f64::from(got) - want).abs() / want.abs().max(1.0);
                    worst = (worst.0.max(error(value[0], v)), worst.1.max(error(slope[0], s)));
                }
            }
            println!("gelu {:?} {worst:?}", isa());
            assert!(worst.0 < 4e-7 && worst.1 < 4e-7, "{:?}: {worst:?}", isa());
        }
    }

    #[test]
    fn limits() {
        let inf = f32::INFINITY;
        let payload = f32::from_bits(0xffff_ffff);
        for isa in ISAS {
            let mut e = [0.0, -0.0, -inf, -1e30, -104.0, -88.0, 88.73, 1e30, inf, 88.722_83, -87.336_54];
            exps(isa(), &mut e);
            assert_eq!(e[..9], [1.0, 1.0, 0.0, 0.0, 0.0, 0.0, inf, inf, inf]);
            assert!(e[9].is_finite() && e[9] > 3.4e38 && e[10].is_normal());
            let mut nan = [f32::NAN, -f32::NAN, payload, 0.0];
            exps(isa(), &mut nan);
            assert!(nan[..3].iter().all(|x| x.is_nan()));
            let (mut values, mut slopes) = ([f32::NAN, payload, 0.0, -0.0, 1e6, -1e6], [0.0; 6]);
            gelus(isa(), &mut values, &mut slopes);
            assert!(values[..2].iter().chain(&slopes[..2]).all(|x| x.is_nan()));
            assert_eq!((&values[2..5], &slopes[2..5]), (&[0.0, 0.0, 1e6][..], &[0.5, 0.5, 1.0][..]));
            assert!(values[5].abs() < 1e-30 && slopes[5].abs() < 1e-15);
        }
    }
}
