//! Values shared by all workers of a run: the settings, the model's shape, the plan, the data.

use std::path::PathBuf;
use std::sync::Arc;

use farflung_base::{Algorithm, Nanos, Topology};
use farflung_comm::Cancel;
use farflung_compress::AverageSpec;
use farflung_optim::AverageConfig;
use farflung_parallel::{Cluster, LocalSteps, Plan, membership, whole_groups};
use farflung_tensor::{Device, DeviceName, TensorError};
use farflung_zoo::data::{ReadOptions, Reading};
use farflung_zoo::{
    Corpus, HoldOut, ModelSpec, Resize, Sampler, Shard, Sharding, Split, Tokenizer, ZooError,
};

use super::bound_plan::BoundPlan;
use super::costs::Machines;
use super::examples::ExampleSets;
use super::fault::{Departure, Failure, Fault};
use super::initial::InitialWeights;
use super::plan_start::PlanStart;
use super::round_plan::RoundPlan;
use super::text_parts::TextParts;
use super::text_tokens::check_tokens;
use super::token_rows::fits;
use super::{averages, combination, costs, division, links, planned};
use crate::config::choice::{BalanceKind, SamplingKind};
use crate::signals::Stop;
use crate::{Error, Result, RunSettings, TrainConfig, corpus, model_shape};

/// A run whose workers are not started yet.
#[derive(Debug, Clone)]
pub struct Job {
    /// The settings that are not part of the plan.
    pub config: RunSettings,
    /// The model's shape.
    pub model: ModelSpec,
    /// Every decision that the ranks share.
    pub plan: BoundPlan,
    /// The point at which the plan's steps and microbatches begin.
    pub plan_start: PlanStart,
    /// The local steps that each replica takes, if earlier members' plans determine some of them; `None` if the
    /// plan determines all.
    pub since_members_changed: Option<LocalSteps>,
    /// The plan with which the current round of local steps began, if a pipeline was lost in it.
    pub round_plan: Option<Arc<RoundPlan>>,
    /// Whether members may join and leave during training.
    pub elastic: bool,
    /// Whether a pipeline waits for the averages of all others before it applies a step, as it does where
    /// members may leave. For comparison: see [`NormVote::Pipeline`].
    ///
    /// [`NormVote::Pipeline`]: farflung_parallel::step::NormVote::Pipeline
    pub late_vote: bool,
    /// The settings from which plans are made when members of pipelines join and leave; `None` if each member
    /// holds the whole model.
    pub pipelines: Option<Arc<TrainConfig>>,
    /// The settings as the user gave them: the wishes from which the plan was made, and `config`. They are
    /// written to files and sent to newcomers.
    pub given: Arc<TrainConfig>,
    /// Cancels the steps of a plan whose members are about to change.
    pub change: Option<Cancel>,
    /// The view of the members that form its pipelines.
    pub view: Option<membership::ViewId>,
    /// Number of doublings of the deadline of the settings.
    pub doublings: u32,
    /// The machines and links of `--topology`.
    pub cluster: Option<Cluster>,
    /// Speed of each rank's machine on the virtual clock, in FLOP/s.
    pub rates: Vec<f64>,
    /// The tokenizer of the text.
    pub tokenizer: Arc<dyn Tokenizer>,
    /// The training data.
    pub training: Split,
    /// The validation data: the source's own validation files, else the last tenth of the text.
    pub held_out: Split,
    /// The rows of both parts, if the data is examples.
    pub examples: Option<ExampleSets>,
    /// Which replica trains on which part of the data.
    pub text_parts: TextParts,
    /// Description of where the text came from.
    pub source: String,
    /// What was read of the data.
    pub reading: Arc<Reading>,
    /// Hash of the text.
    pub hash: String,
    /// Hash of the tokens and of how they are divided: see [`Corpus::identity`].
    pub data_identity: String,
    /// The initial weights, if they are read from a folder.
    pub initial: Option<InitialWeights>,
    /// Number of workers in all processes.
    pub world: usize,
    /// The stop request of the run.
    pub stop: Stop,
    /// The run's folder; `None` writes no files.
    pub out: Option<PathBuf>,
    /// Number of processes of the job.
    pub processes: usize,
    /// A bit that is flipped on one rank: for tests and benches.
    pub fault: Option<Fault>,
    /// A failure that a test injects.
    pub failure: Option<Failure>,
    /// A member that a test makes leave.
    pub departure: Option<Departure>,
    /// Whether newcomers take the state while all members wait, even if they could fetch it while the members
    /// train: for tests and benches.
    pub barrier: bool,
}

