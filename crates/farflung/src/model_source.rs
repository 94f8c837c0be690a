//! The model that a path leads to, for `generate`, `eval` and `--init-from`: a folder or a file in Hugging
//! Face's layout, a checkpoint, or the newest good checkpoint of a run's folder; and the tokenizer that belongs
//! to it.

mod advice;
mod paths;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use farflung_base::Rank;
use farflung_zoo::data::{LossOn, ReadOptions};
use farflung_zoo::file_kind::FileKind;
use farflung_zoo::tokenizer::TokenizerFiles;
use farflung_zoo::weights::{Holds, Weights};
use farflung_zoo::{Objective, Tokenizer, ZooError};

use crate::checkpoint::{LATEST, MANIFEST, Packing};
use crate::config::choice::TokenizerKind;
use crate::config::value::Setting as _;
use crate::error::{ModelError, causes};
use crate::path_models::PATHS;
use crate::{Checkpoint, Error, PathModels, Result, run_dir, tokenizer_files};
use paths::CONFIG;
pub(crate) use paths::folder_of;

/// The file in a checkpoint with the settings of its run.
pub(crate) const SETTINGS: &str = "settings.toml";
/// The file with all tensors of a model.
pub(crate) const TENSORS: &str = "model.safetensors";
/// The list of the files of a model in shards.
const INDEX: &str = "model.safetensors.index.json";

/// The tokenizer that lies with a model.
enum OwnTokenizer {
    None,
    /// GPT-2's, which is compiled in.
    Gpt2 {
        /// Tokens that were added to it, which it does not have, by their ids.
        added: BTreeMap<u64, String>,
    },
    /// One that is read.
    Read,
    /// One that is not read.
    Other {
        file: &'static str,
        difference: String,
    },
}

/// A model on disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelSource {
    /// A folder with `config.json`, a `.safetensors` file beside it, or a GGUF file.
    path: PathBuf,
    is_gguf: bool,
    /// Whether it is a checkpoint whose files are compressed.
    is_packed: bool,
    /// The tokenizer of the run that wrote the checkpoint.
    recorded: Option<TokenizerKind>,
    /// How that run read its text.
    reading: RunReading,
}

/// How a run reads its text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RunReading {
    /// How files are read.
    pub options: ReadOptions,
    /// Whether documents are kept apart.
    pub document_mask: bool,
    /// What the model learns to predict.
    pub objective: Objective,
    /// Whether several examples are put into a sequence.
    pub packing: bool,
    /// Seed of the run's randomness.
    pub seed: u64,
}

impl Default for RunReading {
    fn default() -> Self {
        let (options, objective) = (ReadOptions::default(), Objective::default());
        Self { options, document_mask: false, objective, packing: true, seed: 0 }
    }
}

impl ModelSource {
    /// Finds the model that a user means by a path.
    ///
    /// - A folder with `config.json`, or a file of weights in it.
    /// - A GGUF file.
    /// - A checkpoint; a run's folder, of which it is the newest good checkpoint.
    /// - The folder of a model in the cache of Hugging Face's programs (`models--ORGANISATION--NAME`).
    ///
    /// Errors: [`ModelError`] with what the path is, what was expected, and what to do; that of the newest
    /// checkpoint if a run has no good one.
    pub fn find(path: &Path) -> Result<Self> {
        match path.metadata() {
            Ok(found) if found.is_dir() => Self::of_folder(path)?.ok_or_else(|| advice::not_a_model(path)),
            Ok(_) => Self::of_file(path),
            Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => {
                Err(Error::io("read", path)(error))
            }
            Err(_) => {
                Err(ModelError::Missing { path: path.to_owned(), advice: advice::for_missing(path) }.into())
            }
        }
    }

    /// Returns the model of a folder; `None` if it is none.
    fn of_folder(path: &Path) -> Result<Option<Self>> {
        let whole = |path: &Path| {
            let settings = recorded(path).unwrap_or_default();
            let (recorded, reading) = (tokenizer_in(&settings), reading_in(&settings));
            Self { path: path.to_owned(), is_gguf: false, is_packed: false, recorded, reading }
        };
        // A link may lead nowhere; then the error names it.
        if path.join(CONFIG).symlink_metadata().is_ok() {
            // Users may edit config.json. Folders of others may have a manifest.json too.
            if path.join(MANIFEST).is_file() && path.join(SETTINGS).is_file() {
                Checkpoint::described(path)?.check(TENSORS)?;
            }
            return Ok(Some(whole(path)));
        }
        if path.join(MANIFEST).is_file() {
            return Self::of_checkpoint(&Checkpoint::open(path)?).map(Some);
        }
        if let Some(newest) = run_dir::latest(path)? {
            return Self::of_checkpoint(&newest).map(Some);
        }
        Ok(paths::cached(path).map(|snapshot| whole(&snapshot)))
    }

