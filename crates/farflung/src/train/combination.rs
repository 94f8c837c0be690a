//! The choices that can be combined, and the reasons why others cannot: a single table for error messages,
//! `train --combinations`, a test and a bench. Limits of single numbers are checked beside the code that they
//! limit.

mod axes;
mod context;
mod covering;
mod order;
mod shares;
mod state;

use std::fmt;

use farflung_base::{AttentionPattern, LayerPatterns};
use farflung_compress::link::LinkSpec;
use farflung_optim::local::{Averages, LocalMethod};
use farflung_optim::sync::SyncMethod;
use farflung_parallel::plan::NO_CODEC;
use farflung_parallel::{Recompute, ScheduleSource};
use farflung_tensor::Precision;
use farflung_zoo::Objective;

use super::bound_plan::{BoundLevel, BoundPlan};
use super::planned::level;
use crate::config::attention::NO_PREFIXES;
use crate::config::choice::{LossScaling, SamplingKind, StatePlace};
use crate::{Error, Result, RunSettings, TrainConfig};

pub use axes::{AXES, Axis, all_values};
pub use covering::{Covering, covering};
use order::{Order, Work};
use state::Zero;

/// The choices that rules examine: those of the plan, and those of settings that the plan does not decide.
#[derive(Debug, Clone)]
struct Choices {
    /// The levels at which replicas average.
    levels: Vec<BoundLevel>,
    sync: &'static SyncMethod,
    optimizer: &'static LocalMethod,
    /// The schedule. `None` without stages, and for a schedule file whose plan is not made yet.
    schedule: Option<Order>,
    /// Codecs of boundaries, forward.
    forward: Vec<LinkSpec>,
    /// Codecs of boundaries, backward.
    backward: Vec<LinkSpec>,
    precision: Precision,
    sampling: SamplingKind,
    clips: bool,
    loss_scale: LossScaling,
    own_data: bool,
    document_mask: bool,
    /// A pattern of attention that is given and with which the keys of a query are not one range.
    tiles: Option<AttentionPattern>,
    objective: Objective,
    stages: usize,
    tensor: TensorAxis,
    /// Number of replicas that divide the positions of the same sequences.
    readers: usize,
    /// Number of replicas that divide the experts of a mixture.
    expert_ranks: usize,
    /// Number of paths that replicas train.
    paths: usize,
    /// What replicas divide of the state that all would hold.
    zero: Zero,
    /// What parts recompute.
    recompute: Vec<Recompute>,
    state: StatePlace,
}

/// The ranks that divide the width of layers.
#[derive(Debug, Clone, Copy)]
struct TensorAxis {
    ranks: usize,
    /// Whether they divide sequences, too.
    divide_sequences: bool,
}

impl Choices {
    /// Returns the choices that the settings make, before a plan is made from them.
    fn wished(config: &TrainConfig, world: usize) -> Self {
        let named = config.schedule_file.is_none();
        let boundary = |spec| if config.stages > 1 { vec![spec] } else { Vec::new() };
        let replicas = u32::try_from(config.replicas_of(world)).unwrap_or(u32::MAX);
        Self {
            levels: vec![level(config, replicas)],
            schedule: match &config.pools {
                Some(_) => Some(Order::pools()),
                None if config.is_pooled() => Some(Order::pools()),
                None => (config.stages > 1 && named).then(|| Order::named(config.schedule)),
            },
            forward: boundary(config.boundary),
            backward: boundary(config.boundary_backward),
            precision: config.precision,
            stages: config.stages,
            tensor: TensorAxis { ranks: config.tensor, divide_sequences: config.sequence_parallel },
            readers: config.context_parallel,
            expert_ranks: config.expert,
            paths: config.path_count(),
            zero: Zero::wished(config),
            recompute: vec![config.recompute],
            ..Self::beside(&config.run_settings(), config.sync.row())
        }
    }

    /// Returns the choices of settings that a plan does not decide, for one replica without a pipeline.
    fn beside(run: &RunSettings, sync: &'static SyncMethod) -> Self {
        Self {
            levels: Vec::new(),
            sync,
            optimizer: run.optimizer.row(),
            schedule: None,
            forward: Vec::new(),
            backward: Vec::new(),
            precision: Precision::F32,
            sampling: run.sampling,
            clips: run.clip > 0.0,
            loss_scale: run.loss_scale,
            own_data: run.own_data,
            document_mask: run.document_mask,
            tiles: run.attention.as_ref().and_then(LayerPatterns::of_tiles),
            objective: run.objective,
            stages: 1,
            tensor: TensorAxis { ranks: 1, divide_sequences: false },
            readers: 1,
            expert_ranks: 1,
            paths: 1,
            zero: Zero::default(),
            recompute: Vec::new(),
            state: run.state,
        }
    }

