//! How the ranks of a plan divide layers: the ranks along the tensor axis their width, and replicas the experts
//! of a mixture; and with whom each exchanges what its layers send.

use std::ops::Range;
use std::sync::Arc;

use farflung_base::{Axis, Bytes, ContextCut, Rank};
use farflung_comm::{Communicator, MAX_MESSAGE};
use farflung_parallel::{Coordinates, Mesh, ParallelError, Plan};
use farflung_tensor::Device;
use farflung_zoo::exchange::{Counted, Exchange};
use farflung_zoo::{AxisShare, ModelSpec, Stage};

use super::bound_plan::BoundPlan;
use crate::{OverRanks, Result};

/// The division of layers among the ranks of a plan. What a rank has depends on its coordinates along the data
/// and the tensor axis.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Division {
    /// The weights of the replicas of a group that divides experts; one if each replica has all experts.
    experts: Vec<u32>,
    /// The weights of the ranks along the tensor axis.
    width: Vec<u32>,
    /// Whether these divide the positions of sequences, too.
    sequences: bool,
    /// How neighbouring replicas divide positions.
    context: ContextCut,
    mesh: Mesh,
}

impl Division {
    pub(super) fn of(plan: &Plan) -> Self {
        let experts = if plan.divides_experts() { plan.experts.clone() } else { vec![1] };
        let (width, sequences) = (plan.shares_of_width(), plan.sequence_parallel);
        Self { experts, width, sequences, context: plan.context, mesh: plan.mesh.clone() }
    }

    /// Returns whether a rank lacks a part of its layers.
    pub(super) fn divides(&self) -> bool {
        self.divides_experts() || self.divides_width()
    }

    /// Returns whether layers exchange with those of other ranks.
    pub(super) fn exchanges(&self) -> bool {
        self.divides() || self.context.divides()
    }

    /// Returns whether a replica lacks experts.
    pub(super) fn divides_experts(&self) -> bool {
        self.experts.len() > 1
    }

    /// Returns whether a rank lacks a piece of its layers' width.
    pub(super) fn divides_width(&self) -> bool {
        self.width.len() > 1
    }

    /// Returns the rank at coordinates.
    ///
    /// Errors: the plan has no such rank.
    pub(super) fn rank(&self, at: Coordinates) -> Result<Rank> {
        Ok(self.mesh.rank(at)?)
    }

    /// Returns the coordinates of the ranks that together have a part of the model in some replicas, in order:
    /// all at the same position of their pipelines.
    pub(super) fn holders(&self, replicas: Range<u32>, position: Rank) -> Vec<Coordinates> {
        let at = |data, tensor| Coordinates { data, pipeline: position.0, tensor, ..Coordinates::default() };
        replicas.flat_map(|data| (0..self.width.len() as u32).map(move |tensor| at(data, tensor))).collect()
    }

    /// Returns what a replica has of the experts.
    fn experts_of(&self, replica: u32) -> Result<AxisShare> {
        Ok(AxisShare::new(replica as usize % self.experts.len(), self.experts.clone())?)
    }

    /// Returns what a rank has of the width of layers.
    pub(super) fn width_of(&self, at: Coordinates) -> Result<AxisShare> {
        Ok(AxisShare::new(at.tensor as usize, self.width.clone())?)
    }

    /// Returns the positions of a rank's hidden states in slices of sequences, counted from the first.
    pub(super) fn positions(&self, tensor: u32, slices: &[Range<usize>]) -> Result<Vec<Range<usize>>> {
        if !self.sequences {
            // All ranks have equally many.
            let own = |end: usize| self.context.each(end);
            return Ok(slices.iter().map(|slice| own(slice.start)..own(slice.end)).collect());
        }
        let share = self.width_of(Coordinates { tensor, ..Coordinates::default() })?;
        Ok(slices.iter().map(|slice| 0..share.of(slice.len()).len()).collect())
    }

    /// Makes the stage that a rank has of some layers. Its layers exchange by `exchange`.
    pub(super) fn stage(
        &self,
        (spec, layers): (&ModelSpec, Range<usize>),
        at: Coordinates,
        device: &Device,
        exchange: Arc<dyn Exchange>,
    ) -> Result<Stage> {
        let shares = [self.width_of(at)?, self.experts_of(at.data)?];
        let mut stage = Stage::shared(spec, layers, device, shares, exchange)?;
        if self.sequences {
            stage.divide_sequences()?;
        }
        if self.context.divides() {
            stage.divide_context(self.context, self.context.rank_of(at.data))?;
        }
        Ok(stage)
    }

    /// Makes such a stage without other ranks: exchanges are only counted.
    pub(super) fn counted_stage(
        &self,
        layers: (&ModelSpec, Range<usize>),
        at: Coordinates,
        device: &Device,
    ) -> Result<Stage> {
        self.stage(layers, at, device, Arc::new(self.counted(at)?))
    }

    /// Returns the exchange of a rank that only counts.
    pub(super) fn counted(&self, at: Coordinates) -> Result<Counted> {
        let own = [(Axis::Tensor, self.width_of(at)?), (Axis::Expert, self.experts_of(at.data)?)];
        let context = AxisShare::along_context(self.context, self.context.rank_of(at.data))?;
        Ok(Counted::new(own.into_iter().chain(context)))
    }
}

