//! The planners of the literature, applied to a model and the machines of a topology file: the choice of each,
//! its time by the planner's own cost model, and its simulated time.

mod alpa;
mod dapple;
mod galvatron;
mod machines;
mod pipedream;
mod piper;

use std::ops::Range;

use farflung_base::{Axis, Nanos, Rank};
use farflung_parallel::pipeline::{Boundary, Method, PipelineCost, Settings, StageCost, simulate};
use farflung_parallel::planner::dapple::PhaseCost;
use farflung_parallel::planner::uneven::ChainStage;
use farflung_parallel::{Cluster, Mesh, ParallelError, Plan, whole_pipelines};
use farflung_zoo::ModelSpec;

use super::candidate::Candidate;
use super::plan_request::PlanRequest;
use super::ranking::{Wanted, ranked};
use crate::train::chain::PipelineSizes;
use crate::{Error, Result};
pub(super) use dapple::equal_replicas;
use machines::Facts;

/// The input of a planner.
#[derive(Debug, Clone, Copy)]
pub struct Instance<'a> {
    /// The model's name.
    pub name: &'a str,
    /// The model.
    pub model: &'a ModelSpec,
    /// The machines and their links.
    pub cluster: &'a Cluster,
    /// Size of a step.
    pub sizes: PipelineSizes,
    /// Whether to choose only plans that the trainer can run: no tensor ranks, and equally many copies of each
    /// stage. PipeDream ignores this.
    pub runnable: bool,
}

/// A stage of a planner's choice.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlannedStage {
    /// Layers of the stage.
    pub layers: Range<usize>,
    /// Machines of the stage, by rank.
    pub devices: Vec<u32>,
    /// Number of devices that share each layer's tensors.
    pub tensor: u32,
    /// Whether activations are recomputed.
    pub recompute: bool,
    /// Whether state is sharded among copies.
    pub sharded: bool,
    /// The split of each operator of the stage's layers, if the planner decides that.
    pub operators: Vec<OperatorCut>,
    /// Times of the stage's phases, if the planner's own model computes them for these splits.
    phases: Option<PhaseCost>,
}

impl PlannedStage {
    /// Returns a stage of whole layers whose devices are copies that share each microbatch.
    const fn copies(layers: Range<usize>, devices: Vec<u32>) -> Self {
        Self {
            layers,
            devices,
            tensor: 1,
            recompute: false,
            sharded: false,
            operators: Vec::new(),
            phases: None,
        }
    }
}

/// The split of an operator of a layer among a stage's devices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OperatorCut {
    /// The operator's name.
    pub operator: String,
    /// Description of the split: the dimension that each axis of the devices divides.
    pub cut: String,
}

/// The choice of a planner.
#[derive(Debug, Clone)]
pub struct Choice {
    /// Stages, first to last.
    pub stages: Vec<PlannedStage>,
    /// Time of a step by the planner's own cost model.
    pub modelled: Nanos,
    /// Simulated time of a step: of the plan if the trainer can run it, else of 1F1B over the stages.
    pub simulated: Nanos,
    /// The plan, if the trainer can run it.
    pub plan: Option<Plan>,
    /// Why the trainer cannot run it, if it cannot.
    pub refused: Option<String>,
}

/// Stages, and the time of a step by a planner's own cost model.
struct Planned {
    stages: Vec<PlannedStage>,
    modelled: Nanos,
}

/// A planner of the literature.
#[derive(Debug, Clone, Copy)]
pub struct NamedPlanner {
    /// The planner's name on the command line.
    pub name: &'static str,
    run: fn(&Facts, bool) -> Result<Planned>,
}

/// All planners of the literature.
pub const PLANNERS: [NamedPlanner; 5] = [
    NamedPlanner { name: "alpa", run: alpa::planned },
    NamedPlanner { name: "pipedream", run: pipedream::planned },
    NamedPlanner { name: "piper", run: piper::planned },
    NamedPlanner { name: "galvatron", run: galvatron::planned },
    NamedPlanner { name: "dapple", run: dapple::planned },
];

impl NamedPlanner {
    /// Returns the planner's choice.
    ///
    /// Errors: a model that does not fit; those of [`Cluster::topology`].
    pub fn choose(&self, instance: &Instance<'_>) -> Result<Choice> {
        let facts = Facts::new(instance.model, instance.cluster, instance.sizes)?;
        let Planned { stages, modelled } = (self.run)(&facts, instance.runnable)?;
        match runnable(&stages, instance, self.name) {
            Ok(Candidate { plan, step, .. }) => {
                Ok(Choice { stages, modelled, simulated: step, plan: Some(plan), refused: None })
            }
            Err(Error::Parallel(ParallelError::NotBuilt { what })) => {
                let simulated = one_f_one_b(&facts, &stages)?;
                let refused = Some(format!("the trainer does not support {what}"));
                Ok(Choice { stages, modelled, simulated, plan: None, refused })
            }
            Err(Error::Parallel(error @ ParallelError::PartMemory { .. })) => {
                let simulated = one_f_one_b(&facts, &stages)?;
                Ok(Choice { stages, modelled, simulated, plan: None, refused: Some(error.to_string()) })
            }
            Err(error) => Err(error),
        }
    }
}

