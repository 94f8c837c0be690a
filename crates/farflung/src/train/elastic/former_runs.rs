//! The runs that a folder has been used for: their members' addresses, and how these are asked. A host that is
//! started again asks those of the run that it continues, of all its incarnations. What belongs to a run, or to
//! an incarnation, that is over for this machine is put aside in the folder `former`, in numbered folders.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::thread;

use farflung_comm::tcp::GateConfig;
use serde::{Deserialize, Serialize};

use super::addresses::{self, ANY, Answered, asked, shown, text};
use super::promises::{self, Promised};
use super::run_id::RunId;
use crate::train::run::RunObserver;
use crate::{Error, Result, access, run_dir};

/// Name of the folder with what was put aside.
pub(super) const FORMER: &str = "former";
/// Name of a folder there that is not complete yet.
const PARTIAL: &str = "partial";
/// Name of the file there that says of which run it is.
const WHICH: &str = "run.json";
/// Number of runs that are kept there.
const MOST_RUNS: usize = 4;
/// Number of addresses that are kept of each.
const MOST_ADDRESSES: usize = 256;
/// Number of members that are asked at the same time.
const AT_ONCE: usize = 16;

/// An incarnation of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
struct Incarnation {
    /// `None` if an earlier version has written it.
    run: Option<RunId>,
    number: u64,
}

impl Incarnation {
    /// Returns the incarnation whose members a folder names: of one that was put aside, or of the run that a
    /// member has made promises in.
    fn of(folder: &Path) -> Result<Option<Self>> {
        if let Some(text) = text(folder, WHICH)? {
            return Ok(serde_json::from_str(&text).ok());
        }
        let of_promises =
            |Promised { run, state, .. }: Promised| Self { run, number: state.view.incarnation };
        Ok(promises::read(folder)?.map(of_promises))
    }
}

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

/// Returns the folders that were put aside, by number.
fn put_aside_in(folder: &Path) -> Result<BTreeMap<u64, PathBuf>> {
    let within = folder.join(FORMER);
    if !within.is_dir() {
        return Ok(BTreeMap::new());
    }
    let entries = std::fs::read_dir(&within).map_err(Error::io("read", &within))?;
    let numbered = |path: PathBuf| Some((path.file_name()?.to_str()?.parse().ok()?, path));
    Ok(entries.filter_map(|entry| numbered(entry.ok()?.path())).collect())
}

/// Puts aside what is needed to ask the members of the run of this folder, before another run, or another
/// incarnation of it, writes to the folder. What was put aside of the same incarnation is merged with it. Of
/// more than [`MOST_RUNS`], the oldest are removed.
///
/// Errors: [`Error::Io`]; files that are too long.
pub(super) fn put_aside(folder: &Path) -> Result<()> {
    let mut known = addresses::of_run(folder)?;
    let incarnation = Incarnation::of(folder)?;
    let Some(incarnation) = incarnation.filter(|_| !known.is_empty()) else { return Ok(()) };
    let before = put_aside_in(folder)?;
    let mut merged = Vec::new();
    for old in before.values().rev() {
        if Incarnation::of(old)? == Some(incarnation) {
            let others = addresses::of_run(old)?;
            let more: Vec<String> = others.into_iter().filter(|other| !known.contains(other)).collect();
            known.extend(more);
            merged.push(old);
        }
    }
    known.truncate(MOST_ADDRESSES);
    let number = before.keys().max().map_or(1, |last| last.saturating_add(1));
    let within = folder.join(FORMER);
    // It gets its number once it is complete.
    let partial = within.join(PARTIAL);
    if partial.exists() {
        std::fs::remove_dir_all(&partial).map_err(Error::io("remove", &partial))?;
    }
    std::fs::create_dir_all(&partial).map_err(Error::io("create", &partial))?;
    let ticket = folder.join(access::RUN_TICKET);
    match std::fs::read_to_string(&ticket) {
        Ok(word) => access::write_private(&partial.join(access::RUN_TICKET), word.trim_end())?,
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        Err(error) => return Err(Error::io("read", &ticket)(error)),
    }
    let which = serde_json::to_vec(&incarnation).expect("numbers can be written as JSON");
    run_dir::replace(&partial.join(WHICH), &which)?;
    addresses::write(&partial, &known)?;
    let aside = within.join(number.to_string());
    std::fs::rename(&partial, &aside).map_err(Error::io("create", &aside))?;
    addresses::remove(folder)?;
    let left = before.values().filter(|old| !merged.contains(old));
    let too_many = (left.clone().count() + 1).saturating_sub(MOST_RUNS);
    for old in left.take(too_many).chain(merged.iter().copied()) {
        std::fs::remove_dir_all(old).map_err(Error::io("remove", old))?;
    }
    Ok(())
}

/// A member of an earlier run, and how it is asked.
#[derive(Debug, Clone)]
pub(super) struct FormerMember {
    pub(super) address: String,
    pub(super) gate: GateConfig,
    /// Its run; `None` if an earlier version has written its address.
    pub(super) run: Option<RunId>,
}

