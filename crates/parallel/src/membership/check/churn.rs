//! Simulation of a day in which machines join and leave.

use std::collections::BTreeMap;

use farflung_base::Nanos;

use super::super::{Event, Member, MemberId, Message, Reason, Settings, Start, State, View, ViewId};
use super::draw::EventRng;
use super::history::Breach;
use super::world::{Weather, World};
use crate::plan::Digest;

/// Settings of the simulation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Churn {
    /// Number of machines at the start. Each machine that ends is replaced.
    pub machines: u32,
    /// Mean time until a machine ends.
    pub life: Nanos,
    /// Percentage of machines that ask to leave; the others crash.
    pub polite: u64,
    /// Mean time until a machine that ended is replaced.
    pub absence: Nanos,
    /// Time in which a newcomer fetches the state.
    pub fetch: Nanos,
    /// Time of the members' work between two commits.
    pub round: Nanos,
    /// Time from the end of a round until a lost member is noticed: if its connection broke, and if it is only
    /// silent.
    pub noticed: [Nanos; 2],
    /// Simulated time.
    pub span: Nanos,
    /// Seed of all random numbers.
    pub seed: u64,
}

impl Churn {
    /// Returns settings for 24 hours with 16 machines, a mean life of 2 hours, and rounds of a minute.
    ///
    /// A broken connection is noticed after 1 s, silence after 10 s; each happens in half of the rounds with a
    /// crash. A third of the machines leave politely. A replacement comes after 5 minutes on average and
    /// fetches the state in one minute.
    #[must_use]
    pub const fn day(seed: u64) -> Self {
        const MINUTE: u64 = 60_000;
        Self {
            machines: 16,
            life: Nanos::from_millis(120 * MINUTE),
            polite: 33,
            absence: Nanos::from_millis(5 * MINUTE),
            fetch: Nanos::from_millis(MINUTE),
            round: Nanos::from_millis(MINUTE),
            noticed: [Nanos::from_millis(1_000), Nanos::from_millis(10_000)],
            span: Nanos::from_millis(24 * 60 * MINUTE),
            seed,
        }
    }
}

/// Result of a simulated day.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ChurnOutcome {
    /// Number of committed rounds.
    pub rounds: u32,
    /// Number of views after the first.
    pub views: u32,
    /// Number of machines that crashed, newcomers included.
    pub died: u32,
    /// Number of members that left politely.
    pub left: u32,
    /// Number of newcomers that became members.
    pub admitted: u32,
    /// Longest time that a ready newcomer waited for admission.
    pub longest_wait: Nanos,
    /// Longest time between two commits.
    pub longest_gap: Nanos,
    /// Longest time from noticing a lost member to the view without it.
    pub slowest_view: Nanos,
    /// Goodput: sum over committed rounds of the number of members, divided by the rounds that all living
    /// machines could have done.
    pub goodput: f64,
    /// Sum over committed rounds of the number of members, divided by the rounds that the initial number of
    /// machines could have done.
    pub of_all: f64,
    /// Violated guarantees.
    pub breaches: Vec<Breach>,
    /// Intervals of membership.
    pub stays: Vec<Stay>,
}

/// An interval in which a machine was a member.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stay {
    /// Id of the machine.
    pub who: MemberId,
    /// Time when the first view with the machine was seen.
    pub from: Nanos,
    /// Time when the first view without the machine was seen, or the end of the day.
    pub to: Nanos,
}

/// Events that the simulation schedules.
#[derive(Debug, Clone, Copy)]
enum Own {
    /// A machine leaves or crashes.
    Ends(MemberId),
    /// A replacement machine starts.
    Comes,
    /// A newcomer has fetched the state.
    Fetched(MemberId),
    /// The members' work of this round is done.
    Done { round: u32 },
    /// Members that do not answer are noticed.
    Notice { round: u32 },
    /// Checks whether members agree on a view, so that the round can be committed.
    Look { round: u32 },
}

/// Time between two checks while the members decide.
const LOOK: Nanos = Nanos::from_millis(20);
/// Maximum time between commits; the day has failed if it is exceeded.
const STUCK: Nanos = Nanos::from_millis(1_800_000);

/// Simulates a day.
#[must_use]
pub fn churn(churn: &Churn) -> ChurnOutcome {
    let mut day = Day::new(*churn);
    while let Some(own) = day.world.next(churn.span) {
        day.happens(own);
    }
    day.outcome()
}