impl Job {
    /// Opens the data and determines the model's shape and the plan.
    ///
    /// Errors: an error in the data, the shape or the plan, with file and field.
    pub fn new(config: TrainConfig, world: usize, stop: Stop) -> Result<Self> {
        Self::read(config, world, stop).map_err(Error::of_input)
    }

    fn read(config: TrainConfig, world: usize, stop: Stop) -> Result<Self> {
        config.validate()?;
        let mut config = config.with_own_model()?;
        let tokenizer = config.open_tokenizer()?;
        let mut model = shape(&config, tokenizer.vocab_size())?;
        let rows = config.token_rows()?;
        if let Some(rows) = &rows {
            config = config.fitting(rows, &model, world);
            model = shape(&config, tokenizer.vocab_size())?;
            rows.check(model.vocab, model.context)?;
        }
        let Decided { config, plan, cluster, rates } = Decided::of(config, &model, world)?;
        rows.iter().try_for_each(|rows| fits(rows, &plan))?;
        let (corpus, source) = if let Some(rows) = rows {
            let source = rows.path().display().to_string();
            (Corpus::from_rows(rows), source)
        } else if let Some(path) = &config.data {
            let corpus = Corpus::open_with(path, &*tokenizer, read_options(&config))?;
            (corpus, path.display().to_string())
        } else {
            let name = "the source of our own dependencies";
            (default_corpus(name, &config, &*tokenizer)?, name.to_owned())
        };
        let (hash, reading) = (corpus.hash(), Arc::clone(corpus.reading()));
        let mut data_identity = corpus.identity(uses_documents(&config));
        let initial = InitialWeights::of(&config)?;
        let (training, held_out) = corpus.split(HoldOut::Standard)?;
        check_tokens(&[&training, &held_out], &*tokenizer, &model, config.objective)?;
        let world = plan.ranks() as usize;
        let splits = [&training, &held_out];
        let examples = ExampleSets::of(&config.run_settings(), &plan, splits, model.context)?;
        if examples.is_some() && !config.packing {
            data_identity.push_str(", a row for each example");
        }
        let text_parts = TextParts::of(&config.run_settings(), &plan, (&training, &reading), model.context)?;
        Ok(Self {
            config: config.run_settings(),
            model,
            plan,
            plan_start: PlanStart::default(),
            since_members_changed: None,
            round_plan: None,
            elastic: false,
            late_vote: false,
            pipelines: None,
            given: Arc::new(config),
            change: None,
            view: None,
            doublings: 0,
            cluster,
            rates,
            tokenizer,
            training,
            held_out,
            examples,
            text_parts,
            source,
            reading,
            hash,
            data_identity,
            initial,
            world,
            stop,
            out: None,
            processes: 1,
            fault: None,
            failure: None,
            barrier: false,
            departure: None,
        })
    }

    /// Returns a job with other settings for the same model and data, which are not read again.
    ///
    /// Errors: an invalid plan.
    pub fn with_config(&self, config: TrainConfig, world: usize) -> Result<Self> {
        let Decided { config, plan, cluster, rates } = Decided::of(config, &self.model, world)?;
        let world = plan.ranks() as usize;
        let splits = [&self.training, &self.held_out];
        let examples = ExampleSets::of(&config.run_settings(), &plan, splits, self.model.context)?;
        let text = (&self.training, &*self.reading);
        let text_parts = TextParts::of(&config.run_settings(), &plan, text, self.model.context)?;
        let (given, config) = (Arc::new(config.clone()), config.run_settings());
        Ok(Self { config, plan, given, cluster, rates, examples, text_parts, world, ..self.clone() })
    }

