//! Simulation of random faults, after which the network is repaired.

use std::collections::{BTreeMap, BTreeSet};

use farflung_base::Nanos;

use super::super::{Event, Member, MemberId, Message, Reason, Settings, Start, State, View, ViewId};
use super::draw::EventRng;
use super::flaw::Flaw;
use super::history::Breach;
use super::world::{Machine, Weather, World};
use crate::plan::Digest;

/// Settings of the simulation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Faults {
    /// Number of members of the first view.
    pub members: u32,
    /// Seed of all random numbers.
    pub seed: u64,
    /// Whether a host starts the run again from what is on its disk, while the others may still run.
    pub starts_again: bool,
    /// A deliberate flaw, by which tests check that the simulation detects it.
    pub flaw: Option<Flaw>,
}

/// Result of a simulation.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FaultsOutcome {
    /// Number of views after the first.
    pub views: u32,
    /// Number of times that links were cut.
    pub cuts: u32,
    /// Number of processes that crashed between two actions.
    pub crashes: u32,
    /// Number of processes that restarted with their saved votes.
    pub restarts: u32,
    /// Number of machines that started as newcomers, including those that returned.
    pub newcomers: u32,
    /// Number of requests to leave.
    pub leaves: u32,
    /// Number of members that stopped because they had no majority.
    pub stops: u32,
    /// Number of times that members asked to repeat a step under the same members.
    pub repeats: u32,
    /// Number of times that a host started the run again, as another incarnation.
    pub incarnations: u32,
    /// Number of members of a newer incarnation that stopped because an older one still runs.
    pub refused: u32,
    /// Number of members of an older incarnation that stopped because of a newer one.
    pub superseded: u32,
    /// Whether two incarnations that had no contact were in progress after the repair, so that they were given
    /// contact.
    pub was_apart: bool,
    /// The incarnation in which all living processes are at the end; `None` if they are not in the same view.
    pub survivor: Option<u64>,
    /// Number of events that processes handled.
    pub steps: u64,
    /// Whether enough members live after the repair to continue.
    pub can_go_on: bool,
    /// Time from the repair until all living processes had the same view, whose members are exactly these
    /// processes; if there were incarnations without contact, time from their contact.
    pub recovery: Option<Nanos>,
    /// Violated guarantees.
    pub breaches: Vec<Breach>,
}

impl FaultsOutcome {
    /// Returns the number of forks: views of an epoch that already had another view.
    #[must_use]
    pub fn forks(&self) -> usize {
        self.breaches.iter().filter(|breach| matches!(breach, Breach::Fork { .. })).count()
    }
}

/// Events that the simulation schedules.
#[derive(Debug, Clone, Copy)]
pub(super) enum Own {
    /// A process checks which other members answer.
    Look { who: MemberId, life: u32 },
    /// A random fault is injected.
    Fault,
}

/// Duration of the faults.
const STORM: Nanos = Nanos::from_millis(30_000);
/// Time after the faults in which messages sent before arrive. Their longest delay is 2 s.
const AFTERMATH: Nanos = Nanos::from_millis(3_000);
/// Time after the repair within which all living processes must have the same view.
const LIMIT: Nanos = Nanos::from_millis(90_000);
/// Time for which this view must then stay unchanged.
const STAYS: Nanos = Nanos::from_millis(15_000);
/// Bounds of the time between two checks of a process.
const LOOK: (Nanos, Nanos) = (Nanos::from_millis(700), Nanos::from_millis(1_300));

/// Runs a simulation: 30 s of faults, then the repair and the recovery.
///
/// Members crash between any two actions, restart with their votes or as newcomers, leave, or are wrongly
/// considered lost. Newcomers start and crash. The network is partitioned, and it loses, duplicates and delays
/// messages. If [`Faults::starts_again`] is set, a host also starts the run again, as another incarnation. Then
/// the network is repaired, and some of the machines restart: if possible, at least as many as are needed for a
/// majority to be alive.
#[must_use]
pub fn faults(trial: &Faults) -> FaultsOutcome {
    let mut storm = Storm::new(trial);
    storm.rage();
    storm.heal();
    storm.settle();
    storm.outcome()
}

