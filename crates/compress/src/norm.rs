//! Sums over a block in one fixed order: 32 lanes over each run of 1024 elements, then a tree over the lanes, then the
//! runs. Knows no codec.

const LANES: usize = 32;
const RUN: usize = 1024;

/// The mean magnitude of `x`, whose largest is `max`.
#[expect(clippy::inline_always, reason = "part of kernels")]
#[inline(always)]
pub(crate) fn mean_magnitude(max: f32, x: &[f32]) -> f32 {
    let power = Power::of(max);
    sum(x, power.down(), f32::abs) / x.len() as f32 * power.up()
}

/// The root of the mean square of `x`, whose largest magnitude is `max`.
#[expect(clippy::inline_always, reason = "part of kernels")]
#[inline(always)]
pub(crate) fn root_mean_square(max: f32, x: &[f32]) -> f32 {
    let power = Power::of(max);
    (sum(x, power.down(), |x| x * x) / x.len() as f32).sqrt() * power.up()
}

/// The mean of `x`, whose largest magnitude is `max`.
#[expect(clippy::inline_always, reason = "part of kernels")]
#[inline(always)]
pub(crate) fn mean(max: f32, x: &[f32]) -> f32 {
    let power = Power::of(max);
    sum(x, power.down(), |x| x) / x.len() as f32 * power.up()
}

/// The standard deviation of `x` about `mean`; `max` is its largest magnitude.
#[expect(clippy::inline_always, reason = "part of kernels")]
#[inline(always)]
pub(crate) fn deviation(max: f32, mean: f32, x: &[f32]) -> f32 {
    let power = Power::of(max);
    let middle = mean * power.down();
    (sum(x, power.down(), |x| (x - middle) * (x - middle)) / x.len() as f32).sqrt() * power.up()
}

/// A power of two, near the largest magnitude: elements are divided by it, so that no sum overflows or vanishes.
#[derive(Clone, Copy)]
struct Power(u32);

impl Power {
    fn of(max: f32) -> Self {
        Self((max.to_bits() >> 23).clamp(1, 253))
    }

    fn up(self) -> f32 {
        f32::from_bits(self.0 << 23)
    }

    fn down(self) -> f32 {
        f32::from_bits((254 - self.0) << 23)
    }
}

/// The sum of `term(factor x)`.
#[expect(clippy::inline_always, reason = "part of kernels")]
#[inline(always)]
fn sum(x: &[f32], factor: f32, term: impl Fn(f32) -> f32) -> f32 {
    let mut total = 0.0;
    for run in x.chunks(RUN) {
        let mut lanes = [0.0_f32; LANES];
        let (rows, rest) = run.as_chunks::<LANES>();
        for row in rows {
            for (lane, x) in lanes.iter_mut().zip(row) {
                *lane += term(x * factor);
            }
        }
        for (lane, x) in lanes.iter_mut().zip(rest) {
            *lane += term(x * factor);
        }
        let mut half = LANES / 2;
        while half > 0 {
            for lane in 0..half {
                lanes[lane] += lanes[lane + half];
            }
            half /= 2;
        }
        total += lanes[0];
    }
    total
}

#[cfg(test)]
mod tests {
    use farflung_base::Philox;

    use super::*;

    #[test]
    fn sums_are_right_at_every_size_and_magnitude() {
        for n in [1, 2, 31, 33, 1023, 1025, 70_000] {
            for size in [1e-30_f32, 1e-10, 1.0, 1e37] {
                let mut x = vec![0.0; n];
                Philox::new(1, n as u64).fill_normal(size, &mut x);
                let max = x.iter().fold(0.0_f32, |m, x| m.max(x.abs()));
                let sum = |f: fn(f64) -> f64| x.iter().map(|x| f(f64::from(*x))).sum::<f64>() / n as f64;
                let near = |found: f32, wanted: f64, scale: f64| {
                    assert!((f64::from(found) - wanted).abs() <= 1e-6 * scale, "{n} {size} {found} {wanted}");
                };
                near(mean_magnitude(max, &x), sum(f64::abs), sum(f64::abs));
                near(mean(max, &x), sum(|x| x), sum(f64::abs));
                let square = (sum(|x| x * x) - sum(|x| x).powi(2)).max(0.0);
                if n > 30 {
                    near(deviation(max, mean(max, &x), &x), square.sqrt(), square.sqrt());
                }
                near(root_mean_square(max, &x), sum(|x| x * x).sqrt(), sum(|x| x * x).sqrt());
            }
        }
    }

    #[test]
    fn the_largest_numbers_do_not_overflow() {
        let x = [f32::MAX; 3000];
        assert!(mean_magnitude(f32::MAX, &x).is_finite());
        assert!(root_mean_square(f32::MAX, &x).is_finite());
    }
}
