//! Reads a model folder in Hugging Face's GPT-2 layout.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::config_json;
use super::tensors::TensorFile;
use crate::{GptConfig, ZooError};

/// An open model folder. Its `config.json` and the headers of its tensors agree, as checked on opening.
#[derive(Debug)]
pub struct Weights {
    config: GptConfig,
    files: Vec<TensorFile>,
    /// For each tensor of the model: shape, index of the file, and name in the file.
    tensors: BTreeMap<String, (Vec<usize>, usize, String)>,
}

/// Contents of `model.safetensors.index.json`.
#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

impl Weights {
    /// Opens a folder with `config.json`, and `model.safetensors` or shards listed in
    /// `model.safetensors.index.json`.
    ///
    /// Names may have the prefix `transformer.`. The constant buffers `attn.bias` and `attn.masked_bias` are
    /// ignored. An `lm_head.weight` is accepted if it equals the token table.
    ///
    /// Errors: the first invalid file, field or tensor. A tensor of the model is invalid if its shape is not
    /// the configuration's or its type is not F32, F16 or BF16.
    pub fn open(folder: &Path) -> Result<Self, ZooError> {
        let config = config_json::read(&folder.join("config.json"))?;
        let files = open_files(folder)?;
        let mut found = BTreeMap::new();
        for (file, tensors) in files.iter().enumerate() {
            for stored in tensors.tensors().keys() {
                let name = stored.strip_prefix("transformer.").unwrap_or(stored);
                if is_buffer(name) {
                    continue;
                }
                if found.insert(name.to_owned(), (file, stored.clone())).is_some() {
                    let problem = "occurs twice".to_owned();
                    let path = tensors.path().to_owned();
                    return Err(ZooError::TensorEntry { path, tensor: name.to_owned(), problem });
                }
            }
        }
        let head = found.remove("lm_head.weight");
        let mut tensors = BTreeMap::new();
        for spec in config.tensors() {
            let missing = || ZooError::NoTensor { path: folder.to_owned(), tensor: spec.name.clone() };
            let (file, stored) = found.remove(&spec.name).ok_or_else(missing)?;
            files[file].expect_f32(&stored, &spec.shape)?;
            tensors.insert(spec.name, (spec.shape, file, stored));
        }
        if let Some((name, (file, _))) = found.pop_first() {
            let path = files[file].path().to_owned();
            let problem = "is not part of the model in config.json".to_owned();
            return Err(ZooError::TensorEntry { path, tensor: name, problem });
        }
        let mut this = Self { config, files, tensors };
        if let Some((file, stored)) = head {
            this.check_tied(file, &stored)?;
        }
        Ok(this)
    }

    /// Returns the model's configuration.
    #[must_use]
    pub const fn config(&self) -> GptConfig {
        self.config
    }

    /// Reads the tensor of this name (from [`GptConfig::tensors`]) as `f32`.
    ///
    /// Errors: [`ZooError::NoTensor`]; [`ZooError::TensorShape`] if `out` has another length;
    /// [`ZooError::Io`].
    pub fn tensor(&mut self, name: &str, out: &mut [f32]) -> Result<(), ZooError> {
        let Some((shape, file, stored)) = self.tensors.get(name) else {
            let path = self.files.first().map_or_else(PathBuf::new, |f| f.path().to_owned());
            return Err(ZooError::NoTensor { path, tensor: name.to_owned() });
        };
        self.files[*file].read_f32(stored, shape, out)
    }

    /// Checks that a separate head equals the token table, bit for bit.
    fn check_tied(&mut self, file: usize, stored: &str) -> Result<(), ZooError> {
        let shape = [self.config.vocab, self.config.dim];
        self.files[file].expect_f32(stored, &shape)?;
        // Both tensors have data of this shape in the files, so the buffers are at most four times as large.
        let (mut table, mut head) = (vec![0.0; shape[0] * shape[1]], vec![0.0; shape[0] * shape[1]]);
        self.tensor("wte.weight", &mut table)?;
        self.files[file].read_f32(stored, &shape, &mut head)?;
        if table.iter().zip(&head).all(|(a, b)| a.to_bits() == b.to_bits()) {
            return Ok(());
        }
        let path = self.files[file].path().to_owned();
        let problem = "differs from `wte.weight`; only tied heads are supported".to_owned();
        Err(ZooError::TensorEntry { path, tensor: stored.to_owned(), problem })
    }
}

/// Opens the single file, or the files of the index. Checks that each tensor is in the file that the index
/// names.
fn open_files(folder: &Path) -> Result<Vec<TensorFile>, ZooError> {
    let single = folder.join("model.safetensors");
    let path = folder.join("model.safetensors.index.json");
    if single.exists() || !path.exists() {
        return Ok(vec![TensorFile::open(&single)?]);
    }
    let text = fs::read(&path).map_err(ZooError::io("read", &path))?;
    let index: Index =
        serde_json::from_slice(&text).map_err(|source| ZooError::Json { path: path.clone(), source })?;
    let mut files: BTreeMap<&str, TensorFile> = BTreeMap::new();
    for (tensor, file) in &index.weight_map {
        if Path::new(file).file_name().is_none_or(|name| name != file.as_str()) {
            let (field, found) = (format!("weight_map.{tensor}"), file.clone());
            let expected = "the name of a file in the same folder".to_owned();
            return Err(ZooError::JsonField { path, field, found, expected });
        }
        if !files.contains_key(file.as_str()) {
            files.insert(file, TensorFile::open(&folder.join(file))?);
        }
        if !files[file.as_str()].tensors().contains_key(tensor) {
            return Err(ZooError::NoTensor { path: folder.join(file), tensor: tensor.clone() });
        }
    }
    Ok(files.into_values().collect())
}

/// Returns whether this is a constant mask of old exports: `h.N.attn.bias` or `h.N.attn.masked_bias`.
fn is_buffer(name: &str) -> bool {
    name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias")
}
