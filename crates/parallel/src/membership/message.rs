//! Messages between members about views.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use super::{Accepted, Ballot, Member, MemberId, View, ViewId};

/// A message about views. `at` is the epoch and incarnation of the sender's view, which a ballot may replace.
///
/// No list in it is longer than [`View::MOST_MEMBERS`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Message {
    /// Tells which view the sender is in: as a greeting, as acknowledgement of [`Message::Decided`], or as a
    /// request for a newer view.
    ///
    /// A caller that receives any other frame with a wrong epoch can pass it to [`step`](super::step) as this
    /// message.
    Here {
        /// Epoch and incarnation of the sender's view; zeros if a newcomer asks whether it is in a view.
        at: ViewId,
    },
    /// Asks for a promise not to vote in a lower ballot. Paxos phase 1a.
    Prepare {
        /// Epoch and incarnation of the view to be replaced.
        at: ViewId,
        /// The proposer's ballot.
        ballot: Ballot,
    },
    /// Promises what [`Message::Prepare`] asked for, and reports the sender's newest vote. Paxos phase 1b.
    Promised {
        /// Epoch and incarnation of the view to be replaced.
        at: ViewId,
        /// The ballot of the request.
        ballot: Ballot,
        /// The sender's newest vote.
        accepted: Option<Accepted>,
    },
    /// Rejects a request because the sender has promised a higher ballot.
    Refused {
        /// Epoch and incarnation of the view to be replaced.
        at: ViewId,
        /// The rejected ballot.
        ballot: Ballot,
        /// The promised ballot.
        promised: Ballot,
    },
    /// Asks for a vote for a view. Paxos phase 2a.
    Accept {
        /// Epoch and incarnation of the view to be replaced.
        at: ViewId,
        /// The proposer's ballot.
        ballot: Ballot,
        /// The proposed view.
        view: View,
    },
    /// Votes for the view of [`Message::Accept`]. Paxos phase 2b.
    Accepted {
        /// Epoch and incarnation of the view to be replaced.
        at: ViewId,
        /// The ballot of the vote.
        ballot: Ballot,
    },
    /// Announces a decided view: a majority has voted for it, or it is the first of a run or incarnation.
    Decided {
        /// The decided view.
        view: View,
    },
    /// Answers a sender that is in an older view, or in a newer incarnation although the older one still runs.
    Stale {
        /// The answering member's view.
        view: View,
    },
    /// Lists the members that the sender considers lost. An empty set withdraws an earlier list.
    Suspects {
        /// Epoch and incarnation of the sender's view.
        at: ViewId,
        /// Number of lists that the sender has sent in this view, so that a list that was overtaken by a later
        /// one has no effect. Begins again if the sender restarts.
        number: u64,
        /// Ids of these members.
        silent: BTreeSet<MemberId>,
    },
    /// Asks for a view without the sender, which is about to leave.
    Leaving {
        /// Epoch and incarnation of the sender's view.
        at: ViewId,
    },
    /// Tells the coordinator about a newcomer that is ready.
    Newcomer {
        /// Epoch and incarnation of the sender's view.
        at: ViewId,
        /// The newcomer.
        member: Member,
    },
    /// Asks for a view of the same members: a training step failed although the sender hears all members.
    Repeat {
        /// Epoch and incarnation of the sender's view.
        at: ViewId,
    },
    /// Tells a member of the sender's view that an older incarnation of the run may still be in progress.
    Older {
        /// Epoch and incarnation of the sender's view.
        at: ViewId,
        /// The newest view of the older incarnation that the sender knows of.
        view: View,
    },
}

impl Message {
    /// Returns the maximum number of bytes of a message about views of `members` members, encoded by
    /// `postcard`: at most 47 per member and 288 for the rest.
    #[must_use]
    pub const fn most_bytes(members: usize) -> usize {
        288 + 47 * members
    }

    /// Returns the epoch and incarnation of the sender's view. `None` for [`Message::Decided`] and
    /// [`Message::Stale`], which contain a view.
    #[must_use]
    pub const fn at(&self) -> Option<ViewId> {
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
            | Self::Repeat { at }
            | Self::Older { at, .. } => Some(*at),
            Self::Decided { .. } | Self::Stale { .. } => None,
        }
    }
}
