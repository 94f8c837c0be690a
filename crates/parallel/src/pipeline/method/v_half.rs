//! V-Half and V-Min: a V-shaped placement of stages whose repeated building block bounds the memory of a rank.

use super::Lists;
use super::row::{Row as Method, Sizes};
use crate::pipeline::{Action, Op};

/// Entry of V-Half in the table of pipeline methods.
pub(super) const HALF: Method = Method {
    name: "v-half",
    summary: "split backward on a V of stages, half the memory of 1F1B",
    lists: |asked| Ok(lists(asked.ranks, asked.microbatches, &half(asked.ranks))),
    peak: |_, Sizes { p, .. }| 2 * (p / 2) + 2,
    ..Method::VEE
};

/// Entry of V-Min in the table of pipeline methods.
pub(super) const MIN: Method = Method {
    name: "v-min",
    summary: "split backward on a V of stages, a third of the memory of 1F1B",
    lists: |asked| Ok(lists(asked.ranks, asked.microbatches, &min(asked.ranks))),
    peak: |_, Sizes { p, .. }| 2 * ((p + 1) / 3) + 2,
    ..Method::VEE
};

/// Time slots of a rank's actions on one microbatch, in this order: forward of stage a, forward of z, input
/// gradient of z, input gradient of a. Stage a is the rank's stage on the way over the ranks, z its stage on
/// the way back.
pub(super) type Block = [u32; 4];

/// Number of time slots from one microbatch to the next. A rank does six actions per microbatch.
const PERIOD: u32 = 6;

/// Returns the building block of V-Half for each rank.
pub(super) fn half(p: u32) -> Vec<Block> {
    let gap = if p.is_multiple_of(2) { 3 } else { 0 };
    (0..p).map(|i| [2 * i, 3 * p - i - 2, 3 * p + gap + 2 * i - 1, 6 * p + gap - i - 2]).collect()
}

/// Returns the building block of V-Min for each rank.
pub(super) fn min(p: u32) -> Vec<Block> {
    let gap = if p.is_multiple_of(3) { 2 } else { 0 };
    (0..p).map(|i| [i, 2 * p - i - 1, 2 * p + gap + i, 4 * p + gap - i - 1]).collect()
}

/// Generates the ranks' lists of computations: repeats the block for each microbatch, moves actions earlier
/// where this needs no more memory, and places W where a rank is idle.
///
/// Source: Qi et al. 2024, "Pipeline Parallelism with Controllable Memory", sections 3 and 4 and appendix; the
/// moves are those of the authors' `zbv_greedy.py`.
pub(super) fn lists(p: u32, m: u32, blocks: &[Block]) -> Lists {
    let repeat = |first: u32| (0..m).map(|i| first + PERIOD * i).collect();
    let plan: Vec<Row> = blocks.iter().map(|block| block.map(repeat).to_vec()).collect();
    let plan = without_weights(reorder(plan.into_iter().map(with_weights).collect()));
    let plan = without_weights(reorder(plan));
    let list = |(r, row): (u32, &Row)| {
        let (a, z) = (r, 2 * p - 1 - r);
        let mut slots: Vec<(u32, Action)> = Vec::with_capacity(6 * m as usize);
        for (kind, stage) in [
            (0, Action::forward(a, 0)),
            (1, Action::forward(z, 0)),
            (2, Action::input(z, 0)),
            (3, Action::input(a, 0)),
        ] {
            slots.extend((0..).zip(&row[kind]).map(|(i, &slot)| (slot, Action { microbatch: i, ..stage })));
        }
        for (stage, idle) in [z, a].into_iter().zip(idle_slots(row, 2)) {
            slots.extend((0..).zip(idle).map(|(i, slot)| (slot, Action::weight(stage, i))));
        }
        slots.sort_unstable();
        slots.into_iter().map(|(_, action)| Op::Run(action)).collect()
    };
    (0..p).zip(&plan).map(list).collect()
}

/// Time slots of one rank's actions, by kind and microbatch. The kinds are the four of [`Block`], and then, if
/// W is placed, W of both stages together.
type Row = Vec<Vec<u32>>;