    fn planned(run: &RunSettings, plan: &BoundPlan) -> Self {
        let schedule = match &plan.pipeline.schedule {
            _ if plan.stages() == 1 => None,
            ScheduleSource::Named(method) => Some(Order::named(*method)),
            ScheduleSource::Text(text) => Some(Order::own(text)),
            ScheduleSource::Pools(_) => Some(Order::pools()),
        };
        Self {
            levels: plan.bound_levels().to_vec(),
            schedule,
            forward: plan.links().iter().map(|links| links.forward).collect(),
            backward: plan.links().iter().map(|links| links.backward).collect(),
            precision: plan.precision,
            recompute: plan.parts.iter().map(|part| part.recompute).collect(),
            stages: plan.stages() as usize,
            tensor: TensorAxis {
                ranks: plan.tensor_ranks() as usize,
                divide_sequences: plan.sequence_parallel,
            },
            readers: plan.context.readers() as usize,
            expert_ranks: plan.expert_ranks() as usize,
            paths: plan.paths() as usize,
            zero: Zero::planned(plan),
            ..Self::beside(run, plan.outermost().method)
        }
    }
}

impl Choices {
    /// Returns a setting's value, if with it the number of targets changes from step to step.
    fn uneven(&self, field: &'static str) -> Option<Uneven> {
        match field {
            "document-mask" if self.document_mask => Some(Uneven { field, value: "true", even: "false" }),
            "objective" if self.objective.has_prefix() => {
                Some(Uneven { field, value: self.objective.name(), even: "causal" })
            }
            _ => None,
        }
    }

    /// Returns the optimizer, if replicas average its momentum.
    fn momentum(&self) -> Option<&'static LocalMethod> {
        matches!(self.optimizer.averages, Averages::Momentum { .. }).then_some(self.optimizer)
    }
}

