//! Machines come and go for a day.

use std::collections::BTreeMap;

use farflung_base::Nanos;

use super::super::{Event, Member, MemberId, Message, Place, Reason, Settings, Start, State, View};
use super::draw::Draw;
use super::history::Breach;
use super::world::{Weather, World};
use crate::plan::Digest;

/// A day of machines that come and go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Churn {
    /// Machines at the start; each that ends is replaced.
    pub machines: u32,
    /// The mean time until a machine ends.
    pub life: Nanos,
    /// How many of a hundred leave politely; the others die.
    pub polite: u64,
    /// The mean time until a machine that ended is replaced.
    pub absence: Nanos,
    /// How long a newcomer fetches the state.
    pub fetch: Nanos,
    /// How long members work between two commits.
    pub round: Nanos,
    /// From the end of a round until a member whose connection broke, or that says nothing, is given up.
    pub noticed: [Nanos; 2],
    /// How long it goes on.
    pub span: Nanos,
    /// Of everything random.
    pub seed: u64,
}

impl Churn {
    /// 16 machines with a mean life of 2 hours, rounds of a minute, for 24 hours.
    ///
    /// A broken connection is noticed after a second, silence after 10: half of those that die do either. A
    /// third leaves politely. Another machine comes after 5 minutes on average and fetches the state in one.
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

/// What a day comes to.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ChurnOutcome {
    /// Rounds that were committed.
    pub rounds: u32,
    /// Views after the first.
    pub views: u32,
    /// Members that died, and that left.
    pub died: u32,
    /// Members that left politely.
    pub left: u32,
    /// Newcomers that became members.
    pub admitted: u32,
    /// The longest wait of one that was ready.
    pub longest_wait: Nanos,
    /// The longest time between two commits.
    pub longest_gap: Nanos,
    /// The longest time from giving a member up to the view without it.
    pub slowest_view: Nanos,
    /// Committed member-rounds over what all machines that were alive could have done meanwhile.
    pub goodput: f64,
    /// The same over what so many machines as at the start could have done.
    pub of_all: f64,
    /// Promises that were broken.
    pub breaches: Vec<Breach>,
    /// Who was a member from when to when.
    pub stays: Vec<Stay>,
}

/// A membership.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stay {
    /// The machine.
    pub who: MemberId,
    /// When the first view with it was installed.
    pub from: Nanos,
    /// When the first view without it was, or when the day ended.
    pub to: Nanos,
}

/// What the trial plans.
#[derive(Debug, Clone, Copy)]
enum Own {
    /// A machine ends.
    Ends(MemberId),
    /// Another machine comes.
    Comes,
    /// A newcomer has fetched the state.
    Fetched(MemberId),
    /// The members' work of this round is done.
    Done { round: u32 },
    /// Members that do not answer are given up.
    Notice { round: u32 },
    /// Looks whether members agree, so that the round can be committed.
    Look { round: u32 },
}

/// Between two looks while the members decide.
const LOOK: Nanos = Nanos::from_millis(20);
/// A day without a commit for so long has failed.
const STUCK: Nanos = Nanos::from_millis(1_800_000);

/// Runs a day.
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
    /// When machines came.
    since: BTreeMap<MemberId, Nanos>,
    /// Newcomers that have the state, and since when.
    ready: BTreeMap<MemberId, Nanos>,
    /// Members, and since when.
    members: BTreeMap<MemberId, Nanos>,
    round: u32,
    begun: Nanos,
    /// When members were given up in this round.
    noticed: Option<Nanos>,
    machines: u32,
    /// Nanoseconds that machines were alive.
    alive: f64,
    /// Member-rounds that were committed.
    done: u64,
}

impl Day {
    fn new(churn: Churn) -> Self {
        let weather = Weather { loss: 1, twice: 1, delay: Nanos::from_millis(100) };
        let world = World::new(Draw::new(churn.seed, 0), weather, Settings::default());
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
        let Ok(first) = View::first(Place { incarnation: 1, epoch: 1 }, &members, start) else { return day };
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

    /// A machine is there from now on, for a while.
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

    /// A machine ends: a member politely at times.
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

    /// A machine is gone; another one comes later.
    fn gone(&mut self, who: MemberId) {
        let now = self.world.now;
        self.ready.remove(&who);
        if let Some(since) = self.since.remove(&who) {
            self.alive += now.saturating_sub(since).0 as f64;
            let absence = self.world.draw.exponential(self.churn.absence);
            self.world.plan(now.saturating_add(absence), Own::Comes);
        }
    }

    /// Members that run.
    fn living(&self) -> Vec<MemberId> {
        self.members.keys().copied().filter(|id| self.world.state(*id).is_some()).collect()
    }

    /// All that live give up those that do not answer.
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

    /// Commits where all members of the newest view live and have it; else looks again.
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
        // One that died since is given up, too, after its deadline.
        let silent = |id: &MemberId| self.world.state(*id).is_none();
        let known = |id: &MemberId| {
            living.iter().all(|who| self.world.state(*who).is_some_and(|state| state.silent().contains(id)))
        };
        let round = self.round;
        if self.members.keys().any(|id| silent(id) && !known(id)) {
            self.world.plan(now.saturating_add(self.churn.noticed[1]), Own::Notice { round });
        } else {
            // A member that missed the view sends a frame of the training.
            if let (Some(one), Some(other)) =
                (self.world.draw.one_of(&living), self.world.draw.one_of(&living))
                && let Some(at) = self.world.view(one).map(View::place)
            {
                self.world.send(one, other, Message::Here { at });
            }
            self.world.plan(now.saturating_add(LOOK), Own::Look { round });
        }
    }

    /// Newcomers that a view admits, and members that none has any more.
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

    /// The round counts. Leaves and admissions are proposed; the next round begins.
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
