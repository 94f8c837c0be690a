//! Newcomers for whose state all members would wait too long: what they and the users are told.

use std::collections::BTreeSet;
use std::fmt;

use farflung_base::{Bytes, Nanos, PeerId};
use farflung_parallel::membership::{MemberId, View};
use farflung_parallel::plan::Digest;
use serde::{Deserialize, Serialize};

use super::arrivals::Newcomer;
use super::fetch::Sending;

/// The time for which the members would wait for a newcomer, which is too long.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct TooLong {
    /// Bytes of the newcomer's state.
    pub(super) state: u64,
    /// The time that it would take, or that it has taken so far.
    pub(super) takes: Nanos,
    pub(super) limit: Nanos,
}

impl fmt::Display for TooLong {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { state, takes, limit } = *self;
        write!(
            f,
            "all members would wait about {takes} for its {} of state, longer than --join-wait {limit} of the \
             host",
            Bytes(state)
        )
    }
}

/// A newcomer that was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Refusal {
    pub(super) peer: PeerId,
    pub(super) why: TooLong,
}

/// The newcomers that were refused.
#[derive(Debug, Default)]
pub(super) struct Refused {
    of: BTreeSet<MemberId>,
    untold: Vec<Refusal>,
    telling: Vec<Sending>,
}

impl Refused {
    /// Returns whether a newcomer was refused.
    pub(super) fn has(&self, id: &MemberId) -> bool {
        self.of.contains(id)
    }

    /// Notes a refusal, of which the newcomer is being told.
    pub(super) fn note(&mut self, id: MemberId, refusal: Refusal, telling: Vec<Sending>) {
        if self.of.insert(id) {
            self.untold.push(refusal);
        }
        self.telling = telling;
    }

    /// Returns the refusals of which the user has not been told.
    pub(super) fn take(&mut self) -> Vec<Refusal> {
        std::mem::take(&mut self.untold)
    }

    /// Forgets newcomers that are not connected any more.
    pub(super) fn keep(&mut self, connected: &[Newcomer]) {
        self.of.retain(|id| connected.iter().any(|peer| peer.id == *id));
    }
}

/// Returns whether a member has joined with this view. Those of a run's first view have not.
pub(super) fn is_fresh(view: &View, id: &MemberId) -> bool {
    let has_parent = view.parent != Digest::new([0; 32]);
    has_parent && view.member(id).is_some_and(|member| member.joined == view.epoch)
}