struct Day {
    churn: Churn,
    world: World<Own>,
    outcome: ChurnOutcome,
    /// Start times of the living machines.
    since: BTreeMap<MemberId, Nanos>,
    /// Newcomers that have fetched the state, with the time when they did.
    ready: BTreeMap<MemberId, Nanos>,
    /// Members, with the time when they became members.
    members: BTreeMap<MemberId, Nanos>,
    round: u32,
    begun: Nanos,
    /// Time of the last notice of lost members in this round; `None` before one, and again once a view has
    /// removed a member.
    noticed: Option<Nanos>,
    machines: u32,
    /// Total lifetime of all machines that ended, in nanoseconds.
    alive: f64,
    /// Sum over committed rounds of the number of members.
    done: u64,
}

impl Day {
    fn new(churn: Churn) -> Self {
        let weather = Weather { loss: 1, twice: 1, delay: Nanos::from_millis(100) };
        let world = World::new(EventRng::new(churn.seed, 0), weather, Settings::default());
        let mut day = Self {
            churn,
            world,
            outcome: ChurnOutcome::default(),
            since: BTreeMap::new(),
            ready: BTreeMap::new(),
            members: BTreeMap::new(),
            round: 0,
            begun: Nanos::ZERO,
            noticed: None,
            machines: churn.machines,
            alive: 0.0,
            done: 0,
        };
        let members: Vec<Member> =
            (0..churn.machines).map(|n| Member::new(MemberId::number(n), day.world.slot())).collect();
        let zeros = Digest::new([0; 32]);
        let start = Start { weights: zeros, plan: zeros };
        let Ok(first) = View::first(ViewId { incarnation: 1, epoch: 1 }, &members, start) else { return day };
        for member in members {
            if let Ok(state) = State::first(member.id, first.clone(), day.world.settings) {
                day.world.start(state);
                day.begins(member.id);
                day.members.insert(member.id, Nanos::ZERO);
            }
        }
        day.world.plan(churn.round, Own::Done { round: 0 });
        day
    }

    /// Records the start of a machine and schedules its end.
    fn begins(&mut self, who: MemberId) {
        let now = self.world.now;
        self.since.insert(who, now);
        let life = self.world.draw.exponential(self.churn.life);
        self.world.plan(now.saturating_add(life), Own::Ends(who));
    }

    fn happens(&mut self, own: Own) {
        let now = self.world.now;
        match own {
            Own::Ends(who) => self.ends(who),
            Own::Comes => {
                let who = MemberId::number(self.machines);
                self.machines += 1;
                self.world.start_newcomer(who);
                self.begins(who);
                self.world.plan(now.saturating_add(self.churn.fetch), Own::Fetched(who));
            }
            Own::Fetched(who) => {
                if self.world.state(who).is_some() {
                    self.ready.insert(who, now);
                }
            }
            Own::Done { round } if round == self.round => {
                let at = usize::from(self.world.draw.percent(50));
                let dead = self.members.keys().any(|id| self.world.state(*id).is_none());
                let wait = if dead { self.churn.noticed[at] } else { Nanos::ZERO };
                self.world.plan(now.saturating_add(wait), Own::Notice { round });
            }
            Own::Notice { round } if round == self.round => {
                self.notice();
                self.look();
            }
            Own::Look { round } if round == self.round => self.look(),
            Own::Done { .. } | Own::Notice { .. } | Own::Look { .. } => {}
        }
    }

    /// Ends a machine. A member leaves politely in some cases.
    fn ends(&mut self, who: MemberId) {
        if self.world.view(who).is_some() && self.world.draw.percent(self.churn.polite) {
            self.world.step(who, Event::Leave(who));
        } else {
            self.world.crash(who);
            self.outcome.died += 1;
        }
        if self.world.state(who).is_none() {
            self.gone(who);
        }
    }

    /// Records the end of a machine and schedules its replacement.
    fn gone(&mut self, who: MemberId) {
        let now = self.world.now;
        self.ready.remove(&who);
        if let Some(since) = self.since.remove(&who) {
            self.alive += now.saturating_sub(since).0 as f64;
            let absence = self.world.draw.exponential(self.churn.absence);
            self.world.plan(now.saturating_add(absence), Own::Comes);
        }
    }

    /// Returns the members whose process runs.
    fn living(&self) -> Vec<MemberId> {
        self.members.keys().copied().filter(|id| self.world.state(*id).is_some()).collect()
    }

    /// Tells all living members which members do not answer.
    fn notice(&mut self) {
        let dead: Vec<MemberId> =
            self.members.keys().copied().filter(|id| self.world.state(*id).is_none()).collect();
        if !dead.is_empty() {
            self.noticed = Some(self.world.now);
        }
        for who in self.living() {
            for &lost in &dead {
                self.world.step(who, Event::Silent(lost));
            }
        }
    }

