//! Alpa's outer level: divides layers into stages and gives each stage a submesh of equal devices. The result
//! is exact.

use std::ops::Range;

use farflung_base::Nanos;

use crate::ParallelError;

/// A rectangle of equal devices that runs one stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Submesh {
    /// Number of machines.
    pub nodes: u32,
    /// Number of devices of each machine.
    pub devices: u32,
}

impl Submesh {
    /// Returns the total number of devices.
    #[must_use]
    pub const fn size(self) -> u32 {
        self.nodes * self.devices
    }
}

/// Returns the submeshes that Alpa allows on `nodes` machines with `devices` devices each: a power of two of
/// one machine's devices, or all devices of one or more machines. Any list of them whose sizes add up to all
/// devices can be placed: see [`SubmeshPlan::places`].
///
/// Differs from the paper, where `devices` is a power of two: with other numbers on several machines, a power
/// must divide `devices`. Otherwise three submeshes of two devices, for example, would have to share two
/// machines of three.
#[must_use]
pub fn submeshes(nodes: u32, devices: u32) -> Vec<Submesh> {
    let fits = |size: u32| nodes == 1 || devices.is_multiple_of(size);
    let powers = (0..32).map(|power| 1 << power).take_while(|&n| n <= devices).filter(|&n| fits(n));
    let mut all: Vec<Submesh> = powers.map(|devices| Submesh { nodes: 1, devices }).collect();
    all.extend((1..=nodes).map(|nodes| Submesh { nodes, devices }));
    all.sort_unstable();
    all.dedup();
    all
}

/// A stage of the plan.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SubmeshStage {
    /// Layers of the stage.
    pub layers: Range<usize>,
    /// Devices of the stage.
    pub mesh: Submesh,
}

/// The stages of a plan, first to last, and the time of a step.
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use]
pub struct SubmeshPlan {
    /// Stages. Together they use all layers and all devices.
    pub stages: Vec<SubmeshStage>,
    /// Time of a step: `sum(t) + (microbatches - 1) max(t)` over the stages' times `t`.
    pub time: Nanos,
}

impl SubmeshPlan {
    /// Returns the devices of each stage. Devices are numbered machine by machine. Larger submeshes are placed
    /// first: whole machines come before parts of machines, and a part begins at a multiple of its size. So no
    /// part of a machine crosses to another machine.
    #[must_use]
    pub fn places(&self) -> Vec<Range<u32>> {
        let mut by_size: Vec<usize> = (0..self.stages.len()).collect();
        by_size.sort_by_key(|&stage| std::cmp::Reverse(self.stages[stage].mesh.size()));
        let (mut places, mut next) = (vec![0..0; self.stages.len()], 0);
        for stage in by_size {
            let end = next + self.stages[stage].mesh.size();
            places[stage] = next..end;
            next = end;
        }
        places
    }
}

/// Sizes of the planning problem.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AlpaSize {
    /// Number of layers of the model.
    pub layers: usize,
    /// Number of machines.
    pub nodes: u32,
    /// Number of devices of each machine.
    pub devices: u32,
    /// Number of microbatches in a step.
    pub microbatches: u32,
}

/// Returns the time of one microbatch for some layers on a submesh. The last argument is the number of stages
/// from this one to the end, itself included. `None` if the layers do not fit in the submesh's memory.
pub type StageTime<'a> = &'a dyn Fn(Range<usize>, Submesh, usize) -> Option<Nanos>;

/// Returns the fastest stages. For each bound on the slowest stage, in ascending order, finds the least sum of
/// times by dynamic programming over (stages, first layer, devices left). Stops when the bound alone makes a
/// step slower than the best plan.
///
/// Source: Zheng et al. 2022, "Alpa", section 5.2, equations 2 to 5. Differs: bounds that are near each other
/// are all tried, so the result is exact.
///
/// Errors: [`ParallelError::Plan`] if no division fits or a size is 0.
pub fn alpa(size: &AlpaSize, time: StageTime<'_>) -> Result<SubmeshPlan, ParallelError> {
    let meshes = submeshes(size.nodes, size.devices);
    let all = size.nodes * size.devices;
    let refused = || ParallelError::Plan {
        field: "stages".to_owned(),
        value: format!("{} layers on {} machines of {} devices", size.layers, size.nodes, size.devices),
        expected: "a model that fits on the devices".to_owned(),
    };
    if size.layers == 0 || all == 0 || size.microbatches == 0 {
        return Err(refused());
    }
    let table = Table::new(size, &meshes, time);
    let further = u64::from(size.microbatches) - 1;
    let mut best: Option<SubmeshPlan> = None;
    for &bound in &table.bounds {
        if best.as_ref().is_some_and(|best| bound.saturating_mul(further) >= best.time.0) {
            break;
        }
        let Some(stages) = table.least_sum(bound) else { continue };
        let times = stages.iter().enumerate().map(|(at, stage)| {
            let time = time(stage.layers.clone(), stage.mesh, stages.len() - at);
            time.map_or(0, |time| time.0)
        });
        let (sum, slowest) = times.fold((0_u64, 0), |(sum, most), t| (sum.saturating_add(t), t.max(most)));
        let time = Nanos(sum.saturating_add(slowest.saturating_mul(further)));
        if best.as_ref().is_none_or(|best| time < best.time) {
            best = Some(SubmeshPlan { stages, time });
        }
    }
    best.ok_or_else(refused)
}

