//! PipeDream's planner: divides layers into replicated stages, level by level of a hierarchy of links.

use std::ops::Range;

use farflung_base::{Bandwidth, Bytes, Nanos};

use crate::ParallelError;

/// Profile of one layer for one microbatch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProfiledLayer {
    /// Time of forward and backward on one device.
    pub time: Nanos,
    /// Bytes of weights.
    pub weights: Bytes,
    /// Bytes of the output for the next layer.
    pub output: Bytes,
}

/// One level of the hierarchy, from the innermost: a number of units of the level below, joined by links of one
/// kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LinkLevel {
    /// Bandwidth between two units.
    pub bandwidth: Bandwidth,
    /// Number of units. The units of the innermost level are devices.
    pub units: u32,
}

/// A stage: layers, and the number of devices that each train all of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReplicatedStage {
    /// Layers of the stage.
    pub layers: Range<usize>,
    /// Number of devices.
    pub replicas: u32,
}

/// The stages of a plan, first to last.
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use]
pub struct ReplicatedPlan {
    /// The stages.
    pub stages: Vec<ReplicatedStage>,
    /// Time between two microbatches in the steady state: the slowest stage or boundary.
    pub period: Nanos,
    /// Number of microbatches in the pipeline at once: all devices divided by those of the first stage, rounded
    /// up.
    pub in_flight: u32,
}

/// Returns the plan with the least period on all devices.
///
/// Level `k` has `m` units joined by links of bandwidth `B`. Layers `i..=j` as one stage replicated over `m`
/// units take `T = max(A', 2 (m - 1) |weights| / B) / m`, where `A'` is the best period of the level below with
/// all its units. The best period of level `k` is `T`, or that of the best split: a pipeline on some units, a
/// boundary of `2 output / B`, and one stage on the other units. Source: Harlap et al. 2018 and Narayanan et
/// al. 2019, "PipeDream", section 3.1. Times are whole nanoseconds, rounded up.
///
/// Errors: [`ParallelError::Zero`] for no layers, no levels, a level without units, or a link without
/// bandwidth.
pub fn pipedream(layers: &[ProfiledLayer], levels: &[LinkLevel]) -> Result<ReplicatedPlan, ParallelError> {
    let zero = |of: &str, field| Err(ParallelError::Zero { of: of.to_owned(), field });
    if layers.is_empty() {
        return zero("the chain", "layers");
    }
    if levels.is_empty() {
        return zero("the hierarchy", "levels");
    }
    for (at, level) in levels.iter().enumerate() {
        if level.units == 0 {
            return zero(&format!("level {at}"), "units");
        }
        if level.bandwidth.0 == 0 {
            return zero(&format!("level {at}"), "bandwidth");
        }
    }
    let mut planner = Planner { layers, levels, tables: Vec::new() };
    for level in 0..levels.len() {
        let table = planner.table(level);
        planner.tables.push(table);
    }
    let top = levels.len() - 1;
    let last = layers.len() - 1;
    let stages = planner.stages(top, 0, last, levels[top].units as usize, 1);
    let all: u32 = levels.iter().map(|level| level.units).product();
    let in_flight = all.div_ceil(stages[0].replicas);
    Ok(ReplicatedPlan {
        stages,
        period: Nanos(planner.best(top, 0, last, levels[top].units as usize)),
        in_flight,
    })
}

/// The best plan for some layers on some units of a level.
#[derive(Debug, Clone, Copy)]
struct Best {
    period: u64,
    /// Last layer of the pipeline before the last stage, and the units of the last stage. `None`: a single
    /// stage.
    split: Option<(usize, usize)>,
}

struct Planner<'a> {
    layers: &'a [ProfiledLayer],
    levels: &'a [LinkLevel],
    /// Table of each level, indexed `[first][last][units - 1]`.
    tables: Vec<Vec<Best>>,
}

