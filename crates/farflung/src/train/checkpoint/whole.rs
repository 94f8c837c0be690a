//! The checkpoints that together contain a whole model.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use farflung_base::Rank;

use super::super::job::Job;
use super::source;
use super::{CheckpointRecord, Source, TRAINER, beside, folder};
use crate::{Checkpoint, Error, Result};

/// The checkpoint from which a rank continues.
pub(super) struct Chosen {
    pub(super) source: Source,
    /// Notes for the user.
    pub(super) notes: Vec<String>,
}

/// Returns the checkpoint, if this rank wrote it.
pub(super) fn checked_owner(checkpoint: Checkpoint, rank: Rank) -> Result<Checkpoint> {
    match source::record(&checkpoint)?.rank {
        owner if owner == rank.0 => Ok(checkpoint),
        owner => Err(Error::ForeignFolder { path: checkpoint.path().to_owned(), owner: Rank(owner), rank }),
    }
}

/// Returns the checkpoints that together contain a model and its states: rank 0's at `path`, and beside it
/// those of the other ranks of its first replica, or of those that divided its experts or the optimizer's
/// state; or those of the members that saved in the same view. If the run trained paths, they are those of the
/// first replica of `own`.
pub(super) fn all_of(path: &Path, job: &Job, own: u32) -> Result<Vec<Checkpoint>> {
    let first = Checkpoint::open(path)?;
    let record = source::record(&first)?;
    if record.view.is_some() {
        return of_view(first, &record, job.model.layers());
    }
    let ranks = record.stages.checked_mul(record.experts.len().max(1));
    let ranks = ranks.and_then(|ranks| ranks.checked_mul(record.tensor_weights.len().max(1)));
    let ranks = ranks.and_then(|ranks| ranks.checked_mul(record.zero_weights.len().max(1)));
    let ranks = ranks.and_then(|ranks| u32::try_from(ranks).ok()).ok_or_else(|| Error::Damaged {
        path: path.join(TRAINER),
        what: "it has a number of ranks that no run has",
    })?;
    let open = |rank| checked_owner(Checkpoint::open(&of_rank(path, rank))?, rank);
    if own > 0 && !record.paths.is_empty() {
        let begin = own.saturating_mul(ranks);
        return (begin..begin.saturating_add(ranks)).map(|rank| open(Rank(rank))).collect();
    }
    // Replicas without a share of the optimizer's state have nothing that others lack.
    let each = ranks / record.zero_weights.len().max(1) as u32;
    let has_state = |rank: &u32| {
        let share = rank.checked_div(each).and_then(|replica| record.zero_weights.get(replica as usize));
        share.is_none_or(|&weight| weight > 0)
    };
    let others = (1..ranks).filter(has_state).map(|rank| open(Rank(rank)));
    std::iter::once(Ok(first)).chain(others).collect()
}

/// Returns the checkpoints of [`all_of`] for the first path, after checking that there are those of each path
/// if the run trained the job's paths.
pub(super) fn all_of_each(path: &Path, job: &Job) -> Result<Vec<Checkpoint>> {
    for own in 1..job.plan.paths() {
        all_of(path, job, own)?;
    }
    all_of(path, job, 0)
}

/// Returns a member's checkpoint, and those of others on the same disk that contain the rest of the model's
/// `layers` layers.
///
/// Errors: [`Error::PartsElsewhere`] if some layers are in none of them.
fn of_view(first: Checkpoint, record: &CheckpointRecord, layers: usize) -> Result<Vec<Checkpoint>> {
    let path = first.path().to_owned();
    let here = path.parent().unwrap_or(&path);
    let mut left: BTreeSet<usize> = (0..layers).collect();
    let mut without = |record: &CheckpointRecord| {
        let before = left.len();
        record.parts.iter().for_each(|&(start, end)| left.retain(|layer| !(start..end).contains(layer)));
        left.len() < before
    };
    without(record);
    let mut all = vec![first];
    for folder in beside(here).into_iter().filter(|folder| folder != here) {
        let Ok(other) = Checkpoint::open(&folder.join(crate::checkpoint::folder(record.step))) else {
            continue;
        };
        let Ok(theirs) = source::record(&other) else { continue };
        if theirs.view == record.view && without(&theirs) {
            all.push(other);
        }
    }
    match (left.first(), left.last()) {
        (Some(&first), Some(&last)) => Err(Error::PartsElsewhere { path, layers: first..last + 1 }),
        _ => Ok(all),
    }
}

/// Returns the path of another rank's checkpoint beside rank 0's.
pub(super) fn of_rank(path: &Path, rank: Rank) -> PathBuf {
    match (rank.0, path.parent(), path.file_name()) {
        (1.., Some(run), Some(step)) => folder(run, rank).join(step),
        _ => path.to_owned(),
    }
}
