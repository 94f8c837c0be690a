//! A plan: every decision that the ranks of a job share, as data. It is printed, read, compared and checked
//! here, and carried out by `farflung`.

mod check;
mod difference;
mod lineup;
mod local_steps;
mod members;
mod part;
mod pooled;
mod rebalance;
mod text;

#[cfg(test)]
mod tests;

use std::fmt;

use farflung_base::{Algorithm, Precision};

use farflung_base::Rank;

use crate::pipeline::{Method, Pools, Updates, VersionSync};
use crate::{Axis, Mesh, ParallelError};

pub use difference::{Difference, Digest};
pub use lineup::{Holding, Lineup, Move, Needed, Stood, moves, newest_whole};
pub use local_steps::LocalSteps;
pub use members::Replica;
pub use part::{Part, Recompute, even_parts};
pub use pooled::{PoolAdvice, PoolBalance, Pooling, rates_of};
pub use rebalance::{Advice, Measured, Rebalance, is_worth_it, shares_by_speed, step_time};

/// How the ranks of a job train one model.
///
/// Ranks are laid out replica by replica: rank `replica * stages + position`. Sequences of a step are
/// numbered from 0 over all replicas: the first `batch * microbatches[0]` belong to replica 0, the next to
/// replica 1, and so on, so that what is trained on does not depend on who trains on it.
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
    /// The model that it was made for.
    pub model: PlannedModel,
    /// `data=REPLICAS,pipeline=STAGES`; [`Plan::check`] refuses other axes until they are built.
    pub mesh: Mesh,
    /// The name of each rank's machine, as [`Cluster::rank_names`](crate::Cluster::rank_names) has it.
    pub machines: Vec<String>,
    /// What matrix products round their operands to.
    pub precision: Precision,
    /// Sequences of a microbatch.
    pub batch: u32,
    /// Microbatches of each replica in one step.
    pub microbatches: Vec<u32>,
    /// The parts of the model, first to last: all replicas cut it alike.
    pub parts: Vec<Part>,
    /// How microbatches pass through the parts.
    pub pipeline: Pipeline,
    /// What travels between each part and the next: one fewer than parts.
    pub boundaries: Vec<BoundaryCodecs>,
    /// How replicas stay one model, from the innermost group to the whole job. Two levels are one average:
    /// plain inside the groups of the first, by the second's codec between them.
    pub levels: Vec<Level>,
}

/// A model, as far as a plan depends on it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlannedModel {
    /// What people call it.
    pub name: String,
    /// Its blocks.
    pub layers: u32,
    /// Its trainable parameters.
    pub parameters: u64,
}

/// How microbatches pass through the parts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pipeline {
    /// The order of work.
    pub schedule: ScheduleSource,
    /// Parts of each copy of the model on a rank; `None` is the method's own number.
    pub chunks: Option<u32>,
    /// Activations that a rank may hold, for the methods that can be limited.
    pub memory: Option<u32>,
    /// Which version of the weights a microbatch sees under [`Method::PipeDream`].
    pub version_sync: VersionSync,
    /// Tokens of each slice of a sequence; empty: sequences pass whole.
    pub slices: Vec<u32>,
}

impl Default for Pipeline {
    /// 1F1B, whole sequences.
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

/// Where the order of a pipeline's work comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ScheduleSource {
    /// A method of the literature.
    Named(Method),
    /// The author's own lists, in the notation of [`ComputeOrder`](crate::pipeline::ComputeOrder).
    Text(String),
    /// A list schedule over stages that are pools of ranks.
    Pools(Pools),
}

/// The codecs of one boundary of a pipeline, by name; `none` is plain f32.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BoundaryCodecs {
    /// Of hidden states, to the next part.
    pub forward: String,
    /// Of their gradients, back.
    pub backward: String,
}

impl Default for BoundaryCodecs {
    fn default() -> Self {
        Self { forward: NO_CODEC.to_owned(), backward: NO_CODEC.to_owned() }
    }
}

/// The name of plain f32 among codecs.
pub const NO_CODEC: &str = "none";

/// The name of the schedule over pools of ranks.
pub const POOLS: &str = "pools";

