//! The training data: a text, a folder of texts, or token files, read as one list of tokens with a hash.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::token_file;
use super::tokens::{Split, Tokens};
use crate::{Tokenizer, ZooError};

/// All tokens of a data set, with the BLAKE3 hash of the bytes that were read.
#[derive(Debug, Clone)]
pub struct Corpus {
    tokens: Arc<Tokens>,
    hash: blake3::Hash,
    /// Start of the held-out part, if the source has separate files for it.
    boundary: Option<usize>,
    /// Start of each document: of each file, and after each end-of-text token. The first is 0.
    documents: Arc<[usize]>,
}

/// Part of a corpus that is kept for validation: always the end.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub enum HoldOut {
    /// The source's own validation files, if it has some. Otherwise training gets the first
    /// `floor(0.9 * tokens)` tokens: 17 of 19, and none of 1. The product is computed in f64, as in nanoGPT.
    #[default]
    Standard,
    /// This fraction, in `[0, 1)`. Training gets the first `floor((1 - fraction) * tokens)` tokens, computed in
    /// f64.
    Fraction(f64),
    /// This number of tokens.
    Tokens(usize),
}

/// Collects the tokens of several files in one list.
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
    /// - a file ending in `.bin`: tokens in nanoGPT's or llm.c's format;
    /// - any other file: text;
    /// - a folder that directly contains `.bin` files: only these files, ordered by name. Files whose name
    ///   contains the word `val`, `valid` or `validation` are the held-out part (`train.bin` and `val.bin`,
    ///   `fineweb_val_000000.bin`);
    /// - any other folder: all text files in it and its subfolders, ordered by relative path. Links are not
    ///   followed, and files with a zero byte in their first 8 KiB are not text. The tokenizer's end-of-text
    ///   token, if it has one, is added after each file.
    ///
    /// Errors: [`ZooError::Io`], [`ZooError::EmptyCorpus`], [`ZooError::NotUtf8`] if the tokenizer needs text,
    /// [`ZooError::TokenFile`], [`ZooError::TokenOutOfRange`] for a token outside the tokenizer's vocabulary.
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

    /// Reads exactly these text files, in this order. The tokenizer's end-of-text token, if it has one, is
    /// added after each file.
    ///
    /// Errors: those of [`Corpus::open`].
    pub fn from_text_files<P: AsRef<Path>>(files: &[P], tokenizer: &dyn Tokenizer) -> Result<Self, ZooError> {
        let mut builder = Builder::new(tokenizer);
        for file in files {
            builder.text(file.as_ref(), &read(file.as_ref())?)?;
            builder.tokens.extend(tokenizer.end_of_text());
        }
        builder.finish(files.first().map_or(Path::new(""), AsRef::as_ref), None)
    }

    /// Creates a corpus from a text in memory. `name` is used as its path in error messages.
    ///
    /// Errors: [`ZooError::EmptyCorpus`], [`ZooError::NotUtf8`].
    pub fn from_bytes(name: &str, bytes: &[u8], tokenizer: &dyn Tokenizer) -> Result<Self, ZooError> {
        let mut builder = Builder::new(tokenizer);
        builder.text(Path::new(name), bytes)?;
        builder.finish(Path::new(name), None)
    }

    /// Creates a corpus from several texts in memory, concatenated without separators. Each text is a document.
    /// `name` is used as their path in error messages.
    ///
    /// Errors: those of [`Corpus::from_bytes`].
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

    /// Returns the number of tokens.
    #[must_use]
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Returns whether there are no tokens. Always false, since empty corpora are errors.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// Returns the BLAKE3 hash of the bytes that were read, in hexadecimal, as `b3sum` computes it for the
    /// concatenated files.
    #[must_use]
    pub fn hash(&self) -> String {
        self.hash.to_hex().to_string()
    }

    /// Splits the corpus into the training and the held-out part. With [`HoldOut::Standard`] or a fraction, one
    /// of them may be empty.
    ///
    /// Errors: [`ZooError::HoldOut`] if a fraction is not in `[0, 1)`, or a number of tokens is not below that
    /// of the corpus.
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

/// Returns whether a word of the file's name says that it is for validation. `interval.bin` is not.
fn is_validation(path: &Path) -> bool {
    let stem = path.file_stem().unwrap_or_default().to_string_lossy();
    let mut words = stem.split(|c: char| !c.is_ascii_alphabetic());
    words.any(|word| ["val", "valid", "validation"].contains(&word))
}

/// Returns whether the bytes look like text: no zero byte near the start, as in grep and git.
fn is_text(bytes: &[u8]) -> bool {
    !bytes[..bytes.len().min(8192)].contains(&0)
}

/// Returns the entries of a folder, ordered by name.
fn list(folder: &Path) -> Result<Vec<PathBuf>, ZooError> {
    let entries = fs::read_dir(folder).map_err(ZooError::io("read folder", folder))?;
    let mut paths = entries
        .map(|entry| entry.map(|e| e.path()).map_err(ZooError::io("read folder", folder)))
        .collect::<Result<Vec<_>, _>>()?;
    paths.sort();
    Ok(paths)
}

/// Adds all regular files in `folder` and its subfolders.
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
