//! The training data: a text, a folder of texts, or token files, read as one list of tokens with a hash.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use super::encode::{EncodeError, encode};
use super::examples::{Found, Reader, are_examples, is_file_of_examples, objects};
use super::source::{
    Form, Ids, LOOK, Listing, Part, ReadOptions, Reading, Sidecar, Skipped, SourceError, left_out_by_form,
    no_text, refused, text_of, unpack, wrong_at,
};
use super::token_rows::TokenRows;
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
    reading: Arc<Reading>,
    rows: Option<Arc<TokenRows>>,
    /// Whether each token is a target, if the corpus is examples, which its documents are then.
    counts: Option<Arc<[bool]>>,
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
    options: ReadOptions,
    tokens: Tokens,
    hasher: blake3::Hasher,
    files: Vec<usize>,
    reading: Reading,
    /// Whether each token of examples is a target.
    counts: Vec<bool>,
    /// Whether files of lines of JSON are read as such.
    reads_lines: bool,
}

impl<'a> Builder<'a> {
    fn new(tokenizer: &'a dyn Tokenizer, options: ReadOptions) -> Self {
        let tokens = Tokens::for_vocab(tokenizer.vocab_size());
        let (hasher, files, reading) = (blake3::Hasher::new(), Vec::new(), Reading::default());
        Self { tokenizer, options, tokens, hasher, files, reading, counts: Vec::new(), reads_lines: false }
    }

    /// Reads a file of any form. In a folder of texts (`folder`), its text ends with the end-of-text token, and
    /// a compressed file that holds no text is left out.
    fn file(&mut self, path: &Path, folder: Option<&Path>) -> Result<(), ZooError> {
        let mut bytes = read(path)?;
        let mut form = form_of(path, &bytes);
        refused(path, &form)?;
        if let Form::Packed(packing) = form {
            bytes = unpack(path, packing, &bytes)?;
            form = form_of(path, &bytes);
            let why = left_out_by_form(&form, &self.options);
            if let (Some(folder), Some(why)) = (folder, why) {
                let path = path.strip_prefix(folder).unwrap_or(path).to_owned();
                self.reading.skipped.push(Skipped { path, why: format!("{why}, compressed") });
                return Ok(());
            }
            self.reading.packed += 1;
            refused(path, &form)?;
            if let Form::Packed(_) = form {
                let (path, what) = (path.to_owned(), "compressed twice".to_owned());
                let advice = "unpack it once and give that";
                return Err(SourceError::NotText { path, what, advice }.into());
            }
        }
        self.reading.files += 1;
        if form == Form::Tokens {
            return self.token_file(path, &bytes);
        }
        let decoded = text_of(path, bytes, self.options.encoding)?;
        if let Some(name) = decoded.from {
            *self.reading.encodings.entry(name).or_default() += 1;
        }
        if self.reads_lines && is_file_of_examples(path) {
            return self.lines(path, &decoded.text);
        }
        self.text(path, &decoded.text, decoded.mark)?;
        if folder.is_some() {
            self.end_text();
        }
        Ok(())
    }

    /// Adds the texts or the examples of a file of lines.
    fn lines(&mut self, path: &Path, text: &[u8]) -> Result<(), ZooError> {
        let mut reader = Reader::new(self.tokenizer, &self.options);
        for (line, object) in objects(text) {
            let wrong = |problem: String| SourceError::Line { path: path.to_owned(), line, problem };
            let object =
                std::str::from_utf8(object).map_err(|error| wrong(format!("it is no UTF-8 ({error})")))?;
            match reader.read(object).map_err(wrong)? {
                Found::Text(_) if !self.counts.is_empty() => {
                    let problem = "it has a `text`, and others are examples, expected one kind of data";
                    return Err(wrong(problem.to_owned()).into());
                }
                Found::Text(text) => {
                    self.text(path, text.as_bytes(), 0)?;
                    self.end_text();
                }
                Found::Example(_) if self.counts.len() < self.tokens.len() => {
                    let problem = "it is an example, and others are texts, expected one kind of data";
                    return Err(wrong(problem.to_owned()).into());
                }
                Found::Example(example) => {
                    self.files.push(self.tokens.len());
                    self.reading.bytes += object.len() as u64 + 1;
                    self.reading.examples += 1;
                    self.hasher.update(object.as_bytes());
                    self.hasher.update(b"\n");
                    self.tokens.extend(example.ids);
                    self.counts.extend(example.counts);
                }
            }
        }
        Ok(())
    }

