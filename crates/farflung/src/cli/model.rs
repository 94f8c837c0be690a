//! Loads a trained model for `generate` and `eval`.

use std::path::PathBuf;
use std::sync::Arc;

use farflung::base::Rank;
use farflung::config::choice::TokenizerKind;
use farflung::config::value::Setting as _;
use farflung::model_source::RunReading;
use farflung::tensor::{Device, DeviceName, Precision, Tensor};
use farflung::train::OpenedPart;
use farflung::zoo::data::TextRouter;
use farflung::zoo::spec::Positions;
use farflung::zoo::{ModelSpec, Resize, Stage, Tokenizer};
use farflung::{Error, ModelSource, Result, finite, terminal, tokenizers};

/// Which model to load, and how to run it.
#[derive(Debug, clap::Args)]
pub(crate) struct ModelArgs {
    /// A run's folder (its newest checkpoint is used), a checkpoint, a folder with config.json and
    /// model.safetensors as Hugging Face's programs write it, the file of weights in such a folder, or a GGUF
    /// file.
    #[arg(value_name = "PATH")]
    model: PathBuf,
    /// The path to take, of a run that trained paths. Default: a text takes one by its first tokens.
    #[arg(long, value_name = "N")]
    path: Option<usize>,
    /// How text is split into tokens: byte, gpt2, or the path of a tokenizer.json, a model or a run. Default:
    /// the model's own; without one, byte for a vocabulary of 256 (or padded to less than 384), else gpt2.
    #[arg(long, value_name = "KIND", value_parser = TokenizerKind::from_flag)]
    tokenizer: Option<TokenizerKind>,
    /// Number of threads; 0 takes all cores.
    #[arg(long, value_name = "N", default_value_t = 0)]
    threads: usize,
    /// Device: auto, cpu, `wgpu[:n]` or `cuda[:n]`.
    #[arg(long, value_name = "NAME", default_value = "cpu")]
    device: DeviceName,
    /// Type to which matrix products round their operands: f32, bf16 or f16.
    #[arg(long, value_name = "KIND", default_value_t = Precision::F32)]
    precision: Precision,
}

/// A loaded model.
pub(crate) struct Loaded {
    pub(crate) stage: Stage,
    pub(crate) params: Tensor,
    pub(crate) tokenizer: Arc<dyn Tokenizer>,
    /// How the run that trained it read its text.
    pub(crate) reading: RunReading,
}

/// What the text of a model needs whose parts are on several ranks.
pub(crate) struct PartText {
    pub(crate) tokenizer: Arc<dyn Tokenizer>,
    /// How the run that trained the model read its text.
    pub(crate) reading: RunReading,
}

/// The models of a run.
pub(crate) struct Models {
    /// One, or one for each path.
    pub(crate) sources: Vec<ModelSource>,
    /// Decides which of several a text takes.
    pub(crate) router: Option<TextRouter>,
    /// Targets at the beginning of a text that decide which path it takes; 0 if there is one model.
    pub(crate) deciding: usize,
}

/// A loaded model without a tokenizer.
pub(crate) struct LoadedModel {
    pub(crate) stage: Stage,
    pub(crate) params: Tensor,
}

impl From<Loaded> for LoadedModel {
    fn from(Loaded { stage, params, .. }: Loaded) -> Self {
        Self { stage, params }
    }
}

impl ModelArgs {
    /// Opens the model for sequences of this length, as in [`ModelArgs::open`], and its tokenizer. Of a run
    /// that trained paths, it is the model of the path that `text` takes. An error of its files is one of the
    /// input.
    pub(crate) fn load(&self, length: Option<usize>, text: &str) -> Result<Loaded> {
        let open = || {
            let source = ModelSource::find(&self.model)?;
            let Some(paths) = source.path_models()?.filter(|_| self.path.is_none()) else {
                return self.open_whole(&self.source()?, length);
            };
            let tokenizer = self.tokenizer(&source, source.open()?.spec().vocab)?;
            let path = paths.router().path_of(&*tokenizer, text)?;
            self.open_whole(&source.of_path(&paths, path)?, length)
        };
        open().map_err(Error::of_input)
    }

    /// Opens the models of a run: those of all its paths, or that of the path that the user chose. An error of
    /// its files is one of the input.
    pub(crate) fn load_all(&self) -> Result<Models> {
        let find = || {
            let source = ModelSource::find(&self.model)?;
            let paths = source.path_models()?;
            let deciding = paths.as_ref().map_or(0, |paths| paths.router().prefix() - 1);
            Ok(match paths.filter(|_| self.path.is_none()) {
                Some(paths) => {
                    let found = |path| source.of_path(&paths, path);
                    let sources = (0..paths.paths().len()).map(found).collect::<Result<_>>()?;
                    Models { sources, router: Some(paths.router().clone()), deciding }
                }
                None => Models { sources: vec![self.source()?], router: None, deciding },
            })
        };
        find().map_err(Error::of_input)
    }

    /// Returns where the model is: of a run that trained paths, that of the path that the user chose.
    fn source(&self) -> Result<ModelSource> {
        ModelSource::find_path(&self.model, self.path)
    }