/// Returns the fastest plan with these stages, by simulation.
///
/// Errors: [`ParallelError::NotBuilt`] for stages that the trainer cannot run; [`ParallelError::PartMemory`]
/// for stages that do not fit into memory.
fn runnable(stages: &[PlannedStage], instance: &Instance<'_>, name: &str) -> Result<Candidate> {
    let not_built = |what: &str| Err(ParallelError::NotBuilt { what: what.to_owned() }.into());
    let (devices, tensor) = stages.first().map_or((0, 1), |stage| (stage.devices.len(), stage.tensor));
    if stages.iter().any(|stage| stage.tensor != tensor) {
        return not_built("stages with unequal numbers of tensor ranks");
    }
    let by_tokens = |cut: &OperatorCut| ["tokens", "tokens x tokens", "alone"].contains(&cut.cut.as_str());
    if stages.iter().flat_map(|stage| &stage.operators).any(|cut| !by_tokens(cut)) {
        return not_built("operators that are cut in different ways");
    }
    if stages.iter().any(|stage| stage.sharded) {
        return not_built("sharded optimizer states in a plan");
    }
    if stages.iter().any(|stage| stage.recompute) {
        return not_built("a choice of layers to recompute in a pipeline");
    }
    if stages.iter().any(|stage| stage.devices.len() != devices) {
        return not_built("stages with unequal numbers of copies");
    }
    let copies = whole_pipelines(devices as u32, tensor);
    if copies as usize > instance.sizes.microbatches as usize {
        return not_built("microbatches that copies share; ask for as many as there are copies");
    }
    let Instance { name: model_name, model, cluster, sizes, .. } = *instance;
    let request = PlanRequest { name: model_name, model, cluster, sizes };
    let mut drafts = Vec::new();
    if tensor == 1 {
        request.rows(name, &rows(stages, devices), &chain_stages(stages), &mut drafts)?;
    } else {
        let pieces = Mesh::new(&[(Axis::Data, copies), (Axis::Tensor, tensor)])?.groups(Axis::Tensor);
        let group = |stage: &PlannedStage, places: &[Rank]| {
            places.iter().map(|place| Rank(stage.devices[place.index()])).collect::<Vec<Rank>>()
        };
        let of_copy =
            |places: &Vec<Rank>| stages.iter().map(|stage| group(stage, places)).collect::<Vec<_>>();
        let groups: Vec<Vec<Rank>> = pieces.iter().flat_map(of_copy).collect();
        let equal = vec![1; tensor as usize];
        request.divided(&format!(", {name}"), &groups, &chain_stages(stages), &equal, &mut drafts)?;
    }
    if drafts.is_empty() {
        return not_built("a schedule for these stages");
    }
    let wanted = Wanted { only: None, keep: 1, each_kind: false };
    let found = ranked(drafts, model, cluster, wanted)?.candidates;
    found.into_iter().next().ok_or_else(|| ParallelError::NoDevices.into())
}

/// Returns the machines of each pipeline.
pub(super) fn rows(stages: &[PlannedStage], replicas: usize) -> Vec<Vec<Rank>> {
    let row = |at: usize| stages.iter().map(|stage| Rank(stage.devices[at])).collect();
    (0..replicas).map(row).collect()
}

/// Returns the layers of each stage.
pub(super) fn chain_stages(stages: &[PlannedStage]) -> Vec<ChainStage> {
    let of = |(machine, stage): (usize, &PlannedStage)| ChainStage { layers: stage.layers.clone(), machine };
    stages.iter().enumerate().map(of).collect()
}

/// Returns the time of a step of 1F1B over stages whose devices share each microbatch, plus the longest average
/// after the step.
fn one_f_one_b(facts: &Facts, stages: &[PlannedStage]) -> Result<Nanos> {
    // Layers that are shared in different ways on the same machines count as one stage.
    let mut phases: Vec<(&PlannedStage, PhaseCost)> = Vec::new();
    for stage in stages {
        let more = facts.phases(stage);
        match phases.last_mut() {
            Some((last, phase)) if last.devices == stage.devices => {
                *phase = PhaseCost {
                    forward: phase.forward.saturating_add(more.forward),
                    backward: phase.backward.saturating_add(more.backward),
                    all_reduce: phase.all_reduce.saturating_add(more.all_reduce),
                };
            }
            _ => phases.push((stage, more)),
        }
    }
    let settings = Settings::new(phases.len() as u32, facts.microbatches);
    let order = Method::OneFOneB.order(&settings)?;
    let mut cost = PipelineCost::uniform(&order, StageCost::default(), Boundary::latency(Nanos::ZERO));
    for (stage, (_, phase)) in cost.stages.iter_mut().zip(&phases) {
        *stage = StageCost { forward: phase.forward, input: phase.backward, ..StageCost::default() };
    }
    for (boundary, pair) in cost.boundaries.iter_mut().zip(phases.windows(2)) {
        let [(before, _), (behind, _)] = pair else { continue };
        *boundary = Boundary::latency(facts.hop(&before.devices, &behind.devices));
    }
    let pass = simulate(&order, &cost)?.makespan();
    let average = phases.iter().map(|(_, phase)| phase.all_reduce).max().unwrap_or_default();
    Ok(pass.saturating_add(average))
}
