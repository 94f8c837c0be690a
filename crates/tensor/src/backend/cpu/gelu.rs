//! GELU and its derivative, for rows that are still in cache.
#![expect(unsafe_code, reason = "vector instructions; each function states what it relies on")]
#![expect(clippy::inline_always, reason = "vector code must take the target features of its caller")]

use std::f32::consts::LOG2_E;

use super::vector::{LANES, Vector, exp2};

/// Number of independent vectors computed at the same time. One alone would be a chain of forty dependent
/// instructions.
const SIDE: usize = 4;
/// Number of elements computed at the same time.
const GROUP: usize = SIDE * LANES;

/// Returns GELU in its tanh form, and its derivative: `x s` and `s (1 + x (1 - s) y')` for `s = sigmoid(y)` and
/// `y = 2 sqrt(2 / pi) (x + 0.044715 x^3)`, since `(1 + tanh(y / 2)) / 2 = sigmoid(y)`.
///
/// Error: at most 4e-7, absolute for results below 1, else relative, for every `x`, infinities included. NaN
/// stays NaN.
///
/// Source: Hendrycks and Gimpel 2016, "Gaussian Error Linear Units".
///
/// # Safety
/// As for [`Vector`].
#[inline(always)]
unsafe fn gelu<L: Vector>(x: [L::V; SIDE]) -> ([L::V; SIDE], [L::V; SIDE]) {
    /// The coefficients of `y`: 2 sqrt(2 / pi), and 0.044715 times that.
    const LINEAR: f32 = 1.595_769;
    const CUBIC: f32 = 0.071_354_814;
    /// Upper limit of the exponent `z`, at which the sigmoid is 2^-126, close enough to 0. 2 to this power is
    /// still a normal number.
    const MAX: f32 = 126.0;
    /// Where `|x|` is greater, the sigmoid and the slope are computed for this value: they have reached their
    /// limits, and powers of `x` could overflow.
    const FAR: f32 = 1e6;
    // SAFETY: guaranteed by the caller.
    unsafe {
        let one = L::splat(1.0);
        let (mut above, mut near, mut square, mut z) = (x, x, x, x);
        for i in 0..SIDE {
            // This order of operands propagates NaN; so below.
            above[i] = L::max(L::splat(-FAR), x[i]);
            near[i] = L::min(L::splat(FAR), above[i]);
            square[i] = L::mul(near[i], near[i]);
            // Exponent of `e^-y = 2^z`.
            z[i] = L::fma(L::splat(-CUBIC * LOG2_E), square[i], L::splat(-LINEAR * LOG2_E));
        }
        L::in_step(&mut z);
        for i in 0..SIDE {
            z[i] = L::min(L::splat(MAX), L::mul(near[i], z[i]));
        }
        L::in_step(&mut z);
        let e = exp2::<L, SIDE>(z);
        let (mut s, mut value, mut slope) = (x, x, x);
        for i in 0..SIDE {
            s[i] = L::div(one, L::add(one, e[i]));
        }
        L::in_step(&mut s);
        for i in 0..SIDE {
            value[i] = L::mul(above[i], s[i]);
            let inner = L::fma(L::splat(3.0 * CUBIC), square[i], L::splat(LINEAR));
            let near_value = L::min(L::splat(FAR), value[i]);
            slope[i] = L::mul(s[i], L::fma(L::mul(near_value, e[i]), inner, one));
        }
        (value, slope)
    }
}

/// Returns GELU, `x Phi(x)`, and its derivative `Phi(x) + x exp(-x^2 / 2) / sqrt(2 pi)`.
///
/// Error: as for [`gelu`]. The normal distribution's function is that of `-|x|`, which has no cancellation.
///
/// Source: Abramowitz and Stegun 1964, 7.1.26, for `erfc`.
///
/// # Safety
/// As for [`Vector`].
#[inline(always)]
unsafe fn gelu_erf<L: Vector>(x: [L::V; SIDE]) -> ([L::V; SIDE], [L::V; SIDE]) {
    /// 0.3275911 / sqrt(2).
    const RATE: f32 = 0.231_641_9;
    /// Coefficients, halved: `Phi(-|x|) = exp(-x^2 / 2) erfc / 2`.
    const COEFFICIENTS: [f32; 5] = [0.530_702_7, -0.726_576, 0.710_706_9, -0.142_248_37, 0.127_414_8];
    /// 1 / sqrt(2 pi).
    const DENSITY: f32 = 0.398_942_3;
    /// Where `|x|` is greater, both have reached their limits.
    const FAR: f32 = 1e6;
    // SAFETY: guaranteed by the caller.
    unsafe {
        let (one, zero) = (L::splat(1.0), L::splat(0.0));
        let (mut above, mut near, mut size, mut z) = (x, x, x, x);
        for i in 0..SIDE {
            // This order of operands propagates NaN; so below.
            above[i] = L::max(L::splat(-FAR), x[i]);
            near[i] = L::min(L::splat(FAR), above[i]);
            size[i] = L::by_sign(near[i], L::sub(zero, near[i]), near[i]);
            z[i] = L::mul(L::mul(L::splat(-0.5 * LOG2_E), near[i]), near[i]);
        }
        L::in_step(&mut z);
        let e = exp2::<L, SIDE>(z);
        let (mut t, mut sum, mut value, mut slope) = (x, x, x, x);
        for i in 0..SIDE {
            t[i] = L::div(one, L::fma(L::splat(RATE), size[i], one));
            sum[i] = L::splat(COEFFICIENTS[0]);
        }
        L::in_step(&mut t);
        for c in &COEFFICIENTS[1..] {
            for i in 0..SIDE {
                sum[i] = L::fma(sum[i], t[i], L::splat(*c));
            }
            L::in_step(&mut sum);
        }
        for i in 0..SIDE {
            let tail = L::mul(L::mul(sum[i], t[i]), e[i]);
            let share = L::by_sign(near[i], tail, L::sub(one, tail));
            value[i] = L::mul(above[i], share);
            slope[i] = L::fma(L::mul(near[i], L::splat(DENSITY)), e[i], share);
        }
        (value, slope)
    }
}

