//! Learning rates as a pure function of the step.

use crate::OptimError;

/// Course of the learning rate after the warm-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Decay {
    /// Stays at the peak.
    Constant,
    /// Falls on a straight line from the peak to the least rate.
    Linear,
    /// Falls on half a cosine from the peak to the least rate (Loshchilov and Hutter 2017).
    Cosine,
    /// Warm-up, stable, decay (Hu et al. 2024, "MiniCPM"): stays at the peak, then falls on a straight line to
    /// the least rate in the last steps.
    Wsd {
        /// Number of steps of the decay, at the end of the schedule.
        steps: u64,
    },
    /// Falls with the inverse square root of the step (Vaswani et al. 2017), but not below the least rate.
    InverseSqrt,
}

/// Linear warm-up, then decay. Steps are counted from 0. Below step `warmup` the rate of step `s` is
/// `peak * (s + 1) / warmup`. From step `warmup` on, which is the first of the decay, `Linear` and `Cosine`
/// have the rate
///
/// ```text
/// least + (peak - least) * left(a),   a = min(1, (s - warmup) / (steps - 1 - warmup))
/// left(a) = 1 - a for Linear, (1 + cos(pi a)) / 2 for Cosine
/// ```
///
/// So the last step of the warm-up and the first of the decay both have the peak, and step `warmup + 1` is the
/// first below it. Step `steps - 1` and all later ones have `least`. If `steps <= warmup + 1`, `a` is 1 from
/// step `warmup` on. The other shapes are:
///
/// - `Constant` stays at the peak.
/// - `Wsd` is `Linear` with a later start. Its line of `n` steps begins at step `steps - 1 - n`, or at the end
///   of the warm-up if that is later.
/// - `InverseSqrt` is `max(least, peak * sqrt(t / (t + s - warmup)))`, as in Hugging Face's library. `t` is
///   `warmup`, or 10000 if there is no warm-up.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LrSchedule {
    peak: f64,
    least: f64,
    warmup: u64,
    steps: u64,
    decay: Decay,
}

/// Time scale of [`Decay::InverseSqrt`] without a warm-up, in steps.
const TIME_SCALE: u64 = 10_000;

impl LrSchedule {
    /// Creates a schedule with one rate for all steps.
    #[must_use]
    pub const fn constant(rate: f64) -> Self {
        Self { peak: rate, least: rate, warmup: 0, steps: 0, decay: Decay::Constant }
    }

    /// Creates a schedule that warms up to `peak` over `warmup` steps and then decays to `least` by the end of
    /// `steps`.
    ///
    /// Errors: [`OptimError::Setting`] if a rate is negative or not finite, or if `least > peak`.
    pub fn new(peak: f64, least: f64, warmup: u64, steps: u64, decay: Decay) -> Result<Self, OptimError> {
        for (field, value, ok) in [
            ("peak", peak, peak.is_finite() && peak >= 0.0),
            ("least", least, least.is_finite() && (0.0..=peak).contains(&least)),
        ] {
            if !ok {
                return Err(OptimError::Setting {
                    transform: "schedule",
                    field,
                    value,
                    expected: "a finite number of at least 0, with `least` at most `peak`",
                });
            }
        }
        Ok(Self { peak, least, warmup, steps, decay })
    }

    /// Returns the highest rate.
    #[must_use]
    pub const fn peak(&self) -> f64 {
        self.peak
    }

    /// Returns the rate of a step, counted from 0.
    #[must_use]
    pub fn rate(&self, step: u64) -> f64 {
        if step < self.warmup {
            return self.peak * (step + 1) as f64 / self.warmup as f64;
        }
        let end = self.steps.saturating_sub(1);
        let begin = match self.decay {
            Decay::Wsd { steps } => self.warmup.max(end.saturating_sub(steps)),
            _ => self.warmup,
        };
        let (since, span) = (step.saturating_sub(begin), end.saturating_sub(begin));
        let along = if step < begin {
            0.0
        } else if span == 0 {
            1.0
        } else {
            (since as f64 / span as f64).min(1.0)
        };
        let left = match self.decay {
            Decay::Constant => return self.peak,
            Decay::Linear | Decay::Wsd { .. } => 1.0 - along,
            Decay::Cosine => 0.5 * (1.0 + (std::f64::consts::PI * along).cos()),
            Decay::InverseSqrt => {
                let scale = if self.warmup == 0 { TIME_SCALE } else { self.warmup } as f64;
                return self.least.max(self.peak * (scale / (scale + since as f64)).sqrt());
            }
        };
        self.least + (self.peak - self.least) * left
    }
}

