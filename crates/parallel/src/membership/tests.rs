//! Helpers for the tests: members by number, and a network that delivers immediately.

mod agreement;
mod changes;
mod churn;
mod deciding;
mod incarnations;
mod quorum_table;
mod repeating;
mod wire;

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use farflung_base::Nanos;

use super::{
    Action, DurableState, Event, Member, MemberId, Message, Reason, Settings, Start, State, View, ViewId,
};
use crate::plan::Digest;

pub(super) fn id(number: u32) -> MemberId {
    MemberId::number(number)
}

pub(super) fn ids(numbers: &[u32]) -> BTreeSet<MemberId> {
    numbers.iter().map(|&number| id(number)).collect()
}

pub(super) fn member(number: u32) -> Member {
    Member::new(id(number), number)
}

pub(super) const START: Start = Start { weights: Digest::new([7; 32]), plan: Digest::new([9; 32]) };

/// Returns the view of epoch 1 with members `0..n`. Member 0 is the tie-breaker.
pub(super) fn first(n: u32) -> View {
    let members: Vec<Member> = (0..n).map(member).collect();
    View::first(ViewId { incarnation: 1, epoch: 1 }, &members, START).unwrap()
}

pub(super) fn seconds(seconds: u64) -> Nanos {
    Nanos::from_millis(1000 * seconds)
}

/// Members and one message queue. Messages are lost only on links that a test cuts.
#[derive(Default)]
pub(super) struct Net {
    pub(super) now: Nanos,
    pub(super) states: BTreeMap<MemberId, State>,
    /// State that each member has written to disk.
    pub(super) disks: BTreeMap<MemberId, DurableState>,
    pub(super) stops: BTreeMap<MemberId, Reason>,
    pub(super) installed: Vec<(MemberId, View)>,
    pub(super) queue: VecDeque<(MemberId, MemberId, Message)>,
    /// Links that lose all messages, as (sender, receiver).
    pub(super) cut: BTreeSet<(MemberId, MemberId)>,
    wakes: BTreeMap<MemberId, Nanos>,
}

impl Net {
    /// Creates members `0..n` in their first view.
    pub(super) fn of(n: u32) -> Self {
        let mut net = Self::default();
        for number in 0..n {
            net.add(State::first(id(number), first(n), Settings::default()).unwrap());
        }
        net
    }

    pub(super) fn add(&mut self, state: State) {
        let id = state.me().id;
        self.disks.extend(state.durable().map(|kept| (id, kept.clone())));
        self.states.insert(id, state);
    }

    /// Crashes a member's process.
    pub(super) fn kill(&mut self, number: u32) {
        assert!(self.states.remove(&id(number)).is_some());
        self.wakes.remove(&id(number));
    }

    /// Passes an event to a member and queues the messages that it sends.
    pub(super) fn step(&mut self, who: MemberId, event: Event) {
        let Some(state) = self.states.get_mut(&who) else { return };
        for action in state.step(event, self.now) {
            match action {
                Action::Send { to, message } if !self.cut.contains(&(who, to)) => {
                    self.queue.push_back((who, to, message));
                }
                Action::Send { .. } => {}
                Action::Persist(kept) => {
                    self.disks.insert(who, kept);
                }
                Action::Install(view) => self.installed.push((who, view)),
                Action::Stop(reason) => {
                    self.stops.insert(who, reason);
                }
                Action::Wake { at } => {
                    self.wakes.insert(who, at);
                }
                Action::Fault { peer, fault } => panic!("{who} blames {peer}: {fault}"),
            }
        }
    }

    pub(super) fn event(&mut self, number: u32, event: Event) {
        self.step(id(number), event);
    }

    /// Tells each of the members `by` that `lost` are silent.
    pub(super) fn give_up(&mut self, by: &[u32], lost: &[u32]) {
        for &by in by {
            for &lost in lost {
                self.event(by, Event::Silent(id(lost)));
            }
        }
    }

    /// Delivers messages until the queue is empty.
    pub(super) fn settle(&mut self) {
        while let Some((from, to, message)) = self.queue.pop_front() {
            self.step(to, Event::Message { from, message });
        }
    }

    /// Delivers all messages and advances time by `span`, with all ticks at their times.
    pub(super) fn pass(&mut self, span: Nanos) {
        let end = self.now + span;
        self.settle();
        while let Some((&who, &at)) =
            self.wakes.iter().min_by_key(|(_, at)| **at).filter(|(_, at)| **at <= end)
        {
            self.now = self.now.max(at);
            self.wakes.remove(&who);
            self.step(who, Event::Tick);
            self.settle();
        }
        self.now = end;
    }

    pub(super) fn view(&self, number: u32) -> &View {
        self.states[&id(number)].view().unwrap()
    }

    /// Returns the numbers of the members in a member's view, in the view's order.
    pub(super) fn members(&self, number: u32) -> Vec<u32> {
        let members = self.view(number).members.iter();
        members.map(|member| u32::from_be_bytes(member.id.0[28..].try_into().unwrap())).collect()
    }
}
