//! GPT-2 and GPT-3 (Radford et al. 2019; Brown et al. 2020): learned positions, layer norms and biases, GELU in
//! its tanh form, queries, keys and values of one matrix, a tied head.

use farflung_base::AttentionPattern;
use farflung_tensor::{Heads, Norm, NormKind};
use serde_json::{Map, Value, json};

use super::{Family, Preset};
use crate::ZooError;
use crate::json_fields::{Fields, shortest};
use crate::naming::{HeadsInFiles, Names, Slot};
use crate::spec::{
    Activation, AttentionBias, AttentionSpec, BlockSpec, HeadSpec, MlpSpec, ModelSpec, NormSpec, Positions,
    Residual, Run,
};

/// GPT-2's family. Presets: two small ones, then those of GPT-2 and of GPT-3 (its table 2.1: the XL row has 24
/// x 128 heads where the width is 2048, here 16 x 128; its 13B row has width 5140, here 5120; all its layers
/// are dense here), each in increasing size.
pub(super) static FAMILY: Family = Family {
    names: &TENSORS,
    model_type: "gpt2",
    presets: &[
        Preset { name: "nano", spec: || shape(4, 4, 128, 64, 256) },
        Preset { name: "baby", spec: || shape(6, 6, 384, 256, 256) },
        Preset { name: "gpt2", spec: || shape(12, 12, 768, 1024, 50257) },
        Preset { name: "gpt2-medium", spec: || shape(24, 16, 1024, 1024, 50257) },
        Preset { name: "gpt2-large", spec: || shape(36, 20, 1280, 1024, 50257) },
        Preset { name: "gpt2-xl", spec: || shape(48, 25, 1600, 1024, 50257) },
        Preset { name: "gpt3-small", spec: || shape(12, 12, 768, 2048, 50257) },
        Preset { name: "gpt3-medium", spec: || shape(24, 16, 1024, 2048, 50257) },
        Preset { name: "gpt3-large", spec: || shape(24, 16, 1536, 2048, 50257) },
        Preset { name: "gpt3-xl", spec: || shape(24, 16, 2048, 2048, 50257) },
        Preset { name: "gpt3-2.7b", spec: || shape(32, 32, 2560, 2048, 50257) },
        Preset { name: "gpt3-6.7b", spec: || shape(32, 32, 4096, 2048, 50257) },
        Preset { name: "gpt3-13b", spec: || shape(40, 40, 5120, 2048, 50257) },
        Preset { name: "gpt3-175b", spec: || shape(96, 96, 12288, 2048, 50257) },
    ],
    read,
    write,
};

static TENSORS: Names = NAMES;

/// The names of GPT-2's tensors.
pub(super) const NAMES: Names = Names {
    family: "gpt2",
    prefix: "",
    block: "h",
    slot,
    outputs_first: false,
    heads: HeadsInFiles::AsInMemory,
};

const fn slot(slot: Slot) -> &'static str {
    match slot {
        Slot::TokenTable => "wte",
        Slot::PositionTable => "wpe",
        Slot::AttentionNorm => "ln_1",
        Slot::Qkv => "attn.c_attn",
        Slot::Query => "attn.q_attn",
        Slot::Key => "attn.k_attn",
        Slot::Value => "attn.v_attn",
        Slot::QueryNorm => "attn.q_norm",
        Slot::KeyNorm => "attn.k_norm",
        Slot::AttentionOut => "attn.c_proj",
        Slot::MlpNorm => "ln_2",
        Slot::Gate => "mlp.c_gate",
        Slot::Up => "mlp.c_fc",
        Slot::Down => "mlp.c_proj",
        Slot::Router => "mlp.router.classifier",
        Slot::ExpertGate(_) => "mlp.experts.expert_{}.wi_0",
        Slot::ExpertUp(_) => "mlp.experts.expert_{}.wi",
        Slot::ExpertDown(_) => "mlp.experts.expert_{}.wo",
        Slot::FinalNorm => "ln_f",
        Slot::Head => "lm_head",
    }
}