/// Returns the members of the incarnations of `run` among these. Where either is not known, they count.
///
/// Errors: a file that is too long.
pub(super) fn members(runs: &[FormerRun], run: Option<RunId>) -> Result<Vec<FormerMember>> {
    let mut members = Vec::new();
    for FormerRun { folder, gate } in runs {
        let of = Incarnation::of(folder)?.and_then(|incarnation| incarnation.run);
        if of.zip(run).is_none_or(|(of, run)| of == run) {
            let member = |address| FormerMember { address, gate: gate.clone(), run: of };
            members.extend(addresses::of_run(folder)?.into_iter().map(member));
        }
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
            let ask = |member: &FormerMember| asked(&member.address, (&member.gate, member.run), than);
            let asking: Vec<_> = members.iter().map(|&member| scope.spawn(move || ask(member))).collect();
            // A thread that panicked has no answer.
            for answered in asking.into_iter().filter_map(|thread| thread.join().ok().flatten()) {
                answers.entry(answered.address.clone()).or_insert(answered);
            }
        });
    }
    answers.into_values().collect()
}

/// Checks that these runs are over, by asking their members, and once more if none answers: a machine may be
/// too busy to answer in time.
///
/// Errors: [`Error::StillRuns`] if a member answers. This machine must then join that run: otherwise there
/// would be two runs from the same state.
pub(super) fn are_over(members: &[FormerMember], watch: &mut dyn RunObserver) -> Result<()> {
    for member in members {
        let shown = shown(&member.address);
        watch.note(&format!("asking {shown} whether the run of this folder is still running there"));
    }
    let ask = || ask_all(members, ANY).into_iter().next();
    ask().or_else(ask).map_or(Ok(()), |answered| Err(answered.into_error()))
}

#[cfg(test)]
mod tests {
    use farflung_comm::secure::{Identity, JoinSecret, Security, Ticket, unix_seconds};
    use farflung_comm::tcp::GrowingNetwork;
    use farflung_parallel::membership::{DurableState, Member, MemberId, Start, View, ViewId};
    use farflung_parallel::plan::Digest;

    use super::super::newcomer_info::NewcomerInfo;
    use super::super::promises::PromiseFile;
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
            are_over(&members(&[run], None).unwrap(), &mut Silent)
        };
        by_ticket(&secret, unix_seconds() + 3600).unwrap();
        addresses::write(folder.path(), &[member.address().to_owned()]).unwrap();
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
        let run = RunId::draw().unwrap();
        let answers_as = |run, than| asked(member.address(), (&asks, run), than).is_some();
        let answers = |than| answers_as(None, than);
        let welcome = |incarnation: Option<u64>| {
            let status = incarnation.map(|incarnation| Status { incarnation, ..Status::default() });
            let (version, settings) = (String::new(), String::new());
            let info = NewcomerInfo { version, run: Some(run), settings, facts: Vec::new(), status };
            member.set_welcome(info.to_bytes()).unwrap();
        };
        for (told, counts) in [(None, false), (Some(2), true), (Some(3), false), (Some(4), false)] {
            welcome(told);
            assert_eq!((answers(3), answers(ANY)), (counts, true), "{told:?}");
        }
        // A member of another run of this host is not one of this run.
        let other = RunId::draw().unwrap();
        assert_eq!([run, other].map(|run| answers_as(Some(run), ANY)), [true, false]);
        // It is a member of one run, although two name its address.
        let (address, gate) = (member.address().to_owned(), asks.clone());
        let member_of = FormerMember { address, gate, run: None };
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
        put_aside(at).unwrap();
        assert_eq!(former_folders(at).unwrap(), [at]);
        let (one, other) = (RunId::draw().unwrap(), RunId::draw().unwrap());
        let uses = |run: RunId, incarnation: u64, address: u32| {
            let first = Member::new(MemberId::number(0), 0);
            let start = Start { weights: Digest::new([0; 32]), plan: Digest::new([0; 32]) };
            let view = View::first(ViewId { incarnation, epoch: 1 }, &[first], start).unwrap();
            PromiseFile::new(at, run, None).unwrap().write(&DurableState::new(view)).unwrap();
            addresses::write(at, &[format!("10.0.0.{address}:29500")]).unwrap();
            access::write_private(&at.join(access::RUN_TICKET), &format!("ticket {address}")).unwrap();
            put_aside(at).unwrap();
            assert_eq!(addresses::of_run(at).unwrap(), [""; 0]);
        };
        for incarnation in 2..8 {
            uses(one, incarnation, incarnation as u32);
        }
        // The folder of a member that joins another run, of a lower incarnation, and again.
        uses(other, 2, 8);
        uses(other, 2, 9);
        let folders = former_folders(at).unwrap();
        let numbers = [8, 6, 5, 4].map(|number| at.join(FORMER).join(number.to_string()));
        assert_eq!(folders[1..], numbers);
        assert_eq!(addresses::of_run(&folders[1]).unwrap(), ["10.0.0.9:29500", "10.0.0.8:29500"]);
        assert_eq!(std::fs::read_to_string(folders[2].join(access::RUN_TICKET)).unwrap(), "ticket 7\n");
        // Only the members of the run that continues are asked.
        let gate = GateConfig::new("127.0.0.1:0", "night", Security::unencrypted());
        let runs: Vec<FormerRun> =
            folders.into_iter().map(|folder| FormerRun { folder, gate: gate.clone() }).collect();
        let asked = |run| members(&runs, run).unwrap().len();
        assert_eq!([Some(one), Some(other), None].map(asked), [3, 2, 5]);
        // What an earlier version has put aside counts for every run.
        std::fs::remove_file(at.join(FORMER).join("6").join(WHICH)).unwrap();
        assert_eq!([Some(one), Some(other), None].map(asked), [3, 3, 5]);
    }
}
