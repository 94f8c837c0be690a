//! The file with a member's promises, and with the identity of the run in which it has given them.

use std::path::{Path, PathBuf};

use farflung_parallel::membership::{DurableState, ViewId};
use serde::{Deserialize, Serialize};

use super::addresses::{self, text};
use super::exchanged_file;
use super::run_id::RunId;
use crate::{Error, Result};

/// Name of the file.
const PROMISES: &str = "promises.json";

/// The content of the file.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Promised {
    /// `None` in files of earlier versions.
    #[serde(default)]
    pub(super) run: Option<RunId>,
    /// The last incarnation of this run of which this machine was a member. After it has returned to an older
    /// one, the view in `state` names that one.
    #[serde(default)]
    last_incarnation: u64,
    /// Whether the folder still has the checkpoints of another run, for which it was used before.
    #[serde(default)]
    pub(super) holds_another: bool,
    #[serde(flatten)]
    pub(super) state: DurableState,
}

impl Promised {
    fn last_incarnation(&self) -> u64 {
        self.last_incarnation.max(self.state.view.incarnation)
    }
}

/// The file in a member's folder.
#[derive(Debug)]
pub(super) struct PromiseFile {
    path: PathBuf,
    run: RunId,
    /// The last incarnation of this run that the file had.
    last_incarnation: u64,
    /// See [`Promised::holds_another`].
    pub(super) holds_another: bool,
    /// Addresses of the other members that are known before the first promise in this run.
    members: Option<Vec<String>>,
}

/// Returns the path of the file in a folder.
fn path(folder: &Path) -> PathBuf {
    folder.join(PROMISES)
}

impl PromiseFile {
    /// Returns the file of a member of this run in its folder. With the first promise, the addresses of
    /// `members` are written: until then the folder is that of the run before.
    ///
    /// Errors: as [`read`].
    pub(super) fn new(folder: &Path, run: RunId, members: Option<Vec<String>>) -> Result<Self> {
        let mut own = Self { path: path(folder), run, last_incarnation: 0, holds_another: false, members };
        match read(folder)? {
            Some(before) if before.run == Some(run) => {
                own.last_incarnation = before.last_incarnation();
                own.holds_another = before.holds_another;
            }
            // Of a file of an earlier version, it is not known.
            Some(before) => own.holds_another = before.run.is_some(),
            None => {}
        }
        Ok(own)
    }

    /// Writes the promises.
    ///
    /// Errors: [`Error::Io`].
    pub(super) fn write(&mut self, state: &DurableState) -> Result<()> {
        let &mut Self { run, last_incarnation, holds_another, .. } = self;
        let promised = Promised { run: Some(run), last_incarnation, holds_another, state: state.clone() };
        let text = serde_json::to_vec_pretty(&promised).expect("promises can be written as JSON");
        exchanged_file::replace(&self.path, &text)?;
        if let Some(members) = &self.members {
            addresses::write(self.path.parent().unwrap_or(Path::new("")), members)?;
        }
        self.members = None;
        Ok(())
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

/// Returns the run whose member has used a folder; `None` if there is none, or if it cannot be read.
pub(in crate::train) fn run_of(folder: &Path) -> Option<RunId> {
    read(folder).ok().flatten()?.run
}

/// Returns whether a member of a run has used this folder.
pub(super) fn are_there(folder: &Path) -> bool {
    path(folder).exists()
}

/// Returns the position of the first view of a host that continues the run of a folder. `before` is what the
/// folder contains. No incarnation has the number of an earlier one of this folder.
pub(super) fn next(before: Option<&Promised>) -> ViewId {
    before.map_or(ViewId { incarnation: 1, epoch: 1 }, |kept| ViewId {
        incarnation: kept.last_incarnation().saturating_add(1),
        epoch: kept.state.view.epoch.saturating_add(1),
    })
}

#[cfg(test)]
mod tests {
    use farflung_parallel::membership::{Member, MemberId, Start, View};
    use farflung_parallel::plan::Digest;

    use super::*;

    #[test]
    fn no_two_incarnations_of_a_run_have_the_same_number() {
        let folder = tempfile::tempdir().unwrap();
        let at = |incarnation: u64| {
            let start = Start { weights: Digest::new([0; 32]), plan: Digest::new([0; 32]) };
            let first = [Member::new(MemberId::number(0), 0)];
            DurableState::new(View::first(ViewId { incarnation, epoch: 7 }, &first, start).unwrap())
        };
        let (one, other) = (RunId::draw().unwrap(), RunId::draw().unwrap());
        let writes = |run: RunId, incarnation: u64| {
            PromiseFile::new(folder.path(), run, None).unwrap().write(&at(incarnation)).unwrap();
            next(read(folder.path()).unwrap().as_ref())
        };
        assert_eq!(next(None), ViewId { incarnation: 1, epoch: 1 });
        assert_eq!(writes(one, 2), ViewId { incarnation: 3, epoch: 8 });
        // It was refused, and has returned to the run that it continued.
        assert_eq!(writes(one, 1).incarnation, 3);
        assert_eq!(writes(one, 1).incarnation, 3);
        let holds_another = || read(folder.path()).unwrap().unwrap().holds_another;
        assert!(!holds_another());
        assert_eq!(writes(other, 1).incarnation, 2);
        // That it has the checkpoints of another run is remembered until they are put aside.
        assert_eq!((holds_another(), writes(other, 1).incarnation, holds_another()), (true, 2, true));
        let mut file = PromiseFile::new(folder.path(), other, Some(vec!["10.0.0.7:1".to_owned()])).unwrap();
        assert!(addresses::of_run(folder.path()).unwrap().is_empty());
        file.holds_another = false;
        file.write(&at(1)).unwrap();
        assert_eq!((holds_another(), addresses::of_run(folder.path()).unwrap().len()), (false, 1));
        // Promises of an earlier version have neither.
        std::fs::write(path(folder.path()), serde_json::to_vec(&at(4)).unwrap()).unwrap();
        let read = read(folder.path()).unwrap().unwrap();
        assert_eq!((read.run, next(Some(&read)).incarnation), (None, 5));
        assert!(!PromiseFile::new(folder.path(), one, None).unwrap().holds_another);
    }
}