/// Returns the slots for W: each idle slot takes the W of an I before it. With two queues, the slots for z come
/// before those for a; with one, the two are not distinguished.
fn idle_slots(row: &Row, queues: usize) -> Vec<Vec<u32>> {
    let bound = row[..4].iter().filter_map(|slots| slots.last()).max().copied().unwrap_or_default();
    let mut kinds = vec![None; bound as usize + 1];
    for (kind, slots) in row[..4].iter().enumerate() {
        for &slot in slots {
            kinds[slot as usize] = Some(kind);
        }
    }
    let mut idle = vec![Vec::new(); queues];
    let mut pending = vec![0_usize; queues];
    let slots = (0..).zip(kinds.into_iter().chain(std::iter::repeat(None)));
    for (slot, kind) in slots {
        match kind {
            Some(kind @ 2..) => pending[(kind - 2) % queues] += 1,
            Some(_) => {}
            None => match pending.iter().position(|&n| n > 0) {
                Some(queue) => {
                    idle[queue].push(slot);
                    pending[queue] -= 1;
                }
                None if slot > bound => break,
                None => {}
            },
        }
    }
    idle
}

fn with_weights(mut row: Row) -> Row {
    let idle = idle_slots(&row, 1);
    row.extend(idle);
    row
}

fn without_weights(mut plan: Vec<Row>) -> Vec<Row> {
    for row in &mut plan {
        row.truncate(4);
    }
    plan
}

/// Returns every action of a plan in the order of time: slot, rank, kind, microbatch.
fn visits(plan: &[Row]) -> Vec<(u32, usize, usize, usize)> {
    let mut all = Vec::new();
    for (rank, row) in plan.iter().enumerate() {
        for (kind, slots) in row.iter().enumerate() {
            all.extend(slots.iter().enumerate().map(|(i, &slot)| (slot, rank, kind, i)));
        }
    }
    all.sort_unstable();
    all
}

/// Activations that one rank holds, slot by slot.
struct Memory {
    kinds: Vec<Option<usize>>,
    /// After each slot: number of activations held; and, if W is not placed, number of input backward passes
    /// (I) whose weight backward pass (W) has not run.
    held: Vec<(i32, i32)>,
    /// Whether W is placed. If not, idle slots are assumed to run W.
    placed: bool,
}

impl Memory {
    fn new(row: &Row) -> Self {
        let slots = row.iter().flatten().max().map_or(0, |&s| s as usize + 1);
        let mut kinds = vec![None; slots];
        for (kind, slots) in row.iter().enumerate() {
            for &slot in slots {
                kinds[slot as usize] = Some(kind);
            }
        }
        let mut memory = Self { held: Vec::new(), kinds, placed: row.len() > 4 };
        let mut state = (0, 0);
        for slot in 0..slots {
            state = memory.after(state, memory.kinds[slot]);
            memory.held.push(state);
        }
        memory
    }

    fn after(&self, (held, pending): (i32, i32), kind: Option<usize>) -> (i32, i32) {
        match kind {
            Some(0 | 1) => (held + 1, pending),
            Some(2 | 3) => (held, pending + 1),
            Some(_) => (held - 1, pending),
            None if !self.placed && pending > 0 => (held - 1, pending - 1),
            None => (held, pending),
        }
    }

    fn peak(&self) -> i32 {
        self.held.iter().map(|&(held, _)| held).max().unwrap_or_default()
    }

    /// Moves an action to the earlier, idle slot `to` if the peak stays within `limit`. Returns whether it did.
    fn try_move(&mut self, from: usize, to: usize, limit: i32) -> bool {
        let moved = |slot: usize| match slot {
            _ if slot == to => self.kinds[from],
            _ if slot == from => None,
            _ => self.kinds[slot],
        };
        let mut state = if to == 0 { (0, 0) } else { self.held[to - 1] };
        let mut held = Vec::new();
        for slot in to..self.kinds.len() {
            state = self.after(state, moved(slot));
            if state.0 > limit {
                return false;
            }
            if slot >= from && state == self.held[slot] {
                break;
            }
            held.push(state);
        }
        self.held[to..to + held.len()].copy_from_slice(&held);
        self.kinds.swap(from, to);
        true
    }
}

