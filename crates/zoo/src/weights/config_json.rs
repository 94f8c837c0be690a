//! Reads and writes Hugging Face's `config.json` of any family.

use std::path::Path;

use farflung_base::LayerPatterns;
use serde_json::{Map, Value};

use super::dtype::Dtype;
use super::token_ids::TokenIds;
use crate::family::{FAMILIES, Family, SWITCH};
use crate::json_fields::Fields;
use crate::spec::{HeadSpec, ModelSpec};
use crate::{ZooError, json_file};

/// Reads and checks a `config.json` of any family. Irrelevant fields are ignored.
///
/// Errors: [`ZooError::Io`], [`ZooError::Json`]; [`ZooError::JsonField`] for a field that is missing or changes
/// what the model computes in a way that is not supported.
pub fn read_config(path: &Path) -> Result<ModelSpec, ZooError> {
    config_of(path, &json_file::read(path)?)
}

/// Like [`read_config`], from the text of the file. `path` is for messages.
///
/// Errors: as [`read_config`].
pub fn config_from_text(path: &Path, text: &str) -> Result<ModelSpec, ZooError> {
    config_of(path, &json_file::from_bytes(path, text.as_bytes())?)
}

/// Like [`read_config`], from the fields of the file.
///
/// Errors: as [`read_config`].
pub(super) fn config_of(path: &Path, json: &Map<String, Value>) -> Result<ModelSpec, ZooError> {
    let fields = Fields::new(path, json);
    // Files without the field are GPT-2's: early ones have none. With experts, they are those of our own kind.
    let without = Value::from(if fields.get("num_experts").is_some() { SWITCH } else { "gpt2" });
    let model_type = fields.get("model_type").unwrap_or(&without);
    let of_type = |family: &&&Family| model_type == family.model_type;
    let Some(family) = FAMILIES.iter().find(of_type) else {
        let known = FAMILIES.map(|family| format!("{:?}", family.model_type)).join(" or ");
        return Err(fields.wrong("model_type", known));
    };
    fields.unsupported("quantization_config", "null: quantized weights are not read")?;
    fields.one_of("add_cross_attention", &[false.into()])?;
    fields.one_of("is_encoder_decoder", &[false.into()])?;
    let spec = (family.read)(&fields)?;
    let Some(patterns) = fields.get(PATTERNS) else { return Ok(spec) };
    let parsed = patterns.as_str().map(str::parse::<LayerPatterns>);
    match parsed {
        Some(Ok(patterns)) => {
            let spec = spec.with_patterns(&patterns);
            fields.checked(spec.validate(), &[("context", PATTERNS)])?;
            Ok(spec)
        }
        Some(Err(error)) => Err(fields.wrong(PATTERNS, error.to_string())),
        None => Err(fields.wrong(PATTERNS, "text, such as \"window:256/full\"".to_owned())),
    }
}

/// The field of the patterns of attention that a family's own fields do not say.
const PATTERNS: &str = "attention_pattern";

/// Returns the `config.json` of a model whose weights have this type, and whose texts have these ids of tokens.
#[must_use]
pub fn config_text(spec: &ModelSpec, dtype: Dtype, ids: &TokenIds) -> String {
    let torch = match dtype {
        Dtype::F32 => "float32",
        Dtype::F16 => "float16",
        Dtype::Bf16 => "bfloat16",
    };
    let mut fields = (spec.family().write)(spec);
    fields.insert("model_type".to_owned(), spec.family().model_type.into());
    fields.insert("initializer_range".to_owned(), 0.02.into());
    fields.insert("tie_word_embeddings".to_owned(), (spec.head == HeadSpec::Tied).into());
    fields.insert("torch_dtype".to_owned(), torch.into());
    fields.insert("vocab_size".to_owned(), spec.vocab.into());
    ids.write(&mut fields);
    let others = config_of(Path::new(PATTERNS), &fields).ok().and_then(|read| read.patterns());
    if let Some(patterns) = spec.patterns().filter(|patterns| others.as_ref() != Some(patterns)) {
        fields.insert(PATTERNS.to_owned(), patterns.to_string().into());
    }
    format!("{:#}\n", Value::Object(fields))
}
