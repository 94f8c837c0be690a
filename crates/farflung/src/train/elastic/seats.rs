//! Seats of a run whose members come and leave, where they are threads of one process: simulated links, and memory.

use std::sync::Arc;

use farflung_base::{Nanos, PeerId};
use farflung_comm::Transport;
use farflung_parallel::membership::{Member, View};

use super::arrivals::{Newcomer, Scripted};
use super::place::Place;
use crate::Result;
use crate::train::job::Job;
use crate::train::links::{Seat, seat};

/// The number of a run's first view.
const FIRST: u64 = 1;

/// The first view of a run, of these members.
pub(super) fn first_view(members: &[Newcomer]) -> View {
    let member = |peer: &Newcomer| Member { id: peer.id, slot: peer.peer.0, joined: FIRST };
    View { epoch: FIRST, members: members.iter().map(member).collect() }
}

/// Seats at the endpoints of one network: the first of them, as many as the job has ranks, found the run, and the others
/// come in when their time has come, by the transport's clock. An endpoint without a time never comes, and has no seat.
///
/// Errors: a topology that does not fit.
pub fn seats(
    job: &Job,
    ends: Vec<Arc<dyn Transport>>,
    come: &[(PeerId, Nanos)],
    simulated: bool,
) -> Result<Vec<Seat>> {
    let founders: Vec<Newcomer> = (0..job.world as u32).map(|n| Newcomer::new(PeerId(n), None)).collect();
    let view = first_view(&founders);
    let mut all: Vec<(PeerId, Nanos)> = founders.iter().map(|peer| (peer.peer, Nanos::ZERO)).collect();
    all.extend_from_slice(come);
    let link = (simulated && job.config.topology.is_none()).then_some(job.config.link);
    let mut seats = Vec::new();
    for end in ends {
        let me = Newcomer::new(end.me(), None);
        let founds = founders.contains(&me);
        if !founds && !come.iter().any(|(peer, _)| *peer == me.peer) {
            continue;
        }
        let arrivals = Arc::new(Scripted(all.clone()));
        let first = (founds.then(|| view.clone()), None);
        let mut place = Place::new(end, me, arrivals, first, job.config.deadline);
        let comm = if founds { seat(job, place.enter(view.clone())?, simulated)? } else { place.alone()? };
        seats.push(Seat { comm, simulated, link, place: Some(place) });
    }
    Ok(seats)
}
