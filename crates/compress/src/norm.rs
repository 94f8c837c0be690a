//! Sums over a block in one fixed order: 32 partial sums over each run of 1024 elements, then a tree over the
//! partial sums, then the runs. This module does not depend on any codec.

use crate::magnitude::magnitude;
use crate::values::Values;

const LANES: usize = 32;
const RUN: usize = 1024;
/// The mean magnitude of a block whose largest magnitude is below this, `2^100`, is computed without scaling.
/// Its sum cannot overflow over a whole block, and additions do not lose precision to underflow.
const UNSCALED: f32 = f32::from_bits((127 + 100) << 23);

/// Returns the mean magnitude of `x`, whose largest magnitude is `max`.
#[expect(clippy::inline_always, reason = "part of kernels")]
#[inline(always)]
pub(crate) fn mean_magnitude(max: f32, x: &[f32]) -> f32 {
    if max < UNSCALED {
        return sum(x, 1.0, f32::abs) / x.len() as f32;
    }
    let power = Power::of(max);
    sum(x, power.down(), f32::abs) / x.len() as f32 * power.up()
}

/// Returns the root of the mean square of `x`, whose largest magnitude is `max`.
#[expect(clippy::inline_always, reason = "part of kernels")]
#[inline(always)]
pub(crate) fn root_mean_square(max: f32, x: &[f32]) -> f32 {
    let power = Power::of(max);
    (sum(x, power.down(), |x| x * x) / x.len() as f32).sqrt() * power.up()
}

/// Returns the mean of `x`, whose largest magnitude is `max`.
#[expect(clippy::inline_always, reason = "part of kernels")]
#[inline(always)]
pub(crate) fn mean(max: f32, x: &[f32]) -> f32 {
    let power = Power::of(max);
    sum(x, power.down(), |x| x) / x.len() as f32 * power.up()
}

/// Returns the standard deviation of `x` about `mean`. `max` is the largest magnitude of `x`.
#[expect(clippy::inline_always, reason = "part of kernels")]
#[inline(always)]
pub(crate) fn deviation(max: f32, mean: f32, x: &[f32]) -> f32 {
    let power = Power::of(max);
    let middle = mean * power.down();
    (sum(x, power.down(), |x| (x - middle) * (x - middle)) / x.len() as f32).sqrt() * power.up()
}

/// Returns the bits of the largest magnitude, and the sum of all magnitudes in the order of [`sum`] but
/// unscaled. It makes one pass over `x`, or over the sums `x + e`, which it writes to `next`.
#[expect(clippy::inline_always, reason = "part of kernels")]
#[inline(always)]
pub(crate) fn survey(values: Values<'_>) -> (i32, f32) {
    let (mut max, mut total) = (0, 0.0);
    match values {
        Values::Read(x) => {
            for x in x.chunks(RUN) {
                let mut lanes = Lanes::new();
                let (rows, rest) = x.as_chunks::<LANES>();
                for row in rows {
                    lanes.add(row);
                }
                lanes.add(rest);
                total += lanes.total();
                max = max.max(lanes.largest());
            }
        }
        Values::Feedback { x, e, next } => {
            for ((x, e), next) in x.chunks(RUN).zip(e.chunks(RUN)).zip(next.chunks_mut(RUN)) {
                let mut lanes = Lanes::new();
                let ((xs, x), (es, e), (rows, rest)) =
                    (x.as_chunks::<LANES>(), e.as_chunks::<LANES>(), next.as_chunks_mut::<LANES>());
                for ((x, e), row) in xs.iter().zip(es).zip(rows) {
                    *row = std::array::from_fn(|j| x[j] + e[j]);
                    lanes.add(row);
                }
                x.iter().zip(e).zip(&mut *rest).for_each(|((x, e), sum)| *sum = x + e);
                lanes.add(rest);
                total += lanes.total();
                max = max.max(lanes.largest());
            }
        }
    }
    (max, total)
}

