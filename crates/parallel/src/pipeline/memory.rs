//! What a pipeline's ranks hold: activations from their forward to the end of their backward. Order alone decides it,
//! not time.

use farflung_base::Bytes;

use super::{ComputeKind, ComputeOrder, Op, PipelineCost};
use crate::ParallelError;

/// The most chunk activations that each rank holds at once: forwards done, the last part of their backward not yet.
///
/// A slice of a microbatch counts as one. An overlapped pair holds both of its microbatches. Without backwards nothing
/// outlasts its forward.
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

/// The most bytes of activations that each rank holds at once.
///
/// A stage that recomputes holds [`StageMemory::input`](super::StageMemory::input) from `F` to `R` and all from `R` on.
///
/// Errors: as [`PipelineCost::check`].
pub fn peak_bytes(order: &ComputeOrder, cost: &PipelineCost) -> Result<Vec<Bytes>, ParallelError> {
    cost.check(order)?;
    let table = cost.table(order);
    let mut recomputes = vec![false; order.cells()];
    for (_, action) in order.actions().filter(|(_, a)| a.kind == ComputeKind::Recompute) {
        recomputes[order.cell(action)] = true;
    }
    let forward_only = order.is_forward_only();
    let peak = |list: &Vec<Op>| {
        let (mut held, mut most) = (0_u64, 0_u64);
        for action in list.iter().flat_map(Op::actions) {
            let memory = table.of(action).memory;
            let after_forward =
                if recomputes[order.cell(action)] { memory.input } else { memory.activations };
            let all = memory.activations.0;
            // While it computes, a forward holds all that it makes, kept or not.
            match action.kind {
                ComputeKind::Forward => {
                    most = most.max(held.saturating_add(all));
                    held = held.saturating_add(if forward_only { 0 } else { after_forward.0 });
                }
                ComputeKind::Recompute => held = held.saturating_add(all).saturating_sub(memory.input.0),
                ComputeKind::BackwardInput => held = held.saturating_sub(all - memory.for_weight.0.min(all)),
                ComputeKind::BackwardWeight => held = held.saturating_sub(memory.for_weight.0.min(all)),
                ComputeKind::Backward => held = held.saturating_sub(all),
                ComputeKind::Step => {}
            }
            most = most.max(held);
        }
        Bytes(most)
    };
    Ok(order.lists().iter().map(peak).collect())
}
