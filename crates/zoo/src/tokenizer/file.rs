//! Tokenizers of model folders and GGUF files, run by the crate `tokenizers`.

mod beside;
mod check;
mod cut;
mod gguf;
mod train;

use std::borrow::Cow;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use serde_json::Value;

use super::{Affixes, Marks, SpecialToken, Tokenizer};
use crate::file_kind::FileKind;
use crate::{ZooError, json_file};
use beside::Beside;
use cut::Cuts;
pub use train::TrainOptions;

/// The file of a tokenizer.
const TOKENIZER: &str = "tokenizer.json";
/// Number of pieces of a long text that are encoded together, each by any of the cores.
const PIECES: usize = 64;

/// A tokenizer that is described by a `tokenizer.json`, as Hugging Face's programs write it, or by a GGUF file.
///
/// It encodes as the crate `tokenizers` does, but never truncates, pads or drops merges at random, whatever the
/// file says. Descriptions come from anywhere, so what could make the crate fail or grow texts without bound is
/// refused when they are read.
#[derive(Debug, Clone)]
pub struct FileTokenizer {
    /// `tokenizer.json-` and a part of the hash of the description and of the end token, which tells it from
    /// others wherever it lies.
    name: String,
    /// Where it was read, for messages.
    path: String,
    /// Reads special tokens in a text as plain text.
    plain: tokenizers::Tokenizer,
    /// Reads them as tokens.
    marked: tokenizers::Tokenizer,
    vocab: usize,
    spare: usize,
    special: Vec<SpecialToken>,
    affixes: Affixes,
    cuts: Cuts,
    /// Bytes for which there is no token.
    lost: Vec<u8>,
    /// The text of the description.
    json: Vec<u8>,
    beside: Beside,
    end: Option<u32>,
}

/// Calls the library, which panics for some descriptions and texts that pass the checks.
fn guarded<T, E: std::fmt::Display>(call: impl FnOnce() -> Result<T, E>) -> Result<T, String> {
    match catch_unwind(AssertUnwindSafe(call)) {
        Ok(done) => done.map_err(|error| error.to_string()),
        Err(_) => Err("the library `tokenizers` failed on it".to_owned()),
    }
}

fn wrong(path: &str, problem: String) -> ZooError {
    ZooError::Tokenizer { name: path.to_owned(), problem }
}

impl FileTokenizer {
    /// Opens the tokenizer of a model's folder, of a `tokenizer.json` (with what stands beside it), or of a
    /// GGUF file.
    ///
    /// Errors: [`ZooError::Io`], [`ZooError::Json`], [`ZooError::Gguf`]; [`ZooError::Tokenizer`] for a
    /// description that is wrong, or of a kind that is not read.
    pub fn open(path: &Path) -> Result<Self, ZooError> {
        let from = path.display().to_string();
        if path.is_file() && FileKind::of_file(path) == Some(FileKind::Gguf) {
            let (description, beside) = gguf::described(path)?;
            return Self::new(&from, description, None, beside);
        }
        let (file, folder) = if path.is_dir() {
            (path.join(TOKENIZER), path.to_owned())
        } else {
            let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
            (path.to_owned(), parent.unwrap_or(Path::new(".")).to_owned())
        };
        Self::from_files(&from, |wanted| {
            let path = if wanted == TOKENIZER { file.clone() } else { folder.join(wanted) };
            match json_file::bytes(&path) {
                Err(ZooError::Io { source, .. })
                    if wanted != TOKENIZER && source.kind() == std::io::ErrorKind::NotFound =>
                {
                    Ok(None)
                }
                read => read.map(Some),
            }
        })
    }

