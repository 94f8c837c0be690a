//! The tokenizer of a GGUF file, as the description of a `tokenizer.json`.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::{Value, json};

use super::beside::Beside;
use crate::ZooError;
use crate::weights::gguf::{Field, Lists, fields};

/// Most bytes of a piece, and most ways per piece to make pieces of others: about three in real files.
const LONGEST_PIECE: usize = 256;
const MERGES_PER_PIECE: usize = 32;

/// Kinds of tokens, by their numbers.
const NORMAL: u32 = 1;
const UNKNOWN: u32 = 2;
const CONTROL: u32 = 3;
const USER_DEFINED: u32 = 4;
const UNUSED: u32 = 5;

const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// What a splitting does besides.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Also {
    /// Each digit is a word.
    SingleDigits,
    /// Texts are brought into Unicode's form NFC.
    Composes,
    /// A word that is a token needs no merges, and a begin token is added unless the file says otherwise.
    WholeWordsAndBegins,
}

/// How a byte-level tokenizer of a name in `tokenizer.ggml.pre` splits texts.
struct Splitting {
    names: &'static [&'static str],
    pattern: &'static str,
    also: Option<Also>,
}

/// The splittings that are read. Source: the `tokenizer.json` of the models that llama.cpp names so.
const SPLITTINGS: [Splitting; 5] = [
    Splitting { names: &["gpt-2", "gpt2"], pattern: GPT2, also: None },
    Splitting { names: &["smollm", "starcoder"], pattern: GPT2, also: Some(Also::SingleDigits) },
    Splitting {
        names: &["llama-bpe", "llama3", "llama-v3"],
        pattern: LLAMA3,
        also: Some(Also::WholeWordsAndBegins),
    },
    Splitting { names: &["qwen2", "deepseek-r1-qwen"], pattern: QWEN2, also: Some(Also::Composes) },
    Splitting { names: &["tekken"], pattern: TEKKEN, also: Some(Also::WholeWordsAndBegins) },
];

/// A file's fields.
struct Fields<'a> {
    path: &'a Path,
    all: BTreeMap<String, Field>,
}

impl Fields<'_> {
    fn wrong(&self, problem: impl Into<String>) -> ZooError {
        ZooError::Tokenizer { name: self.path.display().to_string(), problem: problem.into() }
    }

    fn get(&self, field: &str) -> Option<&Field> {
        self.all.get(&format!("tokenizer.ggml.{field}"))
    }

    fn text(&self, field: &str) -> Option<&str> {
        match self.get(field)? {
            Field::Text(text) => Some(text),
            _ => None,
        }
    }

    fn flag(&self, field: &str) -> Option<bool> {
        match self.get(field)? {
            Field::Flag(flag) => Some(*flag),
            _ => None,
        }
    }

    fn texts(&self, field: &str) -> Result<&[String], ZooError> {
        match self.get(field) {
            Some(Field::Texts(texts)) => Ok(texts),
            _ => Err(self.wrong(format!("there is no list of texts `tokenizer.ggml.{field}`"))),
        }
    }

    /// Returns a number for each token; an empty list if there is none.
    fn numbers(&self, field: &str, count: usize) -> Result<&[f64], ZooError> {
        match self.get(field) {
            None => Ok(&[]),
            Some(Field::Numbers(numbers)) if numbers.len() == count => Ok(numbers),
            _ => {
                Err(self.wrong(format!("`tokenizer.ggml.{field}` has no number for each of {count} tokens")))
            }
        }
    }

    /// Returns the text of a token whose id is in a field.
    fn token<'t>(&self, field: &str, tokens: &'t [String]) -> Result<Option<&'t String>, ZooError> {
        let Some(Field::Number(id)) = self.get(field) else { return Ok(None) };
        let token = (id.fract() == 0.0 && *id >= 0.0).then(|| tokens.get(*id as usize)).flatten();
        let wrong =
            || self.wrong(format!("`tokenizer.ggml.{field}` is {id}, and there are {} tokens", tokens.len()));
        token.map(Some).ok_or_else(wrong)
    }
}

