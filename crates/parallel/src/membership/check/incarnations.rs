//! A run that is started again while the older one may still be in progress: the fault, and the checks.

use std::collections::{BTreeMap, BTreeSet};

use super::super::state::OlderRun;
use super::super::{Member, MemberId, Start, State, View};
use super::faults::Storm;
use super::history::Breach;

/// Whether the living processes of an incarnation can continue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Strength {
    /// They are a majority of the newest view and of every view that may follow.
    Majority,
    /// They are no majority of any of these views.
    Minority,
    /// They are a majority of some of these views.
    Uncertain,
}

impl Storm {
    /// Crashes the host, if it runs, and starts the run again from the view on its disk, as a new incarnation.
    /// The other machines may be alive, dead, or cut off.
    ///
    /// All of a trial's incarnations are started by the same machine, which never uses a number twice.
    pub(super) fn start_again(&mut self) {
        let has_view = |id: &MemberId| self.world.machines[id].disk.is_some();
        let machines: Vec<MemberId> = self.world.machines.keys().copied().filter(has_view).collect();
        let Some(host) = self.host.or_else(|| self.world.draw.one_of(&machines)) else { return };
        self.host = Some(host);
        if self.world.start_again(host, u64::from(self.outcome.incarnations) + 2) {
            self.outcome.incarnations += 1;
            self.begin_looking(host);
        }
    }

    /// Returns the incarnation that must continue: the oldest whose living processes are a majority. `None` if
    /// there is none, or if it is not certain of an incarnation whether its processes are a majority.
    pub(super) fn expected_survivor(&self) -> Option<u64> {
        let incarnations = self.incarnations().into_iter();
        let strengths: BTreeMap<u64, Strength> =
            incarnations.map(|incarnation| (incarnation, self.strength(incarnation))).collect();
        let has_majority = |incarnation| strengths.get(&incarnation) == Some(&Strength::Majority);
        let is_certain = strengths.values().all(|strength| *strength != Strength::Uncertain);
        let is_certain = is_certain && self.outdated_refusals().into_iter().all(has_majority);
        strengths.keys().copied().find(|&incarnation| is_certain && has_majority(incarnation))
    }

    /// Returns the older incarnations that have just rejected a newer one by members that have stopped since.
    /// If others reject it too, it stops, although they are no majority.
    fn outdated_refusals(&self) -> BTreeSet<u64> {
        let states = self.world.machines.values().filter_map(|machine| machine.state.as_ref());
        let older = states.flat_map(|state| &state.older);
        let is_outdated = |(incarnation, run): &(&u64, &OlderRun)| {
            run.valid_refusals(self.world.now, &self.world.settings).any(|id| !self.is_in(id, **incarnation))
        };
        older.filter(is_outdated).map(|(incarnation, _)| *incarnation).collect()
    }

    /// Returns whether a machine's process has a view of this incarnation.
    pub(super) fn is_in(&self, id: MemberId, incarnation: u64) -> bool {
        self.world.view(id).is_some_and(|view| view.incarnation == incarnation)
    }

    /// Returns the incarnations of the living processes.
    fn incarnations(&self) -> BTreeSet<u64> {
        let running = self.world.running();
        running.into_iter().filter_map(|id| self.world.view(id)).map(|view| view.incarnation).collect()
    }

    /// Returns whether the living processes are a majority of the newest view that one of them has in this
    /// incarnation, and of every view that may follow.
    fn strength(&self, incarnation: u64) -> Strength {
        let world = &self.world;
        let states = || {
            let states = world.machines.values().filter_map(|machine| machine.state.as_ref());
            states.filter(|state| state.view().is_some_and(|view| view.incarnation == incarnation))
        };
        let Some(newest) = states().filter_map(State::view).max_by_key(|view| view.id()) else {
            return Strength::Minority;
        };
        let accepted = states().filter_map(|state| state.durable()?.accepted.as_ref()).map(|vote| &vote.view);
        // Newcomers that have crashed may still be admitted.
        let dead: Vec<Member> =
            states().flat_map(State::ready).filter(|new| !world.lives(new)).copied().collect();
        let with_dead = newest.with(&dead, Start { weights: newest.weights, plan: newest.plan });
        let decided = world.history.since(newest.id()).filter(|view| view.incarnation == incarnation);
        let later = decided.chain(accepted.filter(|view| view.epoch > newest.epoch));
        let views: Vec<&View> = later.chain([newest]).chain(with_dead.as_ref()).collect();
        // A member that is about to leave does not count for certain: if all others are dead, the run ends when
        // it leaves. Nor does one that met a newer incarnation when it had no majority: it may stop before it
        // hears the others. A newcomer may be admitted by another incarnation first.
        let is_one = self.outcome.incarnations == 0;
        let stays = |id: &MemberId| {
            !world.leaves.contains(id)
                && world.state(*id).is_some_and(|state| state.superseded_by.is_none())
                && (is_one || self.is_in(*id, incarnation))
        };
        let is_majority = |view: &View| view.has_majority(&self.living(view).filter(stays).collect());
        if views.iter().all(|view| is_majority(view)) {
            Strength::Majority
        } else if views.iter().any(|view| self.is_majority(view)) {
            Strength::Uncertain
        } else {
            Strength::Minority
        }
    }

    /// Returns whether the living processes are a majority of a view.
    fn is_majority(&self, view: &View) -> bool {
        view.has_majority(&self.living(view).collect())
    }

    /// Returns the members of a view whose processes live and are not in another incarnation.
    fn living<'a>(&'a self, view: &'a View) -> impl Iterator<Item = MemberId> + 'a {
        let world = &self.world;
        let is_here = move |id| world.view(id).is_none_or(|own| own.incarnation == view.incarnation);
        let counts = move |member: &&Member| world.lives(member) && is_here(member.id);
        view.members.iter().filter(counts).map(|member| member.id)
    }

    /// Checks that at most one incarnation has a majority of living processes, and that it is the expected one.
    pub(super) fn check_incarnations(&mut self) {
        if let (Some(older), Some(newer)) = (self.expected, self.outcome.survivor)
            && older < newer
        {
            self.world.history.breaches.push(Breach::Overtaken { older, newer });
        }
        let in_progress = self.in_progress();
        if let (Some(&older), Some(&newer)) = (in_progress.first(), in_progress.last())
            && older != newer
        {
            self.world.history.breaches.push(Breach::Incarnations { older, newer });
        }
    }

    /// Returns whether two incarnations are in progress of which no process sends its view to the other one:
    /// the machine that started the newer one is gone, or all former members that it knew are.
    pub(super) fn is_apart(&self) -> bool {
        let in_progress = self.in_progress();
        let knows = |newer: u64, older: u64| {
            let states = self.world.machines.values().filter_map(|machine| machine.state.as_ref());
            let mut newer = states.filter(|state| self.is_in(state.me().id, newer));
            newer.any(|state| state.former.to.iter().any(|&id| self.is_in(id, older)))
        };
        in_progress.iter().any(|&newer| in_progress.range(..newer).any(|&older| !knows(newer, older)))
    }

    /// Returns the incarnations that have a majority of living processes.
    fn in_progress(&self) -> BTreeSet<u64> {
        let running = self.world.running();
        let views = running.into_iter().filter_map(|id| self.world.view(id));
        views.filter(|view| self.is_majority(view)).map(|view| view.incarnation).collect()
    }
}
