//! Whether a run fits, before anything is allocated by its sizes: what it needs of the host's memory is computed from the
//! settings, compared with what there is, and a run that is too large is refused with what would fit.
//!
//! A GPU's memory is not looked at: only its driver knows what there is. What such a run needs of the host counts.

mod data;
mod held;
mod need;
mod order;
mod there;

use std::fmt;
use std::ops::Range;
use std::path::Path;

use farflung_parallel::Cluster;
use farflung_zoo::{GptConfig, config::PRESETS, tokenizer};

use super::job::shape;
use crate::{Error, LaunchEnv, Result, TrainConfig, threads};
use need::{Need, Share, size};
use order::Pipeline;
use there::{There, there};

/// A run is refused where four fifths of what it is estimated to need are more than there is: whole runs were measured to
/// need between 0.85 and 1.15 times their estimate, and a run that fits must not be refused.
const SLACK: (u128, u128) = (4, 5);

/// Bytes above which a run is refused on a system that does not say how much memory it has: more than any machine other
/// than Linux's has.
const UNTOLD: u64 = 4 << 40;

/// A run that needs more memory than there is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TooLarge {
    /// Bytes that it needs at the most.
    pub needed: u128,
    /// What they are for, the largest first.
    pub parts: Vec<(&'static str, u128)>,
    /// Processes that need it together: this one, or all of the job on this machine.
    pub processes: usize,
    /// Bytes that there are; `None` where the system does not say.
    pub there: Option<u64>,
    /// Settings with the largest value that would fit, each with the others as they are or, where no single one is enough,
    /// all together. Empty where none is small enough.
    pub fits: Vec<Vec<(&'static str, usize)>>,
    /// The largest model of the presets that would fit, where no other setting is small enough.
    pub model: Option<&'static str>,
}

impl fmt::Display for TooLarge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { needed, parts, processes, there, fits, model } = self;
        match processes {
            1 => write!(f, "the run needs about {} of memory here (", size(*needed))?,
            n => write!(f, "the {n} processes on this machine need about {} of memory (", size(*needed))?,
        }
        for (i, (name, bytes)) in parts.iter().enumerate() {
            write!(f, "{}{name} {}", if i == 0 { "" } else { ", " }, size(*bytes))?;
        }
        match there {
            Some(there) => write!(f, "), and there are {}: ", size(u128::from(*there)))?,
            None => write!(f, "), and the system does not say that there is so much: ")?,
        }
        for (i, settings) in fits.iter().enumerate() {
            f.write_str(if i == 0 { "" } else { ", or " })?;
            for (j, (name, value)) in settings.iter().enumerate() {
                write!(f, "{}`{name}` {value}", if j == 0 { "" } else { " with " })?;
            }
            f.write_str(if i == 0 { " would fit" } else { "" })?;
        }
        match (fits.is_empty(), model) {
            (false, _) => Ok(()),
            (true, Some(model)) => {
                write!(f, "with `batch` 1 and `workers` 1 the largest `model` that would fit is {model}")
            }
            (true, None) => f.write_str("nothing smaller would fit"),
        }
    }
}

/// Bytes of the host's memory that a process of a run needs at the most, as estimated before it starts.
///
/// Errors: [`Error::Setting`] and others for settings that cannot be.
pub fn needed_memory(config: &TrainConfig, env: Option<&LaunchEnv>) -> Result<u128> {
    let case = Case::new(config, env)?;
    Ok(case.need(config, case.mine(config)).total())
}

/// Refuses a run that is too large for this machine.
///
/// Errors: [`Error::TooLarge`] with what it needs and what would fit; [`Error::Setting`] for more workers or threads than
/// there can be, and for other settings that cannot be.
pub(super) fn admit(config: &TrainConfig, env: Option<&LaunchEnv>) -> Result<()> {
    Case::new(config, env)?.admit(config, there(Path::new("/")))
}

/// What does not change where a run is made smaller by its batch or its workers.
struct Case {
    model: GptConfig,
    pipeline: Option<Pipeline>,
    data: data::Data,
    launched: Option<Launched>,
}

/// A process of a launched job.
struct Launched {
    rank: usize,
    world: usize,
    /// The ranks on this machine, where the launcher says how many there are.
    local: Range<usize>,
}

impl Launched {
    fn new(env: &LaunchEnv) -> Self {
        let (rank, world) = (env.rank.index(), env.world_size);
        let mine = rank..rank + 1;
        // Launchers count the ranks of a machine one after the other.
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
        let vocab = tokenizer::by_name(&config.tokenizer.to_string())?.vocab_size();
        let model = shape(config, vocab)?;
        let pipeline = (config.stages > 1).then(|| Pipeline::new(config, &model, world)).transpose()?;
        let data = data::data(config);
        Ok(Self { model, pipeline, data, launched: env.map(Launched::new) })
    }

    /// The ranks of this process.
    fn mine(&self, config: &TrainConfig) -> Range<usize> {
        self.launched.as_ref().map_or(0..config.workers, |launched| launched.rank..launched.rank + 1)
    }

    /// What these ranks need with settings of the same order of work.
    fn need(&self, config: &TrainConfig, ranks: Range<usize>) -> Need {
        self.need_of(config, self.model, ranks)
    }

