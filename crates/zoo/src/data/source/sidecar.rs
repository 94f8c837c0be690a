//! What files beside a file of ids say about it: Megatron-LM's index, nanoGPT's `meta.pkl`, and `tokens.json`.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::form::unpacked_name;
use super::pickle::{self, Pickle, Value};
use super::{SourceError, TokenType};
use crate::{Tokenizer, ZooError};

/// The name of nanoGPT's description of the files in its folder.
const META: &str = "meta.pkl";
/// The name of this project's description of the files in its folder.
const TOKENS: &str = "tokens.json";
/// Longest description of a vocabulary that is read, in bytes.
const LONGEST: u64 = 4 << 20;
/// Longest text of an id, in bytes.
const LONGEST_TEXT: usize = 256;
/// Vocabularies are padded by fewer ids than this.
const PADDING: usize = 1024;

/// What is known about a file of ids.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(in crate::data) struct Sidecar {
    /// The type of an id, and the file that says so.
    token_type: Option<(TokenType, PathBuf)>,
    /// The size of the vocabulary, and the file that says so.
    vocab: Option<(usize, PathBuf)>,
    /// The name of the tokenizer, and the file that says so.
    tokenizer: Option<(String, PathBuf)>,
    /// The text of each id, and the file that says so.
    texts: Option<(Vec<Option<String>>, PathBuf)>,
    /// The first id of each document.
    pub(in crate::data) documents: Vec<usize>,
}

/// The contents of `tokens.json`: all of it may be left out.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct TokensJson {
    /// As in `--token-type`.
    token_type: Option<String>,
    /// Number of ids of the vocabulary.
    vocab_size: Option<usize>,
    /// As in `--tokenizer`.
    tokenizer: Option<String>,
}

/// Returns whether a file is one that describes files of ids.
pub(super) fn is_sidecar(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name == META || name == TOKENS)
        || path.extension().is_some_and(|ending| ending == "idx")
            && ["bin", "bin.gz", "bin.zst", "bin.xz", "bin.bz2"]
                .iter()
                .any(|of| path.with_extension(of).is_file())
}

impl Sidecar {
    /// Reads what stands beside a file of `bytes` bytes.
    ///
    /// Errors: [`SourceError::Sidecar`] for a file that is damaged, or that can only be read by executing it.
    pub(in crate::data) fn of(path: &Path, bytes: usize) -> Result<Self, ZooError> {
        let mut known = Self::default();
        let wrong = |beside: &Path, problem| SourceError::Sidecar { path: beside.to_owned(), problem };
        let index = unpacked_name(path).with_extension("idx");
        if let Some(contents) = read(&index, u64::MAX)? {
            known.index(&index, &contents, bytes).map_err(|problem| wrong(&index, problem))?;
        }
        let meta = path.with_file_name(META);
        if let Some(contents) = read(&meta, LONGEST)? {
            known.meta(&meta, &contents).map_err(|problem| wrong(&meta, problem))?;
        }
        let tokens = path.with_file_name(TOKENS);
        if let Some(contents) = read(&tokens, LONGEST)? {
            known.tokens(&tokens, &contents).map_err(|problem| wrong(&tokens, problem))?;
        }
        Ok(known)
    }

    /// Returns the type of ids.
    ///
    /// Errors: [`SourceError::Sidecar`] if the user says another one.
    pub(in crate::data) fn token_type(
        &self,
        given: Option<TokenType>,
    ) -> Result<Option<TokenType>, SourceError> {
        match (&self.token_type, given) {
            (Some((kind, path)), Some(given)) if *kind != given => Err(SourceError::Sidecar {
                path: path.clone(),
                problem: format!("the ids are {kind}, and `--token-type` is {given}: leave it out"),
            }),
            (Some((kind, _)), _) => Ok(Some(*kind)),
            (None, given) => Ok(given),
        }
    }

