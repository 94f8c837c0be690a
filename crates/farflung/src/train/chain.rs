//! One pipeline over machines in order: describes the model's layers as a chain, which the planner divides, and
//! turns the division into a plan.

use farflung_base::{Bytes, ContextCut, Rank};
use farflung_optim::LrSchedule;
use farflung_parallel::planner::uneven::{Chain, ChainLayer, ChainMachine, ChainPlan};
use farflung_parallel::{
    BoundaryCodecs, Cluster, Level, ParallelError, Part, Pipeline, Plan, Precision, Recompute, Speed,
};
use farflung_zoo::ModelSpec;
use farflung_zoo::profile::{LayerProfile, ModelProfile};

use super::activations::profile;
use super::planned::planned_model;
use crate::{Error, Result, TrainConfig};

/// Returns the bytes per parameter: weight, gradient, and the state of the default optimizer, in f32.
fn state_per_parameter() -> u64 {
    let config = TrainConfig::default();
    let local = config.run_settings().local(LrSchedule::constant(config.lr), 1, config.sync_every);
    let memory = config.optimizer.memory(&local);
    ((2 + memory.states) * size_of::<f32>()) as u64
}

/// Describes the layers of a model as a chain over machines of a cluster, in the given order.
///
/// The token and position tables belong to the first layer and the head to the last one, which then holds a
/// copy of the token table, as in the trainer's parts.
///
/// Errors: [`ParallelError::OffMesh`] for a machine that the cluster does not have; those of
/// [`Cluster::topology`].
pub fn chain(
    model: &ModelSpec,
    cluster: &Cluster,
    order: &[Rank],
    batch: u32,
    microbatches: u32,
) -> Result<Chain> {
    let topology = cluster.topology()?;
    let size = topology.size() as u32;
    if let Some(&rank) = order.iter().find(|rank| rank.0 >= size) {
        return Err(ParallelError::OffMesh { rank, size }.into());
    }
    let machines = machines(model, cluster);
    Ok(Chain {
        layers: layers(model, batch),
        machines: order.iter().map(|rank| machines[rank.index()]).collect(),
        links: topology.among(order),
        microbatches,
    })
}

/// Returns the layers of a model for microbatches of `batch` sequences, as in [`chain`].
pub(super) fn layers(model: &ModelSpec, batch: u32) -> Vec<ChainLayer> {
    layers_of(&profile(model), batch)
}

/// Returns the layers of a model, or what a rank has of them, for microbatches of `batch` sequences.
pub(super) fn layers_of(profile: &ModelProfile, batch: u32) -> Vec<ChainLayer> {
    let (batch, context) = (u64::from(batch), profile.context);
    let (tokens, state) = (batch * context as u64, state_per_parameter());
    let (last, head) = (profile.layers().saturating_sub(1), profile.head);
    let layer = |(at, block, parameters): (usize, &LayerProfile, u64)| {
        let own = block.flops_per_token(context);
        let operations = own + if at == last { head.flops_per_token(context) } else { 0 };
        let kept = block.saved + if at == last { head.saved + head.between + head.logits } else { 0 };
        ChainLayer {
            operations: operations.saturating_mul(tokens),
            state: Bytes(parameters.saturating_mul(state)),
            activations: Bytes(kept.saturating_mul(batch)),
            output: Bytes(profile.hidden.saturating_mul(batch)),
        }
    };
    let blocks = profile.each_block().enumerate().zip(layer_parameters(profile));
    blocks.map(|((at, block), parameters)| layer((at, block, parameters))).collect()
}

/// Returns the number of parameters of each layer of a chain. A model in one part has a tied table once;
/// otherwise the first and the last part each have it.
pub(super) fn layer_parameters(profile: &ModelProfile) -> impl Iterator<Item = u64> {
    let count = profile.layers();
    profile.each_block().enumerate().map(move |(at, block)| {
        let when = |yes: bool, value: u64| if yes { value } else { 0 };
        let again = when(profile.tied && count > 1, profile.table);
        block.parameters
            + when(at == 0, profile.embedding.parameters)
            + when(at + 1 == count, profile.head.parameters + again)
    })
}

