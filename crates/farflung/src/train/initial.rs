//! The weights that a run starts from (`--init-from`), and the settings that follow from them.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use farflung_tensor::Device;
use farflung_zoo::spec::Positions;
use farflung_zoo::weights::Weights;
use farflung_zoo::{Stage, Tokenizer};

use super::fingerprint::digest;
use crate::checkpoint::MANIFEST;
use crate::config::choice::{Resume, TokenizerKind};
use crate::error::ModelError;
use crate::model_shape::{is_model_path, model_shape, model_text};
use crate::run_dir::{CONFIG, RANKS};
use crate::{ModelSource, Result, TrainArgs, TrainConfig, finite, tokenizers};

/// The weights that a run starts from.
#[derive(Debug, Clone)]
pub struct InitialWeights {
    /// Where they are.
    pub source: ModelSource,
    /// Their hash, which combines the hashes of the tensors.
    pub hash: blake3::Hash,
    /// Notes for the user.
    pub(super) notes: Vec<String>,
}

impl InitialWeights {
    /// Finds and reads the weights of `init-from`; `None` if the settings give none, or if a run is continued
    /// and they are not there any more: its checkpoint has all of the model.
    ///
    /// Errors: as [`ModelSource::find`]; [`Error::NotFinite`](crate::Error::NotFinite) with the tensor; weights
    /// that do not match the folder's model.
    pub(super) fn of(config: &TrainConfig) -> Result<Option<Self>> {
        let Some(given) = config.initial_path() else { return Ok(None) };
        let source = ModelSource::find(given)?;
        let mut weights = source.open()?;
        let hash = hash(&mut weights)?;
        let found = (source.path() != given)
            .then(|| format!("the run starts from the weights of {}", source.path().display()));
        let biases = weights.lacks_biases().then(|| {
            "the weights have no biases: those of the model start at zero, and are trained".to_owned()
        });
        let used = config.open_tokenizer()?;
        let note = source.tokenizer_note(&config.tokenizer, &*used);
        let path = source.path_models()?.map(|paths| {
            format!(
                "the weights are those of one of {} paths; `farflung convert --path N` writes another",
                paths.paths().len()
            )
        });
        let notes = found.into_iter().chain(path).chain(biases).chain(note).collect();
        Ok(Some(Self { source, hash, notes }))
    }
}

/// Returns the hash of weights, which combines the hashes of the tensors.
fn hash(weights: &mut Weights) -> Result<blake3::Hash> {
    let whole = Stage::whole(weights.spec(), &Device::cpu(1)?)?;
    let mut hasher = blake3::Hasher::new();
    for p in whole.layout().params() {
        let mut values = vec![0.0; p.shape.len()];
        weights.tensor(&p.name, &mut values)?;
        finite::check(&p.name, &values)?;
        hasher.update(digest(&values).as_bytes());
    }
    Ok(hasher.finalize())
}

impl TrainConfig {
    /// Returns the path of `init-from`, unless a run is continued and there is nothing at the path any more.
    fn initial_path(&self) -> Option<&Path> {
        let path = self.init_from.as_deref()?;
        let is_gone = self.resume != Resume::No && path.try_exists().is_ok_and(|there| !there);
        (!is_gone).then_some(path)
    }

    /// Returns the settings such that they describe the model by themselves: to a newcomer, and in the run's
    /// folder. They have the shape, the vocabulary and the tokenizer of the weights of `init-from`, or what the
    /// config.json of `model` says instead of its path. Settings of a continued run whose weights are gone are
    /// returned as they are.
    ///
    /// Errors: as [`ModelSource::find`] and [`model_shape`]; [`ModelError::Differs`] if a given setting differs
    /// from the weights.
    pub fn with_own_model(self) -> Result<Self> {
        let mut this = self.with_model_of_run();
        let Some(path) = this.initial_path() else { return this.with_text_of_model() };
        let source = ModelSource::find(path)?;
        let weights = source.open()?;
        let model = weights.spec();
        let given =
            ["layers", "heads", "dim", "context", "vocab", "tokenizer"].map(|name| this.was_given(name));
        let heads = model.blocks.first().map_or(0, |run| run.block.attention.heads.query);
        let sizes = [
            ("layers", &mut this.layers, model.layers()),
            ("heads", &mut this.heads, heads),
            ("dim", &mut this.dim, model.dim),
            ("context", &mut this.context, model.context),
            ("vocab", &mut this.vocab, model.vocab),
        ];
        for ((field, value, weights), was_given) in sizes.into_iter().zip(given) {
            match *value {
                // Sequences may have another length if no table has a row for each position.
                Some(_) if was_given && field == "context" && model.positions == Positions::None => {}
                Some(given) if was_given && given != weights => {
                    return Err(ModelError::Differs { field, given, weights }.into());
                }
                _ => *value = Some(weights),
            }
        }
        if let Some(text) = model_text(model) {
            this.model = text;
        }
        if !given[5] {
            this.tokenizer = source.tokenizer(model.vocab)?;
        }
        Ok(this)
    }