    /// Returns the job with another plan, for the same model and data.
    ///
    /// Errors: an invalid plan.
    pub fn with_plan(&self, plan: Plan) -> Result<Self> {
        let plan = BoundPlan::new(plan)?;
        let config = &self.config;
        combination::check(config, &plan)?;
        planned::check_warmup(config, &plan)?;
        division::check(&plan, &self.model)?;
        let plan = averages::resolve(plan, &self.model, config, self.cluster.as_ref())?;
        let rates = costs::rates(config, &self.model, &plan, self.cluster.as_ref());
        self.examples.iter().try_for_each(|examples| examples.check(config, &plan))?;
        let world = plan.ranks() as usize;
        let text = (&self.training, &*self.reading);
        let text_parts = TextParts::of(config, &plan, text, self.model.context)?;
        let (since_members_changed, round_plan) = (None, None);
        Ok(Self { plan, since_members_changed, round_plan, rates, text_parts, world, ..self.clone() })
    }

    /// Returns the settings as the user gave them, whatever the current plan is.
    #[must_use]
    pub fn settings(&self) -> &TrainConfig {
        &self.given
    }

    /// Returns whether a checkpoint is of this data, by the hash in it. Those of earlier versions have the hash
    /// of the text. With own data, a rank that gets another's state keeps its own text.
    pub(super) fn has_data(&self, hash: &str) -> bool {
        self.config.own_data || hash == self.data_identity || hash == self.hash
    }

    /// Returns the time for which ranks wait for each other.
    #[must_use]
    pub fn deadline(&self) -> Nanos {
        Nanos(self.config.deadline.0.saturating_mul(1 << self.doublings.min(32)))
    }

    /// Returns the job with another plan, which begins after `step` steps of this one.
    ///
    /// Errors: an invalid plan.
    pub(super) fn with_plan_after(&self, step: u64, plan: Plan) -> Result<Self> {
        let base = PlanStart { step, microbatches: self.microbatches_after(step) };
        Ok(Self { plan_start: base, ..self.with_plan(plan)? })
    }

    /// Returns the local steps that each replica takes.
    pub(super) fn local_steps(&self) -> LocalSteps {
        self.since_members_changed.clone().unwrap_or_else(|| self.plan.local_steps())
    }

    /// Returns the links between the ranks.
    ///
    /// Errors: a topology file that lacks one of the plan's machines.
    pub fn topology(&self) -> Result<Topology> {
        links::of_plan(&self.config, &self.plan, self.cluster.as_ref())
    }

    /// Returns the machines and links of the plan.
    ///
    /// Errors: as [`Job::topology`].
    pub fn machines(&self) -> Result<Machines> {
        Ok(Machines { topology: self.topology()?, rates: self.rates.clone() })
    }

    /// Returns the training sequences of a replica, by their numbers over all replicas and steps. Without
    /// `--shards` they are the same for all replicas.
    pub fn sampler(&self, replica: usize) -> Result<Sampler, ZooError> {
        self.sequences_of(self.whole_windows(replica)?)
    }

    /// Returns a sampler that makes sequences of windows as the settings say.
    fn sequences_of(&self, sampler: Sampler) -> Result<Sampler, ZooError> {
        let sampler = if self.config.document_mask { sampler.by_documents() } else { sampler };
        sampler.with_objective(self.config.objective, self.config.seed, self.model.vocab)
    }

    fn whole_windows(&self, replica: usize) -> Result<Sampler, ZooError> {
        if let Some(examples) = &self.examples {
            return examples.sampler(self.config.seed, &self.plan);
        }
        let shard = Shard::whole(self.plan.batch as usize);
        if self.training.rows().is_some() {
            let lanes = self.plan.sequences();
            return Sampler::rows(self.training.clone(), shard, self.model.context, lanes);
        }
        let (training, seed, context) = (self.training.clone(), self.config.seed, self.model.context);
        if let Some(shards) = &self.text_parts.shards {
            let part = self.text_parts.part_of(&self.plan, replica);
            return Sampler::within(training, shards.of(part), seed, shard, context);
        }
        match self.config.sampling {
            SamplingKind::Random => Sampler::random(training, seed, shard, context),
            SamplingKind::Epochs => Sampler::epochs(training, seed, shard, context, self.plan.sequences()),
        }
    }

