//! Counts the f32 values that each rank holds: parameters, and activations per token of a microbatch at the
//! peak. Without a pipeline the model's shape decides both; in a pipeline, the order of its forward and
//! backward passes does too.

use std::collections::BTreeSet;
use std::ops::Range;

use farflung_base::{Rank, StageId};
use farflung_parallel::pipeline::{Action, ComputeKind, ComputeOrder, Op, Updates};
use farflung_zoo::profile::{DividedSequences, ModelProfile};
use farflung_zoo::{AxisShare, ModelSpec, ZooError};

use super::super::activations::{PerToken, profile};
use super::super::planned::cut;
use crate::{Result, TrainConfig};
use farflung_parallel::Recompute;

/// Memory that one rank needs: a rank of a pipeline, or a rank with the whole model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct RankMemory {
    /// f32 values of its parameters, padding included.
    pub(super) parameters: u128,
    /// Number of gradients of units at a time, where those of each leave when they are final.
    pub(super) units: u128,
    /// f32 values of older versions of its parameters and of the second gradient buffer that goes with them.
    pub(super) versions: u128,
    /// Whether parameters change within a step.
    pub(super) within: bool,
    /// Number of ranks of one pipeline that hold the same part.
    pub(super) copies: u32,
    /// Activations without logits: f32 values per token of a microbatch, at the peak.
    pub(super) held: u128,
    /// Logits per token of a microbatch, at the peak.
    pub(super) logits: u128,
    /// Activations offloaded to the host by a rank on a GPU: f32 values per token of a microbatch, at the peak.
    pub(super) away: u128,
}

impl RankMemory {
    /// Scales the activations from `fewer` microbatches in flight to `more`.
    pub(super) fn scale(&mut self, more: u128, fewer: u128) {
        for sum in [&mut self.held, &mut self.logits, &mut self.away] {
            *sum = sum.saturating_mul(more) / fewer;
        }
    }
}

/// Returns the f32 values of the parameters of a part of the model, padding included: of these blocks, the
/// embeddings if it is the `first` part, the head if it is the `last`.
fn parameters(profile: &ModelProfile, blocks: Range<usize>, first: bool, last: bool) -> u128 {
    let own = profile.each_block().skip(blocks.start).take(blocks.len());
    let of_blocks: u128 = own.map(|block| u128::from(block.padded_parameters)).sum();
    let when = |yes: bool, values: u64| if yes { values } else { 0 };
    // A tied head in a part of its own has the token table too.
    let table = when(last && !first && profile.tied, profile.table.next_multiple_of(PADDING));
    let ends = when(first, profile.embedding.padded_parameters) + when(last, profile.head.padded_parameters);
    of_blocks + u128::from(ends + table)
}

/// Returns the number of gradients of units that a backward pass has at the same time, where those of each unit
/// leave when they are final: the embeddings or the table, which a tied head begins, a block, and the head.
fn units(profile: &ModelProfile, blocks: Range<usize>, first: bool, last: bool) -> u128 {
    let block = |at: usize| parameters(profile, at..at + 1, false, false);
    parameters(profile, 0..0, first, last) + blocks.map(block).max().unwrap_or(0)
}

/// Parameters in flat buffers begin at multiples of this many values.
const PADDING: u64 = 64;

/// Returns what layers cost a rank: one with the most of their width and the most experts, if ranks divide
/// them. A division that does not work is refused later.
fn divided(config: &TrainConfig, model: &ModelSpec) -> ModelProfile {
    let count = model.mixtures().map(|(_, experts)| experts.count).max().unwrap_or(0);
    let experts = match config.expert_weights() {
        weights if weights.is_empty() => Ok(AxisShare::whole()),
        weights => AxisShare::new(0, weights),
    };
    let part = experts.and_then(|share| {
        let most = share.all().max_by_key(|share| share.of(count).len()).unwrap_or(share);
        let by_context = DividedSequences::ByContext(config.context_cut(), 0);
        let sequences = if config.sequence_parallel { DividedSequences::ByWidth } else { by_context };
        ModelProfile::of_pieces(model, [&widest(config)?, &most], sequences)
    });
    part.unwrap_or_else(|_| profile(model))
}

/// Returns the largest share of the width of layers.
fn widest(config: &TrainConfig) -> std::result::Result<AxisShare, ZooError> {
    let weights = config.tensor_weights.clone().map_or_else(|| vec![1; config.tensor.max(1)], |n| n.0);
    let most = weights.iter().enumerate().max_by_key(|(_, weight)| **weight).map_or(0, |(rank, _)| rank);
    AxisShare::new(most, weights)
}

/// Returns the memory that a rank with the whole model needs.
pub(super) fn whole(config: &TrainConfig, model: &ModelSpec) -> RankMemory {
    let profile = divided(config, model);
    let each = PerToken::of_profile(&profile);
    let layers = profile.layers();
    let again = config.recompute.of(layers as u32) as usize;
    let away = config.offload.min(layers - again);
    // A recomputed block holds its activations during its backward pass.
    let here = (layers - again).max(1) as u128;
    let kept = match config.recompute {
        // While a recomputed block runs, all of its tensors are in memory, in addition to the tensors that a
        // plan keeps.
        Recompute::Within(budget) => {
            let tokens = (config.batch as u128).saturating_mul(model.context as u128).max(1);
            let all = layers as u128 * each.block;
            all.min(u128::from(budget.0) / (tokens * size_of::<f32>() as u128)) + each.block
        }
        _ => again as u128 * each.hidden + here * each.block,
    };
    RankMemory {
        parameters: parameters(&profile, 0..layers, true, true),
        units: units(&profile, 0..layers, true, true),
        copies: 1,
        held: kept + each.while_back,
        logits: each.logits,
        away: away as u128 * each.block,
        ..RankMemory::default()
    }
}

