//! Reads and writes Hugging Face's `config.json` of a GPT-2.

use std::path::Path;

use serde_json::{Map, Value, json};

use super::atomic::write_file;
use super::dtype::Dtype;
use crate::{GptConfig, ZooError, json_file};

/// Fields that change what the model computes, with the values that we support. A missing or null field means
/// the default.
fn supported() -> [(&'static str, Vec<Value>); 8] {
    [
        ("model_type", vec![json!("gpt2")]),
        ("activation_function", vec![json!("gelu_new"), json!("gelu_pytorch_tanh")]),
        ("layer_norm_epsilon", vec![json!(1e-5)]),
        ("scale_attn_weights", vec![json!(true)]),
        ("scale_attn_by_inverse_layer_idx", vec![json!(false)]),
        ("add_cross_attention", vec![json!(false)]),
        ("is_encoder_decoder", vec![json!(false)]),
        ("tie_word_embeddings", vec![json!(true)]),
    ]
}

/// Reads and checks a `config.json`. Irrelevant fields are ignored.
pub(super) fn read(path: &Path) -> Result<GptConfig, ZooError> {
    checked(path, &json_file::read(path)?)
}

/// Checks the bytes of a `config.json`. `path` is for messages.
pub(super) fn from_bytes(path: &Path, bytes: &[u8]) -> Result<GptConfig, ZooError> {
    checked(path, &json_file::from_bytes(path, bytes)?)
}

fn checked(path: &Path, json: &Map<String, Value>) -> Result<GptConfig, ZooError> {
    let get = |field: &str| json.get(field).filter(|value| !value.is_null());
    let wrong = |field: &str, expected: String| {
        let found = get(field).map_or_else(|| "missing".to_owned(), ToString::to_string);
        ZooError::JsonField { path: path.to_owned(), field: field.to_owned(), found, expected }
    };
    for (field, values) in supported() {
        if get(field).is_some_and(|found| !values.contains(found)) {
            let expected = values.iter().map(ToString::to_string).collect::<Vec<_>>().join(" or ");
            return Err(wrong(field, expected));
        }
    }
    let number = |field: &str| {
        let value = get(field).and_then(Value::as_u64).and_then(|n| usize::try_from(n).ok());
        value.ok_or_else(|| wrong(field, "a whole number".to_owned()))
    };
    let context = number(field_in_file("context", json))?;
    if get("n_ctx").is_some() && number("n_ctx")? != context {
        return Err(wrong("n_ctx", format!("{context}, the value of `n_positions`")));
    }
    let dim = number("n_embd")?;
    let config = GptConfig::new(number("n_layer")?, number("n_head")?, dim, context, number("vocab_size")?)
        .map_err(|error| match error {
        ZooError::Config { field, expected, .. } => {
            let (field, expected) = (field_in_file(field, json), expected.replace("`dim`", "`n_embd`"));
            wrong(field, expected)
        }
        other => other,
    })?;
    if get("n_inner").is_some() && number("n_inner")? != 4 * dim {
        return Err(wrong("n_inner", format!("null or {}", 4 * dim)));
    }
    Ok(config)
}

/// Returns the name in a `config.json` of a field of [`GptConfig`].
fn field_in_file(field: &'static str, json: &Map<String, Value>) -> &'static str {
    match field {
        "layers" => "n_layer",
        "heads" => "n_head",
        "dim" => "n_embd",
        "context" if json.get("n_positions").is_some_and(|value| !value.is_null()) => "n_positions",
        "context" => "n_ctx",
        "vocab" => "vocab_size",
        other => other,
    }
}

/// Returns the `config.json` of a model whose weights have this type.
#[must_use]
pub fn config_text(config: &GptConfig, dtype: Dtype) -> String {
    let torch = match dtype {
        Dtype::F32 => "float32",
        Dtype::F16 => "float16",
        Dtype::Bf16 => "bfloat16",
    };
    // Id with which GPT-2's tokenizer begins and ends texts, if the vocabulary contains it.
    let end = (config.vocab > 50256).then_some(50256);
    let json = json!({
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "activation_function": "gelu_new",
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "bos_token_id": end,
        "eos_token_id": end,
        "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-5,
        "n_ctx": config.context,
        "n_embd": config.dim,
        "n_head": config.heads,
        "n_inner": null,
        "n_layer": config.layers,
        "n_positions": config.context,
        "scale_attn_weights": true,
        "tie_word_embeddings": true,
        "torch_dtype": torch,
        "vocab_size": config.vocab,
    });
    format!("{json:#}\n")
}

/// Writes the `config.json` of a model.
pub(super) fn write(path: &Path, config: &GptConfig, dtype: Dtype) -> Result<(), ZooError> {
    let text = config_text(config, dtype);
    write_file(path, |out| out.write_all(text.as_bytes()).map_err(ZooError::io("write", path)))
}