    /// Returns the folder of the run that is continued.
    fn continued_run(&self) -> Option<PathBuf> {
        match &self.resume {
            Resume::No => None,
            Resume::Auto => self.out.clone(),
            Resume::Path(checkpoint) if checkpoint.join(MANIFEST).exists() => {
                checkpoint.parent().map(Path::to_owned)
            }
            Resume::Path(run) => Some(run.clone()),
        }
    }

    /// Opens the tokenizer. If a run is continued and there is nothing at its path any more, it is that of the
    /// run's checkpoint.
    ///
    /// Errors: as [`tokenizers::open`].
    pub(super) fn open_tokenizer(&self) -> Result<Arc<dyn Tokenizer>> {
        let opened = tokenizers::open(&self.tokenizer);
        match (&self.tokenizer, self.continued_run()) {
            (TokenizerKind::File(path), Some(run)) if !path.exists() => {
                let own = ModelSource::find(&run).and_then(|source| source.own_tokenizer());
                if own.is_ok() && self.was_given("tokenizer") {
                    tracing::warn!("there is nothing at {}: the run's own tokenizer is used", path.display());
                }
                own.or(opened)
            }
            _ => opened,
        }
    }

    /// Returns the settings with the tokenizer of the run that is continued, and with its model, if no setting
    /// describes one.
    /// Without readable settings of that run they are returned as they are: its checkpoint is compared later.
    fn with_model_of_run(mut self) -> Self {
        let given = |names: &[&str]| names.iter().any(|name| self.was_given(name));
        if given(&["tokenizer", "init-from"]) {
            return self;
        }
        let describes_model = given(&["model", "layers", "heads", "dim", "context", "vocab"]);
        let Some(of_run) = self.continued_run().and_then(|run| settings_of(&run)) else { return self };
        if describes_model {
            self.tokenizer = of_run.tokenizer.unwrap_or(self.tokenizer);
            return self;
        }
        let TrainArgs { model, layers, heads, dim, context, vocab, tokenizer, .. } = of_run;
        self.model = model.unwrap_or(self.model);
        self.tokenizer = tokenizer.unwrap_or(self.tokenizer);
        (self.layers, self.heads, self.dim) = (layers, heads, dim);
        (self.context, self.vocab) = (context, vocab);
        self
    }

    /// Replaces the path of a config.json by what it says.
    fn with_text_of_model(mut self) -> Result<Self> {
        if !is_model_path(&self.model) {
            return Ok(self);
        }
        let model = model_shape(&self.model)?;
        let Some(text) = model_text(&model) else {
            // A GPT-2, of which settings have the sizes.
            let heads = model.blocks.first().map_or(0, |run| run.block.attention.heads.query);
            self.layers.get_or_insert(model.layers());
            self.heads.get_or_insert(heads);
            self.dim.get_or_insert(model.dim);
            self.context.get_or_insert(model.context);
            Self::default().model.clone_into(&mut self.model);
            return Ok(self);
        };
        self.model = text;
        Ok(self)
    }
}

/// Returns the settings in the folder of a run, or of one of its ranks where rank 0's is on another machine.
/// `None` if there are none that can be read.
fn settings_of(run: &Path) -> Option<TrainArgs> {
    let ranks = std::fs::read_dir(run.join(RANKS)).into_iter().flatten().filter_map(Result::ok);
    let mut folders: Vec<_> = ranks.map(|rank| rank.path()).collect();
    folders.sort_unstable();
    folders.insert(0, run.to_owned());
    let read = |folder: &PathBuf| {
        let path = folder.join(CONFIG);
        let text = std::fs::read_to_string(&path).ok()?;
        let settings = TrainArgs::from_toml(&text, &path);
        settings.inspect_err(|error| tracing::debug!(%error, "the run's settings cannot be read")).ok()
    };
    folders.iter().find_map(read)
}
