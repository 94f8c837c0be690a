//! History of all views of a simulation, and the guarantees that they violate.

use std::collections::BTreeMap;

use super::super::{MemberId, View, ViewFault, ViewId};

/// A violated guarantee.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Breach {
    /// Two different views of one epoch.
    #[error("two different views of {at}, with members {first:?} and {second:?}")]
    Fork {
        /// Epoch and incarnation of both views.
        at: ViewId,
        /// Members of the view that was seen first.
        first: Vec<MemberId>,
        /// Members of the other view.
        second: Vec<MemberId>,
    },
    /// A view that does not follow the previous one.
    #[error("the view of {at} does not follow the previous one: {fault}")]
    Chain {
        /// Epoch and incarnation of the view.
        at: ViewId,
        /// The rule that the view breaks.
        fault: ViewFault,
    },
    /// A member returned to an older view.
    #[error("{who} returned from {from} to the older {to}")]
    Backwards {
        /// Id of the member.
        who: MemberId,
        /// Epoch and incarnation of the member's newer view.
        from: ViewId,
        /// Epoch and incarnation of the older view to which it returned.
        to: ViewId,
    },
    /// A member reported a fault of another, although all members follow the rules.
    #[error("{who} reports a fault of {peer}, although all members follow the rules: {fault}")]
    Blames {
        /// Id of the reporting member.
        who: MemberId,
        /// Id of the accused member.
        peer: MemberId,
        /// The reported fault.
        fault: ViewFault,
    },
    /// Two incarnations of the run are still in progress long after the network was repaired.
    #[error("incarnation {newer} does not stop although incarnation {older} is still in progress")]
    Incarnations {
        /// Number of the oldest incarnation that is in progress.
        older: u64,
        /// Number of the newest.
        newer: u64,
    },
    /// A newer incarnation has taken the place of one whose living members were a majority.
    #[error("incarnation {newer} took the place of incarnation {older}, of which a majority was alive")]
    Overtaken {
        /// Number of the incarnation that had to continue.
        older: u64,
        /// Number of the incarnation that continued.
        newer: u64,
    },
    /// The run does not continue although a majority is alive and its members hear each other.
    #[error("the members that are alive did not continue the run within the time limit")]
    Stuck,
}

/// All views that any member installed or kept.
#[derive(Debug, Default)]
pub(super) struct History {
    views: BTreeMap<ViewId, View>,
    /// Violated guarantees, in order of detection.
    pub(super) breaches: Vec<Breach>,
}

impl History {
    /// Records a member's view and checks it.
    pub(super) fn record(&mut self, view: &View) {
        let at = view.id();
        if let Some(known) = self.views.get(&at) {
            if known != view {
                let members = |view: &View| view.members.iter().map(|member| member.id).collect();
                self.breaches.push(Breach::Fork { at, first: members(known), second: members(view) });
            }
            return;
        }
        let before = at.epoch.checked_sub(1).map(|epoch| ViewId { epoch, ..at });
        if let Some(old) = before.and_then(|before| self.views.get(&before))
            && let Err(fault) = view.follows(old)
        {
            self.breaches.push(Breach::Chain { at, fault });
        }
        self.views.insert(at, view.clone());
    }

    /// Returns the number of views after the first.
    pub(super) fn decided(&self) -> usize {
        self.views.len().saturating_sub(1)
    }

    /// Returns the view with this epoch and incarnation, and all later views.
    pub(super) fn since(&self, place: ViewId) -> impl Iterator<Item = &View> {
        self.views.range(place..).map(|(_, view)| view)
    }
}
