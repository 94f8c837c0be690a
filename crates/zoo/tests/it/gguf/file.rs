//! Writes GGUF files of models of LLaMA's kind.

use serde_json::{Map, Value};

/// Names in a block: those of the file, and those of the folder.
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

/// Names of an expert's tensors.
const EXPERT: [(&str, &str); 3] = [("ffn_gate", "w1"), ("ffn_up", "w3"), ("ffn_down", "w2")];

/// A file in the making.
#[derive(Default)]
pub(crate) struct Gguf {
    /// Keys, types and values of the description.
    pub(crate) fields: Vec<(String, u32, Vec<u8>)>,
    /// Names, shapes, types and data.
    pub(crate) tensors: Vec<(String, Vec<usize>, u32, Vec<u8>)>,
}

pub(crate) fn text(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat()
}

/// Returns the name in a file of a tensor of a folder.
pub(crate) fn name_in_file(known: &str) -> String {
    match known {
        "model.embed_tokens.weight" => "token_embd.weight".to_owned(),
        "model.norm.weight" => "output_norm.weight".to_owned(),
        "lm_head.weight" => "output.weight".to_owned(),
        inner => {
            let (layer, rest) = inner.strip_prefix("model.layers.").unwrap().split_once('.').unwrap();
            let (tensor, part) = rest.rsplit_once('.').unwrap();
            if let Some(of_expert) = tensor.strip_prefix("block_sparse_moe.experts.") {
                let (expert, tensor) = of_expert.split_once('.').unwrap();
                let (gguf, _) = EXPERT.iter().find(|(_, known)| *known == tensor).unwrap();
                return format!("blk.{layer}.{gguf}.{expert}.{part}");
            }
            let (gguf, _) = BLOCK.iter().find(|(_, known)| *known == tensor).unwrap();
            format!("blk.{layer}.{gguf}.{part}")
        }
    }
}

impl Gguf {
    /// Begins the file of a model with this `config.json`.
    pub(crate) fn described(architecture: &str, config: &Map<String, Value>) -> Self {
        let mut out = Self::default();
        out.fields.push(("general.architecture".to_owned(), 8, text(architecture)));
        let key = |name: &str| format!("{architecture}.{name}");
        for (gguf, known) in [
            ("block_count", "num_hidden_layers"),
            ("embedding_length", "hidden_size"),
            ("feed_forward_length", "intermediate_size"),
            ("attention.head_count", "num_attention_heads"),
            ("attention.head_count_kv", "num_key_value_heads"),
            ("context_length", "max_position_embeddings"),
        ] {
            out.u32(&key(gguf), &config[known]);
        }
        if let Some(experts) = config.get("num_local_experts") {
            out.u32(&key("expert_count"), experts);
            out.u32(&key("expert_used_count"), &config["num_experts_per_tok"]);
        }
        if let Some(width) = config.get("head_dim").filter(|width| !width.is_null()) {
            out.u32(&key("attention.key_length"), width);
            out.u32(&key("rope.dimension_count"), width);
        }
        if let Some(window) = config.get("sliding_window").filter(|window| !window.is_null()) {
            out.u32(&key("attention.sliding_window"), window);
        }
        out.f32(&key("attention.layer_norm_rms_epsilon"), &config["rms_norm_eps"]);
        let theta = config.get("rope_theta").or_else(|| config["rope_parameters"].get("rope_theta"));
        out.f32(&key("rope.freq_base"), theta.unwrap());
        out
    }

    pub(crate) fn u32(&mut self, key: &str, value: &Value) {
        let value = u32::try_from(value.as_u64().unwrap()).unwrap();
        self.fields.push((key.to_owned(), 4, value.to_le_bytes().to_vec()));
    }

    pub(crate) fn f32(&mut self, key: &str, value: &Value) {
        self.fields.push((key.to_owned(), 6, (value.as_f64().unwrap() as f32).to_le_bytes().to_vec()));
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(3_u32.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.fields.len() as u64).to_le_bytes());
        for (key, kind, value) in &self.fields {
            out.extend(text(key));
            out.extend(kind.to_le_bytes());
            out.extend(value);
        }
        let mut start = 0_u64;
        for (name, shape, kind, data) in &self.tensors {
            out.extend(text(name));
            out.extend((shape.len() as u32).to_le_bytes());
            shape.iter().rev().for_each(|&length| out.extend((length as u64).to_le_bytes()));
            out.extend(kind.to_le_bytes());
            out.extend(start.to_le_bytes());
            start += (data.len() as u64).next_multiple_of(32);
        }
        for (.., data) in &self.tensors {
            out.resize(out.len().next_multiple_of(32), 0);
            out.extend(data);
        }
        out
    }
}