/// Times of all possible stages.
struct Table<'a> {
    size: &'a AlpaSize,
    meshes: &'a [Submesh],
    /// Maximum number of stages.
    most: usize,
    /// Time of each possible stage, indexed by `[stages to the end - 1][first layer][end - 1][mesh]`; `None` if
    /// it does not fit.
    times: Vec<Option<u64>>,
    /// All different times, ascending: the candidate bounds.
    bounds: Vec<u64>,
}

#[derive(Clone, Copy)]
struct Step {
    sum: u64,
    end: usize,
    mesh: usize,
}

impl<'a> Table<'a> {
    fn new(size: &'a AlpaSize, meshes: &'a [Submesh], time: StageTime<'_>) -> Self {
        let layers = size.layers;
        let most = layers.min((size.nodes * size.devices) as usize);
        let mut times = Vec::with_capacity(most * layers * layers * meshes.len());
        for stages in 1..=most {
            for (first, last) in (0..layers).flat_map(|first| (0..layers).map(move |last| (first, last))) {
                for mesh in meshes {
                    let range = first..last + 1;
                    times.push((first <= last).then(|| time(range, *mesh, stages)).flatten().map(|t| t.0));
                }
            }
        }
        let mut bounds: Vec<u64> = times.iter().copied().flatten().collect();
        bounds.sort_unstable();
        bounds.dedup();
        Self { size, meshes, most, times, bounds }
    }

    fn time(&self, stages: usize, first: usize, end: usize, mesh: usize) -> Option<u64> {
        let layers = self.size.layers;
        self.times[(((stages - 1) * layers + first) * layers + end - 1) * self.meshes.len() + mesh]
    }

