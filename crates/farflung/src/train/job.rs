//! What all workers of a run share: the model's shape, the data, the settings.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use farflung_base::{Algorithm, Nanos, Topology};
use farflung_comm::Cancel;
use farflung_compress::AverageSpec;
use farflung_optim::AverageConfig;
use farflung_parallel::{Cluster, LocalSteps, Plan, membership};
use farflung_tensor::{Device, DeviceName, TensorError};
use farflung_zoo::config::PRESETS;
use serde::{Deserialize, Serialize};

use farflung_zoo::{
    Corpus, GptConfig, HoldOut, Sampler, Shard, Sharding, Shards, Split, Stage, Tokenizer, ZooError,
    tokenizer,
};

use super::costs::Machines;
use super::fault::{Departure, Failure, Fault};
use super::fingerprint::digest;
use super::{averages, combination, costs, links, planned};
use crate::config::choice::{BalanceKind, SamplingKind, TokenizerKind};
use crate::config::nearest::with_nearest;
use crate::signals::Stop;
use crate::{Error, Result, TrainConfig, corpus, finite};

/// Where the numbers of a plan's steps and microbatches begin: those before belong to other plans of the same
/// run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Base {
    /// Steps before it.
    pub step: u64,
    /// Microbatches of all replicas before it.
    pub microbatches: u64,
}

/// A run before its workers exist.
#[derive(Debug, Clone)]
pub struct Job {
    /// The settings.
    pub config: TrainConfig,
    /// The model's shape.
    pub model: GptConfig,
    /// Every decision that the ranks share.
    pub plan: Plan,
    /// Where the plan's numbers begin.
    pub base: Base,
    /// Who takes a local step when, where that of some steps follows from the plans of other members.
    pub since_members_changed: Option<LocalSteps>,
    /// Whether members come and leave while it trains.
    pub elastic: bool,
    /// The settings that plans are made from when members of pipelines come and leave; none where each member
    /// holds the whole model.
    pub pipelines: Option<Arc<TrainConfig>>,
    /// Ends the steps of a plan whose members are about to change.
    pub change: Option<Cancel>,
    /// The view of the members that form its pipelines.
    pub view: Option<membership::Place>,
    /// How often ranks wait twice as long for each other as the settings say.
    pub doublings: u32,
    /// The machines and links of `--topology`.
    pub cluster: Option<Cluster>,
    /// Operations a second of each rank's machine, on the virtual clock.
    pub rates: Vec<f64>,
    /// How text becomes tokens.
    pub tokenizer: Arc<dyn Tokenizer>,
    /// What workers train on.
    pub training: Split,
    /// What losses are validated on: the last tenth.
    pub held_out: Split,
    /// What each replica has of the training data, where they do not all have all of it.
    pub shards: Option<Shards>,
    /// Where the text came from, in words.
    pub source: String,
    /// Hash of the data.
    pub hash: String,
    /// Hash of the weights that the run starts from, where they are read from a folder.
    pub initial: Option<blake3::Hash>,
    /// Number of workers in all processes.
    pub world: usize,
    /// Whether to stop early.
    pub stop: Stop,
    /// The run's folder; `None` writes nothing.
    pub out: Option<PathBuf>,
    /// Processes of the job.
    pub processes: usize,
    /// A bit that changes on one rank: for tests and benches.
    pub fault: Option<Fault>,
    /// A failure that a test places in the run.
    pub failure: Option<Failure>,
    /// A member that a test has leave.
    pub departure: Option<Departure>,
}