/// Epsilon of the norms.
const EPS: f32 = 1e-5;

pub(super) fn shape(layers: usize, heads: usize, dim: usize, context: usize, vocab: usize) -> ModelSpec {
    let norm = NormSpec { norm: Norm { kind: NormKind::Layer, eps: EPS }, bias: true };
    let attention = AttentionSpec {
        heads: Heads::equal(heads),
        head_dim: dim / heads.max(1),
        fused: true,
        rotary: None,
        bias: AttentionBias::All,
        head_norm: None,
        pattern: AttentionPattern::FULL,
    };
    let width = dim.saturating_mul(4);
    let mlp = MlpSpec { width, activation: Activation::GeluTanh, gated: false, bias: true };
    ModelSpec {
        names: &TENSORS,
        vocab,
        context,
        dim,
        positions: Positions::Learned,
        blocks: vec![Run {
            count: layers,
            block: BlockSpec { norm, residual: Residual::Sequential, attention, mlp, experts: None },
        }],
        norm,
        head: HeadSpec::Tied,
    }
}

/// Describes a GPT-2 with these sizes.
///
/// Errors: [`ZooError::Config`] with the invalid field.
pub fn gpt2(
    layers: usize,
    heads: usize,
    dim: usize,
    context: usize,
    vocab: usize,
) -> Result<ModelSpec, ZooError> {
    let spec = shape(layers, heads, dim, context, vocab);
    spec.validate()?;
    if !dim.is_multiple_of(heads) {
        return Err(ZooError::Config { field: "heads", value: heads, expected: "a divisor of `dim`" });
    }
    Ok(spec)
}

pub(super) fn read(fields: &Fields<'_>) -> Result<ModelSpec, ZooError> {
    fields.one_of("activation_function", &["gelu_new".into(), "gelu_pytorch_tanh".into()])?;
    fields.one_of("scale_attn_weights", &[true.into()])?;
    fields.one_of("scale_attn_by_inverse_layer_idx", &[false.into()])?;
    let context_field = if fields.get("n_positions").is_some() { "n_positions" } else { "n_ctx" };
    let context = fields.number(context_field)?;
    if fields.number_or("n_ctx", context)? != context {
        return Err(fields.wrong("n_ctx", format!("{context}, the value of `n_positions`")));
    }
    let names = [
        ("layers", "n_layer"),
        ("heads", "n_head"),
        ("dim", "n_embd"),
        ("context", context_field),
        ("vocab", "vocab_size"),
        ("mlp width", "n_inner"),
        ("norm eps", "layer_norm_epsilon"),
    ];
    let [layers, heads, dim, vocab] = ["n_layer", "n_head", "n_embd", "vocab_size"];
    let made = gpt2(
        fields.number(layers)?,
        fields.number(heads)?,
        fields.number(dim)?,
        context,
        fields.number(vocab)?,
    );
    let mut spec = fields.checked(made, &names)?;
    let eps = fields.real_or("layer_norm_epsilon", f64::from(EPS))? as f32;
    spec.norm.norm.eps = eps;
    if !fields.flag_or("tie_word_embeddings", true)? {
        spec.head = HeadSpec::Own;
    }
    for run in &mut spec.blocks {
        run.block.norm.norm.eps = eps;
        run.block.mlp.width = fields.number_or("n_inner", run.block.mlp.width)?;
    }
    fields.checked(spec.validate(), &names)?;
    Ok(spec)
}

