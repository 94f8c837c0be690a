//! Search for the newest step whose whole model is in the members' checkpoints together. It is used when a part
//! is lost and no member has a copy in memory. Each member reads its own folder and those next to it.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use farflung_base::{Bandwidth, Bytes, Link, Nanos};
use farflung_comm::Communicator;
use farflung_parallel::membership::ViewId;
use farflung_parallel::plan::{Holding, Needed, newest_whole};
use serde::{Deserialize, Serialize};

use super::all_gather::all_gather;
use super::held_tensors::HeldTensors;
use crate::Result;
use crate::events::causes;
use crate::train::checkpoint::{Saved, beside, saved, saved_steps};
use crate::train::job::Job;
use crate::train::run_state::RunState;

/// The slowest disk for which the others wait while a member reads a checkpoint: 20 MB a second.
const SLOWEST: Link = Link { bandwidth: Bandwidth(160_000_000), latency: Nanos::ZERO };

/// A step of which the members together have the whole model.
pub(super) struct Whole {
    /// Which member has which tensors.
    pub(super) holdings: Vec<Holding>,
    /// The run's counters at that step, and names of the tensors that one member has.
    pub(super) held: HeldTensors,
    /// The tensors of this step that this member has.
    pub(super) own: Option<RunState>,
}

/// Description of a readable checkpoint, for the other members.
#[derive(Debug, Serialize, Deserialize)]
struct Readable {
    view: ViewId,
    held: HeldTensors,
}

/// Returns the newest step up to `newest` for which the members' checkpoints contain all `needed` tensors;
/// `None` if there is none. All members call it, each with its own folder.
///
/// Errors: a member that is lost meanwhile.
pub(super) fn newest(
    all: &Communicator,
    (folder, job): (Option<&Path>, &Job),
    needed: &[Needed],
    newest: u64,
) -> Result<Option<Whole>> {
    let steps = folder.map(|folder| saved_steps(&beside(folder))).unwrap_or_default();
    let sizes: BTreeMap<u64, u64> = steps.iter().map(|(&step, found)| (step, bytes_of(found))).collect();
    let mut largest: BTreeMap<u64, u64> = BTreeMap::new();
    for (step, bytes) in all_gather(all, &sizes)?.into_iter().flatten() {
        let most = largest.entry(step).or_default();
        *most = bytes.max(*most);
    }
    for (step, bytes) in largest.into_iter().rev().filter(|(step, _)| *step <= newest) {
        let here: Vec<Saved> =
            steps.get(&step).into_iter().flatten().filter_map(|path| read(path, job)).collect();
        let readable = |saved: &Saved| Readable { view: saved.view, held: HeldTensors::of(&saved.state) };
        let mine: Vec<Readable> = here.iter().map(readable).collect();
        let patience = job.deadline().saturating_add(SLOWEST.time(Bytes(bytes)));
        let told: Vec<Vec<Readable>> = all_gather(&all.clone().with_deadline(patience), &mine)?;
        let views: BTreeSet<ViewId> = told.iter().flatten().map(|readable| readable.view).collect();
        for view in views.into_iter().rev() {
            let of_view = || {
                let all =
                    told.iter().enumerate().flat_map(|(member, told)| told.iter().map(move |r| (member, r)));
                all.filter(|(_, readable)| readable.view == view && readable.held.counted.step == step)
            };
            let holdings: Vec<Holding> = of_view().map(|(member, r)| r.held.holding(member)).collect();
            // Take the checkpoint with the most kinds of states: one with fewer is not complete.
            let most =
                of_view().map(|(_, readable)| &readable.held).max_by_key(|held| held.counted.kinds.len());
            let Some(held) = most.filter(|_| newest_whole(&holdings, needed) == Ok(step)) else { continue };
            let own = here.into_iter().filter(|saved| saved.view == view).map(|saved| saved.state);
            return Ok(Some(Whole { holdings, held: held.clone(), own: RunState::merge(own) }));
        }
    }
    Ok(None)
}

/// Returns the bytes of all files in some folders.
fn bytes_of(folders: &[PathBuf]) -> u64 {
    let files = folders.iter().flat_map(fs::read_dir).flatten().flatten();
    files.filter_map(|file| file.metadata().ok()).map(|found| found.len()).sum()
}

/// Reads a checkpoint; `None` if it belongs to another run or is incomplete.
fn read(path: &Path, job: &Job) -> Option<Saved> {
    saved(path, job).unwrap_or_else(|error| {
        tracing::warn!(path = %path.display(), "skipping a checkpoint: {}", causes(&error));
        None
    })
}
