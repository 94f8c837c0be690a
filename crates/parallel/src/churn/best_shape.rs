//! The fastest shape of a job on some number of machines.

use farflung_base::Nanos;

use super::{Shape, StepTimes};
use crate::mesh::whole_pipelines;

/// Returns the shape with the fastest step on at most `machines` machines, with at least `copies` pipelines.
/// Among equally fast shapes, returns the one with the fewest machines. `None` if the model does not fit.
///
/// Simulates every number of stages, each with as many pipelines as the machines allow and with one fewer. The
/// global batch stays the same. Source: Athlur et al. 2022, "Varuna", section 4 (job morphing).
pub fn best_shape(prices: &mut StepTimes<'_>, machines: u32, copies: u32) -> Option<Shape> {
    let most = prices.fleet().microbatches;
    let mut best: Option<(Nanos, u32, Shape)> = None;
    for stages in 1..=machines.min(prices.fleet().layers.len() as u32) {
        let pipelines = whole_pipelines(machines, stages).min(most);
        for pipelines in pipelines.saturating_sub(1).max(1)..=pipelines {
            let shape = Shape { stages, pipelines };
            let Some(step) = prices.step(shape).filter(|_| pipelines >= copies) else { continue };
            let found = (step, shape.machines(), shape);
            if best.is_none_or(|best| found < best) {
                best = Some(found);
            }
        }
    }
    best.map(|(.., shape)| shape)
}

#[cfg(test)]
mod tests {
    use super::super::fleet::tests::fleet;
    use super::*;

    #[test]
    fn no_shape_is_faster() {
        let fleet = fleet();
        let mut prices = StepTimes::new(&fleet).unwrap();
        for machines in 3..=24 {
            let shape = best_shape(&mut prices, machines, 1).unwrap();
            let step = prices.step(shape).unwrap();
            assert!(shape.machines() <= machines);
            for stages in 1..=8 {
                // With fewer pipelines than `best_shape` tries, steps are slower here.
                for pipelines in 1..=whole_pipelines(machines, stages) {
                    let other = prices.step(Shape { stages, pipelines });
                    assert!(other.is_none_or(|other| step <= other), "{machines}: {shape:?}");
                }
            }
        }
        assert_eq!(best_shape(&mut prices, 2, 1), None);
        assert_eq!(best_shape(&mut prices, 5, 2), None);
        assert_eq!(best_shape(&mut prices, 6, 2), Some(Shape { stages: 3, pipelines: 2 }));
    }
}