/// Computes one group of [`bias_gelu`].
///
/// # Safety
/// As for [`Vector`]. The pointers must be valid for [`GROUP`] elements.
#[inline(always)]
unsafe fn group<L: Vector, const ERF: bool>(x: *mut f32, bias: *const f32, slope: Option<*mut f32>) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        let mut v = [L::splat(0.0); SIDE];
        for (i, v) in v.iter_mut().enumerate() {
            *v = L::add(L::load(x.add(i * LANES)), L::load(bias.add(i * LANES)));
        }
        let (value, slopes) = if ERF { gelu_erf::<L>(v) } else { gelu::<L>(v) };
        for i in 0..SIDE {
            L::store(x.add(i * LANES), value[i]);
            if let Some(slope) = slope {
                L::store(slope.add(i * LANES), slopes[i]);
            }
        }
    }
}

/// Computes `x = gelu(x + bias)`, in its form with erf or with tanh. If `slope` is given, it receives the
/// derivative at `x + bias`.
///
/// # Safety
/// As for [`Vector`].
#[inline(always)]
pub(super) unsafe fn bias_gelu<L: Vector, const ERF: bool>(
    x: &mut [f32],
    bias: &[f32],
    mut slope: Option<&mut [f32]>,
) {
    let bias = &bias[..x.len()];
    if let Some(slope) = &slope {
        assert_eq!(slope.len(), x.len(), "there must be a slope for each value");
    }
    let whole = x.len() / GROUP * GROUP;
    for at in (0..whole).step_by(GROUP) {
        let slope = slope.as_mut().map(|slope| slope[at..].as_mut_ptr());
        // SAFETY: guaranteed by the caller; at least a group of elements follows `at`.
        unsafe { group::<L, ERF>(x[at..].as_mut_ptr(), bias[at..].as_ptr(), slope) };
    }
    // The rest is padded to a whole group, so that a result does not depend on the element's position.
    let rest = x.len() - whole;
    if rest > 0 {
        let (mut values, mut biases, mut slopes) = ([0.0; GROUP], [0.0; GROUP], [0.0; GROUP]);
        values[..rest].copy_from_slice(&x[whole..]);
        biases[..rest].copy_from_slice(&bias[whole..]);
        // SAFETY: guaranteed by the caller; the arrays are whole groups.
        unsafe { group::<L, ERF>(values.as_mut_ptr(), biases.as_ptr(), Some(slopes.as_mut_ptr())) };
        x[whole..].copy_from_slice(&values[..rest]);
        if let Some(slope) = slope {
            slope[whole..].copy_from_slice(&slopes[..rest]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::simd::{Isa, simd};
    use super::super::vector::Vector;

    simd! {
        fn gelus<L: Level + Vector>(x: &mut [f32], slope: &mut [f32]) {
            let bias = vec![0.0; x.len()];
            // SAFETY: this function is compiled for the level.
            unsafe { super::bias_gelu::<L, false>(x, &bias, Some(slope)) }
        }
    }

    simd! {
        fn erf_gelus<L: Level + Vector>(x: &mut [f32], slope: &mut [f32]) {
            let bias = vec![0.0; x.len()];
            // SAFETY: this function is compiled for the level.
            unsafe { super::bias_gelu::<L, true>(x, &bias, Some(slope)) }
        }
    }

    /// Returns `erfc(x)` for `x >= 0`: by its Taylor series near 0, else by its continued fraction.
    fn erfc(x: f64) -> f64 {
        let root = std::f64::consts::PI.sqrt();
        if x < 2.5 {
            let (mut term, mut sum) = (x, x);
            for n in 1..60 {
                term *= -x * x / f64::from(n);
                sum += term / f64::from(2 * n + 1);
            }
            return 1.0 - 2.0 / root * sum;
        }
        let fraction = (1..80).rev().fold(x, |below, n| x + f64::from(n) / 2.0 / below);
        (-x * x).exp() / root / fraction
    }

    #[test]
    fn the_form_with_erf_is_close_everywhere() {
        for isa in ISAS {
            let mut worst = (0.0_f64, 0.0_f64);
            for bits in (1e-30_f32.to_bits()..1e10_f32.to_bits()).step_by(2999) {
                for x in [f32::from_bits(bits), -f32::from_bits(bits)] {
                    let (mut value, mut slope) = ([x], [0.0]);
                    erf_gelus(isa(), &mut value, &mut slope);
                    let x = f64::from(x);
                    let tail = erfc(x.abs() / 2.0_f64.sqrt()) / 2.0;
                    let share = if x < 0.0 { tail } else { 1.0 - tail };
                    let density = (-x * x / 2.0).exp() / (2.0 * std::f64::consts::PI).sqrt();
                    let error = |got: f32, want: f64| (f64::from(got) - want).abs() / want.abs().max(1.0);
                    worst.0 = worst.0.max(error(value[0], x * share));
                    worst.1 = worst.1.max(error(slope[0], share + x * density));
                }
            }
            assert!(worst.0 < 4e-7 && worst.1 < 4e-7, "{:?}: {worst:?}", isa());
            let far = f32::MAX;
            let (mut values, mut slopes) =
                ([f32::NAN, f32::INFINITY, far, f32::NEG_INFINITY, -far, 0.0], [0.0; 6]);
            erf_gelus(isa(), &mut values, &mut slopes);
            assert!(values[0].is_nan() && slopes[0].is_nan());
            assert_eq!((values[1], values[2], values[5]), (f32::INFINITY, far, 0.0));
            assert_eq!(slopes[1..3], [1.0, 1.0]);
            assert!(values[3..5].iter().chain(&slopes[3..5]).all(|x| x.abs() < 1e-30), "{values:?}");
            assert!((slopes[5] - 0.5).abs() < 1e-6);
        }
    }

    const ISAS: [fn() -> Isa; 2] = [Isa::detect, || Isa::PORTABLE];

    /// Returns GELU and its derivative by their definition, in a form without cancellation for either sign.
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
    fn far_from_zero_value_and_slope_are_at_their_limits() {
        for isa in Isa::available() {
            let far = (1e6_f32.to_bits()..f32::MAX.to_bits()).step_by(99_991).map(f32::from_bits);
            for x in far.chain([1e10, 1e14, 1.8e19, 1.9e19, f32::MAX, f32::INFINITY]) {
                let (mut values, mut slopes) = ([x, -x], [0.0; 2]);
                gelus(isa, &mut values, &mut slopes);
                assert_eq!((values[0], slopes[0]), (x, 1.0), "{isa:?}");
                assert!(values[1].abs() < 1e-30 && slopes[1].abs() < 1e-15, "{x}: {values:?} {slopes:?}");
            }
        }
    }

    /// The digests are those of the version that did not limit `x`.
    #[cfg(target_arch = "x86_64")]
    #[test]
    fn values_of_ordinary_size_have_the_bits_that_they_had_without_limits() {
        for isa in Isa::available() {
            let ordinary = (1e-30_f32.to_bits()..1e6_f32.to_bits()).step_by(2999).map(f32::from_bits);
            let mut values: Vec<f32> = ordinary.flat_map(|x| [x, -x]).collect();
            let mut slopes = vec![0.0; values.len()];
            gelus(isa, &mut values, &mut slopes);
            let fold = |sum: u64, x: &f32| (sum ^ u64::from(x.to_bits())).wrapping_mul(0x0000_0100_0000_01b3);
            let digest = values.iter().chain(&slopes).fold(0xcbf2_9ce4_8422_2325, fold);
            let want = if isa.has_avx2() { 0x87f9_d158_0572_a0f2 } else { 0x073f_5bed_34ce_21e3 };
            assert_eq!(digest, want, "{isa:?}: {digest:#x}");
        }
    }

    #[test]
    fn limits() {
        for isa in ISAS {
            let payload = f32::from_bits(0xffff_ffff);
            let (mut values, mut slopes) = ([f32::NAN, payload, 0.0, -0.0, 1e6, -1e6], [0.0; 6]);
            gelus(isa(), &mut values, &mut slopes);
            assert!(values[..2].iter().chain(&slopes[..2]).all(|x| x.is_nan()));
            assert_eq!((&values[2..5], &slopes[2..5]), (&[0.0, 0.0, 1e6][..], &[0.5, 0.5, 1.0][..]));
            assert!(values[5].abs() < 1e-30 && slopes[5].abs() < 1e-15);
        }
    }

    #[test]
    fn a_value_does_not_depend_on_its_place() {
        for isa in ISAS {
            let x: Vec<f32> = (0..75).map(|i| 0.11 * (i as f32 - 40.0)).collect();
            let (mut all, mut slopes) = (x.clone(), vec![0.0; x.len()]);
            gelus(isa(), &mut all, &mut slopes);
            for (i, &x) in x.iter().enumerate() {
                let (mut one, mut slope) = ([x], [0.0]);
                gelus(isa(), &mut one, &mut slope);
                assert_eq!(
                    (one[0].to_bits(), slope[0].to_bits()),
                    (all[i].to_bits(), slopes[i].to_bits()),
                    "{i}"
                );
            }
        }
    }
}
