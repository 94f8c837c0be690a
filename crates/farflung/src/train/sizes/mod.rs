//! Refuses runs that are too large for this machine before they allocate anything: estimates the host memory
//! that a run needs, compares it with what is available, and names the largest settings that would fit.
//!
//! The memory of GPUs is not checked, only the host memory of a run on GPUs.

mod available;
mod buckets;
mod data;
mod rank_memory;
mod need;
mod order;

use std::fmt;
use std::ops::Range;
use std::path::Path;

use farflung_compress::AverageSpec;
use farflung_parallel::Cluster;
use farflung_zoo::ModelSpec;

use super::combination::refusal_of;
use super::job::shape;
use crate::config::choice::StatePlace;
use crate::{Error, LaunchEnv, Result, TrainConfig, threads};
use available::{Available, available};
pub(super) use buckets::{averaging, scattering, sharing};
use need::{MemoryNeed, RankGroup, size};
use order::Pipeline;

/// A run is refused if four fifths of its estimate exceed the available memory. `tests/it/sizes.rs` checks that
/// estimates are below 1.25 times the measured peak (measured: 0.80 to 1.15), so that a run that fits is not
/// refused.
const SLACK: (u128, u128) = (4, 5);

/// Limit if the available memory is unknown, as on systems other than Linux: no such machine has more memory
/// than this.
const UNKNOWN: u64 = 4 << 40;

/// The error of a run that needs more memory than is available.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TooLarge {
    /// Estimated peak in bytes.
    pub needed: u128,
    /// The estimate split by purpose, largest first, without purposes below 1%.
    pub parts: Vec<(&'static str, u128)>,
    /// Number of processes that the estimate is for: this one, or all processes of the job on this machine.
    pub processes: usize,
    /// Available bytes; `None` if unknown.
    pub available: Option<u64>,
    /// Alternatives that would fit, each a list of settings: one setting at the largest value that fits, or, if
    /// no single one is enough, the other settings at their minimum with the largest batch that fits then.
    /// Empty if nothing fits.
    pub fits: Vec<Vec<(&'static str, usize)>>,
    /// Whether the run would fit as it is with the optimizer's state on disk.
    pub on_disk: bool,
    /// The largest preset that would fit with `batch` 1 and `workers` 1, if no alternative with this model
    /// fits.
    pub model: Option<&'static str>,
}

impl fmt::Display for TooLarge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { needed, parts, processes, available, fits, on_disk, model } = self;
        match processes {
            1 => write!(f, "the run needs about {} of memory (", size(*needed))?,
            n => write!(f, "the {n} processes on this machine need about {} of memory (", size(*needed))?,
        }
        for (i, (name, bytes)) in parts.iter().enumerate() {
            write!(f, "{}{name} {}", if i == 0 { "" } else { ", " }, size(*bytes))?;
        }
        match available {
            Some(bytes) => write!(f, ") and {} are available: ", size(u128::from(*bytes)))?,
            None => write!(
                f,
                "), more than the {} that are allowed when the available memory is unknown: ",
                size(UNKNOWN.into())
            )?,
        }
        for (i, settings) in fits.iter().enumerate() {
            f.write_str(if i == 0 { "" } else { ", or " })?;
            for (j, (name, value)) in settings.iter().enumerate() {
                write!(f, "{}`{name}` {value}", if j == 0 { "" } else { " with " })?;
            }
            f.write_str(if i == 0 { " would fit" } else { "" })?;
        }
        match (fits.is_empty(), on_disk, model) {
            (false, false, _) => Ok(()),
            (false, true, _) => f.write_str("; all of it with `state` disk"),
            (true, true, _) => f.write_str("`state` disk would fit"),
            (true, false, Some(model)) => {
                write!(f, "with `batch` 1 and `workers` 1 the largest `model` that would fit is {model}")
            }
            (true, false, None) => f.write_str("no smaller settings would fit"),
        }
    }
}

/// Estimates the peak host memory of a process of a run, in bytes.
///
/// Errors: [`Error::Setting`] for an invalid setting, and those of the model's weights or the schedule's file.
pub fn needed_memory(config: &TrainConfig, env: Option<&LaunchEnv>) -> Result<u128> {
    let case = Case::new(config, env)?;
    Ok(case.need(config, &case.model, case.mine(config)).total())
}

/// Returns the bytes of memory that all processes on this machine together may use; `None` if the system does
/// not report it.
#[must_use]
pub fn machine_memory() -> Option<u64> {
    Some(available(Path::new("/"))?.total)
}

/// Checks that a run fits this machine: memory, number of workers, number of threads.
///
/// Errors: [`Error::TooLarge`] with the estimate and what would fit; [`Error::Setting`] for too many workers
/// or threads; those of [`needed_memory`].
pub(super) fn admit(config: &TrainConfig, env: Option<&LaunchEnv>) -> Result<()> {
    Case::new(config, env)?.admit(config, available(Path::new("/")))
}