    /// Adds a text that follows a byte-order mark of `mark` bytes.
    fn text(&mut self, path: &Path, bytes: &[u8], mark: usize) -> Result<(), ZooError> {
        let mut no_text = no_text(bytes);
        no_text.first = no_text.first.map(|at| at + mark);
        self.reading.add_text(path, bytes.len(), no_text);
        let encoded = match encode(self.tokenizer, bytes, self.options.special_tokens) {
            Ok(encoded) => encoded,
            Err(EncodeError::Tokenizer(error)) => return Err(error),
            Err(EncodeError::NotText(error)) => {
                let at = error.valid_up_to();
                let (byte, is_said) = (bytes.get(at).copied(), self.options.encoding.is_some());
                return Err(wrong_at(path, "UTF-8", at + mark, byte, is_said).into());
            }
        };
        self.reading.lost += self.tokenizer.lost_bytes(bytes);
        for (token, count, is_known) in encoded.plain {
            self.reading.add_plain(token, count, is_known);
        }
        self.hasher.update(bytes);
        self.files.push(self.tokens.len());
        self.tokens.extend(encoded.ids);
        Ok(())
    }

    /// Ends a text, unless it has ended itself.
    fn end_text(&mut self) {
        if let Some(end) = self.tokenizer.end_of_text()
            && self.tokens.last() != Some(end)
        {
            self.tokens.extend([end]);
        }
    }

    fn token_file(&mut self, path: &Path, bytes: &[u8]) -> Result<(), ZooError> {
        let sidecar = Sidecar::of(path, bytes.len())?;
        let ids = Ids::of(path, bytes, sidecar.token_type(self.options.token_type)?)?;
        sidecar.check(self.tokenizer)?;
        ids.check_width(path)?;
        if let Some((text, by)) = sidecar.text(path, ids.iter())? {
            self.reading.decoded_by = Some(by);
            return self.text(path, &text, 0);
        }
        ids.check(path, self.tokenizer)?;
        self.reading.bytes += bytes.len() as u64;
        self.reading.is_ids = true;
        self.hasher.update(bytes);
        let start = self.tokens.len();
        self.files.push(start);
        self.files.extend(sidecar.documents.iter().map(|at| start + at));
        self.tokens.extend(ids.iter());
        Ok(())
    }

    fn finish(self, path: &Path, boundary: Option<usize>) -> Result<Corpus, ZooError> {
        if self.tokens.is_empty() {
            return Err(ZooError::EmptyCorpus { path: path.to_owned() });
        }
        let mut documents = self.files;
        let is_examples = !self.counts.is_empty();
        if let Some(end) = self.tokenizer.end_of_text().filter(|_| !is_examples) {
            documents.extend(self.tokens.positions(end).map(|at| at + 1));
        }
        documents.retain(|&at| at < self.tokens.len());
        documents.sort_unstable();
        documents.dedup();
        let (tokens, hash) = (Arc::new(self.tokens), self.hasher.finalize());
        let reading = Arc::new(self.reading);
        let counts = is_examples.then(|| self.counts.into());
        let documents: Arc<[usize]> = documents.into();
        let boundary = match boundary {
            // A whole number of examples is held out, at least one of several.
            None if is_examples => {
                let kept = ((0.9 * documents.len() as f64).ceil() as usize).min(documents.len() - 1).max(1);
                Some(documents.get(kept).copied().unwrap_or(tokens.len()))
            }
            boundary => boundary,
        };
        Ok(Corpus { tokens, hash, boundary, documents, reading, rows: None, counts })
    }
}

