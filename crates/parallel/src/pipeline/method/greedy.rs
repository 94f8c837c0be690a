//! List scheduling: the action that can start first runs first. Used by Hanayo, Varuna and
//! [`ArrivalRule::order_at`].

use std::collections::BTreeSet;

use farflung_base::{Nanos, Rank, StageId};

use super::Lists;
use crate::pipeline::order::flow::Clock;
use crate::pipeline::{Action, ArrivalRule, ComputeKind, Op, Placement};

/// Input of the list scheduler.
pub(in crate::pipeline) struct Greedy<'a> {
    pub(in crate::pipeline) placement: &'a Placement,
    pub(in crate::pipeline) microbatches: u32,
    pub(in crate::pipeline) arrivals: ArrivalRule,
}

/// Clock with a fixed duration for each stage's forward and backward, and for messages.
pub(super) struct Even<'a> {
    /// Forward and backward time of each stage.
    pub(super) times: &'a dyn Fn(StageId) -> (Nanos, Nanos),
    /// Time of a message from one rank to another.
    pub(super) hop: Nanos,
    /// Time at which each rank is free.
    pub(super) free: Vec<Nanos>,
}

impl Clock for Even<'_> {
    fn run(&mut self, rank: Rank, _: usize, op: Op, ready: Nanos) -> Nanos {
        let free = &mut self.free[rank.index()];
        for action in op.actions() {
            let (forward, backward) = (self.times)(action.stage);
            *free = ready.max(*free) + if action.yields_gradient() { backward } else { forward };
        }
        *free
    }

    fn deliver(&mut self, _: Action, _: StageId, at: Nanos) -> Nanos {
        at + self.hop
    }
}

/// Priority of a ready action, in this order: earliest start, backward before forward, then the forward nearest
/// to the output or the backward nearest to the input.
type Key = (Nanos, bool, i64, u32, StageId);

struct State<'a> {
    rule: &'a Greedy<'a>,
    /// Time at which the input of each stage's forward and backward arrives, by microbatch; `None`: not known
    /// yet.
    arrivals: [Vec<Vec<Option<Nanos>>>; 2],
    /// Next microbatch of each stage, for forwards and for backwards.
    next: [Vec<u32>; 2],
    free: Vec<Nanos>,
    candidates: BTreeSet<Key>,
    /// Key of each stage's forward and backward among the candidates.
    listed: [Vec<Option<Key>>; 2],
    lists: Lists,
}

/// Generates the ranks' lists of computations: repeatedly takes the first candidate until none is left.
pub(in crate::pipeline) fn lists(rule: &Greedy<'_>, clock: &mut impl Clock) -> Lists {
    let stages = rule.placement.stages() as usize;
    let unknown = vec![vec![None; rule.microbatches as usize]; stages];
    let mut state = State {
        rule,
        arrivals: [unknown.clone(), unknown],
        next: [vec![0; stages], vec![0; stages]],
        free: vec![Nanos::ZERO; rule.placement.ranks() as usize],
        candidates: BTreeSet::new(),
        listed: [vec![None; stages], vec![None; stages]],
        lists: vec![Vec::new(); rule.placement.ranks() as usize],
    };
    for stage in (0..rule.placement.stages()).map(StageId).filter(|&s| rule.placement.is_first(s)) {
        state.arrivals[0][stage.index()].fill(Some(Nanos::ZERO));
        state.list(stage);
    }
    while let Some((start, forward, _, _, stage)) = state.candidates.pop_first() {
        state.commit(start, usize::from(!forward), stage, clock);
    }
    state.lists
}

impl State<'_> {
    /// Updates the candidates of a stage: its next forward and its next backward.
    fn list(&mut self, stage: StageId) {
        let s = stage.index();
        let free = self.free[self.rule.placement.rank(stage).index()];
        for way in 0..2 {
            if let Some(key) = self.listed[way][s].take() {
                self.candidates.remove(&key);
            }
            let microbatch = self.next[way][s];
            let Some(&Some(arrival)) = self.arrivals[way][s].get(microbatch as usize) else { continue };
            let entering = way == 0 && self.rule.placement.is_first(stage);
            if entering && !self.rule.arrivals.admits(self.next[0][s], self.next[1][s]) {
                continue;
            }
            let (forward, order) = (way == 0, i64::from(stage.0));
            let key = (free.max(arrival), forward, if forward { -order } else { order }, microbatch, stage);
            self.listed[way][s] = Some(key);
            self.candidates.insert(key);
        }
    }

    fn commit(&mut self, start: Nanos, way: usize, stage: StageId, clock: &mut impl Clock) {
        let placement = self.rule.placement;
        let (s, rank) = (stage.index(), placement.rank(stage));
        let microbatch = self.next[way][s];
        self.listed[way][s] = None;
        self.next[way][s] += 1;
        let kind = if way == 0 { ComputeKind::Forward } else { ComputeKind::Backward };
        let action = Action::new(kind, stage.0, microbatch);
        let list = &mut self.lists[rank.index()];
        let end = clock.run(rank, list.len(), action.into(), start);
        list.push(action.into());
        self.free[rank.index()] = end;
        let to = match (way, placement.next(stage), placement.previous(stage)) {
            (0, Some(next), _) => Some((0, next)),
            (0, None, _) => Some((1, stage)),
            (_, _, previous) => previous.map(|p| (1, p)),
        };
        if let Some((way, to)) = to {
            let arrival = if placement.rank(to) == rank { end } else { clock.deliver(action, to, end) };
            self.arrivals[way][to.index()][microbatch as usize] = Some(arrival);
            self.list(to);
        }
        let own: Vec<StageId> = placement.stages_of(rank).collect();
        for stage in own {
            self.list(stage);
        }
    }
}
