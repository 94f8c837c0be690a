//! GPT-J (Wang and Komatsuzaki 2021): attention and feed-forward network of one norm, rotary positions on part
//! of a head, a head with a bias.

use farflung_base::AttentionPattern;
use farflung_tensor::{Heads, Norm, NormKind};
use serde_json::{Map, Value, json};

use super::{Family, Preset};
use crate::ZooError;
use crate::json_fields::{Fields, shortest};
use crate::naming::{HeadsInFiles, Names, Slot};
use crate::spec::{
    Activation, AttentionBias, AttentionSpec, BlockSpec, HeadSpec, MlpSpec, ModelSpec, NormSpec, Positions,
    Residual, RotaryScaling, RotarySpec, Run,
};

/// GPT-J's family.
pub(super) static FAMILY: Family = Family {
    names: &NAMES,
    model_type: "gptj",
    presets: &[Preset {
        name: "gpt-j-6b",
        spec: || shape(Sizes { layers: 28, heads: 16, dim: 4096, rotated: 64, context: 2048, vocab: 50400 }),
    }],
    read,
    write,
};

static NAMES: Names = Names {
    family: "gptj",
    prefix: "transformer.",
    block: "h",
    slot,
    outputs_first: true,
    heads: HeadsInFiles::Interleaved,
};

const fn slot(slot: Slot) -> &'static str {
    match slot {
        Slot::TokenTable => "wte",
        Slot::PositionTable => "wpe",
        Slot::AttentionNorm => "ln_1",
        Slot::Qkv => "attn.qkv_proj",
        Slot::Query => "attn.q_proj",
        Slot::Key => "attn.k_proj",
        Slot::Value => "attn.v_proj",
        Slot::QueryNorm => "attn.q_norm",
        Slot::KeyNorm => "attn.k_norm",
        Slot::AttentionOut => "attn.out_proj",
        Slot::MlpNorm => "ln_2",
        Slot::Gate => "mlp.fc_gate",
        Slot::Up => "mlp.fc_in",
        Slot::Down => "mlp.fc_out",
        Slot::Router => "mlp.router.classifier",
        Slot::ExpertGate(_) => "mlp.experts.expert_{}.wi_0",
        Slot::ExpertUp(_) => "mlp.experts.expert_{}.wi",
        Slot::ExpertDown(_) => "mlp.experts.expert_{}.wo",
        Slot::FinalNorm => "ln_f",
        Slot::Head => "lm_head",
    }
}

const EPS: f32 = 1e-5;

#[derive(Debug, Clone, Copy)]
struct Sizes {
    layers: usize,
    heads: usize,
    dim: usize,
    /// Number of a head's values that are rotated.
    rotated: usize,
    context: usize,
    vocab: usize,
}

fn shape(sizes: Sizes) -> ModelSpec {
    let Sizes { layers, heads, dim, rotated, context, vocab } = sizes;
    let norm = NormSpec { norm: Norm { kind: NormKind::Layer, eps: EPS }, bias: true };
    let attention = AttentionSpec {
        heads: Heads::equal(heads),
        head_dim: dim / heads.max(1),
        fused: false,
        rotary: Some(RotarySpec { width: rotated, base: 10_000.0, scaling: RotaryScaling::None }),
        bias: AttentionBias::None,
        head_norm: None,
        pattern: AttentionPattern::FULL,
    };
    let width = dim.saturating_mul(4);
    let mlp = MlpSpec { width, activation: Activation::GeluTanh, gated: false, bias: true };
    let block = BlockSpec { norm, residual: Residual::ParallelOneNorm, attention, mlp, experts: None };
    ModelSpec {
        names: &NAMES,
        vocab,
        context,
        dim,
        positions: Positions::None,
        blocks: vec![Run { count: layers, block }],
        norm,
        head: HeadSpec::OwnWithBias,
    }
}

fn read(fields: &Fields<'_>) -> Result<ModelSpec, ZooError> {
    fields.one_of("activation_function", &["gelu_new".into(), "gelu_pytorch_tanh".into()])?;
    fields.one_of("tie_word_embeddings", &[false.into()])?;
    let (heads, dim) = (fields.number("n_head")?, fields.number("n_embd")?);
    if dim.checked_rem(heads) != Some(0) {
        return Err(fields.wrong("n_head", "a divisor of `n_embd`".to_owned()));
    }
    if fields.is_null("rotary_dim") {
        return Err(fields.wrong("rotary_dim", "the number of a head's values that are rotated".to_owned()));
    }
    let mut spec = shape(Sizes {
        layers: fields.number("n_layer")?,
        heads,
        dim,
        rotated: fields.number_or("rotary_dim", 64)?,
        context: fields.number("n_positions")?,
        vocab: fields.number("vocab_size")?,
    });
    let eps = fields.real_or("layer_norm_epsilon", f64::from(EPS))? as f32;
    spec.norm.norm.eps = eps;
    for run in &mut spec.blocks {
        run.block.norm.norm.eps = eps;
        run.block.mlp.width = fields.number_or("n_inner", run.block.mlp.width)?;
    }
    let names = [
        ("layers", "n_layer"),
        ("heads", "n_head"),
        ("dim", "n_embd"),
        ("head dim", "n_head"),
        ("rotary width", "rotary_dim"),
        ("context", "n_positions"),
        ("vocab", "vocab_size"),
        ("mlp width", "n_inner"),
        ("norm eps", "layer_norm_epsilon"),
    ];
    fields.checked(spec.validate(), &names)?;
    Ok(spec)
}

fn write(spec: &ModelSpec) -> Map<String, Value> {
    let block = spec.blocks.first().map(|run| run.block);
    let json = json!({
        "activation_function": "gelu_new",
        "architectures": ["GPTJForCausalLM"],
        "layer_norm_epsilon": shortest(spec.norm.norm.eps),
        "n_embd": spec.dim,
        "n_head": block.map(|block| block.attention.heads.query),
        "n_inner": block.map(|block| block.mlp.width),
        "n_layer": spec.layers(),
        "n_positions": spec.context,
        "rotary_dim": block.and_then(|block| block.attention.rotary).map(|rotary| rotary.width),
    });
    json.as_object().cloned().unwrap_or_default()
}
