//! Piper's planner: for each stage its layers, its devices and how they divide it, within memory.

use std::ops::Range;

use farflung_base::{Bytes, Nanos};

use crate::ParallelError;

/// How the devices of a stage divide the stage's work.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct StageShape {
    /// Number of devices that divide each layer's tensors.
    pub tensor: u32,
    /// Number of copies that divide the batch.
    pub data: u32,
    /// Whether activations are recomputed for the backward pass.
    pub recompute: bool,
}

impl StageShape {
    /// Returns the number of devices of the stage.
    #[must_use]
    pub const fn devices(&self) -> u32 {
        self.tensor * self.data
    }
}

/// A stage of the plan.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShapedStage {
    /// Layers of the stage.
    pub layers: Range<usize>,
    /// Shape of the stage on its devices.
    pub shape: StageShape,
}

/// The stages of a plan, first to last.
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use]
pub struct ShapedPlan {
    /// Stages. Together they have all layers, on at most all devices.
    pub stages: Vec<ShapedStage>,
    /// Time between two microbatches in the steady state: that of the slowest stage.
    pub period: Nanos,
}

/// Time and memory of a stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StageLoad {
    /// Time of a microbatch, including communication.
    pub time: Nanos,
    /// Bytes held on each device, whatever the number of microbatches in flight.
    pub fixed: Bytes,
    /// Bytes held on each device for each microbatch in flight.
    pub each: Bytes,
}

/// Returns the time and memory of some layers in a shape.
pub type ShapeLoad<'a> = &'a dyn Fn(Range<usize>, StageShape) -> StageLoad;

/// Input of the planner.
#[derive(Debug, Clone)]
pub struct PiperSize {
    /// Number of layers of the model.
    pub layers: usize,
    /// Number of devices; all are equal.
    pub devices: u32,
    /// Memory of each device.
    pub memory: Bytes,
    /// Shapes that a stage may have.
    pub shapes: Vec<StageShape>,
}

/// Returns the plan with the least period, by dynamic programming over (first layer, devices left, stages to
/// the end). The `s`-th stage from the end holds `s` microbatches.
///
/// Source: Tarnawski et al. 2021, "Piper", equation 1, for a chain of layers (whose downsets are its prefixes).
/// Among plans with the same period, returns the one with the fewest stages.
///
/// Errors: [`ParallelError::Plan`] if nothing fits or a size is 0.
pub fn piper(size: &PiperSize, load: ShapeLoad<'_>) -> Result<ShapedPlan, ParallelError> {
    let refused = || ParallelError::Plan {
        field: "stages".to_owned(),
        value: format!("{} layers on {} devices of {}", size.layers, size.devices, size.memory),
        expected: "a model that fits on the devices".to_owned(),
    };
    let (layers, all) = (size.layers, size.devices as usize);
    if layers == 0 || all == 0 {
        return Err(refused());
    }
    let most = layers.min(all);
    let loads = Loads::new(size, load);
    let at =
        |stages: usize, first: usize, devices: usize| (stages * (layers + 1) + first) * (all + 1) + devices;
    let mut best: Vec<Option<Step>> = vec![None; (most + 1) * (layers + 1) * (all + 1)];
    for devices in 0..=all {
        best[at(0, layers, devices)] = Some(Step { period: 0, end: layers, shape: 0 });
    }
    for stages in 1..=most {
        for first in (0..layers).rev() {
            for devices in 1..=all {
                let mut found: Option<Step> = None;
                for (shape, of) in size.shapes.iter().enumerate() {
                    let Some(left) = devices.checked_sub(of.devices() as usize) else { continue };
                    for end in first + 1..=layers {
                        let Some(rest) = best[at(stages - 1, end, left)] else { continue };
                        let Some(time) = loads.time(first, end, shape, stages) else { continue };
                        let period = time.max(rest.period);
                        if found.is_none_or(|found| period < found.period) {
                            found = Some(Step { period, end, shape });
                        }
                    }
                }
                best[at(stages, first, devices)] = found;
            }
        }
    }
    let of = |stages: usize| best[at(stages, 0, all)].map(|step| (step.period, stages));
    let (period, stages) = (1..=most).filter_map(of).min().ok_or_else(refused)?;
    let (mut first, mut devices, mut list) = (0, all, Vec::new());
    for left in (1..=stages).rev() {
        let step = best[at(left, first, devices)].ok_or_else(refused)?;
        let shape = size.shapes[step.shape];
        list.push(ShapedStage { layers: first..step.end, shape });
        (first, devices) = (step.end, devices - shape.devices() as usize);
    }
    Ok(ShapedPlan { stages: list, period: Nanos(period) })
}

