//! Reads a model: a folder in Hugging Face's layout, or a GGUF file.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use super::config_json::config_of;
use super::dtype::Dtype;
use super::files;
use super::gguf::GgufFile;
use super::layout::{Layout, StoredForm};
use super::source_file::SourceFile;
use super::tensors::TensorFile;
use super::token_ids::TokenIds;
use crate::file_kind::FileKind;
use crate::naming::{Names, Slot};
use crate::spec::{HeadSpec, ModelSpec};
use crate::tensor_spec::{ColumnOrder, TensorKind, TensorSpec};
use crate::{ZooError, json_file};

/// A place where a tensor is stored: the index of the file, and the name in it.
type Place = (usize, String);

/// An open model. Its configuration and the headers of its tensors agree, as checked on opening.
#[derive(Debug)]
pub struct Weights {
    spec: ModelSpec,
    files: Vec<SourceFile>,
    /// For each tensor of the model: how it is stored.
    tensors: BTreeMap<String, Stored>,
    lacks_biases: bool,
    dtype: Dtype,
    token_ids: TokenIds,
}

/// What a configuration says.
struct Config {
    spec: ModelSpec,
    token_ids: TokenIds,
}

impl Config {
    /// Takes it from the fields of a `config.json`; `path` is for messages.
    fn of(path: &Path, fields: &Map<String, Value>) -> Result<Self, ZooError> {
        let token_ids = TokenIds::in_config(fields);
        Ok(Self { spec: config_of(path, fields)?, token_ids })
    }
}

/// How a tensor of the model is stored.
#[derive(Debug)]
struct Stored {
    shape: Vec<usize>,
    form: StoredForm,
    /// `None` for a bias that is zero.
    place: Option<Place>,
}

/// How much of a model files must hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Holds {
    /// All tensors.
    Whole,
    /// Some. Reading one that is missing is an error.
    Part,
}

impl Weights {
    /// Opens a folder with `config.json`, and `model.safetensors` or shards listed in
    /// `model.safetensors.index.json`. Other names of a single file or of shards without an index are found,
    /// too. `path` may also be a `.safetensors` file with `config.json` beside it, or a GGUF file (F32, F16,
    /// BF16, `Q8_0`, `Q4_0`, `Q4_1`, `Q6_K`) of LLaMA or Qwen.
    ///
    /// Names may have the prefixes of wrappers, such as `transformer.`, `model.`, `module.` and `_orig_mod.`,
    /// in any combination. Constant buffers, such as `attn.bias` and `rotary_emb.inv_freq`, are ignored. With a
    /// tied head, the token table and the head `lm_head.weight` are one tensor: it may be stored under either
    /// name or under both, and the file's metadata may name the other one. A tensor that is stored several
    /// times must have equal values.
    ///
    /// GPT-2's matrices may be stored as linear layers of PyTorch have them, `[outputs, inputs]`, if all are.
    /// If no layer has biases, as in models that nanoGPT trains from scratch, they are zero.
    ///
    /// Errors: the first invalid file, field or tensor. A tensor of the model is invalid if its shape is not
    /// the configuration's or its type is not one that is read.
    pub fn open(path: &Path) -> Result<Self, ZooError> {
        Self::open_holding(path, Holds::Whole)
    }

    /// Opens the same of a model or of a part of it.
    ///
    /// Errors: as [`Weights::open`].
    pub fn open_holding(path: &Path, holds: Holds) -> Result<Self, ZooError> {
        if path.is_file() && FileKind::of_file(path) == Some(FileKind::Gguf) {
            let file = GgufFile::open(path)?;
            let config = Config::of(path, file.config())?;
            return Self::of(path, config, vec![SourceFile::Gguf(file)], holds);
        }
        let file = path.is_file().then(|| path.parent().unwrap_or(Path::new("")));
        let config = file.unwrap_or(path).join("config.json");
        let config = Config::of(&config, &json_file::read(&config)?)?;
        let files = if file.is_some() { vec![TensorFile::open(path)?] } else { files::open(path)? };
        Self::of(path, config, files.into_iter().map(SourceFile::Safetensors).collect(), holds)
    }

