//! Checks of a tokenizer's description before the crate `tokenizers` reads it: what could make that crate
//! panic, grow texts without bound, or lose parts of texts is refused.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use super::super::SpecialToken;
use super::super::byte_chars::byte_chars;

/// Ids are below. The largest vocabularies have about 300 thousand tokens.
pub(super) const MOST_IDS: u64 = 1 << 24;
/// Normalizers may make a text longer by at most this factor, besides what Unicode's normal forms add.
const MOST_GROWTH: f64 = 64.0;

/// Most bytes of a piece of Unigram, whose lattice grows with it.
const LONGEST_PIECE: usize = 256;
/// Most characters of a word of `WordPiece`, whose time grows with their square.
const LONGEST_WORD: u64 = 1000;

const MODELS: [&str; 4] = ["BPE", "Unigram", "WordLevel", "WordPiece"];
/// Components that change a text. `Precompiled` is not among them: the crate does not check its table.
const NORMALIZERS: [&str; 13] = [
    "Sequence",
    "NFC",
    "NFD",
    "NFKC",
    "NFKD",
    "Nmt",
    "Lowercase",
    "Strip",
    "StripAccents",
    "Prepend",
    "Replace",
    "ByteLevel",
    "BertNormalizer",
];

/// An added token of a description.
pub(super) struct AddedToken {
    pub(super) text: String,
    pub(super) id: u32,
    pub(super) is_special: bool,
}

impl From<AddedToken> for SpecialToken {
    fn from(token: AddedToken) -> Self {
        Self { text: Cow::Owned(token.text), id: token.id }
    }
}

fn id(value: &Value) -> Option<u32> {
    value.as_u64().filter(|id| *id < MOST_IDS).map(|id| id as u32)
}

/// Returns the added tokens.
pub(super) fn added_tokens(description: &Value) -> Result<Vec<AddedToken>, String> {
    let list = match &description["added_tokens"] {
        Value::Null => return Ok(Vec::new()),
        Value::Array(list) => list,
        _ => return Err("`added_tokens` is no list".to_owned()),
    };
    let read = |(index, token): (usize, &Value)| {
        let text = token["content"].as_str().filter(|text| !text.is_empty());
        let (Some(text), Some(id)) = (text, id(&token["id"])) else {
            return Err(format!("`added_tokens[{index}]` has no text, or no id below {MOST_IDS}"));
        };
        Ok(AddedToken { text: text.to_owned(), id, is_special: token["special"] == true })
    };
    list.iter().enumerate().map(read).collect()
}

/// Checks a description. What truncates, pads or drops merges at random is taken out of it. Returns the bytes
/// for which a byte-level vocabulary has no token, and which the crate leaves out of texts.
pub(super) fn check(description: &mut Value) -> Result<Vec<u8>, String> {
    let Some(fields) = description.as_object_mut() else { return Err("it is no JSON object".to_owned()) };
    fields.insert("truncation".to_owned(), Value::Null);
    fields.insert("padding".to_owned(), Value::Null);
    let Some(model) = fields.get_mut("model").and_then(Value::as_object_mut) else {
        return Err("it has no `model`".to_owned());
    };
    model.insert("dropout".to_owned(), Value::Null);
    // Files of early versions have no type.
    let kind = match model.get("type").and_then(Value::as_str) {
        None if model.contains_key("merges") => "BPE",
        None => return Err(format!("its `model.type` is missing, expected {}", MODELS.join(", "))),
        Some(kind) => MODELS
            .into_iter()
            .find(|known| *known == kind)
            .ok_or_else(|| format!("its `model.type` is {kind:?}, expected {}", MODELS.join(", ")))?,
    };
    // Another kind of model could be read from it otherwise.
    model.insert("type".to_owned(), kind.into());
    let growth = grows(&description["normalizer"])?;
    if growth > MOST_GROWTH {
        return Err(format!(
            "its `normalizer` can make a text {growth:.0} times as long, expected at most {MOST_GROWTH}"
        ));
    }
    check_splits(&description["pre_tokenizer"])?;
    check_template(&description["post_processor"])?;
    let growth = grows_decoded(&description["decoder"])?;
    if growth > MOST_GROWTH {
        return Err(format!(
            "its `decoder` can make a text {growth:.0} times as long, expected at most {MOST_GROWTH}"
        ));
    }
    match kind {
        "BPE" => return check_bpe(description),
        "Unigram" => check_unigram(&description["model"])?,
        _ => {
            let vocab = ids(&description["model"])?;
            has_unknown(&description["model"], &vocab)?;
            let longest = &description["model"]["max_input_chars_per_word"];
            if longest.as_u64().is_some_and(|longest| longest > LONGEST_WORD) {
                return Err(format!(
                    "its `model.max_input_chars_per_word` is {longest}, expected at most {LONGEST_WORD}"
                ));
            }
        }
    }
    Ok(Vec::new())
}

