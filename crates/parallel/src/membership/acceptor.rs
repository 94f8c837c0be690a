//! Votes: what a member has promised and accepted about the view after its own.

use serde::{Deserialize, Serialize};

use super::{MemberId, View};

/// The number of one attempt to decide a view. Ballots of different proposers are never equal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Ballot {
    /// Higher than any number that the proposer has seen in the epoch.
    pub number: u64,
    /// Who proposes.
    pub proposer: MemberId,
}

/// A view that a member has voted for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Accepted {
    /// In which ballot.
    pub ballot: Ballot,
    /// What it has voted for.
    pub view: View,
}

/// What a member must have on disk before a vote leaves it, and reads again when it restarts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Kept {
    /// The view that it is in.
    pub view: View,
    /// The highest ballot that it has promised: it votes in no lower one.
    pub promised: Option<Ballot>,
    /// Its newest vote.
    pub accepted: Option<Accepted>,
}

/// What becomes of a question or a proposal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Vote {
    /// Yes; `changed` if there is something new to keep.
    Yes {
        /// Whether [`Kept`] differs from before.
        changed: bool,
    },
    /// A higher ballot has been promised.
    No {
        /// That ballot.
        promised: Ballot,
    },
}

impl Kept {
    /// A member that has just entered a view has promised nothing.
    #[must_use]
    pub const fn new(view: View) -> Self {
        Self { view, promised: None, accepted: None }
    }

    /// Promises to vote in no lower ballot.
    pub(super) fn promise(&mut self, ballot: Ballot) -> Vote {
        match self.promised {
            Some(promised) if promised > ballot => Vote::No { promised },
            before => {
                self.promised = Some(ballot);
                Vote::Yes { changed: before != Some(ballot) }
            }
        }
    }

    /// Votes for a view, which must follow [`Kept::view`].
    pub(super) fn accept(&mut self, ballot: Ballot, view: &View) -> Vote {
        match (self.promised, &self.accepted) {
            (Some(promised), _) if promised > ballot => Vote::No { promised },
            // A second proposal under one ballot: the first stands.
            (_, Some(before)) if before.ballot == ballot => Vote::Yes { changed: false },
            _ => {
                self.promised = Some(ballot);
                self.accepted = Some(Accepted { ballot, view: view.clone() });
                Vote::Yes { changed: true }
            }
        }
    }
}
