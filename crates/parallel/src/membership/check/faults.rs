//! Everything goes wrong at random; then the network heals.

use std::collections::{BTreeMap, BTreeSet};

use farflung_base::Nanos;

use super::super::{Event, Member, MemberId, Message, Place, Reason, Settings, Start, State, View};
use super::draw::Draw;
use super::flaw::Flaw;
use super::history::Breach;
use super::world::{Machine, Weather, World};
use crate::plan::Digest;

/// A trial of the rules under faults.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Faults {
    /// Members of the first view.
    pub members: u32,
    /// Of everything random.
    pub seed: u64,
    /// Something that is wrong on purpose, so that the trial can be seen to fail.
    pub flaw: Option<Flaw>,
}

/// What happened in a trial.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FaultsOutcome {
    /// Views after the first.
    pub views: u32,
    /// How often links were cut.
    pub cuts: u32,
    /// Processes that died between two actions.
    pub crashes: u32,
    /// Processes that started again with their votes.
    pub restarts: u32,
    /// Machines that came, those that came again included.
    pub newcomers: u32,
    /// Members that asked to leave.
    pub leaves: u32,
    /// Members that stopped because they had no majority.
    pub stops: u32,
    /// How often members asked to do a step again under the same members.
    pub repeats: u32,
    /// Events that processes took up.
    pub steps: u64,
    /// Whether enough members live after healing to go on.
    pub can_go_on: bool,
    /// From healing until all that live had the same view of exactly them.
    pub recovery: Option<Nanos>,
    /// Promises that were broken.
    pub breaches: Vec<Breach>,
}

impl FaultsOutcome {
    /// How many views there were of an epoch that had one already.
    #[must_use]
    pub fn forks(&self) -> usize {
        self.breaches.iter().filter(|breach| matches!(breach, Breach::Fork { .. })).count()
    }
}

/// What the trial plans.
#[derive(Debug, Clone, Copy)]
enum Own {
    /// A process looks who answers.
    Look { who: MemberId, life: u32 },
    /// Something goes wrong.
    Fault,
}

/// Faults happen for so long.
const STORM: Nanos = Nanos::from_millis(30_000);
/// Messages of the storm are under way for at most so long after it.
const AFTERMATH: Nanos = Nanos::from_millis(3_000);
/// By then all that live must have the same view.
const LIMIT: Nanos = Nanos::from_millis(90_000);
/// The view must then stay for so long.
const STAYS: Nanos = Nanos::from_millis(15_000);
/// Between two looks of a process.
const LOOK: (Nanos, Nanos) = (Nanos::from_millis(700), Nanos::from_millis(1_300));

/// Runs a trial: half a minute of faults, then what follows.
///
/// Members crash between any two actions, restart with their votes or as newcomers, leave, are given up
/// wrongly; newcomers come and die; the network is cut into parts and loses, doubles and delays messages.
/// Then it heals, and some of the machines come back: at least so many, where there are, that a majority
/// lives.
#[must_use]
pub fn faults(trial: &Faults) -> FaultsOutcome {
    let mut storm = Storm::new(trial);
    storm.rage();
    storm.heal();
    storm.settle();
    storm.outcome()
}

struct Storm {
    world: World<Own>,
    /// Members that did not answer at a process's last look.
    missed: BTreeMap<MemberId, BTreeSet<MemberId>>,
    outcome: FaultsOutcome,
    /// The network is well, and processes that end start again.
    is_healed: bool,
    most_machines: u32,
}

const CALM: Weather = Weather { loss: 0, twice: 0, delay: Nanos::from_millis(100) };

