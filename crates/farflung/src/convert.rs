//! Writes a model as a folder in Hugging Face's layout, whatever it is read from.

use std::fs;
use std::path::Path;

use farflung_zoo::weights::{Dtype, WriteOptions, write};
use half::{bf16, f16};

use crate::error::{ModelError, causes};
use crate::model_source::ModelSource;
use crate::new_folder::{NewFolder, sync};
use crate::{Error, Result, finite};

/// Files beside the weights that other programs read with a model: its tokenizer, and how it generates.
const BESIDE: [&str; 11] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "tekken.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.json",
    "chat_template.jinja",
    "generation_config.json",
];

/// How a model is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Form {
    /// Type of all tensors. `None` is that of the source's tensors; F32 if they differ or are quantized.
    pub dtype: Option<Dtype>,
    /// Most bytes of tensors per file; `None` writes one file.
    pub shard_bytes: Option<u64>,
}

/// What was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Written {
    /// Number of parameters.
    pub parameters: u64,
    /// Type of all tensors.
    pub dtype: Dtype,
    /// Names of the files of the tokenizer, and others from beside the source.
    pub copied: Vec<&'static str>,
    /// What the user should know.
    pub note: Option<String>,
}

/// Writes a model to a new folder, with the files of its tokenizer if it has such. `wrote` is called after
/// each tensor with its number, from 1 on, and the number of all; its error ends the work. Only one tensor is
/// in memory at a time, and what a compressed checkpoint holds.
///
/// All is written to a folder `.NAME.PROCESS.tmp` beside it, synced and renamed at the end, so that the new
/// folder is complete or not there.
///
/// Errors: a source that cannot be read; a value that is not finite, or not in the type;
/// [`ModelError::NotNew`]; [`Error::Io`].
pub fn convert(
    from: &ModelSource,
    to: &Path,
    form: Form,
    mut wrote: impl FnMut(u64, u64) -> Result<()>,
) -> Result<Written> {
    let mut weights = from.open()?;
    let spec = weights.spec().clone();
    let dtype = form.dtype.unwrap_or(weights.dtype());
    let token_ids = weights.token_ids().clone();
    let options = WriteOptions { dtype, shard_bytes: form.shard_bytes, token_ids };
    let count = spec.tensors().len() as u64;
    let new = NewFolder::beside(to)?;
    write(new.partial(), &spec, options, |index, tensor, out| {
        weights.tensor(&tensor.name, out)?;
        finite::check(&tensor.name, out)?;
        if let Some(index) = out.iter().position(|&x| !rounded(x, dtype).is_finite()) {
            let (tensor, value, dtype) = (tensor.name.clone(), out[index], dtype.name());
            return Err(Error::from(ModelError::TooLarge { tensor, index, value, dtype }));
        }
        wrote(index as u64 + 1, count)
    })?;
    let (copied, note) = copy_beside(from, &new)?;
    new.commit()?;
    Ok(Written { parameters: spec.parameters(), dtype, copied, note })
}

/// Returns a value as it is written.
fn rounded(x: f32, dtype: Dtype) -> f32 {
    match dtype {
        Dtype::F32 => x,
        Dtype::F16 => f16::from_f32(x).to_f32(),
        Dtype::Bf16 => bf16::from_f32(x).to_f32(),
    }
}

/// Copies the files beside the weights, or writes those of the tokenizer in a GGUF file or a compressed
/// checkpoint. Returns their names, and a note about a tokenizer that is not read.
fn copy_beside(from: &ModelSource, to: &NewFolder) -> Result<(Vec<&'static str>, Option<String>)> {
    let mut copied = Vec::new();
    if !from.has_own_folder() {
        return Ok(match from.own_tokenizer() {
            Ok(tokenizer) => {
                for (name, bytes) in tokenizer.files() {
                    to.write(name, &bytes)?;
                    copied.push(name);
                }
                (copied, None)
            }
            Err(error) => (copied, Some(format!("warning: its tokenizer is left out: {}", causes(&error)))),
        });
    }
    let folder = from.folder();
    for name in BESIDE {
        let path = folder.join(name);
        if path.is_file() {
            let copy = to.partial().join(name);
            fs::copy(&path, &copy).map_err(Error::io("copy", &path))?;
            sync(&copy)?;
            copied.push(name);
        }
    }
    Ok((copied, None))
}