    fn of_checkpoint(checkpoint: &Checkpoint) -> Result<Self> {
        let path = checkpoint.path().to_owned();
        let is_packed = checkpoint.packing() == Packing::Zstd;
        let settings = if checkpoint.names().contains(&SETTINGS) {
            String::from_utf8_lossy(&checkpoint.read(SETTINGS)?).into_owned()
        } else {
            String::new()
        };
        let (recorded, reading) = (tokenizer_in(&settings), reading_in(&settings));
        Ok(Self { path, is_gguf: false, is_packed, recorded, reading })
    }

    /// Returns the model that a file is part of.
    fn of_file(path: &Path) -> Result<Self> {
        let folder = folder_of(path);
        let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        let kind = FileKind::of_file(path);
        let alone = |is_gguf| {
            let reading = RunReading::default();
            Ok(Self { path: path.to_owned(), is_gguf, is_packed: false, recorded: None, reading })
        };
        if kind == Some(FileKind::Gguf) {
            return alone(true);
        }
        let is_weights = name.ends_with(".safetensors");
        let has_config = folder.join(CONFIG).is_file();
        // A file of another name may be one of several in its folder.
        if is_weights && has_config && name != TENSORS && !name.contains("-of-") {
            return alone(false);
        }
        let is_part = is_weights || [CONFIG, INDEX, MANIFEST, LATEST].contains(&&*name);
        if is_part && let Some(found) = Self::of_folder(&folder)? {
            return Ok(found);
        }
        let (found, what_to_do) = match kind {
            _ if is_weights => {
                ("is a file of weights without config.json beside it".to_owned(), advice::FOR_NO_CONFIG)
            }
            Some(kind @ FileKind::Text(_)) => (format!("is {kind}"), "give the model's folder"),
            Some(kind) => (format!("is {kind}"), kind.advice()),
            None => ("is a file of unknown kind".to_owned(), "give the model's folder"),
        };
        let advice = if Self::of_folder(&folder).is_ok_and(|found| found.is_some()) {
            format!("give its folder, {}", folder.display())
        } else {
            what_to_do.to_owned()
        };
        Err(ModelError::NotAModel { path: path.to_owned(), found, advice: Some(advice) }.into())
    }

    /// Returns the path of the weights: a folder, a `.safetensors` or a GGUF file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Opens the weights.
    ///
    /// Errors: an invalid file, field or tensor.
    pub fn open(&self) -> Result<Weights> {
        self.open_tensors(Holds::Whole)
    }

    fn open_tensors(&self, holds: Holds) -> Result<Weights> {
        // Without it, the states of the optimizer would be read in its place.
        if self.path.join(MANIFEST).is_file() && !self.is_packed && !self.path.join(TENSORS).exists() {
            let found = format!("is a checkpoint without its {TENSORS}");
            let advice = Some("restore that file from a copy, or give another checkpoint".to_owned());
            return Err(ModelError::NotAModel { path: self.path.clone(), found, advice }.into());
        }
        let opened = if self.is_packed {
            let checkpoint = Checkpoint::open(&self.path)?;
            let (config, tensors) = (checkpoint.read(CONFIG)?, checkpoint.read(TENSORS)?);
            Weights::from_bytes(&self.path, &config, tensors, holds)
        } else {
            Weights::open_holding(&self.path, holds)
        };
        opened.map_err(|error| {
            let part = |path, lacks: String| {
                let found = format!("is a checkpoint that holds a part of the model, {lacks}");
                let advice =
                    "give the folder of a rank that saves the whole model, such as rank 0".to_owned();
                ModelError::NotAModel { path, found, advice: Some(advice) }.into()
            };
            match error {
                error if !self.path.join(MANIFEST).exists() => error.into(),
                ZooError::NoTensor { path, tensor } => part(path, format!("without `{tensor}`")),
                ZooError::TensorShape { path, tensor, found, expected } => {
                    part(path, format!("with {found:?} of the {expected:?} values of `{tensor}`"))
                }
                error => error.into(),
            }
        })
    }

    /// Finds a model of which this rank may have only a part: that of `path`; or, if there is none, that of
    /// this rank in the folder of a run whose ranks have folders of their own.
    ///
    /// Errors: as [`ModelSource::find`] for `path`.
    pub fn find_part(path: &Path, rank: Rank) -> Result<Self> {
        Self::find(path).or_else(|error| Self::find(&run_dir::rank_folder(path, rank)).map_err(|_| error))
    }

    /// Opens the weights, of which some may be missing. A compressed checkpoint is unpacked in memory.
    ///
    /// Errors: as [`ModelSource::open`], except for missing tensors: reading one is an error.
    pub fn open_part(&self) -> Result<Weights> {
        self.open_tensors(Holds::Part)
    }