/// Returns what bytes are that were read or unpacked.
fn form_of(path: &Path, bytes: &[u8]) -> Form {
    Form::of(path, &bytes[..bytes.len().min(LOOK)])
}

impl Corpus {
    /// Reads the files of a [`Listing`] with the default options.
    ///
    /// Errors: as [`Corpus::open_with`].
    pub fn open(path: &Path, tokenizer: &dyn Tokenizer) -> Result<Self, ZooError> {
        Self::open_with(path, tokenizer, ReadOptions::default())
    }

    /// Reads the files of a [`Listing`]: texts, which may be compressed, and `.bin` files of ids in nanoGPT's,
    /// llm.c's or Megatron-LM's format. The tokenizer's end-of-text token, if it has one, is added after each
    /// file of a folder of texts.
    ///
    /// Ids are as long as a file beside them says (`tokens.json`, Megatron-LM's `.idx`), or the options. If
    /// nanoGPT's `meta.pkl` beside them says which characters they are, they are turned into text and encoded
    /// again.
    ///
    /// Errors: [`ZooError::Io`], [`ZooError::EmptyCorpus`], [`ZooError::Source`] with what is wrong with a
    /// file, [`ZooError::TokenFile`], [`ZooError::TokenOutOfRange`] for a token outside the tokenizer's
    /// vocabulary.
    pub fn open_with(path: &Path, tokenizer: &dyn Tokenizer, options: ReadOptions) -> Result<Self, ZooError> {
        let Listing { mut files, mut skipped, has_held_out } = Listing::of(path, &options)?;
        let in_folder = path.is_dir();
        let mut builder = Builder::new(tokenizer, options);
        // Beside texts of other kinds, lines of JSON are text.
        builder.reads_lines = are_examples(files.iter().map(|file| file.path.as_path()));
        if builder.reads_lines {
            for file in files.extract_if(.., |file| !is_file_of_examples(&file.path)) {
                let name = file.path.strip_prefix(path).unwrap_or(&file.path).to_owned();
                skipped.push(Skipped { path: name, why: "beside examples".to_owned() });
            }
        }
        builder.reading.skipped = skipped;
        let mut boundary = None;
        for file in files {
            if has_held_out && file.part != Part::Training {
                boundary.get_or_insert(builder.tokens.len());
            }
            builder.file(&file.path, (in_folder && !file.tokens).then_some(path))?;
        }
        builder.finish(path, boundary)
    }

    /// Reads exactly these text files, in this order. The tokenizer's end-of-text token, if it has one, is
    /// added after each file.
    ///
    /// Errors: those of [`Corpus::open`].
    pub fn from_text_files<P: AsRef<Path>>(files: &[P], tokenizer: &dyn Tokenizer) -> Result<Self, ZooError> {
        let mut builder = Builder::new(tokenizer, ReadOptions::default());
        for file in files {
            builder.file(file.as_ref(), Some(Path::new("")))?;
        }
        builder.finish(files.first().map_or(Path::new(""), AsRef::as_ref), None)
    }

    /// Creates a corpus from a text in memory. `name` is used as its path in error messages.
    ///
    /// Errors: [`ZooError::EmptyCorpus`], [`SourceError::Encoding`] if the tokenizer needs text.
    pub fn from_bytes(name: &str, bytes: &[u8], tokenizer: &dyn Tokenizer) -> Result<Self, ZooError> {
        let mut builder = Builder::new(tokenizer, ReadOptions::default());
        builder.text(Path::new(name), bytes, 0)?;
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
        let mut builder = Builder::new(tokenizer, ReadOptions::default());
        for text in texts {
            builder.text(Path::new(name), text, 0)?;
        }
        builder.finish(Path::new(name), None)
    }