pub(super) struct Storm {
    pub(super) world: World<Own>,
    /// Members that did not answer at each process's last check.
    missed: BTreeMap<MemberId, BTreeSet<MemberId>>,
    pub(super) outcome: FaultsOutcome,
    /// Whether a host starts the run again.
    starts_again: bool,
    /// The machine that starts the run again, once it has been drawn.
    pub(super) host: Option<MemberId>,
    /// The incarnation that a newcomer has asked, by its slot.
    asked: BTreeMap<u32, u64>,
    /// The incarnation that must continue after the repair, if there is one.
    pub(super) expected: Option<u64>,
    /// Whether processes also contact machines outside of their view, which may be in another incarnation.
    greets: bool,
    /// Whether the network is repaired. From then on, processes that stop restart.
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
        let draw = EventRng::new(trial.seed, u64::from(trial.members));
        let mut world = World::new(draw, CALM, settings);
        world.flaw = trial.flaw;
        let members: Vec<Member> =
            (0..trial.members).map(|n| Member::new(MemberId::number(n), world.slot())).collect();
        let zeros = Digest::new([0; 32]);
        let first =
            View::first(ViewId { incarnation: 1, epoch: 1 }, &members, Start { weights: zeros, plan: zeros });
        let mut storm = Self {
            world,
            missed: BTreeMap::new(),
            outcome: FaultsOutcome::default(),
            starts_again: trial.starts_again,
            host: None,
            asked: BTreeMap::new(),
            expected: None,
            greets: false,
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

    /// Runs the phase of faults.
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

    /// Schedules the regular checks of a process.
    pub(super) fn begin_looking(&mut self, who: MemberId) {
        self.missed.remove(&who);
        let life = self.world.machines.get(&who).map_or(0, |machine| machine.life);
        let pause = self.world.draw.between(LOOK.0, LOOK.1);
        self.world.plan(self.world.now.saturating_add(pause), Own::Look { who, life });
    }

    /// Runs one check of a process: it learns which members answer, a newcomer asks to be admitted, and
    /// sometimes a step is committed.
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
        let hears_enough = view.has_majority(&state.present());
        let (at, members) = (view.id(), view.ids().into_iter().collect::<Vec<_>>());
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
        // Training frames carry the sender's epoch. A process that hears from too few members also contacts
        // other machines, because its ticket names some.
        let known = if hears_enough && !self.greets { members } else { self.world.running() };
        if let Some(other) = self.world.draw.one_of(&known) {
            self.world.send(who, other, Message::Here { at });
        }
        if self.world.draw.percent(50) {
            self.world.step(who, Event::Admit);
        }
    }

    /// Tells a random member that a newcomer is ready. The newcomer keeps to the incarnation that it asked
    /// first, as long as a process of it runs.
    fn ask_in(&mut self, me: Member) {
        let mut hosts = self.world.running();
        hosts.retain(|id| self.world.view(*id).is_some());
        if let Some(&asked) = self.asked.get(&me.slot)
            && hosts.iter().any(|&id| self.is_in(id, asked))
        {
            hosts.retain(|&id| self.is_in(id, asked));
        }
        if let Some(host) = self.world.draw.one_of(&hosts)
            && self.world.state(host).is_some_and(|state| self.world.reaches(me.id, state.me()))
        {
            self.asked.extend(self.world.view(host).map(|view| (me.slot, view.incarnation)));
            self.world.step(host, Event::Ready(me));
        }
    }

    /// Restarts the process of a machine: with its votes, or as a newcomer if the others continue without it.
    fn begin_again(&mut self, who: MemberId) {
        let ended = self.world.machines.get(&who).and_then(|machine| machine.ended.as_ref());
        if ended.is_some_and(is_out) { self.come(who) } else { self.restart(who) }
    }

    /// Restarts a process with its votes, or as a newcomer if it has none.
    fn restart(&mut self, who: MemberId) {
        if self.world.restore(who) {
            self.outcome.restarts += 1;
            self.begin_looking(who);
        } else {
            self.come(who);
        }
    }

    /// Starts a process as a newcomer.
    fn come(&mut self, who: MemberId) {
        self.world.start_newcomer(who);
        self.outcome.newcomers += 1;
        self.begin_looking(who);
    }

