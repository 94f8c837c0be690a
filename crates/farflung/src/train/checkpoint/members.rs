//! The checkpoint from which a host continues the run of its folder: the newest one of which it can read the
//! whole model, in its own folder or in those of other members on the same disk.

use std::path::Path;

use super::super::job::Job;
use super::source::{Files, Needed, Residuals, Source};
use super::whole::{Chosen, all_of};
use super::{beside, saved_steps};
use crate::{Error, Result, run_dir};

/// Returns the newest checkpoint of a run's members, of whom one has the folder `own`; `None` if there is none.
///
/// A step of which some parts are in no folder that can be read is skipped if an older one was saved by several
/// members as well: members that are interrupted while they save may be one checkpoint apart. It is not skipped
/// for a checkpoint from before the model was divided, since that would lose steps that others have.
///
/// Errors: [`Error::PartsElsewhere`]; that of the newest checkpoint, if none can be read.
pub(super) fn newest(own: &Path, job: &Job, needed: &Needed) -> Result<Option<Chosen>> {
    let mut steps = saved_steps(&beside(own));
    // Its own checkpoint comes before those of others.
    for paths in steps.values_mut() {
        paths.sort_by_key(|path| path.parent() != Some(own));
    }
    let mut failed: Option<Error> = None;
    let mut elsewhere: Option<Error> = None;
    for path in steps.values().rev().flatten() {
        match all_of(path, job, 0)
            .and_then(|all| all.into_iter().map(Files::read).collect::<Result<Vec<_>>>())
        {
            Ok(files) if files.len() == 1 && elsewhere.is_some() => break,
            Ok(files) => return chosen(path, (own, job), files, needed).map(Some),
            Err(error @ Error::PartsElsewhere { .. }) => elsewhere = elsewhere.or(Some(error)),
            Err(error) => {
                tracing::warn!(path = %path.display(), %error, "skipping a checkpoint that cannot be read");
                failed = failed.or(Some(error));
            }
        }
    }
    elsewhere.or(failed).map_or(Ok(None), Err)
}

fn chosen(path: &Path, (own, job): (&Path, &Job), files: Vec<Files>, needed: &Needed) -> Result<Chosen> {
    let is_own = path.parent() == Some(own);
    let residuals = if is_own && files.len() == 1 { Residuals::Own } else { Residuals::None };
    let mut notes = Vec::new();
    if !is_own {
        let newest = run_dir::list(own)?.pop();
        let own =
            newest.map_or_else(|| "has none".to_owned(), |step| format!("has step {step} as the newest"));
        notes.push(format!(
            "the newest checkpoint of this run is {}, of another member: this member's own folder {own}",
            path.display()
        ));
    }
    Ok(Chosen { source: Source::new(&job.model, files, residuals, needed.clone())?, notes })
}
