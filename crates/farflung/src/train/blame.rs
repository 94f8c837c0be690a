//! Who a job ends by: the rank where it began, not the neighbour that ended for the same reason. It knows no
//! training.

use farflung_base::{PeerId, Rank};
use farflung_comm::{CommError, Communicator, DownReason, PeerEvent};

use super::hearing::{self, Heard, Hearing, Word};
use crate::Error;
use crate::events::causes;

/// Looks, 10 ms apart, for a word of a rank that left.
const LOOKS: u32 = 30;

/// What another rank says of a third one.
#[derive(Debug, thiserror::Error)]
#[error("rank {} says: {text}", by.0)]
struct Hearsay {
    by: Rank,
    text: String,
}

/// How this rank can tell that another is lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Evidence {
    /// Its connection broke.
    Broken,
    /// It did not answer in time.
    Silent,
    /// It left, or gave up, or this rank was told to end: the reason is elsewhere.
    Secondary,
}

pub(super) fn evidence(error: &Error) -> Evidence {
    let Error::PeerLost { source, .. } = error else { return Evidence::Secondary };
    let mut error = source.downcast_ref::<CommError>();
    while let Some(CommError::Poisoned(first)) = error {
        error = Some(first);
    }
    match error {
        Some(CommError::PeerDown { reason: DownReason::Left, .. }) => Evidence::Secondary,
        Some(CommError::PeerDown { .. }) => Evidence::Broken,
        Some(CommError::Deadline { .. }) => Evidence::Silent,
        _ => Evidence::Secondary,
    }
}

/// The failure of this rank with the rank that it began at, and tells the others. A failure by a stop stays.
///
/// Whoever drops the step because it heard of a failure ends the collectives of the others too, as one that is
/// stopped does: which of the two it was, its word or that of the failed rank says.
pub(super) fn settle(comm: &Communicator, hearing: &Hearing, error: Error) -> Error {
    if matches!(error, Error::Stopped(_)) {
        return error;
    }
    if !error.is_interruption() {
        hearing::tell(comm, &Word::Failed { code: error.exit_code(), text: causes(&error) });
        return error;
    }
    let evidence = evidence(&error);
    // Where the reason is elsewhere, a word of it is on its way. A broken link may not be the only one.
    let heard = hearing.listen(if evidence == Evidence::Silent { 0 } else { LOOKS });
    if evidence == Evidence::Secondary
        && let Some(Heard { from, word }) = heard
    {
        return match word.clone() {
            Word::Stopped => error,
            Word::Failed { code, text } => {
                Error::OnRank { rank: from.index(), message: text, code: code.max(1) }
            }
            // The others cannot reach it, though it can hear them.
            Word::Lost { culprit, text } if culprit == comm.rank() => {
                Error::CutOff { rank: culprit, source: Box::new(Hearsay { by: *from, text }) }
            }
            Word::Lost { culprit, text } => {
                Error::PeerLost { peer: PeerId(culprit.0), source: Box::new(Hearsay { by: *from, text }) }
            }
        };
    }
    if error.cancelled_by().is_some() {
        return error;
    }
    match error {
        Error::PeerLost { source, .. } if is_cut_off(comm, evidence) => {
            Error::CutOff { rank: comm.rank(), source }
        }
        error => {
            if let Error::PeerLost { peer, .. } = &error {
                hearing::tell(comm, &Word::Lost { culprit: Rank(peer.0), text: causes(&error) });
            }
            error
        }
    }
}

/// Whether this rank has lost not one other, but all. Of two nobody can tell.
fn is_cut_off(comm: &Communicator, evidence: Evidence) -> bool {
    let (me, size) = (comm.transport().me(), comm.transport().size());
    let mut others = (0..size as u32).map(PeerId).filter(|&peer| peer != me);
    if size < 3 {
        return false;
    }
    match evidence {
        Evidence::Secondary => false,
        Evidence::Broken => {
            let events = comm.transport().events();
            let lost = |peer: PeerId| {
                let broken = |event: &PeerEvent| match event {
                    PeerEvent::Down(down, reason) => *down == peer && *reason != DownReason::Left,
                    _ => false,
                };
                events.iter().any(broken)
            };
            others.all(lost)
        }
        // Whoever waits says so before its deadline: here nobody was heard, and somebody waits for this rank.
        Evidence::Silent => others.all(|peer| comm.transport().waits_of(peer).is_none()),
    }
}
