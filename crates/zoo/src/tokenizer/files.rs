//! The tokenizer that lies beside a model's weights: whether it is GPT-2's, which is compiled in, or
//! described by a file.

use std::collections::BTreeMap;
use std::path::Path;

use farflung_base::text_encoding::utf8;
use serde_json::Value;

use crate::{ZooError, json_file};

/// The tokenizer files of a model folder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TokenizerFiles {
    /// There are none.
    None,
    /// They are GPT-2's tokenizer.
    Gpt2 {
        /// Tokens that were added to GPT-2's, which its tokenizer here does not have, by their ids.
        added: BTreeMap<u64, String>,
    },
    /// There is a `tokenizer.json`, which is not GPT-2's.
    Described {
        /// How it differs from GPT-2's.
        difference: String,
    },
    /// They are another tokenizer, which is not read.
    Other {
        /// Name of the file.
        file: &'static str,
        /// How it differs from GPT-2's.
        difference: String,
    },
}

/// Files of tokenizers that are never GPT-2's.
const OTHERS: [&str; 7] =
    ["tokenizer.model", "spiece.model", "vocab.txt", "tekken.json", "tokenizer.pkl", "meta.pkl", "vocab.pkl"];

/// Pairs of a vocabulary and its merges: in Hugging Face's layout, and in that of the published GPT-2.
const PAIRS: [(&str, &str); 2] = [("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe")];

/// A vocabulary and its merges, in order.
struct Bpe {
    vocab: BTreeMap<String, u64>,
    /// Pairs of tokens, separated by a space.
    merges: Vec<String>,
}

impl TokenizerFiles {
    /// Reads the tokenizer files of a folder: `tokenizer.json`, else `vocab.json` with `merges.txt`.
    ///
    /// Errors: a file that cannot be read or is not JSON.
    pub fn of(folder: &Path) -> Result<Self, ZooError> {
        let is_there = |name: &str| folder.join(name).is_file();
        if is_there("tokenizer.json") {
            return Ok(match of_tokenizer_json(&folder.join("tokenizer.json"))? {
                Self::Gpt2 { added } if added.is_empty() => Self::Gpt2 { added },
                Self::Gpt2 { added } if cfg!(feature = "tokenizers") => {
                    Self::Described { difference: format!("it adds {} tokens", added.len()) }
                }
                Self::Other { difference, .. } if cfg!(feature = "tokenizers") => {
                    Self::Described { difference }
                }
                other => other,
            });
        }
        for (vocab, merges) in PAIRS {
            if is_there(vocab) && !is_there(merges) {
                let difference = format!("{merges}, the other half of it, is not there");
                return Ok(Self::Other { file: vocab, difference });
            }
            if is_there(vocab) {
                return of_pair(&folder.join(vocab), &folder.join(merges), vocab);
            }
        }
        let other = OTHERS.into_iter().find(|name| is_there(name));
        let difference = "it is of another kind".to_owned();
        Ok(other.map_or(Self::None, |file| Self::Other { file, difference }))
    }
}

/// Compares `vocab.json` and `merges.txt`.
fn of_pair(vocab: &Path, merges: &Path, file: &'static str) -> Result<TokenizerFiles, ZooError> {
    let bpe = Bpe { vocab: json_file::read(vocab)?, merges: lines_of(merges)? };
    Ok(compared(file, &bpe, BTreeMap::new()))
}

/// Reads a list of merges: a pair in each line, after a line with the version.
fn lines_of(path: &Path) -> Result<Vec<String>, ZooError> {
    let bytes = std::fs::read(path).map_err(ZooError::open(path))?;
    let bytes = utf8(&bytes);
    let text = String::from_utf8_lossy(&bytes);
    let is_version = |line: &&str| line.starts_with("#version");
    let lines = text.lines().map(str::trim_end).filter(|line| !line.is_empty());
    Ok(lines.filter(|line| !is_version(line)).map(str::to_owned).collect())
}

