//! A plan: every decision that the ranks of a job share, as data. This module prints, parses, compares and
//! checks plans; `farflung` executes them.

mod check;
mod difference;
mod assignment;
mod context;
mod coordinates;
mod experts;
mod layers_by_speed;
mod limited;
mod local_steps;
mod members;
mod part;
mod paths;
mod pooled;
mod rebalance;
mod tensor;
mod text;
mod unbroken;
mod zero;

#[cfg(test)]
mod tests;

use std::fmt;
use std::ops::Range;

use farflung_base::{Algorithm, Axis, ContextCut, Precision};

use crate::pipeline::{Method, Pools, Updates, VersionSync};
use crate::{Mesh, ParallelError};

pub use assignment::{Assignment, Holding, Move, Needed, PlanPosition, moves, newest_whole};
pub use difference::{Difference, Digest};
pub use layers_by_speed::layers_by_speed;
pub use local_steps::LocalSteps;
pub use members::Replica;
pub use part::{Part, Recompute, even_parts};
pub use paths::PathLevel;
pub use pooled::{PoolAdvice, PoolBalance, Pooling, rates_of};
pub use rebalance::{Advice, Hysteresis, Measured, Rebalance, is_worth_it, shares_by_speed, step_time};

/// How the ranks of a job train one model.
///
/// Ranks are numbered replica by replica: see [`Plan::at`]. The sequences of a step are numbered from 0 over
/// all replicas: the first `batch * microbatches[0]` belong to replica 0, the next to replica 1, and so on. So
/// the training data does not depend on how work is divided over replicas.
///
/// ```
/// use farflung_parallel::Plan;
///
/// let text = r#"
///     version = 1
///     mesh = "data=2,pipeline=1"
///     machines = ["office", "home"]
///     precision = "f32"
///     batch = 4
///     microbatches = [3, 1]
///     [model]
///     name = "nano"
///     layers = 4
///     parameters = 834304
///     [[part]]
///     layers = "0..4"
///     [[level]]
///     method = "ddp"
///     codec = "int8"
/// "#;
/// let plan: Plan = text.parse()?;
/// plan.check()?;
/// assert_eq!(plan.sequences(), 16);
/// assert_eq!(plan.to_string().parse::<Plan>()?.digest(), plan.digest());
/// # Ok::<(), farflung_parallel::ParallelError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use]
pub struct Plan {
    /// The model that the plan is for.
    pub model: PlannedModel,
    /// The mesh `data=REPLICAS,pipeline=STAGES,tensor=RANKS`, with axes in the order of [`Axis::ALL`], of which
    /// the last may be missing. It has no context axis, which is a view of the data axis: see `context`.
    pub mesh: Mesh,
    /// How neighbouring replicas divide the positions of their sequences. They read the same ones, each its
    /// positions, and run each microbatch together. See [`Plan::group`] along [`Axis::Context`] and
    /// [`Axis::Ulysses`].
    pub context: ContextCut,
    /// How the ranks along the tensor axis divide the width of layers: a weight for each. Empty: equally.
    pub tensor_weights: Vec<u32>,
    /// Whether these ranks divide the positions of sequences, too, where each has whole layers.
    pub sequence_parallel: bool,
    /// What replicas divide of what all of them would hold, by its number in "ZeRO" (Rajbhandari et al. 2020):
    /// 0 nothing; 1 the optimizer's state: each rank then updates a shard of its parameters and sends it to the
    /// others; 2 gradients, too; 3 parameters, too.
    pub zero: u32,
    /// How replicas divide it: a weight for each, of which some may be 0. Empty: equally.
    pub zero_weights: Vec<u32>,
    /// Whether each tensor is in one shard, for optimizers that work on whole tensors. Shards are then as long
    /// as their weights say up to half a tensor.
    pub zero_tensors: bool,
    /// How what they send each other is encoded with 3, as the names of two codecs, of weights and of
    /// gradients:
    /// `int8,int4`; or `none`.
    pub zero_codec: String,
    /// Groups of replicas that each have all parameters once more, divided among them: those that have been
    /// gathered once are gathered inside the group until the next update, and gradients are added up there
    /// first (Wang et al. 2023, "ZeRO++"). Empty: no groups.
    pub zero_groups: Vec<Vec<u32>>,
    /// Name of each rank's machine, as in [`Cluster::rank_names`](crate::Cluster::rank_names).
    pub machines: Vec<String>,
    /// Precision to which the operands of matrix products are rounded.
    pub precision: Precision,
    /// Number of sequences in a microbatch.
    pub batch: u32,
    /// Number of microbatches of each replica in one step.
    pub microbatches: Vec<u32>,
    /// How the experts of a mixture are divided. Empty: every replica has all of them. Otherwise neighbouring
    /// replicas, as many as there are weights, form a group, in which each has experts in proportion to its
    /// weight, and all other parameters. They send each other tokens for their experts. See [`Plan::group`]
    /// along [`Axis::Expert`].
    pub experts: Vec<u32>,
    /// Codec of the tokens that go to the experts of other replicas, and of what comes back, by name; `none` is
    /// uncompressed f32.
    pub expert_codec: String,
    /// Levels of modules that paths share, from the first layer on. Empty: all replicas train one model.
    /// Otherwise each replica trains one path, which has a module of each level, and copies of all layers that
    /// are in no level, of the token table and of the head. Replicas average what they have in common. See
    /// [`Plan::path`].
    pub paths: Vec<PathLevel>,
    /// Parts of the model, first to last. All replicas divide the model in the same way.
    pub parts: Vec<Part>,
    /// How microbatches pass through the parts.
    pub pipeline: Pipeline,
    /// Codecs between each part and the next: one entry fewer than parts.
    pub boundaries: Vec<BoundaryCodecs>,
    /// How replicas synchronise, from the innermost groups to the whole job. Two levels make one hierarchical
    /// average: uncompressed inside the groups of the first level, with the second level's codec between
    /// groups.
    pub levels: Vec<Level>,
}

