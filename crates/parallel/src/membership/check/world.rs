//! Simulated machines, their disks, and the network between them, in virtual time.

use std::collections::{BTreeMap, BTreeSet};

use farflung_base::Nanos;

use super::super::{
    Action, DurableState, Event, Member, MemberId, Message, Reason, Settings, Start, State, View, ViewId,
};
use super::draw::EventRng;
use super::history::{Breach, History};
use crate::plan::Digest;

/// Properties of the simulated network.
#[derive(Debug, Clone, Copy)]
pub(super) struct Weather {
    /// Percentage of messages that are lost.
    pub(super) loss: u64,
    /// Percentage of messages that are duplicated.
    pub(super) twice: u64,
    /// Maximum delay. The minimum is 1 ms. Delays are random, so messages overtake each other.
    pub(super) delay: Nanos,
}

/// A machine and its process.
#[derive(Debug, Default)]
pub(super) struct Machine {
    /// State of the process; `None` if no process runs.
    pub(super) state: Option<State>,
    /// State that the process has written to disk.
    pub(super) disk: Option<DurableState>,
    /// Number of processes started on the machine so far.
    pub(super) life: u32,
    /// Time of the tick that the process has requested.
    wake: Option<Nanos>,
    /// Number of further actions after which the process crashes.
    pub(super) dies_in: Option<u64>,
    /// Reason for which the machine's last process stopped by itself.
    pub(super) ended: Option<Reason>,
}

/// An event in the queue.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "most are messages")]
enum Due<T> {
    Deliver { from: MemberId, to: MemberId, message: Message },
    Tick { who: MemberId, life: u32 },
    Own(T),
}

/// State of a simulation. `T` is the type of the events that a kind of simulation schedules itself.
#[derive(Debug)]
pub(super) struct World<T> {
    pub(super) now: Nanos,
    pub(super) draw: EventRng,
    pub(super) weather: Weather,
    /// Links that lose all messages, as (sender, receiver).
    pub(super) cut: BTreeSet<(MemberId, MemberId)>,
    pub(super) machines: BTreeMap<MemberId, Machine>,
    /// Ids of processes that have asked to leave.
    pub(super) leaves: BTreeSet<MemberId>,
    pub(super) history: History,
    /// Number of events that processes handled.
    pub(super) steps: u64,
    pub(super) settings: Settings,
    pub(super) crashes: u32,
    /// Number of members that stopped because they had no majority.
    pub(super) stops: u32,
    /// Number of members that stopped because an older incarnation still runs.
    pub(super) refused: u32,
    /// Number of members that stopped because of a newer incarnation.
    pub(super) superseded: u32,
    pub(super) flaw: Option<super::Flaw>,
    slots: u32,
    due: BTreeMap<(Nanos, u64), Due<T>>,
    planned: u64,
}

impl<T> World<T> {
    pub(super) fn new(draw: EventRng, weather: Weather, settings: Settings) -> Self {
        Self {
            now: Nanos::ZERO,
            draw,
            weather,
            cut: BTreeSet::new(),
            machines: BTreeMap::new(),
            leaves: BTreeSet::new(),
            history: History::default(),
            steps: 0,
            settings,
            crashes: 0,
            stops: 0,
            refused: 0,
            superseded: 0,
            flaw: None,
            slots: 0,
            due: BTreeMap::new(),
            planned: 0,
        }
    }

    /// Returns an unused slot.
    pub(super) fn slot(&mut self) -> u32 {
        self.slots += 1;
        self.slots
    }

    /// Schedules an event of the simulation's own.
    pub(super) fn plan(&mut self, at: Nanos, own: T) {
        self.queue(at, Due::Own(own));
    }

    fn queue(&mut self, at: Nanos, due: Due<T>) {
        self.planned += 1;
        self.due.insert((at.max(self.now), self.planned), due);
    }

    /// Delivers messages and ticks until the next event that the simulation has scheduled itself, and returns
    /// that event. `None` if there is no such event until `end`.
    pub(super) fn next(&mut self, end: Nanos) -> Option<T> {
        while let Some(entry) = self.due.first_entry() {
            if entry.key().0 > end {
                break;
            }
            let ((at, _), due) = entry.remove_entry();
            self.now = at;
            match due {
                Due::Own(own) => return Some(own),
                Due::Deliver { from, to, message } => self.step(to, Event::Message { from, message }),
                Due::Tick { who, life } => {
                    let machine = self.machines.get_mut(&who);
                    let asked = machine.filter(|machine| machine.life == life && machine.wake == Some(at));
                    if let Some(machine) = asked {
                        machine.wake = None;
                        self.step(who, Event::Tick);
                    }
                }
            }
        }
        self.now = end;
        None
    }

    /// Starts a process on a machine.
    pub(super) fn start(&mut self, state: State) {
        let id = state.me().id;
        let machine = self.machines.entry(id).or_default();
        machine.disk = state.durable().cloned();
        if let Some(kept) = &machine.disk {
            self.history.record(&kept.view);
        }
        #[cfg(test)]
        let state = super::Flaw::put_into(self.flaw, state);
        machine.state = Some(state);
        machine.life += 1;
        machine.wake = None;
        machine.dies_in = None;
        machine.ended = None;
        self.leaves.remove(&id);
        // The weights' digest is the member's id, so that views proposed by two members differ even if they
        // have the same members.
        let weights = Digest::new(id.0);
        self.step(id, Event::Starts(Start { weights, plan: weights }));
    }

    /// Starts a process as a newcomer.
    pub(super) fn start_newcomer(&mut self, id: MemberId) {
        let slot = self.slot();
        self.start(State::newcomer(Member::new(id, slot), self.settings));
    }