#[cfg(test)]
#[expect(clippy::float_cmp, reason = "these rates are exact")]
mod tests {
    use super::*;

    #[test]
    fn warms_up_and_decays() {
        let s = LrSchedule::new(1.0, 0.1, 4, 12, Decay::Cosine).unwrap();
        assert_eq!([0, 1, 3, 4].map(|i| s.rate(i)), [0.25, 0.5, 1.0, 1.0]);
        assert!((s.rate(11) - 0.1).abs() < 1e-12 && (s.rate(1000) - 0.1).abs() < 1e-12);
        // Steps 3 and 4 have the peak; step 5 is the first below it, a seventh of the way from 4 to 11.
        let fifth = 0.1 + 0.9 * (1.0 + (std::f64::consts::PI / 7.0).cos()) / 2.0;
        assert!((s.rate(5) - fifth).abs() < 1e-12 && s.rate(5) < 1.0);
        for steps in [0, 3, 4, 5] {
            let s = LrSchedule::new(1.0, 0.1, 4, steps, Decay::Linear).unwrap();
            assert_eq!([3, 4, 5].map(|i| s.rate(i)), [1.0, 0.1, 0.1]);
        }
        let s = LrSchedule::new(1.0, 0.1, 4, 6, Decay::Linear).unwrap();
        assert_eq!([3, 4, 5].map(|i| s.rate(i)), [1.0, 1.0, 0.1]);
        let s = LrSchedule::new(1.0, 0.0, 0, 5, Decay::Linear).unwrap();
        assert_eq!([0, 1, 2, 3, 4, 9].map(|i| s.rate(i)), [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]);
        assert_eq!(LrSchedule::constant(0.3).rate(77), 0.3);
        assert_eq!(LrSchedule::new(1.0, 1.0, 50, 0, Decay::Constant).unwrap().rate(60), 1.0);
        assert!(LrSchedule::new(0.1, 0.2, 0, 1, Decay::Linear).is_err());
        assert!(LrSchedule::new(f64::NAN, 0.0, 0, 1, Decay::Linear).is_err());
    }

    #[test]
    fn wsd_is_stable_and_then_a_line() {
        let s = LrSchedule::new(1.0, 0.2, 3, 11, Decay::Wsd { steps: 4 }).unwrap();
        let rates = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 99].map(|i| s.rate(i));
        let third = 1.0 / 3.0;
        let want = [third, 2.0 * third, 1.0, 1.0, 1.0, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2];
        assert!(rates.iter().zip(want).all(|(rate, want)| (rate - want).abs() < 1e-12), "{rates:?}");
        // A line longer than the schedule is the same as `Linear`. A line of 0 steps drops to the least rate at
        // the last step.
        let [long, line] = [Decay::Wsd { steps: 99 }, Decay::Linear]
            .map(|decay| LrSchedule::new(1.0, 0.2, 3, 11, decay).unwrap());
        assert!((0..20).all(|i| long.rate(i) == line.rate(i)));
        let none = LrSchedule::new(1.0, 0.2, 3, 11, Decay::Wsd { steps: 0 }).unwrap();
        assert_eq!([8, 9, 10].map(|i| none.rate(i)), [1.0, 1.0, 0.2]);
    }

    #[test]
    fn the_inverse_root_is_hugging_faces() {
        // transformers.get_inverse_sqrt_schedule with 4 steps of warm-up: 1 / sqrt((step - 4 + 4) / 4) from
        // step 4 on.
        let s = LrSchedule::new(1.0, 0.25, 4, 8, Decay::InverseSqrt).unwrap();
        assert_eq!(
            [0, 3, 4, 16, 36, 64, 1000].map(|i| s.rate(i)),
            [0.25, 1.0, 1.0, 0.5, 1.0 / 3.0, 0.25, 0.25]
        );
        let s = LrSchedule::new(1.0, 0.0, 0, 8, Decay::InverseSqrt).unwrap();
        assert_eq!([0, 30_000].map(|i| s.rate(i)), [1.0, 0.5]);
    }
}
