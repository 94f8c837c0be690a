//! LLaMA 1 to 3 and models of the same shape, such as TinyLlama and SmolLM2 (Touvron et al. 2023; Grattafiori
//! et al. 2024): RMS norms, rotary positions, grouped queries, SwiGLU, no biases.

use farflung_tensor::{Heads, Norm, NormKind};
use serde_json::{Map, Value, json};

use super::{Family, Preset};
use crate::ZooError;
use crate::json_fields::{Fields, shortest};
use crate::naming::{Names, Slot};
use crate::spec::{
    Activation, AttentionSpec, BlockSpec, HeadSpec, MlpSpec, ModelSpec, NormSpec, Positions, RotaryScaling,
    RotarySpec, Run,
};

/// LLaMA's family. Presets: three small ones with GPT-2's sizes, then published models.
pub(super) static FAMILY: Family = Family {
    names: &TENSORS,
    model_type: "llama",
    presets: &[
        Preset { name: "llama-nano", spec: || shape(&SMALL, 4, (4, 4), 128, 344, 64, 256) },
        Preset { name: "llama-baby", spec: || shape(&SMALL, 6, (6, 2), 384, 1024, 256, 256) },
        Preset { name: "llama-124m", spec: || shape(&SMALL, 12, (12, 12), 768, 2048, 1024, 50257) },
        Preset { name: "smollm2-135m", spec: || shape(&SMOLLM2, 30, (9, 3), 576, 1536, 8192, 49152) },
        Preset { name: "smollm2-360m", spec: || shape(&SMOLLM2, 32, (15, 5), 960, 2560, 8192, 49152) },
        Preset { name: "tinyllama-1.1b", spec: || shape(&LLAMA, 22, (32, 4), 2048, 5632, 2048, 32000) },
        Preset { name: "llama-7b", spec: || shape(&LLAMA, 32, (32, 32), 4096, 11008, 2048, 32000) },
        Preset { name: "llama-13b", spec: || shape(&LLAMA, 40, (40, 40), 5120, 13824, 2048, 32000) },
        Preset { name: "llama3-8b", spec: || shape(&LLAMA3, 32, (32, 8), 4096, 14336, 8192, 128_256) },
        Preset { name: "llama3-70b", spec: || shape(&LLAMA3, 80, (64, 8), 8192, 28672, 8192, 128_256) },
    ],
    read,
    write,
};

static TENSORS: Names =
    Names { family: "llama", prefix: "model.", block: "layers", slot, outputs_first: true };

const fn slot(slot: Slot) -> &'static str {
    match slot {
        Slot::TokenTable => "embed_tokens",
        Slot::PositionTable => "embed_positions",
        Slot::AttentionNorm => "input_layernorm",
        Slot::Qkv => "self_attn.qkv_proj",
        Slot::Query => "self_attn.q_proj",
        Slot::Key => "self_attn.k_proj",
        Slot::Value => "self_attn.v_proj",
        Slot::AttentionOut => "self_attn.o_proj",
        Slot::MlpNorm => "post_attention_layernorm",
        Slot::Gate => "mlp.gate_proj",
        Slot::Up => "mlp.up_proj",
        Slot::Down => "mlp.down_proj",
        Slot::FinalNorm => "norm",
        Slot::Head => "lm_head",
    }
}

/// What models of one generation have in common.
struct Generation {
    base: f64,
    head: HeadSpec,
}

const SMALL: Generation = Generation { base: 10_000.0, head: HeadSpec::Tied };
const SMOLLM2: Generation = Generation { base: 100_000.0, head: HeadSpec::Tied };
const LLAMA: Generation = Generation { base: 10_000.0, head: HeadSpec::Own };
const LLAMA3: Generation = Generation { base: 500_000.0, head: HeadSpec::Own };