impl Storm {
    fn new(trial: &Faults) -> Self {
        let settings = Settings {
            resend: Nanos::from_millis(200),
            slowest_resend: Nanos::from_millis(2_000),
            patience: Nanos::from_millis(8_000),
            grace: Nanos::from_millis(4_000),
        };
        let draw = Draw::new(trial.seed, u64::from(trial.members));
        let mut world = World::new(draw, CALM, settings);
        world.flaw = trial.flaw;
        let members: Vec<Member> =
            (0..trial.members).map(|n| Member::new(MemberId::number(n), world.slot())).collect();
        let zeros = Digest::new([0; 32]);
        let first =
            View::first(Place { incarnation: 1, epoch: 1 }, &members, Start { weights: zeros, plan: zeros });
        let mut storm = Self {
            world,
            missed: BTreeMap::new(),
            outcome: FaultsOutcome::default(),
            is_healed: false,
            most_machines: trial.members + 4,
        };
        if let Ok(first) = first {
            for member in &first.members {
                if let Ok(state) = State::first(member.id, first.clone(), settings) {
                    storm.world.start(state);
                    storm.begin_looking(member.id);
                }
            }
        }
        storm
    }

    /// Faults, and what they lead to.
    fn rage(&mut self) {
        self.world.plan(Nanos::from_millis(500), Own::Fault);
        while let Some(own) = self.world.next(STORM) {
            match own {
                Own::Look { who, life } => self.look(who, life),
                Own::Fault => {
                    self.fault();
                    let pause = self.world.draw.between(Nanos::from_millis(20), Nanos::from_millis(1_500));
                    self.world.plan(self.world.now.saturating_add(pause), Own::Fault);
                }
            }
        }
    }

    /// A process looks who answers, from now on again and again.
    fn begin_looking(&mut self, who: MemberId) {
        self.missed.remove(&who);
        let life = self.world.machines.get(&who).map_or(0, |machine| machine.life);
        let pause = self.world.draw.between(LOOK.0, LOOK.1);
        self.world.plan(self.world.now.saturating_add(pause), Own::Look { who, life });
    }

    /// What a process sees: who answers, who asks to come in, and sometimes that a step was committed.
    fn look(&mut self, who: MemberId, life: u32) {
        if self.world.machines.get(&who).is_none_or(|machine| machine.life != life) {
            return;
        }
        let pause = self.world.draw.between(LOOK.0, LOOK.1);
        self.world.plan(self.world.now.saturating_add(pause), Own::Look { who, life });
        let Some(state) = self.world.state(who) else {
            let ended = self.world.machines.get(&who).and_then(|machine| machine.ended.as_ref());
            if self.is_healed && ended.is_some_and(|reason| *reason != Reason::Left) {
                self.begin_again(who);
            }
            return;
        };
        let me = *state.me();
        let Some(view) = state.view() else {
            self.ask_in(me);
            return;
        };
        let hears_enough = view.has_majority(&(&view.ids() - state.silent()));
        let (at, members) = (view.place(), view.ids().into_iter().collect::<Vec<_>>());
        let others: Vec<Member> =
            view.members.iter().chain(state.ready()).filter(|member| member.id != who).copied().collect();
        let mut missed = self.missed.remove(&who).unwrap_or_default();
        for other in others {
            let Some(state) = self.world.state(who) else { return };
            let is_silent = state.silent().contains(&other.id);
            if self.world.reaches(who, &other) {
                missed.remove(&other.id);
                if is_silent {
                    self.world.step(who, Event::Heard(other.id));
                }
            } else if !missed.insert(other.id) && !is_silent {
                self.world.step(who, Event::Silent(other.id));
            }
        }
        self.missed.insert(who, missed);
        // A frame of the training has the sender's epoch. Whoever hears too few knows of others, too: the
        // ticket names some.
        let known = if hears_enough { members } else { self.world.running() };
        if let Some(other) = self.world.draw.one_of(&known) {
            self.world.send(who, other, Message::Here { at });
        }
        if self.world.draw.percent(50) {
            self.world.step(who, Event::Admit);
        }
    }

    /// A newcomer tells a member that it is ready.
    fn ask_in(&mut self, me: Member) {
        let mut hosts = self.world.running();
        hosts.retain(|id| self.world.view(*id).is_some());
        if let Some(host) = self.world.draw.one_of(&hosts)
            && self.world.state(host).is_some_and(|state| self.world.reaches(me.id, state.me()))
        {
            self.world.step(host, Event::Ready(me));
        }
    }

