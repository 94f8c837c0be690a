//! Reads a model folder in Hugging Face's GPT-2 layout.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::names::{HEAD, TOKEN_TABLE, in_model, is_bias, is_buffer};
use super::tensors::TensorFile;
use super::{config_json, files};
use crate::{GptConfig, TensorSpec, ZooError};

/// A place where a tensor is stored: the index of the file, and the name in it.
type Place = (usize, String);

/// An open model folder. Its `config.json` and the headers of its tensors agree, as checked on opening.
#[derive(Debug)]
pub struct Weights {
    config: GptConfig,
    files: Vec<TensorFile>,
    /// For each tensor of the model: its shape as stored and its place; `None` for a bias that is zero.
    tensors: BTreeMap<String, (Vec<usize>, Option<Place>)>,
    layout: Layout,
    has_biases: bool,
}

/// How the matrices of blocks are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Layout {
    /// `[inputs, outputs]`, as Hugging Face's GPT-2 has them.
    InputsFirst,
    /// `[outputs, inputs]`, as linear layers of PyTorch have them, for example those of nanoGPT.
    OutputsFirst,
}

impl Weights {
    /// Opens a folder with `config.json`, and `model.safetensors` or shards listed in
    /// `model.safetensors.index.json`. Other names of a single file or of shards without an index are found,
    /// too. `path` may also be a `.safetensors` file with `config.json` beside it.
    ///
    /// Names may have the prefixes of wrappers, such as `transformer.`, `model.`, `module.` and `_orig_mod.`,
    /// in any combination. The constant buffers `attn.bias` and `attn.masked_bias` are ignored. The token table
    /// and the head `lm_head.weight` are one tensor: it may be stored under either name or under both, and the
    /// file's metadata may name the other one. A tensor that is stored several times must have equal values.
    ///
    /// The matrices of blocks may be stored as linear layers of PyTorch have them, `[outputs, inputs]`, if all
    /// are. If no layer has biases, as in models that nanoGPT trains from scratch, they are zero.
    ///
    /// Errors: the first invalid file, field or tensor. A tensor of the model is invalid if its shape is not
    /// the configuration's or its type is not F32, F16 or BF16.
    pub fn open(path: &Path) -> Result<Self, ZooError> {
        let file = path.is_file().then(|| path.parent().unwrap_or(Path::new("")));
        let config = config_json::read(&file.unwrap_or(path).join("config.json"))?;
        let files = if file.is_some() { vec![TensorFile::open(path)?] } else { files::open(path)? };
        Self::of(path, config, files)
    }

    /// Reads the same from the bytes of `config.json` and of `model.safetensors`. `folder` is for messages.
    ///
    /// Errors: as [`Weights::open`].
    pub fn from_bytes(folder: &Path, config: &[u8], tensors: Vec<u8>) -> Result<Self, ZooError> {
        let config = config_json::from_bytes(&folder.join("config.json"), config)?;
        let file = TensorFile::from_bytes(&folder.join("model.safetensors"), tensors)?;
        Self::of(folder, config, vec![file])
    }

    fn of(path: &Path, config: GptConfig, files: Vec<TensorFile>) -> Result<Self, ZooError> {
        let mut found = places(&files);
        let layout = layout(&config, &files, &found);
        let has_biases = found.keys().any(|name| is_bias(name));
        let (mut tensors, mut copies) = (BTreeMap::new(), Vec::new());
        for spec in config.tensors() {
            let mut stored = found.remove(&spec.name).unwrap_or_default();
            if spec.name == TOKEN_TABLE {
                stored.extend(found.remove(HEAD).unwrap_or_default());
            }
            let mut shape = spec.shape.clone();
            if layout == Layout::OutputsFirst && is_matrix_of_block(&spec) {
                shape.reverse();
            }
            for (file, name) in &stored {
                files[*file].expect_f32(name, &shape)?;
            }
            let mut stored = stored.into_iter();
            let first = stored.next();
            if first.is_none() && (has_biases || !is_bias(&spec.name)) {
                return Err(ZooError::NoTensor { path: path.to_owned(), tensor: spec.name });
            }
            copies.extend(stored.map(|copy| (spec.name.clone(), copy)));
            tensors.insert(spec.name, (shape, first));
        }
        if let Some((_, stored)) = found.pop_first() {
            let (file, tensor) = stored.into_iter().next().expect("each name has a place");
            let path = files[file].path().to_owned();
            let problem = "is not part of the model in config.json".to_owned();
            return Err(ZooError::TensorEntry { path, tensor, problem });
        }
        let mut this = Self { config, files, tensors, layout, has_biases };
        copies.iter().try_for_each(|(name, copy)| this.check_copy(name, copy))?;
        Ok(this)
    }

