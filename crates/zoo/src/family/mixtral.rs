//! Mixtral (Jiang et al. 2024): Mistral's shape with experts in place of its feed-forward networks.

use serde_json::{Map, Value};

use super::gated::{self, Generation, Reading, Sizes};
use super::{Family, Preset, router_json};
use crate::ZooError;
use crate::json_fields::Fields;
use crate::naming::Names;
use crate::spec::{BalanceOver, Capacity, ExpertWeights, ExpertsSpec, HeadSpec, ModelSpec, RouterLosses};

/// Mixtral's family. The first preset is a small one for tests and first runs.
pub(super) static FAMILY: Family = Family {
    names: &TENSORS,
    model_type: "mixtral",
    presets: &[
        Preset {
            name: "mixtral-nano",
            spec: || {
                let sizes = Sizes { layers: 4, heads: (4, 2), dim: 128, width: 172, context: 64, vocab: 256 };
                shape(sizes, experts(4, 2), HeadSpec::Tied)
            },
        },
        Preset {
            name: "mixtral-8x7b",
            spec: || {
                let (width, vocab) = (14336, 32000);
                let sizes = Sizes { layers: 32, heads: (32, 8), dim: 4096, width, context: 32768, vocab };
                shape(sizes, experts(8, 2), HeadSpec::Own)
            },
        },
        Preset {
            name: "mixtral-8x22b",
            spec: || {
                let (width, vocab) = (16384, 32768);
                let sizes = Sizes { layers: 56, heads: (48, 8), dim: 6144, width, context: 65536, vocab };
                shape(sizes, experts(8, 2), HeadSpec::Own)
            },
        },
    ],
    read,
    write,
};

static TENSORS: Names = gated::names("mixtral");

/// Base of the rotary frequencies, if files do not say.
const BASE: f64 = 1_000_000.0;
/// Factor of the balancing loss in `transformers`, if files do not say.
const BALANCE: f64 = 0.001;

fn shape(sizes: Sizes, experts: ExpertsSpec, head: HeadSpec) -> ModelSpec {
    let mut spec = Generation::new(&TENSORS, BASE, head).model(sizes);
    spec.blocks.iter_mut().for_each(|run| run.block.experts = Some(experts));
    spec
}

fn experts(count: usize, per_token: usize) -> ExpertsSpec {
    let losses = RouterLosses { balance: 0.01, over: BalanceOver::Layer, z: 0.0 };
    ExpertsSpec { count, per_token, weights: ExpertWeights::Renormalised, capacity: Capacity::None, losses }
}

fn read(fields: &Fields<'_>) -> Result<ModelSpec, ZooError> {
    // It would multiply the input of a mixture by random numbers in training.
    fields.one_of("router_jitter_noise", &[0.0.into(), 0.into()])?;
    let window =
        fields.get("sliding_window").is_some().then(|| fields.number("sliding_window")).transpose()?;
    let pattern = gated::sliding(fields, window)?;
    let reading = Reading { names: &TENSORS, kv: Some(8), head_dim: None, eps: 1e-5, context: 131_072 };
    let (count, per_token) =
        (fields.number_or("num_local_experts", 8)?, fields.number_or("num_experts_per_tok", 2)?);
    let mut experts = experts(count, per_token);
    experts.losses.balance = BALANCE * per_token as f64;
    experts.losses.over = BalanceOver::Batch;
    experts.losses = router_json::read(fields, &experts)?;
    let [balance, z] = router_json::NAMES;
    let names = [("experts", "num_local_experts"), ("experts per token", "num_experts_per_tok"), balance, z];
    gated::read(fields, reading, |spec| {
        for run in &mut spec.blocks {
            run.block.attention.pattern = pattern;
            run.block.experts = Some(experts);
        }
        fields.checked(spec.validate(), &names)
    })
}

fn write(spec: &ModelSpec) -> Map<String, Value> {
    let mut all = gated::write(spec, "MixtralForCausalLM");
    let block = spec.blocks.first().map(|run| run.block);
    all.insert("sliding_window".to_owned(), spec.window_of_all().into());
    if let Some(experts) = block.and_then(|block| block.experts) {
        all.insert("num_experts_per_tok".to_owned(), experts.per_token.into());
        all.insert("num_local_experts".to_owned(), experts.count.into());
        all.extend(router_json::write(&experts));
    }
    all
}