    /// Makes a tokenizer of the contents of files: `read` returns that of the one with the given name; `None`
    /// if it is not there. `path` is where they are, for messages.
    ///
    /// Errors: those of `read`, and as [`FileTokenizer::open`].
    pub fn from_files<E: From<ZooError>>(
        path: &str,
        read: impl Fn(&'static str) -> Result<Option<Vec<u8>>, E>,
    ) -> Result<Self, E> {
        let missing = || wrong(path, format!("there is no {TOKENIZER}"));
        let json = read(TOKENIZER)?.ok_or_else(missing)?;
        let description = json_file::from_bytes(Path::new(path), &json)?;
        let beside = Beside::of(path, &read)?;
        Ok(Self::new(path, description, Some(json), beside)?)
    }

    /// `json` is the text of the description; `None` writes it anew.
    fn new(
        path: &str,
        mut description: Value,
        json: Option<Vec<u8>>,
        beside: Beside,
    ) -> Result<Self, ZooError> {
        let wrong = |problem: String| wrong(path, problem);
        let lost = check::check(&mut description).map_err(&wrong)?;
        let json = json.unwrap_or_else(|| description.to_string().into_bytes());
        let cuts = Cuts::of(&description, check::is_byte_level(&description));
        let mut hasher = blake3::Hasher::new();
        hasher.update(description.to_string().as_bytes());
        let added = check::added_tokens(&description).map_err(&wrong)?;
        let read = || serde_json::from_value::<tokenizers::Tokenizer>(description);
        let marked = guarded(read).map_err(&wrong)?;
        for token in &added {
            let found = marked.token_to_id(&token.text);
            if found != Some(token.id) {
                let found = found.map_or_else(|| "none".to_owned(), |id| id.to_string());
                let text = &token.text;
                return Err(wrong(format!(
                    "the added token {text:?} has the id {}, expected {found}",
                    token.id
                )));
            }
        }
        let mut plain = marked.clone();
        plain.set_encode_special_tokens(true);
        let largest = marked.get_vocab(true).into_values().max();
        let vocab = largest.map_or(0, |id| id as usize + 1);
        let is_added = |id: usize| added.iter().any(|token| token.id as usize == id);
        let spare = (0..vocab).rev().take_while(|&id| is_added(id)).count();
        let special: Vec<SpecialToken> =
            added.into_iter().filter(|token| token.is_special).map(Into::into).collect();
        let end = beside.end(&special);
        let affixes = Affixes::default();
        hasher.update(format!("{end:?}").as_bytes());
        let name = format!("{TOKENIZER}-{}", &hasher.finalize().to_hex()[..16]);
        let path = path.to_owned();
        let mut this =
            Self { name, path, plain, marked, vocab, spare, special, affixes, cuts, lost, json, beside, end };
        this.affixes = this.find_affixes()?;
        this.cuts = this.cuts.tried(|text| this.whole(&this.plain, text))?;
        Ok(this)
    }

    fn wrong(&self, problem: impl std::fmt::Display) -> ZooError {
        wrong(&self.path, problem.to_string())
    }

    /// Finds what the tokenizer adds around a text.
    fn find_affixes(&self) -> Result<Affixes, ZooError> {
        const TEXT: &str = "a";
        let encoded = |add| -> Result<Vec<u32>, ZooError> {
            let encoded = guarded(|| self.plain.encode_fast(TEXT, add)).map_err(|error| self.wrong(error))?;
            Ok(encoded.get_ids().to_vec())
        };
        let (with, without) = (encoded(true)?, encoded(false)?);
        let at = with.windows(without.len().max(1)).position(|ids| ids == without);
        let (Some(at), false) = (at, without.is_empty()) else {
            return Err(self.wrong("its post-processor changes the tokens of a text"));
        };
        if let Some(id) = with.iter().find(|id| **id as usize >= self.vocab) {
            return Err(self.wrong(format!("its post-processor adds the id {id}, which it has no token for")));
        }
        Ok(Affixes { before: with[..at].to_vec(), after: with[at + without.len()..].to_vec() })
    }

    /// Encodes a text at once.
    fn whole(&self, by: &tokenizers::Tokenizer, text: &str) -> Result<Vec<u32>, ZooError> {
        let encoded = guarded(|| by.encode_fast(text, false)).map_err(|error| self.wrong(error))?;
        Ok(encoded.get_ids().to_vec())
    }

    /// Encodes a text in pieces, where cuts change nothing.
    fn in_pieces(&self, by: &tokenizers::Tokenizer, text: &str) -> Result<Vec<u32>, ZooError> {
        let pieces = self.cuts.pieces(text);
        if let [piece] = pieces[..] {
            return self.whole(by, piece);
        }
        let mut ids = Vec::new();
        for some in pieces.chunks(PIECES) {
            let encoded = guarded(|| by.encode_batch_fast(some.to_vec(), false));
            let encoded = encoded.map_err(|error| self.wrong(error))?;
            ids.extend(encoded.iter().flat_map(tokenizers::Encoding::get_ids));
        }
        Ok(ids)
    }
}

impl Tokenizer for FileTokenizer {
    fn name(&self) -> &str {
        &self.name
    }

    fn vocab_size(&self) -> usize {
        self.vocab
    }

    /// The `eos_token` of the files beside it; without one, a special token of a known text.
    fn end_of_text(&self) -> Option<u32> {
        self.end
    }

    fn ends(&self) -> Vec<u32> {
        let mut ends: Vec<u32> =
            self.end.into_iter().chain(self.beside.ends_of_model.iter().copied()).collect();
        ends.sort_unstable();
        ends.dedup();
        ends
    }

    fn spare_ids(&self) -> usize {
        self.spare
    }

    fn special_tokens(&self) -> &[SpecialToken] {
        &self.special
    }

    fn affixes(&self) -> Affixes {
        self.affixes.clone()
    }

    /// A text of more than 64 KiB is encoded in pieces, which several cores share. It is cut at white space
    /// between letters or digits, where that changes nothing, and within a run of more than 131072 characters
    /// of white space.
    fn encode(&self, text: &str) -> Result<Vec<u32>, ZooError> {
        self.in_pieces(&self.plain, text)
    }

    fn encode_marked(&self, text: &str) -> Result<Vec<u32>, ZooError> {
        self.in_pieces(&self.marked, text)
    }

    fn lost_bytes(&self, text: &[u8]) -> u64 {
        if self.lost.is_empty() {
            return 0;
        }
        let mut is_lost = [false; 256];
        self.lost.iter().for_each(|&byte| is_lost[usize::from(byte)] = true);
        text.iter().filter(|&&byte| is_lost[usize::from(byte)]).count() as u64
    }

    /// Bytes that are no character become U+FFFD.
    fn decode(&self, tokens: &[u32]) -> Result<Vec<u8>, ZooError> {
        if let Some(position) = tokens.iter().position(|&token| token as usize >= self.vocab) {
            let (token, vocab) = (tokens[position], self.vocab);
            return Err(ZooError::TokenOutOfRange { path: None, position, token, vocab });
        }
        let decoded = guarded(|| self.marked.decode(tokens, false)).map_err(|error| self.wrong(error))?;
        Ok(decoded.into_bytes())
    }

    fn chat_template(&self) -> Option<&str> {
        self.beside.chat_template.as_deref()
    }

    fn marks(&self) -> Marks<'_> {
        Marks {
            begin: self.beside.begin.as_deref().unwrap_or(""),
            end: self.beside.end.as_deref().unwrap_or(""),
        }
    }

    fn files(&self) -> Vec<(&'static str, Cow<'_, [u8]>)> {
        let own = (TOKENIZER, Cow::Borrowed(&self.json[..]));
        std::iter::once(own).chain(self.beside.files()).collect()
    }
}
