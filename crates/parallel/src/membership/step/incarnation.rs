//! A run that was started again from a checkpoint, beside one that still goes on.

use std::collections::BTreeSet;

use super::super::state::Refusals;
use super::super::{MemberId, Place, Reason, View};
use super::{Step, Told};

impl Step<'_> {
    /// A peer is in another incarnation.
    pub(super) fn meet_incarnation(&mut self, from: MemberId, theirs: Place) {
        let Some(mine) = self.place() else { return };
        if theirs.incarnation > mine.incarnation {
            self.meet_newer(from, theirs.incarnation);
        } else {
            self.send_view(from);
        }
    }

    /// A peer sends a view of another incarnation.
    pub(super) fn meet_view(&mut self, from: MemberId, view: View, told: Told) {
        let Some(mine) = self.place() else { return };
        if view.incarnation > mine.incarnation {
            self.meet_newer(from, view.incarnation);
        } else if told == Told::Decision {
            self.send_view(from);
        } else if view.has(&from) {
            self.count_refusal(from, view);
        }
    }

    /// Refuses a newer incarnation while the members that are heard are a majority without the sender.
    fn meet_newer(&mut self, from: MemberId, incarnation: u64) {
        let mut heard = self.state.heard();
        heard.remove(&from);
        if self.state.is_quorum(&heard) {
            self.send_view(from);
        } else {
            self.stop(Reason::Superseded { incarnation });
        }
    }

    /// A member of an older incarnation refuses this one. One alone may only believe that it has a majority.
    fn count_refusal(&mut self, from: MemberId, view: View) {
        let older = view.place();
        let refusals = match self.state.refusals.take() {
            Some(known) if known.view.place() > older => known,
            Some(mut known) if known.view == view => {
                known.from.insert(from);
                known
            }
            _ => Refusals { view, from: BTreeSet::from([from]) },
        };
        if refusals.view.has_majority(&refusals.from) {
            self.stop(Reason::StillRuns { older: refusals.view.place() });
        }
        self.state.refusals = Some(refusals);
    }
}
