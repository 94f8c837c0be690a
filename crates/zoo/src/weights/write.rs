//! Writes a model folder in Hugging Face's layout.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use serde_json::json;

use super::atomic::write_file;
use super::config_json::config_text;
use super::dtype::Dtype;
use super::layout::{Layout, to_stored};
use super::tensors::{header, write_f32};
use super::token_ids::TokenIds;
use crate::naming::Names;
use crate::spec::ModelSpec;
use crate::{TensorSpec, ZooError};

/// Options for writing a model folder.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct WriteOptions {
    /// Element type of all tensors.
    pub dtype: Dtype,
    /// Maximum bytes of tensors per file; a larger tensor gets its own file. `None` writes one file.
    pub shard_bytes: Option<u64>,
    /// Ids of tokens in `config.json`.
    pub token_ids: TokenIds,
}

/// Writes `config.json` and the tensors of a model to `folder`, creating it if necessary.
///
/// `fill` is called for each tensor of [`ModelSpec::tensors`] in order, with its index, and must fill in the
/// values; only one tensor is in memory at a time. Each file is written atomically, `config.json` last. If the
/// folder contains an older checkpoint in the other form (single file or index), that file is removed, because
/// readers could use it instead of the new one.
///
/// Errors: [`ZooError::Config`], [`ZooError::Io`], and those of `fill`.
#[expect(clippy::needless_pass_by_value, reason = "options are made for one call")]
pub fn write<E: From<ZooError>>(
    folder: &Path,
    model: &ModelSpec,
    options: WriteOptions,
    mut fill: impl FnMut(usize, &TensorSpec, &mut [f32]) -> Result<(), E>,
) -> Result<(), E> {
    model.validate()?;
    fs::create_dir_all(folder).map_err(ZooError::io("create folder", folder))?;
    let specs = model.tensors();
    let shards = cut(&specs, &options);
    let single = folder.join("model.safetensors");
    let index = folder.join("model.safetensors.index.json");
    let mut weight_map = BTreeMap::new();
    let mut first = 0;
    for (number, &end) in shards.iter().enumerate() {
        let name = match shards.len() {
            1 => "model.safetensors".to_owned(),
            n => format!("model-{:05}-of-{n:05}.safetensors", number + 1),
        };
        write_shard(&folder.join(&name), model.names, &specs[first..end], first, options.dtype, &mut fill)?;
        weight_map.extend(specs[first..end].iter().map(|spec| (spec.name.as_str(), name.clone())));
        first = end;
    }
    let stale = if shards.len() == 1 {
        &index
    } else {
        let total = model.parameters() * options.dtype.bytes() as u64;
        let json = json!({"metadata": {"total_size": total}, "weight_map": weight_map});
        write_file(&index, |out| {
            out.write_all(format!("{json:#}\n").as_bytes()).map_err(ZooError::io("write", &index))
        })?;
        &single
    };
    if stale.exists() {
        fs::remove_file(stale).map_err(ZooError::io("remove", stale))?;
    }
    let path = folder.join("config.json");
    let text = config_text(model, options.dtype, &options.token_ids);
    write_file(&path, |out| out.write_all(text.as_bytes()).map_err(ZooError::io("write", &path)))?;
    Ok(())
}

/// Returns the end index of each shard in `specs`.
fn cut(specs: &[TensorSpec], options: &WriteOptions) -> Vec<usize> {
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
    names: &Names,
    specs: &[TensorSpec],
    first: usize,
    dtype: Dtype,
    fill: &mut impl FnMut(usize, &TensorSpec, &mut [f32]) -> Result<(), E>,
) -> Result<(), E> {
    // `transformers` requires this metadata before it reads a file.
    let metadata = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
    write_file(path, |out| {
        let shapes: Vec<_> = specs.iter().map(|spec| Layout::of(names).shape(spec)).collect();
        let rows =
            specs.iter().zip(&shapes).map(|(s, shape)| (s.name.as_str(), dtype.name(), shape.as_slice()));
        out.write_all(&header(rows, &metadata)).map_err(ZooError::io("write", path))?;
        let mut values = Vec::new();
        for (index, spec) in (first..).zip(specs) {
            values.clear();
            values.resize(spec.count(), 0.0);
            fill(index, spec, &mut values)?;
            let stored = to_stored(names, spec, &values).1;
            write_f32(out, dtype, &stored).map_err(ZooError::io("write", path))?;
        }
        Ok(())
    })
}
