//! How the replicas of a plan divide the experts of a mixture: what each has of them, and with whom it
//! exchanges tokens.

use std::ops::Range;
use std::sync::Arc;

use farflung_base::{Axis, Rank};
use farflung_comm::Communicator;
use farflung_parallel::{Coordinates, Mesh, ParallelError, Plan};
use farflung_tensor::Device;
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
