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
    let lost = if let Error::PeerLost { peer, .. } = &error { Some(Rank(peer.0)) } else { None };
    if let Some(ReceivedNotice { from, word }) =
        heard.filter(|notice| names_cause(notice, evidence, (lost, comm.rank())))
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

/// Returns whether a notice names the cause of this rank's error, which may be a broken connection to the rank
/// `lost`; `me` is this rank.
///
/// A rank that failed by itself is the cause of all that follows, also of connections that broke. Of a rank
/// that lost another one first, and then ended so suddenly that its own connection broke, the notice counts as
/// well. Other reports of losses do not: this rank has seen for itself which connection broke.
fn names_cause(notice: &ReceivedNotice, evidence: Evidence, (lost, me): (Option<Rank>, Rank)) -> bool {
    match (&notice.word, evidence) {
        (_, Evidence::Secondary) | (ExitNotice::Failed { .. }, Evidence::Broken | Evidence::Silent) => true,
        (ExitNotice::Lost { culprit, .. }, Evidence::Broken) => {
            lost == Some(notice.from) && ![me, notice.from].contains(culprit)
        }
        (ExitNotice::Lost { .. }, Evidence::Silent) | (ExitNotice::Stopped, _) => false,
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

#[cfg(test)]
mod tests {
    use farflung_base::Nanos;
    use farflung_comm::memory;

    use super::Evidence::{Broken, Secondary, Silent};
    use super::*;
    use crate::Stop;

    /// The error of a rank that has found another one lost.
    fn lost(peer: u32, evidence: Evidence) -> Error {
        let peer = PeerId(peer);
        let source = match evidence {
            Broken => CommError::PeerDown { op: "recv", peer, reason: DownReason::Ended },
            Silent => CommError::Deadline { op: "recv", peer, after: Nanos(1), cause: None },
            Secondary => CommError::PeerDown { op: "recv", peer, reason: DownReason::Left },
        };
        assert_eq!(super::evidence(&Error::PeerLost { peer, source: Box::new(source.clone()) }), evidence);
        Error::PeerLost { peer, source: Box::new(source) }
    }

    /// Returns the rank that rank 0 of four names, and its exit code, if it has found rank 1 lost in this way,
    /// after a notice of another rank.
    fn named(evidence: Evidence, from: usize, word: &ExitNotice) -> (u32, u8) {
        let ranks: Vec<_> = memory::cluster(4).into_iter().map(|rank| Communicator::new(rank)).collect();
        let hearing = ExitListener::new(&ranks[0], &Stop::manual());
        exit_listener::tell(&ranks[from], word);
        hearing.listen(1000).unwrap();
        let error = attribute_failure(&ranks[0], &hearing, lost(1, evidence));
        let code = error.exit_code();
        match error {
            Error::PeerLost { peer, .. } => (peer.0, code),
            Error::OnRank { rank, .. } => (rank as u32, code),
            Error::CutOff { rank, .. } => (rank.0, code),
            other => panic!("{other}"),
        }
    }

    #[test]
    fn a_notice_counts_also_where_the_connection_of_its_sender_broke() {
        let failed = ExitNotice::Failed { code: 3, text: "no room".to_owned() };
        let lost = |culprit| ExitNotice::Lost { culprit: Rank(culprit), text: "no answer".to_owned() };
        for (evidence, from, word, want) in [
            // Rank 1 ended after its own failure, or after that of rank 2.
            (Broken, 1, &failed, (1, 3)),
            (Broken, 2, &failed, (2, 3)),
            (Silent, 2, &failed, (2, 3)),
            (Secondary, 2, &failed, (2, 3)),
            // Rank 1 had lost rank 3 before.
            (Broken, 1, &lost(3), (3, 75)),
            (Secondary, 1, &lost(3), (3, 75)),
            // This rank has seen that rank 1 was lost.
            (Broken, 2, &lost(1), (1, 75)),
            (Broken, 2, &lost(3), (1, 75)),
            // Each of the two has lost the other.
            (Broken, 1, &lost(0), (1, 75)),
            (Broken, 1, &ExitNotice::Stopped, (1, 75)),
        ] {
            assert_eq!(named(evidence, from, word), want, "{evidence:?} from {from}: {word:?}");
        }
    }
}