impl Job {
    /// Opens the data and settles the model's shape.
    ///
    /// Errors: whatever is wrong with the data or the shape, with file and field.
    pub fn new(config: TrainConfig, world: usize, stop: Stop) -> Result<Self> {
        config.validate()?;
        let tokenizer = tokenizer_of(&config)?;
        let model = shape(&config, tokenizer.vocab_size())?;
        let Decided { config, plan, cluster, rates } = Decided::of(config, &model, world)?;
        let (corpus, source) = if let Some(path) = &config.data {
            (Corpus::open(path, &*tokenizer)?, path.display().to_string())
        } else {
            let name = "the source of our own dependencies";
            (default_corpus(name, config.shards, &*tokenizer)?, name.to_owned())
        };
        let hash = corpus.hash();
        let initial = config.init_from.as_deref().map(weights_hash).transpose()?;
        let (training, held_out) = corpus.split(HoldOut::Standard)?;
        let world = plan.ranks() as usize;
        let shards = shards_of(&config, &plan, &training, model.context)?;
        Ok(Self {
            config,
            model,
            plan,
            base: Base::default(),
            since_members_changed: None,
            elastic: false,
            pipelines: None,
            change: None,
            view: None,
            doublings: 0,
            cluster,
            rates,
            tokenizer,
            training,
            held_out,
            shards,
            source,
            hash,
            initial,
            world,
            stop,
            out: None,
            processes: 1,
            fault: None,
            failure: None,
            departure: None,
        })
    }

    /// A job with other settings for the same model and data, which are not read again.
    ///
    /// Errors: a plan that cannot be.
    pub fn with_config(&self, config: TrainConfig, world: usize) -> Result<Self> {
        let Decided { config, plan, cluster, rates } = Decided::of(config, &self.model, world)?;
        let world = plan.ranks() as usize;
        let shards = shards_of(&config, &plan, &self.training, self.model.context)?;
        Ok(Self { config, plan, cluster, rates, shards, world, ..self.clone() })
    }

    /// The job under another plan, for the same model and data.
    ///
    /// Errors: a plan that cannot be.
    pub fn with_plan(&self, mut plan: Plan) -> Result<Self> {
        plan.check()?;
        planned::check_names(&plan)?;
        let mut config = self.config.clone();
        config.follow(&plan);
        combination::check(&config, &plan)?;
        planned::check_warmup(&config, &plan.outermost().steps)?;
        averages::resolve(&mut plan, &self.model, &config, self.cluster.as_ref())?;
        let rates = costs::rates(&config, &self.model, &plan, self.cluster.as_ref());
        let world = plan.ranks() as usize;
        let shards = shards_of(&config, &plan, &self.training, self.model.context)?;
        Ok(Self { config, plan, since_members_changed: None, rates, shards, world, ..self.clone() })
    }

    /// How long ranks wait for each other.
    #[must_use]
    pub fn deadline(&self) -> Nanos {
        Nanos(self.config.deadline.0.saturating_mul(1 << self.doublings.min(32)))
    }

    /// The job under another plan from a step on that this one has reached.
    ///
    /// Errors: a plan that cannot be.
    pub(super) fn with_plan_after(&self, step: u64, plan: Plan) -> Result<Self> {
        let base = Base { step, microbatches: self.microbatches_after(step) };
        Ok(Self { base, ..self.with_plan(plan)? })
    }

    /// Who takes a local step when.
    pub(super) fn local_steps(&self) -> LocalSteps {
        self.since_members_changed.clone().unwrap_or_else(|| self.plan.local_steps())
    }

    /// The links between the ranks.
    ///
    /// Errors: a topology file that lacks one of the plan's machines.
    pub fn topology(&self) -> Result<Topology> {
        links::of_plan(&self.config, &self.plan, self.cluster.as_ref())
    }

    /// What the plan runs on.
    ///
    /// Errors: as [`Job::topology`].
    pub fn machines(&self) -> Result<Machines> {
        Ok(Machines { topology: self.topology()?, rates: self.rates.clone() })
    }

    /// The training sequences of a replica, by their numbers over all replicas and steps. Without `--shards`
    /// they are the same for all.
    pub fn sampler(&self, replica: usize) -> Result<Sampler, ZooError> {
        let shard = Shard::whole(self.plan.batch as usize);
        let (training, seed, context) = (self.training.clone(), self.config.seed, self.model.context);
        if let Some(shards) = &self.shards {
            return Sampler::within(training, shards.of(replica), seed, shard, context);
        }
        match self.config.sampling {
            SamplingKind::Random => Sampler::random(training, seed, shard, context),
            SamplingKind::Epochs => Sampler::epochs(training, seed, shard, context, self.plan.sequences()),
        }
    }

