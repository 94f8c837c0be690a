//! The checkpoint that the path of `--resume` leads to: a checkpoint itself, or the newest one of a run's
//! folder.

use std::path::{Path, PathBuf};

use farflung_comm::Communicator;

use super::super::all_succeed::all_succeed;
use super::super::job::Job;
use super::folder;
use super::whole::{all_of_each, checked_owner};
use crate::checkpoint::{MANIFEST, folder as name_of};
use crate::error::ModelError;
use crate::{Checkpoint, Error, ModelSource, Result, run_dir};

/// What a path of `--resume` is, on rank 0's disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// A checkpoint.
    Checkpoint = 0,
    /// A run's folder with checkpoints.
    Run = 1,
}

/// Returns what a path is on rank 0's disk. A collective.
///
/// Errors: [`ModelError::NotACheckpoint`], with what it is; the same on all ranks.
pub(super) fn kind(path: &Path, comm: &Communicator) -> Result<Kind> {
    let own = if comm.rank().0 == 0 { on_disk(path) } else { Ok(Kind::Checkpoint) };
    let own = all_succeed(comm, own)?;
    let all = super::all_gather_u64(comm, own as u64)?;
    Ok(if all.first() == Some(&(Kind::Run as u64)) { Kind::Run } else { Kind::Checkpoint })
}

fn on_disk(path: &Path) -> Result<Kind> {
    if path.join(MANIFEST).exists() {
        return Ok(Kind::Checkpoint);
    }
    if run_dir::list(path).is_ok_and(|steps| !steps.is_empty()) {
        return Ok(Kind::Run);
    }
    Err(not_a_checkpoint(path))
}

/// Returns the error of a path that is neither a checkpoint nor a run's folder with one.
pub(super) fn not_a_checkpoint(path: &Path) -> Error {
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let as_weights = || format!("to start from its weights, at step 0: `--init-from {}`", path.display());
    let newest = run_dir::list(parent).ok().and_then(|mut steps| steps.pop());
    let (found, advice) = if !path.exists() {
        let newest = newest
            .map(|step| format!("the newest checkpoint there is {}", parent.join(name_of(step)).display()));
        ("does not exist", newest)
    } else if path.is_file() && parent.join(MANIFEST).exists() {
        ("is a file of a checkpoint", Some(format!("give its folder, {}", parent.display())))
    } else if ModelSource::find(path).is_ok() {
        ("has weights, but no state of an optimizer", Some(as_weights()))
    } else if path.is_file() {
        ("is a file", None)
    } else if path.join("config.toml").exists() {
        ("is the folder of a run that has no checkpoint", None)
    } else {
        ("has no checkpoint", None)
    };
    ModelError::NotACheckpoint { path: path.to_owned(), found: found.to_owned(), advice }.into()
}

/// Returns the path of rank 0's checkpoint in the folder of a run: of the newest step that all ranks have; else
/// the newest with which rank 0 has the whole model; else its newest. A collective.
///
/// Errors: that of rank 0's newest checkpoint, if it has no good one.
pub(super) fn newest(run: &Path, job: &Job, comm: &Communicator) -> Result<PathBuf> {
    let rank = comm.rank();
    let own = folder(run, rank);
    let mut failed = None;
    let mut good = Vec::new();
    for step in run_dir::list(&own).unwrap_or_default().into_iter().rev() {
        match Checkpoint::open(&own.join(name_of(step))).and_then(|found| checked_owner(found, rank)) {
            Ok(_) => good.push(step),
            Err(error) => {
                tracing::warn!(step, "skipping a checkpoint: {}", crate::error::causes(&error));
                failed = failed.or(Some(error));
            }
        }
    }
    let bytes: Vec<u8> = good.iter().flat_map(|step| step.to_le_bytes()).collect();
    let all = comm.all_gather_bytes(bytes)?;
    let has =
        |steps: &[u8], step: u64| steps.as_chunks().0.iter().any(|&bytes| u64::from_le_bytes(bytes) == step);
    let on_all = good.iter().copied().find(|&step| all.iter().all(|steps| has(steps, step)));
    let path = |step| run.join(name_of(step));
    let whole = || good.iter().copied().find(|&step| all_of_each(&path(step), job).is_ok());
    let chosen = match (rank.0, on_all.or_else(whole).or(good.first().copied())) {
        (0, None) => Err(failed.map_or_else(|| not_a_checkpoint(run), Error::of_input)),
        (_, step) => Ok(step.unwrap_or(0)),
    };
    let chosen = all_succeed(comm, chosen)?;
    let chosen = super::all_gather_u64(comm, chosen)?;
    Ok(path(chosen.first().copied().unwrap_or(0)))
}