/// Returns the mean magnitude of `x` from the results of [`survey`], with the same bits as [`mean_magnitude`].
#[expect(clippy::inline_always, reason = "part of kernels")]
#[inline(always)]
pub(crate) fn surveyed_mean_magnitude(max: f32, total: f32, x: &[f32]) -> f32 {
    if max < UNSCALED { total / x.len() as f32 } else { mean_magnitude(max, x) }
}

/// Partial sums and maxima of a run.
struct Lanes {
    sums: [f32; LANES],
    largest: [i32; LANES],
}

impl Lanes {
    #[expect(clippy::inline_always, reason = "part of kernels")]
    #[inline(always)]
    fn new() -> Self {
        Self { sums: [0.0; LANES], largest: [0; LANES] }
    }

    /// Adds the magnitudes of a row, one to each partial sum.
    #[expect(clippy::inline_always, reason = "part of kernels")]
    #[inline(always)]
    fn add(&mut self, row: &[f32]) {
        for ((sum, largest), x) in self.sums.iter_mut().zip(&mut self.largest).zip(row) {
            *sum += x.abs();
            *largest = (*largest).max(magnitude(*x));
        }
    }

    #[expect(clippy::inline_always, reason = "part of kernels")]
    #[inline(always)]
    fn total(&self) -> f32 {
        sum_lanes(self.sums)
    }

    #[expect(clippy::inline_always, reason = "part of kernels")]
    #[inline(always)]
    fn largest(&self) -> i32 {
        self.largest.iter().fold(0, |max, lane| max.max(*lane))
    }
}

/// Returns the sum of all `n` lanes: adds lane `i + n/2` to lane `i` for each `i < n/2`, then does the same
/// with half as many lanes, until one is left.
#[expect(clippy::inline_always, reason = "part of kernels")]
#[inline(always)]
fn sum_lanes(mut lanes: [f32; LANES]) -> f32 {
    let mut half = LANES / 2;
    while half > 0 {
        for lane in 0..half {
            lanes[lane] += lanes[lane + half];
        }
        half /= 2;
    }
    lanes[0]
}

/// A power of two near the largest magnitude. Elements are divided by it, so that sums of them or of their
/// squares do not overflow or underflow.
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

/// Returns the sum of `term(factor x)`.
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
        total += sum_lanes(lanes);
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
    fn a_survey_gives_the_same_bits() {
        for n in [1, 31, 32, 33, 1024, 1025, 4096, 5000] {
            for size in [1e-29_f32, 1e-10, 0.3, 1.0, 30.0, 1e30] {
                let (mut x, mut e, mut next) = (vec![0.0; n], vec![0.0; n], vec![0.0; n]);
                Philox::new(3, n as u64).fill_normal(size, &mut x);
                Philox::new(4, n as u64).fill_normal(size / 10.0, &mut e);
                // Some elements are tiny beside the others, and some subnormal.
                x.iter_mut().step_by(3).for_each(|x| *x *= 1e-20);
                x.iter_mut().step_by(5).for_each(|x| *x *= 1e-20);
                let largest = |x: &[f32]| x.iter().fold(0.0_f32, |m, x| m.max(x.abs()));
                let check = |(max, total): (i32, f32), x: &[f32]| {
                    let max = f32::from_bits(max as u32);
                    assert_eq!(max.to_bits(), largest(x).to_bits());
                    let mean = surveyed_mean_magnitude(max, total, x);
                    assert_eq!(mean.to_bits(), mean_magnitude(max, x).to_bits(), "{n} {size}");
                };
                check(survey(Values::Read(&x)), &x);
                let found = survey(Values::Feedback { x: &x, e: &e, next: &mut next });
                check(found, &next);
                assert!(x.iter().zip(&e).zip(&next).all(|((x, e), n)| (x + e).to_bits() == n.to_bits()));
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
