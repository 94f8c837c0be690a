//! Machines, their disks, and the network between them, in virtual time.

use std::collections::{BTreeMap, BTreeSet};

use farflung_base::Nanos;

use super::super::{Action, Event, Kept, Member, MemberId, Message, Reason, Settings, Start, State, View};
use super::draw::Draw;
use super::history::{Breach, History};
use crate::plan::Digest;

/// How the network treats messages.
#[derive(Debug, Clone, Copy)]
pub(super) struct Weather {
    /// How many of a hundred are lost.
    pub(super) loss: u64,
    /// How many of a hundred arrive twice.
    pub(super) twice: u64,
    /// The longest delay. The shortest is a millisecond: messages overtake each other.
    pub(super) delay: Nanos,
}

/// A machine and the process on it.
#[derive(Debug, Default)]
pub(super) struct Machine {
    /// `None` where no process runs.
    pub(super) state: Option<State>,
    /// What its process has kept.
    pub(super) disk: Option<Kept>,
    /// Counts its processes.
    pub(super) life: u32,
    /// The tick that the process has asked for.
    wake: Option<Nanos>,
    /// The process dies once it has done so many actions.
    pub(super) dies_in: Option<u64>,
    /// Why its last process ended by itself.
    pub(super) ended: Option<Reason>,
}

/// What is due at some time.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "most are messages")]
enum Due<T> {
    Deliver { from: MemberId, to: MemberId, message: Message },
    Tick { who: MemberId, life: u32 },
    Own(T),
}

/// Everything in a trial. `T` is what the trial itself has planned.
#[derive(Debug)]
pub(super) struct World<T> {
    pub(super) now: Nanos,
    pub(super) draw: Draw,
    pub(super) weather: Weather,
    /// Links that lose everything, from and to.
    pub(super) cut: BTreeSet<(MemberId, MemberId)>,
    pub(super) machines: BTreeMap<MemberId, Machine>,
    /// Processes that have asked to leave.
    pub(super) leaves: BTreeSet<MemberId>,
    pub(super) history: History,
    /// How many events processes took up.
    pub(super) steps: u64,
    pub(super) settings: Settings,
    pub(super) crashes: u32,
    /// Members that stopped because they had no majority.
    pub(super) stops: u32,
    pub(super) flaw: Option<super::Flaw>,
    slots: u32,
    due: BTreeMap<(Nanos, u64), Due<T>>,
    planned: u64,
}

impl<T> World<T> {
    pub(super) fn new(draw: Draw, weather: Weather, settings: Settings) -> Self {
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
            flaw: None,
            slots: 0,
            due: BTreeMap::new(),
            planned: 0,
        }
    }

    /// A slot that nobody has had.
    pub(super) fn slot(&mut self) -> u32 {
        self.slots += 1;
        self.slots
    }

    /// Plans something of the trial's own.
    pub(super) fn plan(&mut self, at: Nanos, own: T) {
        self.queue(at, Due::Own(own));
    }

    fn queue(&mut self, at: Nanos, due: Due<T>) {
        self.planned += 1;
        self.due.insert((at.max(self.now), self.planned), due);
    }

    /// Lets messages and ticks happen up to the next thing that the trial has planned, at most until `end`.
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
        machine.disk = state.kept().cloned();
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
        // Views that two members propose differ even where their members do not.
        let weights = Digest::new(id.0);
        self.step(id, Event::Starts(Start { weights, plan: weights }));
    }

    /// Starts a process that is in no view.
    pub(super) fn start_newcomer(&mut self, id: MemberId) {
        let slot = self.slot();
        self.start(State::newcomer(Member::new(id, slot), self.settings));
    }

    /// Starts a process with what the one before has kept. Returns whether there was something.
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

    /// A process dies without a word.
    pub(super) fn crash(&mut self, id: MemberId) {
        if let Some(machine) = self.machines.get_mut(&id)
            && machine.state.take().is_some()
        {
            self.crashes += 1;
        }
    }

    /// One step of a process.
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
            Action::Keep(kept) => {
                let from = machine.disk.as_ref().map(|before| before.view.place());
                let to = kept.view.place();
                if let Some(from) = from.filter(|&from| from > to) {
                    self.history.breaches.push(Breach::Backwards { who, from, to });
                }
                self.history.record(&kept.view);
                machine.disk = Some(kept);
            }
            Action::Install(view) => self.history.record(&view),
            Action::Stop(reason) => {
                self.stops += u32::from(matches!(reason, Reason::NoMajority { .. }));
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

    /// Sends a message, which may be lost.
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

    /// Machines with a process.
    pub(super) fn running(&self) -> Vec<MemberId> {
        let running = self.machines.iter().filter(|(_, machine)| machine.state.is_some());
        running.map(|(id, _)| *id).collect()
    }

    /// The state of a machine's process.
    pub(super) fn state(&self, id: MemberId) -> Option<&State> {
        self.machines.get(&id)?.state.as_ref()
    }

    /// The view of a machine's process.
    pub(super) fn view(&self, id: MemberId) -> Option<&View> {
        self.state(id)?.view()
    }

    /// Whether the process of a member runs: not only another one on its machine.
    pub(super) fn lives(&self, member: &Member) -> bool {
        self.state(member.id).is_some_and(|state| state.me().slot == member.slot)
    }

    /// Whether a question of the one is answered by the other.
    pub(super) fn reaches(&self, from: MemberId, to: &Member) -> bool {
        self.lives(to) && !self.cut.contains(&(from, to.id)) && !self.cut.contains(&(to.id, from))
    }
}
