//! Plans as TOML: printing the canonical text, and parsing.

use std::fmt::{self, Display};
use std::ops::Range;
use std::str::FromStr;

use farflung_base::{Algorithm, ContextCut, ContextOrder, Precision};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer};

use super::{
    BoundaryCodecs, Level, NO_CODEC, POOLS, Part, PathLevel, Pipeline, Plan, PlannedModel, Recompute,
    ScheduleSource,
};
use crate::cluster::quantity::{MemoryText, bytes};
use crate::pipeline::{Method, Pools, VersionSync};
use crate::{Mesh, ParallelError};

/// A value that is parsed from a string, so that a parse error carries its position in the file.
struct Text<T>(T);

impl<'de, T: FromStr<Err: Display>> Deserialize<'de> for Text<T> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        String::deserialize(from)?.parse().map(Self).map_err(D::Error::custom)
    }
}

/// A range of layers, written `first..end`.
struct Layers(Range<u32>);

impl FromStr for Layers {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let wrong = "expected layers such as `0..4`: the first layer, and the one after the last";
        let (start, end) = text.split_once("..").ok_or(wrong)?;
        Ok(Self(start.parse().map_err(|_| wrong)?..end.parse().map_err(|_| wrong)?))
    }
}

impl FromStr for Recompute {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "none" => Ok(Self::None),
            "full" => Ok(Self::Full),
            "each-layer" => Ok(Self::EachLayer),
            layers => match layers.parse() {
                Ok(layers) if layers > 0 => Ok(Self::Layers(layers)),
                _ => match layers.parse() {
                    Ok(MemoryText(bytes)) if bytes.0 > 0 => Ok(Self::Within(bytes)),
                    _ => Err(
                        "expected none, full, each-layer, a number of layers, or the memory of activations such as \
                         2GB",
                    ),
                },
            },
        }
    }
}

impl Display for Recompute {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.write_str("none"),
            Self::Full => f.write_str("full"),
            Self::EachLayer => f.write_str("each-layer"),
            Self::Layers(layers) => write!(f, "{layers}"),
            Self::Within(memory) => f.write_str(&bytes(*memory)),
        }
    }
}

impl VersionSync {
    /// Returns the name used in plans and on command lines.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Newest => "newest",
            Self::Vertical => "vertical",
        }
    }
}