/// Returns the description of a file's tokenizer, and what else the file says of it.
///
/// Errors: [`ZooError::Io`], [`ZooError::Gguf`]; [`ZooError::Tokenizer`] for a kind that is not read.
pub(super) fn described(path: &Path) -> Result<(Value, Beside), ZooError> {
    let fields = Fields { path, all: fields(path, Lists::Keep)? };
    let tokens = fields.texts("tokens")?;
    let kinds = fields.numbers("token_type", tokens.len())?;
    let kind = |id: usize| kinds.get(id).map_or(NORMAL, |kind| *kind as u32);
    let mut vocab = serde_json::Map::new();
    let mut added = Vec::new();
    for (id, token) in tokens.iter().enumerate() {
        // Padding of the table: nothing is encoded as these.
        if kind(id) == UNUSED {
            continue;
        }
        if vocab.insert(token.clone(), json!(id)).is_some() {
            return Err(fields.wrong(format!("token {id} is {token:?}, as one before it")));
        }
        if [UNKNOWN, CONTROL, USER_DEFINED].contains(&kind(id)) && !token.is_empty() {
            added.push(json!({
                "id": id, "content": token, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": kind(id) != USER_DEFINED,
            }));
        }
    }
    let begin = fields.token("bos_token_id", tokens)?;
    let end = fields.token("eos_token_id", tokens)?;
    let (parts, begins) = match fields.text("model") {
        Some("gpt2") => byte_level(&fields, &vocab)?,
        Some("llama") => sentence_piece(&fields, tokens, &vocab)?,
        kind => {
            let kind = kind.unwrap_or("missing");
            return Err(fields.wrong(format!("`tokenizer.ggml.model` is {kind}, expected gpt2 or llama")));
        }
    };
    let template = |before: Option<&String>, after: Option<&String>| {
        let special = |token: &String| json!({"SpecialToken": {"id": token, "type_id": 0}});
        let text = json!({"Sequence": {"id": "A", "type_id": 0}});
        let single: Vec<Value> =
            before.map(special).into_iter().chain([text.clone()]).chain(after.map(special)).collect();
        let second = json!({"Sequence": {"id": "B", "type_id": 1}});
        let mut known = serde_json::Map::new();
        for token in [before, after].into_iter().flatten() {
            let id = tokens.iter().position(|other| other == token);
            known.insert(token.clone(), json!({"id": token, "ids": [id], "tokens": [token]}));
        }
        json!({"type": "TemplateProcessing", "single": single, "pair": [text, second], "special_tokens": known})
    };
    let before = begin.filter(|_| fields.flag("add_bos_token").unwrap_or(begins));
    let after = end.filter(|_| fields.flag("add_eos_token").unwrap_or(false));
    let processor = (before.is_some() || after.is_some()).then(|| template(before, after));
    let mut description = json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": added, "post_processor": processor,
    });
    for (name, part) in parts {
        description[name] = part;
    }
    let chat_template = match fields.all.get("tokenizer.chat_template") {
        Some(Field::Text(template)) => Some(template.clone()),
        _ => None,
    };
    let of_turn = fields.token("eot_token_id", tokens)?;
    let id = |token: &String| tokens.iter().position(|other| other == token);
    let ends = [end, of_turn].into_iter().flatten().filter_map(id).map(|id| id as u32).collect();
    Ok((description, Beside::said(begin.cloned(), end.cloned(), ends, chat_template)))
}

