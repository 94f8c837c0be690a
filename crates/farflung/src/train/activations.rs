//! Sizes of the tensors of forward and backward passes, and the choice of those that a part of the model keeps
//! within a memory budget.

use farflung_base::{Bytes, ContextCut, Nanos};
use farflung_parallel::recompute::{Layer, RecomputePlan, rotor};
use farflung_parallel::{Part, Recompute};
use farflung_zoo::profile::{DividedSequences, LayerProfile, ModelProfile};
use farflung_zoo::{AxisShare, ModelSpec};

use crate::Result;

/// Number of f32 values per token of the tensors of forward and backward passes.
#[derive(Debug, Clone, Copy)]
pub(super) struct PerToken {
    /// Values of a hidden state.
    pub(super) hidden: u128,
    /// Values that are kept from a block's forward pass, its input included.
    pub(super) block: u128,
    /// Values that the input half of a block's split backward pass adds.
    pub(super) back: u128,
    /// Values that are needed only during a block's backward pass.
    pub(super) while_back: u128,
    /// Values that are kept of the head besides logits, in both halves of its backward pass.
    pub(super) head: u128,
    pub(super) logits: u128,
}

impl PerToken {
    /// Returns the values of a model, from running its layers on the counting device. Of blocks that differ,
    /// the largest values are taken.
    pub(super) fn of(model: &ModelSpec) -> Self {
        Self::of_profile(&profile(model))
    }

    /// Like [`PerToken::of`].
    pub(super) fn of_profile(profile: &ModelProfile) -> Self {
        let each = |bytes: u64| u128::from(bytes.div_ceil((size_of::<f32>() * profile.context) as u64));
        let of_blocks = |bytes: fn(&LayerProfile) -> u64| {
            profile.blocks.iter().map(|(_, block)| each(bytes(block))).max().unwrap_or(0)
        };
        Self {
            hidden: each(profile.hidden),
            block: of_blocks(|block| block.saved),
            back: of_blocks(|block| block.between),
            while_back: of_blocks(|block| block.backward_temporary),
            head: each(profile.head.saved) + each(profile.head.between),
            logits: each(profile.head.logits),
        }
    }
}

/// Runs the layers of a model on the counting device.
///
/// # Panics
/// If the model was not checked.
pub(super) fn profile(model: &ModelSpec) -> ModelProfile {
    ModelProfile::of(model).expect("a model is checked when its shape is known")
}

/// Returns the bytes of `values` f32 values per token for a microbatch of `batch` sequences.
pub(super) fn bytes(values: u128, context: usize, batch: usize) -> Bytes {
    let tokens = (batch as u128).saturating_mul(context as u128);
    let all = values.saturating_mul(tokens).saturating_mul(size_of::<f32>() as u128);
    Bytes(u64::try_from(all).unwrap_or(u64::MAX))
}

/// Limit on the entries of the planner's table, to bound its memory.
const ENTRIES: usize = 1 << 21;

/// Highest number of memory units that the planner distinguishes.
const UNITS: usize = 1024;

/// Returns what a part keeps and recomputes for a microbatch if a memory budget decides that: the fastest
/// choice that fits. `None` without a budget. Times are in units of a layer's forward pass; a backward pass
/// takes two.
///
/// The result depends on the plan only, so that all ranks compute the same.
///
/// Errors: [`ParallelError::Budget`](farflung_parallel::ParallelError::Budget) if no choice fits.
pub(super) fn within_budget(
    part: &Part,
    (model, context): (&ModelSpec, ContextCut),
    batch: usize,
) -> Result<Option<RecomputePlan>> {
    match part.recompute {
        Recompute::Within(_) => budgeted(part, &of_readers(model, context)?, batch),
        _ => Ok(None),
    }
}

/// Returns what a model's layers cost a rank that has some positions of sequences, as many as the others.
///
/// Errors: ranks that would have unequal numbers of them.
pub(super) fn of_readers(model: &ModelSpec, context: ContextCut) -> Result<ModelProfile> {
    let (whole, positions) = (AxisShare::whole(), DividedSequences::ByContext(context, 0));
    Ok(ModelProfile::of_pieces(model, [&whole; 2], positions)?)
}

/// Like [`within_budget`].
pub(super) fn budgeted(part: &Part, model: &ModelProfile, batch: usize) -> Result<Option<RecomputePlan>> {
    let Recompute::Within(budget) = part.recompute else { return Ok(None) };
    let (each, layers) = (PerToken::of_profile(model), part.layers.len());
    let output = bytes(each.hidden, model.context, batch);
    // A block keeps its input, which is the previous block's output, rather than its own output; both have the
    // same size.
    let saved = bytes(each.block, model.context, batch);
    let layer = Layer { forward: Nanos(1), backward: Nanos(2), output, saved };
    let units = (ENTRIES / (layers * layers).max(1)).clamp(1, UNITS) as u32;
    Ok(Some(rotor(&vec![layer; layers], output, budget, units)?))
}

/// Returns the number of forward passes of layers that a plan runs again.
pub(super) fn repeated(plan: &RecomputePlan, layers: usize) -> usize {
    (0..layers as u32).map(|layer| plan.forwards(layer)).sum::<usize>().saturating_sub(layers)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn less_memory_runs_more_layers_again_until_none_fits() {
        let model = farflung_zoo::gpt2(12, 4, 64, 32, 100).unwrap();
        let block = bytes(PerToken::of(&model).block, model.context, 2).0;
        let again = |budget: u64| {
            let part = Part { layers: 0..12, recompute: Recompute::Within(Bytes(budget)), offload: 0 };
            within_budget(&part, (&model, ContextCut::default()), 2).map(|plan| repeated(&plan.unwrap(), 12))
        };
        assert_eq!(again(13 * block).unwrap(), 0);
        let counts: Vec<usize> = (2..13).rev().map(|n| again(n * block).unwrap()).collect();
        // A block's input is small compared with its other activations: if all inputs fit, a block runs at most
        // twice.
        assert_eq!(counts, (1..12).collect::<Vec<_>>());
        let hidden = bytes(PerToken::of(&model).hidden, model.context, 2).0;
        assert!(again(block + 4 * hidden).unwrap() > 12);
        assert!(again(block).unwrap_err().to_string().contains("12 layers"), "{}", again(block).unwrap_err());
        let kept = Part { layers: 0..12, recompute: Recompute::Full, offload: 0 };
        assert_eq!(within_budget(&kept, (&model, ContextCut::default()), 2).unwrap(), None);
    }
}
