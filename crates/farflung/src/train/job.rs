//! What all workers of a run share: the model's shape, the data, the settings.

use std::path::PathBuf;
use std::sync::Arc;

use farflung_base::Nanos;
use farflung_tensor::{Device, DeviceName, TensorError};
use farflung_zoo::{Corpus, GptConfig, HoldOut, Sampler, Shard, Split, Tokenizer, ZooError, tokenizer};

use super::stages;
use crate::config::choice::TokenizerKind;
use crate::signals::Stop;
use crate::{Result, TrainConfig, corpus};

/// A run before its workers exist.
#[derive(Debug, Clone)]
pub struct Job {
    /// The settings.
    pub config: TrainConfig,
    /// The model's shape.
    pub model: GptConfig,
    /// How text becomes tokens.
    pub tokenizer: Arc<dyn Tokenizer>,
    /// What workers train on.
    pub training: Split,
    /// What losses are validated on: the last tenth.
    pub held_out: Split,
    /// Where the text came from, in words.
    pub source: String,
    /// Hash of the data.
    pub hash: String,
    /// Number of workers in all processes.
    pub world: usize,
    /// Whether to stop early.
    pub stop: Stop,
    /// The run's folder; `None` writes nothing.
    pub out: Option<PathBuf>,
}

impl Job {
    /// Opens the data and settles the model's shape.
    ///
    /// Errors: whatever is wrong with the data or the shape, with file and field.
    pub fn new(config: TrainConfig, world: usize, stop: Stop) -> Result<Self> {
        config.validate()?;
        let tokenizer = tokenizer::by_name(match config.tokenizer {
            TokenizerKind::Byte => "byte",
            TokenizerKind::Gpt2 => "gpt2",
        })?;
        let model = shape(&config, tokenizer.vocab_size())?;
        let (corpus, source) = if let Some(path) = &config.data {
            (Corpus::open(path, &*tokenizer)?, path.display().to_string())
        } else {
            let name = "the source of our own dependencies";
            (Corpus::from_bytes(name, &corpus::default_text()?.0, &*tokenizer)?, name.to_owned())
        };
        let hash = corpus.hash();
        let (training, held_out) = corpus.split(HoldOut::Standard)?;
        Ok(Self { config, model, tokenizer, training, held_out, source, hash, world, stop, out: None })
    }

    /// A replica's batches; without stages, each rank is one.
    pub fn sampler(&self, rank: usize) -> Result<Sampler, ZooError> {
        let shard = Shard { rank, world: self.replicas(), batch: self.config.batch };
        Sampler::random(self.training.clone(), self.config.seed, shard, self.model.context)
    }

    /// A replica's share of the held-out batches.
    pub fn evaluation(&self, rank: usize) -> Result<Sampler, ZooError> {
        let shard = Shard { rank, world: self.replicas(), batch: self.config.batch };
        let steps = (self.config.eval_batches as usize).div_ceil(self.replicas());
        Sampler::evaluation(self.held_out.clone(), shard, self.model.context, steps)
    }

    /// Copies of the model that train side by side: the workers, or as many of them as there are stages make one.
    #[must_use]
    pub const fn replicas(&self) -> usize {
        self.world / self.config.stages
    }

    /// Microbatches whose gradients a replica sums for a step.
    #[must_use]
    pub fn microbatches(&self) -> usize {
        stages::microbatches(&self.config)
    }

    /// Sequences of a step, over all replicas.
    #[must_use]
    pub fn sequences(&self) -> u64 {
        (self.config.batch * self.microbatches() * self.replicas()) as u64
    }

    /// Tokens that one replica trains on in a step.
    #[must_use]
    pub fn tokens_per_replica(&self) -> u64 {
        (self.config.batch * self.microbatches() * self.model.context) as u64
    }

    /// Modelled time of `flops` on a worker.
    #[must_use]
    pub fn modelled(&self, flops: f64) -> Nanos {
        Nanos::from_secs_f64(flops / self.config.compute_rate)
    }

    /// The device of a rank, opened.
    ///
    /// Errors: that there is none of that name here, and why.
    pub fn device(&self, rank: usize, threads: usize) -> Result<Device, TensorError> {
        let device =
            Device::open(self.config.device.of(rank), threads)?.with_precision(self.config.precision);
        // Where the settings say a processor, a note does.
        let named = self.config.device.of(rank) == DeviceName::Cpu;
        if self.config.offload > 0 && !named && device.tensor(&[0.0_f32], 1)?.host::<f32>().is_some() {
            let device = device.name();
            tracing::warn!(rank, device, "--offload changes nothing: this device's memory is the host's");
        }
        Ok(device)
    }

    /// Threads of each worker when `local` of them share this machine.
    #[must_use]
    pub fn threads(&self, local: usize) -> usize {
        let cores = || std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        match self.config.threads {
            0 => cores().div_ceil(local.max(1)),
            n => n,
        }
    }
}

/// The preset with what the settings say instead; weights to start from bring their own shape.
pub(super) fn shape(config: &TrainConfig, vocab: usize) -> Result<GptConfig> {
    let mut model = match &config.init_from {
        Some(folder) => farflung_zoo::weights::Weights::open(folder)?.config(),
        None => GptConfig { vocab, ..GptConfig::preset(&config.model)? },
    };
    for (field, value) in [
        (&mut model.layers, config.layers),
        (&mut model.heads, config.heads),
        (&mut model.dim, config.dim),
        (&mut model.context, config.context),
    ] {
        *field = value.unwrap_or(*field);
    }
    model.validate()?;
    Ok(model)
}