impl Planner<'_> {
    fn at(&self, level: usize, first: usize, last: usize, units: usize) -> usize {
        (first * self.layers.len() + last) * self.levels[level].units as usize + units - 1
    }

    fn best(&self, level: usize, first: usize, last: usize, units: usize) -> u64 {
        self.tables[level][self.at(level, first, last, units)].period
    }

    /// Returns the period of one stage replicated over some units of a level.
    fn replicated(&self, level: usize, first: usize, last: usize, units: usize) -> u64 {
        let below = match level.checked_sub(1) {
            Some(below) => self.best(below, first, last, self.levels[below].units as usize),
            None => self.layers[first..=last].iter().map(|layer| layer.time.0).sum(),
        };
        let weights: u64 = self.layers[first..=last].iter().map(|layer| layer.weights.0).sum();
        let all = Bytes(weights.saturating_mul(2 * (units as u64 - 1)));
        below.max(self.levels[level].bandwidth.transfer(all).0).div_ceil(units as u64)
    }

    fn table(&self, level: usize) -> Vec<Best> {
        let (n, most) = (self.layers.len(), self.levels[level].units as usize);
        let mut table = vec![Best { period: u64::MAX, split: None }; n * n * most];
        for length in 1..=n {
            for first in 0..=n - length {
                let last = first + length - 1;
                for units in 1..=most {
                    let mut best = Best { period: self.replicated(level, first, last, units), split: None };
                    for cut in first..last {
                        let boundary = self.boundary(level, cut);
                        for ours in 1..units {
                            let before = table[self.at(level, first, cut, units - ours)].period;
                            let ours_take = self.replicated(level, cut + 1, last, ours);
                            let period = before.max(boundary).max(ours_take);
                            if period < best.period {
                                best = Best { period, split: Some((cut, ours)) };
                            }
                        }
                    }
                    table[self.at(level, first, last, units)] = best;
                }
            }
        }
        table
    }

    /// Returns the time to transfer a layer's activations and their gradients at a level.
    fn boundary(&self, level: usize, layer: usize) -> u64 {
        let both = Bytes(self.layers[layer].output.0.saturating_mul(2));
        self.levels[level].bandwidth.transfer(both).0
    }

    /// Returns the stages of the best plan. The number of devices of each stage is multiplied by `times`.
    fn stages(
        &self,
        level: usize,
        first: usize,
        last: usize,
        units: usize,
        times: u32,
    ) -> Vec<ReplicatedStage> {
        let one = |first: usize, units: usize| {
            let times = times * units as u32;
            match level.checked_sub(1) {
                Some(below) => self.stages(below, first, last, self.levels[below].units as usize, times),
                None => vec![ReplicatedStage { layers: first..last + 1, replicas: times }],
            }
        };
        match self.tables[level][self.at(level, first, last, units)].split {
            None => one(first, units),
            Some((cut, ours)) => {
                let mut stages = self.stages(level, first, cut, units - ours, times);
                stages.extend(one(cut + 1, ours));
                stages
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::seeded_rng::SeededRng;

    /// Returns the least period, by trying all lists of stages at each level.
    fn by_brute_force(layers: &[ProfiledLayer], levels: &[LinkLevel]) -> u64 {
        let Some((level, below)) = levels.split_last() else {
            return layers.iter().map(|layer| layer.time.0).sum();
        };
        on_units(layers, level, below, level.units)
    }

    /// Tries every first stage and every plan for the remaining layers on the remaining units. All units are
    /// used.
    fn on_units(layers: &[ProfiledLayer], level: &LinkLevel, below: &[LinkLevel], units: u32) -> u64 {
        let stage = |layers: &[ProfiledLayer], units: u32| {
            let weights: u64 = layers.iter().map(|layer| layer.weights.0).sum();
            let exchanged = level.bandwidth.transfer(Bytes(2 * u64::from(units - 1) * weights)).0;
            by_brute_force(layers, below).max(exchanged).div_ceil(u64::from(units))
        };
        let mut best = stage(layers, units);
        for end in 1..layers.len() {
            let boundary = level.bandwidth.transfer(Bytes(2 * layers[end - 1].output.0)).0;
            for first in 1..units {
                let rest = on_units(&layers[end..], level, below, units - first);
                best = best.min(stage(&layers[..end], first).max(boundary).max(rest));
            }
        }
        best
    }

    #[test]
    fn no_stages_have_a_shorter_period() {
        let mut draw = SeededRng::new(5, 0);
        let mut replicated = 0;
        for _ in 0..100 {
            let layer = |draw: &mut SeededRng| ProfiledLayer {
                time: Nanos(1000 * (1 + draw.below(20) as u64)),
                weights: Bytes(draw.below(40) as u64),
                output: Bytes(draw.below(60) as u64),
            };
            let layers: Vec<_> = (0..=draw.below(4)).map(|_| layer(&mut draw)).collect();
            let level = |draw: &mut SeededRng| LinkLevel {
                bandwidth: Bandwidth(20_000_000 * (1 + draw.below(10) as u64)),
                units: 1 + draw.below(3) as u32,
            };
            let levels: Vec<_> = (0..=draw.below(2)).map(|_| level(&mut draw)).collect();
            let plan = pipedream(&layers, &levels).unwrap();
            assert_eq!(plan.period.0, by_brute_force(&layers, &levels), "{layers:?} {levels:?}");
            let devices: u32 = levels.iter().map(|level| level.units).product();
            assert_eq!(plan.stages.iter().map(|stage| stage.replicas).sum::<u32>(), devices);
            let mut ends = plan.stages.iter().map(|stage| stage.layers.end);
            let starts = plan.stages.iter().map(|stage| stage.layers.start);
            assert!(starts.eq(std::iter::once(0).chain(ends.clone()).take(plan.stages.len())));
            assert_eq!(ends.next_back(), Some(layers.len()));
            replicated += u32::from(plan.stages.iter().any(|stage| stage.replicas > 1));
        }
        assert!(replicated > 20, "{replicated}");
    }

    #[test]
    fn a_large_layer_is_a_stage_and_small_ones_are_replicated() {
        // The layers are like those of VGG: convolutions with large outputs and few weights, then a layer with
        // many weights.
        let layer = |time, weights, output| ProfiledLayer {
            time: Nanos::from_millis(time),
            weights: Bytes(weights),
            output: Bytes(output),
        };
        let layers = [layer(30, 1000, 50_000), layer(30, 1000, 1000), layer(20, 500_000_000, 10)];
        let levels = [LinkLevel { bandwidth: Bandwidth(1_000_000_000), units: 4 }];
        let plan = pipedream(&layers, &levels).unwrap();
        let stages: Vec<_> = plan.stages.iter().map(|s| (s.layers.clone(), s.replicas)).collect();
        assert_eq!(stages, [(0..2, 3), (2..3, 1)]);
        assert_eq!((plan.period, plan.in_flight), (Nanos::from_millis(20), 2));
        assert!(pipedream(&[], &levels).is_err() && pipedream(&layers, &[]).is_err());
    }
}
