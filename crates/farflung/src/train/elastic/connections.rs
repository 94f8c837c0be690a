//! Ranks of a run with changing members that are threads of one process, on simulated links or in-memory
//! transports.

use std::sync::Arc;

use farflung_base::{Nanos, PeerId};
use farflung_comm::Transport;
use farflung_parallel::membership::{Member, Settings, Start, State, View, ViewId as At};
use farflung_parallel::plan::Digest;

use super::arrivals::{Newcomer, Scripted};
use super::place::Place;
use crate::train::job::Job;
use crate::train::links::{WorkerConnection, view_communicator};
use crate::{Error, Result};

/// Returns the first view of a run, with these members.
///
/// Errors: none if the members are distinct.
pub(super) fn first_view(members: &[Newcomer], at: At, job: &Job) -> Result<View> {
    let members: Vec<Member> = members.iter().map(Member::from).collect();
    // All zeros: the first weights follow from the settings, or from the checkpoint in the founder's folder.
    let start = Start { weights: Digest::new([0; 32]), plan: job.plan.digest() };
    View::first(at, &members, start).map_err(|fault| Error::NotAView { reason: fault.to_string() })
}

/// Returns the times of the membership rules. None is longer than `deadline`, for which members wait for each
/// other.
pub(super) fn settings(deadline: Nanos) -> Settings {
    let usual = Settings::default();
    Settings {
        resend: usual.resend.min(deadline),
        slowest_resend: usual.slowest_resend.min(deadline),
        patience: usual.patience.min(deadline),
        grace: usual.grace.min(deadline),
    }
}

/// Creates the ranks at the endpoints of one network. The first `job.world` endpoints start the run. Endpoints
/// in `come` join at their times, by the transport's clock. All other endpoints are left out.
///
/// Errors: a topology that does not fit.
pub fn connections(
    job: &Job,
    ends: Vec<Arc<dyn Transport>>,
    come: &[(PeerId, Nanos)],
    simulated: bool,
) -> Result<Vec<WorkerConnection>> {
    let founders: Vec<Newcomer> = (0..job.world as u32).map(|n| Newcomer::new(PeerId(n), None)).collect();
    let view = first_view(&founders, At { incarnation: 1, epoch: 1 }, job)?;
    let rules = settings(job.config.deadline);
    let mut all: Vec<(PeerId, Nanos)> = founders.iter().map(|peer| (peer.peer, Nanos::ZERO)).collect();
    all.extend_from_slice(come);
    let link = (simulated && job.config.topology.is_none()).then_some(job.config.link);
    let mut connections = Vec::new();
    for end in ends {
        let me = Newcomer::new(end.me(), None);
        let founds = founders.contains(&me);
        if !founds && !come.iter().any(|(peer, _)| *peer == me.peer) {
            continue;
        }
        let arrivals = Arc::new(Scripted(all.clone()));
        let state = if founds {
            let state = State::first(me.id, view.clone(), rules);
            state.map_err(|fault| Error::NotAView { reason: fault.to_string() })?
        } else {
            State::newcomer(Member::from(&me), rules)
        };
        let mut place = Place::new(end, me, arrivals, (state, None), job.config.deadline)?;
        let comm = if founds {
            view_communicator(job, place.enter(view.clone())?, simulated)?
        } else {
            place.alone()?
        };
        connections.push(WorkerConnection { comm, simulated, link, place: Some(place) });
    }
    Ok(connections)
}
