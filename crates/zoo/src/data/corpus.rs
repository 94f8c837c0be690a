//! What there is to train on: a text, a folder of texts, or token files, as one list of tokens with its hash.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::token_file;
use super::tokens::{Split, Tokens};
use crate::{Tokenizer, ZooError};

/// All tokens of a data set, and the BLAKE3 hash of the bytes they were read from.
#[derive(Debug, Clone)]
pub struct Corpus {
    tokens: Arc<Tokens>,
    hash: blake3::Hash,
    /// Where the held-out part begins, for a source that has files of its own for it.
    boundary: Option<usize>,
    /// Where documents begin: each file, and what follows an end-of-text token; the first is 0.
    documents: Arc<[usize]>,
}

/// How much of a corpus is kept for validation. What is held out is always the end.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub enum HoldOut {
    /// The source's own validation files where it has some; else training gets the first `floor(0.9 * tokens)`
    /// tokens, so that of 19 it gets 17 and of a single one none. The product is an f64, as in nanoGPT.
    #[default]
    Standard,
    /// This fraction, in `[0, 1)`; training gets the first `floor((1 - fraction) * tokens)` tokens, both
    /// products of f64.
    Fraction(f64),
    /// This many tokens.
    Tokens(usize),
}

/// Gathers the tokens of several files into one list.
struct Builder<'a> {
    tokenizer: &'a dyn Tokenizer,
    tokens: Tokens,
    hasher: blake3::Hasher,
    files: Vec<usize>,
}

impl<'a> Builder<'a> {
    fn new(tokenizer: &'a dyn Tokenizer) -> Self {
        let tokens = Tokens::for_vocab(tokenizer.vocab_size());
        Self { tokenizer, tokens, hasher: blake3::Hasher::new(), files: Vec::new() }
    }

    fn text(&mut self, path: &Path, bytes: &[u8]) -> Result<(), ZooError> {
        let ids = self
            .tokenizer
            .encode_bytes(bytes)
            .map_err(|e| ZooError::NotUtf8 { path: path.to_owned(), offset: e.valid_up_to() })?;
        self.hasher.update(bytes);
        self.files.push(self.tokens.len());
        self.tokens.extend(ids);
        Ok(())
    }

    fn token_file(&mut self, path: &Path, bytes: &[u8]) -> Result<(), ZooError> {
        let vocab = self.tokenizer.vocab_size();
        let out_of_range = token_file::read(path, bytes)?.enumerate().find(|&(_, id)| id as usize >= vocab);
        if let Some((position, token)) = out_of_range {
            return Err(ZooError::TokenOutOfRange { path: Some(path.to_owned()), position, token, vocab });
        }
        self.hasher.update(bytes);
        self.files.push(self.tokens.len());
        self.tokens.extend(token_file::read(path, bytes)?);
        Ok(())
    }

    fn finish(self, path: &Path, boundary: Option<usize>) -> Result<Corpus, ZooError> {
        if self.tokens.is_empty() {
            return Err(ZooError::EmptyCorpus { path: path.to_owned() });
        }
        let mut documents = self.files;
        if let Some(end) = self.tokenizer.end_of_text() {
            documents.extend(self.tokens.positions(end).map(|at| at + 1));
        }
        documents.retain(|&at| at < self.tokens.len());
        documents.sort_unstable();
        documents.dedup();
        let (tokens, hash) = (Arc::new(self.tokens), self.hasher.finalize());
        Ok(Corpus { tokens, hash, boundary, documents: documents.into() })
    }
}

impl Corpus {
    /// Reads a data set:
    ///
    /// - a file ending in `.bin`: tokens, nanoGPT's or llm.c's;
    /// - any other file: text;
    /// - a folder with `.bin` files directly in it: these and nothing else, in the order of their names; those
    ///   with `val` in the name are the held-out part (`train.bin` and `val.bin`, `fineweb_val_000000.bin`);
    /// - any other folder: every text file below it, in the order of their relative paths. Links are not
    ///   followed, and files with a zero byte in their first 8 KiB are not text. After each file stands the
    ///   tokenizer's end of text, if it has one.
    ///
    /// Errors: [`ZooError::Io`], [`ZooError::EmptyCorpus`], [`ZooError::NotUtf8`] for a tokenizer that needs
    /// text, [`ZooError::TokenFile`], [`ZooError::TokenOutOfRange`] for a token that is not in the tokenizer's
    /// vocabulary.
    pub fn open(path: &Path, tokenizer: &dyn Tokenizer) -> Result<Self, ZooError> {
        if !fs::metadata(path).map_err(ZooError::io("read", path))?.is_dir() {
            let mut builder = Builder::new(tokenizer);
            let bytes = read(path)?;
            if is_bin(path) {
                builder.token_file(path, &bytes)?;
            } else {
                builder.text(path, &bytes)?;
            }
            return builder.finish(path, None);
        }
        let bins: Vec<_> = list(path)?.into_iter().filter(|p| is_bin(p) && p.is_file()).collect();
        if !bins.is_empty() {
            return Self::from_token_files(path, bins, tokenizer);
        }
        let mut files = Vec::new();
        walk(path, &mut files)?;
        files.sort();
        let mut builder = Builder::new(tokenizer);
        for file in files {
            let bytes = read(&file)?;
            if is_text(&bytes) {
                builder.text(&file, &bytes)?;
                builder.tokens.extend(tokenizer.end_of_text());
            }
        }
        builder.finish(path, None)
    }

