//! What a GGUF file says of its model, as the fields of a `config.json`, and the names of its tensors.

use std::collections::BTreeMap;
use std::f64::consts::PI;
use std::path::Path;

use serde_json::{Map, Value, json};

use super::reader::Field;
use crate::ZooError;

/// Architectures that are read.
const ARCHITECTURES: [&str; 3] = ["llama", "qwen2", "qwen3"];

/// Fields of an architecture that are read, or change nothing that a model computes.
const KNOWN: [&str; 18] = [
    "embedding_length",
    "block_count",
    "feed_forward_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "context_length",
    "attention.layer_norm_rms_epsilon",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",
    "vocab_size",
    EXPERTS,
    EXPERTS_USED,
];
/// Numbers of experts of a block, and of a token.
const EXPERTS: &str = "expert_count";
const EXPERTS_USED: &str = "expert_used_count";
/// Fields of which one value is the one that a model has without them.
const USUAL: [(&str, f64); 6] = [
    ("rope.scaling.attn_factor", 1.0),
    ("rope.scaling.yarn_attn_factor", 1.0),
    ("rope.scaling.yarn_ext_factor", 1.0),
    ("rope.scaling.yarn_beta_fast", 32.0),
    ("rope.scaling.yarn_beta_slow", 1.0),
    ("rope.scale_linear", 1.0),
];

/// The tensor with divisors of rotary frequencies.
pub(super) const DIVISORS: &str = "rope_freqs.weight";
/// They are computed in f32.
const DIVISOR_ROUNDING: f64 = 1e-4;

/// The names of tensors of a block.
const BLOCK: [(&str, &str); 12] = [
    ("attn_norm", "input_layernorm"),
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_q_norm", "self_attn.q_norm"),
    ("attn_k_norm", "self_attn.k_norm"),
    ("attn_output", "self_attn.o_proj"),
    ("ffn_norm", "post_attention_layernorm"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
    ("ffn_gate_inp", "block_sparse_moe.gate"),
];

/// The names of tensors of an expert.
const EXPERT: [(&str, &str); 3] = [("ffn_gate", "w1"), ("ffn_up", "w3"), ("ffn_down", "w2")];

/// The names of tensors outside of blocks.
const OUTSIDE: [(&str, &str); 3] = [
    ("token_embd.weight", "model.embed_tokens.weight"),
    ("output_norm.weight", "model.norm.weight"),
    ("output.weight", "lm_head.weight"),
];

/// Returns the name that Hugging Face's models of LLaMA's kind have for a tensor. A name of no such tensor is
/// returned as it is.
pub(super) fn renamed(name: &str) -> String {
    if let Some((_, known)) = OUTSIDE.iter().find(|(gguf, _)| *gguf == name) {
        return (*known).to_owned();
    }
    let block = || {
        let (layer, rest) = name.strip_prefix("blk.")?.split_once('.')?;
        let (tensor, part) = rest.rsplit_once('.')?;
        if let Some((tensor, expert)) = tensor.split_once('.') {
            let (_, known) = EXPERT.iter().find(|(gguf, _)| *gguf == tensor)?;
            return Some(format!("model.layers.{layer}.block_sparse_moe.experts.{expert}.{known}.{part}"));
        }
        let (_, known) = BLOCK.iter().find(|(gguf, _)| *gguf == tensor)?;
        Some(format!("model.layers.{layer}.{known}.{part}"))
    };
    block().unwrap_or_else(|| name.to_owned())
}

/// The description of a model of a known architecture.
pub(super) struct Description<'a> {
    path: &'a Path,
    architecture: &'a str,
    fields: &'a BTreeMap<String, Field>,
    /// Returns the rows of a tensor, by its name in the file, if it is there.
    rows: &'a dyn Fn(&str) -> Option<usize>,
    /// Divisors of the rotary frequencies, the highest frequency first; empty if there are none.
    divisors: &'a [f32],
}

impl<'a> Description<'a> {
    /// Errors: [`ZooError::JsonField`] for an architecture that is not read.
    pub(super) fn new(
        path: &'a Path,
        fields: &'a BTreeMap<String, Field>,
        rows: &'a dyn Fn(&str) -> Option<usize>,
        divisors: &'a [f32],
    ) -> Result<Self, ZooError> {
        const NAME: &str = "general.architecture";
        let this = |architecture| Self { path, architecture, fields, rows, divisors };
        match fields.get(NAME) {
            Some(Field::Text(found)) if ARCHITECTURES.contains(&found.as_str()) => Ok(this(found)),
            Some(Field::Text(found)) => {
                let expected = ARCHITECTURES.map(|name| format!("{name:?}")).join(" or ");
                Err(this("").wrong(NAME.to_owned(), format!("{found:?}"), &expected))
            }
            _ => Err(this("").wrong(NAME.to_owned(), "missing".to_owned(), "a name")),
        }
    }