    /// Returns a replica's share of the held-out windows: the same windows over all replicas, whatever their
    /// number and the batch are. Where replicas train paths, those that take its path, by their first tokens,
    /// which do not count.
    pub fn evaluation(&self, replica: usize) -> Result<Sampler, ZooError> {
        let (plan, context) = (&self.plan, self.model.context);
        let (held_out, windows) = (self.held_out.clone(), self.config.eval_windows());
        let (replicas, paths, batch) = (plan.replicas() as usize, plan.paths() as usize, plan.batch as usize);
        let Some(router) = &self.text_parts.router else {
            // Replicas that divide sequences evaluate the same ones.
            let readers = plan.context.readers() as usize;
            let shard = Shard { rank: whole_groups(replica, readers), world: plan.readers() as usize, batch };
            if let Some(examples) = &self.examples {
                return examples.evaluation(shard, windows);
            }
            return self.sequences_of(Sampler::evaluation(held_out, shard, context, windows)?);
        };
        let shard = Shard { rank: replica / paths, world: replicas / paths, batch };
        let path = plan.path(replica as u32) as usize;
        let sampler = Sampler::evaluation_routed(held_out, shard, context, windows, router, path)?;
        Ok(sampler.without_first_targets(router.prefix() - 1))
    }

    /// Returns the path that the prompt of the run's sample takes; 0 if all replicas train one model.
    ///
    /// Errors: those of the tokenizer.
    pub(super) fn path_of_prompt(&self) -> Result<u32> {
        let Some(router) = &self.text_parts.router else { return Ok(0) };
        Ok(router.path_of(&*self.tokenizer, &self.config.prompt)? as u32)
    }

    /// Returns the tokens of all replicas in the first `steps` steps.
    #[must_use]
    pub fn tokens_after(&self, steps: u64) -> u64 {
        if let Some(rows) = self.training.rows() {
            return steps.saturating_mul(rows.targets());
        }
        self.microbatches_after(steps) * u64::from(self.plan.batch) * self.model.context as u64
    }

    /// Returns the microbatches of all replicas in the first `steps` steps, which the plan, or the one with
    /// which its first round began, must have reached.
    #[must_use]
    pub fn microbatches_after(&self, steps: u64) -> u64 {
        match self.round_plan.as_deref().filter(|round| round.has(steps)) {
            Some(round) => round.microbatches_after(steps),
            None => self.plan_start.microbatches_after(&self.plan.local_steps(), steps),
        }
    }

    /// Returns the tokens of all replicas in a step that all replicas take.
    #[must_use]
    pub fn tokens_per_step(&self) -> u64 {
        if let Some(rows) = self.training.rows() {
            return rows.targets();
        }
        self.plan.sequences() * self.model.context as u64
    }

    /// Returns whether gradients are averaged at each step, so that replicas always have the same parameters.
    #[must_use]
    pub fn averages_each_step(&self) -> bool {
        self.plan.averages_each_step()
    }

    /// Returns the codec of averages.
    #[must_use]
    pub fn codec(&self) -> AverageSpec {
        self.plan.outermost().codec
    }

    /// Returns the algorithm for the few values that no codec encodes: a ring in place of all-gather, and in
    /// place of direct if the plan has a codec; else the plan's own algorithm.
    #[must_use]
    pub fn plain_algorithm(&self) -> Algorithm {
        self.plan.outermost().plain_algorithm()
    }

    /// Returns the settings for averaging the values of parts over their holders.
    pub(super) fn average_config(&self) -> AverageConfig {
        AverageConfig { seed: self.config.seed, ..self.plan.outermost().averages() }
    }

    /// Opens the device of a rank.
    ///
    /// Errors: [`TensorError`] with the reason, if this machine has no such device.
    pub fn device(&self, rank: usize, threads: usize) -> Result<Device, TensorError> {
        let device = Device::open(self.config.device.of(rank), threads)?.with_precision(self.plan.precision);
        // If the settings name the CPU, the notes at the start of the run already contain this warning.
        let named = self.config.device.of(rank) == DeviceName::Cpu;
        let offloads = self.plan.parts.iter().any(|part| part.offload > 0);
        if offloads && !named && device.tensor(&[0.0_f32], 1)?.host::<f32>().is_some() {
            let device = device.name();
            tracing::warn!(rank, device, "--offload changes nothing: this device's memory is the host's");
        }
        Ok(device)
    }

    /// Returns whether this rank can leave without ending the run, since others continue.
    #[must_use]
    pub const fn leaves_alone(&self) -> bool {
        self.elastic && self.world > 1
    }