    fn from_token_files(
        folder: &Path,
        files: Vec<PathBuf>,
        tokenizer: &dyn Tokenizer,
    ) -> Result<Self, ZooError> {
        let (held_out, training): (Vec<_>, Vec<_>) = files.into_iter().partition(|p| is_validation(p));
        let mut builder = Builder::new(tokenizer);
        for file in &training {
            builder.token_file(file, &read(file)?)?;
        }
        let boundary = (!held_out.is_empty()).then_some(builder.tokens.len());
        for file in &held_out {
            builder.token_file(file, &read(file)?)?;
        }
        builder.finish(folder, boundary)
    }

    /// The texts of exactly these files, in this order, each followed by the tokenizer's end of text, if it has
    /// one.
    ///
    /// Errors: as [`Corpus::open`].
    pub fn from_text_files<P: AsRef<Path>>(files: &[P], tokenizer: &dyn Tokenizer) -> Result<Self, ZooError> {
        let mut builder = Builder::new(tokenizer);
        for file in files {
            builder.text(file.as_ref(), &read(file.as_ref())?)?;
            builder.tokens.extend(tokenizer.end_of_text());
        }
        builder.finish(files.first().map_or(Path::new(""), AsRef::as_ref), None)
    }

    /// A text in memory; `name` stands for the path in messages.
    ///
    /// Errors: [`ZooError::EmptyCorpus`], [`ZooError::NotUtf8`].
    pub fn from_bytes(name: &str, bytes: &[u8], tokenizer: &dyn Tokenizer) -> Result<Self, ZooError> {
        let mut builder = Builder::new(tokenizer);
        builder.text(Path::new(name), bytes)?;
        builder.finish(Path::new(name), None)
    }

    /// Several texts in memory, one after the other with nothing between them, each a document; `name` stands
    /// for the path in messages.
    ///
    /// Errors: as [`Corpus::from_bytes`].
    pub fn from_texts<'t>(
        name: &str,
        texts: impl IntoIterator<Item = &'t [u8]>,
        tokenizer: &dyn Tokenizer,
    ) -> Result<Self, ZooError> {
        let mut builder = Builder::new(tokenizer);
        for text in texts {
            builder.text(Path::new(name), text)?;
        }
        builder.finish(Path::new(name), None)
    }

    /// Number of tokens.
    #[must_use]
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Whether there are none; never, for a corpus that was read.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// BLAKE3 of the bytes that were read, in hexadecimal: what `b3sum` says of the files one after the other.
    #[must_use]
    pub fn hash(&self) -> String {
        self.hash.to_hex().to_string()
    }

    /// The training and the held-out part; what is cut off by [`HoldOut::Standard`] or a fraction may leave one
    /// empty.
    ///
    /// Errors: [`ZooError::HoldOut`] for a fraction that is not in `[0, 1)`, or a number of tokens that is not
    /// below those there are.
    pub fn split(&self, hold_out: HoldOut) -> Result<(Split, Split), ZooError> {
        let n = self.len();
        let training = match hold_out {
            HoldOut::Standard => self.boundary.unwrap_or((0.9 * n as f64) as usize),
            HoldOut::Fraction(f) if (0.0..1.0).contains(&f) => ((1.0 - f) * n as f64) as usize,
            HoldOut::Fraction(found) => return Err(ZooError::HoldOut { found, tokens: n }),
            HoldOut::Tokens(held) if held < n => n - held,
            HoldOut::Tokens(held) => return Err(ZooError::HoldOut { found: held as f64, tokens: n }),
        };
        let part = |name, range| {
            let (tokens, documents) = (Arc::clone(&self.tokens), Arc::clone(&self.documents));
            Split { name, tokens, range, documents }
        };
        Ok((part("training", 0..training), part("held-out", training..n)))
    }
}

fn read(path: &Path) -> Result<Vec<u8>, ZooError> {
    fs::read(path).map_err(ZooError::io("read", path))
}

fn is_bin(path: &Path) -> bool {
    path.extension().is_some_and(|e| e == "bin")
}

fn is_validation(path: &Path) -> bool {
    path.file_stem().is_some_and(|stem| stem.to_string_lossy().contains("val"))
}

/// Whether these bytes look like text: no zero byte near the start, as grep and git decide it.
fn is_text(bytes: &[u8]) -> bool {
    !bytes[..bytes.len().min(8192)].contains(&0)
}

/// The entries of a folder in the order of their names.
fn list(folder: &Path) -> Result<Vec<PathBuf>, ZooError> {
    let entries = fs::read_dir(folder).map_err(ZooError::io("read folder", folder))?;
    let mut paths = entries
        .map(|entry| entry.map(|e| e.path()).map_err(ZooError::io("read folder", folder)))
        .collect::<Result<Vec<_>, _>>()?;
    paths.sort();
    Ok(paths)
}

/// Adds all regular files below `folder`.
fn walk(folder: &Path, files: &mut Vec<PathBuf>) -> Result<(), ZooError> {
    for path in list(folder)? {
        let kind = fs::symlink_metadata(&path).map_err(ZooError::io("read", &path))?.file_type();
        if kind.is_dir() {
            walk(&path, files)?;
        } else if kind.is_file() {
            files.push(path);
        }
    }
    Ok(())
}
