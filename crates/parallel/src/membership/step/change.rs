//! The change from one view to the next.

use std::collections::BTreeSet;

use super::super::state::Round;
use super::super::{Action, DurableState, MemberId, Message, Reason, View, ViewFault};
use super::{Step, ViewSource};

impl Step<'_> {
    /// Announces a decided view to all members and enters it.
    pub(super) fn decide(&mut self, view: View) {
        let others = self.state.others();
        let mut members = view.ids();
        members.remove(&self.state.me.id);
        // Members that the view removes are notified once: one that misses the message gets an answer when it
        // next sends something. Those that stay are notified until they answer (`unacknowledged`). If this
        // member is itself removed, it notifies all others here; see `depart`.
        let stays = view.has(&self.state.me.id);
        for id in if stays { &others - &members } else { others } {
            self.send(id, Message::Decided { view: view.clone() });
        }
        self.enter(view, None);
        if stays {
            self.state.unacknowledged = Round::new(members);
        }
    }

    /// Handles a view that a peer reports as decided.
    pub(super) fn decided(&mut self, from: MemberId, view: View, told: ViewSource) {
        if let Err(fault) = view.check() {
            self.actions.push(Action::Fault { peer: from, fault });
            return;
        }
        let Some(mine) = self.view() else {
            if view.members.iter().any(|m| m.id == self.state.me.id && m.slot == self.state.me.slot) {
                self.enter(view, Some(from));
                self.acknowledge(from);
            }
            return;
        };
        let (place, old) = (view.id(), mine.id());
        if place.incarnation != old.incarnation {
            self.meet_view(from, &view, told);
        } else if place > old {
            if place.epoch == old.epoch + 1
                && let Err(fault) = view.follows(mine)
            {
                self.actions.push(Action::Fault { peer: from, fault });
                return;
            }
            self.enter(view, Some(from));
            self.acknowledge(from);
        } else if place == old && view != *mine {
            self.actions.push(Action::Fault { peer: from, fault: ViewFault::Another(place) });
        } else if told == ViewSource::Decision && place == old {
            // The peer may have restarted, and then it numbers its announcements from 1 again.
            self.state.suspicions.remove(&from);
            self.acknowledge(from);
        } else if told == ViewSource::Decision {
            self.send_view(from);
        }
    }

    /// Acknowledges the view.
    fn acknowledge(&mut self, to: MemberId) {
        if let Some(at) = self.view_id().filter(|_| self.goes_on()) {
            self.send(to, Message::Here { at });
        }
    }

    /// Enters a view, or departs if the view does not contain this member. `from` has sent the view; `None` if
    /// this member has decided it.
    fn enter(&mut self, view: View, from: Option<MemberId>) {
        let me = self.state.me;
        let Some(&me) = view.members.iter().find(|m| m.id == me.id && m.slot == me.slot) else {
            self.depart(view, from);
            return;
        };
        let state = &mut *self.state;
        let ids = view.ids();
        state.me = me;
        state.proposal = None;
        state.highest = 0;
        state.silent.retain(|id| ids.contains(id));
        state.leaving.retain(|id| ids.contains(id));
        state.ready.retain(|_, new| !view.members.iter().any(|m| m.id == new.id && m.slot == new.slot));
        state.suspicions.clear();
        state.announced = 0;
        state.repeats.clear();
        state.unacknowledged = Round::default();
        state.announcement = None;
        state.alone_since = None;
        state.in_newer.clear();
        state.superseded_by = None;
        state.durable = Some(DurableState::new(view.clone()));
        self.persist();
        self.actions.push(Action::Install(view));
        if !self.state.silent.is_empty() || self.state.leaving.contains(&me.id) {
            self.announce_now();
        }
    }

    /// Stops if this member asked to leave and is the only member. Returns whether it has stopped.
    pub(super) fn has_left(&mut self) -> bool {
        let me = self.state.me.id;
        let alone = self.view().is_some_and(|view| view.members.len() == 1);
        if alone && self.state.leaving.contains(&me) && self.state.stopped.is_none() {
            self.stop(Reason::Left);
        }
        self.state.stopped.is_some()
    }

    /// Stops if too few members have been heard for `Settings::patience`. Returns whether it has stopped.
    pub(super) fn has_waited_in_vain(&mut self) -> bool {
        let heard: BTreeSet<MemberId> = self.state.present();
        if self.state.is_quorum(&heard) {
            self.state.alone_since = None;
            self.state.superseded_by = None;
            return false;
        }
        let since = *self.state.alone_since.get_or_insert(self.now);
        if self.now < since.saturating_add(self.state.settings.patience) {
            return false;
        }
        if let Some(incarnation) = self.state.superseded_by {
            self.stop(Reason::Superseded { incarnation });
        } else if let Some(view) = self.view() {
            let (members, tie_breaker) = (view.members.len(), heard.contains(&view.tie_breaker));
            self.stop(Reason::NoMajority { heard: heard.len(), members, tie_breaker });
        }
        true
    }
}
