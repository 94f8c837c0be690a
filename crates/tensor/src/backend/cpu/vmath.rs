//! Elementary functions that the compiler can vectorise: straight-line f32 code without branches, calls or
//! tables. Callers loop over them inside [`super::simd::simd`].
#![expect(clippy::inline_always, reason = "the loop around a call is vectorised only if the call is inlined")]

use std::f32::consts::LOG2_E;

use super::simd::Level;

/// 1.5 * 2^23. Adding it to a float below 2^22 rounds the float to an integer, which is then in the low bits of
/// the sum.
const ROUND: f32 = 12_582_912.0;
/// ln 2 in two parts. The first has 9 significant bits, so its product with an exponent is exact.
const LN2_HI: f32 = 0.693_359_4;
const LN2_LO: f32 = -2.121_944_4e-4;

/// Splits `x` into `n ln 2 + r` with `|r| <= ln 2 / 2`. Returns the integer `n` and `e^r - 1`.
///
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

/// Returns `e^x` within 1 ulp with FMA, 2 without. Results below [`f32::MIN_POSITIVE`] are 0; `e^inf = inf`;
/// NaN stays NaN.
#[inline(always)]
pub(crate) fn exp<L: Level>(x: f32) -> f32 {
    /// The least and the greatest argument with a normal result.
    const MIN: f32 = -87.336_54;
    const MAX: f32 = 88.722_83;
    let (n, p) = reduce::<L>(x);
    // Adding to the exponent bits works up to 2^128 (1 - eps), where 2^n itself would overflow.
    let y = f32::from_bits((1.0 + p).to_bits().wrapping_add((n << 23).cast_unsigned()));
    let y = if x < MIN { 0.0 } else { y };
    if x <= MAX { y } else { x * f32::INFINITY }
}

/// Returns the natural logarithm of a positive normal number, within 1 ulp of the larger of 1 and the result.
/// Infinity and NaN are returned unchanged; the result for other arguments is unspecified.
///
/// Source: the coefficients of Cephes' `logf`.
#[inline(always)]
pub(crate) fn ln<L: Level>(x: f32) -> f32 {
    /// Bits of sqrt(1/2). Numbers between it and twice it get exponent 0.
    const ROOT: u32 = 0x3f35_04f3;
    const COEFFICIENTS: [f32; 9] = [
        7.037_683_6e-2,
        -1.151_461e-1,
        1.167_699_9e-1,
        -1.242_014_1e-1,
        1.424_932_3e-1,
        -1.666_805_8e-1,
        2.000_071_5e-1,
        -2.499_999_4e-1,
        3.333_333e-1,
    ];
    let exponent = x.to_bits().wrapping_sub(ROOT).cast_signed() >> 23;
    let f = f32::from_bits(x.to_bits().wrapping_sub((exponent << 23).cast_unsigned())) - 1.0;
    let (e, square) = (exponent as f32, f * f);
    let p = COEFFICIENTS.iter().fold(0.0, |p, &c| L::mul_add(p, f, c));
    let tail = L::mul_add(square, L::mul_add(f, p, -0.5), e * LN2_LO);
    let y = L::mul_add(e, LN2_HI, f + tail);
    if x < f32::INFINITY { y } else { x }
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
        fn lns<L: Level>(x: &mut [f32]) {
            for x in x {
                *x = super::ln::<L>(*x);
            }
        }
    }

    const ISAS: [fn() -> Isa; 2] = [Isa::detect, || Isa::PORTABLE];

    /// Returns the error of `got` in units of the last place of `want`.
    fn ulps(got: f32, want: f64) -> f64 {
        let nearest = want as f32;
        let ulp = f64::from(nearest.abs().next_up()) - f64::from(nearest.abs());
        (f64::from(got) - want).abs() / ulp
    }

    /// Returns the greatest error in ulps of `f` over every 499th float with a magnitude between `lo` and `hi`.
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

    #[test]
    fn ln_is_close_everywhere() {
        for isa in ISAS {
            let mut worst = 0.0_f64;
            for bits in (f32::MIN_POSITIVE.to_bits()..f32::INFINITY.to_bits()).step_by(1499) {
                let mut y = [f32::from_bits(bits)];
                let exact = f64::from(y[0]).ln();
                lns(isa(), &mut y);
                worst = worst.max((f64::from(y[0]) - exact).abs() / exact.abs().max(1.0));
            }
            println!("ln {:?} {worst}", isa());
            assert!(worst <= 1.2e-7, "{:?}: {worst}", isa());
            let mut y = [1.0, f32::INFINITY, f32::NAN, -f32::NAN];
            lns(isa(), &mut y);
            assert_eq!(y[..2], [0.0, f32::INFINITY]);
            assert!(y[2].is_nan() && y[3].is_nan());
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
        }
    }
}