    /// Returns the step after which a run has saved the weights; `None` if no run did.
    #[must_use]
    pub fn step(&self) -> Option<u64> {
        crate::checkpoint::step_of(&self.path.file_name()?.to_string_lossy())
    }

    /// Returns the models of all paths of the run that wrote the checkpoint; `None` if it trained one model.
    ///
    /// Errors: those of a damaged file.
    pub fn path_models(&self) -> Result<Option<PathModels>> {
        let file = self.path.join(PATHS);
        let text = if self.is_packed {
            let checkpoint = Checkpoint::open(&self.path)?;
            if checkpoint.names().contains(&PATHS) { Some(checkpoint.read(PATHS)?) } else { None }
        } else if file.is_file() {
            Some(fs::read(&file).map_err(Error::io("read", &file))?)
        } else {
            None
        };
        text.map(|text| PathModels::read(&text, &file)).transpose()
    }

    /// Finds the model that a user means by a path, and by the number of a path through shared modules if the
    /// run trained several.
    ///
    /// Errors: as [`ModelSource::find`] and [`ModelSource::of_path`]; a number for a run that trained one
    /// model.
    pub fn find_path(path: &Path, number: Option<usize>) -> Result<Self> {
        let source = Self::find(path)?;
        match (source.path_models()?, number) {
            (Some(paths), Some(number)) => source.of_path(&paths, number),
            (None, Some(number)) => {
                let expected = "nothing, because the run trained one model".to_owned();
                Err(Error::Setting { field: "path", value: number.to_string(), expected })
            }
            (_, None) => Ok(source),
        }
    }

    /// Returns the model of one of these paths, of the same step.
    ///
    /// Errors: [`Error::Setting`] if there is no such path, or its folder is not on this machine.
    pub fn of_path(&self, models: &PathModels, path: usize) -> Result<Self> {
        let folder = models.folder(&self.path, path)?;
        if folder == self.path {
            return Ok(self.clone());
        }
        let found = Self::find(&folder)?;
        if found.path_models()?.is_none_or(|theirs| !theirs.is_of_same_run(models)) {
            let expected = format!("a checkpoint of the run of {}", self.path.display());
            return Err(Error::Setting { field: "model", value: folder.display().to_string(), expected });
        }
        Ok(found)
    }

    /// Returns how the run that wrote the checkpoint read its text; the default for other models.
    #[must_use]
    pub const fn run_reading(&self) -> RunReading {
        self.reading
    }

    /// Returns the tokenizer for this model, whose vocabulary has `vocab` tokens, if the user names none:
    /// that of the run that wrote it, else its own, else the one that fits the vocabulary: bytes for 256
    /// tokens, also if padded to less than 384, else GPT-2's.
    ///
    /// Errors: tokenizer files that cannot be read.
    pub fn tokenizer(&self, vocab: usize) -> Result<TokenizerKind> {
        let own = || TokenizerKind::File(self.path.clone());
        match &self.recorded {
            Some(TokenizerKind::File(_)) => return Ok(own()),
            Some(recorded) => return Ok(recorded.clone()),
            None => {}
        }
        Ok(match self.tokenizer_files()? {
            OwnTokenizer::Gpt2 { .. } => TokenizerKind::Gpt2,
            OwnTokenizer::Read => own(),
            _ if (256..384).contains(&vocab) => TokenizerKind::Byte,
            _ => TokenizerKind::Gpt2,
        })
    }

    /// Opens the tokenizer that lies with the weights.
    ///
    /// Errors: [`ZooError::Tokenizer`] if there is none, or for one that is not read.
    pub fn own_tokenizer(&self) -> Result<Arc<dyn Tokenizer>> {
        if !self.is_packed {
            let path = if self.is_gguf { self.path.clone() } else { self.folder() };
            return tokenizer_files::of_file(&path);
        }
        let checkpoint = Checkpoint::open(&self.path)?;
        tokenizer_files::of_files(&self.path, |name| {
            checkpoint.names().contains(&name).then(|| checkpoint.read(name)).transpose()
        })
    }

    /// Checks that the model's own tokenizer is not one that is not read, so that [`ModelSource::tokenizer`] is
    /// the model's.
    ///
    /// Errors: [`ModelError::Tokenizer`].
    pub fn check_tokenizer(&self) -> Result<()> {
        match self.tokenizer_files()? {
            OwnTokenizer::Other { file, difference } if self.recorded.is_none() => {
                Err(ModelError::Tokenizer { folder: self.folder(), file, difference }.into())
            }
            _ => Ok(()),
        }
    }

