//! Memory of a pipeline's ranks: activations are held from their forward to the end of their backward. Only the
//! order matters, not the times.

use farflung_base::{Bytes, StageId};

use super::cost::CostTable;
use super::{Action, ComputeKind, ComputeOrder, Lowered, LoweredKind, Op, PipelineCost, Schedule};
use crate::ParallelError;

/// Returns the peak number of activations that each rank holds. A microbatch on one of the rank's stages counts
/// as one, from its forward to the last part of its backward.
///
/// With slices, each slice of a microbatch counts as one. An overlapped pair holds both of its microbatches. If
/// the order has no backwards, activations are freed at the end of their forward.
#[must_use]
pub fn peaks(order: &ComputeOrder) -> Vec<u32> {
    if order.is_forward_only() {
        return vec![1; order.lists().len()];
    }
    let peak = |list: &Vec<Op>| {
        let (mut held, mut most) = (0_u32, 0);
        for action in list.iter().flat_map(Op::actions) {
            match action.kind {
                ComputeKind::Forward => held += 1,
                _ if action.releases() => held -= 1,
                _ => {}
            }
            most = most.max(held);
        }
        most
    };
    order.lists().iter().map(peak).collect()
}

/// Returns the peak bytes of activations that each rank holds.
///
/// A stage that recomputes holds [`StageMemory::input`](super::StageMemory::input) from `F` to `R`, and all
/// activations from `R` on.
///
/// Errors: as [`PipelineCost::check`].
pub fn peak_bytes(order: &ComputeOrder, cost: &PipelineCost) -> Result<Vec<Bytes>, ParallelError> {
    let held = Held::new(order, cost)?;
    let peak = |list: &Vec<Op>| held.peak(list.iter().map(|&op| Lowered::Compute(op)));
    Ok(order.lists().iter().map(peak).collect())
}

impl Schedule {
    /// Returns the peak bytes of activations that each rank holds, without offloaded ones.
    ///
    /// Errors: as [`PipelineCost::check`].
    pub fn peak_bytes(&self, cost: &PipelineCost) -> Result<Vec<Bytes>, ParallelError> {
        let held = Held::new(self.order(), cost)?;
        Ok(self.lists().iter().map(|list| held.peak(list.iter().copied())).collect())
    }
}

/// Computes the peak bytes of activations that a rank holds, both while the entries of its list run and between
/// them.
struct Held<'a> {
    order: &'a ComputeOrder,
    table: CostTable,
    recomputes: Vec<bool>,
    forward_only: bool,
}

impl<'a> Held<'a> {
    fn new(order: &'a ComputeOrder, cost: &PipelineCost) -> Result<Self, ParallelError> {
        cost.check(order)?;
        let mut recomputes = vec![false; order.cells()];
        for (_, action) in order.actions().filter(|(_, a)| a.kind == ComputeKind::Recompute) {
            recomputes[order.cell(action)] = true;
        }
        Ok(Self { order, table: cost.table(order), recomputes, forward_only: order.is_forward_only() })
    }

    fn peak(&self, list: impl Iterator<Item = Lowered>) -> Bytes {
        let (mut held, mut most) = (0_u64, 0_u64);
        for entry in list {
            match entry {
                Lowered::Compute(op) => {
                    for action in op.actions() {
                        let (while_running, after) = self.change(action);
                        most = most.max(held.saturating_add(while_running));
                        held = held.saturating_add(after.0).saturating_sub(after.1);
                    }
                }
                Lowered::Move { kind: LoweredKind::Offload, stage, microbatch, slice } => {
                    held = held.saturating_sub(self.activations(stage, microbatch, slice));
                }
                Lowered::Move { kind: LoweredKind::Load, stage, microbatch, slice } => {
                    held = held.saturating_add(self.activations(stage, microbatch, slice));
                }
                Lowered::Move { .. } => {}
            }
            most = most.max(held);
        }
        Bytes(most)
    }

    fn activations(&self, stage: StageId, microbatch: u32, slice: u16) -> u64 {
        let action = Action { stage, microbatch, slice, kind: ComputeKind::Forward };
        self.table.of(action).memory.activations.0
    }