    /// A machine whose process has ended starts another: with its votes, unless the others go on without it.
    fn begin_again(&mut self, who: MemberId) {
        let is_out = |reason: &Reason| matches!(reason, Reason::Removed { .. } | Reason::Superseded { .. });
        let ended = self.world.machines.get(&who).and_then(|machine| machine.ended.as_ref());
        if ended.is_some_and(is_out) { self.come(who) } else { self.restart(who) }
    }

    /// With its votes; without any as a newcomer.
    fn restart(&mut self, who: MemberId) {
        if self.world.restore(who) {
            self.outcome.restarts += 1;
            self.begin_looking(who);
        } else {
            self.come(who);
        }
    }

    /// As a newcomer.
    fn come(&mut self, who: MemberId) {
        self.world.start_newcomer(who);
        self.outcome.newcomers += 1;
        self.begin_looking(who);
    }

    /// One of the things that go wrong.
    fn fault(&mut self) {
        let running = self.world.running();
        let Some(one) = self.world.draw.one_of(&running) else {
            self.start_one();
            return;
        };
        match self.world.draw.below(100) {
            0..18 => self.cut(),
            18..26 => self.world.cut.clear(),
            26..44 => {
                // Between any two of its next actions.
                let actions = self.world.draw.below(8);
                if let Some(machine) = self.world.machines.get_mut(&one) {
                    machine.dies_in = Some(actions);
                }
            }
            44..66 => self.start_one(),
            66..74 => {
                let number = self.world.machines.len() as u32;
                if number < self.most_machines {
                    self.come(MemberId::number(number));
                }
            }
            74..78 => {
                self.outcome.leaves += 1;
                self.world.leaves.insert(one);
                self.world.step(one, Event::Leave(one));
            }
            78..88 => {
                // Given up although it answers.
                if let Some(other) = self.world.draw.one_of(&running) {
                    self.world.step(one, Event::Silent(other));
                }
            }
            88..92 => self.repeat(one, &running),
            _ => {
                let delay = [50, 200, 2_000][self.world.draw.below(3) as usize];
                self.world.weather = Weather {
                    loss: [0, 5, 30][self.world.draw.below(3) as usize],
                    twice: [0, 10, 50][self.world.draw.below(3) as usize],
                    delay: Nanos::from_millis(delay),
                };
            }
        }
    }

    /// A step fails although all are heard: some of the members of a view, or all, ask to do it again.
    fn repeat(&mut self, one: MemberId, running: &[MemberId]) {
        let Some(view) = self.world.view(one) else { return };
        let of = view.ids();
        self.outcome.repeats += 1;
        for &who in running.iter().filter(|who| of.contains(who)) {
            if self.world.draw.percent(95) {
                self.world.step(who, Event::Repeat);
            }
        }
    }

    /// A machine without a process gets one again: mostly with its votes.
    fn start_one(&mut self) {
        let is_down = |machine: &Machine| machine.state.is_none() && machine.ended != Some(Reason::Left);
        let down = self.world.machines.iter().filter(|(_, machine)| is_down(machine));
        let down: Vec<MemberId> = down.map(|(id, _)| *id).collect();
        let Some(one) = self.world.draw.one_of(&down) else { return };
        let removed = matches!(
            self.world.machines[&one].ended,
            Some(Reason::Removed { .. } | Reason::Superseded { .. })
        );
        if removed || self.world.draw.percent(10) { self.come(one) } else { self.restart(one) }
    }

    /// Cuts the network: into parts, or single links in one direction or both.
    fn cut(&mut self) {
        self.outcome.cuts += 1;
        let ids: Vec<MemberId> = self.world.machines.keys().copied().collect();
        let draw = &mut self.world.draw;
        let mut cut = BTreeSet::new();
        if draw.percent(60) {
            let parts = 2 + draw.below(2);
            let part: BTreeMap<MemberId, u64> = ids.iter().map(|id| (*id, draw.below(parts))).collect();
            for a in &ids {
                cut.extend(ids.iter().filter(|b| part[a] != part[*b]).map(|b| (*a, *b)));
            }
        } else {
            let both = draw.percent(50);
            let percent = 10 + draw.below(40);
            for a in &ids {
                for b in ids.iter().filter(|b| *b != a) {
                    if draw.percent(percent) {
                        cut.insert((*a, *b));
                        cut.extend(both.then_some((*b, *a)));
                    }
                }
            }
        }
        self.world.cut = cut;
    }