/// Moves actions outside the steady state earlier, in the order of time: each to the first idle slot after its
/// dependencies at which its rank's peak stays within the limit. Then closes the gaps.
///
/// If W is among the kinds, the start is reordered too; otherwise only the actions after the last forward of
/// the first rank.
fn reorder(mut plan: Vec<Row>) -> Vec<Row> {
    #[derive(PartialEq)]
    enum Phase {
        Start,
        Steady,
        End,
    }
    let mut memory: Vec<Memory> = plan.iter().map(Memory::new).collect();
    let limit = memory.iter().map(Memory::peak).max().unwrap_or_default();
    let placed = memory.first().is_some_and(|m| m.placed);
    let last = plan[0][0].len() - 1;
    let mut phase = Phase::Start;
    for (slot, rank, kind, microbatch) in visits(&plan) {
        if phase == Phase::Start && kind == 3 && rank == 0 {
            phase = Phase::Steady;
        }
        if phase == Phase::Steady {
            if kind == 0 && microbatch == last {
                phase = Phase::End;
            }
            continue;
        }
        if phase == Phase::Start && !placed {
            continue;
        }
        let earliest = earliest(&plan, rank, kind, microbatch);
        let memory = &mut memory[rank];
        let to = (earliest..slot as usize)
            .find(|&to| memory.kinds[to].is_none() && memory.try_move(slot as usize, to, limit));
        if let Some(to) = to {
            plan[rank][kind][microbatch] = to as u32;
        }
    }
    squeeze(&plan.into_iter().map(|row| if placed { row } else { with_weights(row) }).collect::<Vec<_>>())
}

/// Returns the first slot after all dependencies of an action.
fn earliest(plan: &[Row], rank: usize, kind: usize, microbatch: usize) -> usize {
    let row = &plan[rank];
    let mut after: Option<u32> = None;
    let mut needs = |slot: u32| after = after.max(Some(slot));
    match kind {
        0 | 2 if rank > 0 => needs(plan[rank - 1][kind][microbatch]),
        1 | 3 if rank + 1 < plan.len() => needs(plan[rank + 1][kind][microbatch]),
        4 => needs(nth_of_two(&row[2], &row[3], microbatch)),
        _ => {}
    }
    if (1..4).contains(&kind) {
        needs(row[kind - 1][microbatch]);
    }
    if microbatch > 0 {
        needs(row[kind][microbatch - 1]);
    }
    after.map_or(0, |slot| slot as usize + 1)
}

/// Returns the element at index `n` of two ascending lists merged.
fn nth_of_two(a: &[u32], b: &[u32], n: usize) -> u32 {
    let (mut i, mut j) = (0, 0);
    loop {
        let from_a = j == b.len() || (i < a.len() && a[i] <= b[j]);
        let next = if from_a { a[i] } else { b[j] };
        if i + j == n {
            return next;
        }
        if from_a { i += 1 } else { j += 1 }
    }
}

/// Runs a plan in its order. Each action starts as early as its rank and its dependencies allow. All actions
/// take one slot.
fn squeeze(plan: &[Row]) -> Vec<Row> {
    let mut squeezed: Vec<Row> = plan.to_vec();
    let mut free = vec![0_u32; plan.len()];
    for (_, rank, kind, microbatch) in visits(plan) {
        let mut start = free[rank];
        match kind {
            0 | 2 if rank > 0 => start = start.max(squeezed[rank - 1][kind][microbatch] + 1),
            1 | 3 if rank + 1 < plan.len() => start = start.max(squeezed[rank + 1][kind][microbatch] + 1),
            _ => {}
        }
        // Where the stages turn back, an action depends on one of the same rank. The rank's order already
        // respects this.
        squeezed[rank][kind][microbatch] = start;
        free[rank] = start + 1;
    }
    squeezed
}