    /// Returns the extra bytes that are held only while an action runs, and the bytes that are added and freed
    /// at its end.
    fn change(&self, action: Action) -> (u64, (u64, u64)) {
        let memory = self.table.of(action).memory;
        let all = memory.activations.0;
        let for_weight = memory.for_weight.0.min(all);
        match action.kind {
            // While a forward runs, it holds all its activations, including those that are not kept for the
            // backward.
            ComputeKind::Forward if self.forward_only => (all, (0, 0)),
            ComputeKind::Forward if self.recomputes[self.order.cell(action)] => (all, (memory.input.0, 0)),
            ComputeKind::Forward => (all, (all, 0)),
            ComputeKind::Recompute => (all, (all, memory.input.0)),
            ComputeKind::BackwardInput => (0, (0, all - for_weight)),
            ComputeKind::BackwardWeight => (0, (0, for_weight)),
            ComputeKind::Backward => (0, (0, all)),
            ComputeKind::Step => (0, (0, 0)),
        }
    }
}

#[cfg(test)]
mod tests {
    use farflung_base::Nanos;

    use super::*;
    use crate::pipeline::{Boundary, Lowering, Method, Settings, StageCost, StageMemory};

    /// Per microbatch: 10 bytes of activations, 4 of them until W, and 1 byte of input if the stage recomputes.
    fn cost(order: &ComputeOrder) -> PipelineCost {
        let memory = StageMemory { activations: Bytes(10), for_weight: Bytes(4), input: Bytes(1) };
        PipelineCost::uniform(order, StageCost { memory, ..StageCost::UNIT }, Boundary::latency(Nanos::ZERO))
    }

    fn peak(order: &ComputeOrder) -> Vec<u64> {
        peak_bytes(order, &cost(order)).unwrap().into_iter().map(|b| b.0).collect()
    }

    #[test]
    fn recompute_holds_inputs_and_one_microbatch() {
        let order = Method::GPipe.order(&Settings::new(2, 4)).unwrap();
        assert_eq!(peak(&order), [40, 40]);
        // Each stage holds the inputs of three microbatches, and all activations of the last one, whose
        // backward pass follows its forward pass directly.
        let again = order.with_recompute();
        assert_eq!(peak(&again), [13, 13]);
        // With half of the layers recomputed, the activations of the other half are held from `F` on.
        let mut selective = cost(&again);
        selective.stages.iter_mut().for_each(|stage| stage.memory.input = Bytes(6));
        assert_eq!(peak_bytes(&again, &selective).unwrap(), [Bytes(28); 2]);
    }

    #[test]
    fn a_split_backward_gives_back_in_two_parts() {
        // F0 and F1 hold 20 bytes. I0 and I1 free 6 each before F2 adds 10.
        let order: ComputeOrder = "r0: 0F0 0F1 0I0 0I1 0F2 0W0 0W1 0I2 0W2".parse().unwrap();
        assert_eq!(peak(&order), [20]);
        let later: ComputeOrder = "r0: 0F0 0F1 0I0 0F2 0W0 0I1 0W1 0I2 0W2".parse().unwrap();
        assert_eq!(peak(&later), [24]);
        let forwards = Method::Inference.order(&Settings::new(1, 5)).unwrap();
        assert_eq!(peak(&forwards), [10]);
    }

    #[test]
    fn what_is_offloaded_is_not_held() {
        let order = Method::GPipe.order(&Settings::new(2, 8)).unwrap();
        let costs = cost(&order);
        let lowering = Lowering { offload: Some(4), ..Lowering::default() };
        let schedule = Schedule::new(order, &lowering).unwrap();
        let peaks = schedule.peak_bytes(&costs).unwrap();
        // Held: microbatches whose backward is near, one that was loaded back, and one that is being offloaded.
        assert!(peaks.iter().all(|p| p.0 <= 40), "{peaks:?}");
        assert!(schedule.to_string().contains("0OFFLOAD0") && schedule.to_string().contains("0LOAD0"));
    }
}