#[derive(Clone, Copy)]
struct Step {
    period: u64,
    end: usize,
    shape: usize,
}

/// Load of each range of layers in each shape.
struct Loads<'a> {
    size: &'a PiperSize,
    all: Vec<StageLoad>,
}

impl<'a> Loads<'a> {
    fn new(size: &'a PiperSize, load: ShapeLoad<'_>) -> Self {
        let layers = size.layers;
        let mut all = Vec::with_capacity(layers * layers * size.shapes.len());
        for (first, last) in (0..layers).flat_map(|first| (0..layers).map(move |last| (first, last))) {
            for shape in &size.shapes {
                all.push(load(first..last.max(first) + 1, *shape));
            }
        }
        Self { size, all }
    }

    /// Returns the time of a stage, or `None` if it does not fit on its devices.
    fn time(&self, first: usize, end: usize, shape: usize, stages: usize) -> Option<u64> {
        let load = self.all[(first * self.size.layers + end - 1) * self.size.shapes.len() + shape];
        let held = load.each.0.saturating_mul(stages as u64).saturating_add(load.fixed.0);
        (held <= self.size.memory.0).then_some(load.time.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::seeded_rng::SeededRng;

    /// Returns the period and the number of stages of every list of stages that fits.
    fn by_brute_force(
        size: &PiperSize,
        load: ShapeLoad<'_>,
        first: usize,
        devices: u32,
    ) -> Vec<(u64, usize)> {
        if first == size.layers {
            return vec![(0, 0)];
        }
        let mut found = Vec::new();
        for &shape in size.shapes.iter().filter(|shape| shape.devices() <= devices) {
            for end in first + 1..=size.layers {
                for (rest, stages) in by_brute_force(size, load, end, devices - shape.devices()) {
                    let stage = load(first..end, shape);
                    if stage.fixed.0 + stage.each.0 * (stages as u64 + 1) <= size.memory.0 {
                        found.push((stage.time.0.max(rest), stages + 1));
                    }
                }
            }
        }
        found
    }

    #[test]
    fn no_stages_have_a_shorter_period() {
        let mut draw = SeededRng::new(6, 0);
        let mut planned = 0;
        for _ in 0..150 {
            let shape = |draw: &mut SeededRng| StageShape {
                tensor: 1 << draw.below(2),
                data: 1 + draw.below(2) as u32,
                recompute: draw.below(2) == 0,
            };
            let size = PiperSize {
                layers: 1 + draw.below(4),
                devices: 1 + draw.below(5) as u32,
                memory: Bytes(10 + draw.below(40) as u64),
                shapes: (0..3).map(|_| shape(&mut draw)).collect(),
            };
            let table: Vec<u64> = (0..512).map(|_| draw.below(100) as u64).collect();
            let load = |layers: Range<usize>, shape: StageShape| {
                let at = layers.start * 31
                    + layers.end * 7
                    + shape.devices() as usize * 3
                    + usize::from(shape.recompute);
                let value = |more: usize| table[(at + more) % 512];
                StageLoad {
                    time: Nanos(1 + value(0)),
                    fixed: Bytes(value(101) / 4),
                    each: Bytes(value(211) / 8),
                }
            };
            let best = by_brute_force(&size, &load, 0, size.devices).into_iter().min();
            let found = piper(&size, &load).ok();
            assert_eq!(found.as_ref().map(|plan| (plan.period.0, plan.stages.len())), best, "{size:?}");
            planned += u32::from(found.is_some());
        }
        assert!((50..150).contains(&planned), "{planned}");
    }
}