    /// A replica's share of the held-out batches.
    pub fn evaluation(&self, replica: usize) -> Result<Sampler, ZooError> {
        let replicas = self.plan.replicas() as usize;
        let shard = Shard { rank: replica, world: replicas, batch: self.plan.batch as usize };
        let steps = (self.config.eval_batches as usize).div_ceil(replicas);
        Sampler::evaluation(self.held_out.clone(), shard, self.model.context, steps)
    }

    /// Tokens of all replicas in the first so many steps.
    #[must_use]
    pub fn tokens_after(&self, steps: u64) -> u64 {
        self.microbatches_after(steps) * u64::from(self.plan.batch) * self.model.context as u64
    }

    /// Microbatches of all replicas in the first so many steps, which the plan has reached.
    #[must_use]
    pub fn microbatches_after(&self, steps: u64) -> u64 {
        let local = self.plan.local_steps();
        self.base.microbatches + local.all_microbatches(steps)
            - local.all_microbatches(self.base.step.min(steps))
    }

    /// Tokens of all replicas in one step that all take.
    #[must_use]
    pub fn tokens_per_step(&self) -> u64 {
        self.plan.sequences() * self.model.context as u64
    }

    /// Whether gradients are averaged at each step, so that replicas are always the same.
    #[must_use]
    pub fn averages_each_step(&self) -> bool {
        averages::each_step(&self.plan)
    }

    /// The codec of averages.
    ///
    /// Errors: none for a plan whose names were checked.
    pub fn codec(&self) -> Result<AverageSpec> {
        Ok(self.plan.outermost().codec.parse()?)
    }

    /// How numbers are summed that no codec packs: as what it packs, or by a ring where that has no region and
    /// no weights.
    #[must_use]
    pub fn plain_algorithm(&self) -> Algorithm {
        averages::plain_algorithm(self.plan.outermost())
    }

    /// How the values of parts are averaged over their holders.
    pub(super) fn average_config(&self) -> Result<AverageConfig> {
        Ok(AverageConfig { seed: self.config.seed, ..averages::config_of(self.plan.outermost())? })
    }

    /// The device of a rank, opened.
    ///
    /// Errors: that there is none of that name here, and why.
    pub fn device(&self, rank: usize, threads: usize) -> Result<Device, TensorError> {
        let device = Device::open(self.config.device.of(rank), threads)?.with_precision(self.plan.precision);
        // For a device that is set to a processor, the run's notes say it.
        let named = self.config.device.of(rank) == DeviceName::Cpu;
        if self.config.offload > 0 && !named && device.tensor(&[0.0_f32], 1)?.host::<f32>().is_some() {
            let device = device.name();
            tracing::warn!(rank, device, "--offload changes nothing: this device's memory is the host's");
        }
        Ok(device)
    }

    /// Whether this rank can leave without ending the run: others go on.
    #[must_use]
    pub const fn leaves_alone(&self) -> bool {
        self.elastic && self.world > 1
    }

    /// Whether stages are pools of the members that come and leave, as soon as there are enough of them.
    #[must_use]
    pub fn is_pooled(&self) -> bool {
        self.pipelines.as_ref().is_some_and(|wished| wished.is_pooled())
    }

