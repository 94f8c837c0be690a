//! Messages that a member repeats: its view until it is acknowledged, announcements as long as they apply. Also
//! tells the coordinator about newcomers.

use super::super::retry::Retry;
use super::super::state::Round;
use super::super::{MemberId, Message, View};
use super::Step;

impl Step<'_> {
    /// Sends the view to members that have not acknowledged it, and to members of an older incarnation that
    /// have not answered.
    pub(super) fn send_view_to_rest(&mut self) {
        if !self.state.unacknowledged.is_due(self.now) && !self.state.former.is_due(self.now) {
            return;
        }
        let Some(view) = self.view().cloned() else { return };
        let untold = std::mem::take(&mut self.state.unacknowledged);
        self.state.unacknowledged = self.send_round(untold, &view);
        if self.state.former.is_due(self.now) {
            self.tell_of_older();
        }
        let former = std::mem::take(&mut self.state.former);
        self.state.former = self.send_round(former, &view);
    }

    /// Sends a view to the members of a round, if that is due.
    pub(super) fn send_round(&mut self, mut round: Round, view: &View) -> Round {
        if !round.is_due(self.now) {
            return round;
        }
        for &id in &round.to {
            self.send(id, Message::Decided { view: view.clone() });
        }
        let retry = round.retry.unwrap_or(Retry::due(self.now));
        round.retry = Some(retry.again(self.now, &self.state.settings));
        round
    }

    /// Schedules an announcement for now, because its content changed.
    pub(super) fn announce_now(&mut self) {
        self.state.announcement = Some(Retry::due(self.now));
    }

    /// Sends announcements to all members, lost ones included: which members this one considers lost, whether
    /// it is about to leave, and whether it asks for a view of the same members.
    pub(super) fn announce(&mut self) {
        let (Some(at), Some(retry)) = (self.view_id(), self.state.announcement) else { return };
        if !retry.is_due(self.now) {
            return;
        }
        let repeats = self.state.repeats.contains(&self.state.me.id);
        let (silent, leaving) = (self.state.silent.clone(), self.state.leaving.contains(&self.state.me.id));
        self.state.announced += 1;
        let number = self.state.announced;
        for id in self.state.others() {
            self.send(id, Message::Suspects { at, number, silent: silent.clone() });
            if leaving {
                self.send(id, Message::Leaving { at });
            }
            if repeats {
                self.send(id, Message::Repeat { at });
            }
        }
        // An empty list is sent only once: receivers drop reports that are not repeated.
        let more = leaving || !silent.is_empty() || repeats;
        self.state.announcement = more.then(|| retry.again(self.now, &self.state.settings));
    }

    /// Tells the coordinator which newcomers are ready.
    pub(super) fn pass_on_newcomers(&mut self) {
        let coordinator: Option<MemberId> =
            self.view().and_then(|view| view.coordinator(&self.state.silent)).copied();
        let (Some(at), Some(to)) = (self.view_id(), coordinator) else { return };
        if to != self.state.me.id {
            for member in self.state.ready.values().copied().collect::<Vec<_>>() {
                self.send(to, Message::Newcomer { at, member });
            }
        }
    }
}