/// Returns the speed and memory of each machine of a cluster, by rank.
pub(super) fn machines(model: &ModelSpec, cluster: &Cluster) -> Vec<ChainMachine> {
    let all_flops = model.flops_per_token(model.context);
    cluster
        .ranks()
        .map(|device| {
            let flops = match device.speed {
                Speed::Flops(rate) => rate,
                Speed::TokensPerSecond(rate) => rate.saturating_mul(all_flops),
            };
            ChainMachine { flops, memory: device.memory }
        })
        .collect()
}

/// Turns the stages that a planner has found into the plan of one pipeline. `order` is the list of ranks that
/// the planner was given; its stages name machines by their index in that list.
///
/// Errors: as [`Plan::check`].
pub fn pipeline_plan(
    name: &str,
    model: &ModelSpec,
    cluster: &Cluster,
    order: &[Rank],
    planned: &ChainPlan,
    sizes: PipelineSizes,
) -> Result<Plan> {
    let names = cluster.rank_names();
    let count = u32::try_from(planned.stages.len()).unwrap_or(u32::MAX);
    let plan = Plan {
        model: planned_model(name, model),
        mesh: Plan::mesh_of(1, count)?,
        tensor_weights: Vec::new(),
        context: ContextCut::default(),
        sequence_parallel: false,
        zero: 0,
        zero_weights: Vec::new(),
        zero_tensors: false,
        zero_codec: farflung_parallel::plan::NO_CODEC.to_owned(),
        zero_groups: Vec::new(),
        machines: planned.stages.iter().map(|stage| names[order[stage.machine].index()].clone()).collect(),
        precision: Precision::F32,
        batch: sizes.batch,
        microbatches: vec![sizes.microbatches],
        experts: Vec::new(),
        expert_codec: farflung_parallel::plan::NO_CODEC.to_owned(),
        paths: Vec::new(),
        parts: planned
            .stages
            .iter()
            .map(|stage| Part {
                layers: stage.layers.start as u32..stage.layers.end as u32,
                recompute: Recompute::None,
                offload: 0,
            })
            .collect(),
        pipeline: Pipeline::default(),
        boundaries: vec![BoundaryCodecs::default(); planned.stages.len().saturating_sub(1)],
        levels: vec![Level::default()],
    };
    plan.check().map_err(Error::from)?;
    Ok(plan)
}

/// Size of a step of a pipeline.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PipelineSizes {
    /// Sequences per microbatch.
    pub batch: u32,
    /// Microbatches per step.
    pub microbatches: u32,
}

#[cfg(test)]
mod tests {
    use farflung_parallel::planner::uneven::uneven;

    use super::*;

    const MACHINES: &str = r#"
default = "100gbit,1us"
[[device]]
name = "fast"
flops = "300 GFLOPS"
[[device]]
name = "slow"
flops = "100 GFLOPS"
"#;

    #[test]
    fn the_layers_are_the_whole_model_and_the_fast_machine_has_most() {
        let cluster: Cluster = MACHINES.parse().unwrap();
        let model = farflung_zoo::gpt2(8, 4, 64, 32, 100).unwrap();
        let order = [Rank(1), Rank(0)];
        let chain = chain(&model, &cluster, &order, 2, 6).unwrap();
        let operations: u64 = chain.layers.iter().map(|layer| layer.operations).sum();
        assert_eq!(operations, 2 * 32 * model.flops_per_token(32));
        let state: u64 = chain.layers.iter().map(|layer| layer.state.0).sum();
        assert_eq!(state, 16 * (model.parameters() + 100 * 64));
        let planned = uneven(&chain).unwrap();
        let sizes = PipelineSizes { batch: 2, microbatches: 6 };
        let plan = pipeline_plan("mine", &model, &cluster, &order, &planned, sizes).unwrap();
        assert_eq!(plan.machines, ["slow", "fast"]);
        assert!(plan.parts[0].layers.len() == 2, "{plan}");
        assert!(super::chain(&model, &cluster, &[Rank(2)], 1, 1).is_err());
    }
}
