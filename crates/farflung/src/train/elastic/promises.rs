//! The file with a member's promises, and with the identity of the run in which it has given them.

use std::path::{Path, PathBuf};

use farflung_parallel::membership::{DurableState, ViewId};
use serde::{Deserialize, Serialize};

use super::addresses::text;
use super::run_id::RunId;
use crate::{Error, Result, run_dir};

/// Name of the file.
const PROMISES: &str = "promises.json";

/// The content of the file.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Promised {
    /// `None` in files of earlier versions.
    #[serde(default)]
    pub(super) run: Option<RunId>,
    #[serde(flatten)]
    pub(super) state: DurableState,
}

/// The file in a member's folder.
#[derive(Debug)]
pub(super) struct PromiseFile {
    path: PathBuf,
    run: RunId,
}

/// Returns the path of the file in a folder.
fn path(folder: &Path) -> PathBuf {
    folder.join(PROMISES)
}

impl PromiseFile {
    /// Returns the file of a member of this run in its folder.
    pub(super) fn new(folder: &Path, run: RunId) -> Self {
        Self { path: path(folder), run }
    }

    /// Writes the promises.
    ///
    /// Errors: [`Error::Io`].
    pub(super) fn write(&self, state: &DurableState) -> Result<()> {
        let promised = Promised { run: Some(self.run), state: state.clone() };
        let text = serde_json::to_vec_pretty(&promised).expect("promises can be written as JSON");
        run_dir::replace(&self.path, &text)
    }
}

/// Reads the promises saved in a folder; `None` if no member has run there.
///
/// Errors: a file that is too long or cannot be parsed.
pub(super) fn read(folder: &Path) -> Result<Option<Promised>> {
    let Some(text) = text(folder, PROMISES)? else { return Ok(None) };
    let promised = serde_json::from_str(&text).map_err(|error| Error::Setting {
        field: "out",
        value: path(folder).display().to_string(),
        expected: format!("a valid file with a member's promises: {error}"),
    })?;
    Ok(Some(promised))
}

/// Returns whether a member of a run has used this folder.
pub(super) fn are_there(folder: &Path) -> bool {
    path(folder).exists()
}

/// Returns the position of the first view of a host that continues the run of a folder. `before` is what the
/// folder contains, and `last` the last incarnation of the run of which this machine knows.
pub(super) fn next(before: Option<&DurableState>, last: u64) -> ViewId {
    before.map_or(ViewId { incarnation: 1, epoch: 1 }, |kept| ViewId {
        incarnation: kept.view.incarnation.max(last).saturating_add(1),
        epoch: kept.view.epoch.saturating_add(1),
    })
}
