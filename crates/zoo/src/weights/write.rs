//! Writes a model folder in Hugging Face's GPT-2 layout.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use serde_json::json;

use super::atomic::write_file;
use super::config_json;
use super::dtype::Dtype;
use super::tensors::{header, write_f32};
use crate::{GptConfig, TensorSpec, ZooError};

/// Options for writing a model folder.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct WriteOptions {
    /// Element type of all tensors.
    pub dtype: Dtype,
    /// Maximum bytes of tensors per file; a larger tensor gets its own file. `None` writes one file.
    pub shard_bytes: Option<u64>,
}

/// Writes `config.json` and the tensors of a model to `folder`, creating it if necessary.
///
/// `fill` is called for each tensor of [`GptConfig::tensors`] in order, with its index, and must fill in the
/// values; only one tensor is in memory at a time. Each file is written atomically, `config.json` last. If the
/// folder contains an older checkpoint in the other form (single file or index), that file is removed, because
/// readers could use it instead of the new one.
///
/// Errors: [`ZooError::Config`], [`ZooError::Io`], and those of `fill`.
pub fn write<E: From<ZooError>>(
    folder: &Path,
    config: &GptConfig,
    options: WriteOptions,
    mut fill: impl FnMut(usize, &TensorSpec, &mut [f32]) -> Result<(), E>,
) -> Result<(), E> {
    config.validate()?;
    fs::create_dir_all(folder).map_err(ZooError::io("create folder", folder))?;
    let specs = config.tensors();
    let shards = cut(&specs, options);
    let single = folder.join("model.safetensors");
    let index = folder.join("model.safetensors.index.json");
    let mut weight_map = BTreeMap::new();
    let mut first = 0;
    for (number, &end) in shards.iter().enumerate() {
        let name = match shards.len() {
            1 => "model.safetensors".to_owned(),
            n => format!("model-{:05}-of-{n:05}.safetensors", number + 1),
        };
        write_shard(&folder.join(&name), &specs, first..end, options.dtype, &mut fill)?;
        weight_map.extend(specs[first..end].iter().map(|spec| (spec.name.as_str(), name.clone())));
        first = end;
    }
    let stale = if shards.len() == 1 {
        &index
    } else {
        let total = config.parameters() * options.dtype.bytes() as u64;
        let json = json!({"metadata": {"total_size": total}, "weight_map": weight_map});
        write_file(&index, |out| {
            out.write_all(format!("{json:#}\n").as_bytes()).map_err(ZooError::io("write", &index))
        })?;
        &single
    };
    if stale.exists() {
        fs::remove_file(stale).map_err(ZooError::io("remove", stale))?;
    }
    config_json::write(&folder.join("config.json"), config, options.dtype)?;
    Ok(())
}

/// Returns the end index of each shard in `specs`.
fn cut(specs: &[TensorSpec], options: WriteOptions) -> Vec<usize> {
    let most = options.shard_bytes.unwrap_or(u64::MAX);
    let (mut ends, mut held) = (Vec::new(), 0_u64);
    for (index, spec) in specs.iter().enumerate() {
        let bytes = (spec.count() * options.dtype.bytes()) as u64;
        if held > 0 && bytes > most.saturating_sub(held) {
            ends.push(index);
            held = 0;
        }
        held += bytes;
    }
    ends.push(specs.len());
    ends
}

fn write_shard<E: From<ZooError>>(
    path: &Path,
    specs: &[TensorSpec],
    range: std::ops::Range<usize>,
    dtype: Dtype,
    fill: &mut impl FnMut(usize, &TensorSpec, &mut [f32]) -> Result<(), E>,
) -> Result<(), E> {
    // `transformers` requires this metadata before it reads a file.
    let metadata = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
    write_file(path, |out| {
        let rows = specs[range.clone()].iter().map(|s| (s.name.as_str(), dtype.name(), s.shape.as_slice()));
        out.write_all(&header(rows, &metadata)).map_err(ZooError::io("write", path))?;
        let mut values = Vec::new();
        for index in range {
            values.clear();
            values.resize(specs[index].count(), 0.0);
            fill(index, &specs[index], &mut values)?;
            write_f32(out, dtype, &values).map_err(ZooError::io("write", path))?;
        }
        Ok(())
    })
}
