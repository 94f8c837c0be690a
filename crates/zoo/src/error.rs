//! What can go wrong in the zoo: bad shapes, bad files, bad data. Each error says which file, tensor or field.

use std::path::PathBuf;

use crate::config::PRESETS;
use crate::tokenizer::NAMES;

/// Why the zoo refused something. Messages complete "failed to ...".
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ZooError {
    /// A field of a [`GptConfig`](crate::GptConfig) is out of bounds.
    #[error("model `{field}` is {value}, expected {expected}")]
    Config {
        /// The field.
        field: &'static str,
        /// Its value.
        value: usize,
        /// What it may be.
        expected: &'static str,
    },
    /// A stage was given something else than it takes.
    #[error("the stage takes {expected}")]
    StageInput {
        /// What it takes.
        expected: &'static str,
    },
    /// A sampling setting outside its domain.
    #[error("sampling `{field}` is {value}, expected temperature >= 0 and 0 < top_p <= 1")]
    Sampling {
        /// The setting.
        field: &'static str,
        /// Its value.
        value: f32,
    },
    /// A tensor op failed.
    #[error(transparent)]
    Tensor(#[from] farflung_tensor::TensorError),
    /// No preset has that name.
    #[error("no model preset `{name}`; there are {}", join(PRESETS.iter().map(|(name, _)| *name)))]
    UnknownPreset {
        /// The name that was asked for.
        name: String,
    },
    /// No tokenizer has that name.
    #[error("no tokenizer `{name}`; there are {}", join(NAMES.iter().copied()))]
    UnknownTokenizer {
        /// The name that was asked for.
        name: String,
    },
    /// A token id is not in the vocabulary.
    #[error("token {token} at position {position}{} is not below the vocabulary of {vocab}", of(path.as_ref()))]
    TokenOutOfRange {
        /// The file it came from, if any.
        path: Option<PathBuf>,
        /// Its place, in tokens.
        position: usize,
        /// The token.
        token: u32,
        /// Size of the vocabulary.
        vocab: usize,
    },
    /// The system refused a file operation.
    #[error("{action} `{}`: {source}", path.display())]
    Io {
        /// What was tried: `read`, `write`, ...
        action: &'static str,
        /// On which file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// There is no data.
    #[error("`{}` holds no data", path.display())]
    EmptyCorpus {
        /// The file or folder.
        path: PathBuf,
    },
    /// A text tokenizer met bytes that are not text.
    #[error("`{}` is not UTF-8 at byte {offset}; only the `byte` tokenizer reads such files", path.display())]
    NotUtf8 {
        /// The file.
        path: PathBuf,
        /// The first bad byte.
        offset: usize,
    },
    /// A token file is not what its header or length says.
    #[error("token file `{}`: {field} is {found}, expected {expected}", path.display())]
    TokenFile {
        /// The file.
        path: PathBuf,
        /// The field of the header, or the file's length.
        field: &'static str,
        /// What the file says.
        found: u64,
        /// What it must be.
        expected: u64,
    },
    /// A split is too short to cut one sequence and its targets from it.
    #[error("{split} split has {tokens} tokens, a context needs at least {needed}")]
    TooShort {
        /// `training` or `held-out`.
        split: &'static str,
        /// Tokens it has.
        tokens: usize,
        /// Tokens it needs: context + 1.
        needed: usize,
    },
    /// Too few parts of a text to give each replica one.
    #[error(
        "the training data have {found} parts of more than {context} tokens as `{kind}` cuts them, and \
         {replicas} replicas need one each"
    )]
    Shards {
        /// How the text was to be cut.
        kind: String,
        /// Parts that there are.
        found: usize,
        /// Replicas.
        replicas: usize,
        /// Tokens of a sequence.
        context: usize,
    },
    /// A share to hold out that leaves nothing or is not a share.
    #[error(
        "hold-out of {found} of {tokens} tokens, expected a share in [0, 1) or fewer tokens than there are"
    )]
    HoldOut {
        /// The fraction or number of tokens asked for.
        found: f64,
        /// Tokens there are.
        tokens: usize,
    },
    /// A sampler's field is out of bounds.
    #[error("sampler `{field}` is {value}, expected {expected}")]
    Sampler {
        /// The field.
        field: &'static str,
        /// Its value.
        value: usize,
        /// What it may be.
        expected: String,
    },
    /// A recorded list of offsets has no row for this step.
    #[error("no recorded offsets for step {step}, the list has {steps}")]
    StepNotRecorded {
        /// The step asked for.
        step: u64,
        /// Steps in the list.
        steps: u64,
    },
    /// A recorded offset leaves no room for a sequence.
    #[error("recorded offset {offset} at index {index} is above {last}, the last that leaves room")]
    OffsetOutOfRange {
        /// Its place in the list.
        index: usize,
        /// The offset.
        offset: i64,
        /// The greatest that is valid.
        last: usize,
    },
    /// The header of a safetensors file is not one.
    #[error("safetensors file `{}`: header {problem}", path.display())]
    Header {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// A tensor's entry in a header contradicts itself, another entry or the file.
    #[error("`{}`: tensor `{tensor}` {problem}", path.display())]
    TensorEntry {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// What is wrong with it.
        problem: String,
    },
    /// A file lacks a tensor.
    #[error("`{}` has no tensor `{tensor}`", path.display())]
    NoTensor {
        /// The file or folder.
        path: PathBuf,
        /// The tensor.
        tensor: String,
    },
    /// A tensor has another shape than the model.
    #[error("`{}`: tensor `{tensor}` has shape {found:?}, expected {expected:?}", path.display())]
    TensorShape {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Its shape in the file.
        found: Vec<usize>,
        /// The shape that was asked for.
        expected: Vec<usize>,
    },
    /// A tensor has a type that cannot be read as what was asked for.
    #[error("`{}`: tensor `{tensor}` has type {found}, expected {expected}", path.display())]
    TensorDtype {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Its type in the file.
        found: String,
        /// The types that can be read so.
        expected: &'static str,
    },
    /// A JSON file is not JSON.
    #[error("`{}`: {source}", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// Where and why.
        source: serde_json::Error,
    },
    /// A field of a JSON file is missing or unsupported.
    #[error("`{}`: `{field}` is {found}, expected {expected}", path.display())]
    JsonField {
        /// The file.
        path: PathBuf,
        /// The field.
        field: String,
        /// Its value, or `missing`.
        found: String,
        /// What is supported.
        expected: String,
    },
}

/// Names in backquotes, for messages that list what there is.
fn join<'a>(names: impl Iterator<Item = &'a str>) -> String {
    names.map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ")
}

/// ` of FILE`, or nothing.
fn of(path: Option<&PathBuf>) -> String {
    path.map(|p| format!(" of `{}`", p.display())).unwrap_or_default()
}

impl ZooError {
    /// For `map_err` of a file operation.
    pub(crate) fn io(action: &'static str, path: &std::path::Path) -> impl FnOnce(std::io::Error) -> Self {
        move |source| Self::Io { action, path: path.to_owned(), source }
    }
}
