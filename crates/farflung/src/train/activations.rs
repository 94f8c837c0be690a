//! How large the tensors of forward and backward passes are, and what of them a part keeps under a budget of
//! memory.

use farflung_base::{Bytes, Nanos};
use farflung_parallel::recompute::{Layer, RecomputePlan, rotor};
use farflung_parallel::{Part, Recompute};
use farflung_zoo::GptConfig;

use crate::Result;

/// f32 values per token of the tensors of forward and backward passes.
#[derive(Debug, Clone, Copy)]
pub(super) struct PerToken {
    /// A hidden state.
    pub(super) hidden: u128,
    /// Kept of a block's forward pass: `TransformerSaved`, the block's input among it.
    pub(super) block: u128,
    /// Added by the input half of a split backward pass of a block: `Back`.
    pub(super) back: u128,
    /// Used only during the backward pass of a block.
    pub(super) while_back: u128,
    /// Kept of the head's forward pass besides logits: `HeadSaved`.
    pub(super) head: u128,
    pub(super) logits: u128,
}

impl PerToken {
    pub(super) fn of(model: &GptConfig) -> Self {
        let c = model.dim as u128;
        let stats = 2;
        Self {
            hidden: c,
            block: 16 * c + 2 * stats + model.heads as u128,
            back: 11 * c,
            while_back: 12 * c,
            head: 3 * c + stats,
            logits: model.vocab as u128,
        }
    }
}

/// Bytes of so many f32 values of each token of a microbatch of `batch` sequences.
pub(super) fn bytes(values: u128, model: &GptConfig, batch: usize) -> Bytes {
    let tokens = (batch as u128).saturating_mul(model.context as u128);
    let all = values.saturating_mul(tokens).saturating_mul(size_of::<f32>() as u128);
    Bytes(u64::try_from(all).unwrap_or(u64::MAX))
}

/// Entries of the planner's table at most: more are not worth their memory.
const ENTRIES: usize = 1 << 21;

/// Steps of memory that the planner tells apart at most.
const UNITS: usize = 1024;

/// What a part keeps and computes again of a microbatch where a budget decides: the fastest way that fits.
/// Times are in forward passes of a layer, of which a backward pass takes two. `None` where something else
/// decides.
///
/// It follows from the plan alone, so that all ranks do the same.
///
/// Errors: [`ParallelError::Budget`](farflung_parallel::ParallelError::Budget) where no way fits.
pub(super) fn within_budget(part: &Part, model: &GptConfig, batch: usize) -> Result<Option<RecomputePlan>> {
    let Recompute::Within(budget) = part.recompute else { return Ok(None) };
    let (each, layers) = (PerToken::of(model), part.layers.len());
    let output = bytes(each.hidden, model, batch);
    // A block keeps its input, which is the output of the one before, and not its own output: as many values.
    let saved = bytes(each.block, model, batch);
    let layer = Layer { forward: Nanos(1), backward: Nanos(2), output, saved };
    let units = (ENTRIES / (layers * layers).max(1)).clamp(1, UNITS) as u32;
    Ok(Some(rotor(&vec![layer; layers], output, budget, units)?))
}

/// Forward passes of layers that a plan runs again.
pub(super) fn repeated(plan: &RecomputePlan, layers: usize) -> usize {
    (0..layers as u32).map(|layer| plan.forwards(layer)).sum::<usize>().saturating_sub(layers)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn less_memory_runs_more_layers_again_until_none_fits() {
        let model = GptConfig::new(12, 4, 64, 32, 100).unwrap();
        let block = bytes(PerToken::of(&model).block, &model, 2).0;
        let again = |budget: u64| {
            let part = Part { layers: 0..12, recompute: Recompute::Within(Bytes(budget)), offload: 0 };
            within_budget(&part, &model, 2).map(|plan| repeated(&plan.unwrap(), 12))
        };
        assert_eq!(again(13 * block).unwrap(), 0);
        let counts: Vec<usize> = (2..13).rev().map(|n| again(n * block).unwrap()).collect();
        // Inputs are small beside what a block keeps: where they all fit, a block runs twice at most.
        assert_eq!(counts, (1..12).collect::<Vec<_>>());
        let hidden = bytes(PerToken::of(&model).hidden, &model, 2).0;
        assert!(again(block + 4 * hidden).unwrap() > 12);
        assert!(again(block).unwrap_err().to_string().contains("12 layers"), "{}", again(block).unwrap_err());
        let kept = Part { layers: 0..12, recompute: Recompute::Full, offload: 0 };
        assert_eq!(within_budget(&kept, &model, 2).unwrap(), None);
    }
}