    /// Checks that the ids are those of a tokenizer, unless their texts are known.
    ///
    /// Errors: [`SourceError::Sidecar`].
    pub(in crate::data) fn check(&self, tokenizer: &dyn Tokenizer) -> Result<(), SourceError> {
        if let Some((name, path)) = &self.tokenizer
            && name != tokenizer.name()
        {
            let own = tokenizer.name();
            let problem = format!("the ids are those of `{name}`, and `--tokenizer` is {own}");
            return Err(SourceError::Sidecar { path: path.clone(), problem });
        }
        let size = tokenizer.vocab_size();
        if let (Some((vocab, path)), None) = (&self.vocab, &self.texts)
            && !(size..size + PADDING).contains(vocab)
        {
            let name = tokenizer.name();
            let problem = format!(
                "the ids are those of a vocabulary of {vocab}, and that of `{name}` has {size}: give the \
                 `--tokenizer` that made them, or the text itself"
            );
            return Err(SourceError::Sidecar { path: path.clone(), problem });
        }
        Ok(())
    }

    /// Returns the text of ids, if a file beside them says what each one is, and that file.
    ///
    /// Errors: [`SourceError::NotTheseTokens`] for an id without a text.
    pub(in crate::data) fn text(
        &self,
        path: &Path,
        ids: impl Iterator<Item = u32>,
    ) -> Result<Option<(Vec<u8>, PathBuf)>, SourceError> {
        let Some((texts, described)) = &self.texts else { return Ok(None) };
        let mut text = Vec::new();
        for (position, id) in ids.enumerate() {
            let Some(Some(of_id)) = texts.get(id as usize) else {
                let problem = format!("id {id} at position {position} is not in `{}`", described.display());
                return Err(SourceError::NotTheseTokens { path: path.to_owned(), problem });
            };
            text.extend_from_slice(of_id.as_bytes());
        }
        Ok(Some((text, described.clone())))
    }

    /// Reads the index of Megatron-LM beside a `.bin` file of `bytes` bytes: the type of ids, then the length
    /// and place of each sequence, then the first sequence of each document.
    ///
    /// Source: `megatron/core/datasets/indexed_dataset.py`.
    fn index(&mut self, path: &Path, contents: &[u8], bytes: usize) -> Result<(), String> {
        let mut rest = contents.strip_prefix(b"MMIDIDX\0\0").ok_or("no index of Megatron's: wrong magic")?;
        let mut number = |width: usize| -> Result<u64, String> {
            let (head, tail) = rest.split_at_checked(width).ok_or("the index ends too early")?;
            rest = tail;
            Ok(head.iter().rev().fold(0, |n, &byte| n << 8 | u64::from(byte)))
        };
        let version = number(8)?;
        if version != 1 {
            return Err(format!("the index has version {version}, expected 1"));
        }
        let kind = match number(1)? {
            1 => TokenType::U8,
            4 => TokenType::I32,
            5 => TokenType::I64,
            8 => TokenType::U16,
            code => return Err(format!("the ids have Megatron's type {code}, expected 1, 4, 5 or 8")),
        };
        let (sequences, documents) = (number(8)?, number(8)?);
        let needed = u128::from(sequences) * 12 + u128::from(documents) * 8;
        if needed > rest.len() as u128 {
            return Err(format!(
                "the index of {sequences} sequences and {documents} documents needs {needed} bytes and has {}",
                rest.len()
            ));
        }
        // Both fit, since the bytes are there.
        let (sequences, documents) = (sequences as usize, documents as usize);
        let (lengths, rest) = rest.split_at(sequences * 4);
        let (places, rest) = rest.split_at(sequences * 8);
        let lengths: Vec<_> = lengths.as_chunks().0.iter().map(|&four| u32::from_le_bytes(four)).collect();
        let places: Vec<_> = places.as_chunks().0.iter().map(|&eight| u64::from_le_bytes(eight)).collect();
        let ids: u64 = lengths.iter().map(|&length| u64::from(length)).sum();
        if ids * kind.bytes() as u64 != bytes as u64 {
            return Err(format!(
                "the index has {ids} ids of {} bytes, and the file beside it {bytes} bytes",
                kind.bytes()
            ));
        }
        for &first in rest[..documents * 8].as_chunks().0 {
            let sequence = u64::from_le_bytes(first);
            let place = places.get(usize::try_from(sequence).unwrap_or(usize::MAX));
            // The last entry is the end of the last document.
            let at = if sequence == sequences as u64 { Some(&(bytes as u64)) } else { place };
            let at = at.filter(|&&at| at <= bytes as u64 && at % kind.bytes() as u64 == 0);
            let at =
                at.ok_or_else(|| format!("a document begins with sequence {sequence} of {sequences}"))?;
            self.documents.push(*at as usize / kind.bytes());
        }
        self.token_type = Some((kind, path.to_owned()));
        Ok(())
    }

