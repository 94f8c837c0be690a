//! What happens to a member, and what it then does.

use farflung_base::Nanos;
use serde::{Deserialize, Serialize};

use super::{Kept, Member, MemberId, Message, Place, Start, View, ViewFault};

/// What happens to a member. A recording of a run is a list of these with their times.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[expect(clippy::large_enum_variant, reason = "most events are messages")]
#[non_exhaustive]
pub enum Event {
    /// A message has come from a peer whose id is proven.
    Message {
        /// The sender.
        from: MemberId,
        /// What it says.
        message: Message,
    },
    /// A member or newcomer is given up: its deadline has passed, or its connection is broken.
    ///
    /// A newcomer is only taken from those that are ready: if a view admits it all the same, say this again.
    Silent(MemberId),
    /// A member that was given up works again. A message alone does not say that.
    Heard(MemberId),
    /// A member asks to leave: this one, or a peer that said so.
    Leave(MemberId),
    /// A newcomer has the state and says that it is ready.
    Ready(Member),
    /// A step was committed: leaves and admissions may be proposed now.
    Admit,
    /// A step has failed although this member hears all others: it asks for a view of the same members, under
    /// which the step is done again. There is one once all of them ask for it.
    Repeat,
    /// What the views that this member proposes from now on say about the run.
    Starts(Start),
    /// The time of the last [`Action::Wake`] has come.
    Tick,
}

/// What a member does, in the order given.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Action {
    /// Send a message. It may be lost.
    Send {
        /// To whom.
        to: MemberId,
        /// What.
        message: Message,
    },
    /// Write this durably, in the place of what was kept before, before any action after it.
    Keep(Kept),
    /// The run goes on with this view.
    Install(View),
    /// This member may not go on. Its state ignores every event from now on.
    Stop(Reason),
    /// Send [`Event::Tick`] at this time. A later action of this kind replaces it.
    Wake {
        /// When.
        at: Nanos,
    },
    /// A peer sent a view that is not valid. The message was ignored.
    Fault {
        /// The sender.
        peer: MemberId,
        /// What is wrong.
        fault: ViewFault,
    },
}

/// Why a member may not go on.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Reason {
    /// Too few members are heard to decide anything.
    #[error(
        "no majority: {heard} of {members} members are heard from, {}",
        if *tie_breaker { "with the tie-breaker" } else { "without the tie-breaker" }
    )]
    NoMajority {
        /// Members that are heard, this one included.
        heard: usize,
        /// Members of the view.
        members: usize,
        /// Whether the tie-breaker is among those that are heard.
        tie_breaker: bool,
    },
    /// The others go on without this member. It may join as a newcomer.
    #[error("removed from the run by the view of {by}")]
    Removed {
        /// The view that it is not in.
        by: Place,
    },
    /// It asked to leave, and has left.
    #[error("left the run")]
    Left,
    /// It has no majority, and the run was started again from a checkpoint. It may join that as a newcomer.
    #[error("the run was started again from a checkpoint as incarnation {incarnation}")]
    Superseded {
        /// The new incarnation.
        incarnation: u64,
    },
    /// It started the run again from a checkpoint, but a majority of the older incarnation still trains.
    #[error("the run still goes on in {older}: join it instead of starting it again")]
    StillRuns {
        /// The newest view of the older incarnation that is known.
        older: Place,
    },
}
