//! The transition function of a member.

mod announce;
mod change;
mod depart;
mod incarnation;
mod propose;
mod vote;

use farflung_base::Nanos;

use super::{Action, DurableState, Event, Member, MemberId, Message, Reason, State, View, ViewId};

/// Returns the next state of a member after an event, and the actions to execute. A pure function.
///
/// `now` must not be earlier than in the previous call. A stopped state does not change.
pub fn step(mut state: State, event: Event, now: Nanos) -> (State, Vec<Action>) {
    let actions = state.step(event, now);
    (state, actions)
}

impl State {
    /// Applies an event as [`step`] does, in place.
    pub fn step(&mut self, event: Event, now: Nanos) -> Vec<Action> {
        let mut step = Step { state: self, now, actions: Vec::new() };
        if step.goes_on() {
            let admit = step.take(event);
            step.advance(admit);
        } else {
            step.take_at_departure(event);
        }
        step.continue_departure();
        step.actions
    }
}

/// Context of one call of [`step`].
struct Step<'a> {
    state: &'a mut State,
    now: Nanos,
    actions: Vec<Action>,
}

impl Step<'_> {
    /// Applies an event to the state. Returns whether leaves and admissions may be proposed now.
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

    /// Sends messages and continues proposals that are due.
    fn advance(&mut self, admit: bool) {
        let Some(mut place) = self.view_id().filter(|_| self.goes_on()) else { return };
        // The view is sent before requests about the next one.
        self.send_view_to_rest();
        self.pursue(admit);
        // A member that is a quorum by itself may have the next change to propose at once.
        while let Some(next) = self.view_id().filter(|&next| next != place && self.goes_on()) {
            place = next;
            self.send_view_to_rest();
            self.pursue(false);
        }
        if !self.goes_on() || self.has_left() || self.has_waited_in_vain() {
            return;
        }
        self.announce();
        self.wake();
    }

    /// Handles a message. A message about another view is answered or dropped here, before its content is used.
    fn receive(&mut self, from: MemberId, message: Message) {
        match message {
            Message::Decided { view } => self.decided(from, view, ViewSource::Decision),
            Message::Stale { view } => self.decided(from, view, ViewSource::Answer),
            message => {
                let Some(at) = message.at() else { return };
                let Some(mine) = self.view_id() else {
                    self.ask_for_view(from, &message);
                    return;
                };
                if at.incarnation != mine.incarnation {
                    self.meet_incarnation(from, at);
                } else if at < mine {
                    self.send_view(from);
                } else if at > mine {
                    // The sender is ahead: requests its view.
                    self.send(from, Message::Here { at: mine });
                } else if self.view().is_some_and(|view| view.has(&from)) {
                    self.receive_from_member(from, message);
                }
            }
        }
    }

    /// Requests the sender's view: this newcomer may be in it, and the member that decided it may have died.
    fn ask_for_view(&mut self, from: MemberId, message: &Message) {
        // A `Here` is not answered: two newcomers would ask each other forever.
        if !matches!(message, Message::Here { .. }) {
            self.send(from, Message::Here { at: ViewId { incarnation: 0, epoch: 0 } });
        }
    }

    /// Handles a message about this view from one of its members.
    fn receive_from_member(&mut self, from: MemberId, message: Message) {
        match message {
            Message::Here { .. } => {
                self.state.unacknowledged.to.remove(&from);
                self.state.former.to.remove(&from);
            }
            Message::Prepare { ballot, .. } => self.prepare(from, ballot),
            Message::Promised { ballot, accepted, .. } => self.promised(from, ballot, accepted),
            Message::Refused { ballot, promised, .. } => self.refused(ballot, promised),
            Message::Accept { ballot, view, .. } => self.accept(from, ballot, &view),
            Message::Accepted { ballot, .. } => self.accepted(from, ballot),
            Message::Suspects { number, silent, .. } => {
                let said = self.state.suspicions.entry(from).or_default();
                said.update(number, &silent, self.now, &self.state.settings);
            }
            Message::Leaving { .. } => {
                self.state.leaving.insert(from);
            }
            Message::Newcomer { member, .. } => self.ready(member),
            Message::Repeat { .. } => {
                self.state.repeats.insert(from);
            }
            Message::Older { view, .. } => self.told_of_older(from, &view),
            Message::Decided { .. } | Message::Stale { .. } => {}
        }
    }

    /// Marks a member as lost, or removes a newcomer from those that are ready.
    fn give_up(&mut self, id: MemberId) {
        self.state.ready.remove(&id);
        let is_other = id != self.state.me.id && self.view().is_some_and(|view| view.has(&id));
        if is_other && self.state.silent.insert(id) {
            self.announce_now();
        }
    }

    /// Adds a newcomer that is ready.
    fn ready(&mut self, member: Member) {
        let Some(view) = self.view() else { return };
        let is_member = view.members.iter().any(|m| m.id == member.id && m.slot == member.slot);
        if !is_member && member.id != self.state.me.id && self.state.ready.len() < View::MOST_MEMBERS {
            self.state.ready.insert(member.id, member);
        }
    }

    /// Returns whether this member has neither stopped nor is about to.
    const fn goes_on(&self) -> bool {
        self.state.stopped.is_none() && self.state.departure.is_none()
    }

    fn view(&self) -> Option<&View> {
        self.state.view()
    }

    fn view_id(&self) -> Option<ViewId> {
        self.view().map(View::id)
    }

    /// Requests that the changed [`DurableState`] is written.
    fn persist(&mut self) {
        self.actions.extend(self.state.durable.clone().map(Action::Persist));
    }

    fn durable(&mut self) -> Option<&mut DurableState> {
        self.state.durable.as_mut()
    }

    fn send(&mut self, to: MemberId, message: Message) {
        self.actions.push(Action::Send { to, message });
    }

    /// Sends the present view to a peer that is in an older view, or in an incarnation that this member
    /// rejects.
    fn send_view(&mut self, to: MemberId) {
        if let Some(view) = self.view().cloned() {
            self.send(to, Message::Stale { view });
        }
    }

    fn stop(&mut self, reason: Reason) {
        self.state.stopped = Some(reason.clone());
        self.state.departure = None;
        self.actions.push(Action::Stop(reason));
    }

    /// Requests the next tick.
    fn wake(&mut self) {
        let state = &self.state;
        let alone = state.alone_since.map(|since| since.saturating_add(state.settings.patience));
        let proposal = state.proposal.as_ref().map(|proposal| proposal.retry.at());
        let announcement = state.announcement.map(super::retry::Retry::at);
        let timers = [
            alone,
            proposal,
            announcement,
            state.unacknowledged.wake(),
            state.former.wake(),
            self.next_grace(),
        ];
        if let Some(at) = timers.into_iter().flatten().min() {
            self.actions.push(Action::Wake { at });
        }
    }
}

/// The kind of message that contained a view.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ViewSource {
    /// A [`Message::Decided`].
    Decision,
    /// A [`Message::Stale`].
    Answer,
}
