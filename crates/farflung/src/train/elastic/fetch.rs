//! A fetch over a communicator: whoever lacks blobs takes them from all that have them, while these wait and
//! answer.

use std::sync::{Arc, Mutex};

use farflung_base::{Nanos, Pending, Rank};
use farflung_comm::{CommError, Communicator, Look, ServiceTags};

use super::fetching::{Fetching, Store, Wanted};
use super::shelf::Shelf;
use crate::{Error, Result};

/// Of questions to a shelf, and of its answers.
pub(super) const TAGS: ServiceTags = ServiceTags { ask: u32::MAX / 2 - 8, answer: u32::MAX / 2 - 9 };
/// By which one that fetches tells how it stands.
const PROGRESS: u32 = u32::MAX / 2 - 10;
/// How long one waits for an answer before it looks whether others are late.
const LOOK: Nanos = Nanos::from_millis(250);
/// One that fetches says so this many times within a deadline, as long as something comes.
const SAYS: u64 = 4;

/// The last word of one that fetches, and the others.
const DONE: u8 = 1;
const GOES_ON: u8 = 0;

/// What a rank does in a fetch.
pub(super) struct Part<'a> {
    /// All ranks that fetch something.
    pub(super) takers: &'a [Rank],
    /// What this one lacks; nothing of one that only gives.
    pub(super) wanted: Vec<Wanted>,
    /// What it has for others.
    pub(super) shelf: Shelf,
    /// Where what it lacks is put. It stays when the fetch is broken off.
    pub(super) store: &'a mut Store,
}

/// Has all that ranks lack come to them. All ranks of the communicator call it, and it returns when all that
/// fetch something have said that they have it. Gives how many donors gave this rank something.
///
/// Errors: [`Error::PeerLost`] of a rank that fetches and falls silent, or where nobody else has what one does
/// not send; [`Error::Message`] where nobody is left whose chunks are right.
pub(super) fn fetch(comm: &Communicator, part: Part<'_>) -> Result<usize> {
    let Part { takers, wanted, shelf, store } = part;
    let shelf = Arc::new(Mutex::new(shelf));
    let serving = comm.start_service(TAGS, &shelf);
    let me = comm.rank();
    let gave = if wanted.is_empty() { 0 } else { take(comm, Fetching::new(wanted, store))? };
    let mut telling = Vec::new();
    if takers.contains(&me) {
        tell(comm, DONE, &mut telling);
    }
    for &taker in takers.iter().filter(|&&taker| taker != me) {
        while comm.recv(taker, PROGRESS)? != [DONE] {}
    }
    for told in telling {
        // Whoever is lost is noticed by what follows.
        let _lost: std::result::Result<(), CommError> = told.wait();
    }
    drop(serving);
    Ok(gave)
}

type Sending = Pending<std::result::Result<(), CommError>>;
type Arriving = Pending<std::result::Result<(Rank, Vec<u8>), CommError>>;

fn tell(comm: &Communicator, word: u8, telling: &mut Vec<Sending>) {
    let others = (0..comm.size() as u32).map(Rank).filter(|&rank| rank != comm.rank());
    telling.extend(others.map(|rank| comm.start_send(rank, PROGRESS, vec![word])));
}

/// Asks donors until all is there.
fn take(comm: &Communicator, mut fetching: Fetching<'_>) -> Result<usize> {
    let nobody = |_| Error::Message {
        message: "the state of the run".to_owned(),
        problem: "does not have the hashes that its members told",
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
            // One of each in turn.
            for &donor in &donors {
                if let Some(item) = fetching.next(donor, comm.now()) {
                    asking.push(patient.start_send(donor, TAGS.ask, item.to_bytes()));
                    asks = true;
                }
            }
        }
        asking.retain(|asking| !asking.is_ready());
        let mut next = arriving.take().unwrap_or_else(|| patient.start_recv_any(&donors, TAGS.answer));
        let patience = LOOK.min(deadline);
        let arrived = if comm.first(&mut [&mut next], Look::Within(patience)).is_some() {
            Some(next.wait()?)
        } else if comm.now().saturating_sub(came) >= deadline {
            drop(next);
            let latest = fetching.latest().or(donors.first().copied()).unwrap_or(comm.rank());
            // It names whom it has waited for.
            Some((latest, comm.clone().with_deadline(Nanos(1)).recv(latest, TAGS.answer)?))
        } else {
            arriving = Some(next);
            None
        };
        let now = comm.now();
        let Some((donor, bytes)) = arrived else { continue };
        fetching.arrived(donor, &bytes, now).map_err(nobody)?;
        came = now;
        if now.saturating_sub(told) >= Nanos(deadline.0 / SAYS) {
            tell(comm, GOES_ON, &mut telling);
            told = now;
        }
    }
    Ok(fetching.gave())
}