/// How some replicas stay one model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Level {
    /// The groups of replicas that average among themselves; empty: all replicas are one group.
    pub groups: Vec<Vec<u32>>,
    /// The method, by its name in the table of `farflung-optim`.
    pub method: String,
    /// Steps between two averages: 1 averages the gradients of each step.
    pub every: u32,
    /// Local steps that each replica takes while the fastest takes its own, which are a multiple of `every`:
    /// see [`LocalSteps`]. Empty: all take all.
    pub steps: Vec<u32>,
    /// The codec of what is averaged, by name, with `+ef` where it feeds errors back.
    pub codec: String,
    /// How values are summed: with a codec one of [`Algorithm::CODED`].
    pub algorithm: Algorithm,
    /// The most f32 bytes that are averaged together.
    pub bucket_bytes: u64,
    /// Whether a bucket leaves while the backward pass still computes the next.
    pub overlap: bool,
}

impl Default for Level {
    /// Gradients of all replicas, plain, each step, in buckets of 4 MB that overlap with the backward pass.
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
    /// How values are summed where nothing is said: plain ones by a ring, those of a codec in equal shards.
    #[must_use]
    pub fn unless_told(codec: &str) -> Algorithm {
        if codec == NO_CODEC { Algorithm::Ring } else { Algorithm::Direct }
    }
}

impl Plan {
    /// The version of the text form. A text of a newer one is refused.
    pub const VERSION: u32 = 1;

    /// Pipelines that train side by side.
    #[must_use]
    pub fn replicas(&self) -> u32 {
        self.mesh.along(Axis::Data)
    }

    /// The pools of ranks that stages are, where they are.
    #[must_use]
    pub const fn pools(&self) -> Option<&Pools> {
        match &self.pipeline.schedule {
            ScheduleSource::Pools(pools) => Some(pools),
            _ => None,
        }
    }

    /// Ranks of a pipeline.
    #[must_use]
    pub fn stages(&self) -> u32 {
        self.mesh.along(Axis::Pipeline)
    }

    /// Which parts of the model a rank holds, as a number: its rank in its pipeline, or its pool.
    #[must_use]
    pub fn place(&self, rank: Rank) -> u32 {
        let position = rank.0 % self.stages();
        self.pools().and_then(|pools| pools.stage_of(position)).unwrap_or(position)
    }

    /// Number of ranks.
    #[must_use]
    pub fn ranks(&self) -> u32 {
        self.mesh.size()
    }

    /// Microbatches of all replicas in one step.
    #[must_use]
    pub fn all_microbatches(&self) -> u64 {
        self.microbatches.iter().map(|&m| u64::from(m)).sum()
    }

    /// Sequences of all replicas in one step.
    #[must_use]
    pub fn sequences(&self) -> u64 {
        self.all_microbatches() * u64::from(self.batch)
    }

    /// The number of a replica's first microbatch within a step.
    #[must_use]
    pub fn first_microbatch(&self, replica: u32) -> u64 {
        self.microbatches[..replica as usize].iter().map(|&m| u64::from(m)).sum()
    }

    /// A replica's part of a mean over all tokens, where an equal part is 1.
    #[must_use]
    pub fn weight(&self, replica: u32) -> f64 {
        let mine = u64::from(self.microbatches[replica as usize]) * u64::from(self.replicas());
        mine as f64 / self.all_microbatches() as f64
    }

    /// How the replicas of the whole job stay one model: the outermost level.
    ///
    /// # Panics
    /// Without levels, which [`Plan::check`] refuses.
    #[must_use]
    pub fn outermost(&self) -> &Level {
        self.levels.last().expect("a checked plan has a level")
    }

    /// The regions of replicas inside which averages are plain, where the plan names them.
    #[must_use]
    pub fn regions(&self) -> Option<&[Vec<u32>]> {
        (self.levels.len() > 1).then(|| &self.levels[0].groups[..])
    }

    /// A mesh of so many replicas of so many stages.
    ///
    /// Errors: as [`Mesh::new`].
    pub fn mesh_of(replicas: u32, stages: u32) -> Result<Mesh, ParallelError> {
        Mesh::new(&[(Axis::Data, replicas), (Axis::Pipeline, stages)])
    }

    /// When weights change: with a flush unless the schedule is a method that has none.
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
