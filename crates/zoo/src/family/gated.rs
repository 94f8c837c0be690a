//! What families with RMS norms, rotary positions and gated feed-forward networks have in common: LLaMA,
//! Mistral and Qwen name their tensors and fields alike.

use farflung_base::AttentionPattern;
use farflung_tensor::{Heads, Norm, NormKind};
use serde_json::{Map, Value, json};

use super::rotary_json::{self, Defaults};
use crate::ZooError;
use crate::json_fields::{Fields, shortest};
use crate::naming::{HeadsInFiles, Names, Slot};
use crate::spec::{
    Activation, AttentionBias, AttentionSpec, BlockSpec, HeadSpec, MlpSpec, ModelSpec, NormSpec, Positions,
    Residual, RotaryScaling, RotarySpec, Run,
};

/// Returns the names of a family.
pub(super) const fn names(family: &'static str) -> Names {
    Names {
        family,
        prefix: "model.",
        block: "layers",
        slot,
        outputs_first: true,
        heads: HeadsInFiles::AsInMemory,
    }
}

const fn slot(slot: Slot) -> &'static str {
    match slot {
        Slot::TokenTable => "embed_tokens",
        Slot::PositionTable => "embed_positions",
        Slot::AttentionNorm => "input_layernorm",
        Slot::Qkv => "self_attn.qkv_proj",
        Slot::Query => "self_attn.q_proj",
        Slot::Key => "self_attn.k_proj",
        Slot::Value => "self_attn.v_proj",
        Slot::QueryNorm => "self_attn.q_norm",
        Slot::KeyNorm => "self_attn.k_norm",
        Slot::AttentionOut => "self_attn.o_proj",
        Slot::MlpNorm => "post_attention_layernorm",
        Slot::Gate => "mlp.gate_proj",
        Slot::Up => "mlp.up_proj",
        Slot::Down => "mlp.down_proj",
        Slot::Router => "block_sparse_moe.gate",
        Slot::ExpertGate(_) => "block_sparse_moe.experts.{}.w1",
        Slot::ExpertUp(_) => "block_sparse_moe.experts.{}.w3",
        Slot::ExpertDown(_) => "block_sparse_moe.experts.{}.w2",
        Slot::FinalNorm => "norm",
        Slot::Head => "lm_head",
    }
}

/// Sizes of a preset.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sizes {
    pub(super) layers: usize,
    /// Heads of queries, and of keys and values.
    pub(super) heads: (usize, usize),
    pub(super) dim: usize,
    /// Width of the feed-forward networks.
    pub(super) width: usize,
    pub(super) context: usize,
    pub(super) vocab: usize,
}

/// What models of one generation have in common.
#[derive(Debug, Clone, Copy)]
pub(super) struct Generation {
    pub(super) names: &'static Names,
    pub(super) eps: f32,
    pub(super) base: f64,
    pub(super) scaling: RotaryScaling,
    pub(super) head: HeadSpec,
    pub(super) bias: AttentionBias,
    /// Values per head, if that is not the width over the number of heads.
    pub(super) head_dim: Option<usize>,
    pub(super) head_norm: bool,
    pub(super) pattern: AttentionPattern,
}

impl Generation {
    /// LLaMA's shape.
    pub(super) const fn new(names: &'static Names, base: f64, head: HeadSpec) -> Self {
        Self {
            names,
            eps: 1e-5,
            base,
            scaling: RotaryScaling::None,
            head,
            bias: AttentionBias::None,
            head_dim: None,
            head_norm: false,
            pattern: AttentionPattern::FULL,
        }
    }

    pub(super) fn model(&self, sizes: Sizes) -> ModelSpec {
        let Sizes { layers, heads: (query, kv), dim, width, context, vocab } = sizes;
        let norm = Norm { kind: NormKind::Rms, eps: self.eps };
        let head_dim = self.head_dim.unwrap_or(dim / query);
        let attention = AttentionSpec {
            heads: Heads { query, kv },
            head_dim,
            fused: false,
            rotary: Some(RotarySpec { width: head_dim, base: self.base, scaling: self.scaling }),
            bias: self.bias,
            head_norm: self.head_norm.then_some(norm),
            pattern: self.pattern,
        };
        let mlp = MlpSpec { width, activation: Activation::Silu, gated: true, bias: false };
        let norm = NormSpec { norm, bias: false };
        let block = BlockSpec { norm, residual: Residual::Sequential, attention, mlp, experts: None };
        ModelSpec {
            names: self.names,
            vocab,
            context,
            dim,
            positions: Positions::None,
            blocks: vec![Run { count: layers, block }],
            norm,
            head: self.head,
        }
    }
}