/// The properties of a model on which a plan depends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlannedModel {
    /// Name of the model.
    pub name: String,
    /// Number of blocks.
    pub layers: u32,
    /// Number of trainable parameters.
    pub parameters: u64,
}

/// How microbatches pass through the parts of the model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pipeline {
    /// Source of the order of work.
    pub schedule: ScheduleSource,
    /// Number of parts of each copy of the model on a rank. `None`: the method's default.
    pub chunks: Option<u32>,
    /// Maximum number of microbatches whose activations a rank may hold, for pools and for methods that support
    /// a limit.
    pub memory: Option<u32>,
    /// Version of the weights that a microbatch uses under [`Method::PipeDream`].
    pub version_sync: VersionSync,
    /// Number of tokens of each slice of a sequence. Empty: sequences are not sliced.
    pub slices: Vec<u32>,
}

impl Default for Pipeline {
    /// Returns 1F1B with unsliced sequences.
    fn default() -> Self {
        Self {
            schedule: ScheduleSource::Named(Method::OneFOneB),
            chunks: None,
            memory: None,
            version_sync: VersionSync::Vertical,
            slices: Vec::new(),
        }
    }
}

/// Source of the order of a pipeline's work.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ScheduleSource {
    /// A published method.
    Named(Method),
    /// Lists written by hand, in the notation of [`ComputeOrder`](crate::pipeline::ComputeOrder).
    Text(String),
    /// A list schedule over stages that are pools of ranks.
    Pools(Pools),
}

/// Codecs of one boundary of a pipeline, by name; `none` is uncompressed f32.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BoundaryCodecs {
    /// Codec of hidden states, sent to the next part.
    pub forward: String,
    /// Codec of gradients, sent back.
    pub backward: String,
}

impl Default for BoundaryCodecs {
    fn default() -> Self {
        Self { forward: NO_CODEC.to_owned(), backward: NO_CODEC.to_owned() }
    }
}

/// Name that stands for uncompressed f32 where a codec is given.
pub const NO_CODEC: &str = "none";

/// Name of the schedule over pools of ranks.
pub const POOLS: &str = "pools";

/// How replicas synchronise at one level of the hierarchy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Level {
    /// Groups of replicas; each group averages among its members. Empty: all replicas are one group.
    pub groups: Vec<Vec<u32>>,
    /// Name of the method in the table of `farflung-optim`.
    pub method: String,
    /// Number of steps between two averages. Methods that average gradients in each step have 1.
    pub every: u32,
    /// Number of local steps that each replica takes in one period; see [`LocalSteps`]. A period has as many
    /// steps of the run as the fastest replica takes local steps; this number is a multiple of `every`. Empty:
    /// every replica takes all steps.
    pub steps: Vec<u32>,
    /// Name of the codec or protocol for averaged values, followed by `+ef` if it uses error feedback.
    pub codec: String,
    /// Algorithm that sums values. With a codec, one of [`Algorithm::CODED`].
    pub algorithm: Algorithm,
    /// Maximum number of f32 bytes in one bucket.
    pub bucket_bytes: u64,
    /// Whether a bucket is sent while the backward pass computes the next one.
    pub overlap: bool,
}

impl Default for Level {
    /// By default all replicas' gradients are averaged in each step, uncompressed, in buckets of 4 MB that
    /// overlap with the backward pass.
    fn default() -> Self {
        Self {
            groups: Vec::new(),
            method: "ddp".to_owned(),
            every: 1,
            steps: Vec::new(),
            codec: NO_CODEC.to_owned(),
            algorithm: Algorithm::Ring,
            bucket_bytes: 4_000_000,
            overlap: true,
        }
    }
}

