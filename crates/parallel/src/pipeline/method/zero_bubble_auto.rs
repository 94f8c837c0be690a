//! The automatic zero-bubble scheduler: generates an order within a memory limit.

use farflung_base::Nanos;

use super::row::{Row, Sizes, UsedSetting};
use super::{Lists, Method, Settings};
use crate::ParallelError;
use crate::pipeline::{Action, ComputeKind, Op, StageCost};

/// This method's entry in the table of pipeline methods.
pub(super) const ROW: Row = Row {
    name: "zb-auto",
    summary: "split backward, ordered under a memory limit",
    reads: &[UsedSetting::Costs, UsedSetting::Memory],
    lists: |asked| lists(asked.settings),
    // An activation takes two of the `2 memory` units of memory, and one unit after its I has run. So up to `2
    // memory - 1` activations fit.
    peak: |settings, Sizes { p, m, .. }| m.min((2 * settings.memory.map_or(p, u64::from)).saturating_sub(1)),
    ..Row::PLAIN
};

/// Generates the ranks' lists of computations: tries all settings of the heuristic and keeps the order in which
/// the longest span of a rank is shortest.
///
/// A forward takes two units of memory, and each half of its backward frees one.
///
/// Errors: [`ParallelError::NotAdmitted`] if a rank cannot proceed within the limit. Source: Qi et al. 2023,
/// "Zero Bubble Pipeline Parallelism", section 3.1, following the authors' `zb.py`.
pub(super) fn lists(settings: &Settings) -> Result<Lists, ParallelError> {
    let (p, m) = (settings.ranks, settings.microbatches);
    let limit = settings.memory.unwrap_or(p);
    let costs: Vec<StageCost> = (0..p).map(|stage| settings.cost(stage)).collect();
    let mut best: Option<(Nanos, Lists)> = None;
    for i in 0..8_u8 {
        let flags = Flags {
            bubble_before_first_backward: i & 4 == 0,
            prioritize_backward: i & 2 == 0,
            fill_small_gaps: i & 1 == 0,
        };
        let limit = 2 * i64::from(limit);
        let Some(table) = Table::new(&costs, settings.hop, m, limit, flags).fill() else { continue };
        let span = table.span();
        if best.as_ref().is_none_or(|(least, _)| span < *least) {
            best = Some((span, table.lists));
        }
    }
    let needs = || "room for the activations of one microbatch".to_owned();
    best.map(|(_, lists)| lists).ok_or_else(|| ParallelError::NotAdmitted {
        method: Method::ZbAuto,
        field: "memory",
        given: u64::from(limit),
        needs: needs(),
    })
}

#[derive(Debug, Clone, Copy)]
struct Flags {
    /// Warm-up forwards must end before the first gradient arrives, which can leave a bubble before the first
    /// backward. If false, the last warm-up forward may end later.
    bubble_before_first_backward: bool,
    /// A stage that is two forwards ahead of the next stage postpones a forward that would delay its next
    /// backward, unless waiting for that backward would make its bubble the longest of all stages.
    prioritize_backward: bool,
    /// W also runs in a gap that is too short for it if leaving the gap idle would not make this stage the one
    /// with the longest bubble.
    fill_small_gaps: bool,
}

const F: usize = 0;
const I: usize = 1;
const W: usize = 2;

/// The actions placed so far.
struct Table<'a> {
    costs: &'a [StageCost],
    hop: Nanos,
    m: usize,
    limit: i64,
    flags: Flags,
    /// End of each action of a stage, by kind and microbatch.
    ends: Vec<[Vec<Nanos>; 3]>,
    /// Time at which each stage is free.
    free: Vec<Nanos>,
    memory: Vec<i64>,
    /// Idle time of each stage after its first forward (`bubble`), and the longest of these times.
    bubble: Vec<Nanos>,
    longest_bubble: Nanos,
    lists: Lists,
}

impl<'a> Table<'a> {
    fn new(costs: &'a [StageCost], hop: Nanos, m: u32, limit: i64, flags: Flags) -> Self {
        let p = costs.len();
        Self {
            costs,
            hop,
            m: m as usize,
            limit,
            flags,
            ends: vec![Default::default(); p],
            free: vec![Nanos::ZERO; p],
            memory: vec![0; p],
            bubble: vec![Nanos::ZERO; p],
            longest_bubble: Nanos::ZERO,
            lists: vec![Vec::new(); p],
        }
    }

    fn stages(&self) -> usize {
        self.costs.len()
    }

    fn count(&self, stage: usize, kind: usize) -> usize {
        self.ends[stage][kind].len()
    }

    fn cost(&self, stage: usize, kind: usize) -> Nanos {
        let cost = &self.costs[stage];
        [cost.forward, cost.input, cost.weight][kind]
    }

    /// Returns the time at which the input of a stage's next F or I arrives.
    fn arrival(&self, stage: usize, kind: usize) -> Nanos {
        let from = if kind == F { stage.checked_sub(1) } else { Some(stage + 1) };
        let end = from.and_then(|s| self.ends.get(s)?[kind].get(self.count(stage, kind)));
        end.map_or(Nanos::ZERO, |&end| end + self.hop)
    }

    fn put(&mut self, stage: usize, kind: usize) {
        let arrival = if kind == W { Nanos::ZERO } else { self.arrival(stage, kind) };
        let start = self.free[stage].max(arrival);
        if self.count(stage, F) > 0 {
            self.bubble[stage] += start - self.free[stage];
            self.longest_bubble = self.longest_bubble.max(self.bubble[stage]);
        }
        let end = start + self.cost(stage, kind);
        self.free[stage] = end;
        self.memory[stage] += [2, -1, -1][kind];
        let i = self.count(stage, kind) as u32;
        self.ends[stage][kind].push(end);
        let kinds = [ComputeKind::Forward, ComputeKind::BackwardInput, ComputeKind::BackwardWeight];
        self.lists[stage].push(Op::Run(Action::new(kinds[kind], stage as u32, i)));
    }

