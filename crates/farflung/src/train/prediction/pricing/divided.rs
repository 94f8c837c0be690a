//! Prices what replicas divide: weights that arrive layer by layer, and gradients that leave for their owners.

use std::ops::Range;

use farflung_base::{Nanos, StageId};
use farflung_optim::ReductionStep;
use farflung_parallel::pipeline::{Action, ComputeKind};
use farflung_zoo::layer::LayerUnits;

use super::super::operations::{GradientHop, Key, WeightWay};
use super::Pricing;
use crate::Result;
use crate::train::executor::share;
use crate::train::fetch_order::{Fetch, own_elements};

/// A window of gradients on its way.
#[derive(Debug)]
pub(super) struct LeavingWindow {
    /// Its number in the order.
    number: usize,
    microbatch: u32,
    range: usize,
    window: usize,
    /// The operation that it waits for.
    operation: usize,
}

/// A unit of weights on its way, and its operation.
#[derive(Debug)]
pub(super) struct ComingUnit {
    range: Range<usize>,
    /// Its number among the units of the part.
    unit: usize,
    /// The number of its gather.
    gather: u32,
    inside: bool,
    operation: usize,
}

impl Pricing<'_, '_, '_> {
    /// Prices the computation of a pass that makes no gradients of weights. If weights are divided, those of
    /// each layer arrive before it.
    pub(super) fn pass(&mut self, action: Action, kind: ComputeKind, took: Nanos) -> Result<()> {
        let Some(weights) = &self.facts(action.stage).weights else {
            self.compute(took);
            return Ok(());
        };
        let layers = match kind {
            ComputeKind::Forward => weights.forward.clone(),
            ComputeKind::Recompute => weights.recompute.clone(),
            _ => weights.backward.clone(),
        };
        let fetches = &mut self.state(action.stage).fetches;
        fetches.begin(layers.clone());
        let elements = fetches.elements();
        for layer in layers {
            self.fetch(action.stage, &layer)?;
            self.compute(share(took, own_elements(&layer), elements));
        }
        Ok(())
    }

    /// Prices what a layer waits for, and starts to gather what the next one needs.
    pub(super) fn fetch(&mut self, stage: StageId, layer: &LayerUnits) -> Result<()> {
        let tensor = self.operations.plan.at(self.rank).tensor;
        let (steps, _) = self.state(stage).fetches.next(layer);
        for step in steps {
            match step {
                Fetch::Drop(_) => {}
                Fetch::Start(range) => {
                    let units = self.facts(stage).weights.as_ref().map(|weights| &weights.units);
                    let unit = units.and_then(|units| units.iter().position(|unit| *unit == range));
                    let (unit, gathered) = (unit.expect("a unit of the part"), self.state(stage).gathered);
                    let inside = self.state(stage).filled.contains(&range.start);
                    let way = match self.group(stage).filter(|_| inside) {
                        Some(group) => WeightWay::InGroup(group),
                        None => WeightWay::FromOwners,
                    };
                    let home = self.placement().storage_stage(stage);
                    let key = Key::Weights { stage: home, tensor, unit, number: gathered, way };
                    let operation = self.begin(key)?;
                    let state = self.state(stage);
                    state.gathered += 1;
                    state.coming.push(ComingUnit { range, unit, gather: gathered, inside, operation });
                }
                Fetch::Wait(range) => {
                    let coming = &mut self.state(stage).coming;
                    let at = coming.iter().position(|coming| coming.range == range);
                    let unit = coming.swap_remove(at.expect("it was started before"));
                    self.complete(unit.operation);
                    if let Some(group) = self.group(stage).filter(|_| !unit.inside) {
                        let way = WeightWay::PassedOn(group);
                        let home = self.placement().storage_stage(stage);
                        let key =
                            Key::Weights { stage: home, tensor, unit: unit.unit, number: unit.gather, way };
                        let passed = self.begin(key)?;
                        self.complete(passed);
                        self.state(stage).filled.insert(range.start);
                    }
                }
            }
        }
        Ok(())
    }

    /// Starts to sum a range of a microbatch's gradients into the shards, in its windows.
    pub(super) fn scatter(&mut self, action: Action, range: usize) -> Result<()> {
        let Action { stage, microbatch, .. } = action;
        let tensor = self.operations.plan.at(self.rank).tensor;
        let group = self.group(stage);
        for window in 0..self.facts(stage).reductions[range].len() {
            for step in self.state(stage).order.start() {
                let ReductionStep::Start(number) = step else {
                    self.reduce(stage, step)?;
                    continue;
                };
                let hop = GradientHop::Start(group.unwrap_or(0));
                let key = Key::Gradients { stage, tensor, microbatch, range, window, hop };
                let operation = self.begin(key)?;
                let leaving = LeavingWindow { number, microbatch, range, window, operation };
                self.state(stage).leaving.push(leaving);
            }
        }
        if self.operations.plan.outermost().overlap { Ok(()) } else { self.finish_reductions(stage) }
    }

    /// Waits for all gradients on their way.
    pub(super) fn finish_reductions(&mut self, stage: StageId) -> Result<()> {
        let steps = self.state(stage).order.finish();
        steps.into_iter().try_for_each(|step| self.reduce(stage, step))
    }

    /// Prices a step of a window of gradients that has left.
    pub(super) fn reduce(&mut self, stage: StageId, step: ReductionStep) -> Result<()> {
        let tensor = self.operations.plan.at(self.rank).tensor;
        let leaving = &mut self.state(stage).leaving;
        match step {
            ReductionStep::Start(_) => {}
            ReductionStep::PassOn(number) => {
                let found = leaving.iter().position(|window| window.number == number);
                let at = found.expect("a window that has left");
                let LeavingWindow { microbatch, range, window, operation, .. } = leaving[at];
                self.complete(operation);
                let hop = GradientHop::PassOn;
                let key = Key::Gradients { stage, tensor, microbatch, range, window, hop };
                let operation = self.begin(key)?;
                self.state(stage).leaving[at].operation = operation;
            }
            ReductionStep::Arrive(number) => {
                let found = leaving.iter().position(|window| window.number == number);
                let window = leaving.remove(found.expect("a window that has left"));
                self.complete(window.operation);
            }
        }
        Ok(())
    }

    /// Returns the number of this rank's group among those of a part's holders, if they are in groups.
    pub(super) fn group(&self, stage: StageId) -> Option<usize> {
        self.facts(stage).groups.as_ref().map(|groups| groups.of(self.replica as usize))
    }
}