pub(super) fn write(spec: &ModelSpec) -> Map<String, Value> {
    let block = spec.blocks.first().map(|run| run.block);
    let width = block.map(|block| block.mlp.width).filter(|&width| width != 4 * spec.dim);
    // Id with which GPT-2's tokenizer begins and ends texts, if the vocabulary contains it.
    let end = (spec.vocab > 50256).then_some(50256);
    let json = json!({
        "architectures": ["GPT2LMHeadModel"],
        "activation_function": "gelu_new",
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "bos_token_id": end,
        "eos_token_id": end,
        "layer_norm_epsilon": shortest(spec.norm.norm.eps),
        "n_ctx": spec.context,
        "n_embd": spec.dim,
        "n_head": block.map(|block| block.attention.heads.query),
        "n_inner": width,
        "n_layer": spec.layers(),
        "n_positions": spec.context,
        "scale_attn_weights": true,
    });
    json.as_object().cloned().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor_spec::Init;

    #[test]
    fn tensors_add_up_to_the_parameters_and_the_closed_form() {
        for Preset { name, spec } in FAMILY.presets {
            let spec = spec();
            spec.validate().unwrap();
            let sum: u64 = spec.tensors().iter().map(|t| t.count() as u64).sum();
            assert_eq!(sum, spec.parameters(), "{name}");
            let (l, d) = (spec.layers() as u64, spec.dim as u64);
            let tables = (spec.vocab + spec.context) as u64 * d;
            assert_eq!(sum, tables + l * (12 * d * d + 13 * d) + 2 * d, "{name}");
        }
    }

    #[test]
    fn names_shapes_and_starts_are_those_of_hugging_face_and_nanogpt() {
        let tensors = ModelSpec::preset("nano").unwrap().tensors();
        assert_eq!(tensors.len(), 4 + 12 * 4);
        let find = |name: &str| tensors.iter().find(|t| t.name == name).unwrap();
        assert_eq!(tensors[0].name, "wte.weight");
        assert_eq!(tensors[51].name, "ln_f.bias");
        assert_eq!(find("h.3.attn.c_attn.weight").shape, [128, 384]);
        assert_eq!(find("h.3.mlp.c_proj.weight").shape, [512, 128]);
        assert_eq!(find("h.0.mlp.c_proj.weight").init, Init::Normal(0.02 / 8.0_f32.sqrt()));
        assert_eq!(find("h.0.attn.c_attn.weight").init, Init::Normal(0.02));
        assert_eq!(find("h.0.ln_2.weight").init, Init::Ones);
    }

    #[test]
    fn starting_values_depend_on_the_place_in_the_whole_model() {
        let tensors = ModelSpec::preset("nano").unwrap().tensors();
        let start = |tensor: usize, index| {
            let mut values = vec![0.0; 64];
            tensors[tensor].fill(7, index, &mut values);
            values
        };
        assert_eq!(start(4, 4), start(4, 4));
        assert_ne!(start(4, 4), start(4, 16));
        assert_eq!(start(2, 2), vec![1.0; 64]);
    }

    #[test]
    fn flops_match_the_closed_form() {
        for Preset { name, spec } in FAMILY.presets {
            let spec = spec();
            let (l, d, v) = (spec.layers() as u64, spec.dim as u64, spec.vocab as u64);
            for context in [1, spec.context] {
                let expected = 6 * (12 * l * d * d + v * d) + 12 * l * d * context as u64;
                assert_eq!(spec.flops_per_token(context), expected, "{name}");
            }
        }
    }

    #[test]
    fn bad_shapes_are_refused_with_their_field() {
        let cases = [
            (gpt2(0, 4, 128, 64, 256), "layers"),
            (gpt2(4, 0, 128, 64, 256), "heads"),
            (gpt2(4, 3, 128, 64, 256), "heads"),
            (gpt2(4, 4, usize::MAX, 64, 256), "dim"),
            (gpt2(4, 4, 128, 0, 256), "context"),
            (gpt2(4, 4, 128, 64, usize::MAX), "vocab"),
        ];
        for (result, field) in cases {
            let message = result.unwrap_err().to_string();
            assert!(message.contains(field), "{message}");
        }
        let message = ModelSpec::preset("gpt5").unwrap_err().to_string();
        assert!(message.contains("gpt5") && message.contains("nano") && message.contains("gpt3-175b"));
    }
}
