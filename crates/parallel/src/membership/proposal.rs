//! State of a Paxos proposer.

use std::collections::{BTreeMap, BTreeSet};

use super::retry::Retry;
use super::{Accepted, Ballot, MemberId, View};

/// An unfinished proposal of the next view.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Proposal {
    pub(super) ballot: Ballot,
    /// Whether a training step was committed when the proposal began or later: if so, leaves and admissions may
    /// be proposed.
    pub(super) at_commit: bool,
    pub(super) phase: Phase,
    pub(super) retry: Retry,
}

/// Phase of a proposal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Phase {
    /// A higher ballot was promised elsewhere. A new ballot begins when the timer is due.
    Waiting,
    /// Requesting promises.
    Preparing {
        /// Members that have promised, with their newest votes.
        promises: BTreeMap<MemberId, Option<Accepted>>,
    },
    /// Requesting votes.
    Accepting {
        view: View,
        /// Whether the view is this proposer's own, rather than one that it found among the promises.
        own: bool,
        /// Members that have voted.
        votes: BTreeSet<MemberId>,
    },
}

impl Phase {
    /// Returns whether a member has answered the request of this phase.
    pub(super) fn has_answered(&self, id: &MemberId) -> bool {
        match self {
            Self::Waiting => false,
            Self::Preparing { promises } => promises.contains_key(id),
            Self::Accepting { votes, .. } => votes.contains(id),
        }
    }
}

/// Returns the view of the newest vote among the promises. By the rules of Paxos, it must be proposed.
pub(super) fn newest(promises: &BTreeMap<MemberId, Option<Accepted>>) -> Option<&View> {
    let accepted = promises.values().flatten();
    accepted.max_by_key(|accepted| accepted.ballot).map(|accepted| &accepted.view)
}