    /// Reads nanoGPT's `meta.pkl`: `vocab_size`, and the text of each id (`itos`).
    fn meta(&mut self, path: &Path, contents: &[u8]) -> Result<(), String> {
        let advice = |problem| format!("{problem}: give the text itself, or move this file away");
        let pickle = pickle::read(contents).map_err(advice)?;
        let root = pickle.root();
        let texts =
            pickle.get(root, "itos").map(|itos| texts_of(&pickle, itos)).transpose().map_err(advice)?;
        let vocab = match pickle.get(root, "vocab_size") {
            Some(Value::Int(size)) => Some(*size),
            Some(_) => return Err(advice("`vocab_size` is no number".to_owned())),
            None => None,
        };
        if texts.is_none() && vocab.is_none() {
            return Err(advice("it has neither `itos` nor `vocab_size`".to_owned()));
        }
        let size =
            vocab.map(|size| usize::try_from(size).map_err(|_| advice(format!("`vocab_size` is {size}"))));
        self.vocab = size.transpose()?.map(|size| (size, path.to_owned()));
        self.texts = texts.map(|texts| (texts, path.to_owned()));
        Ok(())
    }

    fn tokens(&mut self, path: &Path, contents: &[u8]) -> Result<(), String> {
        let said: TokensJson = serde_json::from_slice(contents).map_err(|error| error.to_string())?;
        if let Some(name) = said.token_type {
            let kind = name.parse().map_err(|error| format!("`token_type` is `{name}`, {error}"))?;
            if let Some((other, by)) = self.token_type.as_ref().filter(|(other, _)| *other != kind) {
                return Err(format!("`token_type` is {kind}, and `{}` says {other}", by.display()));
            }
            self.token_type = Some((kind, path.to_owned()));
        }
        self.vocab = said.vocab_size.map(|size| (size, path.to_owned())).or(self.vocab.take());
        self.tokenizer = said.tokenizer.map(|name| (name, path.to_owned()));
        Ok(())
    }
}

/// Returns the texts of a dictionary from ids to texts, or of a list of texts.
fn texts_of(pickle: &Pickle, itos: &Value) -> Result<Vec<Option<String>>, String> {
    let mut texts = Vec::new();
    let of_list = (0..).map(Value::Int).zip(pickle.items(itos));
    let of_dict = pickle.entries(itos).map(|(id, text)| (id.clone(), text));
    for (key, value) in of_dict.chain(of_list) {
        let (Value::Int(id), Value::Text(text)) = (&key, value) else {
            return Err("`itos` has an entry that is not from a number to a text".to_owned());
        };
        if text.len() > LONGEST_TEXT {
            return Err(format!(
                "the text of an id in `itos` has {} bytes, at most {LONGEST_TEXT} are read",
                text.len()
            ));
        }
        let id = usize::try_from(*id).ok().filter(|id| *id < 1 << 20);
        let id = id.ok_or_else(|| "`itos` has an id that is negative or above 1048575".to_owned())?;
        if texts.len() <= id {
            texts.resize(id + 1, None);
        }
        texts[id] = Some(text.clone());
    }
    if texts.is_empty() {
        return Err("`itos` is no dictionary from ids to texts".to_owned());
    }
    Ok(texts)
}

