//! The runs that a folder has been used for: their members' addresses, and how these are asked. A host that is
//! started again asks all of them. What belongs to a run that is over for this machine is put aside in the
//! folder `former`, one folder for each incarnation.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::thread;

use farflung_comm::tcp::GateConfig;

use super::kept::{self, ANY, Answered, asked, shown};
use crate::train::run::RunObserver;
use crate::{Error, Result, access};

/// Name of the folder with what was put aside.
const FORMER: &str = "former";
/// Number of runs that are kept there.
const MOST_RUNS: usize = 4;
/// Number of members that are asked at the same time.
const AT_ONCE: usize = 16;

/// Access to the members of an earlier run.
#[derive(Debug, Clone)]
pub struct FormerRun {
    /// Folder with the addresses of its members.
    pub folder: PathBuf,
    /// Settings with which they are asked.
    pub gate: GateConfig,
}

/// Returns the folders with the members of the runs that this folder was used for: the folder itself, then
/// those that were put aside, the newest first.
///
/// Errors: [`Error::Io`].
pub fn former_folders(folder: &Path) -> Result<Vec<PathBuf>> {
    Ok([folder.to_owned()].into_iter().chain(put_aside_in(folder)?.into_values().rev()).collect())
}

/// Returns the folders that were put aside, by incarnation.
fn put_aside_in(folder: &Path) -> Result<BTreeMap<u64, PathBuf>> {
    let within = folder.join(FORMER);
    if !within.is_dir() {
        return Ok(BTreeMap::new());
    }
    let entries = std::fs::read_dir(&within).map_err(Error::io("read", &within))?;
    let numbered = |path: PathBuf| Some((path.file_name()?.to_str()?.parse().ok()?, path));
    Ok(entries.filter_map(|entry| numbered(entry.ok()?.path())).collect())
}

/// Puts aside what is needed to ask the members of the run of this incarnation, before another run writes to
/// the folder. Of more than [`MOST_RUNS`], the oldest are removed.
///
/// Errors: [`Error::Io`].
pub(super) fn put_aside(folder: &Path, incarnation: u64) -> Result<()> {
    let addresses = kept::addresses(folder)?;
    if addresses.is_empty() {
        return Ok(());
    }
    let aside = folder.join(FORMER).join(incarnation.to_string());
    std::fs::create_dir_all(&aside).map_err(Error::io("create", &aside))?;
    let ticket = folder.join(access::RUN_TICKET);
    if let Ok(word) = std::fs::read_to_string(&ticket) {
        access::write_private(&aside.join(access::RUN_TICKET), word.trim_end())?;
    }
    kept::write_addresses(&aside, &addresses)?;
    kept::remove_addresses(folder)?;
    let all = put_aside_in(folder)?;
    for old in all.values().take(all.len().saturating_sub(MOST_RUNS)) {
        std::fs::remove_dir_all(old).map_err(Error::io("remove", old))?;
    }
    Ok(())
}

/// A member of an earlier run, and how it is asked.
#[derive(Debug, Clone)]
pub(super) struct FormerMember {
    pub(super) address: String,
    pub(super) gate: GateConfig,
}

/// Returns the members of these runs.
///
/// Errors: a file that is too long.
pub(super) fn members(runs: &[FormerRun]) -> Result<Vec<FormerMember>> {
    let mut members = Vec::new();
    for FormerRun { folder, gate } in runs {
        let member = |address| FormerMember { address, gate: gate.clone() };
        members.extend(kept::addresses(folder)?.into_iter().map(member));
    }
    Ok(members)
}

/// Asks members, several at the same time. Returns those that answer and are in no run of incarnation `than` or
/// a later one, each once.
pub(super) fn ask_all<'a>(members: impl IntoIterator<Item = &'a FormerMember>, than: u64) -> Vec<Answered> {
    let members: Vec<&FormerMember> = members.into_iter().collect();
    // A member may be in several runs.
    let mut answers: BTreeMap<String, Answered> = BTreeMap::new();
    for members in members.chunks(AT_ONCE) {
        thread::scope(|scope| {
            let ask = |member: &FormerMember| asked(&member.address, &member.gate, than);
            let asking: Vec<_> = members.iter().map(|&member| scope.spawn(move || ask(member))).collect();
            // A thread that panicked has no answer.
            for answered in asking.into_iter().filter_map(|thread| thread.join().ok().flatten()) {
                answers.entry(answered.address.clone()).or_insert(answered);
            }
        });
    }
    answers.into_values().collect()
}

/// Checks that these runs are over, by asking their members.
///
/// Errors: [`Error::StillRuns`] if a member answers. This machine must then join that run: otherwise there
/// would be two runs from the same state.
pub(super) fn are_over(members: &[FormerMember], watch: &mut dyn RunObserver) -> Result<()> {
    for member in members {
        let shown = shown(&member.address);
        watch.note(&format!("asking {shown} whether the run of this folder is still running there"));
    }
    ask_all(members, ANY).into_iter().next().map_or(Ok(()), |answered| Err(answered.into_error()))
}

#[cfg(test)]
mod tests {
    use farflung_comm::secure::{Identity, JoinSecret, Security, Ticket, unix_seconds};
    use farflung_comm::tcp::GrowingNetwork;

    use super::super::newcomer_info::NewcomerInfo;
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
            let run = FormerRun { folder: folder.path().to_owned(), gate };
            are_over(&members(&[run]).unwrap(), &mut Silent)
        };
        by_ticket(&secret, unix_seconds() + 3600).unwrap();
        kept::write_addresses(folder.path(), &[member.address().to_owned()]).unwrap();
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
        // It is a member of one run, although two name its address.
        let member_of = FormerMember { address: member.address().to_owned(), gate: asks.clone() };
        assert_eq!(ask_all(&[member_of.clone(), member_of], ANY).len(), 1);
        // A member of another run answers at the address now.
        by_ticket(&JoinSecret::from_text(b"a frog that nobody has seen").unwrap(), later).unwrap();
        drop(member);
        by_ticket(&secret, later).unwrap();
    }

    #[test]
    fn runs_that_a_folder_was_used_for_are_put_aside_with_their_tickets() {
        let folder = tempfile::tempdir().unwrap();
        let at = folder.path();
        assert_eq!(former_folders(at).unwrap(), [at]);
        // A run without other members leaves nothing to ask.
        put_aside(at, 1).unwrap();
        assert_eq!(former_folders(at).unwrap(), [at]);
        for incarnation in 2..9 {
            kept::write_addresses(at, &[format!("10.0.0.{incarnation}:29500")]).unwrap();
            access::write_private(&at.join(access::RUN_TICKET), &format!("ticket {incarnation}")).unwrap();
            put_aside(at, incarnation).unwrap();
            assert_eq!(kept::addresses(at).unwrap(), [""; 0]);
        }
        let folders = former_folders(at).unwrap();
        let kept: Vec<PathBuf> = (5..9).rev().map(|n: u32| at.join(FORMER).join(n.to_string())).collect();
        assert_eq!(folders[1..], kept);
        assert_eq!(kept::addresses(&folders[2]).unwrap(), ["10.0.0.7:29500"]);
        assert_eq!(std::fs::read_to_string(folders[2].join(access::RUN_TICKET)).unwrap(), "ticket 7\n");
    }
}