impl Level {
    /// Returns the default algorithm: a ring for uncompressed values, a direct exchange of equal shards for a
    /// codec.
    #[must_use]
    pub fn unless_told(codec: &str) -> Algorithm {
        if codec == NO_CODEC { Algorithm::Ring } else { Algorithm::Direct }
    }

    /// Returns the round between two averages to which step `step`, counted from 1, belongs: the numbers of
    /// steps done before it and after it.
    ///
    /// ```
    /// use farflung_parallel::Level;
    ///
    /// let level = Level { every: 10, ..Level::default() };
    /// assert_eq!([1, 10, 11].map(|step| level.round_of(step)), [0..10, 0..10, 10..20]);
    /// ```
    #[must_use]
    pub fn round_of(&self, step: u64) -> Range<u64> {
        let every = u64::from(self.every.max(1));
        let begin = step.saturating_sub(1) / every * every;
        begin..begin.saturating_add(every)
    }
}

impl Plan {
    /// Version of the text form. Text of another version is an error.
    pub const VERSION: u32 = 1;

    /// Returns the number of replicas: pipelines that train side by side.
    #[must_use]
    pub fn replicas(&self) -> u32 {
        self.mesh.along(Axis::Data)
    }

    /// Returns the pools of ranks, if the plan's stages are pools.
    #[must_use]
    pub const fn pools(&self) -> Option<&Pools> {
        match &self.pipeline.schedule {
            ScheduleSource::Pools(pools) => Some(pools),
            _ => None,
        }
    }

    /// Returns the number of ranks of a pipeline.
    #[must_use]
    pub fn stages(&self) -> u32 {
        self.mesh.along(Axis::Pipeline)
    }

    /// Returns the number of ranks.
    #[must_use]
    pub fn ranks(&self) -> u32 {
        self.mesh.size()
    }

    /// Returns the number of microbatches of all replicas in one step. Those that replicas run together count
    /// once.
    #[must_use]
    pub fn all_microbatches(&self) -> u64 {
        self.microbatches_before(self.replicas())
    }

    fn microbatches_before(&self, replica: u32) -> u64 {
        let all = self.microbatches[..replica as usize].chunks(self.context.readers() as usize);
        all.map(|readers| u64::from(readers[0])).sum()
    }

    /// Returns the number of sequences of all replicas in one step.
    #[must_use]
    pub fn sequences(&self) -> u64 {
        self.all_microbatches() * u64::from(self.batch)
    }

    /// Returns the number of a replica's first microbatch within a step.
    #[must_use]
    pub fn first_microbatch(&self, replica: u32) -> u64 {
        self.microbatches_before(self.readers_of(replica).start)
    }

    /// Returns a replica's weight in a mean over all tokens, relative to an equal share: 1 is an equal share.
    #[must_use]
    pub fn weight(&self, replica: u32) -> f64 {
        let mine = u64::from(self.microbatches[replica as usize]) * u64::from(self.readers());
        mine as f64 / self.all_microbatches() as f64
    }

    /// Returns the outermost level: how the replicas of the whole job synchronise.
    ///
    /// # Panics
    /// If there are no levels. [`Plan::check`] returns an error for such a plan.
    #[must_use]
    pub fn outermost(&self) -> &Level {
        self.levels.last().expect("a checked plan has a level")
    }

    /// Returns the regions of replicas inside which averages are uncompressed, if the plan has regions.
    #[must_use]
    pub fn regions(&self) -> Option<&[Vec<u32>]> {
        (self.levels.len() > 1).then(|| &self.levels[0].groups[..])
    }

    /// Creates the mesh of a plan of `replicas` replicas with `stages` stages each, of one rank each. For
    /// stages of several ranks, see [`Mesh::and`].
    ///
    /// Errors: as [`Mesh::new`].
    pub fn mesh_of(replicas: u32, stages: u32) -> Result<Mesh, ParallelError> {
        Mesh::new(&[(Axis::Data, replicas), (Axis::Pipeline, stages)])
    }

    /// Returns when weights change: with a flush, unless the schedule is a method without a flush.
    #[must_use]
    pub fn updates(&self) -> Updates {
        match self.pipeline.schedule {
            ScheduleSource::Named(method) => method.updates(self.stages(), self.pipeline.version_sync),
            ScheduleSource::Text(_) | ScheduleSource::Pools(_) => Updates::Flush,
        }
    }
}

impl fmt::Display for ScheduleSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Named(method) => f.pad(method.name()),
            Self::Text(_) => f.pad("own"),
            Self::Pools(_) => f.pad(POOLS),
        }
    }
}
