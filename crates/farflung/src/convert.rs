//! Writes a model as a folder in Hugging Face's layout, whatever it is read from.

use std::fs::{self, File};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use farflung_zoo::weights::{Dtype, WriteOptions, write};
use half::{bf16, f16};
use serde_json::{Map, Value};

use crate::error::ModelError;
use crate::model_source::{ModelSource, folder_of};
use crate::{Error, Result, finite, run_dir};

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
    /// Names of the files that were copied from beside the source.
    pub copied: Vec<&'static str>,
}

/// Writes a model to a new folder, with the files of its tokenizer if it has such. `wrote` is called after each
/// tensor with its number, from 1 on, and the number of all. Only one tensor is in memory at a time, and what a
/// compressed checkpoint holds.
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
    mut wrote: impl FnMut(u64, u64),
) -> Result<Written> {
    let mut weights = from.open()?;
    let spec = weights.spec().clone();
    let dtype = form.dtype.unwrap_or(weights.dtype());
    let options = WriteOptions { dtype, shard_bytes: form.shard_bytes };
    let count = spec.tensors().len() as u64;
    let new = NewFolder::beside(to)?;
    write(&new.partial, &spec, options, |index, tensor, out| {
        weights.tensor(&tensor.name, out)?;
        finite::check(&tensor.name, out)?;
        if let Some(index) = out.iter().position(|&x| !rounded(x, dtype).is_finite()) {
            let (tensor, value, dtype) = (tensor.name.clone(), out[index], dtype.name());
            return Err(Error::from(ModelError::TooLarge { tensor, index, value, dtype }));
        }
        wrote(index as u64 + 1, count);
        Ok(())
    })?;
    keep_token_ids(&new.partial, weights.token_ids())?;
    let copied = copy_beside(from, &new.partial)?;
    new.commit()?;
    Ok(Written { parameters: spec.parameters(), dtype, copied })
}

/// Returns a value as it is written.
fn rounded(x: f32, dtype: Dtype) -> f32 {
    match dtype {
        Dtype::F32 => x,
        Dtype::F16 => f16::from_f32(x).to_f32(),
        Dtype::Bf16 => bf16::from_f32(x).to_f32(),
    }
}

/// A folder in the making. It is removed if it is dropped before it is committed.
struct NewFolder {
    partial: PathBuf,
    path: PathBuf,
}

impl NewFolder {
    /// Makes one. A path at which there is an empty folder is as good as a new one.
    fn beside(path: &Path) -> Result<Self> {
        let not_new = || Error::from(ModelError::NotNew { path: path.to_owned() });
        let name = path.file_name().ok_or_else(not_new)?;
        let path = path.with_file_name(name);
        match path.symlink_metadata() {
            // What cannot be removed could not be replaced after all the work.
            Ok(metadata) if metadata.is_dir() => {
                fs::remove_dir(&path).map_err(|error| match error.kind() {
                    ErrorKind::DirectoryNotEmpty => not_new(),
                    _ => Error::io("replace", &path)(error),
                })?;
            }
            Ok(_) => return Err(not_new()),
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(Error::io("open", &path)(error)),
        }
        let process = std::process::id();
        let partial = path.with_file_name(format!(".{}.{process}.tmp", name.to_string_lossy()));
        let parent = folder_of(&path);
        fs::create_dir_all(&parent).map_err(Error::io("create folder", &parent))?;
        fs::create_dir(&partial).map_err(Error::io("create folder", &partial))?;
        Ok(Self { partial, path })
    }

    fn commit(self) -> Result<()> {
        sync(&self.partial)?;
        fs::rename(&self.partial, &self.path).map_err(Error::io("rename to", &self.path))?;
        sync(&folder_of(&self.path))
    }
}

impl Drop for NewFolder {
    fn drop(&mut self) {
        // After a commit it is not there. The first error is the one that is reported.
        let _ = fs::remove_dir_all(&self.partial);
    }
}

/// Waits until a file or a folder is on the disk.
fn sync(path: &Path) -> Result<()> {
    File::open(path).and_then(|file| file.sync_all()).map_err(Error::io("sync", path))
}

/// Puts the source's ids of tokens into the configuration that was written.
fn keep_token_ids(folder: &Path, ids: &Map<String, Value>) -> Result<()> {
    let path = folder.join("config.json");
    let text = fs::read_to_string(&path).map_err(Error::io("read", &path))?;
    let mut config: Map<String, Value> =
        serde_json::from_str(&text).expect("the configuration was just written");
    config.extend(ids.clone());
    run_dir::replace(&path, format!("{:#}\n", Value::Object(config)).as_bytes())
}

/// Copies the files beside the weights. Returns their names.
fn copy_beside(from: &ModelSource, to: &Path) -> Result<Vec<&'static str>> {
    let mut copied = Vec::new();
    if !from.has_own_folder() {
        return Ok(copied);
    }
    let folder = from.folder();
    for name in BESIDE {
        let path = folder.join(name);
        if path.is_file() {
            fs::copy(&path, to.join(name)).map_err(Error::io("copy", &path))?;
            sync(&to.join(name))?;
            copied.push(name);
        }
    }
    Ok(copied)
}
