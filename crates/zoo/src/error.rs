//! Errors of the zoo: invalid shapes, files and data. Each error names the file, tensor or field.

use std::path::PathBuf;

use crate::data::SourceError;
use crate::file_kind::{Compression, FileKind};
use crate::tokenizer::NAMES;

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ZooError {
    /// A size of a [`ModelSpec`](crate::ModelSpec), a range of layers or a sequence length is out of bounds.
    #[error("model `{field}` is {value}, expected {expected}")]
    Config {
        /// Name of the field.
        field: &'static str,
        /// Value of the field.
        value: usize,
        /// Allowed values.
        expected: &'static str,
    },
    /// A number of a [`ModelSpec`](crate::ModelSpec) is out of bounds.
    #[error("model `{field}` is {value}, expected {expected}")]
    RealField {
        /// Name of the field.
        field: &'static str,
        /// Value of the field.
        value: f64,
        /// Allowed values.
        expected: &'static str,
    },
    /// A stage was called with the wrong kind of input.
    #[error("stage: expected {expected}")]
    StageInput {
        /// The expected input.
        expected: &'static str,
    },
    /// A sampling setting is out of bounds.
    #[error("sampling `{field}` is {value}, expected temperature >= 0 and 0 < top_p <= 1")]
    Sampling {
        /// Name of the setting.
        field: &'static str,
        /// Value of the setting.
        value: f32,
    },
    /// An exchange with the other ranks along an axis failed.
    #[error("the exchange along the axis {axis} failed")]
    Exchange {
        /// The axis.
        axis: farflung_base::Axis,
        /// The cause.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A tensor op failed.
    #[error(transparent)]
    Tensor(#[from] farflung_tensor::TensorError),
    /// No preset has this name.
    #[error("unknown model preset `{name}`, expected one of {}", join(known.iter().copied()))]
    UnknownPreset {
        /// The name requested.
        name: String,
        /// The names of the presets.
        known: Vec<&'static str>,
    },
    /// No tokenizer has this name.
    #[error("unknown tokenizer `{name}`, expected one of {}", join(NAMES.iter().copied()))]
    UnknownTokenizer {
        /// The name requested.
        name: String,
    },
    /// The description of a tokenizer is wrong, or it cannot encode a text.
    #[error("tokenizer `{name}`: {problem}")]
    Tokenizer {
        /// Path of its file or folder.
        name: String,
        /// What is wrong.
        problem: String,
    },
    /// An option for the training of a tokenizer is out of bounds.
    #[error("`{field}` is {value}, expected {expected}")]
    TokenizerOption {
        /// The option.
        field: &'static str,
        /// Its value.
        value: String,
        /// What it should be.
        expected: String,
    },
    /// A conversation or its template cannot be used.
    #[error("{what}: {problem}")]
    Chat {
        /// The template, or a part of a conversation.
        what: String,
        /// What is wrong.
        problem: String,
    },
    /// A token id is not in the vocabulary.
    #[error(
        "token {token} at position {position}{} is not below the vocabulary size {vocab}",
        of(path.as_ref())
    )]
    TokenOutOfRange {
        /// File that contains the token, if any.
        path: Option<PathBuf>,
        /// Index of the token.
        position: usize,
        /// The token id.
        token: u32,
        /// Size of the vocabulary.
        vocab: usize,
    },
    /// A file operation failed.
    #[error("failed to {action} `{}`", path.display())]
    Io {
        /// The operation, such as `read` or `write`.
        action: &'static str,
        /// Path of the file.
        path: PathBuf,
        /// Error of the operating system.
        source: std::io::Error,
    },
    /// The file or folder contains no data.
    #[error("`{}` contains no data", path.display())]
    EmptyCorpus {
        /// Path of the file or folder.
        path: PathBuf,
    },
    /// A file or folder cannot be used as training data.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// The header or the length of a token file is wrong.
    #[error("token file `{}`: {field} is {found}, expected {expected}", path.display())]
    TokenFile {
        /// Path of the file.
        path: PathBuf,
        /// Field of the header, or the file's length.
        field: &'static str,
        /// Value in the file.
        found: u64,
        /// Value required.
        expected: u64,
    },
    /// The length of a file of recorded offsets is not a whole number of rows.
    #[error(
        "file of recorded offsets `{}`: the length is {found} bytes, expected a multiple of {row} (8 bytes for \
         each sequence of a step)",
        path.display()
    )]
    OffsetsLength {
        /// Path of the file.
        path: PathBuf,
        /// Length of the file in bytes.
        found: u64,
        /// Bytes of the offsets of one step.
        row: u64,
    },
    /// A split is too short for one sequence with its targets.
    #[error("the {split} split has {tokens} tokens, expected at least {needed} (context + 1)")]
    TooShort {
        /// `training` or `held-out`.
        split: &'static str,
        /// Number of tokens of the split.
        tokens: usize,
        /// Number of tokens required: context + 1.
        needed: usize,
    },
    /// The text has fewer parts than there are replicas, so not every replica gets one.
    #[error(
        "the training data has {found} parts of more than {context} tokens when it is divided by `{kind}`, \
         expected at least one for each of the {replicas} replicas"
    )]
    Shards {
        /// How the text is divided.
        kind: String,
        /// Number of parts.
        found: usize,
        /// Number of replicas.
        replicas: usize,
        /// Number of tokens of a sequence.
        context: usize,
    },
    /// The held-out share is invalid, or leaves no training data.
    #[error(
        "the hold-out is {found} of {tokens} tokens, expected a fraction in [0, 1), or fewer tokens than \
         there are"
    )]
    HoldOut {
        /// Fraction or number of tokens requested.
        found: f64,
        /// Number of tokens available.
        tokens: usize,
    },
    /// A field of a sampler is out of bounds.
    #[error("sampler `{field}` is {value}, expected {expected}")]
    Sampler {
        /// Name of the field.
        field: &'static str,
        /// Value of the field.
        value: usize,
        /// Allowed values.
        expected: String,
    },
    /// The recorded list of offsets has no row for this step.
    #[error("no recorded offsets for step {step}, the list has {steps} steps")]
    StepNotRecorded {
        /// The step requested.
        step: u64,
        /// Number of steps in the list.
        steps: u64,
    },
    /// A recorded offset is too close to the end of the text for a sequence.
    #[error("recorded offset {offset} at index {index} is out of range, expected 0 to {last}")]
    OffsetOutOfRange {
        /// Index of the offset in the list.
        index: usize,
        /// The recorded offset.
        offset: i64,
        /// Greatest valid offset.
        last: usize,
    },
    /// A link leads to a file that does not exist, as in a copy of a cache without the files behind its links.
    #[error("`{}` is a link to `{}`, which does not exist", path.display(), target.display())]
    DeadLink {
        /// Path of the link.
        path: PathBuf,
        /// What it leads to.
        target: PathBuf,
    },
    /// A file is of another kind than its name says.
    #[error("`{}` is {kind}, expected {expected}: {}", path.display(), kind.advice())]
    WrongFile {
        /// Path of the file.
        path: PathBuf,
        /// What it is.
        kind: FileKind,
        /// What it should be.
        expected: &'static str,
    },
    /// A folder has no weights that can be read.
    #[error(
        "`{}` has no model.safetensors{}: {}",
        folder.display(), besides(found), found.first().map_or(NO_WEIGHTS, |name| of_another_format(name))
    )]
    NoWeights {
        /// The folder.
        folder: PathBuf,
        /// Names of other files of weights in it.
        found: Vec<String>,
    },
    /// A folder has several files of weights, and none has the usual name.
    #[error(
        "`{}` has no model.safetensors, but {}: give the path of one of these files",
        folder.display(), join(found.iter().map(String::as_str))
    )]
    SeveralWeights {
        /// The folder.
        folder: PathBuf,
        /// Names of the files.
        found: Vec<String>,
    },
    /// The header of a safetensors file is invalid.
    #[error("safetensors file `{}`: header {problem}", path.display())]
    Header {
        /// Path of the file.
        path: PathBuf,
        /// Description of the problem.
        problem: String,
    },
    /// The description in a GGUF file is invalid.
    #[error("GGUF file `{}` {problem}", path.display())]
    Gguf {
        /// Path of the file.
        path: PathBuf,
        /// Description of the problem.
        problem: String,
    },
    /// A tensor's entry in a header is inconsistent with itself, another entry or the file, or the tensor is
    /// not one of the model.
    #[error("`{}`: tensor `{tensor}` {problem}", path.display())]
    TensorEntry {
        /// Path of the file.
        path: PathBuf,
        /// Name of the tensor.
        tensor: String,
        /// Description of the problem.
        problem: String,
    },
    /// A file of rows of tokens is invalid, or its rows do not fit.
    #[error("`{}`: {problem}", path.display())]
    Rows {
        /// Path of the file.
        path: PathBuf,
        /// Description of the problem.
        problem: String,
    },
    /// A tensor is missing.
    #[error("`{}` has no tensor `{tensor}`", path.display())]
    NoTensor {
        /// Path of the file or folder.
        path: PathBuf,
        /// Name of the tensor.
        tensor: String,
    },
    /// The shape of a tensor differs from the model's.
    #[error("`{}`: tensor `{tensor}` has shape {found:?}, expected {expected:?}", path.display())]
    TensorShape {
        /// Path of the file.
        path: PathBuf,
        /// Name of the tensor.
        tensor: String,
        /// Shape in the file.
        found: Vec<usize>,
        /// Shape requested.
        expected: Vec<usize>,
    },
    /// The element type of a tensor cannot be converted to the requested one.
    #[error("`{}`: tensor `{tensor}` has type {found}, expected {expected}", path.display())]
    TensorDtype {
        /// Path of the file.
        path: PathBuf,
        /// Name of the tensor.
        tensor: String,
        /// Element type in the file.
        found: String,
        /// Element types that can be read.
        expected: &'static str,
    },
    /// A JSON file is not valid JSON.
    #[error("`{}` is not valid JSON", path.display())]
    Json {
        /// Path of the file.
        path: PathBuf,
        /// Error of the parser.
        source: serde_json::Error,
    },
    /// A field of a JSON file is missing or has an unsupported value.
    #[error("`{}`: `{field}` is {found}, expected {expected}", path.display())]
    JsonField {
        /// Path of the file.
        path: PathBuf,
        /// Name of the field.
        field: String,
        /// Value of the field, or `missing`.
        found: String,
        /// Supported values.
        expected: String,
    },
}