    /// Returns whether values of queries and keys that are rotated together are neighbours: llama.cpp rotates
    /// neighbours in models of this architecture, and halves in the others.
    pub(super) fn interleaves_heads(&self) -> bool {
        self.is_llama()
    }

    fn is_llama(&self) -> bool {
        self.architecture == "llama"
    }

    fn wrong(&self, field: String, found: String, expected: &str) -> ZooError {
        let (path, expected) = (self.path.to_owned(), expected.to_owned());
        ZooError::JsonField { path, field, found, expected }
    }

    /// Returns the whole name of a field of the architecture.
    fn name(&self, field: &str) -> String {
        format!("{}.{field}", self.architecture)
    }

    fn number(&self, field: &str) -> Result<Option<f64>, ZooError> {
        let name = self.name(field);
        match self.fields.get(&name) {
            None => Ok(None),
            Some(Field::Number(found)) if found.is_finite() => Ok(Some(*found)),
            Some(Field::Number(found)) => Err(self.wrong(name, found.to_string(), "a finite number")),
            Some(_) => Err(self.wrong(name, "not one number".to_owned(), "one number")),
        }
    }

    /// Returns a number without a fraction if it has none; another one is refused where the fields are read.
    fn whole(&self, field: &str) -> Result<Value, ZooError> {
        let found = self.number(field)?;
        let is_whole = |n: f64| n.fract() == 0.0 && (0.0..9e15).contains(&n);
        Ok(found.map_or(Value::Null, |n| if is_whole(n) { json!(n as u64) } else { json!(n) }))
    }

    /// Returns `rope_scaling`.
    fn scaling(&self) -> Result<Value, ZooError> {
        if !self.divisors.is_empty() {
            return self.llama3_scaling();
        }
        let name = self.name("rope.scaling.type");
        let factor = self.number("rope.scaling.factor")?;
        let kind = match self.fields.get(&name) {
            None if factor.is_some_and(|factor| factor > 1.0) => "linear",
            None => return Ok(Value::Null),
            Some(Field::Text(kind)) if kind == "none" => return Ok(Value::Null),
            Some(Field::Text(kind)) => kind.as_str(),
            Some(_) => return Err(self.wrong(name, "no text".to_owned(), "a name")),
        };
        let mut scaling = Map::from_iter([("rope_type".to_owned(), json!(kind))]);
        for (known, found) in [
            ("factor", json!(factor)),
            ("original_max_position_embeddings", self.whole("rope.scaling.original_context_length")?),
        ] {
            if !found.is_null() {
                scaling.insert(known.to_owned(), found);
            }
        }
        Ok(Value::Object(scaling))
    }

    /// Returns LLaMA 3.1's scaling, of which a file has only the divisors of the frequencies. They must be
    /// those of the published models: between 1 and 4 turns within 8192 tokens, interpolated.
    fn llama3_scaling(&self) -> Result<Value, ZooError> {
        const ORIGINAL: f64 = 8192.0;
        const TURNS: (f64, f64) = (1.0, 4.0);
        let wrong = |problem: &str| {
            let (path, tensor) = (self.path.to_owned(), DIVISORS.to_owned());
            Err(ZooError::TensorEntry { path, tensor, problem: problem.to_owned() })
        };
        let width = self.head_dim()?.unwrap_or(0.0);
        if width as usize != 2 * self.divisors.len() {
            return wrong("has no divisor for each pair of a head");
        }
        let base = self.number("rope.freq_base")?.unwrap_or(10000.0);
        let factor = f64::from(self.divisors.last().copied().unwrap_or(1.0));
        let expected = |pair: usize| {
            let turns = ORIGINAL * base.powf(-2.0 * pair as f64 / width) / (2.0 * PI);
            let kept = ((turns - TURNS.0) / (TURNS.1 - TURNS.0)).clamp(0.0, 1.0);
            1.0 / (kept + (1.0 - kept) / factor)
        };
        let is_known = |(pair, divisor): (usize, &f32)| {
            (f64::from(*divisor) / expected(pair) - 1.0).abs() < DIVISOR_ROUNDING
        };
        if !self.divisors.iter().enumerate().all(is_known) {
            return wrong(
                "scales rotary frequencies in another way than LLaMA 3.1 to 3.3, which is not read",
            );
        }
        Ok(json!({
            "rope_type": "llama3", "factor": factor, "low_freq_factor": TURNS.0, "high_freq_factor": TURNS.1,
            "original_max_position_embeddings": ORIGINAL as u64,
        }))
    }

    /// Checks that no field says what is not read.
    fn check_known(&self) -> Result<(), ZooError> {
        let prefix = self.name("");
        for (name, value) in self.fields {
            let Some(field) = name.strip_prefix(&prefix) else { continue };
            let is_usual = match value {
                // Of no experts, and the like.
                Field::Number(found) if *found == 0.0 => true,
                Field::Number(found) => USUAL.contains(&(field, *found)),
                Field::Flag(found) => field == "attention.causal" && *found,
                _ => false,
            };
            // A window of all layers: Mistral's.
            let is_window = self.is_llama() && field == "attention.sliding_window";
            if !is_usual && !is_window && !KNOWN.contains(&field) {
                return Err(self.wrong(name.clone(), "there".to_owned(), "nothing: it may change the model"));
            }
        }
        Ok(())
    }