    /// Opens a model and its tokenizer. An error of its files is one of the input.
    pub(crate) fn open_whole(&self, source: &ModelSource, length: Option<usize>) -> Result<Loaded> {
        let more = |vocab| Ok((self.tokenizer(source, vocab)?, source.run_reading()));
        let (LoadedModel { stage, params }, (tokenizer, reading)) =
            self.open(source, length, more).map_err(Error::of_input)?;
        Ok(Loaded { stage, params, tokenizer, reading })
    }

    /// Opens the model for ids of tokens in rows of this length. An error of its files is one of the input.
    pub(crate) fn load_for_ids(&self, length: usize) -> Result<LoadedModel> {
        let open = || {
            let source = self.source()?;
            if self.path.is_none() && source.path_models()?.is_some() {
                return Err(one_path("rows of tokens do not choose one"));
            }
            self.open(&source, Some(length), |_| Ok(())).map(|(model, ())| model)
        };
        open().map_err(Error::of_input)
    }

    /// Returns the device of one of the process's ranks, `sharers` of which share the cores.
    fn open_device(&self, sharers: usize) -> Result<Device> {
        let threads = match self.threads {
            0 => std::thread::available_parallelism().map_or(1, std::num::NonZero::get).div_ceil(sharers),
            n => n,
        };
        farflung::threads::check(threads, sharers)?;
        Ok(Device::open(self.device, threads)?.with_precision(self.precision))
    }

    /// Opens what one of the process's `ranks` ranks reads its part from, and its device; on rank 0 also what
    /// its text needs, which `check` checks. An error of its files is one of the input.
    pub(crate) fn open_part(
        &self,
        rank: Rank,
        ranks: usize,
        check: impl Fn(&PartText, &ModelSpec) -> Result<()>,
    ) -> Result<(OpenedPart, Option<PartText>)> {
        let files = || {
            let source = ModelSource::find_part(&self.model, rank)?;
            if source.path_models()?.is_some() {
                return Err(one_path(
                    "stages are those of one model: write it with `farflung convert --path N`",
                ));
            }
            let weights = source.open_part()?;
            let leads = rank == Rank(0);
            let text = || {
                let tokenizer = self.tokenizer(&source, weights.spec().vocab)?;
                let text = PartText { tokenizer, reading: source.run_reading() };
                check(&text, weights.spec()).map(|()| text)
            };
            let text = leads.then(text).transpose()?;
            Ok((weights, source.step(), text))
        };
        let (weights, step, text) = files().map_err(Error::of_input)?;
        Ok((OpenedPart { weights, step, device: self.open_device(ranks)? }, text))
    }

    /// Opens a model, and what `more` opens for its number of tokens before the weights are read.
    /// If the model has no table of positions, its context is at most `length`, however long a file says it is.
    fn open<T>(
        &self,
        source: &ModelSource,
        length: Option<usize>,
        more: impl FnOnce(usize) -> Result<T>,
    ) -> Result<(LoadedModel, T)> {
        let device = self.open_device(1)?;
        let mut weights = source.open()?;
        let more = more(weights.spec().vocab)?;
        let spec = weights.spec();
        let context = length.filter(|_| spec.positions == Positions::None).map(|most| most.min(spec.context));
        let spec = spec.resized(Resize { context, ..Resize::default() })?;
        let stage = Stage::whole(&spec, &device)?;
        let params = stage.load(&mut weights)?;
        finite::check_flat("", stage.layout(), &params.to_vec::<f32>()?)?;
        Ok((LoadedModel { stage, params }, more))
    }

    /// Returns the tokenizer for a model with a vocabulary of `vocab` tokens. Notes go to stderr.
    fn tokenizer(&self, source: &ModelSource, vocab: usize) -> Result<Arc<dyn Tokenizer>> {
        let kind = if let Some(kind) = &self.tokenizer {
            kind.clone()
        } else {
            source.check_tokenizer()?;
            source.tokenizer(vocab)?
        };
        let is_own = self.tokenizer.is_none() && matches!(kind, TokenizerKind::File(_));
        let tokenizer = if is_own { source.own_tokenizer()? } else { tokenizers::open(&kind)? };
        if tokenizer.vocab_size() > vocab {
            let (name, size) = (tokenizer.name(), tokenizer.vocab_size());
            let value = match &self.tokenizer {
                Some(_) => format!("{name} with {size} tokens"),
                None => format!("not given, the model has no tokenizer files, and {name} has {size} tokens"),
            };
            let expected = format!("a tokenizer with at most {vocab} tokens, the model's vocabulary");
            return Err(Error::Setting { field: "tokenizer", value, expected });
        }
        // The model's own is not compared with itself, for which it would be read again.
        let note = if is_own { None } else { source.tokenizer_note(&kind, &*tokenizer) };
        if let Some(note) = note {
            terminal::write_stderr(format!("{note}\n"));
        }
        Ok(tokenizer)
    }
}

/// Returns the error that one of several paths must be chosen.
fn one_path(why: &str) -> Error {
    let expected = format!("the number of a path of this run, which trained several: {why}");
    Error::Setting { field: "path", value: "not given".to_owned(), expected }
}
