//! A proposal under way.

use std::collections::{BTreeMap, BTreeSet};

use super::retry::Retry;
use super::{Accepted, Ballot, MemberId, View};

/// A proposal under way.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Proposal {
    pub(super) ballot: Ballot,
    /// Whether a commit has passed since there was something to propose: leaves and admissions may be proposed.
    pub(super) at_commit: bool,
    pub(super) phase: Phase,
    pub(super) retry: Retry,
}

/// How far it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Phase {
    /// A higher ballot was in the way: a new one begins when the timer is due.
    Waiting,
    /// Asking for promises.
    Preparing {
        /// Those that have promised, with their newest votes.
        promises: BTreeMap<MemberId, Option<Accepted>>,
    },
    /// Asking for votes.
    Accepting {
        view: View,
        /// Whether the view is this proposer's own, and not one that it found accepted.
        own: bool,
        /// Those that have voted.
        votes: BTreeSet<MemberId>,
    },
}

impl Phase {
    /// Whether a member has answered.
    pub(super) fn has_answered(&self, id: &MemberId) -> bool {
        match self {
            Self::Waiting => false,
            Self::Preparing { promises } => promises.contains_key(id),
            Self::Accepting { votes, .. } => votes.contains(id),
        }
    }
}

/// The newest vote among promises: what must be proposed.
pub(super) fn newest(promises: &BTreeMap<MemberId, Option<Accepted>>) -> Option<&View> {
    let accepted = promises.values().flatten();
    accepted.max_by_key(|accepted| accepted.ballot).map(|accepted| &accepted.view)
}