    /// Returns whether stages become pools of members that come and leave, as soon as there are enough members.
    #[must_use]
    pub fn is_pooled(&self) -> bool {
        self.pipelines.as_ref().is_some_and(|wished| wished.is_pooled())
    }

    /// Returns whether ranks keep what they have computed of a step in which another rank is lost.
    #[must_use]
    pub fn keeps_work(&self) -> bool {
        self.is_pooled() && self.config.keep_work && self.plan.pools().is_some()
    }

    /// Returns whether members' shares of a step depend on their speed.
    #[must_use]
    pub fn follows_speed(&self) -> bool {
        let level = self.plan.outermost();
        self.elastic && self.config.balance == BalanceKind::BySpeed && level.steps.is_empty()
    }

    /// Returns the number of threads of each worker when `local` workers share this machine.
    #[must_use]
    pub fn threads(&self, local: usize) -> usize {
        let cores = || std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        match self.config.threads {
            0 => cores().div_ceil(local.max(1)),
            n => n,
        }
    }
}

/// Returns whether the settings use the borders of documents.
fn uses_documents(config: &TrainConfig) -> bool {
    config.shards == Sharding::Files || config.document_mask
}

/// Returns the default text; if documents are used, each file is one.
fn default_corpus(name: &str, config: &TrainConfig, tokenizer: &dyn Tokenizer) -> Result<Corpus> {
    let (text, _) = corpus::default_text()?;
    if !uses_documents(config) {
        return Ok(Corpus::from_bytes(name, &text, tokenizer)?);
    }
    let documents = corpus::default_documents()?;
    Ok(Corpus::from_texts(name, documents.iter().map(Vec::as_slice), tokenizer)?)
}

/// Returns the shape of the settings' model, with the sizes that they give, for a tokenizer with `vocab`
/// tokens.
pub(super) fn shape(config: &TrainConfig, vocab: usize) -> Result<ModelSpec> {
    let model = model_shape(&config.model)?.resized(Resize {
        layers: config.layers,
        heads: config.heads,
        dim: config.dim,
        context: config.context,
        vocab: Some(config.vocab.unwrap_or(vocab.saturating_add(config.objective.own_ids()))),
    })?;
    let model = config.with_experts(config.with_attention(model)?)?;
    config.check_groups(&model)?;
    Ok(model)
}

/// Returns the plan that results from settings for `world` ranks, without reading the data.
///
/// Errors: as [`Job::new`], except those of the data.
pub fn plan_of(config: TrainConfig, world: usize) -> Result<BoundPlan> {
    config.validate()?;
    let config = config.with_own_model()?;
    let model = shape(&config, config.open_tokenizer()?.vocab_size())?;
    Ok(Decided::of(config, &model, world)?.plan)
}

/// Returns how the files of the data are read.
pub(super) const fn read_options(config: &TrainConfig) -> ReadOptions {
    ReadOptions {
        encoding: config.encoding,
        special_tokens: config.special_tokens,
        token_type: config.token_type,
        loss_on: config.loss_on,
        as_texts: false,
    }
}

/// Values that follow from the settings and the plan, for a model.
struct Decided {
    config: TrainConfig,
    plan: BoundPlan,
    cluster: Option<Cluster>,
    rates: Vec<f64>,
}

impl Decided {
    fn of(config: TrainConfig, model: &ModelSpec, world: usize) -> Result<Self> {
        let run = config.run_settings();
        let cluster = links::cluster(&run)?;
        let plan = if let Some(path) = &config.plan {
            planned::from_file(path, model, world)?
        } else {
            combination::check_wished(&config, world)?;
            if cluster.is_some() {
                // A topology for another number of ranks is rejected before anything else is derived from it.
                links::declared(&run, world, cluster.as_ref())?;
            }
            planned::from_settings(&config, model, world, cluster.as_ref())?
        };
        combination::check(&run, &plan)?;
        let mut plan = averages::resolve(plan, model, &run, cluster.as_ref())?;
        let rates = costs::rates(&run, model, &plan, cluster.as_ref());
        if config.plan.is_none() {
            plan = planned::with_rates(&plan, (&config, model), &rates)?;
        }
        planned::check_warmup(&run, &plan)?;
        Ok(Self { config, plan, cluster, rates })
    }
}