    fn need_of(&self, config: &TrainConfig, model: GptConfig, ranks: Range<usize>) -> Need {
        let whole = [held::whole(config, &model)];
        let world = self.launched.as_ref().map_or(config.workers, |launched| launched.world);
        let (positions, actions) = match &self.pipeline {
            Some(pipeline) => (&pipeline.positions[..], pipeline.actions(config, world)),
            None => (&whole[..], 0),
        };
        let processes = if self.launched.is_some() { ranks.len() } else { 1 };
        Share { config, model, positions, world, ranks, processes, data: self.data, actions }.need()
    }

    fn admit(&self, config: &TrainConfig, told: Option<There>) -> Result<()> {
        let there = told.unwrap_or(There { free: UNTOLD, all: UNTOLD });
        // The others on this machine may have taken theirs already: all together are held to all that it has.
        let local = self.launched.as_ref().map(|launched| launched.local.clone());
        let tight = |config: &TrainConfig, model: GptConfig| {
            let mine = (self.need_of(config, model, self.mine(config)), 1, there.free);
            let all = local
                .clone()
                .map(|local| (self.need_of(config, model, local.clone()), local.len(), there.all));
            let over = |(need, _, bytes): &(Need, usize, u64)| {
                need.total().saturating_mul(SLACK.0) / SLACK.1 > u128::from(*bytes)
            };
            [Some(mine), all].into_iter().flatten().find(over)
        };
        let Some((need, processes, bytes)) = tight(config, self.model) else { return Ok(()) };
        let fits = self.fitting(config, &|config| tight(config, self.model).is_none());
        let preset = |&&(_, preset): &&(&str, GptConfig)| {
            tight(&least(config), GptConfig { vocab: self.model.vocab, ..preset }).is_none()
        };
        let shaped = [config.layers, config.heads, config.dim, config.context];
        let preset_alone = config.init_from.is_none() && shaped.iter().all(Option::is_none);
        let replaceable = fits.is_empty() && preset_alone && self.pipeline.is_none();
        let model = PRESETS.iter().rev().filter(|_| replaceable).find(preset).map(|&(name, _)| name);
        Err(Error::TooLarge(Box::new(TooLarge {
            needed: need.total(),
            parts: need.largest_first(),
            processes,
            there: told.map(|_| bytes),
            fits,
            model,
        })))
    }

    /// The largest values of single settings with which `fits` says yes, else of the batch with all others at their least.
    fn fitting(
        &self,
        config: &TrainConfig,
        fits: &dyn Fn(&TrainConfig) -> bool,
    ) -> Vec<Vec<(&'static str, usize)>> {
        let mut found = Vec::new();
        for knob in Knob::ALL.into_iter().filter(|knob| self.has(*knob)) {
            let (unit, most) = (knob.unit(config), knob.get(config));
            let with = |n: usize| fits(&knob.set(config, n * unit));
            found.extend(largest(most / unit, with).map(|n| vec![(knob.name(), n * unit)]));
        }
        if found.is_empty() {
            let least = least(config);
            let with = |n: usize| fits(&Knob::Batch.set(&least, n));
            if let Some(batch) = largest(config.batch.saturating_add(1), with) {
                let changed = |knob: &Knob| {
                    *knob != Knob::Batch && self.has(*knob) && knob.get(config) > knob.unit(config)
                };
                let others = Knob::ALL.into_iter().filter(changed);
                let batch = std::iter::once((Knob::Batch.name(), batch));
                found.push(batch.chain(others.map(|knob| (knob.name(), knob.get(&least)))).collect());
            }
        }
        found
    }

    /// Whether a setting says how large this run is.
    fn has(&self, knob: Knob) -> bool {
        match knob {
            Knob::Batch | Knob::EvalBatches => true,
            Knob::Workers => self.launched.is_none(),
            // A pipeline's order depends on it.
            Knob::Accumulate => self.pipeline.is_none(),
        }
    }
}

/// The least of each setting that says how large a run is, with the same stages.
fn least(config: &TrainConfig) -> TrainConfig {
    Knob::ALL.into_iter().fold(config.clone(), |least, knob| knob.set(&least, knob.unit(config)))
}

/// The largest number from 1 on and below `end` for which `fits` says yes, where it says so for all that are smaller.
fn largest(end: usize, fits: impl Fn(usize) -> bool) -> Option<usize> {
    let (mut low, mut high) = (0, end.max(1));
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        if fits(middle) { low = middle } else { high = middle }
    }
    (low > 0).then_some(low)
}

/// A setting that says how large a run is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Knob {
    Batch,
    Workers,
    Accumulate,
    EvalBatches,
}

impl Knob {
    const ALL: [Self; 4] = [Self::Batch, Self::Workers, Self::Accumulate, Self::EvalBatches];

    fn name(self) -> &'static str {
        match self {
            Self::Batch => "batch",
            Self::Workers => "workers",
            Self::Accumulate => "accumulate",
            Self::EvalBatches => "eval-batches",
        }
    }

    /// It is a multiple of this.
    fn unit(self, config: &TrainConfig) -> usize {
        if self == Self::Workers { config.stages } else { 1 }
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