/// Formats names in backquotes, separated by commas.
fn join<'a>(names: impl Iterator<Item = &'a str>) -> String {
    names.map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ")
}

/// Returns ` of FILE`, or an empty string.
fn of(path: Option<&PathBuf>) -> String {
    path.map(|p| format!(" of `{}`", p.display())).unwrap_or_default()
}

/// Advice for a folder without any weights.
const NO_WEIGHTS: &str = "expected it, or model.safetensors.index.json with its shards";

/// Returns the advice for weights of another format, by the name of their file.
fn of_another_format(name: &str) -> &'static str {
    match name.rsplit_once('.').map_or("", |(_, extension)| extension) {
        "bin" | "pt" | "pth" | "ckpt" => FileKind::Pickle.advice(),
        "gz" | "zst" => FileKind::Compressed(Compression::Gzip).advice(),
        "safetensors" => "all parts of the model are needed; download the folder again",
        "gguf" => FileKind::Gguf.advice(),
        _ => FileKind::Numpy.advice(),
    }
}

/// Returns `, but NAMES`, or an empty string.
fn besides(found: &[String]) -> String {
    if found.is_empty() { String::new() } else { format!(", but {}", join(found.iter().map(String::as_str))) }
}

impl ZooError {
    /// Returns a function for `map_err` of opening a file, which tells a link without its file from no file.
    pub(crate) fn open(path: &std::path::Path) -> impl FnOnce(std::io::Error) -> Self {
        move |source| match path.read_link() {
            Ok(target) if source.kind() == std::io::ErrorKind::NotFound => {
                Self::DeadLink { path: path.to_owned(), target }
            }
            _ => Self::Io { action: "read", path: path.to_owned(), source },
        }
    }

    /// Returns a function for `map_err` of a file operation.
    pub(crate) fn io(action: &'static str, path: &std::path::Path) -> impl FnOnce(std::io::Error) -> Self {
        move |source| Self::Io { action, path: path.to_owned(), source }
    }
}
