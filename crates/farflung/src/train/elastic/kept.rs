//! Files about a run's members in a member's folder: its promises, and the addresses of the other members. A
//! host that is started again reads both.

use std::path::{Path, PathBuf};
use std::time::Duration;

use farflung_comm::tcp::{GateConfig, GrowingNetwork};
use farflung_comm::{CommError, Refusal};
use farflung_parallel::membership::{DurableState, ViewId};

use super::newcomer_info::NewcomerInfo;
use crate::train::run::RunObserver;
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

fn shown(address: &str) -> &str {
    address.split(",key:").next().unwrap_or_default()
}

/// The incarnation than which every run is older.
const ANY: u64 = u64::MAX;

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

/// Checks that the run of a folder is over, by asking its members at their saved addresses.
///
/// Errors: [`Error::StillRuns`] if a member answers. This machine must then join that run: otherwise there
/// would be two runs from the same state.
pub(super) fn is_over(folder: &Path, gate: &GateConfig, watch: &mut dyn RunObserver) -> Result<()> {
    for address in addresses(folder)? {
        let shown = shown(&address);
        watch.note(&format!("asking {shown} whether the run of this folder is still running there"));
        if let Some(answered) = asked(&address, gate, ANY) {
            return Err(answered.into_error());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use farflung_comm::secure::{Identity, JoinSecret, Security, Ticket, unix_seconds};

    use super::super::status::Status;
    use super::*;

    struct Silent;
    impl RunObserver for Silent {
        fn step(&mut self, _: &crate::StepMetrics, _: Option<f64>) {}
        fn note(&mut self, _: &str) {}
    }

    #[test]
    fn a_run_whose_members_find_the_ticket_too_old_is_not_over() {
        let identity = |number: u8| Identity::from_seed([number; 32]);
        let gate = |security| GateConfig::new("127.0.0.1:0", "night", security);
        let secret = JoinSecret::from_text(b"an old pond, a frog jumps in").unwrap();
        let member = GrowingNetwork::found(&gate(Security::by_secret(&identity(1), &secret))).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let by_ticket = |secret: &JoinSecret, expiry| {
            let (host, addresses) = (identity(1).public(), vec!["127.0.0.1:1".to_owned()]);
            let ticket = Ticket { addresses, host, secret: secret.until(expiry), expiry };
            let gate = gate(Security::by_ticket(&identity(2), &ticket));
            is_over(folder.path(), &gate, &mut Silent)
        };
        by_ticket(&secret, unix_seconds() + 3600).unwrap();
        write_addresses(folder.path(), &[member.address().to_owned()]).unwrap();
        let (later, earlier) = (unix_seconds() + 3600, unix_seconds() - 60);
        for (until, old) in [(later, false), (earlier, true)] {
            let error = by_ticket(&secret, until).unwrap_err();
            assert!(matches!(error, Error::StillRuns { expired, .. } if expired == old), "{error}");
        }
        // Once it has joined the run that continues, it does not count.
        let ticket = Ticket {
            addresses: vec!["127.0.0.1:1".to_owned()],
            host: identity(1).public(),
            secret: secret.until(later),
            expiry: later,
        };
        let asks = gate(Security::by_ticket(&identity(2), &ticket));
        let answers = |than| asked(member.address(), &asks, than).is_some();
        let welcome = |incarnation: Option<u64>| {
            let status = incarnation.map(|incarnation| Status { incarnation, ..Status::default() });
            let (version, settings) = (String::new(), String::new());
            let info = NewcomerInfo { version, settings, facts: Vec::new(), status };
            member.set_welcome(info.to_bytes()).unwrap();
        };
        for (told, counts) in [(None, false), (Some(2), true), (Some(3), false), (Some(4), false)] {
            welcome(told);
            assert_eq!((answers(3), answers(ANY)), (counts, true), "{told:?}");
        }
        // A member of another run answers at the address now.
        by_ticket(&JoinSecret::from_text(b"a frog that nobody has seen").unwrap(), later).unwrap();
        drop(member);
        by_ticket(&secret, later).unwrap();
    }
}