fn shape(
    generation: &Generation,
    layers: usize,
    (query, kv): (usize, usize),
    dim: usize,
    width: usize,
    context: usize,
    vocab: usize,
) -> ModelSpec {
    let norm = NormSpec { norm: Norm { kind: NormKind::Rms, eps: 1e-5 }, bias: false };
    let head_dim = dim / query;
    let rotary = RotarySpec { width: head_dim, base: generation.base, scaling: RotaryScaling::None };
    let attention = AttentionSpec {
        heads: Heads { query, kv },
        head_dim,
        fused: false,
        rotary: Some(rotary),
        bias: false,
    };
    let mlp = MlpSpec { width, activation: Activation::Silu, gated: true, bias: false };
    ModelSpec {
        names: &TENSORS,
        vocab,
        context,
        dim,
        positions: Positions::None,
        blocks: vec![Run { count: layers, block: BlockSpec { norm, attention, mlp } }],
        norm,
        head: generation.head,
    }
}

/// Names of fields in a description and in `config.json`.
const NAMES: [(&str, &str); 13] = [
    ("layers", "num_hidden_layers"),
    ("heads", "num_attention_heads"),
    ("kv heads", "num_key_value_heads"),
    ("head dim", "head_dim"),
    ("rotary width", "head_dim"),
    ("dim", "hidden_size"),
    ("context", "max_position_embeddings"),
    ("vocab", "vocab_size"),
    ("mlp width", "intermediate_size"),
    ("norm eps", "rms_norm_eps"),
    ("rotary base", "rope_theta"),
    ("rotary factor", "rope_scaling"),
    ("original context", "rope_scaling"),
];

fn read(fields: &Fields<'_>) -> Result<ModelSpec, ZooError> {
    fields.one_of("hidden_act", &["silu".into(), "swish".into()])?;
    let (dim, query) = (fields.number("hidden_size")?, fields.number("num_attention_heads")?);
    let head_dim = match (fields.get("head_dim"), dim.checked_div(query)) {
        (Some(_), _) => fields.number("head_dim")?,
        (None, Some(head_dim)) if head_dim * query == dim => head_dim,
        (None, _) => return Err(fields.wrong("num_attention_heads", "a divisor of `hidden_size`".to_owned())),
    };
    let eps = fields.real_or("rms_norm_eps", 1e-6)? as f32;
    let norm = NormSpec { norm: Norm { kind: NormKind::Rms, eps }, bias: false };
    let context = fields.number_or("max_position_embeddings", 2048)?;
    let attention = AttentionSpec {
        heads: Heads { query, kv: fields.number_or("num_key_value_heads", query)? },
        head_dim,
        fused: false,
        rotary: Some(rotary(fields, head_dim, context)?),
        bias: fields.flag_or("attention_bias", false)?,
    };
    let mlp = MlpSpec {
        width: fields.number_or("intermediate_size", 11008)?,
        activation: Activation::Silu,
        gated: true,
        bias: fields.flag_or("mlp_bias", false)?,
    };
    let tied = fields.flag_or("tie_word_embeddings", false)?;
    let spec = ModelSpec {
        names: &TENSORS,
        vocab: fields.number("vocab_size")?,
        context,
        dim,
        positions: Positions::None,
        blocks: vec![Run {
            count: fields.number("num_hidden_layers")?,
            block: BlockSpec { norm, attention, mlp },
        }],
        norm,
        head: if tied { HeadSpec::Tied } else { HeadSpec::Own },
    };
    fields.checked(spec.validate(), &NAMES)?;
    Ok(spec)
}

