//! What was installed anywhere, and whether it breaks a promise.

use std::collections::BTreeMap;

use super::super::{MemberId, Place, View, ViewFault};

/// A promise that was broken.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Breach {
    /// Two views of one epoch.
    #[error("two views of {at}: {first:?} and {second:?}")]
    Fork {
        /// Which epoch.
        at: Place,
        /// The members of the view that was seen first.
        first: Vec<MemberId>,
        /// Those of the other.
        second: Vec<MemberId>,
    },
    /// A view that does not follow the one before.
    #[error("the view of {at} does not follow the one before: {fault}")]
    Chain {
        /// Which epoch.
        at: Place,
        /// The rule that is broken.
        fault: ViewFault,
    },
    /// A member went back to an older view.
    #[error("{who} went from {from} back to {to}")]
    Backwards {
        /// The member.
        who: MemberId,
        /// Its view before.
        from: Place,
        /// Its view after.
        to: Place,
    },
    /// A member blames another, although all follow the rules.
    #[error("{who} blames {peer}: {fault}")]
    Blames {
        /// Who blames.
        who: MemberId,
        /// Whom.
        peer: MemberId,
        /// For what.
        fault: ViewFault,
    },
    /// The run does not go on, although a majority is alive and hears each other.
    #[error("no view of all that live within the limit")]
    Stuck,
}

/// All views that were installed or kept anywhere.
#[derive(Debug, Default)]
pub(super) struct History {
    views: BTreeMap<Place, View>,
    /// What was broken, in order.
    pub(super) breaches: Vec<Breach>,
}

impl History {
    /// A member has this view.
    pub(super) fn record(&mut self, view: &View) {
        let at = view.place();
        if let Some(known) = self.views.get(&at) {
            if known != view {
                let members = |view: &View| view.members.iter().map(|member| member.id).collect();
                self.breaches.push(Breach::Fork { at, first: members(known), second: members(view) });
            }
            return;
        }
        let before = at.epoch.checked_sub(1).map(|epoch| Place { epoch, ..at });
        if let Some(old) = before.and_then(|before| self.views.get(&before))
            && let Err(fault) = view.follows(old)
        {
            self.breaches.push(Breach::Chain { at, fault });
        }
        self.views.insert(at, view.clone());
    }

    /// How many views there were after the first.
    pub(super) fn decided(&self) -> usize {
        self.views.len().saturating_sub(1)
    }

    /// The view of this place and all later ones.
    pub(super) fn since(&self, place: Place) -> impl Iterator<Item = &View> {
        self.views.range(place..).map(|(_, view)| view)
    }
}
