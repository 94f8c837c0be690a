//! Two incarnations of a run: one was restarted from a checkpoint while the older one may still run.

use std::collections::BTreeSet;

use super::super::state::Refusals;
use super::super::{MemberId, Reason, View, ViewId};
use super::{Step, ViewSource};

impl Step<'_> {
    /// Handles a message from a peer in another incarnation.
    pub(super) fn meet_incarnation(&mut self, from: MemberId, theirs: ViewId) {
        let Some(mine) = self.view_id() else { return };
        if theirs.incarnation > mine.incarnation {
            self.meet_newer(from, theirs.incarnation);
        } else {
            self.send_view(from);
        }
    }

    /// Handles a view of another incarnation.
    pub(super) fn meet_view(&mut self, from: MemberId, view: View, told: ViewSource) {
        let Some(mine) = self.view_id() else { return };
        if view.incarnation > mine.incarnation {
            self.meet_newer(from, view.incarnation);
        } else if told == ViewSource::Decision {
            self.send_view(from);
        } else if view.has(&from) {
            self.count_refusal(from, view);
        }
    }

    /// Rejects a newer incarnation if the members that are heard, without the sender, are a majority. Stops
    /// otherwise.
    fn meet_newer(&mut self, from: MemberId, incarnation: u64) {
        let mut heard = self.state.heard();
        heard.remove(&from);
        if self.state.is_quorum(&heard) {
            self.send_view(from);
        } else {
            self.stop(Reason::Superseded { incarnation });
        }
    }

    /// Records that a member of an older incarnation rejects this one. A single member may believe wrongly that
    /// it has a majority, so this member stops only if a majority rejects it.
    fn count_refusal(&mut self, from: MemberId, view: View) {
        let older = view.id();
        let refusals = match self.state.refusals.take() {
            Some(known) if known.view.id() > older => known,
            Some(mut known) if known.view == view => {
                known.from.insert(from);
                known
            }
            _ => Refusals { view, from: BTreeSet::from([from]) },
        };
        if refusals.view.has_majority(&refusals.from) {
            self.stop(Reason::StillRuns { older: refusals.view.id() });
        }
        self.state.refusals = Some(refusals);
    }
}
