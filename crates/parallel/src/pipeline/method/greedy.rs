//! List scheduling: whoever can start first does. The rule behind the methods that follow arrivals.

use std::collections::BTreeSet;

use farflung_base::{Nanos, StageId};

use super::Lists;
use crate::pipeline::{Action, ComputeKind, Op, Placement};

/// What the rule looks at.
pub(super) struct Greedy<'a> {
    pub(super) placement: &'a Placement,
    pub(super) microbatches: u32,
    /// Microbatches that may be between the first stage's forward and its backward.
    pub(super) in_flight: u32,
    /// Forward and backward of each stage.
    pub(super) times: &'a dyn Fn(StageId) -> (Nanos, Nanos),
    /// From one rank to another.
    pub(super) hop: Nanos,
}

/// In which order ready actions are taken: start, backward before forward, then the forward nearest to the output
/// and the backward nearest to the input.
type Key = (Nanos, bool, i64, u32, StageId);

struct State<'a> {
    rule: &'a Greedy<'a>,
    /// When each stage's next forward and backward can start, if not for the rank; `None`: not known yet.
    arrivals: [Vec<Vec<Option<Nanos>>>; 2],
    /// The next microbatch of each stage, forward and backward.
    next: [Vec<u32>; 2],
    free: Vec<Nanos>,
    candidates: BTreeSet<Key>,
    /// What of each stage stands among the candidates.
    listed: [Vec<Option<Key>>; 2],
    lists: Lists,
}

/// Commits the first candidate again and again until nothing is left.
pub(super) fn lists(rule: &Greedy<'_>) -> Lists {
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
        state.commit(start, usize::from(!forward), stage);
    }
    state.lists
}

impl State<'_> {
    /// Brings a stage's candidates up to date.
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
            if entering && self.next[0][s] - self.next[1][s] >= self.rule.in_flight {
                continue;
            }
            let (forward, order) = (way == 0, i64::from(stage.0));
            let key = (free.max(arrival), forward, if forward { -order } else { order }, microbatch, stage);
            self.listed[way][s] = Some(key);
            self.candidates.insert(key);
        }
    }

    fn commit(&mut self, start: Nanos, way: usize, stage: StageId) {
        let placement = self.rule.placement;
        let (s, rank) = (stage.index(), placement.rank(stage));
        let microbatch = self.next[way][s];
        self.listed[way][s] = None;
        self.next[way][s] += 1;
        let (forward, backward) = (self.rule.times)(stage);
        let end = start + if way == 0 { forward } else { backward };
        self.free[rank.index()] = end;
        let kind = if way == 0 { ComputeKind::Forward } else { ComputeKind::Backward };
        self.lists[rank.index()].push(Op::Run(Action::new(kind, stage.0, microbatch)));
        let to = match (way, placement.next(stage), placement.previous(stage)) {
            (0, Some(next), _) => Some((0, next)),
            (0, None, _) => Some((1, stage)),
            (_, _, previous) => previous.map(|p| (1, p)),
        };
        if let Some((way, to)) = to {
            let hop = if placement.rank(to) == rank { Nanos::ZERO } else { self.rule.hop };
            self.arrivals[way][to.index()][microbatch as usize] = Some(end + hop);
            self.list(to);
        }
        let own: Vec<StageId> = placement.stages_of(rank).collect();
        for stage in own {
            self.list(stage);
        }
    }
}