/// The reason why some choices cannot be combined: the setting to change, its value, and the allowed values.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// The setting, as in `--name`.
    pub field: &'static str,
    /// The setting's value.
    pub value: String,
    /// The allowed values, and why.
    pub expected: String,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}` is {}, expected {}", self.field, self.value, self.expected)
    }
}

/// A rule on two axes (or on one axis, given twice): which of their values cannot be combined.
struct Rule {
    axes: [&'static str; 2],
    refuses: fn(&Choices) -> Option<Refusal>,
}

fn refuse(field: &'static str, value: impl fmt::Display, expected: String) -> Refusal {
    Refusal { field, value: value.to_string(), expected }
}

/// The pairs of choices that cannot be combined, besides those of replicas that hold different parameters.
const RULES: &[Rule] = &[
    Rule {
        axes: ["schedule", "schedule"],
        refuses: |choices| {
            let order = choices.schedule.as_ref()?;
            Some(refuse("schedule", &order.name, format!("a schedule that trains: {}", order.idle?)))
        },
    },
    Rule {
        axes: ["sync", "schedule"],
        refuses: |choices| {
            let (method, order) = (choices.sync, choices.schedule.as_ref()?);
            let inside = order.copies || !order.flushes;
            let local = !method.each_step && inside;
            let name = &order.name;
            let expected = format!("ddp with {name}: this schedule averages parts within a step");
            local.then(|| refuse("sync", method.name, expected))
        },
    },
    Rule {
        axes: ["optimizer", "sync"],
        refuses: |choices| {
            let (optimizer, method) = (choices.momentum()?, choices.sync);
            let expected = format!("ddp with {}: its replicas average momentum at each step", optimizer.name);
            (!method.each_step).then(|| refuse("sync", method.name, expected))
        },
    },
    Rule {
        axes: ["optimizer", "sync"],
        refuses: |choices| {
            let (optimizer, method) = (choices.optimizer, choices.sync);
            let wanted = optimizer.averages.sync()?;
            let expected = format!("{wanted} with {}: this optimizer needs this method", optimizer.name);
            (method.name != wanted).then(|| refuse("sync", method.name, expected))
        },
    },
    Rule {
        axes: ["optimizer", "sync"],
        refuses: |choices| {
            let (optimizer, method) = (choices.optimizer, choices.sync);
            let name = |row: &&LocalMethod| row.averages.sync() == Some(method.name);
            let of = farflung_optim::local::METHODS.iter().find(name)?;
            let expected = format!("{} with {}, which works only with this optimizer", of.name, method.name);
            (optimizer.name != of.name).then(|| refuse("optimizer", optimizer.name, expected))
        },
    },
    Rule {
        axes: ["optimizer", "schedule"],
        refuses: |choices| {
            let (optimizer, order) = (choices.optimizer, choices.schedule.as_ref()?);
            if optimizer.averages == Averages::Gradients {
                return None;
            }
            let why = "it must add complete gradients to its momentum once per step";
            let expected = format!("with {}, another such as adamw: {why}", order.name);
            (order.copies || !order.flushes).then(|| refuse("optimizer", optimizer.name, expected))
        },
    },
    Rule {
        axes: ["codec", "algorithm"],
        refuses: |choices| {
            let refusal = |level: &BoundLevel| Some((level.algorithm, level.refusal()?));
            let (algorithm, expected) = choices.levels.iter().find_map(refusal)?;
            Some(refuse("algorithm", algorithm, expected))
        },
    },
    Rule {
        axes: ["sync", "codec"],
        refuses: |choices| {
            let sends = |method: &&SyncMethod| method.codec == Some(NO_CODEC) && !method.codes_server_changes;
            let method = Some(choices.sync).filter(sends)?;
            let level = choices.levels.iter().find(|level| !level.codec.is_plain())?;
            let expected = format!(
                "{NO_CODEC} with {}: it has its own messages, to which no codec applies",
                method.name
            );
            Some(refuse("codec", level.codec, expected))
        },
    },
    Rule {
        axes: ["sync", "codec"],
        refuses: |choices| {
            let method = Some(choices.sync).filter(|method| method.compensates)?;
            let fits = |level: &BoundLevel| level.codec.codec().is_some_and(|codec| !codec.feedback());
            let level = choices.levels.iter().find(|level| !fits(level))?;
            let name = method.name;
            let expected = format!(
                "a codec without memory with {name}: the method itself corrects what the codec loses"
            );
            Some(refuse("codec", level.codec, expected))
        },
    },
    Rule {
        axes: ["sync", "codec"],
        refuses: |choices| {
            let method = Some(choices.sync).filter(|method| method.codes_server_changes)?;
            let fits =
                |level: &BoundLevel| level.codec.codec().is_some_and(|codec| codec.momentum().is_none());
            let level = choices.levels.iter().find(|level| !fits(level))?;
            let name = method.name;
            let expected = format!(
                "a codec without momentum correction with {name}: a server decodes each change separately"
            );
            Some(refuse("codec", level.codec, expected))
        },
    },
    Rule {
        axes: ["clip", "schedule"],
        refuses: |choices| {
            let order = choices.schedule.as_ref().filter(|order| choices.clips && !order.flushes)?;
            let why = "its stages update at different times, so there is no global norm";
            Some(refuse("clip", "above 0", format!("0 with {}: {why}", order.name)))
        },
    },
    Rule {
        axes: ["precision", "schedule"],
        refuses: |choices| {
            let order = choices.schedule.as_ref().filter(|order| !order.flushes)?;
            let trial = choices.loss_scale.start(choices.precision).is_dynamic();
            let (precision, name) = (choices.precision, &order.name);
            let expected = format!("a number in {precision}: with {name} a step cannot be repeated");
            trial.then(|| refuse("loss-scale", "auto", expected))
        },
    },
    Rule {
        axes: ["own-data", "schedule"],
        refuses: |choices| {
            let why = "both ends of a pipeline must read the same text";
            let expected = format!("false with {} stages: {why}", choices.stages);
            (choices.own_data && choices.stages > 1).then(|| refuse("own-data", true, expected))
        },
    },
    Rule {
        axes: ["document-mask", "sync"],
        refuses: |choices| choices.uneven("document-mask")?.with_method(choices.sync),
    },
    Rule {
        axes: ["objective", "sync"],
        refuses: |choices| choices.uneven("objective")?.with_method(choices.sync),
    },
    Rule {
        axes: ["document-mask", "optimizer"],
        refuses: |choices| choices.uneven("document-mask")?.with_optimizer(choices.optimizer),
    },
    Rule {
        axes: ["objective", "optimizer"],
        refuses: |choices| choices.uneven("objective")?.with_optimizer(choices.optimizer),
    },
    Rule {
        axes: ["document-mask", "own-data"],
        refuses: |choices| choices.uneven("document-mask")?.with_own_data(choices.own_data),
    },
    Rule {
        axes: ["objective", "own-data"],
        refuses: |choices| choices.uneven("objective")?.with_own_data(choices.own_data),
    },
    Rule {
        axes: ["objective", "document-mask"],
        refuses: |choices| {
            let objective = Some(choices.objective).filter(|objective| objective.has_prefix())?;
            let expected =
                format!("false with the objective {objective}: it makes its sequences of whole windows");
            choices.document_mask.then(|| refuse("document-mask", true, expected))
        },
    },
    Rule {
        axes: ["objective", "attention"],
        refuses: |choices| {
            let objective = Some(choices.objective).filter(|objective| objective.has_prefix())?;
            let pattern = choices.tiles?;
            Some(refuse("objective", objective, format!("causal with `attention` {pattern}: {NO_PREFIXES}")))
        },
    },
    Rule {
        axes: ["objective", "schedule"],
        refuses: |choices| {
            let objective = Some(choices.objective).filter(|objective| objective.has_prefix())?;
            let order = choices.schedule.as_ref().filter(|order| order.slices)?;
            let why = "it computes the first tokens of a sequence before the others, and in a prefix they attend \
                       to these";
            Some(refuse("objective", objective, format!("causal with {}: {why}", order.name)))
        },
    },
    Rule {
        axes: ["recompute", "schedule"],
        refuses: |choices| {
            let order = choices.schedule.as_ref().filter(|order| order.slices)?;
            let why = "slices of a sequence use each other's keys and values";
            choices.recompute.contains(&Recompute::EachLayer).then(|| {
                refuse("recompute", Recompute::EachLayer, format!("another with {}: {why}", order.name))
            })
        },
    },
    Rule {
        axes: ["boundary", "schedule"],
        refuses: |choices| unvisited("boundary", &choices.forward, choices),
    },
    Rule {
        axes: ["boundary-backward", "schedule"],
        refuses: |choices| unvisited("boundary-backward", &choices.backward, choices),
    },
    Rule {
        axes: ["boundary", "sampling"],
        refuses: |choices| unnumbered(&choices.forward, choices.sampling),
    },
    Rule {
        axes: ["boundary-backward", "sampling"],
        refuses: |choices| unnumbered(&choices.backward, choices.sampling),
    },
];

/// A setting with which the number of targets changes from step to step: its name, its value, and a value with
/// which it does not.
#[derive(Debug, Clone, Copy)]
struct Uneven {
    field: &'static str,
    value: &'static str,
    even: &'static str,
}

impl Uneven {
    /// Refuses methods that do not weigh replicas anew in each round.
    fn with_method(self, method: &SyncMethod) -> Option<Refusal> {
        let why = "replicas have different numbers of targets in each step, and this method does not take, or is \
                   not tested with, weights that change";
        let expected = format!("{} with {}: {why}", self.even, method.name);
        (!method.changing_weights).then(|| refuse(self.field, self.value, expected))
    }

    /// Refuses optimizers that need such a method.
    fn with_optimizer(self, optimizer: &LocalMethod) -> Option<Refusal> {
        self.with_method(SyncMethod::by_name(optimizer.averages.sync()?)?)
    }

    fn with_paths(self) -> Refusal {
        let why = "paths that share a module must have the same number of targets";
        refuse(self.field, self.value, format!("{} with `paths`: {why}", self.even))
    }

    fn with_own_data(self, own_data: bool) -> Option<Refusal> {
        let why = "a rank must count the targets of all others, whose texts it does not have";
        own_data.then(|| refuse(self.field, self.value, format!("{} with `own-data`: {why}", self.even)))
    }
}

/// Rejects codecs that store samples with pools, since a sample passes through other ranks in each epoch.
fn unvisited(field: &'static str, specs: &[LinkSpec], choices: &Choices) -> Option<Refusal> {
    let order = choices.schedule.as_ref().filter(|order| order.work == Work::Pools)?;
    let spec = specs.iter().find(|spec| spec.remembers())?;
    let why = "a repeated sample passes other ranks, which have not stored it";
    Some(refuse(field, spec, format!("a codec without memory with {}: {why}", order.name)))
}

/// Rejects codecs that store samples with a sampling in which samples never return.
fn unnumbered(specs: &[LinkSpec], sampling: SamplingKind) -> Option<Refusal> {
    let remembers = specs.iter().find(|spec| spec.remembers());
    let spec = remembers.filter(|_| sampling != SamplingKind::Epochs)?;
    let expected =
        format!("epochs with boundary {spec}, which identifies samples by numbers that repeat each epoch");
    Some(refuse("sampling", sampling, expected))
}

fn rules() -> impl Iterator<Item = &'static Rule> {
    RULES.iter().chain(shares::RULES).chain(context::RULES).chain(state::RULES).chain(state::OF_DISK)
}

/// Returns the first reason why choices cannot be combined.
fn first(choices: &Choices) -> Option<Refusal> {
    rules().find_map(|rule| (rule.refuses)(choices))
}

/// Checks that the choices of settings can be combined, before a plan is made from them.
///
/// Errors: [`Error::Setting`] with the setting to change and the reason.
pub(super) fn check_wished(config: &TrainConfig, world: usize) -> Result<()> {
    refused(first(&Choices::wished(config, world)))
}

/// Checks that a plan's choices can be combined with those of the other settings.
///
/// Errors: as [`check_wished`].
pub(super) fn check(run: &RunSettings, plan: &BoundPlan) -> Result<()> {
    refused(first(&Choices::planned(run, plan)))
}

fn refused(refusal: Option<Refusal>) -> Result<()> {
    refusal
        .map_or(Ok(()), |Refusal { field, value, expected }| Err(Error::Setting { field, value, expected }))
}

/// Returns why the choices of the settings cannot be combined; `None` if they can.
#[must_use]
pub fn refusal_of(config: &TrainConfig) -> Option<Refusal> {
    first(&Choices::wished(config, config.workers))
}

/// Returns why a value of one axis cannot be combined with one of another, for any values of the other axes;
/// `None` if it can.
///
/// # Panics
/// If the axes do not have these values.
#[must_use]
pub fn pair(a: (&Axis, &str), b: (&Axis, &str)) -> Option<Refusal> {
    let mut config = axes::base();
    (a.0.set)(&mut config, a.1);
    (b.0.set)(&mut config, b.1);
    let choices = Choices::wished(&config, config.workers);
    let about = |rule: &&Rule| rule.axes.iter().all(|axis| [a.0.name, b.0.name].contains(axis));
    rules().filter(about).find_map(|rule| (rule.refuses)(&choices))
}

/// Returns the table of `farflung train --combinations`: the values of each axis, and the pairs that cannot be
/// combined.
#[must_use]
pub fn table() -> String {
    let axis = |axis: &Axis| format!("  {:<18} {}", axis.name, (axis.values)().join(" "));
    let mut lines = vec![
        "All values of these settings can be combined, except the pairs below:".to_owned(),
        String::new(),
    ];
    lines.extend(AXES.iter().map(axis));
    lines.push(String::new());
    for (reason, pairs) in by_reason() {
        lines.extend([format!("  {}", pairs.join("; ")), format!("      {reason}")]);
    }
    lines.push(String::new());
    lines.join("\n")
}

/// Returns the pairs that cannot be combined, grouped by reason.
fn by_reason() -> Vec<(String, Vec<String>)> {
    let mut reasons: Vec<(String, Vec<String>)> = Vec::new();
    for (i, a) in AXES.iter().enumerate() {
        for b in &AXES[i..] {
            for x in (a.values)() {
                for y in (b.values)() {
                    let alone = a.name == b.name;
                    if alone && x != y {
                        continue;
                    }
                    let Some(refusal) = pair((a, &x), (b, &y)) else { continue };
                    // A value that is rejected by itself is listed only once.
                    if !alone
                        && [(a, &x), (b, &y)].iter().any(|(axis, v)| pair((axis, v), (axis, v)).is_some())
                    {
                        continue;
                    }
                    let name = if alone {
                        format!("{} {x}", a.name)
                    } else {
                        format!("{} {x} with {} {y}", a.name, b.name)
                    };
                    let reason = refusal.to_string();
                    match reasons.iter_mut().find(|(known, _)| *known == reason) {
                        Some((_, names)) => names.push(name),
                        None => reasons.push((reason, vec![name])),
                    }
                }
            }
        }
    }
    reasons
}