    /// Starts a process from the state on the machine's disk. Returns false if there is no such state.
    pub(super) fn restore(&mut self, id: MemberId) -> bool {
        let Some(mut kept) = self.machines.get(&id).and_then(|machine| machine.disk.clone()) else {
            return false;
        };
        if self.flaw == Some(super::Flaw::ForgetsVotes) {
            (kept.promised, kept.accepted) = (None, None);
        }
        let restored = State::restored(id, kept, self.settings);
        restored.is_ok_and(|state| {
            self.start(state);
            true
        })
    }

    /// Crashes a process and starts the run again from the view on the machine's disk, as a new incarnation
    /// whose only member is this machine. Returns false if there is no such view.
    pub(super) fn start_again(&mut self, id: MemberId, incarnation: u64) -> bool {
        let Some(kept) = self.machines.get(&id).and_then(|machine| machine.disk.clone()) else {
            return false;
        };
        self.crash(id);
        let me = Member::new(id, self.slot());
        let place = ViewId { incarnation, epoch: kept.view.epoch + 1 };
        let start = Start { weights: kept.view.weights, plan: kept.view.plan };
        let view = View::first(place, &[me], start);
        let again = view.and_then(|view| State::again(id, view, kept.view.ids(), self.settings));
        again.is_ok_and(|state| {
            self.start(state);
            true
        })
    }

    /// Crashes a process; it sends no messages about it.
    pub(super) fn crash(&mut self, id: MemberId) {
        if let Some(machine) = self.machines.get_mut(&id)
            && machine.state.take().is_some()
        {
            self.crashes += 1;
        }
    }

    /// Passes an event to a process and executes its actions.
    pub(super) fn step(&mut self, who: MemberId, event: Event) {
        let Some(state) = self.machines.get_mut(&who).and_then(|machine| machine.state.as_mut()) else {
            return;
        };
        self.steps += 1;
        for action in state.step(event, self.now) {
            let Some(machine) = self.machines.get_mut(&who) else { return };
            match &mut machine.dies_in {
                Some(0) => {
                    self.crash(who);
                    return;
                }
                Some(actions) => *actions -= 1,
                None => {}
            }
            self.act(who, action);
        }
    }

    fn act(&mut self, who: MemberId, action: Action) {
        let Some(machine) = self.machines.get_mut(&who) else { return };
        match action {
            Action::Send { to, message } => self.send(who, to, message),
            Action::Persist(kept) => {
                let from = machine.disk.as_ref().map(|before| before.view.id());
                let to = kept.view.id();
                if let Some(from) = from.filter(|&from| from > to) {
                    self.history.breaches.push(Breach::Backwards { who, from, to });
                }
                self.history.record(&kept.view);
                machine.disk = Some(kept);
            }
            Action::Install(view) => self.history.record(&view),
            Action::Stop(reason) => {
                match reason {
                    Reason::NoMajority { .. } => self.stops += 1,
                    Reason::StillRuns { .. } => self.refused += 1,
                    Reason::Superseded { .. } => self.superseded += 1,
                    Reason::Removed { .. } | Reason::Left => {}
                }
                machine.ended = Some(reason);
                machine.state = None;
            }
            Action::Wake { at } => {
                let (at, life) = (at.max(self.now), machine.life);
                if machine.wake != Some(at) {
                    machine.wake = Some(at);
                    self.queue(at, Due::Tick { who, life });
                }
            }
            Action::Fault { peer, fault } => self.history.breaches.push(Breach::Blames { who, peer, fault }),
        }
    }

    /// Sends a message, which may be lost or duplicated.
    pub(super) fn send(&mut self, from: MemberId, to: MemberId, message: Message) {
        if self.cut.contains(&(from, to)) || self.draw.percent(self.weather.loss) {
            return;
        }
        if self.draw.percent(self.weather.twice) {
            self.send_once(from, to, message.clone());
        }
        self.send_once(from, to, message);
    }

    fn send_once(&mut self, from: MemberId, to: MemberId, message: Message) {
        let delay = self.draw.between(Nanos::from_millis(1), self.weather.delay);
        self.queue(self.now.saturating_add(delay), Due::Deliver { from, to, message });
    }

    /// Returns the machines with a running process.
    pub(super) fn running(&self) -> Vec<MemberId> {
        let running = self.machines.iter().filter(|(_, machine)| machine.state.is_some());
        running.map(|(id, _)| *id).collect()
    }

    /// Returns the state of a machine's process.
    pub(super) fn state(&self, id: MemberId) -> Option<&State> {
        self.machines.get(&id)?.state.as_ref()
    }

    /// Returns the view of a machine's process.
    pub(super) fn view(&self, id: MemberId) -> Option<&View> {
        self.state(id)?.view()
    }

    /// Returns whether the member's own process runs, rather than a later one on the same machine.
    pub(super) fn lives(&self, member: &Member) -> bool {
        self.state(member.id).is_some_and(|state| state.me().slot == member.slot)
    }

    /// Returns whether a request from `from` would be answered by `to`. A process that is in another
    /// incarnation does not answer as a member of this one.
    pub(super) fn reaches(&self, from: MemberId, to: &Member) -> bool {
        let incarnation = |id| self.view(id).map(|view| view.incarnation);
        let differ = |(a, b)| a != b;
        self.lives(to)
            && !incarnation(from).zip(incarnation(to.id)).is_some_and(differ)
            && !self.cut.contains(&(from, to.id))
            && !self.cut.contains(&(to.id, from))
    }
}