    /// Whether members' shares of a step follow their speed.
    #[must_use]
    pub fn follows_speed(&self) -> bool {
        let level = self.plan.outermost();
        let pooled = || self.is_pooled() && self.plan.pools().is_some();
        self.elastic
            && (self.pipelines.is_none() || pooled())
            && self.config.balance == BalanceKind::BySpeed
            && level.steps.is_empty()
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

/// The default text; its files are documents where data are shared out by them.
fn default_corpus(name: &str, sharding: Sharding, tokenizer: &dyn Tokenizer) -> Result<Corpus> {
    let (text, _) = corpus::default_text()?;
    if sharding != Sharding::Files {
        return Ok(Corpus::from_bytes(name, &text, tokenizer)?);
    }
    let documents = corpus::default_documents()?;
    Ok(Corpus::from_texts(name, documents.iter().map(Vec::as_slice), tokenizer)?)
}

/// What each replica has of the training data, where they do not all have all of it.
///
/// Errors: [`Error::Setting`] for what does not go together with shards; too few parts for the replicas.
fn shards_of(config: &TrainConfig, plan: &Plan, training: &Split, context: usize) -> Result<Option<Shards>> {
    let shards = config.shards;
    if shards == Sharding::Random {
        return Ok(None);
    }
    let refuse = |expected: &str| {
        let (field, value, expected) = ("shards", shards.to_string(), expected.to_owned());
        Err(Error::Setting { field, value, expected })
    };
    if config.sampling == SamplingKind::Epochs {
        return refuse("random with `sampling` epochs, whose windows are numbered over the whole text");
    }
    if config.own_data {
        return refuse("random with `own-data`: each process has a text of its own already");
    }
    Ok(Shards::new(shards, training, context, plan.replicas() as usize, config.seed)?)
}

/// Hash of the weights in a folder, tensor by tensor.
///
/// Errors: [`Error::NotFinite`](crate::Error::NotFinite) with the tensor; that the folder does not hold its
/// model.
fn weights_hash(folder: &Path) -> Result<blake3::Hash> {
    let mut weights = farflung_zoo::weights::Weights::open(folder)?;
    let whole = Stage::whole(weights.config(), &Device::cpu(1)?)?;
    let mut hasher = blake3::Hasher::new();
    for p in whole.layout().params() {
        let mut values = vec![0.0; p.shape.len()];
        weights.tensor(&p.name, &mut values)?;
        finite::check(&p.name, &values)?;
        hasher.update(digest(&values).as_bytes());
    }
    Ok(hasher.finalize())
}

/// The preset with what the settings say instead; weights to start from bring their own shape.
pub(super) fn shape(config: &TrainConfig, vocab: usize) -> Result<GptConfig> {
    let mut model = match &config.init_from {
        Some(folder) => farflung_zoo::weights::Weights::open(folder)?.config(),
        None => GptConfig { vocab, ..preset(&config.model)? },
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
    config.check_groups(&model)?;
    Ok(model)
}

/// The preset of a name.
///
/// Errors: [`Error::Setting`] with the names that there are.
pub(super) fn preset(name: &str) -> Result<GptConfig> {
    GptConfig::preset(name).map_err(|_| {
        let names: Vec<_> = PRESETS.iter().map(|(name, _)| *name).collect();
        let expected = with_nearest(format!("one of {}", names.join(", ")), name, &names);
        Error::Setting { field: "model", value: name.to_owned(), expected }
    })
}

/// The plan of some settings for so many ranks, without the data.
///
/// Errors: as [`Job::new`], but for the data.
pub fn plan_of(config: TrainConfig, world: usize) -> Result<Plan> {
    config.validate()?;
    let model = shape(&config, tokenizer_of(&config)?.vocab_size())?;
    Ok(Decided::of(config, &model, world)?.plan)
}

fn tokenizer_of(config: &TrainConfig) -> Result<Arc<dyn Tokenizer>, ZooError> {
    tokenizer::by_name(match config.tokenizer {
        TokenizerKind::Byte => "byte",
        TokenizerKind::Gpt2 => "gpt2",
    })
}

/// What settings and plan decide for a model.
struct Decided {
    config: TrainConfig,
    plan: Plan,
    cluster: Option<Cluster>,
    rates: Vec<f64>,
}

impl Decided {
    fn of(mut config: TrainConfig, model: &GptConfig, world: usize) -> Result<Self> {
        let cluster = links::cluster(&config)?;
        let mut plan = if let Some(path) = &config.plan {
            let plan = planned::from_file(path, model, world)?;
            config.follow(&plan);
            plan
        } else {
            combination::check_wished(&config, world)?;
            if cluster.is_some() {
                // A file for other ranks is refused before anything else is made of it.
                links::declared(&config, world, cluster.as_ref())?;
            }
            planned::from_settings(&config, model, world, cluster.as_ref())?
        };
        combination::check(&config, &plan)?;
        averages::resolve(&mut plan, model, &config, cluster.as_ref())?;
        let rates = costs::rates(&config, model, &plan, cluster.as_ref());
        if config.plan.is_none() {
            planned::set_pool_rates(&mut plan, &config, &rates);
            planned::set_local_steps(&mut plan, &config, &rates)?;
        }
        planned::check_warmup(&config, &plan.outermost().steps)?;
        Ok(Self { config, plan, cluster, rates })
    }
}
