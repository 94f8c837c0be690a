//! Ids of tokens in a `config.json`: with which texts begin and end, and are padded.

use serde_json::{Map, Value};

use crate::Tokenizer;

/// Fields that change nothing that a model computes, but where a text ends.
const FIELDS: [&str; 3] = [BEGIN, END, "pad_token_id"];
const BEGIN: &str = "bos_token_id";
const END: &str = "eos_token_id";

/// The fields of a configuration on ids of tokens, such as `eos_token_id`. The default has none, which readers
/// understand as ids of their own for some families.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TokenIds(Map<String, Value>);

impl TokenIds {
    /// Takes the fields from those of a configuration.
    pub(super) fn in_config(fields: &Map<String, Value>) -> Self {
        let ids = FIELDS.iter().filter_map(|name| fields.get_key_value(*name));
        Self(ids.map(|(name, id)| (name.clone(), id.clone())).collect())
    }

    /// Returns those of a tokenizer. What it does not have is null.
    #[must_use]
    pub fn of(tokenizer: &dyn Tokenizer) -> Self {
        let begin = tokenizer.marks().begin;
        let begin = tokenizer.special_tokens().iter().find(|token| token.text == begin).map(|token| token.id);
        let end = match &tokenizer.ends()[..] {
            [] => Value::Null,
            [end] => (*end).into(),
            ends => ends.into(),
        };
        let fields = [(BEGIN, begin.into()), (END, end), (FIELDS[2], Value::Null)];
        Self(fields.into_iter().map(|(name, id)| (name.to_owned(), id)).collect())
    }

    /// Returns the field of this name.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&Value> {
        self.0.get(name)
    }

    /// Adds the fields to those of a configuration.
    pub(super) fn write(&self, fields: &mut Map<String, Value>) {
        fields.extend(self.0.clone());
    }
}