/// The vocabulary of a model.
type Vocab<'a> = BTreeMap<&'a str, u32>;

/// Returns the vocabulary of words with ids.
fn ids(model: &Value) -> Result<Vocab<'_>, String> {
    let Some(words) = model["vocab"].as_object().filter(|words| !words.is_empty()) else {
        return Err("its `model.vocab` is no object with words".to_owned());
    };
    let mut seen = BTreeSet::new();
    words
        .iter()
        .map(|(word, value)| match id(value) {
            Some(id) if seen.insert(id) => Ok((word.as_str(), id)),
            Some(id) => Err(format!("two words of its `model.vocab` have the id {id}, such as {word:?}")),
            None => Err(format!("its word {word:?} has the id {value}, expected one below {MOST_IDS}")),
        })
        .collect()
}

fn has_unknown(model: &Value, vocab: &Vocab<'_>) -> Result<(), String> {
    match model["unk_token"].as_str() {
        Some(word) if vocab.contains_key(word) => Ok(()),
        Some(word) => Err(format!("its `model.unk_token` {word:?} is not in its vocabulary")),
        None => Err("it has no `model.unk_token` for text that is not in its vocabulary".to_owned()),
    }
}

fn check_unigram(model: &Value) -> Result<(), String> {
    let Some(pieces) = model["vocab"].as_array().filter(|pieces| !pieces.is_empty()) else {
        return Err("its `model.vocab` is no list of pieces".to_owned());
    };
    if pieces.len() as u64 >= MOST_IDS {
        return Err(format!("it has {} pieces, expected fewer than {MOST_IDS}", pieces.len()));
    }
    for (index, piece) in pieces.iter().enumerate() {
        let is_piece = piece.as_array().is_some_and(|piece| piece.len() == 2);
        let text = piece[0].as_str().is_some_and(|text| !text.is_empty());
        if piece[0].as_str().is_some_and(|text| text.len() > LONGEST_PIECE) {
            return Err(format!("its `model.vocab[{index}]` has more than {LONGEST_PIECE} bytes"));
        }
        if !is_piece || !text || piece[1].as_f64().is_none_or(|score| !score.is_finite()) {
            return Err(format!("its `model.vocab[{index}]` is {piece}, expected a text and a score"));
        }
    }
    match model["unk_id"].as_u64() {
        Some(id) if id < pieces.len() as u64 => Ok(()),
        Some(id) => Err(format!("its `model.unk_id` is {id}, expected one below {}", pieces.len())),
        None => Err("it has no `model.unk_id` for text that is not in its vocabulary".to_owned()),
    }
}

fn check_bpe(description: &Value) -> Result<Vec<u8>, String> {
    let model = &description["model"];
    let vocab = ids(model)?;
    for affix in ["continuing_subword_prefix", "end_of_word_suffix"] {
        if model[affix].as_str().is_some_and(|affix| !affix.is_empty()) {
            return Err(format!("its `model.{affix}` is not read"));
        }
    }
    let Some(merges) = model["merges"].as_array() else {
        return Err("its `model.merges` is no list".to_owned());
    };
    for (index, merge) in merges.iter().enumerate() {
        let pair = match merge {
            Value::String(pair) => pair.split_once(' '),
            Value::Array(pair) => match &pair[..] {
                [Value::String(a), Value::String(b)] => Some((a.as_str(), b.as_str())),
                _ => None,
            },
            _ => None,
        };
        let Some((a, b)) = pair else {
            return Err(format!("its `model.merges[{index}]` is {merge}, expected two tokens"));
        };
        let merged = format!("{a}{b}");
        for token in [a, b, &merged] {
            if !vocab.contains_key(token) {
                return Err(format!(
                    "its `model.merges[{index}]` needs {token:?}, which its vocabulary lacks"
                ));
            }
        }
    }
    if !model["unk_token"].is_null() {
        return has_unknown(model, &vocab).map(|()| Vec::new());
    }
    // Bytes that occur in UTF-8.
    let bytes = (0..=0xF4_u8).filter(|byte| !matches!(byte, 0xC0 | 0xC1));
    let lacks = |word: String| !vocab.contains_key(word.as_str());
    if is_byte_level(description) {
        let chars = byte_chars();
        return Ok(bytes.filter(|byte| lacks(chars[usize::from(*byte)].to_string())).collect());
    }
    if model["byte_fallback"] == true && !bytes.map(|byte| format!("<0x{byte:02X}>")).any(lacks) {
        return Ok(Vec::new());
    }
    Err("it has no token for text that is not in its vocabulary: neither `model.unk_token`, nor all bytes"
        .to_owned())
}

