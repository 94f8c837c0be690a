//! Two incarnations of a run: one was restarted from a checkpoint while the older one may still run.

use std::collections::BTreeMap;

use super::super::state::OlderRun;
use super::super::{Action, MemberId, Message, Reason, View, ViewId};
use super::{Step, ViewSource};

/// Maximum number of older incarnations that a member keeps account of.
const MOST_OLDER: usize = 16;
/// Maximum number of former members that a member asks.
const MOST_FORMER: usize = 4096;

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
    pub(super) fn meet_view(&mut self, from: MemberId, view: &View, told: ViewSource) {
        let Some(mine) = self.view_id() else { return };
        if view.incarnation > mine.incarnation {
            self.meet_newer(from, view.incarnation);
        } else if told == ViewSource::Decision {
            self.send_view(from);
        } else if view.has(&from) {
            self.learn_of_older(view);
            self.count_refusal(from, view);
        }
    }

    /// Rejects a newer incarnation if the members that are heard, without those that are in it, are a majority.
    ///
    /// Otherwise this member waits as it always does without a majority, and stops after `Settings::patience`:
    /// it may hear the others again, for example if only its own link was broken.
    fn meet_newer(&mut self, from: MemberId, incarnation: u64) {
        #[cfg(test)]
        if self.state.ignores_incarnations {
            return;
        }
        if self.view().is_some_and(|view| view.has(&from)) {
            self.state.in_newer.insert(from);
        }
        if self.state.is_quorum(&self.state.present()) {
            self.send_view(from);
        } else {
            self.state.superseded_by = self.state.superseded_by.max(Some(incarnation));
        }
    }

    /// Handles what a member of this view tells about an older incarnation.
    pub(super) fn told_of_older(&mut self, from: MemberId, view: &View) {
        if let Err(fault) = view.check() {
            self.actions.push(Action::Fault { peer: from, fault });
        } else if self.view_id().is_some_and(|mine| view.incarnation < mine.incarnation) {
            self.learn_of_older(view);
        }
    }

    /// Records the newest known view of an older incarnation. Its members are asked from now on, since the
    /// older incarnation may have admitted members that this one does not know of. The other members of this
    /// view are told, since they continue if this member stops.
    fn learn_of_older(&mut self, view: &View) {
        let (older, known) = (view.incarnation, &mut self.state.older);
        let is_news = known.get(&older).is_none_or(|known| known.view.epoch < view.epoch);
        if !is_news || known.len() >= MOST_OLDER && !known.contains_key(&older) {
            return;
        }
        known.insert(older, OlderRun { view: view.clone(), refusals: BTreeMap::new() });
        let members = self.view().map(View::ids).unwrap_or_default();
        let room = MOST_FORMER.saturating_sub(self.state.former.to.len());
        self.state.former.to.extend(view.ids().difference(&members).take(room));
        self.state.former.retry = None;
        self.tell_of_older();
    }

    /// Tells the other members of this view about the older incarnations that this member knows of.
    pub(super) fn tell_of_older(&mut self) {
        let Some(at) = self.view_id() else { return };
        let views: Vec<View> = self.state.older.values().map(|older| older.view.clone()).collect();
        for id in self.state.others() {
            for view in &views {
                self.send(id, Message::Older { at, view: view.clone() });
            }
        }
    }

    /// Records that a member of an older incarnation rejects this one. A single member may believe wrongly that
    /// it has a majority, so this member stops only if a majority of the newest known view rejects it.
    fn count_refusal(&mut self, from: MemberId, view: &View) {
        let known = self.state.older.get_mut(&view.incarnation).filter(|known| known.view == *view);
        let Some(known) = known else { return };
        known.refusals.insert(from, self.now);
        if known.view.has_majority(&known.valid_refusals(self.now, &self.state.settings).collect()) {
            self.tell_of_older();
            self.stop(Reason::StillRuns { older: view.id() });
        }
    }
}
