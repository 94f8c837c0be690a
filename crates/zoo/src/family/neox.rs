//! GPT-NeoX and Pythia (Black et al. 2022; Biderman et al. 2023): attention and feed-forward network beside
//! each other, each with its norm, rotary positions on part of a head, a fused matrix that has a head's query,
//! key and value side by side.

use farflung_base::AttentionPattern;
use farflung_tensor::{Heads, Norm, NormKind};
use serde_json::{Map, Value, json};

use super::rotary_json::{self, Defaults};
use super::{Family, Preset};
use crate::ZooError;
use crate::json_fields::{Fields, shortest};
use crate::naming::{HeadsInFiles, Names, Slot};
use crate::spec::{
    Activation, AttentionBias, AttentionSpec, BlockSpec, HeadSpec, MlpSpec, ModelSpec, NormSpec, Positions,
    Residual, RotaryScaling, RotarySpec, Run,
};

/// GPT-NeoX's family.
pub(super) static FAMILY: Family = Family {
    names: &NAMES,
    model_type: "gpt_neox",
    presets: &[
        Preset { name: "pythia-70m", spec: || pythia(6, 8, 512, 50304) },
        Preset { name: "pythia-160m", spec: || pythia(12, 12, 768, 50304) },
        Preset { name: "pythia-410m", spec: || pythia(24, 16, 1024, 50304) },
        Preset { name: "pythia-1b", spec: || pythia(16, 8, 2048, 50304) },
        Preset { name: "pythia-1.4b", spec: || pythia(24, 16, 2048, 50304) },
        Preset { name: "pythia-2.8b", spec: || pythia(32, 32, 2560, 50304) },
        Preset { name: "pythia-6.9b", spec: || pythia(32, 32, 4096, 50432) },
        Preset { name: "pythia-12b", spec: || pythia(36, 40, 5120, 50688) },
        Preset { name: "gpt-neox-20b", spec: || shape(44, 64, 6144, 50432, Activation::GeluTanh) },
    ],
    read,
    write,
};

static NAMES: Names = Names {
    family: "gpt_neox",
    prefix: "gpt_neox.",
    block: "layers",
    slot,
    outputs_first: true,
    heads: HeadsInFiles::ByHead,
};

const fn slot(slot: Slot) -> &'static str {
    match slot {
        Slot::TokenTable => "embed_in",
        Slot::PositionTable => "embed_positions",
        Slot::AttentionNorm => "input_layernorm",
        Slot::Qkv => "attention.query_key_value",
        Slot::Query => "attention.query",
        Slot::Key => "attention.key",
        Slot::Value => "attention.value",
        Slot::QueryNorm => "attention.query_norm",
        Slot::KeyNorm => "attention.key_norm",
        Slot::AttentionOut => "attention.dense",
        Slot::MlpNorm => "post_attention_layernorm",
        Slot::Gate => "mlp.dense_gate",
        Slot::Up => "mlp.dense_h_to_4h",
        Slot::Down => "mlp.dense_4h_to_h",
        Slot::Router => "mlp.router.classifier",
        Slot::ExpertGate(_) => "mlp.experts.expert_{}.wi_0",
        Slot::ExpertUp(_) => "mlp.experts.expert_{}.wi",
        Slot::ExpertDown(_) => "mlp.experts.expert_{}.wo",
        Slot::FinalNorm => "final_layer_norm",
        Slot::Head => "embed_out",
    }
}

const EPS: f32 = 1e-5;
/// Share of a head's values that are rotated.
const SHARE: f64 = 0.25;

fn pythia(layers: usize, heads: usize, dim: usize, vocab: usize) -> ModelSpec {
    shape(layers, heads, dim, vocab, Activation::Gelu)
}

fn shape(layers: usize, heads: usize, dim: usize, vocab: usize, activation: Activation) -> ModelSpec {
    let norm = NormSpec { norm: Norm { kind: NormKind::Layer, eps: EPS }, bias: true };
    let head_dim = dim / heads.max(1);
    let width = (head_dim as f64 * SHARE) as usize;
    let attention = AttentionSpec {
        heads: Heads::equal(heads),
        head_dim,
        fused: true,
        rotary: Some(RotarySpec { width, base: 10_000.0, scaling: RotaryScaling::None }),
        bias: AttentionBias::All,
        head_norm: None,
        pattern: AttentionPattern::FULL,
    };
    let mlp = MlpSpec { width: dim.saturating_mul(4), activation, gated: false, bias: true };
    let block = BlockSpec { norm, residual: Residual::Parallel, attention, mlp, experts: None };
    ModelSpec {
        names: &NAMES,
        vocab,
        context: 2048,
        dim,
        positions: Positions::None,
        blocks: vec![Run { count: layers, block }],
        norm,
        head: HeadSpec::Own,
    }
}