    /// Reads the same from the bytes of `config.json` and of `model.safetensors`. `folder` is for messages.
    ///
    /// Errors: as [`Weights::open`].
    pub fn from_bytes(
        folder: &Path,
        config: &[u8],
        tensors: Vec<u8>,
        holds: Holds,
    ) -> Result<Self, ZooError> {
        let path = folder.join("config.json");
        let config = Config::of(&path, &json_file::from_bytes(&path, config)?)?;
        let file = TensorFile::from_bytes(&folder.join("model.safetensors"), tensors)?;
        Self::of(folder, config, vec![SourceFile::Safetensors(file)], holds)
    }

    fn of(
        path: &Path,
        Config { spec, token_ids }: Config,
        files: Vec<SourceFile>,
        holds: Holds,
    ) -> Result<Self, ZooError> {
        let all = spec.tensors();
        let mut found = places(spec.names, &files);
        let layout = layout(spec.names, &all, &files, &found);
        let is_bias = |tensor: &&TensorSpec| tensor.kind == TensorKind::Bias;
        let has_biases = all.iter().filter(is_bias).any(|bias| found.contains_key(&bias.name));
        let lacks_biases = !has_biases && all.iter().any(|tensor| is_bias(&tensor));
        let [table, head] = spec.names.table_and_head();
        let tied = spec.head == HeadSpec::Tied;
        let columns = columns(&spec, &files);
        let (mut tensors, mut copies, mut dtypes) = (BTreeMap::new(), Vec::new(), Vec::new());
        for spec in all {
            let mut stored = found.remove(&spec.name).unwrap_or_default();
            if tied && spec.name == table {
                stored.extend(found.remove(&head).unwrap_or_default());
            }
            let shape = layout.shape(&spec);
            for (file, name) in &stored {
                dtypes.push(files[*file].expect_f32(name, &shape)?);
            }
            let mut stored = stored.into_iter();
            let first = stored.next();
            if first.is_none() && (has_biases || !is_bias(&&spec)) {
                match holds {
                    Holds::Part => continue,
                    Holds::Whole => {
                        return Err(ZooError::NoTensor { path: path.to_owned(), tensor: spec.name });
                    }
                }
            }
            copies.extend(stored.map(|copy| (spec.name.clone(), copy)));
            let form = StoredForm::new(layout, &spec).with_columns(columns(&spec));
            tensors.insert(spec.name, Stored { shape, form, place: first });
        }
        if let Some((_, stored)) = found.pop_first() {
            let (file, tensor) = stored.into_iter().next().expect("each name has a place");
            let path = files[file].path().to_owned();
            let problem = "is not part of the model that is described".to_owned();
            return Err(ZooError::TensorEntry { path, tensor, problem });
        }
        let first = dtypes.first().copied().unwrap_or_default();
        let dtype = if dtypes.iter().all(|dtype| *dtype == first) { first } else { Dtype::F32 };
        let mut this = Self { spec, files, tensors, lacks_biases, dtype, token_ids };
        copies.iter().try_for_each(|(name, copy)| this.check_copy(name, copy))?;
        Ok(this)
    }

    /// Returns the model's description.
    #[must_use]
    pub const fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    /// Returns whether the model has biases and the weights have none; then they are zero.
    #[must_use]
    pub const fn lacks_biases(&self) -> bool {
        self.lacks_biases
    }

    /// Returns the fields of the configuration on the ids of tokens with which texts begin, end and are padded,
    /// such as `eos_token_id`.
    #[must_use]
    pub const fn token_ids(&self) -> &TokenIds {
        &self.token_ids
    }

    /// Returns the type that all tensors have in the files; F32 if they differ or are quantized.
    #[must_use]
    pub const fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Reads the tensor of this name (from [`ModelSpec::tensors`]) as `f32`.
    ///
    /// Errors: [`ZooError::NoTensor`]; [`ZooError::TensorShape`] if `out` has another length;
    /// [`ZooError::Io`].
    pub fn tensor(&mut self, name: &str, out: &mut [f32]) -> Result<(), ZooError> {
        let Some(Stored { shape, form, place }) = self.tensors.get(name) else {
            let path = self.files.first().map_or_else(PathBuf::new, |f| f.path().to_owned());
            return Err(ZooError::NoTensor { path, tensor: name.to_owned() });
        };
        let Some((file, stored)) = place else {
            out.fill(0.0);
            return Ok(());
        };
        self.files[*file].read_f32(stored, shape, out)?;
        form.to_memory(out);
        Ok(())
    }