/// Named parts of a description, and whether a begin token is added by default.
type Parts = (Vec<(&'static str, Value)>, bool);

/// Returns the parts of a byte-level byte-pair encoding.
fn byte_level(fields: &Fields<'_>, vocab: &serde_json::Map<String, Value>) -> Result<Parts, ZooError> {
    let name = fields.text("pre").unwrap_or("missing");
    let Some(how) = SPLITTINGS.iter().find(|how| how.names.contains(&name)) else {
        let known: Vec<&str> = SPLITTINGS.iter().flat_map(|how| how.names.iter().copied()).collect();
        return Err(
            fields.wrong(format!("`tokenizer.ggml.pre` is {name}, expected one of {}", known.join(", ")))
        );
    };
    let whole_words = how.also == Some(Also::WholeWordsAndBegins);
    let merges = fields.texts("merges")?;
    let split = |pattern: &str| json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false});
    let bytes = json!({
        "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false,
    });
    let digits =
        (how.also == Some(Also::SingleDigits)).then(|| json!({"type": "Digits", "individual_digits": true}));
    let splits: Vec<Value> = digits.into_iter().chain([split(how.pattern), bytes.clone()]).collect();
    let model = json!({
        "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
        "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
        "ignore_merges": whole_words, "vocab": vocab, "merges": merges,
    });
    let parts = vec![
        ("normalizer", if how.also == Some(Also::Composes) { json!({"type": "NFC"}) } else { Value::Null }),
        ("pre_tokenizer", json!({"type": "Sequence", "pretokenizers": splits})),
        ("decoder", bytes),
        ("model", model),
    ];
    Ok((parts, whole_words))
}

/// Returns the parts of `SentencePiece`'s byte-pair encoding: the piece with the highest score is merged first.
fn sentence_piece(
    fields: &Fields<'_>,
    tokens: &[String],
    vocab: &serde_json::Map<String, Value>,
) -> Result<Parts, ZooError> {
    let scores = fields.numbers("scores", tokens.len())?;
    if scores.is_empty() {
        return Err(fields.wrong("there is no `tokenizer.ggml.scores`"));
    }
    let kinds = fields.numbers("token_type", tokens.len())?;
    // Control tokens are not made of text, nor bytes.
    let is_text = |id: u64| kinds.get(id as usize).is_none_or(|kind| *kind as u32 == NORMAL);
    let id = |piece: &str| vocab.get(piece).and_then(Value::as_u64).filter(|id| is_text(*id));
    let (mut merges, most) = (Vec::new(), MERGES_PER_PIECE * tokens.len());
    for (token, &score) in tokens.iter().zip(scores) {
        if id(token).is_none() || score.is_nan() {
            continue;
        }
        if token.len() > LONGEST_PIECE || merges.len() > most {
            return Err(fields.wrong(format!(
                "a piece has more than {LONGEST_PIECE} bytes, or pieces are made of others in more than {most} ways"
            )));
        }
        let halves = token.char_indices().skip(1).map(|(at, _)| token.split_at(at));
        for (a, b) in halves {
            if let (Some(first), Some(second)) = (id(a), id(b)) {
                merges.push((score, (first, second), json!([a, b])));
            }
        }
    }
    merges.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
    let merges: Vec<Value> = merges.into_iter().map(|(.., merge)| merge).collect();
    let unknown = fields.token("unknown_token_id", tokens)?.cloned().unwrap_or_else(|| "<unk>".to_owned());
    let replace =
        |from: &str, to: &str| json!({"type": "Replace", "pattern": {"String": from}, "content": to});
    let begins_with_space = fields.flag("add_space_prefix").unwrap_or(true);
    let prepend = begins_with_space.then(|| json!({"type": "Prepend", "prepend": "▁"}));
    let normalizers: Vec<Value> = prepend.into_iter().chain([replace(" ", "▁")]).collect();
    let strip = begins_with_space.then(|| json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
    let decoders: Vec<Value> = [replace("▁", " "), json!({"type": "ByteFallback"}), json!({"type": "Fuse"})]
        .into_iter()
        .chain(strip)
        .collect();
    let model = json!({
        "type": "BPE", "dropout": null, "unk_token": unknown, "continuing_subword_prefix": null,
        "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": true, "ignore_merges": false,
        "vocab": vocab, "merges": merges,
    });
    let parts = vec![
        ("normalizer", json!({"type": "Sequence", "normalizers": normalizers})),
        ("pre_tokenizer", Value::Null),
        ("decoder", json!({"type": "Sequence", "decoders": decoders})),
        ("model", model),
    ];
    Ok((parts, true))
}