/// The inputs of an estimate that depend on neither the batch nor the number of workers.
struct Case {
    model: ModelSpec,
    pipeline: Option<Pipeline>,
    data: data::Data,
    launched: Option<Launched>,
}

/// A process of a launched job.
struct Launched {
    rank: usize,
    world: usize,
    /// The ranks on this machine, if the launcher sets their number; else this rank alone.
    local: Range<usize>,
}

impl Launched {
    fn new(env: &LaunchEnv) -> Self {
        let (rank, world) = (env.rank.index(), env.world_size);
        let mine = rank..rank + 1;
        // Launchers number the ranks of a machine consecutively.
        let local = || {
            let first = rank.checked_sub(env.local_rank)?;
            Some(first..first.checked_add(env.local_world_size?)?)
        };
        let local = local().filter(|local| local.contains(&rank) && local.end <= world).unwrap_or(mine);
        Self { rank, world, local }
    }
}

impl Case {
    fn new(config: &TrainConfig, env: Option<&LaunchEnv>) -> Result<Self> {
        config.validate()?;
        let env = env.filter(|env| env.world_size > 1);
        let most = Cluster::MAX_RANKS as usize;
        let world = env.map_or(config.workers, |env| env.world_size);
        if world > most {
            let (field, expected) = ("workers", format!("at most {most}"));
            return Err(Error::Setting { field, value: world.to_string(), expected });
        }
        threads::check(config.threads, env.map_or(world, |_| 1))?;
        let vocab = config.open_tokenizer()?.vocab_size();
        let model = shape(config, vocab)?;
        let pipeline = (config.stages > 1).then(|| Pipeline::new(config, &model, world)).transpose()?;
        let data = data::data(config);
        Ok(Self { model, pipeline, data, launched: env.map(Launched::new) })
    }

    /// Returns the ranks of this process.
    fn mine(&self, config: &TrainConfig) -> Range<usize> {
        self.launched.as_ref().map_or(0..config.workers, |launched| launched.rank..launched.rank + 1)
    }

    /// Estimates the memory of these ranks. `config` may differ from the original in the settings of
    /// [`AdjustableSetting`].
    fn need(&self, config: &TrainConfig, model: &ModelSpec, ranks: Range<usize>) -> MemoryNeed {
        let whole = [rank_memory::whole(config, model)];
        let world = self.launched.as_ref().map_or(config.workers, |launched| launched.world);
        let (positions, actions) = match &self.pipeline {
            Some(pipeline) => (&pipeline.positions[..], pipeline.actions(config, world)),
            None => (&whole[..], 0),
        };
        let processes = if self.launched.is_some() { ranks.len() } else { 1 };
        let beside = self.launched.as_ref().map_or(0, |launched| launched.local.len().saturating_sub(1));
        let (run, data) = (&config.run_settings(), self.data);
        RankGroup { config, run, model, positions, world, ranks, processes, beside, data, actions }.need()
    }

    fn admit(&self, config: &TrainConfig, known: Option<Available>) -> Result<()> {
        let available = known.unwrap_or(Available { free: UNKNOWN, total: UNKNOWN });
        // Other processes of the job may already have allocated memory, so the need of all of them together is
        // compared with the total.
        let local = self.launched.as_ref().map(|launched| launched.local.clone());
        let tight = |config: &TrainConfig, model: &ModelSpec| {
            let mine = (self.need(config, model, self.mine(config)), 1, available.free);
            let all = local
                .clone()
                .map(|local| (self.need(config, model, local.clone()), local.len(), available.total));
            let over = |(need, _, bytes): &(MemoryNeed, usize, u64)| {
                need.total().saturating_mul(SLACK.0) / SLACK.1 > u128::from(*bytes)
            };
            [Some(mine), all].into_iter().flatten().find(over)
        };
        let Some((need, processes, bytes)) = tight(config, &self.model) else { return Ok(()) };
        let fits = self.fitting(config, &|config| tight(config, &self.model).is_none());
        let on_disk = on_disk(config).is_some_and(|config| tight(&config, &self.model).is_none());
        let fits_as = |preset: ModelSpec| {
            tight(&least(config), &ModelSpec { vocab: self.model.vocab, ..preset }).is_none()
        };
        let shaped = [config.layers, config.heads, config.dim, config.context];
        let preset_alone = config.init_from.is_none() && shaped.iter().all(Option::is_none);
        let replaceable = fits.is_empty() && preset_alone && self.pipeline.is_none();
        let smaller = if replaceable { self.model.family().presets } else { &[] };
        let model = smaller.iter().rev().find(|preset| fits_as(preset.spec())).map(|preset| preset.name);
        Err(Error::TooLarge(Box::new(TooLarge {
            needed: need.total(),
            parts: need.largest_first(),
            processes,
            available: known.map(|_| bytes),
            fits,
            on_disk,
            model,
        })))
    }

