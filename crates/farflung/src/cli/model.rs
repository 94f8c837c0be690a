//! Loads a trained model for `generate` and `eval`: from a checkpoint, a run's folder, or a Hugging Face
//! folder.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use farflung::tensor::{Device, DeviceName, Precision, Tensor};
use farflung::zoo::weights::Weights;
use farflung::zoo::{Stage, Tokenizer, tokenizer};
use farflung::{Error, Result, finite, run_dir};

/// Which model to load, and how to run it.
#[derive(Debug, clap::Args)]
pub(crate) struct ModelArgs {
    /// A run's folder (its newest checkpoint is used), a checkpoint, or a folder with Hugging Face GPT-2
    /// weights.
    #[arg(value_name = "DIR")]
    model: PathBuf,
    /// How text is split into tokens: byte or gpt2. Default: byte for a vocabulary of 256, else gpt2.
    #[arg(long, value_name = "KIND")]
    tokenizer: Option<String>,
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
}

/// Returns the folder that contains the weights.
fn weights_folder(path: &Path) -> Result<PathBuf> {
    if path.join("config.json").is_file() {
        return Ok(path.to_owned());
    }
    match run_dir::latest(path)? {
        Some(checkpoint) => Ok(checkpoint.path().to_owned()),
        None => Err(Error::Setting {
            field: "model",
            value: path.display().to_string(),
            expected: "the folder of a run with a checkpoint, a checkpoint, or a folder with config.json"
                .to_owned(),
        }),
    }
}

impl ModelArgs {
    pub(crate) fn load(&self) -> Result<Loaded> {
        let threads = match self.threads {
            0 => std::thread::available_parallelism().map_or(1, std::num::NonZero::get),
            n => n,
        };
        farflung::threads::check(threads, 1)?;
        let mut weights = Weights::open(&weights_folder(&self.model)?)?;
        let device = Device::open(self.device, threads)?.with_precision(self.precision);
        let stage = Stage::whole(weights.config(), &device)?;
        let params = stage.load(&mut weights)?;
        finite::check_flat("", stage.layout(), &params.to_vec::<f32>()?)?;
        let vocab = stage.config().vocab;
        let default = if vocab == 256 { "byte" } else { "gpt2" };
        let tokenizer = tokenizer::by_name(self.tokenizer.as_deref().unwrap_or(default))?;
        if tokenizer.vocab_size() > vocab {
            return Err(Error::Setting {
                field: "tokenizer",
                value: format!("{} with {} tokens", tokenizer.name(), tokenizer.vocab_size()),
                expected: format!("a tokenizer with at most {vocab} tokens, the model's vocabulary"),
            });
        }
        Ok(Loaded { stage, params, tokenizer })
    }
}