    /// The network is well from now on; some machines come back.
    fn heal(&mut self) {
        self.world.cut.clear();
        self.world.weather = CALM;
        for machine in self.world.machines.values_mut() {
            machine.dies_in = None;
        }
        // What is under way arrives.
        while let Some(own) = self.world.next(STORM.saturating_add(AFTERMATH)) {
            if let Own::Look { who, life } = own {
                self.look(who, life);
            }
        }
        self.is_healed = true;
        for all in [false, true] {
            let is_down = |machine: &Machine| machine.state.is_none() && machine.ended != Some(Reason::Left);
            let down = self.world.machines.iter().filter(|(_, machine)| is_down(machine));
            for who in down.map(|(id, _)| *id).collect::<Vec<_>>() {
                if all || self.world.draw.percent(50) {
                    self.begin_again(who);
                }
            }
            self.outcome.can_go_on = self.can_go_on();
            if self.outcome.can_go_on {
                break;
            }
        }
    }

    /// Whether those that live are a majority of the newest view that one of them has, and of every view that
    /// may follow.
    fn can_go_on(&self) -> bool {
        let world = &self.world;
        let states = || world.machines.values().filter_map(|machine| machine.state.as_ref());
        let Some(newest) = states().filter_map(State::view).max_by_key(|view| view.place()) else {
            return false;
        };
        let is_majority = |view: &View| {
            // Whoever is about to leave does not count: if all others are dead, the run ends with it.
            let living = view
                .members
                .iter()
                .filter(|member| world.lives(member) && !world.leaves.contains(&member.id));
            view.has_majority(&living.map(|member| member.id).collect())
        };
        let accepted = states().filter_map(|state| state.kept()?.accepted.as_ref()).map(|vote| &vote.view);
        // Newcomers that died may still be admitted.
        let dead: Vec<Member> =
            states().flat_map(State::ready).filter(|new| !world.lives(new)).copied().collect();
        let start = Start { weights: newest.weights, plan: newest.plan };
        let with_dead = newest.with(&dead, start);
        let mut later =
            world.history.since(newest.place()).chain(accepted.filter(|view| view.epoch > newest.epoch));
        is_majority(newest) && later.all(is_majority) && with_dead.as_ref().is_none_or(is_majority)
    }

    /// Waits until all that live have the same view of exactly them, and whether it stays.
    fn settle(&mut self) {
        let healed = self.world.now;
        let end = healed.saturating_add(LIMIT);
        while let Some(own) = self.world.next(end) {
            if let Own::Look { who, life } = own {
                self.look(who, life);
                if self.is_settled() {
                    self.outcome.recovery = Some(self.world.now.saturating_sub(healed));
                    break;
                }
            }
        }
        let stays = self.world.now.saturating_add(STAYS);
        while let Some(own) = self.world.next(stays) {
            if let Own::Look { who, life } = own {
                self.look(who, life);
            }
        }
        if self.outcome.can_go_on && !self.is_settled() {
            self.world.history.breaches.push(Breach::Stuck);
        }
    }

    /// Whether all that live have the same view of exactly them, and nobody is about to start again.
    fn is_settled(&self) -> bool {
        let running = self.world.running();
        let Some(view) = running.first().and_then(|first| self.world.view(*first)) else { return false };
        let starts = |machine: &Machine| machine.ended.as_ref().is_some_and(|reason| *reason != Reason::Left);
        view.members.len() == running.len()
            && running.iter().all(|id| self.world.view(*id) == Some(view))
            && view.members.iter().all(|member| self.world.lives(member))
            && !self.world.machines.values().any(starts)
    }

    fn outcome(mut self) -> FaultsOutcome {
        self.outcome.views = self.world.history.decided() as u32;
        self.outcome.crashes = self.world.crashes;
        self.outcome.stops = self.world.stops;
        self.outcome.steps = self.world.steps;
        self.outcome.breaches = self.world.history.breaches;
        self.outcome
    }
}