    /// Returns a note for the user if the model has another tokenizer than the one that is used.
    #[must_use]
    pub fn tokenizer_note(&self, used: &TokenizerKind, opened: &dyn Tokenizer) -> Option<String> {
        let is_file = matches!(used, TokenizerKind::File(_));
        match &self.recorded {
            Some(TokenizerKind::File(_)) => return self.note_of_other(used, opened),
            Some(recorded) if recorded != used => {
                return Some(format!(
                    "warning: the model was trained with the tokenizer {recorded}, and {used} is used"
                ));
            }
            _ => {}
        }
        let folder = self.folder();
        match self.tokenizer_files() {
            Ok(OwnTokenizer::Gpt2 { .. }) if *used == TokenizerKind::Byte => Some(format!(
                "warning: the tokenizer files in {} are GPT-2's, and {used} is used",
                folder.display()
            )),
            Ok(OwnTokenizer::Gpt2 { added }) if !added.is_empty() && !is_file => {
                let shown: Vec<String> = added.values().take(3).map(|token| format!("{token:?}")).collect();
                Some(format!(
                    "{} tokens that {} adds to GPT-2's are not used, such as {}",
                    added.len(),
                    folder.display(),
                    shown.join(", ")
                ))
            }
            Ok(OwnTokenizer::Read) if self.recorded.is_none() => self.note_of_other(used, opened),
            Ok(OwnTokenizer::Other { file, difference }) if self.recorded.is_none() => Some(format!(
                "warning: the model's own tokenizer, {file} in {}, is not used, since it cannot be read \
                 ({difference}); text is split by the tokenizer {used}",
                folder.display()
            )),
            Ok(_) => None,
            Err(error) => Some(format!("warning: the model's own tokenizer is not used: {}", causes(&error))),
        }
    }

    /// Returns a note if the tokenizer that lies with the weights is another one than the one that is used.
    fn note_of_other(&self, used: &TokenizerKind, opened: &dyn Tokenizer) -> Option<String> {
        let is_own = self.own_tokenizer().is_ok_and(|own| own.name() == opened.name());
        (!is_own)
            .then(|| format!("warning: the model was trained with its own tokenizer, and {used} is used"))
    }

    /// Returns whether the files beside the weights are the model's, and not those of others in the folder, and
    /// can be copied as they are.
    #[must_use]
    pub const fn has_own_folder(&self) -> bool {
        !self.is_gguf && !self.is_packed
    }

    fn tokenizer_files(&self) -> Result<OwnTokenizer> {
        let file = if self.is_gguf {
            "that of the GGUF file"
        } else {
            match TokenizerFiles::of(&self.folder())? {
                TokenizerFiles::None => return Ok(OwnTokenizer::None),
                TokenizerFiles::Gpt2 { added } => return Ok(OwnTokenizer::Gpt2 { added }),
                TokenizerFiles::Other { file, difference } => {
                    return Ok(OwnTokenizer::Other { file, difference });
                }
                TokenizerFiles::Described { .. } => "tokenizer.json",
            }
        };
        match self.own_tokenizer() {
            Ok(_) => Ok(OwnTokenizer::Read),
            Err(error) => match tokenizer_files::problem(&error) {
                Some(difference) => Ok(OwnTokenizer::Other { file, difference }),
                None => Err(error),
            },
        }
    }

    /// Returns the folder of the weights.
    #[must_use]
    pub fn folder(&self) -> PathBuf {
        if self.path.is_file() { folder_of(&self.path) } else { self.path.clone() }
    }
}

/// Returns the settings of the run that wrote the checkpoint in a folder; `None` if it is no checkpoint.
fn recorded(folder: &Path) -> Option<String> {
    fs::read_to_string(folder.join(SETTINGS)).ok().filter(|_| folder.join(MANIFEST).is_file())
}

/// Returns how a run with these settings reads its text.
fn reading_in(settings: &str) -> RunReading {
    let table = settings.parse::<toml::Table>().unwrap_or_default();
    let text = |key: &str| table.get(key).and_then(toml::Value::as_str);
    let flag = |key: &str| table.get(key).and_then(toml::Value::as_bool).unwrap_or(false);
    let options = ReadOptions {
        encoding: text("encoding").and_then(|name| name.parse().ok()),
        special_tokens: flag("special-tokens"),
        token_type: text("token-type").and_then(|name| name.parse().ok()),
        loss_on: text("loss-on").and_then(LossOn::parse).unwrap_or_default(),
        as_texts: false,
    };
    let objective = text("objective").and_then(|name| name.parse().ok()).unwrap_or_default();
    let packing = table.get("packing").and_then(toml::Value::as_bool).unwrap_or(true);
    let seed = table.get("seed").and_then(toml::Value::as_integer).unwrap_or(0).cast_unsigned();
    RunReading { options, document_mask: flag("document-mask"), objective, packing, seed }
}

/// Returns the tokenizer in the settings of a run.
fn tokenizer_in(settings: &str) -> Option<TokenizerKind> {
    TokenizerKind::parse(settings.parse::<toml::Table>().ok()?.get("tokenizer")?.as_str()?)
}
