//! Files about a run's members in a member's folder: its promises, and the addresses of the other members. A
//! host that is started again reads both.

use std::path::{Path, PathBuf};
use std::time::Duration;

use farflung_comm::tcp::{GateConfig, GrowingNetwork};
use farflung_comm::{CommError, Refusal};
use farflung_parallel::membership::{DurableState, ViewId};

use super::newcomer_info::NewcomerInfo;
use crate::{Error, Result, run_dir};

/// Name of the file with the promises.
const PROMISES: &str = "promises.json";
/// Name of the file with the other members' addresses, one per line.
const ADDRESSES: &str = "members.txt";
/// Maximum bytes of each of these files.
const MOST_BYTES: u64 = 4 << 20;
/// Time to wait for an answer from each saved address.
const ASKED: Duration = Duration::from_secs(2);

/// Returns the path of the promises file in a folder.
pub(super) fn path(folder: &Path) -> PathBuf {
    folder.join(PROMISES)
}

/// Reads a text file of the folder; `None` if there is no such file.
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

/// Reads the promises saved in a folder; `None` if no member has run there.
///
/// Errors: a file that is too long or cannot be parsed.
pub(super) fn read(folder: &Path) -> Result<Option<DurableState>> {
    let Some(text) = text(folder, PROMISES)? else { return Ok(None) };
    let kept = serde_json::from_str(&text).map_err(|error| Error::Setting {
        field: "out",
        value: path(folder).display().to_string(),
        expected: format!("a valid file with a member's promises: {error}"),
    })?;
    Ok(Some(kept))
}

/// Returns whether a member of a run has used this folder.
pub(super) fn is_there(folder: &Path) -> bool {
    path(folder).exists()
}

/// Returns the position of the first view of a host that continues the run of a folder. `before` is what the
/// folder contains.
pub(super) fn next(before: Option<&DurableState>) -> ViewId {
    before.map_or(ViewId { incarnation: 1, epoch: 1 }, |kept| ViewId {
        incarnation: kept.view.incarnation.saturating_add(1),
        epoch: kept.view.epoch.saturating_add(1),
    })
}

/// Writes the addresses of the other members.
///
/// Errors: [`Error::Io`].
pub(super) fn write_addresses(folder: &Path, addresses: &[String]) -> Result<()> {
    run_dir::replace(&folder.join(ADDRESSES), addresses.join("\n").as_bytes())
}

/// Removes the addresses of the other members.
///
/// Errors: [`Error::Io`].
pub(super) fn remove_addresses(folder: &Path) -> Result<()> {
    let path = folder.join(ADDRESSES);
    std::fs::remove_file(&path).map_err(Error::io("remove", &path))
}

/// A former member that has answered.
#[derive(Debug)]
pub(super) struct Answered {
    pub(super) address: String,
    /// Whether it refuses the folder's ticket because it has expired.
    expired: bool,
    /// Number of steps that it has done, if it tells.
    pub(super) step: Option<u64>,
}

impl Answered {
    pub(super) fn into_error(self) -> Error {
        let Self { address, expired, .. } = self;
        Error::StillRuns { address, expired }
    }
}

/// Returns the addresses of the other members of the run of a folder.
///
/// Errors: a file that is too long.
pub(super) fn addresses(folder: &Path) -> Result<Vec<String>> {
    Ok(text(folder, ADDRESSES)?.iter().flat_map(|text| text.lines()).map(str::to_owned).collect())
}

/// Returns an address without the key.
pub(super) fn shown(address: &str) -> &str {
    address.split(",key:").next().unwrap_or_default()
}

/// The incarnation than which every run is older.
pub(super) const ANY: u64 = u64::MAX;

/// Asks whether a member of the run of `gate` trains at an address; `None` if not. A member that tells that it
/// trains in a run of incarnation `than` or a later one does not count: it has joined the run that continues.
pub(super) fn asked(address: &str, gate: &GateConfig, than: u64) -> Option<Answered> {
    let mut asks = gate.clone();
    asks.deadline = ASKED;
    let (expired, step) = match GrowingNetwork::ask(&asks, &[address.to_owned()]) {
        Ok(members) => {
            let status = NewcomerInfo::read(&members.welcome).ok().and_then(|welcome| welcome.status);
            // One that does not tell yet may have just joined.
            if status.as_ref().map_or(than < ANY, |status| status.incarnation >= than) {
                return None;
            }
            (false, status.map(|status| status.step))
        }
        // A member checks the date only after the ticket has proven to belong to its run.
        Err(CommError::Refused { reason: Refusal::Expired { .. }, .. }) => (true, None),
        Err(error) => {
            tracing::debug!(%error, "no member of the run of this folder answers at {}", shown(address));
            return None;
        }
    };
    Some(Answered { address: shown(address).to_owned(), expired, step })
}