/// Reads a file, if it is there.
fn read(path: &Path, longest: u64) -> Result<Option<Vec<u8>>, ZooError> {
    if !path.is_file() {
        return Ok(None);
    }
    let mut contents = Vec::new();
    let file = File::open(path).map_err(ZooError::io("read", path))?;
    file.take(longest.saturating_add(1)).read_to_end(&mut contents).map_err(ZooError::io("read", path))?;
    if contents.len() as u64 > longest {
        let problem = format!("it has more than {longest} bytes: move it away");
        return Err(SourceError::Sidecar { path: path.to_owned(), problem }.into());
    }
    Ok(Some(contents))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tokenizer::Byte;

    /// An index of sequences with these lengths in ids of two bytes, of which these begin documents.
    fn index(lengths: &[u32], documents: &[u64]) -> Vec<u8> {
        let mut bytes = b"MMIDIDX\0\0\x01\0\0\0\0\0\0\0\x08".to_vec();
        bytes.extend((lengths.len() as u64).to_le_bytes());
        bytes.extend((documents.len() as u64).to_le_bytes());
        bytes.extend(lengths.iter().flat_map(|length| length.to_le_bytes()));
        let places = lengths.iter().scan(0_u64, |place, &length| {
            let this = *place;
            *place += 2 * u64::from(length);
            Some(this)
        });
        bytes.extend(places.flat_map(u64::to_le_bytes));
        bytes.extend(documents.iter().flat_map(|document| document.to_le_bytes()));
        bytes
    }

    #[test]
    fn an_index_of_megatron_tells_the_type_and_the_documents() {
        let mut known = Sidecar::default();
        known.index(Path::new("a.idx"), &index(&[3, 4, 5], &[0, 1, 3]), 24).unwrap();
        assert_eq!(known.documents, [0, 3, 12]);
        assert_eq!(known.token_type(None).unwrap(), Some(TokenType::U16));
        let error = known.token_type(Some(TokenType::U32)).unwrap_err().to_string();
        assert!(error.contains("a.idx") && error.contains("u32"), "{error}");
        let good = index(&[3, 4, 5], &[0, 1, 3]);
        for end in 0..good.len() {
            Sidecar::default().index(Path::new("a.idx"), &good[..end], 24).unwrap_err();
        }
        Sidecar::default().index(Path::new("a.idx"), &good, 22).unwrap_err();
        Sidecar::default().index(Path::new("a.idx"), &index(&[3], &[0, 9]), 6).unwrap_err();
        let mut claims = good;
        claims[18..26].copy_from_slice(&u64::MAX.to_le_bytes());
        Sidecar::default().index(Path::new("a.idx"), &claims, 24).unwrap_err();
    }

    #[test]
    fn other_files_name_the_tokenizer() {
        let mut known = Sidecar::default();
        let json = br#"{"token_type": "u32", "tokenizer": "gpt2", "vocab_size": 50257}"#;
        known.tokens(Path::new("tokens.json"), json).unwrap();
        let error = known.check(&Byte).unwrap_err().to_string();
        assert!(error.contains("gpt2") && error.contains("tokens.json"), "{error}");
        Sidecar::default().tokens(Path::new("t"), br#"{"token_typ": "u32"}"#).unwrap_err();
        let mut size = Sidecar::default();
        size.tokens(Path::new("t"), br#"{"vocab_size": 65}"#).unwrap();
        assert!(size.check(&Byte).unwrap_err().to_string().contains("65"));
        size.tokens(Path::new("t"), br#"{"vocab_size": 304}"#).unwrap();
        size.check(&Byte).unwrap();
    }
}
