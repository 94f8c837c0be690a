//! What a member leaves in its folder about the run's members: what it has promised, and where the others
//! are. A host that starts again reads both.

use std::path::{Path, PathBuf};
use std::time::Duration;

use farflung_comm::tcp::{Gate, GateConfig};
use farflung_parallel::membership::{Kept, Place};

use crate::train::run::Watch;
use crate::{Error, Result, run_dir};

/// The file of promises.
const PROMISES: &str = "promises.json";
/// The file with the addresses of the other members, one a line.
const ADDRESSES: &str = "members.txt";
/// Neither is larger.
const MOST_BYTES: u64 = 4 << 20;
/// How long each address of the run before is asked.
const ASKED: Duration = Duration::from_secs(2);

/// The file of promises in a folder.
pub(super) fn path(folder: &Path) -> PathBuf {
    folder.join(PROMISES)
}

/// The text of a file of the folder; none where there is no such file.
fn text(folder: &Path, name: &str) -> Result<Option<String>> {
    let path = folder.join(name);
    match std::fs::metadata(&path) {
        Err(_) => return Ok(None),
        Ok(found) if found.len() > MOST_BYTES => {
            let expected = format!("at most {MOST_BYTES} bytes");
            return Err(Error::Setting { field: "out", value: path.display().to_string(), expected });
        }
        Ok(_) => {}
    }
    std::fs::read_to_string(&path).map(Some).map_err(Error::io("read", &path))
}

/// What a member of the run of this folder has promised; none where no member has been here.
///
/// Errors: a file that is not one.
pub(super) fn read(folder: &Path) -> Result<Option<Kept>> {
    let Some(text) = text(folder, PROMISES)? else { return Ok(None) };
    let kept = serde_json::from_str(&text).map_err(|error| Error::Setting {
        field: "out",
        value: path(folder).display().to_string(),
        expected: format!("what a member has promised: {error}"),
    })?;
    Ok(Some(kept))
}

/// Whether a member of a run has been in this folder.
pub(super) fn is_there(folder: &Path) -> bool {
    path(folder).exists()
}

/// Where the first view of a host stands that goes on with the run of a folder.
pub(super) fn next(before: Option<&Kept>) -> Place {
    before.map_or(Place { incarnation: 1, epoch: 1 }, |kept| Place {
        incarnation: kept.view.incarnation.saturating_add(1),
        epoch: kept.view.epoch.saturating_add(1),
    })
}

/// Writes down where the others are.
///
/// Errors: [`Error::Io`].
pub(super) fn write_addresses(folder: &Path, addresses: &[String]) -> Result<()> {
    run_dir::replace(&folder.join(ADDRESSES), addresses.join("\n").as_bytes())
}

/// Asks the members of the run of a folder whether it goes on.
///
/// Errors: [`Error::StillRuns`] where it does: then this machine joins it, so that a run never forks.
pub(super) fn is_over(folder: &Path, gate: &GateConfig, watch: &mut dyn Watch) -> Result<()> {
    let Some(text) = text(folder, ADDRESSES)? else { return Ok(()) };
    let addresses: Vec<String> = text.lines().map(str::to_owned).collect();
    for address in addresses {
        watch.note(&format!("asking {address} whether the run of this folder goes on there"));
        let mut asks = gate.clone();
        asks.deadline = ASKED;
        if let Ok(asked) = Gate::ask(&asks, std::slice::from_ref(&address)) {
            return Err(Error::StillRuns { address, members: asked.members().len() });
        }
    }
    Ok(())
}
