//! How the replicas of a plan divide the experts of a mixture: what each has of them, with whom it exchanges
//! tokens, and with whom it averages its experts' gradients.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use farflung_base::{Axis, Rank};
use farflung_comm::Communicator;
use farflung_optim::ApartHolders;
use farflung_parallel::{Coordinates, Mesh, ParallelError, Plan};
use farflung_tensor::{Device, Param};
use farflung_zoo::exchange::{Counted, Exchange};
use farflung_zoo::{AxisShare, ModelSpec, Stage};

use super::bound_plan::BoundPlan;
use crate::{OverRanks, Result};

/// The division of experts among the replicas of a plan.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ExpertRanks {
    /// The weights of the replicas of a group; one if each replica has all experts.
    weights: Vec<u32>,
    mesh: Mesh,
}

impl ExpertRanks {
    pub(super) fn of(plan: &Plan) -> Self {
        let weights = if plan.divides_experts() { plan.experts.clone() } else { vec![1] };
        Self { weights, mesh: plan.mesh.clone() }
    }

    /// Returns whether a replica lacks experts.
    pub(super) fn divides(&self) -> bool {
        self.weights.len() > 1
    }

    /// Returns the replicas of the first group, which together have all experts.
    pub(super) fn first_group(&self) -> Range<u32> {
        0..self.weights.len() as u32
    }

    /// Returns the rank at a position of a replica's pipeline.
    ///
    /// Errors: the plan has no such rank.
    pub(super) fn rank(&self, replica: u32, position: Rank) -> Result<Rank> {
        Ok(self.mesh.rank(Coordinates { data: replica, pipeline: position.0, ..Coordinates::default() })?)
    }

    /// Returns the number of a replica in its group.
    pub(super) fn number(&self, replica: u32) -> u32 {
        replica % self.weights.len() as u32
    }

    /// Returns what a replica has of the experts.
    pub(super) fn share(&self, replica: u32) -> Result<AxisShare> {
        Ok(AxisShare::new(self.number(replica) as usize, self.weights.clone())?)
    }

    /// Returns the ranges of a stage's flat buffers that only some replicas have: its experts, if replicas
    /// divide them.
    pub(super) fn apart(&self, stage: &Stage) -> Vec<Range<usize>> {
        if self.divides() { stage.expert_ranges() } else { Vec::new() }
    }

    /// Returns the number of elements of a stage's experts, if one of the `holders` of its part alone has them:
    /// they are not averaged.
    pub(super) fn alone(&self, stage: &Stage, holders: usize) -> usize {
        let is_alone = self.weights.len() == holders;
        self.apart(stage).iter().filter(|_| is_alone).map(ExactSizeIterator::len).sum()
    }

    /// Makes the stage that a replica has of some layers. Its layers exchange by `exchange`.
    pub(super) fn stage(
        &self,
        (spec, layers): (&ModelSpec, Range<usize>),
        replica: u32,
        device: &Device,
        exchange: Arc<dyn Exchange>,
    ) -> Result<Stage> {
        let shares = [AxisShare::whole(), self.share(replica)?];
        Ok(Stage::shared(spec, layers, device, shares, exchange)?)
    }

    /// Makes such a stage without other ranks: exchanges are only counted.
    pub(super) fn counted_stage(
        &self,
        layers: (&ModelSpec, Range<usize>),
        replica: u32,
        device: &Device,
    ) -> Result<Stage> {
        self.stage(layers, replica, device, self.counted(replica)?)
    }

    /// Returns the exchange of a replica that only counts.
    pub(super) fn counted(&self, replica: u32) -> Result<Arc<dyn Exchange>> {
        Ok(Arc::new(Counted::new([(Axis::Expert, self.share(replica)?)])))
    }
}

/// Checks that each replica of a plan has an expert of each mixture.
///
/// Errors: [`ParallelError::Plan`] with the field.
pub(super) fn check(plan: &Plan, model: &ModelSpec) -> Result<()> {
    if plan.experts.is_empty() {
        return Ok(());
    }
    let refuse = |expected: String| {
        let (field, value) = ("experts".to_owned(), format!("{:?}", plan.experts));
        Err(ParallelError::Plan { field, value, expected }.into())
    };
    let Some(fewest) = model.mixtures().map(|(_, experts)| experts.count).min() else {
        return refuse("nothing, because the model has no experts".to_owned());
    };
    if model.check_experts(&AxisShare::new(0, plan.experts.clone())?).is_err() {
        return refuse(format!("weights with which each replica has one of the {fewest} experts"));
    }
    Ok(())
}

/// Makes the exchange of a rank with those that divide the experts with it, over the communicator of a pass;
/// `None` if each has all. A collective, if experts are divided.
pub(super) fn exchange(
    (plan, seed): (&BoundPlan, u64),
    messages: &Communicator,
    rank: Rank,
) -> Result<Option<Arc<OverRanks>>> {
    if !plan.divides_experts() {
        return Ok(None);
    }
    let first = plan.group(rank, Axis::Expert)[0];
    let over = OverRanks::new([(Axis::Expert, messages.split(first.0, rank.0)?)]);
    Ok(Some(Arc::new(over.with_row_codec(plan.expert_codec(), seed))))
}

/// Makes the communicators among the holders of the same experts, one for each part of the model that this rank
/// holds, from those among all holders of the part. A collective of all ranks of `holders`.
pub(super) fn apart(
    plan: &Plan,
    holders: &BTreeMap<u32, Communicator>,
    replica: u32,
) -> Result<BTreeMap<u32, ApartHolders>> {
    if !plan.divides_experts() {
        return Ok(BTreeMap::new());
    }
    let factor = 1.0 / f64::from(plan.expert_ranks());
    let among = |(&part, comm): (&u32, &Communicator)| {
        let comm = comm.split(plan.expert_rank(replica), comm.rank().0)?;
        Ok((part, ApartHolders { comm, factor }))
    };
    holders.iter().map(among).collect()
}

/// Returns whether a tensor of a layout is in one of some ranges.
pub(super) fn is_in(ranges: &[Range<usize>], param: &Param) -> bool {
    ranges.iter().any(|range| range.contains(&param.start))
}
