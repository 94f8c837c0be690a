//! Determines which rank caused the end of a job: the one that failed first, rather than a neighbour that
//! failed because of it. It does not depend on training.

use farflung_base::{PeerId, Rank};
use farflung_comm::{CommError, Communicator, DownReason, PeerEvent};

use super::exit_listener::{self, ExitListener, ExitNotice, ReceivedNotice};
use crate::Error;
use crate::events::causes;

/// Number of checks, 10 ms apart, for a message from a rank that has left.
const POLLS: u32 = 30;

/// A failure that another rank reports.
#[derive(Debug, thiserror::Error)]
#[error("rank {} reports: {text}", by.0)]
struct ReportedFailure {
    by: Rank,
    text: String,
}

/// The way in which this rank detected the loss of another one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Evidence {
    /// The connection broke.
    Broken,
    /// The other rank did not answer in time.
    Silent,
    /// The other rank left or gave up, or this rank was told to end: the cause is elsewhere.
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

/// Returns this rank's failure with the rank that caused it, and notifies the other ranks. A failure by a stop
/// is returned unchanged.
///
/// A rank that drops its step because another one failed cancels the collectives of others, as a stopped rank
/// does. The [`ExitNotice`] that arrives tells which of the two cases it is.
pub(super) fn attribute_failure(comm: &Communicator, hearing: &ExitListener, error: Error) -> Error {
    if matches!(error, Error::Stopped(_)) {
        return error;
    }
    if !error.is_interruption() {
        exit_listener::tell(comm, &ExitNotice::Failed { code: error.exit_code(), text: causes(&error) });
        return error;
    }
    let evidence = evidence(&error);
    // If the cause is elsewhere, a message about it will arrive soon. A broken link may also be the consequence
    // of a stop: then the caller finds the message about it in `hearing`.
    let heard = hearing.listen(if evidence == Evidence::Silent { 0 } else { POLLS });
    if evidence == Evidence::Secondary
        && let Some(ReceivedNotice { from, word }) = heard
    {
        return match word.clone() {
            ExitNotice::Stopped => error,
            ExitNotice::Failed { code, text } => {
                Error::OnRank { rank: from.index(), message: text, code: code.max(1) }
            }
            // The others cannot reach this rank, although it receives their messages.
            ExitNotice::Lost { culprit, text } if culprit == comm.rank() => {
                Error::CutOff { rank: culprit, source: Box::new(ReportedFailure { by: *from, text }) }
            }
            ExitNotice::Lost { culprit, text } => Error::PeerLost {
                peer: PeerId(culprit.0),
                source: Box::new(ReportedFailure { by: *from, text }),
            },
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
                exit_listener::tell(comm, &ExitNotice::Lost { culprit: Rank(peer.0), text: causes(&error) });
            }
            error
        }
    }
}

/// Returns whether this rank has lost all others rather than one of them. With two ranks the cases cannot be
/// distinguished.
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
        // A rank that waits for this one announces its wait before its deadline. No such announcement arrived
        // from any rank, so this rank has lost all others.
        Evidence::Silent => others.all(|peer| comm.transport().awaited_by(peer).is_none()),
    }
}