/// What a family's files may leave out, and what they do not say.
#[derive(Debug, Clone, Copy)]
pub(super) struct Reading {
    pub(super) names: &'static Names,
    /// Heads of keys and values, if the files do not say; `None` for as many as of queries.
    pub(super) kv: Option<usize>,
    /// Values per head, if the files do not say; `None` for the width over the number of heads.
    pub(super) head_dim: Option<usize>,
    pub(super) eps: f64,
    pub(super) context: usize,
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

/// Returns the pattern of a `sliding_window` of a file.
///
/// Errors: [`ZooError::JsonField`] if no window has so many keys.
pub(super) fn sliding(fields: &Fields<'_>, window: Option<usize>) -> Result<AttentionPattern, ZooError> {
    let of = |window| {
        let pattern = AttentionPattern::windowed(window);
        pattern.ok_or_else(|| fields.wrong("sliding_window", "1 to 16777216".to_owned()))
    };
    window.map_or(Ok(AttentionPattern::FULL), of)
}

/// Reads a model whose blocks are those of LLaMA with what `vary` changes.
///
/// Errors: [`ZooError::JsonField`] with the field.
pub(super) fn read(
    fields: &Fields<'_>,
    reading: Reading,
    vary: impl FnOnce(&mut ModelSpec) -> Result<(), ZooError>,
) -> Result<ModelSpec, ZooError> {
    fields.one_of("hidden_act", &["silu".into(), "swish".into()])?;
    let (dim, query) = (fields.number("hidden_size")?, fields.number("num_attention_heads")?);
    let head_dim = match (fields.get("head_dim"), dim.checked_div(query)) {
        (Some(_), _) => fields.number("head_dim")?,
        (None, Some(head_dim)) if reading.head_dim.is_none() || fields.is_null("head_dim") => {
            if head_dim * query != dim {
                return Err(fields.wrong("num_attention_heads", "a divisor of `hidden_size`".to_owned()));
            }
            head_dim
        }
        (None, _) => match reading.head_dim {
            Some(head_dim) => head_dim,
            None => {
                return Err(fields.wrong("num_attention_heads", "a divisor of `hidden_size`".to_owned()));
            }
        },
    };
    let kv = if fields.is_null("num_key_value_heads") { query } else { reading.kv.unwrap_or(query) };
    let norm = Norm { kind: NormKind::Rms, eps: fields.real_or("rms_norm_eps", reading.eps)? as f32 };
    let context = fields.number_or("max_position_embeddings", reading.context)?;
    let rotary = rotary_json::read(fields, (head_dim, context), Defaults::ALL)?;
    if rotary.width != head_dim {
        return Err(
            fields.wrong("partial_rotary_factor", "1: models of this family rotate all values".to_owned())
        );
    }
    let attention = AttentionSpec {
        heads: Heads { query, kv: fields.number_or("num_key_value_heads", kv)? },
        head_dim,
        fused: false,
        rotary: Some(rotary),
        bias: AttentionBias::None,
        head_norm: None,
        pattern: AttentionPattern::FULL,
    };
    let mlp = MlpSpec {
        width: fields.number("intermediate_size")?,
        activation: Activation::Silu,
        gated: true,
        bias: fields.flag_or("mlp_bias", false)?,
    };
    let norm = NormSpec { norm, bias: false };
    let block = BlockSpec { norm, residual: Residual::Sequential, attention, mlp, experts: None };
    let tied = fields.flag_or("tie_word_embeddings", false)?;
    let mut spec = ModelSpec {
        names: reading.names,
        vocab: fields.number("vocab_size")?,
        context,
        dim,
        positions: Positions::None,
        blocks: vec![Run { count: fields.number("num_hidden_layers")?, block }],
        norm,
        head: if tied { HeadSpec::Tied } else { HeadSpec::Own },
    };
    fields.checked(spec.validate(), &NAMES)?;
    vary(&mut spec)?;
    fields.checked(spec.validate(), &NAMES)?;
    Ok(spec)
}

/// Returns the fields of a model, with those of transformers 4, which version 5 reads too.
pub(super) fn write(spec: &ModelSpec, architecture: &str) -> Map<String, Value> {
    let mut json = json!({
        "architectures": [architecture],
        "hidden_act": "silu",
        "hidden_size": spec.dim,
        "max_position_embeddings": spec.context,
        "num_hidden_layers": spec.layers(),
        "rms_norm_eps": shortest(spec.norm.norm.eps),
    });
    if let Some(Run { block: BlockSpec { attention, mlp, .. }, .. }) = spec.blocks.first() {
        let of_blocks = json!({
            "head_dim": attention.head_dim,
            "intermediate_size": mlp.width,
            "num_attention_heads": attention.heads.query,
            "num_key_value_heads": attention.heads.kv,
            "rope_scaling": rotary_json::scaling(attention.rotary),
            "rope_theta": attention.rotary.map(|rotary| rotary.base),
        });
        if let (Some(all), Value::Object(of_blocks)) = (json.as_object_mut(), of_blocks) {
            all.extend(of_blocks);
        }
    }
    json.as_object().cloned().unwrap_or_default()
}
