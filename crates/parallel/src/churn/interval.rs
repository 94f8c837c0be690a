//! Time between checkpoints: Young's and Daly's intervals, and the fraction of time that a run works for any
//! interval.

use crate::seeded_rng::SeededRng;

/// Returns Young's interval: the working time between two checkpoints, in seconds, for which the lost time is
/// least, in a first-order approximation.
///
/// `save` is the time that a checkpoint takes, `between` the mean time between failures of the job, both in
/// seconds. Source: Young 1974, `sqrt(2 save between)`.
///
/// ```
/// use farflung_parallel::churn::young;
///
/// assert!((young(50.0, 3600.0) - 600.0).abs() < 1e-9);
/// ```
#[must_use]
pub fn young(save: f64, between: f64) -> f64 {
    (2.0 * save * between).sqrt()
}

/// Returns Daly's interval: like [`young`], in a higher-order approximation.
///
/// Source: Daly 2006, equation 37: `sqrt(2 s m) (1 + sqrt(s / 2m) / 3 + (s / 2m) / 9) - s` for `s < 2m`, else
/// `m`.
#[must_use]
pub fn daly(save: f64, between: f64) -> f64 {
    if save >= 2.0 * between {
        return between;
    }
    let ratio = save / (2.0 * between);
    young(save, between) * (1.0 + ratio.sqrt() / 3.0 + ratio / 9.0) - save
}

/// A job that saves checkpoints at a fixed interval and restarts from the newest one after each failure. All
/// times are in seconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CheckpointedJob {
    /// Working time between two checkpoints.
    pub every: f64,
    /// Time that a checkpoint takes. The job does not work meanwhile.
    pub save: f64,
    /// Time from a failure until the job works again. The job can fail in this time too.
    pub restart: f64,
    /// Mean time between failures of the job. Failure times are exponentially distributed.
    pub mtbf: f64,
}

/// How the time of a job is spent, as fractions of the whole.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TimeFractions {
    /// Work that no failure made useless: the goodput.
    pub work: f64,
    /// Saving checkpoints that no failure made useless.
    pub saving: f64,
    /// Restarts, and the work and saving that a failure made useless.
    pub failures: f64,
}

impl CheckpointedJob {
    /// Returns the interval with the highest goodput, found by golden-section search over
    /// [`CheckpointedJob::expected`]. The value of `self.every` is not used.
    #[must_use]
    pub fn best(self) -> Self {
        let at = |every: f64| Self { every, ..self };
        let ratio = f64::midpoint(5.0_f64.sqrt(), -1.0);
        // Searches over logarithms: the best interval lies anywhere between a fraction of a checkpoint's time
        // and many times the time between failures.
        let (mut low, mut high) = ((self.save.min(self.mtbf) * 1e-3).max(1e-9).ln(), (self.mtbf * 10.0).ln());
        for _ in 0..200 {
            let (a, b) = (high - ratio * (high - low), low + ratio * (high - low));
            if at(a.exp()).expected().work < at(b.exp()).expected().work { low = a } else { high = b }
        }
        at(f64::midpoint(low, high).exp())
    }

    /// Returns the expected fractions for a long run.
    ///
    /// A segment is `every` of work and its checkpoint: `t = every + save`. On average it takes
    /// `between e^(restart / between) (e^(t / between) - 1)`, where `between` is `mtbf`. Source: Daly 2006,
    /// equation 20.
    #[must_use]
    pub fn expected(self) -> TimeFractions {
        let Self { every, save, restart, mtbf: between } = self;
        let all = between * (restart / between).exp() * ((every + save) / between).exp_m1();
        if !all.is_finite() || all <= 0.0 {
            return TimeFractions { work: 0.0, saving: 0.0, failures: 1.0 };
        }
        TimeFractions { work: every / all, saving: save / all, failures: 1.0 - (every + save) / all }
    }

    /// Returns the mean time that one failure loses: the time of work and saving since the newest checkpoint.
    ///
    /// A failure within a segment of `t` seconds loses `between - t / (e^(t / between) - 1)`, about `t / 2`,
    /// where `between` is `mtbf`.
    #[must_use]
    pub fn lost_per_failure(self) -> f64 {
        let t = self.every + self.save;
        self.mtbf - t / (t / self.mtbf).exp_m1()
    }

    /// Simulates a run of `segments` checkpoints, failure by failure, and returns its fractions.
    #[must_use]
    pub fn simulated(self, segments: u64, seed: u64) -> TimeFractions {
        let mut draw = SeededRng::new(seed, 21);
        let t = self.every + self.save;
        let mut all = 0.0;
        for _ in 0..segments {
            let mut needs = t;
            loop {
                let failure = draw.exponential(self.mtbf);
                if failure >= needs {
                    all += needs;
                    break;
                }
                all += failure;
                needs = self.restart + t;
            }
        }
        let part = |each: f64| each * segments as f64 / all;
        TimeFractions { work: part(self.every), saving: part(self.save), failures: 1.0 - part(t) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const JOB: CheckpointedJob = CheckpointedJob { every: 600.0, save: 30.0, restart: 120.0, mtbf: 7200.0 };

    #[test]
    fn the_closed_form_is_what_a_simulation_does() {
        for every in [60.0, 600.0, 6000.0] {
            let job = CheckpointedJob { every, ..JOB };
            let (expected, seen) = (job.expected(), job.simulated(200_000, 3));
            assert!((expected.work - seen.work).abs() < 0.005, "{expected:?} {seen:?}");
            assert!((expected.failures - seen.failures).abs() < 0.005, "{expected:?} {seen:?}");
            assert!((expected.work + expected.saving + expected.failures - 1.0).abs() < 1e-12);
        }
    }

    #[test]
    fn dalys_interval_is_nearly_the_best() {
        for (save, between) in [(1.0, 86_400.0), (30.0, 7200.0), (300.0, 3600.0)] {
            let job = CheckpointedJob { save, mtbf: between, ..JOB };
            let best = job.best();
            let at = |every: f64| CheckpointedJob { every, ..job }.expected().work;
            // No interval on a fine grid is better.
            let grid = (1..4000).map(|i| at(f64::from(i) * between / 1000.0)).fold(0.0, f64::max);
            assert!(best.expected().work >= grid - 1e-9);
            assert!(at(daly(save, between)) > 0.999 * best.expected().work, "{save} {between}");
            assert!(at(daly(save, between)) >= at(young(save, between)) - 1e-12);
        }
        assert!((daly(300.0, 100.0) - 100.0).abs() < 1e-12);
    }

    #[test]
    fn a_failure_makes_half_a_segment_vain() {
        let t = JOB.every + JOB.save;
        assert!((JOB.lost_per_failure() / (t / 2.0) - 1.0).abs() < 0.02, "{}", JOB.lost_per_failure());
        let dead = CheckpointedJob { mtbf: 1e-3, ..JOB };
        assert!(dead.expected().work < 1e-9);
    }
}
