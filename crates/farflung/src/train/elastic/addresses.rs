//! The file with the addresses of the other members in a member's folder, and how these are asked whether their
//! run is still running. A host that is started again does so.

use std::path::Path;
use std::time::Duration;

use farflung_comm::tcp::{GateConfig, GrowingNetwork};
use farflung_comm::{CommError, Refusal};

use super::newcomer_info::NewcomerInfo;
use super::run_id::RunId;
use crate::{Error, Result, run_dir};

/// Name of the file with the other members' addresses, one per line.
const ADDRESSES: &str = "members.txt";
/// Maximum bytes of a file about members.
const MOST_BYTES: u64 = 4 << 20;
/// Time to wait for an answer from each saved address.
const ASKED: Duration = Duration::from_secs(2);

/// Reads a text file of the folder; `None` if there is no such file.
pub(super) fn text(folder: &Path, name: &str) -> Result<Option<String>> {
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

/// Writes the addresses of the other members.
///
/// Errors: [`Error::Io`].
pub(super) fn write(folder: &Path, addresses: &[String]) -> Result<()> {
    run_dir::replace(&folder.join(ADDRESSES), addresses.join("\n").as_bytes())
}

/// Removes the addresses of the other members.
///
/// Errors: [`Error::Io`].
pub(super) fn remove(folder: &Path) -> Result<()> {
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
pub(super) fn of_run(folder: &Path) -> Result<Vec<String>> {
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
/// Neither does one that tells that it is in another run than `run`, if that is known.
pub(super) fn asked(address: &str, (gate, run): (&GateConfig, Option<RunId>), than: u64) -> Option<Answered> {
    let mut asks = gate.clone();
    asks.deadline = ASKED;
    let (expired, step) = match GrowingNetwork::ask(&asks, &[address.to_owned()]) {
        Ok(members) => {
            let told = NewcomerInfo::read(&members.welcome).ok();
            let (theirs, status) = told.map_or((None, None), |told| (told.run, told.status));
            if theirs.zip(run).is_some_and(|(theirs, run)| theirs != run) {
                tracing::debug!("a member of another run answers at {}", shown(address));
                return None;
            }
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