    /// Returns the alternatives that would fit: for each setting alone its largest value; if there is none, the
    /// largest batch with all other settings at their minimum.
    fn fitting(
        &self,
        config: &TrainConfig,
        fits: &dyn Fn(&TrainConfig) -> bool,
    ) -> Vec<Vec<(&'static str, usize)>> {
        let mut found = Vec::new();
        for knob in AdjustableSetting::ALL.into_iter().filter(|knob| self.has(*knob)) {
            let (unit, most) = (knob.unit(config), knob.get(config));
            let with = |n: usize| fits(&knob.set(config, n * unit));
            found.extend(largest(most / unit, with).map(|n| vec![(knob.name(), n * unit)]));
        }
        if found.is_empty() {
            let least = least(config);
            let with = |n: usize| fits(&AdjustableSetting::Batch.set(&least, n));
            if let Some(batch) = largest(config.batch.saturating_add(1), with) {
                let changed = |knob: &AdjustableSetting| {
                    *knob != AdjustableSetting::Batch
                        && self.has(*knob)
                        && knob.get(config) > knob.unit(config)
                };
                let others = AdjustableSetting::ALL.into_iter().filter(changed);
                let batch = std::iter::once((AdjustableSetting::Batch.name(), batch));
                found.push(batch.chain(others.map(|knob| (knob.name(), knob.get(&least)))).collect());
            }
        }
        found
    }

    /// Returns whether this setting can be changed in this run.
    fn has(&self, knob: AdjustableSetting) -> bool {
        match knob {
            AdjustableSetting::Batch | AdjustableSetting::EvalBatches => true,
            AdjustableSetting::Workers => self.launched.is_none(),
            // In a pipeline, another number of microbatches would need another order of work.
            AdjustableSetting::Accumulate => self.pipeline.is_none(),
        }
    }
}

/// Returns the settings with the optimizer's state on disk; `None` if it is there, or cannot be.
fn on_disk(config: &TrainConfig) -> Option<TrainConfig> {
    let codec = if config.was_given("codec") { config.codec } else { AverageSpec::default() };
    let disk = TrainConfig { state: StatePlace::Disk, codec, ..config.clone() };
    let can = config.state == StatePlace::Device && disk.validate().is_ok() && refusal_of(&disk).is_none();
    can.then_some(disk)
}

/// Returns the settings with every [`AdjustableSetting`] at its minimum.
fn least(config: &TrainConfig) -> TrainConfig {
    AdjustableSetting::ALL.into_iter().fold(config.clone(), |least, knob| knob.set(&least, knob.unit(config)))
}

/// Returns the largest number in `1..end` for which `fits` is true, by bisection; `fits` must be true up to
/// some number, then false.
fn largest(end: usize, fits: impl Fn(usize) -> bool) -> Option<usize> {
    let (mut low, mut high) = (0, end.max(1));
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        if fits(middle) { low = middle } else { high = middle }
    }
    (low > 0).then_some(low)
}

/// A setting that can be lowered so that a run needs less memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum AdjustableSetting {
    Batch,
    Workers,
    Accumulate,
    EvalBatches,
}

impl AdjustableSetting {
    const ALL: [Self; 4] = [Self::Batch, Self::Workers, Self::Accumulate, Self::EvalBatches];

    fn name(self) -> &'static str {
        match self {
            Self::Batch => "batch",
            Self::Workers => "workers",
            Self::Accumulate => "accumulate",
            Self::EvalBatches => "eval-batches",
        }
    }

    /// Returns the minimum of this setting; all other values are multiples of it.
    fn unit(self, config: &TrainConfig) -> usize {
        let along = [config.stages, config.expert, config.context_parallel, config.tensor];
        if self == Self::Workers { along.into_iter().fold(1, usize::saturating_mul).max(1) } else { 1 }
    }

    fn get(self, config: &TrainConfig) -> usize {
        match self {
            Self::Batch => config.batch,
            Self::Workers => config.workers,
            Self::Accumulate => super::planned::microbatches(config),
            Self::EvalBatches => config.eval_batches as usize,
        }
    }

    fn set(self, config: &TrainConfig, value: usize) -> TrainConfig {
        let mut config = config.clone();
        match self {
            Self::Batch => config.batch = value,
            Self::Workers => config.workers = value,
            Self::Accumulate if config.stages > 1 => {}
            Self::Accumulate => (config.accumulate, config.microbatches) = (value, None),
            Self::EvalBatches => config.eval_batches = value as u64,
        }
        config
    }
}

#[cfg(test)]
mod tests;
