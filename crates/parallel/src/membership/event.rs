//! Events that a member receives, and actions that it returns.

use farflung_base::Nanos;
use serde::{Deserialize, Serialize};

use super::{DurableState, Member, MemberId, Message, Start, View, ViewFault, ViewId};

/// An input of [`step`](super::step). A member's first state and its events with their times determine all its
/// later states and actions.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[expect(clippy::large_enum_variant, reason = "most events are messages")]
#[non_exhaustive]
pub enum Event {
    /// A message arrived from a peer whose id has been authenticated.
    Message {
        /// Id of the sender.
        from: MemberId,
        /// The message.
        message: Message,
    },
    /// The caller considers a member or newcomer lost: its deadline has passed, or its connection is broken.
    ///
    /// A newcomer is only removed from the list of ready newcomers. If a later view admits it anyway, send this
    /// event again.
    Silent(MemberId),
    /// A member that was considered lost works again. A message from the member does not imply this event.
    Heard(MemberId),
    /// A member asks to leave: this member, or a peer that said so.
    Leave(MemberId),
    /// A newcomer has received the state of the run and is ready to be admitted.
    Ready(Member),
    /// A training step was committed: leaves and admissions may be proposed now.
    Admit,
    /// A training step failed although this member hears all others. The member asks for a view of the same
    /// members, under which the step is repeated. Such a view is proposed once all members have asked for it.
    Repeat,
    /// Sets the weights and plan that views proposed by this member name from now on.
    Starts(Start),
    /// The time of the last [`Action::Wake`] has been reached.
    Tick,
}

/// An output of [`step`](super::step). Actions must be executed in the order given.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Action {
    /// Send a message. It may be lost.
    Send {
        /// Id of the receiver.
        to: MemberId,
        /// The message.
        message: Message,
    },
    /// Write this durably, replacing the state kept before. Later actions may be executed only after the write.
    Persist(DurableState),
    /// Continue the run with this view.
    Install(View),
    /// This member must stop. Its state ignores all later events.
    Stop(Reason),
    /// Send [`Event::Tick`] at this time. A later action of this kind replaces it.
    Wake {
        /// Time of the tick.
        at: Nanos,
    },
    /// A peer sent an invalid view. The message was ignored.
    Fault {
        /// Id of the sender.
        peer: MemberId,
        /// The rule that the view breaks.
        fault: ViewFault,
    },
}

/// Reason why a member must stop.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Reason {
    /// This member hears from too few members to decide a view.
    #[error(
        "no majority: this member hears {heard} of {members} members, itself included, {}",
        if *tie_breaker { "with the tie-breaker" } else { "without the tie-breaker" }
    )]
    NoMajority {
        /// Number of members from which this member hears, itself included.
        heard: usize,
        /// Number of members of the view.
        members: usize,
        /// Whether this member hears from the tie-breaker.
        tie_breaker: bool,
    },
    /// The other members continue without this member. It may join again as a newcomer.
    #[error("removed from the run by the view of {by}")]
    Removed {
        /// Epoch and incarnation of the view that does not contain this member.
        by: ViewId,
    },
    /// The member asked to leave and has left.
    #[error("left the run")]
    Left,
    /// This member hears from too few members to decide a view, and the run was restarted from a checkpoint. It
    /// may join the restarted run as a newcomer.
    #[error("the run was started again from a checkpoint as incarnation {incarnation}")]
    Superseded {
        /// Number of the new incarnation.
        incarnation: u64,
    },
    /// The member restarted the run from a checkpoint, but a majority of the older incarnation is still
    /// training.
    #[error("the run is still in progress in {older}: join it instead of starting it again")]
    StillRuns {
        /// Epoch and incarnation of the newest known view of the older incarnation.
        older: ViewId,
    },
}