    /// Returns the width of a head, if the file tells it.
    fn head_dim(&self) -> Result<Option<f64>, ZooError> {
        let (heads, dim) = (self.number("attention.head_count")?, self.number("embedding_length")?);
        let head_dim = match (self.number("attention.key_length")?, heads, dim) {
            (Some(given), ..) => Some(given),
            (None, Some(heads), Some(dim)) if heads >= 1.0 => Some((dim / heads).floor()),
            _ => None,
        };
        if let (Some(rotated), Some(head_dim)) = (self.number("rope.dimension_count")?, head_dim)
            && (rotated - head_dim).abs() > 0.0
        {
            let name = self.name("rope.dimension_count");
            return Err(self.wrong(name, rotated.to_string(), "the width of a head"));
        }
        if let (Some(value), Some(head_dim)) = (self.number("attention.value_length")?, head_dim)
            && (value - head_dim).abs() > 0.0
        {
            return Err(self.wrong(self.name("attention.value_length"), value.to_string(), "that of keys"));
        }
        if head_dim.is_some_and(|width| width.fract() != 0.0 || !(0.0..9e15).contains(&width)) {
            let name = self.name("attention.key_length");
            return Err(self.wrong(name, format!("{head_dim:?}"), "a whole number"));
        }
        Ok(head_dim)
    }

    /// Returns the fields of a `config.json`.
    ///
    /// Errors: [`ZooError::JsonField`], [`ZooError::TensorEntry`] for what is not read.
    pub(super) fn config(&self) -> Result<Map<String, Value>, ZooError> {
        if let Some(Field::Number(parts)) = self.fields.get("split.count")
            && *parts > 1.0
        {
            let problem = format!("is one of {parts} parts: join them with `llama-gguf-split --merge`");
            return Err(ZooError::Gguf { path: self.path.to_owned(), problem });
        }
        let has_experts = self.number(EXPERTS)?.is_some_and(|count| count > 0.0);
        if has_experts && !self.is_llama() {
            return Err(self.wrong(self.name(EXPERTS), "above 0".to_owned(), "0 in this architecture"));
        }
        self.check_known()?;
        let epsilon = self.number("attention.layer_norm_rms_epsilon")?;
        if epsilon.is_none() {
            let name = self.name("attention.layer_norm_rms_epsilon");
            return Err(self.wrong(name, "missing".to_owned(), "a number"));
        }
        let vocab = (self.rows)("token_embd.weight");
        let mut all = Map::new();
        for (name, value) in [
            ("model_type", json!(self.architecture)),
            ("hidden_size", self.whole("embedding_length")?),
            ("num_hidden_layers", self.whole("block_count")?),
            ("intermediate_size", self.whole("feed_forward_length")?),
            ("num_attention_heads", self.whole("attention.head_count")?),
            ("num_key_value_heads", self.whole("attention.head_count_kv")?),
            ("head_dim", self.head_dim()?.map_or(Value::Null, |n| json!(n as u64))),
            ("max_position_embeddings", self.whole("context_length")?),
            ("rms_norm_eps", json!(epsilon)),
            ("rope_theta", json!(self.number("rope.freq_base")?)),
            ("rope_scaling", self.scaling()?),
            ("vocab_size", json!(vocab)),
            ("tie_word_embeddings", json!((self.rows)("output.weight").is_none())),
            ("attention_bias", json!(self.is_llama() && (self.rows)("blk.0.attn_output.bias").is_some())),
        ] {
            all.insert(name.to_owned(), value);
        }
        for (name, known) in [
            ("bos_token_id", "tokenizer.ggml.bos_token_id"),
            ("eos_token_id", "tokenizer.ggml.eos_token_id"),
            ("pad_token_id", "tokenizer.ggml.padding_token_id"),
        ] {
            if let Some(Field::Number(id)) = self.fields.get(known)
                && id.fract() == 0.0
                && (0.0..vocab.unwrap_or(0) as f64).contains(id)
            {
                all.insert(name.to_owned(), json!(*id as u64));
            }
        }
        let window = self.whole("attention.sliding_window")?;
        if self.is_llama() && !window.is_null() {
            all.insert("model_type".to_owned(), json!("mistral"));
            all.insert("sliding_window".to_owned(), window);
        }
        if has_experts {
            all.insert("model_type".to_owned(), json!("mixtral"));
            all.insert("num_local_experts".to_owned(), self.whole(EXPERTS)?);
            all.insert("num_experts_per_tok".to_owned(), self.whole(EXPERTS_USED)?);
        }
        Ok(all)
    }
}
