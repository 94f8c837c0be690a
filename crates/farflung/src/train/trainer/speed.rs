//! Measured step times of a rank, as it sends them to the others: the time to compute a microbatch, and the
//! rest of a step. Both are moving averages, so that a brief delay has little influence.

use std::ops::RangeInclusive;

use farflung_base::Nanos;
use farflung_parallel::Plan;
use farflung_parallel::plan::Measured;

/// Weight of a new measurement in the moving average.
const NEW: f64 = 0.25;
/// The times in seconds that can be those of a step or a microbatch: from a thousandth of a nanosecond to about
/// 11 days.
const POSSIBLE: RangeInclusive<f64> = 1e-12..=1e6;

/// A moving average in seconds.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct Average(Option<f64>);

impl Average {
    /// Adds a measurement, which is first limited to between half and twice the average so far.
    fn add(&mut self, seconds: f64) {
        self.0 = Some(match self.0 {
            None => seconds,
            Some(known) => known + NEW * (seconds.clamp(known / 2.0, known * 2.0) - known),
        });
    }
}

/// Sums over the steps since replicas last agreed; all times in seconds.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct Sums {
    steps: u32,
    microbatches: u32,
    computing: f64,
    whole: f64,
}

/// Whose times are measured.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum Measures {
    /// Those of replicas, each of which is one rank.
    #[default]
    Replicas,
    /// Those of the ranks of pools, which share the microbatches of a step.
    RanksOfPools,
    /// Those of the ranks of pipelines, each of which computes its part of all microbatches of its pipeline.
    RanksOfPipelines,
}

impl Measures {
    /// Returns what is measured with a plan.
    pub(super) fn of(plan: &Plan) -> Self {
        match plan.pools() {
            Some(_) => Self::RanksOfPools,
            None if plan.stages() > 1 => Self::RanksOfPipelines,
            None => Self::Replicas,
        }
    }
}

/// Measures a rank's steps, and keeps the times that all replicas sent.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Speedometer {
    microbatch: Average,
    rest: Average,
    sums: Sums,
    /// Whether the first step is over, which is slower than others and is not measured.
    is_warm: bool,
    pub(super) measures: Measures,
    /// Step times of all replicas or ranks, from the last vote of all.
    pub(super) all: Vec<Measured>,
}

impl Speedometer {
    /// Makes one without measurements.
    pub(super) fn new(measures: Measures) -> Self {
        Self { measures, ..Self::default() }
    }

    /// Returns it for the run's next plan: the averages are kept, and the times of other replicas are dropped.
    pub(super) fn carried(self) -> Self {
        Self { all: Vec::new(), sums: Sums::default(), is_warm: false, ..self }
    }

    /// Adds a step that was done. `computing` and `whole` are its times; `meets` says whether all replicas
    /// agreed after it.
    pub(super) fn step(&mut self, microbatches: u32, computing: Nanos, whole: Nanos, meets: bool) {
        if !std::mem::replace(&mut self.is_warm, true) {
            return;
        }
        let sums = &mut self.sums;
        sums.steps += 1;
        sums.microbatches += microbatches;
        sums.computing += computing.as_secs_f64();
        sums.whole += whole.as_secs_f64();
        if meets && sums.microbatches > 0 {
            self.microbatch.add(sums.computing / f64::from(sums.microbatches));
            // Never zero: `Average::add` would limit every measurement after an average of zero to zero.
            self.rest.add(((sums.whole - sums.computing) / f64::from(sums.steps)).max(1e-9));
            self.sums = Sums::default();
        }
    }

    /// Returns the vector that one of `count` replicas or ranks contributes to the sum: its own two times in
    /// seconds at its index, and zeros elsewhere.
    pub(super) fn contribution(&self, index: u32, count: u32) -> Vec<f64> {
        let mut told = vec![0.0; 2 * count as usize];
        let own = &mut told[2 * index as usize..][..2];
        own.copy_from_slice(&[self.microbatch.0.unwrap_or(0.0), self.rest.0.unwrap_or(0.0)]);
        told
    }

    /// Decodes the times of all replicas from the sums over all ranks. A number that is no time of a step
    /// becomes [`Nanos::MAX`].
    pub(super) fn read(sums: &[f64]) -> Vec<Measured> {
        let time = |seconds: f64| match seconds {
            0.0 => Nanos::ZERO,
            seconds if POSSIBLE.contains(&seconds) => Nanos::from_secs_f64(seconds).max(Nanos(1)),
            _ => Nanos::MAX,
        };
        let of = |&[microbatch, rest]: &[f64; 2]| Measured { microbatch: time(microbatch), rest: time(rest) };
        sums.as_chunks::<2>().0.iter().map(of).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: fn(u64) -> Nanos = Nanos::from_millis;

    #[test]
    fn steps_become_times_and_the_first_is_left_out() {
        let mut speed = Speedometer::default();
        speed.step(4, MS(4_000), MS(9_000), true);
        assert_eq!(speed.contribution(1, 2), [0.0; 4]);
        speed.step(4, MS(40), MS(100), false);
        speed.step(4, MS(40), MS(300), true);
        let told = speed.contribution(1, 2);
        let all = Speedometer::read(&told);
        assert_eq!(all[0], Measured { microbatch: Nanos::ZERO, rest: Nanos::ZERO });
        assert_eq!(all[1], Measured { microbatch: MS(10), rest: MS(160) });
    }

    #[test]
    fn a_moment_counts_for_little() {
        let mut speed = Speedometer::default();
        (0..9).for_each(|_| speed.step(1, MS(10), MS(20), true));
        speed.step(1, MS(10_000), MS(10_010), true);
        let [hurt] = Speedometer::read(&speed.contribution(0, 1))[..] else { unreachable!() };
        assert!(hurt.microbatch <= Nanos::from_secs_f64(0.0126), "{hurt:?}");
        (0..9).for_each(|_| speed.step(1, MS(10), MS(20), true));
        let [healed] = Speedometer::read(&speed.contribution(0, 1))[..] else { unreachable!() };
        assert!(healed.microbatch < Nanos::from_secs_f64(0.0103), "{healed:?}");
    }

    #[test]
    fn nonsense_is_no_time() {
        let read = Speedometer::read(&[f64::NAN, f64::INFINITY, -1.0, 1e300, 1e-300, 1e-10]);
        let none = Measured { microbatch: Nanos::MAX, rest: Nanos::MAX };
        assert_eq!(read, [none, none, Measured { rest: Nanos(1), ..none }]);
    }
}