/// Returns the kind of a component.
fn kind(component: &Value) -> &str {
    component["type"].as_str().unwrap_or("")
}

/// Returns the parts of a component: those of a sequence, else itself.
fn parts<'a>(component: &'a Value, list: &str) -> Vec<&'a Value> {
    match kind(component) {
        "Sequence" => component[list].as_array().into_iter().flatten().collect(),
        _ if component.is_null() => Vec::new(),
        _ => vec![component],
    }
}

/// Returns whether a component is of a kind, or has a part that is.
fn has(component: &Value, wanted: &str) -> bool {
    kind(component) == wanted
        || ["normalizers", "pretokenizers"]
            .iter()
            .any(|list| component[*list].as_array().into_iter().flatten().any(|part| has(part, wanted)))
}

/// Returns the factor by which a component `Replace` makes a text longer at most.
fn replaced(component: &Value) -> f64 {
    let content = component["content"].as_str().unwrap_or("").len() as f64;
    match component["pattern"]["String"].as_str() {
        Some(pattern) if !pattern.is_empty() => (content / pattern.len() as f64).max(1.0),
        // A pattern may match between all characters.
        _ => content + 1.0,
    }
}

/// Returns the factor by which normalizers make a text longer at most.
fn grows(component: &Value) -> Result<f64, String> {
    let mut factor = 1.0;
    for part in parts(component, "normalizers") {
        let kind = kind(part);
        if !NORMALIZERS.contains(&kind) {
            return Err(format!("its normalizer {kind:?} is not read: {} are", NORMALIZERS.join(", ")));
        }
        factor *= match kind {
            "Sequence" => grows(part)?,
            "Replace" if part["pattern"]["String"] == "" => {
                return Err("its normalizer Replace has an empty pattern".to_owned());
            }
            "Prepend" if part["prepend"] == "" => {
                return Err("its normalizer Prepend has nothing to prepend".to_owned());
            }
            "Replace" => replaced(part),
            // For a text of one byte.
            "Prepend" => part["prepend"].as_str().unwrap_or("").len() as f64 / 16.0 + 1.0,
            _ => 1.0,
        };
    }
    Ok(factor)
}

/// As [`grows`], of decoders.
fn grows_decoded(component: &Value) -> Result<f64, String> {
    let mut factor = 1.0;
    for part in parts(component, "decoders") {
        factor *= match kind(part) {
            "Sequence" => grows_decoded(part)?,
            "Replace" => replaced(part),
            // The crate panics for texts that are shorter.
            "Strip" if part["stop"].as_u64().is_some_and(|stop| stop > 0) => {
                return Err("its decoder Strip takes characters from the end, which is not read".to_owned());
            }
            _ => 1.0,
        };
    }
    Ok(factor)
}

/// Checks components that split a text.
fn check_splits(component: &Value) -> Result<(), String> {
    for part in parts(component, "pretokenizers") {
        match kind(part) {
            "Sequence" => check_splits(part)?,
            "FixedLength" if part["length"].as_u64().is_none_or(|length| length == 0) => {
                return Err("its pre-tokenizer FixedLength has no length above 0".to_owned());
            }
            _ => {}
        }
    }
    Ok(())
}

/// Checks the template of a post-processor: it has the text once, and special tokens that it describes.
fn check_template(component: &Value) -> Result<(), String> {
    for part in parts(component, "processors") {
        match kind(part) {
            "Sequence" => check_template(part)?,
            "TemplateProcessing" => {
                let pieces = part["single"].as_array().into_iter().flatten();
                let mut texts = 0;
                for piece in pieces {
                    let special = &piece["SpecialToken"]["id"];
                    texts += usize::from(piece["Sequence"]["id"] == "A");
                    let is_known =
                        special.as_str().is_some_and(|id| part["special_tokens"].get(id).is_some());
                    if piece["Sequence"]["id"] != "A" && !is_known {
                        return Err(format!("its post-processor has the unknown piece {piece}"));
                    }
                }
                if texts != 1 {
                    return Err(format!("its post-processor has the text {texts} times, expected once"));
                }
            }
            _ => {}
        }
    }
    Ok(())
}

/// Returns whether a vocabulary is one of bytes.
pub(super) fn is_byte_level(description: &Value) -> bool {
    ["normalizer", "pre_tokenizer"].iter().any(|part| has(&description[*part], "ByteLevel"))
}