/// Compares a `tokenizer.json`.
fn of_tokenizer_json(path: &Path) -> Result<TokenizerFiles, ZooError> {
    const FILE: &str = "tokenizer.json";
    let json: Value = json_file::read(path)?;
    let other =
        |difference: &str| Ok(TokenizerFiles::Other { file: FILE, difference: difference.to_owned() });
    let (model, words) = (&json["model"], &json["pre_tokenizer"]);
    // Files of early versions have no type.
    if model["type"].as_str().is_some_and(|kind| kind != "BPE") || !model["merges"].is_array() {
        return other("it is not a byte-pair encoding");
    }
    let is_default = |value: &Value, default: bool| value.is_null() || value == default;
    let splits_as_gpt2 = words["type"] == "ByteLevel"
        && words["add_prefix_space"] != true
        && is_default(&words["use_regex"], true);
    if !json["normalizer"].is_null() || !splits_as_gpt2 || !is_default(&model["ignore_merges"], false) {
        return other("it splits texts in another way");
    }
    let merge = |value: &Value| match value {
        Value::String(pair) => Some(pair.clone()),
        Value::Array(pair) => match &pair[..] {
            [Value::String(a), Value::String(b)] => Some(format!("{a} {b}")),
            _ => None,
        },
        _ => None,
    };
    let merges: Option<Vec<String>> = model["merges"].as_array().into_iter().flatten().map(merge).collect();
    let vocab = serde_json::from_value(model["vocab"].clone()).ok();
    let (Some(vocab), Some(merges)) = (vocab, merges) else {
        return other("its vocabulary or its merges cannot be read");
    };
    let added = json["added_tokens"].as_array().into_iter().flatten();
    let added =
        added.filter_map(|token| Some((token["id"].as_u64()?, token["content"].as_str()?.to_owned())));
    Ok(compared(FILE, &Bpe { vocab, merges }, added.collect()))
}

#[cfg(feature = "bpe")]
fn compared(file: &'static str, bpe: &Bpe, mut added: BTreeMap<u64, String>) -> TokenizerFiles {
    let own = super::gpt2::Words::new();
    for (word, &id) in &bpe.vocab {
        match own.get(id) {
            Some(expected) if expected == *word => {}
            Some(expected) => {
                let difference = format!("its token {id} is {word:?}, GPT-2's is {expected:?}");
                return TokenizerFiles::Other { file, difference };
            }
            None => drop(added.insert(id, word.clone())),
        }
    }
    let words = super::gpt2::VOCAB;
    // The last word may be listed with the added tokens only.
    let (found, merges) = (bpe.vocab.len(), bpe.merges.len());
    let expected = (super::byte_chars::BYTES as u64..words as u64 - 1).filter_map(|id| own.get(id));
    let joined = bpe.merges.iter().map(|pair| pair.replacen(' ', "", 1));
    let difference = if found + 1 < words {
        format!("it has {found} tokens, GPT-2's has {words}")
    } else if joined.ne(expected) {
        format!("its {merges} merges are not GPT-2's")
    } else {
        added.retain(|id, word| own.get(*id).is_none_or(|known| known != *word));
        return match added.iter().find(|(id, _)| own.get(**id).is_some()) {
            None => TokenizerFiles::Gpt2 { added },
            Some((id, word)) => {
                let difference = format!("its token {id} is {word:?}");
                TokenizerFiles::Other { file, difference }
            }
        };
    };
    TokenizerFiles::Other { file, difference }
}

#[cfg(not(feature = "bpe"))]
fn compared(file: &'static str, bpe: &Bpe, _: BTreeMap<u64, String>) -> TokenizerFiles {
    let (tokens, merges) = (bpe.vocab.len(), bpe.merges.len());
    let difference =
        format!("it has {tokens} tokens and {merges} merges, and this build has no byte-pair encoding");
    TokenizerFiles::Other { file, difference }
}
