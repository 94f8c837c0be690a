//! Fetching of blobs over a communicator. A rank that lacks blobs asks all ranks that have them; these answer
//! from a background service and wait until the fetch is over.

use std::sync::{Arc, Mutex};

use farflung_base::{Nanos, Pending, Rank};
use farflung_comm::{CommError, Communicator, ServiceTags, WaitMode};

use super::blobs::OfferedBlobs;
use super::fetching::{ChunkStore, Fetching, Wanted};
use crate::{Error, Result};

/// Tags of requests for blobs and of their answers.
pub(super) const TAGS: ServiceTags = ServiceTags { ask: u32::MAX / 2 - 8, answer: u32::MAX / 2 - 9 };
/// Tag by which a fetching rank reports its progress.
const PROGRESS: u32 = u32::MAX / 2 - 10;
/// Time to wait for an answer before the fetching rank looks for late chunks.
const LATE_CHECK_INTERVAL: Nanos = Nanos::from_millis(250);
/// Number of progress messages within a deadline, as long as chunks arrive.
const PROGRESS_MESSAGES: u64 = 4;

/// Progress messages: `DONE` is the last one of a fetching rank, `GOES_ON` any earlier one.
const DONE: u8 = 1;
const GOES_ON: u8 = 0;

/// The role of one rank in a fetch.
pub(super) struct FetchRole<'a> {
    /// All ranks that fetch something.
    pub(super) takers: &'a [Rank],
    /// Blobs that this rank fetches; empty for a rank that only gives.
    pub(super) wanted: Vec<Wanted>,
    /// Blobs that this rank offers to others.
    pub(super) blobs: OfferedBlobs,
    /// Receives the chunks. It keeps them if the fetch is interrupted.
    pub(super) store: &'a mut ChunkStore,
    /// Called once this rank has all that it wanted. Returns what it wants beside that.
    pub(super) follow_up: Option<&'a mut FollowUp<'a>>,
}

/// What a rank does with the blobs that it has received, before it reports that it has all.
pub(super) type FollowUp<'a> = dyn FnMut(&mut ChunkStore) -> Result<Vec<Wanted>> + 'a;

/// Fetches blobs for all ranks in `takers`. All ranks of the communicator call it, and it returns once every
/// taker has reported that it has its blobs. Returns the number of donors that sent chunks to this rank.
///
/// Errors: [`Error::PeerLost`] for a taker that falls silent, or for a donor that does not send a blob that no
/// other donor has; [`Error::Message`] if all holders of a blob have sent wrong data or no longer have it.
pub(super) fn fetch(comm: &Communicator, part: FetchRole<'_>) -> Result<usize> {
    let FetchRole { takers, wanted, blobs, store, follow_up: then } = part;
    let blobs = Arc::new(Mutex::new(blobs));
    let serving = comm.start_service(TAGS, &blobs);
    let me = comm.rank();
    let mut gave = if wanted.is_empty() { 0 } else { fetch_chunks(comm, Fetching::new(wanted, store))? };
    if let Some(then) = then {
        let more = then(store)?;
        if !more.is_empty() {
            gave = fetch_chunks(comm, Fetching::new(more, store))?;
        }
    }
    let mut telling = Vec::new();
    if takers.contains(&me) {
        tell(comm, DONE, &mut telling);
    }
    for &taker in takers.iter().filter(|&&taker| taker != me) {
        while comm.recv(taker, PROGRESS)? != [DONE] {}
    }
    for told in telling {
        // The next operation with a lost rank detects the loss.
        let _lost: std::result::Result<(), CommError> = told.wait();
    }
    drop(serving);
    Ok(gave)
}

/// A message that is being sent.
pub(super) type Sending = Pending<std::result::Result<(), CommError>>;
/// An answer of any donor.
pub(super) type Arriving = Pending<std::result::Result<(Rank, Vec<u8>), CommError>>;

fn tell(comm: &Communicator, word: u8, telling: &mut Vec<Sending>) {
    let others = (0..comm.size() as u32).map(Rank).filter(|&rank| rank != comm.rank());
    telling.extend(others.map(|rank| comm.start_send(rank, PROGRESS, vec![word])));
}

/// Asks donors for chunks until all blobs are complete. Returns the number of donors that sent some.
fn fetch_chunks(comm: &Communicator, mut fetching: Fetching<'_>) -> Result<usize> {
    let nobody = |_| Error::Message {
        message: "the state of the run".to_owned(),
        problem: "does not have the hashes that its members reported",
    };
    let deadline = comm.deadline();
    let patient = comm.clone().with_deadline(Nanos::MAX);
    let (mut asking, mut telling): (Vec<Sending>, Vec<Sending>) = (Vec::new(), Vec::new());
    let (mut came, mut told) = (comm.now(), comm.now());
    let mut arriving: Option<Arriving> = None;
    while !fetching.is_done() {
        let donors = fetching.donors();
        let mut asks = true;
        while std::mem::take(&mut asks) {
            // Ask each donor for one item in turn.
            for &donor in &donors {
                if let Some(item) = fetching.next(donor, comm.now()) {
                    asking.push(patient.start_send(donor, TAGS.ask, item.to_bytes()));
                    asks = true;
                }
            }
        }
        asking.retain(|asking| !asking.is_ready());
        let mut next = arriving.take().unwrap_or_else(|| patient.start_recv_any(&donors, TAGS.answer));
        let patience = LATE_CHECK_INTERVAL.min(deadline);
        let arrived = if comm.first(&mut [&mut next], WaitMode::Within(patience)).is_some() {
            Some(next.wait()?)
        } else if comm.now().saturating_sub(came) >= deadline {
            drop(next);
            let latest = fetching.latest().or(donors.first().copied()).unwrap_or(comm.rank());
            // This receive fails at once, with an error that names the silent donor.
            Some((latest, comm.clone().with_deadline(Nanos(1)).recv(latest, TAGS.answer)?))
        } else {
            arriving = Some(next);
            None
        };
        let now = comm.now();
        let Some((donor, bytes)) = arrived else { continue };
        // A late item of the fetch before this one may have been asked of two donors.
        if !fetching.is_asked(donor, &bytes) {
            continue;
        }
        fetching.arrived(donor, &bytes, now).map_err(nobody)?;
        came = now;
        if now.saturating_sub(told) >= Nanos(deadline.0 / PROGRESS_MESSAGES) {
            tell(comm, GOES_ON, &mut telling);
            told = now;
        }
    }
    Ok(fetching.gave())
}