impl FromStr for VersionSync {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        [Self::Newest, Self::Vertical]
            .into_iter()
            .find(|v| v.name() == text)
            .ok_or("expected newest or vertical")
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    version: u32,
    mesh: Text<Mesh>,
    machines: Vec<String>,
    precision: Text<Precision>,
    batch: u32,
    microbatches: Vec<u32>,
    context_parallel: Option<u32>,
    ulysses: Option<u32>,
    context_order: Option<Text<ContextOrder>>,
    #[serde(default)]
    tensor_weights: Vec<u32>,
    #[serde(default)]
    sequence_parallel: bool,
    #[serde(default)]
    zero: u32,
    #[serde(default)]
    zero_weights: Vec<u32>,
    #[serde(default)]
    zero_tensors: bool,
    zero_codec: Option<String>,
    #[serde(default)]
    zero_groups: Vec<Vec<u32>>,
    #[serde(default)]
    experts: Vec<u32>,
    expert_codec: Option<String>,
    model: ModelEntry,
    #[serde(default)]
    path: Vec<PathEntry>,
    part: Vec<PartEntry>,
    #[serde(default)]
    pipeline: PipelineEntry,
    pools: Option<PoolsEntry>,
    #[serde(default)]
    boundary: Vec<BoundaryEntry>,
    level: Vec<LevelEntry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ModelEntry {
    name: String,
    layers: u32,
    parameters: u64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PartEntry {
    layers: Text<Layers>,
    recompute: Option<Text<Recompute>>,
    #[serde(default)]
    offload: u32,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PathEntry {
    layers: Text<Layers>,
    modules: u32,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields)]
struct PipelineEntry {
    schedule: Option<String>,
    chunks: Option<u32>,
    memory: Option<u32>,
    version_sync: Option<Text<VersionSync>>,
    #[serde(default)]
    slices: Vec<u32>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PoolsEntry {
    sizes: Vec<u32>,
    #[serde(default)]
    rates: Vec<u32>,
}

impl PoolsEntry {
    fn pools(self) -> Pools {
        match self.rates[..] {
            [] => Pools::equal(self.sizes),
            // [`Plan::check`] compares the lengths.
            _ => Pools { sizes: self.sizes, rates: self.rates },
        }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct BoundaryEntry {
    forward: Option<String>,
    backward: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct LevelEntry {
    #[serde(default)]
    groups: Vec<Vec<u32>>,
    method: String,
    every: Option<u32>,
    #[serde(default)]
    steps: Vec<u32>,
    codec: Option<String>,
    algorithm: Option<Text<Algorithm>>,
    bucket_bytes: Option<u64>,
    overlap: Option<bool>,
}

/// The version alone. It is read first, so that a file of another version gets its own error.
#[derive(Deserialize)]
struct Version {
    version: u32,
}

impl FromStr for Plan {
    type Err = ParallelError;

    /// Parses a plan. Omitted fields get the defaults of [`Pipeline`], [`BoundaryCodecs`] and [`Level`]; an
    /// omitted algorithm is that of [`Level::unless_told`]. [`Plan::check`] checks the values.
    fn from_str(text: &str) -> Result<Self, ParallelError> {
        let wrong = |e: &toml::de::Error| {
            let at = e.span().map_or(0, |span| span.start.min(text.len()));
            let line = 1 + text.get(..at).unwrap_or(text).matches('\n').count();
            let content = text.lines().nth(line - 1).unwrap_or_default().trim().to_owned();
            ParallelError::PlanFile { line, text: content, problem: e.message().to_owned() }
        };
        match toml::from_str::<Version>(text) {
            Ok(Version { version }) if version != Self::VERSION => {
                return Err(ParallelError::PlanVersion { version, known: Self::VERSION });
            }
            _ => {}
        }
        let file: File = toml::from_str(text).map_err(|e| wrong(&e))?;
        debug_assert_eq!(file.version, Self::VERSION);
        file.plan()
    }
}

impl File {
    fn plan(self) -> Result<Plan, ParallelError> {
        let part = |p: PartEntry| Part {
            layers: p.layers.0.0,
            recompute: p.recompute.map_or(Recompute::None, |r| r.0),
            offload: p.offload,
        };
        let path = |p: PathEntry| PathLevel { layers: p.layers.0.0, modules: p.modules };
        let codec = |name: Option<String>| name.unwrap_or_else(|| NO_CODEC.to_owned());
        let boundary =
            |b: BoundaryEntry| BoundaryCodecs { forward: codec(b.forward), backward: codec(b.backward) };
        let level = |l: LevelEntry| {
            let unless_told = Level::default();
            let codec = codec(l.codec);
            Level {
                groups: l.groups,
                method: l.method,
                every: l.every.unwrap_or(unless_told.every),
                steps: l.steps,
                algorithm: l.algorithm.map_or(Level::unless_told(&codec), |a| a.0),
                codec,
                bucket_bytes: l.bucket_bytes.unwrap_or(unless_told.bucket_bytes),
                overlap: l.overlap.unwrap_or(unless_told.overlap),
            }
        };
        let unless_told = Pipeline::default();
        let pipeline = Pipeline {
            schedule: match (self.pipeline.schedule, self.pools.map(PoolsEntry::pools)) {
                (None, None) => unless_told.schedule,
                (None, Some(pools)) => ScheduleSource::Pools(pools),
                (Some(name), Some(pools)) if name == POOLS => ScheduleSource::Pools(pools),
                (Some(name), pools) if pools.is_some() || name == POOLS => {
                    let expected = format!("{POOLS} together with a section [pools], or neither");
                    return Err(ParallelError::Plan {
                        field: "pipeline.schedule".to_owned(),
                        value: name,
                        expected,
                    });
                }
                (Some(text), _) if text.contains(':') => ScheduleSource::Text(text),
                (Some(name), _) => ScheduleSource::Named(name.parse::<Method>()?),
            },
            chunks: self.pipeline.chunks,
            memory: self.pipeline.memory,
            version_sync: self.pipeline.version_sync.map_or(unless_told.version_sync, |v| v.0),
            slices: self.pipeline.slices,
        };
        let context = context(self.context_parallel, self.ulysses, self.context_order)?;
        let parts: Vec<Part> = self.part.into_iter().map(part).collect();
        let mut boundaries: Vec<BoundaryCodecs> = self.boundary.into_iter().map(boundary).collect();
        if boundaries.is_empty() {
            boundaries = vec![BoundaryCodecs::default(); parts.len().saturating_sub(1)];
        }
        Ok(Plan {
            model: PlannedModel {
                name: self.model.name,
                layers: self.model.layers,
                parameters: self.model.parameters,
            },
            mesh: self.mesh.0,
            context,
            tensor_weights: self.tensor_weights,
            sequence_parallel: self.sequence_parallel,
            zero: self.zero,
            zero_weights: self.zero_weights,
            zero_tensors: self.zero_tensors,
            zero_codec: codec(self.zero_codec),
            zero_groups: self.zero_groups,
            machines: self.machines,
            precision: self.precision.0,
            batch: self.batch,
            microbatches: self.microbatches,
            experts: self.experts,
            expert_codec: codec(self.expert_codec),
            paths: self.path.into_iter().map(path).collect(),
            parts,
            pipeline,
            boundaries,
            levels: self.level.into_iter().map(level).collect(),
        })
    }
}

/// Returns how replicas divide the positions of sequences.
fn context(
    ranks: Option<u32>,
    ulysses: Option<u32>,
    order: Option<Text<ContextOrder>>,
) -> Result<ContextCut, ParallelError> {
    let (ranks, ulysses) = (ranks.unwrap_or(1), ulysses.unwrap_or(1));
    if ranks == 0 {
        let (field, expected) = ("context_parallel".to_owned(), "at least 1".to_owned());
        return Err(ParallelError::Plan { field, value: "0".to_owned(), expected });
    }
    ContextCut::of_readers(ranks, ulysses, order.map_or_else(ContextOrder::default, |order| order.0))
        .ok_or_else(|| {
            let expected = format!("at least 1, and a divisor of the {ranks} of `context_parallel`");
            ParallelError::Plan { field: "ulysses".to_owned(), value: ulysses.to_string(), expected }
        })
}

/// Formats a string as TOML: quoted and escaped.
fn quoted(text: &str) -> String {
    toml::Value::String(text.to_owned()).to_string()
}

impl Display for Plan {
    /// Writes the canonical text: every field, in a fixed order and form.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let machines: Vec<String> = self.machines.iter().map(|name| quoted(name)).collect();
        writeln!(f, "version = {}", Self::VERSION)?;
        writeln!(f, "mesh = \"{}\"", self.mesh)?;
        writeln!(f, "machines = [{}]", machines.join(", "))?;
        writeln!(f, "precision = \"{}\"", self.precision)?;
        writeln!(f, "batch = {}", self.batch)?;
        writeln!(f, "microbatches = {:?}", self.microbatches)?;
        if self.context.divides() {
            writeln!(f, "context_parallel = {}\nulysses = {}", self.context.readers(), self.context.ulysses)?;
            writeln!(f, "context_order = \"{}\"", self.context.order)?;
        }
        if !self.tensor_weights.is_empty() {
            writeln!(f, "tensor_weights = {:?}", self.tensor_weights)?;
        }
        if self.sequence_parallel {
            writeln!(f, "sequence_parallel = true")?;
        }
        if self.zero > 0 {
            writeln!(f, "zero = {}", self.zero)?;
        }
        if !self.zero_weights.is_empty() {
            writeln!(f, "zero_weights = {:?}", self.zero_weights)?;
        }
        if self.zero_tensors {
            writeln!(f, "zero_tensors = true")?;
        }
        if self.zero_codec != NO_CODEC {
            writeln!(f, "zero_codec = {}", quoted(&self.zero_codec))?;
        }
        if !self.zero_groups.is_empty() {
            writeln!(f, "zero_groups = {:?}", self.zero_groups)?;
        }
        if !self.experts.is_empty() {
            writeln!(f, "experts = {:?}", self.experts)?;
        }
        if self.expert_codec != NO_CODEC {
            writeln!(f, "expert_codec = {}", quoted(&self.expert_codec))?;
        }
        let model = &self.model;
        writeln!(f, "\n[model]\nname = {}", quoted(&model.name))?;
        writeln!(f, "layers = {}\nparameters = {}", model.layers, model.parameters)?;
        let pipeline = &self.pipeline;
        writeln!(f, "\n[pipeline]")?;
        match &pipeline.schedule {
            ScheduleSource::Named(method) => writeln!(f, "schedule = \"{method}\"")?,
            ScheduleSource::Text(text) => writeln!(f, "schedule = {}", quoted(text))?,
            ScheduleSource::Pools(_) => writeln!(f, "schedule = \"{POOLS}\"")?,
        }
        for (name, value) in [("chunks", pipeline.chunks), ("memory", pipeline.memory)] {
            if let Some(value) = value {
                writeln!(f, "{name} = {value}")?;
            }
        }
        writeln!(f, "version_sync = \"{}\"\nslices = {:?}", pipeline.version_sync.name(), pipeline.slices)?;
        if let ScheduleSource::Pools(Pools { sizes, rates }) = &pipeline.schedule {
            writeln!(f, "\n[pools]\nsizes = {sizes:?}\nrates = {rates:?}")?;
        }
        for PathLevel { layers, modules } in &self.paths {
            writeln!(f, "\n[[path]]\nlayers = \"{}..{}\"\nmodules = {modules}", layers.start, layers.end)?;
        }
        for Part { layers, recompute, offload } in &self.parts {
            writeln!(f, "\n[[part]]\nlayers = \"{}..{}\"", layers.start, layers.end)?;
            writeln!(f, "recompute = \"{recompute}\"\noffload = {offload}")?;
        }
        for BoundaryCodecs { forward, backward } in &self.boundaries {
            writeln!(f, "\n[[boundary]]\nforward = {}\nbackward = {}", quoted(forward), quoted(backward))?;
        }
        for level in &self.levels {
            writeln!(f, "\n[[level]]\ngroups = {:?}\nmethod = {}", level.groups, quoted(&level.method))?;
            writeln!(f, "every = {}", level.every)?;
            if !level.steps.is_empty() {
                writeln!(f, "steps = {:?}", level.steps)?;
            }
            writeln!(f, "codec = {}", quoted(&level.codec))?;
            writeln!(f, "algorithm = \"{}\"", level.algorithm)?;
            writeln!(f, "bucket_bytes = {}\noverlap = {}", level.bucket_bytes, level.overlap)?;
        }
        Ok(())
    }
}
