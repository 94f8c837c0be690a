//! The files of a folder that together contain a model's tensors.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use serde::Deserialize;

use super::tensors::TensorFile;
use crate::{ZooError, json_file};

/// Contents of `model.safetensors.index.json`.
#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

/// Endings of files with weights in formats that are not read.
const OTHER_FORMATS: [&str; 12] = [
    ".bin",
    ".pt",
    ".pth",
    ".ckpt",
    ".h5",
    ".msgpack",
    ".gguf",
    ".onnx",
    ".npz",
    ".pkl",
    ".safetensors.gz",
    ".safetensors.zst",
];

/// Opens `model.safetensors`, or the files of its index. Without either: the only `.safetensors` file of the
/// folder, or all shards if their index is missing.
pub(super) fn open(folder: &Path) -> Result<Vec<TensorFile>, ZooError> {
    let single = folder.join("model.safetensors");
    let index = folder.join("model.safetensors.index.json");
    let is_there = |path: &Path| path.symlink_metadata().is_ok();
    if is_there(&single) {
        return Ok(vec![TensorFile::open(&single)?]);
    }
    if is_there(&index) {
        return indexed(folder, &index);
    }
    let names = names(folder)?;
    // An adapter is not a model.
    let is_model = |name: &&String| name.ends_with(".safetensors") && !name.starts_with("adapter_");
    let found: Vec<String> = names.iter().filter(is_model).cloned().collect();
    let shards: Option<Vec<(usize, usize)>> = found.iter().map(|name| shard(name)).collect();
    let open = |name: &String| TensorFile::open(&folder.join(name));
    match (&found[..], shards.as_deref()) {
        ([], _) => {
            let other = |name: &&String| OTHER_FORMATS.iter().any(|end| name.ends_with(end));
            let found = names.iter().filter(other).cloned().collect();
            Err(ZooError::NoWeights { folder: folder.to_owned(), found })
        }
        (_, Some(shards)) if is_complete(shards) => found.iter().map(open).collect(),
        (_, Some(_)) => Err(ZooError::NoWeights { folder: folder.to_owned(), found }),
        ([one], None) => Ok(vec![open(one)?]),
        (_, None) => Err(ZooError::SeveralWeights { folder: folder.to_owned(), found }),
    }
}

/// Opens the files of an index, and checks that each tensor is in the file that the index names.
fn indexed(folder: &Path, path: &Path) -> Result<Vec<TensorFile>, ZooError> {
    let index: Index = json_file::read(path)?;
    let mut files: BTreeMap<&str, TensorFile> = BTreeMap::new();
    for (tensor, file) in &index.weight_map {
        if Path::new(file).file_name().is_none_or(|name| name != file.as_str()) {
            let (field, found) = (format!("weight_map.{tensor}"), file.clone());
            let expected = "the name of a file in the same folder".to_owned();
            return Err(ZooError::JsonField { path: path.to_owned(), field, found, expected });
        }
        if !files.contains_key(file.as_str()) {
            files.insert(file, TensorFile::open(&folder.join(file))?);
        }
        // The name of a tensor that shares its values with another one may be in the metadata only.
        let opened = &files[file.as_str()];
        if !opened.tensors().contains_key(tensor) && !opened.metadata().contains_key(tensor) {
            return Err(ZooError::NoTensor { path: folder.join(file), tensor: tensor.clone() });
        }
    }
    Ok(files.into_values().collect())
}

/// Returns the names of a folder's files, sorted.
fn names(folder: &Path) -> Result<Vec<String>, ZooError> {
    let entries = fs::read_dir(folder).map_err(ZooError::io("read folder", folder))?;
    let name = |entry: std::io::Result<fs::DirEntry>| entry.map(|entry| entry.file_name().into_string().ok());
    let names: Result<Vec<_>, _> = entries.map(name).collect();
    let mut names: Vec<_> =
        names.map_err(ZooError::io("read folder", folder))?.into_iter().flatten().collect();
    names.sort();
    Ok(names)
}

/// Returns the number of a shard and of all shards, from a name such as `model-00001-of-00003.safetensors`.
fn shard(name: &str) -> Option<(usize, usize)> {
    let (rest, all) = name.strip_suffix(".safetensors")?.rsplit_once("-of-")?;
    let (_, number) = rest.rsplit_once('-')?;
    Some((number.parse().ok()?, all.parse().ok()?))
}

/// Returns whether sorted shards are all that there are.
fn is_complete(shards: &[(usize, usize)]) -> bool {
    (1..).zip(shards).all(|(number, &shard)| shard == (number, shards.len()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shards_are_counted_by_their_names() {
        assert_eq!(shard("model-00002-of-00013.safetensors"), Some((2, 13)));
        assert_eq!(shard("model.safetensors"), None);
        assert!(is_complete(&[(1, 2), (2, 2)]));
        for lacking in [&[(1, 2)][..], &[(2, 2), (1, 2)], &[(1, 3), (3, 3)]] {
            assert!(!is_complete(lacking), "{lacking:?}");
        }
    }
}
