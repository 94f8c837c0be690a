//! A member that is not in the view that was decided: it stops once a member of that view knows of it.

use super::super::retry::Retry;
use super::super::state::{Departure, Round};
use super::super::{Action, Event, MemberId, Message, Reason, View};
use super::Step;

impl Step<'_> {
    /// Leaves the run because of a view that does not contain this member. `from` has sent the view; `None` if
    /// this member has decided it.
    ///
    /// Those that know of a view may all be outside of it: the member that decided it, and removed ones. If
    /// they stopped, its members would wait for them for ever. So this member stops only once a member of the
    /// view knows of it, or after `Settings::slowest_resend`.
    pub(super) fn depart(&mut self, view: View, from: Option<MemberId>) {
        let left = self.state.leaving.contains(&self.state.me.id);
        let reason = if left { Reason::Left } else { Reason::Removed { by: view.id() } };
        if from.is_some_and(|from| view.has(&from)) {
            self.stop(reason);
            return;
        }
        let until = self.now.saturating_add(self.state.settings.slowest_resend);
        // The member that decided the view has just sent it.
        let first = Retry::due(self.now);
        let retry = if from.is_none() { first.again(self.now, &self.state.settings) } else { first };
        let round = Round { to: view.ids(), retry: Some(retry) };
        self.state.departure = Some(Departure { view, reason, round, until });
    }

    /// Handles an event on a member that is about to stop.
    pub(super) fn take_at_departure(&mut self, event: Event) {
        let (Some(Departure { view, reason, .. }), Event::Message { from, message }) =
            (&self.state.departure, event)
        else {
            return;
        };
        let at = match &message {
            Message::Decided { view } | Message::Stale { view } => view.id(),
            message => message.at().unwrap_or_else(|| view.id()),
        };
        if at < view.id() {
            let view = view.clone();
            self.send(from, Message::Stale { view });
        } else if view.has(&from) {
            let reason = reason.clone();
            self.stop(reason);
        }
    }

    /// Sends the view again, or stops if that was long enough.
    pub(super) fn continue_departure(&mut self) {
        let Some(mut departure) = self.state.departure.take() else { return };
        if self.now >= departure.until {
            self.stop(departure.reason);
            return;
        }
        departure.round = self.send_round(departure.round, &departure.view);
        let at = departure.round.wake().map_or(departure.until, |at| at.min(departure.until));
        self.actions.push(Action::Wake { at });
        self.state.departure = Some(departure);
    }
}