    /// Checks that another place of a tensor has the same values, bit for bit.
    fn check_copy(&mut self, name: &str, (file, stored): &Place) -> Result<(), ZooError> {
        let Stored { shape, place, .. } = &self.tensors[name];
        let (first_file, first) = place.clone().expect("a tensor with copies is stored");
        // Both tensors have data of this shape in the files, so the buffers are at most 8 times as large.
        let count = shape.iter().product();
        let (mut values, mut copy) = (vec![0.0; count], vec![0.0; count]);
        self.files[first_file].read_f32(&first, shape, &mut values)?;
        self.files[*file].read_f32(stored, shape, &mut copy)?;
        if values.iter().zip(&copy).all(|(a, b): (&f32, &f32)| a.to_bits() == b.to_bits()) {
            return Ok(());
        }
        let path = self.files[*file].path().to_owned();
        let [table, head] = self.spec.names.table_and_head();
        let problem = if name == table && self.spec.names.in_model(stored) == head {
            format!("differs from `{first}`, but the head is tied (`tie_word_embeddings` of config.json)")
        } else {
            format!("differs from `{first}`, but both are `{name}` of the model")
        };
        Err(ZooError::TensorEntry { path, tensor: stored.clone(), problem })
    }
}

/// Returns the order of each tensor's columns in the files, where it is not the family's: GGUF files of LLaMA
/// have values of queries and keys that are rotated together as neighbours.
fn columns(spec: &ModelSpec, files: &[SourceFile]) -> impl Fn(&TensorSpec) -> Option<ColumnOrder> + use<> {
    let interleaves = |file: &SourceFile| matches!(file, SourceFile::Gguf(file) if file.interleaves_heads);
    let attention = spec.blocks.first().map(|run| run.block.attention);
    let order = attention.filter(|_| files.iter().any(interleaves)).map(|attention| {
        let (head_dim, rotary) = (attention.head_dim, attention.rotary);
        ColumnOrder::Interleaved { head_dim, rotated: rotary.map_or(0, |rotary| rotary.width) }
    });
    let of = [Slot::Query, Slot::Key].map(|slot| format!(".{}.", (spec.names.slot)(slot)));
    move |tensor| order.filter(|_| of.iter().any(|name| tensor.name.contains(name)))
}

/// Returns how matrices are stored, by the shape of the first one that is not square; else as the family's
/// files have them.
fn layout(
    names: &Names,
    all: &[TensorSpec],
    files: &[SourceFile],
    found: &BTreeMap<String, Vec<Place>>,
) -> Layout {
    let is_oblong = |t: &&TensorSpec| t.kind == TensorKind::Matrix && t.shape[0] != t.shape[1];
    let stored = |t: &TensorSpec| {
        let (file, name) = found.get(&t.name)?.first()?;
        Some(files[*file].shape(name)?.to_vec())
    };
    let first = all.iter().filter(is_oblong).find_map(|t| Some((t, stored(t)?)));
    match first {
        Some((t, shape)) if shape == t.shape => Layout::InputsFirst,
        Some((t, shape)) if shape == Layout::OutputsFirst.shape(t) => Layout::OutputsFirst,
        _ => Layout::of(names),
    }
}

/// Returns whether this is a constant of old exports, and no parameter.
fn is_buffer(name: &str) -> bool {
    [".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq"]
        .iter()
        .any(|buffer| name.ends_with(buffer))
}

/// Returns the places of all tensors by their names in the model, without constant buffers.
fn places(names: &Names, files: &[SourceFile]) -> BTreeMap<String, Vec<Place>> {
    let mut found: BTreeMap<String, Vec<Place>> = BTreeMap::new();
    let mut add = |name: &str, place: Place| {
        let name = names.in_model(name);
        let places = found.entry(name.clone()).or_default();
        if !is_buffer(&name) && !places.contains(&place) {
            places.push(place);
        }
    };
    for (file, tensors) in files.iter().enumerate() {
        for stored in tensors.names() {
            add(stored, (file, stored.clone()));
        }
        // `safetensors.torch.save_model` writes tensors that share their values once, and notes for each other
        // name the one that it wrote.
        for (dropped, kept) in tensors.other_names() {
            if tensors.shape(kept).is_some() && tensors.shape(dropped).is_none() {
                add(dropped, (file, kept.clone()));
            }
        }
    }
    found.retain(|_, places| !places.is_empty());
    found
}
