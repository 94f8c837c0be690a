//! The tensors that each rank of a pipeline holds.

use std::collections::BTreeMap;

use farflung_base::{Rank, StageId};
use farflung_parallel::pipeline::Placement;
use farflung_tensor::Device;
use farflung_zoo::Stage;

use crate::train::bind::ReplicaSchedule;
use crate::train::job::Job;
use crate::{Error, Result};

/// Returns the names of the tensors that each rank of the job's pipeline holds, with their numbers of elements.
///
/// Errors: those of [`ReplicaSchedule::new`].
pub(super) fn needs(job: &Job) -> Result<Vec<BTreeMap<String, usize>>> {
    let schedule = ReplicaSchedule::new(job, 0)?;
    let (placement, device) = (schedule.placement(), Device::cpu(1)?);
    let holds = |stage: StageId| {
        let layers = schedule.layers[placement.part(stage) as usize].clone();
        Ok::<_, Error>(Stage::new(&job.model, layers, &device)?)
    };
    let of_rank = |placement: &Placement, rank| {
        let mut tensors = BTreeMap::new();
        for stage in placement.homes_of(rank) {
            let held = holds(stage)?;
            let params = held.layout().params().iter();
            tensors.extend(params.map(|param| (param.name.clone(), param.shape.len())));
        }
        Ok(tensors)
    };
    (0..placement.ranks()).map(Rank).map(|rank| of_rank(placement, rank)).collect()
}
