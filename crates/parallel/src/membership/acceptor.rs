//! Paxos acceptor: the promises and votes of a member about the view after its own.

use serde::{Deserialize, Serialize};

use super::{MemberId, View};

/// Identifies one attempt to decide a view. Ballots of different proposers are never equal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Ballot {
    /// Higher than any ballot number that the proposer has seen in the epoch.
    pub number: u64,
    /// Id of the proposer.
    pub proposer: MemberId,
}

/// A view that a member has voted for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Accepted {
    /// The ballot of the vote.
    pub ballot: Ballot,
    /// The view that the member voted for.
    pub view: View,
}

/// State that a member must write to disk before it sends a promise or a vote, and that it reads again when it
/// restarts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DurableState {
    /// The member's view.
    pub view: View,
    /// The highest ballot that the member has promised. It does not vote in a lower one.
    pub promised: Option<Ballot>,
    /// The member's newest vote.
    pub accepted: Option<Accepted>,
}

/// Answer of an acceptor to a request for a promise or a vote.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Vote {
    /// The promise or vote is given.
    Yes {
        /// Whether [`DurableState`] changed, so that it must be written.
        changed: bool,
    },
    /// The promise or vote is not given, because a higher ballot was promised.
    No {
        /// The higher ballot.
        promised: Ballot,
    },
}

impl DurableState {
    /// Creates the state of a member that has just entered a view: no promise, no vote.
    #[must_use]
    pub const fn new(view: View) -> Self {
        Self { view, promised: None, accepted: None }
    }

    /// Promises not to vote in a lower ballot.
    pub(super) fn promise(&mut self, ballot: Ballot) -> Vote {
        match self.promised {
            Some(promised) if promised > ballot => Vote::No { promised },
            before => {
                self.promised = Some(ballot);
                Vote::Yes { changed: before != Some(ballot) }
            }
        }
    }

    /// Votes for a view, which must follow [`DurableState::view`].
    pub(super) fn accept(&mut self, ballot: Ballot, view: &View) -> Vote {
        match (self.promised, &self.accepted) {
            (Some(promised), _) if promised > ballot => Vote::No { promised },
            // This is a second request in the same ballot. The first vote remains valid.
            (_, Some(before)) if before.ballot == ballot => Vote::Yes { changed: false },
            _ => {
                self.promised = Some(ballot);
                self.accepted = Some(Accepted { ballot, view: view.clone() });
                Vote::Yes { changed: true }
            }
        }
    }
}
