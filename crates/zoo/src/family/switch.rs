//! GPT-2 whose odd blocks have Switch Transformers' layer in place of their feed-forward networks (Fedus et al.
//! 2021): one expert for each token, with a capacity. No such decoder was published; published models of the
//! name are encoders with decoders, of which [`published_count`] is the number of parameters.

use serde_json::{Map, Value, json};

use super::gpt2::{self, NAMES};
use super::{Family, Preset, router_json};
use crate::ZooError;
use crate::json_fields::Fields;
use crate::naming::Names;
use crate::spec::{
    Activation, BalanceOver, Capacity, ExpertWeights, ExpertsSpec, MlpSpec, ModelSpec, RouterLosses, Run,
};

/// The family, with a small preset for tests and first runs.
pub(super) static FAMILY: Family = Family {
    names: &TENSORS,
    model_type: MODEL_TYPE,
    presets: &[Preset {
        name: "switch-nano",
        spec: || {
            let capacity = Capacity::Factor(1.25);
            shape(gpt2::shape(4, 4, 128, 64, 256), 512, experts(4, capacity))
        },
    }],
    read,
    write,
};

/// Our own name: `switch_transformers` are models with an encoder.
pub(crate) const MODEL_TYPE: &str = "gpt2-switch";

static TENSORS: Names = Names { family: "switch", ..NAMES };

/// Returns the number of parameters of a published Switch Transformer: T5's base shape, an encoder and a
/// decoder of 12 blocks each, every second with this many experts (`google/switch-base-8` to `-256`). It is a
/// count alone: such models have no description here.
#[must_use]
pub const fn published_count(experts: u64) -> u64 {
    let (width, inner, vocab, heads, buckets) = (768, 3072, 32128, 12, 32);
    let attention = 4 * width * width;
    let network = 2 * width * inner;
    // Of each six dense and six sparse blocks of one side. Each attention and network has a norm of its own.
    let networks = 6 * network + 6 * (experts * network + width * experts);
    let encoder = 12 * (attention + 2 * width) + networks + heads * buckets + width;
    let decoder = 12 * (2 * attention + 3 * width) + networks + heads * buckets + width;
    vocab * width + encoder + decoder
}

fn experts(count: usize, capacity: Capacity) -> ExpertsSpec {
    let losses = RouterLosses { balance: 0.01, over: BalanceOver::Layer, z: 0.001 };
    ExpertsSpec { count, per_token: 1, weights: ExpertWeights::Probabilities, capacity, losses }
}

/// Puts experts into every second block of a description that is valid.
fn shape(mut spec: ModelSpec, width: usize, experts: ExpertsSpec) -> ModelSpec {
    let Some(Run { block: dense, count }) = spec.blocks.first().copied() else { return spec };
    let mlp = MlpSpec { width, activation: Activation::Relu, gated: false, bias: false };
    let mut sparse = dense;
    (sparse.mlp, sparse.experts) = (mlp, Some(experts));
    let block = |at: usize| Run { count: 1, block: if at.is_multiple_of(2) { dense } else { sparse } };
    spec.blocks = (0..count).map(block).collect();
    spec.names = &TENSORS;
    spec
}

fn read(fields: &Fields<'_>) -> Result<ModelSpec, ZooError> {
    fields.one_of("expert_activation", &["relu".into()])?;
    let dense = gpt2::read(fields)?;
    let capacity = match (fields.get("expert_capacity"), fields.get("capacity_factor")) {
        (Some(_), _) => Capacity::Tokens(fields.number("expert_capacity")?),
        (None, Some(_)) => Capacity::Factor(fields.real("capacity_factor")?),
        (None, None) => Capacity::None,
    };
    let width = fields.number_or("expert_inner", 4 * dense.dim)?;
    let mut experts = experts(fields.number("num_experts")?, capacity);
    experts.losses.over = BalanceOver::Model;
    experts.losses = router_json::read(fields, &experts)?;
    let [balance, z] = router_json::NAMES;
    let spec = shape(dense, width, experts);
    let names = [
        ("mlp width", "expert_inner"),
        ("experts", "num_experts"),
        ("expert capacity", "expert_capacity"),
        ("capacity factor", "capacity_factor"),
        balance,
        z,
    ];
    fields.checked(spec.validate(), &names)?;
    Ok(spec)
}

fn write(spec: &ModelSpec) -> Map<String, Value> {
    let mut all = gpt2::write(spec);
    all.insert("architectures".to_owned(), json!(["Gpt2SwitchLMHeadModel"]));
    let sparse = spec.each_block().find_map(|block| Some((block.mlp, block.experts?)));
    let Some((mlp, experts)) = sparse else { return all };
    let (tokens, factor) = match experts.capacity {
        Capacity::None => (None, None),
        Capacity::Tokens(tokens) => (Some(tokens), None),
        Capacity::Factor(factor) => (None, Some(factor)),
    };
    let of_experts = json!({
        "capacity_factor": factor,
        "expert_activation": "relu",
        "expert_capacity": tokens,
        "expert_inner": mlp.width,
        "num_experts": experts.count,
    });
    if let Value::Object(of_experts) = of_experts {
        all.extend(of_experts);
    }
    all.extend(router_json::write(&experts));
    all
}