fn read(fields: &Fields<'_>) -> Result<ModelSpec, ZooError> {
    let tanh = ["gelu_new", "gelu_fast", "gelu_pytorch_tanh"];
    let activation = match fields.get("hidden_act").map(Value::as_str) {
        None | Some(Some("gelu")) => Activation::Gelu,
        Some(Some(found)) if tanh.contains(&found) => Activation::GeluTanh,
        _ => {
            let expected = "\"gelu\", \"gelu_new\", \"gelu_fast\" or \"gelu_pytorch_tanh\"";
            return Err(fields.wrong("hidden_act", expected.to_owned()));
        }
    };
    fields.one_of("attention_bias", &[true.into()])?;
    let (heads, dim) = (fields.number("num_attention_heads")?, fields.number("hidden_size")?);
    if dim.checked_rem(heads) != Some(0) {
        return Err(fields.wrong("num_attention_heads", "a divisor of `hidden_size`".to_owned()));
    }
    let vocab = fields.number("vocab_size")?;
    let mut spec = shape(fields.number("num_hidden_layers")?, heads, dim, vocab, activation);
    spec.context = fields.number_or("max_position_embeddings", 2048)?;
    let defaults = Defaults {
        base: fields.real_or("rotary_emb_base", Defaults::ALL.base)?,
        share: fields.real_or("rotary_pct", SHARE)?,
    };
    let rotary = rotary_json::read(fields, (dim / heads, spec.context), defaults)?;
    let eps = fields.real_or("layer_norm_eps", f64::from(EPS))? as f32;
    let is_parallel = fields.flag_or("use_parallel_residual", true)?;
    spec.norm.norm.eps = eps;
    for run in &mut spec.blocks {
        run.block.norm.norm.eps = eps;
        run.block.residual = if is_parallel { Residual::Parallel } else { Residual::Sequential };
        run.block.attention.rotary = Some(rotary);
        run.block.mlp.width = fields.number("intermediate_size")?;
    }
    if fields.flag_or("tie_word_embeddings", false)? {
        spec.head = HeadSpec::Tied;
    }
    let names = [
        ("layers", "num_hidden_layers"),
        ("heads", "num_attention_heads"),
        ("dim", "hidden_size"),
        ("head dim", "num_attention_heads"),
        ("rotary width", "rotary_pct"),
        ("rotary base", "rotary_emb_base"),
        ("rotary factor", "rope_scaling"),
        ("original context", "rope_scaling"),
        ("context", "max_position_embeddings"),
        ("vocab", "vocab_size"),
        ("mlp width", "intermediate_size"),
        ("norm eps", "layer_norm_eps"),
    ];
    fields.checked(spec.validate(), &names)?;
    Ok(spec)
}

/// Writes the fields of transformers 4, which version 5 reads too.
fn write(spec: &ModelSpec) -> Map<String, Value> {
    let mut json = json!({
        "architectures": ["GPTNeoXForCausalLM"],
        "attention_bias": true,
        "hidden_size": spec.dim,
        "layer_norm_eps": shortest(spec.norm.norm.eps),
        "max_position_embeddings": spec.context,
        "num_hidden_layers": spec.layers(),
    });
    if let Some(Run { block: BlockSpec { residual, attention, mlp, .. }, .. }) = spec.blocks.first() {
        let rotary = attention.rotary;
        let share = rotary.map(|rotary| rotary.width as f64 / attention.head_dim.max(1) as f64);
        let act = if mlp.activation == Activation::Gelu { "gelu" } else { "gelu_fast" };
        let of_blocks = json!({
            "hidden_act": act,
            "intermediate_size": mlp.width,
            "num_attention_heads": attention.heads.query,
            "rope_scaling": rotary_json::scaling(rotary),
            "rotary_emb_base": rotary.map(|rotary| rotary.base),
            "rotary_pct": share,
            "use_parallel_residual": *residual != Residual::Sequential,
        });
        if let (Some(all), Value::Object(of_blocks)) = (json.as_object_mut(), of_blocks) {
            all.extend(of_blocks);
        }
    }
    json.as_object().cloned().unwrap_or_default()
}