/// Returns the memory that each rank of a pipeline with this order needs.
pub(super) fn pipeline(
    config: &TrainConfig,
    model: &ModelSpec,
    order: &ComputeOrder,
) -> Result<Vec<RankMemory>> {
    let placement = order.placement();
    let depth = placement.depth();
    let profile = divided(config, model);
    let layers = cut(profile.layers() as u32, depth)?;
    let blocks = |stage: StageId| layers[placement.part(stage) as usize].len();
    let position = |rank| {
        let of_part = |stage| placement.holders(placement.part(stage)).len() as u32;
        let copies = placement.homes_of(rank).map(of_part).max().unwrap_or(1);
        let mut position = RankMemory { copies, ..RankMemory::default() };
        for stage in placement.homes_of(rank) {
            let part = placement.part(stage);
            let (first, last) = (placement.is_first(stage), placement.is_last(stage));
            let own = &layers[part as usize];
            let size = parameters(&profile, own.start as usize..own.end as usize, first, last);
            let versions = order.updates().versions_held(part, depth);
            position.parameters += size;
            let units = units(&profile, own.start as usize..own.end as usize, first, last);
            position.units = position.units.max(units);
            position.within = order.updates() != Updates::Flush;
            position.versions += size * u128::from(if versions > 1 { versions } else { 0 });
        }
        let list = &order.lists()[rank.index()];
        set_peak_activations(config, &profile, order, list, &blocks, &mut position);
        position
    };
    Ok((0..placement.ranks()).map(Rank).map(position).collect())
}

/// Sets the peak of activations of a rank by walking through its list of work.
fn set_peak_activations(
    config: &TrainConfig,
    profile: &ModelProfile,
    order: &ComputeOrder,
    list: &[Op],
    blocks: &impl Fn(StageId) -> usize,
    position: &mut RankMemory,
) {
    let each = PerToken::of_profile(profile);
    let place = |action: &Action| (action.stage, action.microbatch, action.slice);
    let again: BTreeSet<_> = list
        .iter()
        .flat_map(Op::actions)
        .filter(|action| action.kind == ComputeKind::Recompute)
        .map(|action| place(&action))
        .collect();
    let (mut now, mut logits, mut away) = (0_u128, 0_u128, 0_u128);
    for action in list.iter().flat_map(Op::actions) {
        let blocks = blocks(action.stage);
        let last = order.placement().is_last(action.stage);
        let (recomputes, forgotten) = match (again.contains(&place(&action)), config.recompute) {
            (true, Recompute::Full) => (true, blocks),
            (true, Recompute::Layers(layers)) => (true, (layers as usize).min(blocks)),
            _ => (false, 0),
        };
        let all_again = recomputes && config.recompute == Recompute::Full;
        let kept = (blocks - forgotten) as u128;
        // A block that is recomputed within the backward pass keeps its input until then.
        let each_layer = config.recompute == Recompute::EachLayer;
        let of_block = if each_layer { each.hidden } else { each.block };
        let wait = config.offload.min(blocks - forgotten) as u128 * each.block;
        let (head, row) = if last { (each.head, each.logits) } else { (0, 0) };
        let input = if recomputes { each.hidden } else { 0 };
        let (mut meanwhile, blocks) = (2 * each.hidden, blocks as u128);
        match action.kind {
            ComputeKind::Forward => {
                now += kept * of_block + input + if all_again { 0 } else { head };
                logits += if all_again { 0 } else { row };
                away += wait;
            }
            ComputeKind::Recompute => {
                now += (blocks - kept) * each.block + if all_again { head } else { 0 };
                now = now.saturating_sub(input);
                logits += if all_again { row } else { 0 };
            }
            // The input half of a backward pass adds tensors, and those that it recomputes; the weight half
            // frees them.
            ComputeKind::BackwardInput => {
                now += blocks * (each.back + each.block - of_block);
                away = away.saturating_sub(wait);
            }
            ComputeKind::Backward => {
                meanwhile = each.while_back + if each_layer { each.block } else { 0 };
                away = away.saturating_sub(wait);
            }
            ComputeKind::BackwardWeight | ComputeKind::Step => {}
        }
        position.held = position.held.max(now + meanwhile);
        position.logits = position.logits.max(logits);
        position.away = position.away.max(away);
        let split = u128::from(action.kind == ComputeKind::BackwardWeight);
        if matches!(action.kind, ComputeKind::Backward | ComputeKind::BackwardWeight) {
            now =
                now.saturating_sub(blocks * (of_block + split * (each.back + each.block - of_block)) + head);
            logits = logits.saturating_sub(row);
        }
    }
    // The walk counted each slice as a whole microbatch.
    let slices = u128::from(order.slices());
    for sum in [&mut position.held, &mut position.logits, &mut position.away] {
        *sum = sum.div_ceil(slices);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_are_those_of_the_model() {
        for preset in farflung_zoo::family::presets() {
            let (name, model) = (preset.name, preset.spec());
            let all = parameters(&profile(&model), 0..model.layers(), true, true);
            let padding = all - u128::from(model.parameters());
            assert!(padding < 64 * model.tensors().len() as u128, "{name}: {padding}");
        }
    }
}