    /// Returns the stages with the least sum of times on all devices, with no stage slower than `bound`.
    fn least_sum(&self, bound: u64) -> Option<Vec<SubmeshStage>> {
        let (layers, all) = (self.size.layers, (self.size.nodes * self.size.devices) as usize);
        let at = |stages: usize, first: usize, devices: usize| {
            (stages * (layers + 1) + first) * (all + 1) + devices
        };
        let mut least: Vec<Option<Step>> = vec![None; (self.most + 1) * (layers + 1) * (all + 1)];
        least[at(0, layers, 0)] = Some(Step { sum: 0, end: layers, mesh: 0 });
        for stages in 1..=self.most {
            for first in (0..layers).rev() {
                for devices in 1..=all {
                    let mut best: Option<Step> = None;
                    for (mesh, submesh) in self.meshes.iter().enumerate() {
                        let Some(left) = devices.checked_sub(submesh.size() as usize) else { continue };
                        for end in first + 1..=layers {
                            let Some(rest) = least[at(stages - 1, end, left)] else { continue };
                            let time = self.time(stages, first, end, mesh).filter(|&time| time <= bound);
                            let Some(sum) = time.map(|time| time.saturating_add(rest.sum)) else { continue };
                            if best.is_none_or(|best| sum < best.sum) {
                                best = Some(Step { sum, end, mesh });
                            }
                        }
                    }
                    least[at(stages, first, devices)] = best;
                }
            }
        }
        let of = |stages: usize| least[at(stages, 0, all)].map(|step| (step.sum, stages));
        let (_, stages) = (1..=self.most).filter_map(of).min()?;
        let (mut first, mut devices, mut list) = (0, all, Vec::new());
        for left in (1..=stages).rev() {
            let step = least[at(left, first, devices)]?;
            let mesh = self.meshes[step.mesh];
            list.push(SubmeshStage { layers: first..step.end, mesh });
            (first, devices) = (step.end, devices - mesh.size() as usize);
        }
        Some(list)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::seeded_rng::SeededRng;

    /// Returns every list of stages for the layers from `first` on that uses exactly this number of devices.
    fn all(size: &AlpaSize, meshes: &[Submesh], first: usize, devices: u32) -> Vec<Vec<SubmeshStage>> {
        if first == size.layers {
            return if devices == 0 { vec![Vec::new()] } else { Vec::new() };
        }
        let mut found = Vec::new();
        for &mesh in meshes.iter().filter(|mesh| mesh.size() <= devices) {
            for end in first + 1..=size.layers {
                for rest in all(size, meshes, end, devices - mesh.size()) {
                    let mut stages = vec![SubmeshStage { layers: first..end, mesh }];
                    stages.extend(rest);
                    found.push(stages);
                }
            }
        }
        found
    }

    #[test]
    fn no_stages_are_faster() {
        let mut draw = SeededRng::new(4, 0);
        let mut planned = 0;
        for _ in 0..150 {
            let size = AlpaSize {
                layers: 1 + draw.below(5),
                nodes: 1 + draw.below(2) as u32,
                devices: 1 << draw.below(3),
                microbatches: 1 + draw.below(6) as u32,
            };
            let table: Vec<u64> = (0..4096).map(|_| 1 + draw.below(50) as u64).collect();
            // An arbitrary function gives the time of a stage; for some stages it says that they do not fit.
            let time = |layers: Range<usize>, mesh: Submesh, stages: usize| {
                let at =
                    layers.start * 641 + layers.end * 97 + mesh.size() as usize * 13 + mesh.nodes as usize;
                let value = table[at % 4096];
                (value * 3 > stages as u64 * 10).then_some(Nanos(value * (layers.len() as u64) + 1))
            };
            let meshes = submeshes(size.nodes, size.devices);
            let further = u64::from(size.microbatches) - 1;
            let price = |stages: &Vec<SubmeshStage>| {
                let times = stages.iter().enumerate();
                let times = times.map(|(at, s)| time(s.layers.clone(), s.mesh, stages.len() - at));
                let times: Option<Vec<u64>> = times.map(|time| time.map(|time| time.0)).collect();
                times.map(|times| {
                    Nanos(times.iter().sum::<u64>() + further * times.iter().max().unwrap_or(&0))
                })
            };
            let best = all(&size, &meshes, 0, size.nodes * size.devices).iter().filter_map(price).min();
            let found = alpa(&size, &time).ok();
            assert_eq!(found.as_ref().map(|plan| plan.time), best, "{size:?}");
            assert_eq!(found.as_ref().and_then(|plan| price(&plan.stages)), best);
            planned += u32::from(found.is_some());
        }
        assert!((50..150).contains(&planned), "{planned}");
    }

    #[test]
    fn the_submeshes_are_those_of_the_paper() {
        let sizes =
            |nodes, devices| submeshes(nodes, devices).into_iter().map(Submesh::size).collect::<Vec<_>>();
        assert_eq!(sizes(3, 4), [1, 2, 4, 8, 12]);
        assert_eq!(
            (sizes(1, 3), sizes(2, 3), sizes(2, 6)),
            (vec![1, 2, 3], vec![1, 3, 6], vec![1, 2, 6, 12])
        );
    }

    /// Whatever the numbers of machines and devices, no submesh within a machine crosses to another, and one of
    /// several machines begins with the first device of a machine.
    #[test]
    fn every_list_of_submeshes_can_be_placed() {
        for (nodes, devices) in (1..4).flat_map(|nodes| (1..8).map(move |devices| (nodes, devices))) {
            let size = AlpaSize { layers: 5, nodes, devices, microbatches: 1 };
            for stages in all(&size, &submeshes(nodes, devices), 0, nodes * devices) {
                let plan = SubmeshPlan { stages, time: Nanos::ZERO };
                let places = plan.places();
                for (stage, place) in plan.stages.iter().zip(&places) {
                    assert_eq!(place.end - place.start, stage.mesh.size());
                    let machines = place.start / devices..(place.end - 1) / devices + 1;
                    assert_eq!(machines.end - machines.start, stage.mesh.nodes, "{plan:?}: {places:?}");
                }
                let mut used: Vec<u32> = places.into_iter().flatten().collect();
                used.sort_unstable();
                assert_eq!(used, (0..nodes * devices).collect::<Vec<_>>());
            }
        }
    }
}