/// Reads the rotary embedding: `rope_parameters` of transformers 5, else `rope_theta` and `rope_scaling` of 4.
fn rotary(fields: &Fields<'_>, head_dim: usize, context: usize) -> Result<RotarySpec, ZooError> {
    let new = fields.object("rope_parameters", "rope_parameters.")?;
    let scaling = match new {
        Some(new) => Some(new),
        None => fields.object("rope_scaling", "rope_scaling.")?,
    };
    let base = match new {
        Some(new) if new.get("rope_theta").is_some() => new.real("rope_theta")?,
        _ => fields.real_or("rope_theta", 10_000.0)?,
    };
    let plain = RotarySpec { width: head_dim, base, scaling: RotaryScaling::None };
    let Some(scaling) = scaling else { return Ok(plain) };
    for with_share in [fields, &scaling] {
        with_share.one_of("partial_rotary_factor", &[1.0.into(), 1.into()])?;
    }
    let kind = if scaling.get("rope_type").is_some() { "rope_type" } else { "type" };
    let scaling = match scaling.get(kind).and_then(Value::as_str) {
        None if scaling.get(kind).is_none() => RotaryScaling::None,
        Some("default") => RotaryScaling::None,
        Some("linear") => RotaryScaling::Linear { factor: scaling.real("factor")? },
        Some("llama3") => RotaryScaling::Llama3 {
            factor: scaling.real("factor")?,
            low_turns: scaling.real("low_freq_factor")?,
            high_turns: scaling.real("high_freq_factor")?,
            original_context: scaling.number_or("original_max_position_embeddings", context)?,
        },
        _ => return Err(scaling.wrong(kind, "\"default\", \"linear\" or \"llama3\"".to_owned())),
    };
    Ok(RotarySpec { scaling, ..plain })
}

/// Writes the keys of transformers 4, which version 5 reads too.
fn write(spec: &ModelSpec) -> Map<String, Value> {
    let mut json = json!({
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
        "hidden_size": spec.dim,
        "max_position_embeddings": spec.context,
        "num_hidden_layers": spec.layers(),
        "rms_norm_eps": shortest(spec.norm.norm.eps),
    });
    if let Some(Run { block: BlockSpec { attention, mlp, .. }, .. }) = spec.blocks.first() {
        let rotary = attention.rotary;
        let scaling = rotary.map_or(RotaryScaling::None, |rotary| rotary.scaling);
        let of_blocks = json!({
            "attention_bias": attention.bias,
            "head_dim": attention.head_dim,
            "intermediate_size": mlp.width,
            "mlp_bias": mlp.bias,
            "num_attention_heads": attention.heads.query,
            "num_key_value_heads": attention.heads.kv,
            "rope_scaling": match scaling {
                RotaryScaling::None => Value::Null,
                RotaryScaling::Linear { factor } => json!({ "rope_type": "linear", "factor": factor }),
                RotaryScaling::Llama3 { factor, low_turns, high_turns, original_context } => json!({
                    "rope_type": "llama3",
                    "factor": factor,
                    "low_freq_factor": low_turns,
                    "high_freq_factor": high_turns,
                    "original_max_position_embeddings": original_context,
                }),
            },
            "rope_theta": rotary.map(|rotary| rotary.base),
        });
        if let (Some(all), Value::Object(of_blocks)) = (json.as_object_mut(), of_blocks) {
            all.extend(of_blocks);
        }
    }
    json.as_object().cloned().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameter_counts_are_the_published_ones() {
        let counts = [
            ("smollm2-135m", 134_515_008),
            ("smollm2-360m", 361_821_120),
            ("tinyllama-1.1b", 1_100_048_384),
            ("llama-7b", 6_738_415_616),
            ("llama-13b", 13_015_864_320),
            ("llama3-8b", 8_030_261_248),
            ("llama3-70b", 70_553_706_496),
        ];
        for (name, count) in counts {
            assert_eq!(ModelSpec::preset(name).unwrap().parameters(), count, "{name}");
        }
        assert_eq!(counts.len() + 3, FAMILY.presets.len());
        for Preset { name, spec } in FAMILY.presets {
            let spec = spec();
            spec.validate().unwrap();
            let sum: u64 = spec.tensors().iter().map(|t| t.count() as u64).sum();
            assert_eq!(sum, spec.parameters(), "{name}");
        }
    }
}
