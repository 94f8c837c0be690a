//! The pure function: what a member does when something happens.

mod announce;
mod change;
mod incarnation;
mod propose;
mod vote;

use farflung_base::Nanos;

use super::{Action, Event, Kept, Member, MemberId, Message, Place, Reason, State, View};

/// What becomes of a member when something happens, and what it does then.
///
/// `now` must not be earlier than in the step before. A state that has stopped stays as it is.
pub fn step(mut state: State, event: Event, now: Nanos) -> (State, Vec<Action>) {
    let actions = state.step(event, now);
    (state, actions)
}

impl State {
    /// As [`step`], in place.
    pub fn step(&mut self, event: Event, now: Nanos) -> Vec<Action> {
        let mut step = Step { state: self, now, actions: Vec::new() };
        if step.state.stopped.is_none() {
            let admit = step.take(event);
            step.advance(admit);
        }
        step.actions
    }
}

/// A step under way.
struct Step<'a> {
    state: &'a mut State,
    now: Nanos,
    actions: Vec<Action>,
}

impl Step<'_> {
    /// Takes up an event. Returns whether it is a moment for leaves and admissions.
    fn take(&mut self, event: Event) -> bool {
        match event {
            Event::Message { from, message } if from != self.state.me.id => self.receive(from, message),
            Event::Message { .. } | Event::Tick => {}
            Event::Silent(id) => self.give_up(id),
            Event::Heard(id) => {
                if self.state.silent.remove(&id) {
                    self.announce_now();
                }
            }
            Event::Leave(id) => {
                if self.view().is_some_and(|view| view.has(&id)) {
                    self.state.leaving.insert(id);
                    self.announce_now();
                }
            }
            Event::Ready(member) => self.ready(member),
            Event::Repeat => {
                if self.view().is_some() {
                    self.state.repeats.insert(self.state.me.id);
                    self.announce_now();
                }
            }
            Event::Admit => {
                self.pass_on_newcomers();
                return true;
            }
            Event::Starts(start) => self.state.start = start,
        }
        false
    }

    /// Does what is due.
    fn advance(&mut self, admit: bool) {
        let Some(mut place) = self.place().filter(|_| self.state.stopped.is_none()) else { return };
        // Members know the view before they are asked about the next.
        self.tell();
        self.pursue(admit);
        // A member that decides alone may have the next change to propose at once.
        while let Some(next) = self.place().filter(|&next| next != place && self.state.stopped.is_none()) {
            place = next;
            self.tell();
            self.pursue(false);
        }
        if self.has_left() || self.has_waited_in_vain() {
            return;
        }
        self.announce();
        self.wake();
    }

    /// A message. What belongs to another view is answered or dropped before anything looks into it.
    fn receive(&mut self, from: MemberId, message: Message) {
        match message {
            Message::Decided { view } => self.decided(from, view, Told::Decision),
            Message::Stale { view } => self.decided(from, view, Told::Answer),
            message => {
                let Some(at) = message.at() else { return };
                let Some(mine) = self.place() else {
                    self.ask_for_view(from, &message);
                    return;
                };
                if at.incarnation != mine.incarnation {
                    self.meet_incarnation(from, at);
                } else if at < mine {
                    self.send_view(from);
                } else if at > mine {
                    // Asks for the view.
                    self.send(from, Message::Here { at: mine });
                } else if self.view().is_some_and(|view| view.has(&from)) {
                    self.receive_from_member(from, message);
                }
            }
        }
    }

    /// A newcomer may be in the sender's view, and the one who decided that may have died: asks for it.
    fn ask_for_view(&mut self, from: MemberId, message: &Message) {
        // Two newcomers would ask each other without end.
        if !matches!(message, Message::Here { .. }) {
            self.send(from, Message::Here { at: Place { incarnation: 0, epoch: 0 } });
        }
    }

    /// A message of a member of this view, about this view.
    fn receive_from_member(&mut self, from: MemberId, message: Message) {
        match message {
            Message::Here { .. } => {
                self.state.untold.to.remove(&from);
                self.state.former.to.remove(&from);
            }
            Message::Prepare { ballot, .. } => self.prepare(from, ballot),
            Message::Promised { ballot, accepted, .. } => self.promised(from, ballot, accepted),
            Message::Refused { ballot, promised, .. } => self.refused(ballot, promised),
            Message::Accept { ballot, view, .. } => self.accept(from, ballot, &view),
            Message::Accepted { ballot, .. } => self.accepted(from, ballot),
            Message::Suspects { silent, .. } => {
                let said = self.state.suspicions.entry(from).or_default();
                said.update(&silent, self.now);
            }
            Message::Leaving { .. } => {
                self.state.leaving.insert(from);
            }
            Message::Newcomer { member, .. } => self.ready(member),
            Message::Repeat { .. } => {
                self.state.repeats.insert(from);
            }
            Message::Decided { .. } | Message::Stale { .. } => {}
        }
    }

    /// A member or newcomer is given up.
    fn give_up(&mut self, id: MemberId) {
        self.state.ready.remove(&id);
        let is_other = id != self.state.me.id && self.view().is_some_and(|view| view.has(&id));
        if is_other && self.state.silent.insert(id) {
            self.announce_now();
        }
    }

    /// A newcomer is ready.
    fn ready(&mut self, member: Member) {
        let Some(view) = self.view() else { return };
        let is_member = view.members.iter().any(|m| m.id == member.id && m.slot == member.slot);
        if !is_member && member.id != self.state.me.id && self.state.ready.len() < View::MOST_MEMBERS {
            self.state.ready.insert(member.id, member);
        }
    }

    fn view(&self) -> Option<&View> {
        self.state.view()
    }

    fn place(&self) -> Option<Place> {
        self.view().map(View::place)
    }

    /// What is kept has changed.
    fn keep(&mut self) {
        self.actions.extend(self.state.kept.clone().map(Action::Keep));
    }

    fn kept(&mut self) -> Option<&mut Kept> {
        self.state.kept.as_mut()
    }

    fn send(&mut self, to: MemberId, message: Message) {
        self.actions.push(Action::Send { to, message });
    }

    /// Answers a peer that is behind.
    fn send_view(&mut self, to: MemberId) {
        if let Some(view) = self.view().cloned() {
            self.send(to, Message::Stale { view });
        }
    }

    fn stop(&mut self, reason: Reason) {
        self.state.stopped = Some(reason.clone());
        self.actions.push(Action::Stop(reason));
    }

    /// Asks for the next tick.
    fn wake(&mut self) {
        let state = &self.state;
        let alone = state.alone_since.map(|since| since.saturating_add(state.settings.patience));
        let proposal = state.proposal.as_ref().map(|proposal| proposal.retry.at());
        let announcement = state.announcement.map(super::retry::Retry::at);
        let timers =
            [alone, proposal, announcement, state.untold.wake(), state.former.wake(), self.next_grace()];
        if let Some(at) = timers.into_iter().flatten().min() {
            self.actions.push(Action::Wake { at });
        }
    }
}

/// How a view came to be known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Told {
    /// [`Message::Decided`].
    Decision,
    /// [`Message::Stale`].
    Answer,
}
