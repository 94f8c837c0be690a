//! V-1F1B: a V-shaped placement of stages with whole backwards, holding two thirds of the activations of 1F1B.

use super::Lists;
use crate::ParallelError;
use crate::pipeline::{Action, Op};

/// Content of a slot: the forward of a rank's stage on the way down (a) or back (z), or one of the two slots of
/// their backwards.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Cell {
    ForwardA,
    ForwardZ,
    /// The first slot of the backward of z.
    BackwardZ,
    /// The first slot of the backward of a.
    BackwardA,
    /// The second slot of the backward of z.
    RestZ,
    /// The second slot of the backward of a.
    RestA,
}

use super::row::{Row, Sizes};
use Cell::{BackwardA, BackwardZ, ForwardA, ForwardZ, RestA, RestZ};

/// This method's entry in the table of pipeline methods.
pub(super) const ROW: Row = Row {
    name: "v-1f1b",
    summary: "whole backward on a V of stages, two thirds of the memory of 1F1B",
    lists: |asked| match asked.ranks {
        0..=MOST_RANKS => Ok(lists(asked.ranks, asked.microbatches)),
        ranks => Err(ParallelError::TooManyRanks { ranks: ranks.into(), limit: MOST_RANKS.into() }),
    },
    peak: |_, Sizes { p, .. }| 2 * (2 * p + 1).div_ceil(3),
    ..Row::VEE
};

const CELLS: [Cell; 6] = [ForwardA, ForwardZ, BackwardZ, BackwardA, RestZ, RestA];

/// Greatest number of ranks: the search for slots needs memory for the square of it, 0.9 GB for this number.
const MOST_RANKS: u32 = 2048;

/// Number of time slots from one microbatch to the next.
const PERIOD: usize = 6;

type Slots = Vec<Option<Cell>>;

/// Generates the ranks' lists for `m` microbatches on `p` ranks: repeats the building block, removes the cells
/// that have no microbatch, and moves cells as early as their dependencies and the peak of memory allow.
///
/// Source: the zero-bubble authors' `v1f1b.py` (zbpp), for Qi et al. 2024, "Pipeline Parallelism with
/// Controllable Memory".
pub(super) fn lists(p: u32, m: u32) -> Lists {
    let (ranks, microbatches) = (p as usize, m as usize);
    let repeats = 4 * ranks + microbatches + 1;
    let mut plan: Vec<Slots> = building_block(ranks)
        .iter()
        .map(|block| {
            let mut period = [None; PERIOD];
            for (cell, &slot) in CELLS.into_iter().zip(block) {
                period[slot % PERIOD] = Some(cell);
            }
            period.repeat(repeats)
        })
        .collect();
    trim(&mut plan, microbatches);
    compact(&mut plan);
    let list = |(rank, slots): (u32, &Slots)| {
        let mut count = [0; 6];
        let actions = slots.iter().flatten().filter_map(|&cell| {
            let i = count[cell as usize];
            count[cell as usize] += 1;
            let (a, z) = (rank, 2 * p - 1 - rank);
            (i < m).then_some(())?;
            Some(Op::Run(match cell {
                ForwardA => Action::forward(a, i),
                ForwardZ => Action::forward(z, i),
                BackwardZ => Action::backward(z, i),
                BackwardA => Action::backward(a, i),
                RestZ | RestA => return None,
            }))
        });
        actions.collect()
    };
    (0..p).zip(&plan).map(list).collect()
}

/// Returns the slots of each rank for the first microbatch, in the order of [`CELLS`].
fn building_block(p: usize) -> Vec<[usize; 6]> {
    let mut block = vec![[0; 6]; p];
    let mut now = 0;
    for row in &mut block {
        now += 1;
        row[0] = now;
    }
    for row in block.iter_mut().rev() {
        now += 1;
        row[1] = now;
    }
    now += 1;
    if p.is_multiple_of(3) {
        now += 3;
    }
    // After three backwards, the next three slots of a period are left for forwards.
    let mut filled = (3 - (p + 2) % 3) % 3;
    let mut put = |row: &mut [usize; 6], cell: usize| {
        (row[cell], row[cell + 2]) = (now, now + 1);
        filled += 1;
        now += 2;
        if filled == 3 {
            filled = 0;
            now += 3;
        }
    };
    for row in &mut block {
        put(row, 2);
    }
    for row in block.iter_mut().rev() {
        put(row, 3);
    }
    block
}

