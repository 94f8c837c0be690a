//! The newest step of a pipeline that the checkpoints of its members hold together, where a part is lost and
//! nobody has a copy in memory: each member reads its own folder and those beside it.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use farflung_base::{Bandwidth, Bytes, Link, Nanos};
use farflung_comm::Communicator;
use farflung_parallel::membership::Place;
use farflung_parallel::plan::{Holding, Needed, newest_whole};
use serde::{Deserialize, Serialize};

use super::team::{Held, tell_all};
use crate::Result;
use crate::events::causes;
use crate::train::checkpoint::{Saved, beside, saved};
use crate::train::job::Job;
use crate::train::trainer::Pieces;

/// The slowest disk from which the others wait for a checkpoint to be read: 20 MB a second.
const SLOWEST: Link = Link { bandwidth: Bandwidth(160_000_000), latency: Nanos::ZERO };

/// A step of which the members have all of the model.
pub(super) struct Whole {
    /// Who has what.
    pub(super) holdings: Vec<Holding>,
    /// Where that stood.
    pub(super) held: Held,
    /// What of it this member has.
    pub(super) own: Option<Pieces>,
}

/// What a member says of a checkpoint that it can read.
#[derive(Debug, Serialize, Deserialize)]
struct Readable {
    view: Place,
    held: Held,
}

/// The newest step up to `newest` of which the members' checkpoints hold all tensors that are `needed`; `None`
/// where they do not. All members call it, each with its own folder.
///
/// Errors: a member that is lost meanwhile.
pub(super) fn newest(
    all: &Communicator,
    (folder, job): (Option<&Path>, &Job),
    needed: &[Needed],
    newest: u64,
) -> Result<Option<Whole>> {
    let steps = folder.map(|folder| steps(&beside(folder))).unwrap_or_default();
    let sizes: BTreeMap<u64, u64> = steps.iter().map(|(&step, found)| (step, bytes_of(found))).collect();
    let mut largest: BTreeMap<u64, u64> = BTreeMap::new();
    for (step, bytes) in tell_all(all, &sizes)?.into_iter().flatten() {
        let most = largest.entry(step).or_default();
        *most = bytes.max(*most);
    }
    for (step, bytes) in largest.into_iter().rev().filter(|(step, _)| *step <= newest) {
        let here: Vec<Saved> =
            steps.get(&step).into_iter().flatten().filter_map(|path| read(path, job)).collect();
        let readable = |saved: &Saved| Readable { view: saved.view, held: Held::of(&saved.pieces) };
        let mine: Vec<Readable> = here.iter().map(readable).collect();
        let patience = job.deadline().saturating_add(SLOWEST.time(Bytes(bytes)));
        let told: Vec<Vec<Readable>> = tell_all(&all.clone().with_deadline(patience), &mine)?;
        let views: BTreeSet<Place> = told.iter().flatten().map(|readable| readable.view).collect();
        for view in views.into_iter().rev() {
            let of_view = || {
                let all =
                    told.iter().enumerate().flat_map(|(member, told)| told.iter().map(move |r| (member, r)));
                all.filter(|(_, readable)| readable.view == view && readable.held.counted.step == step)
            };
            let holdings: Vec<Holding> = of_view().map(|(member, r)| r.held.holding(member)).collect();
            // Ranks that hold less of the optimizer than others are no part of it.
            let most = of_view().map(|(_, readable)| &readable.held).max_by_key(|held| held.counted.states);
            let Some(held) = most.filter(|_| newest_whole(&holdings, needed) == Ok(step)) else { continue };
            let own = here.into_iter().filter(|saved| saved.view == view).map(|saved| saved.pieces);
            return Ok(Some(Whole { holdings, held: held.clone(), own: Pieces::together(own) }));
        }
    }
    Ok(None)
}

/// The checkpoints in some folders, by their steps.
fn steps(folders: &[PathBuf]) -> BTreeMap<u64, Vec<PathBuf>> {
    let mut found: BTreeMap<u64, Vec<PathBuf>> = BTreeMap::new();
    for folder in folders {
        let steps = crate::run_dir::list(folder).unwrap_or_default();
        for step in steps {
            found.entry(step).or_default().push(folder.join(crate::checkpoint::folder(step)));
        }
    }
    found
}

/// How long files in some folders are together.
fn bytes_of(folders: &[PathBuf]) -> u64 {
    let files = folders.iter().flat_map(fs::read_dir).flatten().flatten();
    files.filter_map(|file| file.metadata().ok()).map(|found| found.len()).sum()
}

/// What a checkpoint holds, if it is one of this run and whole.
fn read(path: &Path, job: &Job) -> Option<Saved> {
    saved(path, job).unwrap_or_else(|error| {
        tracing::warn!(path = %path.display(), "passing over a checkpoint: {}", causes(&error));
        None
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_without_checkpoints_has_no_steps() {
        let root = tempfile::tempdir().unwrap();
        let alone = root.path().join("alone");
        assert_eq!(steps(&[alone]), BTreeMap::new());
    }
}
