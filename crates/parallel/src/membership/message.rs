//! What members tell each other about views.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use super::{Accepted, Ballot, Member, MemberId, Place, View};

/// A message about views. `at` is the sender's view, which a ballot is about to replace.
///
/// Every list in it is at most as long as a view ([`View::MOST_MEMBERS`]).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Message {
    /// The sender's view. It greets, it acknowledges [`Message::Decided`], and it asks for a newer view.
    ///
    /// A caller that receives any other frame of a wrong epoch can pass it on as this message.
    Here {
        /// The sender's view; zeros of a newcomer that asks whether it is in a view.
        at: Place,
    },
    /// Asks for a promise to vote in no lower ballot.
    Prepare {
        /// The view to be replaced.
        at: Place,
        /// The proposer's ballot.
        ballot: Ballot,
    },
    /// The promise, with the sender's newest vote.
    Promised {
        /// The view to be replaced.
        at: Place,
        /// The ballot of the question.
        ballot: Ballot,
        /// What the sender has voted for before.
        accepted: Option<Accepted>,
    },
    /// The sender has promised a higher ballot.
    Refused {
        /// The view to be replaced.
        at: Place,
        /// The ballot that is refused.
        ballot: Ballot,
        /// The ballot that was promised.
        promised: Ballot,
    },
    /// Asks to vote for a view.
    Accept {
        /// The view to be replaced.
        at: Place,
        /// The proposer's ballot.
        ballot: Ballot,
        /// The next view.
        view: View,
    },
    /// The vote.
    Accepted {
        /// The view to be replaced.
        at: Place,
        /// The ballot that the sender has voted in.
        ballot: Ballot,
    },
    /// More than half have voted for this view.
    Decided {
        /// The new view.
        view: View,
    },
    /// The answer to a sender that is in an older view, or that starts an old run again: the answering
    /// member's view.
    Stale {
        /// The answering member's view.
        view: View,
    },
    /// Members that the sender hears nothing from; an empty set takes back what it said before.
    Suspects {
        /// The sender's view.
        at: Place,
        /// Whom it has given up.
        silent: BTreeSet<MemberId>,
    },
    /// The sender is about to leave, and asks for a view without it.
    Leaving {
        /// The sender's view.
        at: Place,
    },
    /// A newcomer that is ready, passed on to the coordinator.
    Newcomer {
        /// The sender's view.
        at: Place,
        /// The newcomer.
        member: Member,
    },
    /// A step has failed although the sender hears all members: it asks for a view of the same.
    Repeat {
        /// The sender's view.
        at: Place,
    },
}

impl Message {
    /// The most bytes of a message about views of so many members, as `postcard` writes it: at most 47 a
    /// member, and what is before them.
    #[must_use]
    pub const fn most_bytes(members: usize) -> usize {
        288 + 47 * members
    }

    /// The sender's view; `None` for [`Message::Decided`] and [`Message::Stale`], which carry theirs.
    #[must_use]
    pub const fn at(&self) -> Option<Place> {
        match self {
            Self::Here { at }
            | Self::Prepare { at, .. }
            | Self::Promised { at, .. }
            | Self::Refused { at, .. }
            | Self::Accept { at, .. }
            | Self::Accepted { at, .. }
            | Self::Suspects { at, .. }
            | Self::Leaving { at }
            | Self::Newcomer { at, .. }
            | Self::Repeat { at } => Some(*at),
            Self::Decided { .. } | Self::Stale { .. } => None,
        }
    }
}
