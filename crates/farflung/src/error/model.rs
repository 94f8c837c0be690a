//! Errors of paths that users give for a model or a checkpoint.

use std::path::PathBuf;

/// What a path of a model should be.
const MODEL: &str =
    "a folder with config.json and model.safetensors, a GGUF file, a checkpoint, or a run's folder";
/// What a path of `--resume` should be.
const CHECKPOINT: &str = "a checkpoint such as runs/nano-1/step-00000100, or a run's folder";

/// A path that a user has given for a model or a checkpoint is none.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// There is nothing at the path of a model.
    #[error("there is no file or folder `{}`, expected {MODEL}{}", path.display(), and(advice.as_ref()))]
    Missing {
        /// The path.
        path: PathBuf,
        /// What the user may have meant, and what to do then.
        advice: Option<String>,
    },
    /// The path leads to something that is not a model.
    #[error("`{}` {found}, expected {MODEL}{}", path.display(), and(advice.as_ref()))]
    NotAModel {
        /// The path.
        path: PathBuf,
        /// What it is or lacks.
        found: String,
        /// What to do.
        advice: Option<String>,
    },
    /// The path of `--resume` is no checkpoint.
    #[error("`resume` is {}, which {found}; expected auto, no, {CHECKPOINT}{}", path.display(), and(advice.as_ref()))]
    NotACheckpoint {
        /// The path.
        path: PathBuf,
        /// What it is or lacks.
        found: String,
        /// What to do.
        advice: Option<String>,
    },
    /// A setting differs from the weights that the run starts from.
    #[error("`{field}` is {given}, expected {weights}, as in the weights of `init-from`, or nothing")]
    Differs {
        /// The setting.
        field: &'static str,
        /// Its value.
        given: usize,
        /// The value of the weights.
        weights: usize,
    },
    /// The folder to which a model is to be written has something in it already.
    #[error("`{}` exists already and is not an empty folder: give a new one", path.display())]
    NotNew {
        /// The path.
        path: PathBuf,
    },
    /// A value is too large for the type in which it is to be written.
    #[error(
        "tensor `{tensor}`: its element {index} is {value}, which {dtype} does not have: give another `--dtype`"
    )]
    TooLarge {
        /// The tensor.
        tensor: String,
        /// Number of the element.
        index: usize,
        /// The element.
        value: f32,
        /// The type.
        dtype: &'static str,
    },
    /// The model's own tokenizer cannot be used.
    #[error(
        "the model's own tokenizer, {file} in `{}`, cannot be used ({difference}): with another one, text would be \
         nonsense; to use one nevertheless, give `--tokenizer byte` or `--tokenizer gpt2`",
        folder.display()
    )]
    Tokenizer {
        /// The model's folder.
        folder: PathBuf,
        /// The file.
        file: &'static str,
        /// What is wrong with it, or how it differs from GPT-2's.
        difference: String,
    },
}

/// Returns `; ADVICE`, or an empty string.
fn and(advice: Option<&String>) -> String {
    advice.map(|advice| format!("; {advice}")).unwrap_or_default()
}