/// Removes the cells before the first microbatch and after the last.
fn trim(plan: &mut [Slots], microbatches: usize) {
    let p = plan.len();
    let mut slot = PERIOD;
    for cell in [ForwardA, ForwardZ, BackwardZ, BackwardA] {
        let down = matches!(cell, ForwardA | BackwardZ);
        for i in 0..p {
            let rank = if down { i } else { p - 1 - i };
            let slots = &mut plan[rank];
            while slots[slot] != Some(cell) {
                slot += 1;
            }
            keep(slots, slot, microbatches);
            slot += 1;
            let rest = match cell {
                BackwardZ => RestZ,
                BackwardA => RestA,
                _ => continue,
            };
            if let Some(after) = slots[slot..].iter().take(PERIOD).position(|&c| c == Some(rest)) {
                keep(slots, slot + after, microbatches);
            }
        }
    }
}

/// Keeps `count` of the cells that repeat the cell at `first`, starting with that cell.
fn keep(slots: &mut Slots, first: usize, count: usize) {
    for slot in (first % PERIOD..slots.len()).step_by(PERIOD) {
        if slot < first || slot >= first + PERIOD * count {
            slots[slot] = None;
        }
    }
}

/// Moves every cell, in the order of time, to the first free slot after its dependencies. Forwards move only
/// where the peak of the plan does not rise.
fn compact(plan: &mut [Slots]) {
    let p = plan.len();
    let mut held: Vec<Vec<i64>> = plan.iter().map(held).collect();
    let peak = held.iter().flatten().copied().max().unwrap_or_default();
    // New slot of each cell of each rank, by microbatch.
    let mut found: Vec<[Vec<usize>; 6]> = vec![Default::default(); p];
    for now in 0..plan[0].len() {
        for rank in 0..p {
            let Some(cell) = plan[rank][now] else { continue };
            let i = found[rank][cell as usize].len();
            let at = |rank: usize, cell: Cell| found[rank][cell as usize].get(i).copied();
            let first = rank == 0;
            let last = rank + 1 == p;
            let needs = match cell {
                ForwardA if first => None,
                ForwardA => at(rank - 1, ForwardA),
                ForwardZ if last => at(rank, ForwardA),
                ForwardZ => at(rank + 1, ForwardZ),
                BackwardZ if first => at(rank, ForwardZ),
                // A backward takes two slots and ends with the second.
                BackwardZ => at(rank - 1, RestZ),
                BackwardA if last => at(rank, RestZ),
                BackwardA => at(rank + 1, RestA),
                RestZ => at(rank, BackwardZ),
                RestA => at(rank, BackwardA),
            };
            let before = found[rank][cell as usize].last().copied();
            let earliest = needs.max(before).map_or(0, |slot| slot + 1);
            let to = place(&plan[rank], &held[rank], cell, earliest, now, peak);
            if to != now {
                plan[rank].swap(now, to);
                let change = match cell {
                    ForwardA | ForwardZ => 1,
                    BackwardZ | BackwardA => 0,
                    RestZ | RestA => -1,
                };
                held[rank][to..now].iter_mut().for_each(|h| *h += change);
            }
            found[rank][cell as usize].push(to);
        }
    }
}

/// Returns the slot to which a cell at `now` moves.
fn place(slots: &Slots, held: &[i64], cell: Cell, earliest: usize, now: usize, peak: i64) -> usize {
    let idle = |slot: usize| slots[slot].is_none();
    let pair = matches!(cell, BackwardZ | BackwardA);
    let fits = |slot: usize| idle(slot) && (!pair || idle(slot + 1));
    let forward = matches!(cell, ForwardA | ForwardZ);
    // A forward may move back only through slots that have room for its activations.
    let lowest = if forward {
        now - held[earliest..now].iter().rev().take_while(|&&h| h < peak).count()
    } else {
        earliest
    };
    (lowest..now).find(|&slot| fits(slot)).unwrap_or(now)
}

/// Returns the number of activations that a rank holds after each slot.
fn held(slots: &Slots) -> Vec<i64> {
    let change = |cell: &Option<Cell>| match cell {
        Some(ForwardA | ForwardZ) => 1,
        Some(RestZ | RestA) => -1,
        _ => 0,
    };
    let running = |held: &mut i64, cell: &Option<Cell>| {
        *held += change(cell);
        Some(*held)
    };
    slots.iter().scan(0, running).collect()
}
