//! Reads the checkpoint of a member of a run with pipelines, tensor by tensor, for any rank of any plan of the
//! same run.

use std::path::Path;

use farflung_parallel::membership::ViewId;

use super::super::job::Job;
use super::super::meet::model_facts;
use super::super::run_state::{OptimizerCounters, RunCounters, RunState};
use super::CheckpointRecord;
use super::source::{Files, Needed, Residuals, Source};
use crate::{Checkpoint, Result};

/// The content of one checkpoint.
#[derive(Debug, Clone, PartialEq)]
pub(in super::super) struct Saved {
    /// The view in which it was saved: the checkpoints of the same step and view are parts of one model.
    pub(in super::super) view: ViewId,
    pub(in super::super) state: RunState,
}

/// Reads the checkpoint that one member of a run with pipelines has saved. `None` if its model, seed, method or
/// data is not that of `job`, or if no such member saved it.
///
/// Errors: a damaged checkpoint.
pub(in super::super) fn saved(path: &Path, job: &Job) -> Result<Option<Saved>> {
    let files = Files::read(Checkpoint::open(path)?)?;
    let record = files.record.clone();
    let Some((view, plan_start)) = record.view.zip(record.plan_start).filter(|_| is_of(&record, job)) else {
        return Ok(None);
    };
    let source = Source::new(&job.model, vec![files], Residuals::None, Needed::All)?;
    let (kinds, tensors) = source.tensors();
    let counted = RunCounters {
        step: record.step,
        outer_steps: record.outer_step,
        rounds: record.rounds,
        microbatches: plan_start.microbatches,
        // There is one update per step: pipelines whose members join and leave have a flush.
        optimizer: OptimizerCounters { updates: record.step, scale: source.loss_scale().to_vec() },
        kinds,
    };
    let layers = record.parts.iter().map(|&(start, end)| start..end).collect();
    Ok(Some(Saved { view, state: RunState { counted, layers, squares: None, tensors } }))
}

fn is_of(record: &CheckpointRecord, job: &Job) -> bool {
    record.model == model_facts(job)
        && record.seed == job.config.seed
        && record.sync == job.plan.outermost().method.name
        && job.has_data(&record.data_hash)
}