    /// Commits the round if the processes of all members of the newest view run and have entered this view.
    /// Otherwise schedules another check.
    fn look(&mut self) {
        let now = self.world.now;
        self.take_up_views();
        let living = self.living();
        let newest = living.iter().filter_map(|id| self.world.view(*id)).max_by_key(|view| view.epoch);
        let agrees = newest.is_some_and(|view| {
            view.members
                .iter()
                .all(|member| self.world.lives(member) && self.world.view(member.id) == Some(view))
        });
        if agrees {
            self.commit();
            return;
        }
        // A member that crashed in the meantime is noticed after its deadline.
        let silent = |id: &MemberId| self.world.state(*id).is_none();
        let known = |id: &MemberId| {
            living.iter().all(|who| self.world.state(*who).is_some_and(|state| state.silent().contains(id)))
        };
        let round = self.round;
        if self.members.keys().any(|id| silent(id) && !known(id)) {
            self.world.plan(now.saturating_add(self.churn.noticed[1]), Own::Notice { round });
        } else {
            // Training frames carry the sender's epoch. They bring the view to members that missed it.
            if let (Some(one), Some(other)) =
                (self.world.draw.one_of(&living), self.world.draw.one_of(&living))
                && let Some(at) = self.world.view(one).map(View::id)
            {
                self.world.send(one, other, Message::Here { at });
            }
            self.world.plan(now.saturating_add(LOOK), Own::Look { round });
        }
    }

    /// Updates `members` and the statistics to the newest view.
    fn take_up_views(&mut self) {
        let now = self.world.now;
        let newest = self.world.running().into_iter().filter_map(|id| self.world.view(id));
        let Some(newest) = newest.max_by_key(|view| view.epoch).cloned() else { return };
        let ids = newest.ids();
        let stays = &mut self.outcome.stays;
        let mut is_removed = false;
        self.members.retain(|&who, &mut from| {
            if !ids.contains(&who) {
                stays.push(Stay { who, from, to: now });
                is_removed = true;
            }
            ids.contains(&who)
        });
        if let Some(noticed) = self.noticed.take_if(|_| is_removed) {
            let took = now.saturating_sub(noticed);
            self.outcome.slowest_view = self.outcome.slowest_view.max(took);
        }
        for who in ids {
            if self.members.insert(who, now).is_none() {
                self.outcome.admitted += 1;
                let wait = self.ready.remove(&who).map_or(Nanos::ZERO, |since| now.saturating_sub(since));
                self.outcome.longest_wait = self.outcome.longest_wait.max(wait);
            }
        }
        let ended = |id: &MemberId| self.world.machines.get(id).and_then(|machine| machine.ended.clone());
        let ends: Vec<(MemberId, Reason)> =
            self.since.keys().filter_map(|id| Some((*id, ended(id)?))).collect();
        for (who, reason) in ends {
            self.outcome.left += u32::from(reason == Reason::Left);
            self.gone(who);
        }
    }

    /// Commits the round, lets leaves and admissions be proposed, and begins the next round.
    fn commit(&mut self) {
        let now = self.world.now;
        self.outcome.rounds += 1;
        self.done += self.members.len() as u64;
        self.outcome.longest_gap = self.outcome.longest_gap.max(now.saturating_sub(self.begun));
        (self.begun, self.noticed) = (now, None);
        self.round += 1;
        let members = self.living();
        for who in self.ready.keys().copied().collect::<Vec<_>>() {
            let me = self.world.state(who).map(|state| *state.me());
            if let (Some(me), Some(host)) = (me, self.world.draw.one_of(&members)) {
                self.world.step(host, Event::Ready(me));
            }
        }
        for who in members {
            self.world.step(who, Event::Admit);
        }
        self.world.plan(now.saturating_add(self.churn.round), Own::Done { round: self.round });
    }

    fn outcome(mut self) -> ChurnOutcome {
        let end = self.churn.span;
        for since in self.since.values() {
            self.alive += end.saturating_sub(*since).0 as f64;
        }
        let last = end.saturating_sub(self.begun);
        self.outcome.longest_gap = self.outcome.longest_gap.max(last);
        let stays = self.members.iter().map(|(&who, &from)| Stay { who, from, to: end });
        self.outcome.stays.extend(stays);
        self.outcome.stays.sort_by_key(|stay| (stay.from, stay.who));
        self.outcome.views = self.world.history.decided() as u32;
        let done = self.done as f64 * self.churn.round.0 as f64;
        self.outcome.goodput = done / self.alive;
        self.outcome.of_all = done / (f64::from(self.churn.machines) * end.0 as f64);
        self.outcome.breaches = self.world.history.breaches;
        if self.outcome.longest_gap > STUCK {
            self.outcome.breaches.push(Breach::Stuck);
        }
        self.outcome
    }
}