    fn has_weight(&self, stage: usize) -> bool {
        self.count(stage, W) < self.count(stage, I)
    }

    /// Places all actions. `None` if they do not fit within the limit.
    fn fill(mut self) -> Option<Self> {
        if self.limit < 2 {
            return None;
        }
        self.warm_up();
        for i in 1..self.m {
            let forwards = self.forwards_wanted();
            for (stage, wanted) in forwards.into_iter().enumerate() {
                if wanted {
                    self.make_room(stage, F)?;
                    self.fill_gap(stage, F);
                    self.put(stage, F);
                }
            }
            for stage in (0..self.stages()).rev() {
                debug_assert_eq!(self.count(stage, I), i);
                self.make_room(stage, I)?;
                self.fill_gap(stage, I);
                if stage == 0 && self.count(0, F) == self.m {
                    while self.has_weight(0) {
                        self.put(0, W);
                    }
                }
                self.put(stage, I);
            }
        }
        for stage in 0..self.stages() {
            while self.count(stage, W) < self.m {
                self.put(stage, W);
            }
        }
        Some(self)
    }

    /// Places the first forward of every stage, as many more as fit before the first backward, and that
    /// backward.
    fn warm_up(&mut self) {
        let p = self.stages();
        for stage in 0..p {
            self.put(stage, F);
        }
        let mut extra = vec![0_usize; p];
        let mut backward = self.free[p - 1] + self.cost(p - 1, I);
        for stage in (0..p - 1).rev() {
            let (mut memory, mut end) = (self.memory[stage], self.free[stage]);
            let arrival = backward + self.hop;
            while 1 + extra[stage] < self.m && memory + 2 <= self.limit {
                let next = end + self.cost(stage, F);
                let late =
                    if self.flags.bubble_before_first_backward { next > arrival } else { end >= arrival };
                if late {
                    break;
                }
                memory += 2;
                end = next;
                extra[stage] += 1;
            }
            backward = end.max(arrival) + self.cost(stage, I);
        }
        for stage in 1..p {
            while extra[stage] > 0 && extra[stage] >= extra[stage - 1] && 1 + extra[stage] < self.m {
                extra[stage] -= 1;
            }
        }
        for (stage, extra) in extra.into_iter().enumerate() {
            for _ in 0..extra {
                self.put(stage, F);
            }
        }
        for stage in (0..p).rev() {
            self.put(stage, I);
        }
    }

    /// Returns which stages run a forward in this round. A stage runs one only if the next stage does too.
    fn forwards_wanted(&self) -> Vec<bool> {
        let mut wanted: Vec<bool> = (0..self.stages()).map(|stage| self.wants_forward(stage)).collect();
        for stage in (0..wanted.len().saturating_sub(1)).rev() {
            wanted[stage] &= wanted[stage + 1];
        }
        wanted
    }

    fn wants_forward(&self, stage: usize) -> bool {
        if self.count(stage, F) >= self.m {
            return false;
        }
        let next = stage + 1;
        let far_ahead = next < self.stages() && self.count(stage, F) >= self.count(next, F) + 2;
        if !far_ahead || !self.flags.prioritize_backward {
            return true;
        }
        let free = self.free[stage];
        let gradient = self.free[next] + self.cost(next, F) + self.cost(next, I) + self.hop;
        if free >= gradient {
            return false;
        }
        let (mut weights, mut memory) = (0, self.memory[stage] + 2);
        let mut room = Nanos::ZERO;
        while memory > self.limit && self.count(stage, W) + weights < self.count(stage, I) {
            room += self.cost(stage, W);
            memory -= 1;
            weights += 1;
        }
        let in_time = free + self.cost(stage, F) + room <= gradient;
        in_time || gradient - free > self.longest_bubble - self.bubble[stage]
    }

    /// Runs W until the memory for the next action fits. `None` if it cannot.
    fn make_room(&mut self, stage: usize, kind: usize) -> Option<()> {
        let needs = if kind == F { 2 } else { -1 };
        while self.memory[stage] + needs > self.limit {
            if !self.has_weight(stage) {
                return None;
            }
            self.put(stage, W);
        }
        Some(())
    }

    /// Runs W until the input of the next action arrives.
    fn fill_gap(&mut self, stage: usize, kind: usize) {
        if (kind == F && stage == 0) || (kind == I && stage + 1 == self.stages()) {
            return;
        }
        let arrival = self.arrival(stage, kind);
        while self.has_weight(stage) && self.free[stage] + self.cost(stage, W) <= arrival {
            self.put(stage, W);
        }
        if self.has_weight(stage) && self.free[stage] < arrival {
            let small = arrival - self.free[stage] <= self.longest_bubble - self.bubble[stage];
            if !small || self.flags.fill_small_gaps {
                self.put(stage, W);
            }
        }
    }

    /// Returns the longest time, over all stages, from the start of the first forward to the end of the last W.
    fn span(&self) -> Nanos {
        let span = |(stage, ends): (usize, &[Vec<Nanos>; 3])| {
            let start = ends[F].first().map_or(Nanos::ZERO, |&end| end - self.cost(stage, F));
            ends[W].last().map_or(Nanos::ZERO, |&end| end - start)
        };
        self.ends.iter().enumerate().map(span).max().unwrap_or_default()
    }
}