/// Checks that each rank of a plan has a piece of each layer, and each replica an expert of each mixture.
///
/// Errors: [`ParallelError::Plan`] with the field.
pub(super) fn check(plan: &Plan, model: &ModelSpec) -> Result<()> {
    let refuse = |field: &str, value: String, expected: String| {
        Err(ParallelError::Plan { field: field.to_owned(), value, expected }.into())
    };
    if let Err(error) = model.check_cut(&AxisShare::new(0, plan.shares_of_width())?) {
        let (field, value) = match &plan.tensor_weights[..] {
            [] => ("mesh", plan.mesh.to_string()),
            weights => ("tensor_weights", format!("{weights:?}")),
        };
        return refuse(field, value, format!("a tensor axis along which each rank has a piece: {error}"));
    }
    if plan.sequence_parallel {
        let expected =
            "false for a model with experts, whose routers take all tokens of a sequence".to_owned();
        if model.mixtures().next().is_some() {
            return refuse("sequence_parallel", "true".to_owned(), expected);
        }
        let share = AxisShare::new(0, plan.shares_of_width())?;
        if share.all().any(|share| share.of(model.context).is_empty()) {
            let expected =
                format!("false, or shares with which each rank has one of {} positions", model.context);
            return refuse("sequence_parallel", "true".to_owned(), expected);
        }
    }
    check_context(plan, model)?;
    if plan.experts.is_empty() {
        return Ok(());
    }
    let refuse = |expected| refuse("experts", format!("{:?}", plan.experts), expected);
    let Some(fewest) = model.mixtures().map(|(_, experts)| experts.count).min() else {
        return refuse("nothing, because the model has no experts".to_owned());
    };
    if model.check_experts(&AxisShare::new(0, plan.experts.clone())?).is_err() {
        return refuse(format!("weights with which each replica has one of the {fewest} experts"));
    }
    Ok(())
}

/// Checks that replicas can divide the positions of a model's sequences.
fn check_context(plan: &Plan, model: &ModelSpec) -> Result<()> {
    let cut = plan.context;
    if !cut.divides() {
        return Ok(());
    }
    let refuse = |field: &str, value: u32, expected: String| {
        Err(ParallelError::Plan { field: field.to_owned(), value: value.to_string(), expected }.into())
    };
    if model.mixtures().next().is_some() {
        let why = "1 for a model with experts, whose routers take all tokens of a sequence";
        return refuse("context_parallel", cut.readers(), why.to_owned());
    }
    if let Some(pattern) = model.pattern_of_tiles() {
        let why = format!(
            "1 for a model whose attention has the pattern {pattern}: of the keys of another rank, a query has \
             one range, as with full and window"
        );
        return refuse("context_parallel", cut.readers(), why);
    }
    if !cut.fits(model.context) {
        let (context, unit) = (model.context, cut.unit());
        let why = format!(
            "such that {unit} divides the context of {context}: all ranks have equally many positions"
        );
        return refuse("context_parallel", cut.readers(), why);
    }
    let share = AxisShare::new(0, plan.shares_of_width())?;
    for share in share.all() {
        for run in &model.blocks {
            let attention = run.block.attention;
            let block =
                u64::from(plan.batch) * (cut.each(model.context) * share.of(attention.heads.kv).len()) as u64;
            let bytes = block.saturating_mul((size_of::<f32>() * attention.head_dim) as u64);
            if bytes > MAX_MESSAGE as u64 {
                let why = format!(
                    "such that a rank's keys are one message, of at most {}: it has {}, so give more ranks, or a \
                     smaller `batch`",
                    Bytes(MAX_MESSAGE as u64),
                    Bytes(bytes)
                );
                return refuse("context_parallel", cut.readers(), why);
            }
            let heads = share.of(run.block.attention.heads.kv).len();
            if !heads.is_multiple_of(cut.ulysses as usize) {
                return refuse(
                    "ulysses",
                    cut.ulysses,
                    format!("a divisor of the {heads} key-value heads of a rank"),
                );
            }
        }
    }
    Ok(())
}

/// Makes the exchange of a rank with those that divide its layers or its sequences with it, over the
/// communicator of a pass; `None` if it has all of them. A collective, if they are divided.
pub(super) fn exchange(
    (plan, seed): (&BoundPlan, u64),
    messages: &Communicator,
    rank: Rank,
) -> Result<Option<Arc<OverRanks>>> {
    let among = |axis, divided: bool| {
        let first = plan.group(rank, axis)[0];
        divided.then(|| Ok::<_, crate::Error>((axis, messages.split(first.0, rank.0)?))).transpose()
    };
    let axes = [
        among(Axis::Tensor, plan.tensor_ranks() > 1)?,
        among(Axis::Expert, plan.divides_experts())?,
        among(Axis::Context, plan.context.ring > 1)?,
        among(Axis::Ulysses, plan.context.ulysses > 1)?,
    ];
    let axes: Vec<_> = axes.into_iter().flatten().collect();
    let over = OverRanks::new(axes.clone()).with_row_codec(plan.expert_codec(), seed);
    Ok((!axes.is_empty()).then(|| Arc::new(over)))
}