    /// Injects one random fault.
    fn fault(&mut self) {
        if self.starts_again && self.outcome.incarnations < 3 && self.world.draw.percent(8) {
            self.start_again();
            return;
        }
        let running = self.world.running();
        let Some(one) = self.world.draw.one_of(&running) else {
            self.start_one();
            return;
        };
        match self.world.draw.below(100) {
            0..18 => self.cut(),
            18..26 => self.world.cut.clear(),
            26..44 => {
                // The process crashes between any two of its next actions.
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
                // Marks a member as lost although it may still answer.
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

    /// Lets some or all members of a view ask to repeat a step, as if it had failed although all members are
    /// heard.
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

    /// Restarts a process on a machine without one, mostly with its votes.
    fn start_one(&mut self) {
        let is_down = |machine: &Machine| machine.state.is_none() && machine.ended != Some(Reason::Left);
        let down = self.world.machines.iter().filter(|(_, machine)| is_down(machine));
        let down: Vec<MemberId> = down.map(|(id, _)| *id).collect();
        let Some(one) = self.world.draw.one_of(&down) else { return };
        let removed = self.world.machines[&one].ended.as_ref().is_some_and(is_out);
        if removed || self.world.draw.percent(10) { self.come(one) } else { self.restart(one) }
    }

    /// Partitions the network, or cuts single links in one direction or both.
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

    /// Repairs the network and restarts some machines.
    fn heal(&mut self) {
        self.world.cut.clear();
        self.world.weather = CALM;
        for machine in self.world.machines.values_mut() {
            machine.dies_in = None;
        }
        // Messages that were sent before arrive first.
        self.run(AFTERMATH, |_| false);
        self.is_healed = true;
        for all in [false, true] {
            let is_down = |machine: &Machine| machine.state.is_none() && machine.ended != Some(Reason::Left);
            let down = self.world.machines.iter().filter(|(_, machine)| is_down(machine));
            let down: Vec<(MemberId, bool)> =
                down.map(|(id, machine)| (*id, machine.ended.is_some())).collect();
            for (who, ended) in down {
                // One that stopped by itself restarts in any case, and may continue an older incarnation.
                if all || self.starts_again && ended || self.world.draw.percent(50) {
                    self.begin_again(who);
                }
            }
            self.expected = self.expected_survivor();
            self.outcome.can_go_on = self.expected.is_some();
            if self.outcome.can_go_on {
                break;
            }
        }
    }

    /// Runs until all living processes have the same view, whose members are exactly these processes, then
    /// checks that the view stays. If there are incarnations without contact, it gives them contact and runs
    /// on.
    fn settle(&mut self) {
        self.recover();
        if !self.is_settled() && self.is_apart() {
            self.outcome.was_apart = true;
            self.greets = true;
            self.recover();
        }
        self.run(STAYS, |_| false);
        if self.is_settled() {
            let first = self.world.running().first().copied();
            let view = first.and_then(|first| self.world.view(first));
            self.outcome.survivor = view.map(|view| view.incarnation);
        } else if self.outcome.can_go_on {
            self.world.history.breaches.push(Breach::Stuck);
        }
        self.check_incarnations();
    }

    /// Runs until the living processes have the same view, at most for [`LIMIT`], and notes how long that took.
    fn recover(&mut self) {
        let begin = self.world.now;
        let is_settled = self.run(LIMIT, Self::is_settled);
        self.outcome.recovery = is_settled.then(|| self.world.now.saturating_sub(begin));
    }

    /// Runs the processes for this long, or until `is_done` holds after a check. Returns whether it held.
    fn run(&mut self, span: Nanos, is_done: impl Fn(&Self) -> bool) -> bool {
        let end = self.world.now.saturating_add(span);
        while let Some(own) = self.world.next(end) {
            if let Own::Look { who, life } = own {
                self.look(who, life);
                if is_done(self) {
                    return true;
                }
            }
        }
        false
    }

    /// Returns whether all living processes have the same view, whose members are exactly these processes, and
    /// no process is about to restart.
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
        self.outcome.refused = self.world.refused;
        self.outcome.superseded = self.world.superseded;
        self.outcome.steps = self.world.steps;
        self.outcome.breaches = self.world.history.breaches;
        self.outcome
    }
}

/// Returns whether a process that stopped for this reason starts as a newcomer: others continue without it.
const fn is_out(reason: &Reason) -> bool {
    matches!(reason, Reason::Removed { .. } | Reason::Superseded { .. } | Reason::StillRuns { .. })
}