    /// Creates a corpus of rows, all of which are both trained on and held out.
    #[must_use]
    pub fn from_rows(rows: TokenRows) -> Self {
        let ids = &rows.rows().inputs;
        let mut tokens = Tokens::for_vocab(usize::MAX);
        tokens.extend(ids.iter().copied());
        let reading = Reading { files: 1, bytes: rows.bytes(), is_ids: true, ..Reading::default() };
        Self {
            tokens: Arc::new(tokens),
            hash: rows.hash(),
            boundary: Some(ids.len()),
            documents: (0..ids.len()).step_by(rows.length()).collect(),
            reading: Arc::new(reading),
            rows: Some(Arc::new(rows)),
            counts: None,
        }
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

    /// Returns what was read.
    #[must_use]
    pub fn reading(&self) -> &Arc<Reading> {
        &self.reading
    }

    /// Returns the BLAKE3 hash of the texts (unpacked, in UTF-8), of the lines of examples and of the files of
    /// ids, in hexadecimal: for plain texts what `b3sum` computes for all of them, concatenated.
    #[must_use]
    pub fn hash(&self) -> String {
        self.hash.to_hex().to_string()
    }

    /// Returns a hash, in hexadecimal, of the tokens and of where the held-out part begins by default; with
    /// `documents` also of where documents begin. Two corpora with one identity train alike.
    #[must_use]
    pub fn identity(&self, documents: bool) -> String {
        let mut hasher = blake3::Hasher::new();
        self.tokens.hash(&mut hasher);
        if self.rows.is_some() {
            // Of rows, the labels count too.
            hasher.update(self.hash.as_bytes());
        }
        if let Some(counts) = &self.counts {
            hasher.update(&counts.iter().map(|&counts| u8::from(counts)).collect::<Vec<_>>());
        }
        let documents = documents || self.counts.is_some();
        hasher.update(&(self.standard_boundary() as u64).to_le_bytes());
        for start in self.documents.iter().filter(|_| documents) {
            hasher.update(&(*start as u64).to_le_bytes());
        }
        hasher.finalize().to_hex().to_string()
    }

    /// Returns the number of tokens to train on with [`HoldOut::Standard`].
    fn standard_boundary(&self) -> usize {
        self.boundary.unwrap_or((0.9 * self.len() as f64) as usize)
    }

    /// Splits the corpus into the training and the held-out part. Rows are both. With [`HoldOut::Standard`] or
    /// a fraction, one of them may be empty.
    ///
    /// Errors: [`ZooError::HoldOut`] if a fraction is not in `[0, 1)`, or a number of tokens is not below that
    /// of the corpus.
    pub fn split(&self, hold_out: HoldOut) -> Result<(Split, Split), ZooError> {
        let n = self.len();
        let training = match hold_out {
            HoldOut::Standard => self.standard_boundary(),
            HoldOut::Fraction(f) if (0.0..1.0).contains(&f) => ((1.0 - f) * n as f64) as usize,
            HoldOut::Fraction(found) => return Err(ZooError::HoldOut { found, tokens: n }),
            HoldOut::Tokens(held) if held < n => n - held,
            HoldOut::Tokens(held) => return Err(ZooError::HoldOut { found: held as f64, tokens: n }),
        };
        let part = |name, range| {
            let (tokens, documents) = (Arc::clone(&self.tokens), Arc::clone(&self.documents));
            Split { name, tokens, range, documents, rows: self.rows.clone(), counts: self.counts.clone() }
        };
        if self.rows.is_some() {
            return Ok((part("training", 0..n), part("held-out", 0..n)));
        }
        Ok((part("training", 0..training), part("held-out", training..n)))
    }
}

fn read(path: &Path) -> Result<Vec<u8>, ZooError> {
    fs::read(path).map_err(ZooError::io("read", path))
}
