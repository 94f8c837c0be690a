//! Writes a model as a folder in Hugging Face's layout, whatever it is read from.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use farflung_zoo::weights::{Dtype, WriteOptions, write};
use serde_json::{Map, Value};

use crate::error::ModelError;
use crate::model_source::ModelSource;
use crate::{Error, Result, finite};

/// Files beside the weights that other programs read with a model: its tokenizer, and how it generates.
const BESIDE: [&str; 10] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.json",
    "chat_template.jinja",
    "generation_config.json",
];
/// Smallest number that half precision rounds to infinity.
const INFINITE_F16: f32 = 65520.0;

/// How a model is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Form {
    /// Type of all tensors. `None` is the narrowest one that has all values of the source.
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
    /// Names of the files that were copied from beside the source.
    pub copied: Vec<&'static str>,
}

/// Writes a model to a new folder, with the files of its tokenizer if it has such. `wrote` is called after each
/// tensor with its number, from 1 on, and the number of all. Only one tensor is in memory at a time.
///
/// All is written to `.NAME.tmp` beside the folder and renamed at the end, so that the folder is complete or
/// not there.
///
/// Errors: a source that cannot be read; a value that is not finite, or not in the type;
/// [`ModelError::NotNew`]; [`Error::Io`].
pub fn convert(
    from: &ModelSource,
    to: &Path,
    form: Form,
    mut wrote: impl FnMut(u64, u64),
) -> Result<Written> {
    let mut weights = from.open()?;
    let partial = partial(to)?;
    let spec = weights.spec().clone();
    let dtype = form.dtype.unwrap_or(weights.dtype());
    let count = spec.tensors().len() as u64;
    let options = WriteOptions { dtype, shard_bytes: form.shard_bytes };
    let result = write(&partial, &spec, options, |index, tensor, out| {
        weights.tensor(&tensor.name, out)?;
        finite::check(&tensor.name, out)?;
        if dtype == Dtype::F16
            && let Some(index) = out.iter().position(|x| x.abs() >= INFINITE_F16)
        {
            let (tensor, value) = (tensor.name.clone(), out[index]);
            return Err(Error::from(ModelError::TooLarge { tensor, index, value }));
        }
        wrote(index as u64 + 1, count);
        Ok(())
    });
    let result = result.and_then(|()| keep_token_ids(&partial, weights.token_ids()));
    let copied = result.and_then(|()| copy_beside(from, &partial)).and_then(|copied| {
        fs::rename(&partial, to).map_err(Error::io("rename to", to))?;
        Ok(copied)
    });
    if copied.is_err() {
        // The first error is reported; what remains is removed by the next attempt.
        let _ = fs::remove_dir_all(&partial);
    }
    Ok(Written { parameters: spec.parameters(), dtype, copied: copied? })
}

/// Returns an empty folder beside the one that is asked for, which must be new.
fn partial(to: &Path) -> Result<PathBuf> {
    let is_new = match fs::read_dir(to) {
        Ok(mut entries) => entries.next().is_none(),
        Err(error) => error.kind() == ErrorKind::NotFound,
    };
    let Some(name) = to.file_name().filter(|_| is_new) else {
        return Err(ModelError::NotNew { path: to.to_owned() }.into());
    };
    let partial = to.with_file_name(format!(".{}.tmp", name.to_string_lossy()));
    match fs::remove_dir_all(&partial) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            return Err(Error::io("remove", &partial)(error));
        }
        _ => {}
    }
    fs::create_dir_all(&partial).map_err(Error::io("create folder", &partial))?;
    Ok(partial)
}

/// Puts the source's ids of tokens into the configuration that was written.
fn keep_token_ids(folder: &Path, ids: &Map<String, Value>) -> Result<()> {
    let path = folder.join("config.json");
    let text = fs::read_to_string(&path).map_err(Error::io("read", &path))?;
    let mut config: Map<String, Value> =
        serde_json::from_str(&text).expect("the configuration was just written");
    config.extend(ids.clone());
    fs::write(&path, format!("{:#}\n", Value::Object(config))).map_err(Error::io("write", &path))
}

/// Copies the files beside the weights. Returns their names.
fn copy_beside(from: &ModelSource, to: &Path) -> Result<Vec<&'static str>> {
    let folder = from.folder();
    let mut copied = Vec::new();
    for name in BESIDE {
        let path = folder.join(name);
        if from.has_own_folder() && path.is_file() {
            fs::copy(&path, to.join(name)).map_err(Error::io("copy", &path))?;
            copied.push(name);
        }
    }
    Ok(copied)
}
