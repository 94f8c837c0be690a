//! What stands beside a tokenizer's description: its begin and end tokens, and the template of conversations.

use std::borrow::Cow;
use std::path::Path;

use serde_json::{Map, Value};

use super::super::SpecialToken;
use crate::{ZooError, json_file};

const CONFIG: &str = "tokenizer_config.json";
const SPECIAL: &str = "special_tokens_map.json";
const TEMPLATE: &str = "chat_template.jinja";
/// Files of a model with the id of its end token.
const OF_MODEL: [&str; 2] = ["generation_config.json", "config.json"];
/// Texts of tokens that end a document, if no file says which one does.
const ENDS: [&str; 5] = ["<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "<|eos|>"];

/// What stands beside a description.
#[derive(Debug, Clone, Default)]
pub(super) struct Beside {
    /// The text of `bos_token`.
    pub(super) begin: Option<String>,
    /// The text of `eos_token`.
    pub(super) end: Option<String>,
    /// Ids of the tokens in the model's files after which it says no more.
    pub(super) ends_of_model: Vec<u32>,
    pub(super) chat_template: Option<String>,
    /// The files that are written beside a model.
    files: Vec<(&'static str, Vec<u8>)>,
}

/// Returns the text of a token: a text, or an object with its `content`.
fn token_text(fields: &Map<String, Value>, key: &str) -> Option<String> {
    let value = fields.get(key)?;
    Some(value.as_str().or_else(|| value["content"].as_str())?.to_owned())
}

/// Returns the template in a field: a text, or a list of named ones, of which `default` is taken.
fn template_in(fields: &Map<String, Value>) -> Option<String> {
    match fields.get("chat_template")? {
        Value::String(template) => Some(template.clone()),
        Value::Array(named) => {
            let default = named.iter().find(|template| template["name"] == "default")?;
            default["template"].as_str().map(str::to_owned)
        }
        _ => None,
    }
}

impl Beside {
    /// What a GGUF file says. It is written as a `tokenizer_config.json`.
    pub(super) fn said(
        begin: Option<String>,
        end: Option<String>,
        ends_of_model: Vec<u32>,
        chat_template: Option<String>,
    ) -> Self {
        let mut config = Map::new();
        config.insert("tokenizer_class".to_owned(), "PreTrainedTokenizerFast".into());
        config.insert("clean_up_tokenization_spaces".to_owned(), false.into());
        let texts = [("bos_token", &begin), ("eos_token", &end), ("chat_template", &chat_template)];
        for (key, text) in texts {
            if let Some(text) = text {
                config.insert(key.to_owned(), text.clone().into());
            }
        }
        let files = vec![(CONFIG, format!("{:#}\n", Value::Object(config)).into_bytes())];
        Self { begin, end, ends_of_model, chat_template, files }
    }

    /// Reads the files beside a description.
    ///
    /// Errors: those of `read`; [`ZooError::Json`].
    pub(super) fn of<E: From<ZooError>>(
        name: &str,
        read: &impl Fn(&'static str) -> Result<Option<Vec<u8>>, E>,
    ) -> Result<Self, E> {
        let mut this = Self::default();
        let object = |file: &'static str, bytes: &[u8]| -> Result<Map<String, Value>, ZooError> {
            json_file::from_bytes(&Path::new(name).join(file), bytes)
        };
        for file in [CONFIG, SPECIAL] {
            let Some(bytes) = read(file)? else { continue };
            let fields = object(file, &bytes)?;
            this.begin = this.begin.or_else(|| token_text(&fields, "bos_token"));
            this.end = this.end.or_else(|| token_text(&fields, "eos_token"));
            this.chat_template = this.chat_template.or_else(|| template_in(&fields));
            this.files.push((file, bytes));
        }
        if let Some(bytes) = read(TEMPLATE)? {
            this.chat_template = Some(String::from_utf8_lossy(&bytes).into_owned());
            this.files.push((TEMPLATE, bytes));
        }
        for file in OF_MODEL {
            if let (true, Some(bytes)) = (this.ends_of_model.is_empty(), read(file)?) {
                let ids = object(file, &bytes)?.remove("eos_token_id").unwrap_or_default();
                let ids = if let Value::Array(ids) = ids { ids } else { vec![ids] };
                this.ends_of_model = ids.iter().filter_map(|id| u32::try_from(id.as_u64()?).ok()).collect();
            }
        }
        Ok(this)
    }

    /// Returns the id that ends a document: of the end token's text, else of the model's files, else of the
    /// first known text.
    pub(super) fn end(&self, special: &[SpecialToken]) -> Option<u32> {
        let id = |text: &str| special.iter().find(|token| token.text == text).map(|token| token.id);
        let is_special = |id: &u32| special.iter().any(|token| token.id == *id);
        let of_model = || self.ends_of_model.first().copied().filter(is_special);
        self.end.as_deref().and_then(id).or_else(of_model).or_else(|| ENDS.into_iter().find_map(id))
    }

    pub(super) fn files(&self) -> impl Iterator<Item = (&'static str, Cow<'_, [u8]>)> {
        self.files.iter().map(|(name, bytes)| (*name, Cow::Borrowed(&bytes[..])))
    }
}