    /// Returns the model's configuration.
    #[must_use]
    pub const fn config(&self) -> GptConfig {
        self.config
    }

    /// Returns whether the weights have biases; without, those of the model are zero.
    #[must_use]
    pub const fn has_biases(&self) -> bool {
        self.has_biases
    }

    /// Reads the tensor of this name (from [`GptConfig::tensors`]) as `f32`.
    ///
    /// Errors: [`ZooError::NoTensor`]; [`ZooError::TensorShape`] if `out` has another length;
    /// [`ZooError::Io`].
    pub fn tensor(&mut self, name: &str, out: &mut [f32]) -> Result<(), ZooError> {
        let Some((shape, place)) = self.tensors.get(name) else {
            let path = self.files.first().map_or_else(PathBuf::new, |f| f.path().to_owned());
            return Err(ZooError::NoTensor { path, tensor: name.to_owned() });
        };
        let Some((file, stored)) = place else {
            out.fill(0.0);
            return Ok(());
        };
        self.files[*file].read_f32(stored, shape, out)?;
        if let (Layout::OutputsFirst, true, &[outputs, inputs]) = (self.layout, is_of_block(name), &shape[..])
        {
            let read = out.to_vec();
            for (input, row) in out.chunks_exact_mut(outputs).enumerate() {
                row.iter_mut().enumerate().for_each(|(output, x)| *x = read[output * inputs + input]);
            }
        }
        Ok(())
    }

    /// Checks that another place of a tensor has the same values, bit for bit.
    fn check_copy(&mut self, name: &str, (file, stored): &Place) -> Result<(), ZooError> {
        let (shape, first) = self.tensors[name].clone();
        let (first_file, first) = first.expect("a tensor with copies is stored");
        // Both tensors have data of this shape in the files, so the buffers are at most four times as large.
        let count = shape.iter().product();
        let (mut values, mut copy) = (vec![0.0; count], vec![0.0; count]);
        self.files[first_file].read_f32(&first, &shape, &mut values)?;
        self.files[*file].read_f32(stored, &shape, &mut copy)?;
        if values.iter().zip(&copy).all(|(a, b): (&f32, &f32)| a.to_bits() == b.to_bits()) {
            return Ok(());
        }
        let path = self.files[*file].path().to_owned();
        let problem = if name == TOKEN_TABLE && in_model(stored) == HEAD {
            format!("differs from `{first}`; only tied heads are supported")
        } else {
            format!("differs from `{first}`, but both are `{name}` of the model")
        };
        Err(ZooError::TensorEntry { path, tensor: stored.clone(), problem })
    }
}

/// Returns how matrices are stored, by the shape of one that is not square.
fn layout(config: &GptConfig, files: &[TensorFile], found: &BTreeMap<String, Vec<Place>>) -> Layout {
    let stored = found.get("h.0.attn.c_attn.weight").and_then(|places| places.first());
    let info = stored.and_then(|(file, name)| files[*file].tensors().get(name));
    match info {
        Some(info) if info.shape == [3 * config.dim, config.dim] => Layout::OutputsFirst,
        _ => Layout::InputsFirst,
    }
}

fn is_matrix_of_block(spec: &TensorSpec) -> bool {
    is_of_block(&spec.name) && spec.shape.len() == 2
}

fn is_of_block(name: &str) -> bool {
    name.starts_with("h.")
}

/// Returns the places of all tensors by their names in the model, without constant buffers.
fn places(files: &[TensorFile]) -> BTreeMap<String, Vec<Place>> {
    let mut found: BTreeMap<String, Vec<Place>> = BTreeMap::new();
    let mut add = |name: &str, place: Place| {
        let name = in_model(name);
        let places = found.entry(name.clone()).or_default();
        if !is_buffer(&name) && !places.contains(&place) {
            places.push(place);
        }
    };
    for (file, tensors) in files.iter().enumerate() {
        for stored in tensors.tensors().keys() {
            add(stored, (file, stored.clone()));
        }
        // `safetensors.torch.save_model` writes tensors that share their values once, and notes for each other
        // name the one that it wrote.
        for (dropped, kept) in tensors.metadata() {
            if tensors.tensors().contains_key(kept) && !tensors.tensors().contains_key(dropped) {
                add(dropped, (file, kept.clone()));
            }
        }
    }
    found.retain(|_, places| !places.is_empty());
    found
}
