//! All-reduces in groups: within regions and then between them, or along the axes of a grid.

use std::ops::Range;

use farflung_base::Rank;

use crate::ring::{gathered, scattered, whole};
use crate::steps::Program;

/// Returns an all-reduce by regions. Each group reduce-scatters among its members in a ring; the owners of a
/// block in all groups all-reduce it in a ring between the groups; then each group all-gathers. With `m`
/// groups, `2 (m-1)/m` of the buffer leave each group, independent of its number of ranks. Groups may differ in
/// size.
///
/// The buffer is cut into `chunks` chunks: while one is exchanged between groups, another is reduced within
/// them. Each rank must be in exactly one group.
#[must_use]
pub fn hierarchical(rank: Rank, groups: &[Vec<Rank>], chunks: usize) -> Program {
    let Some((home, me)) = place(rank, groups) else { return Program::new(1, Vec::new()) };
    let widest = groups.iter().map(Vec::len).max().unwrap_or(1);
    let between = groups.len();
    let per_chunk = widest * between;
    let owned = |l: usize, g: usize| owned(widest, l, g);
    let owner = |column: usize, group: &[Rank]| {
        (0..group.len()).find(|&l| owned(l, group.len()).contains(&column)).map_or(rank, |l| group[l])
    };
    let group = &groups[home];
    let lanes = (0..chunks)
        .map(|chunk| {
            let first = chunk * per_chunk;
            let part = |l: usize| {
                let columns = owned(l, group.len());
                first + columns.start * between..first + columns.end * between
            };
            let mut steps = scattered(me, group, &part);
            for column in owned(me, group.len()) {
                let ring: Vec<Rank> = groups.iter().map(|group| owner(column, group)).collect();
                let start = first + column * between;
                let across = whole(home, &ring, |b| start + b..start + b + 1);
                // The rings of several columns run side by side.
                if column == owned(me, group.len()).start {
                    steps.extend(across);
                } else {
                    let at = steps.len() - across.len();
                    for (step, more) in steps[at..].iter_mut().zip(across) {
                        step.sends.extend(more.sends);
                        step.recvs.extend(more.recvs);
                    }
                }
            }
            steps.extend(gathered(me, group, &part));
            steps
        })
        .collect();
    Program::side_by_side(chunks * per_chunk, lanes)
}

/// Returns the columns, of `widest`, that member `l` of a group of `size` owns.
pub(crate) const fn owned(widest: usize, l: usize, size: usize) -> Range<usize> {
    widest * l / size..widest * (l + 1) / size
}

/// Returns the index of a rank's group, and its index in the group.
pub(crate) fn place(rank: Rank, groups: &[Vec<Rank>]) -> Option<(usize, usize)> {
    groups.iter().enumerate().find_map(|(g, group)| group.iter().position(|&r| r == rank).map(|l| (g, l)))
}

/// Returns an all-reduce over a grid of ranks, in which the last axis varies fastest: a ring along each axis in
/// turn. Every rank has the result after one round per axis, and no ring has more ranks than an axis is long.
///
/// The product of `dims` must be the number of ranks.
/// Source: Ryabinin et al. 2021, "Moshpit SGD", on a full grid, on which it is exact.
#[must_use]
pub fn moshpit(rank: Rank, dims: &[usize]) -> Program {
    let blocks = dims.iter().copied().fold(1, lcm);
    let mut steps = Vec::new();
    let mut stride = 1;
    for &side in dims.iter().rev() {
        let me = rank.index() / stride % side;
        let first = rank.index() - me * stride;
        let row: Vec<Rank> = (0..side).map(|i| Rank((first + i * stride) as u32)).collect();
        let wide = blocks / side;
        steps.extend(whole(me, &row, |b| b * wide..(b + 1) * wide));
        stride *= side;
    }
    Program::new(blocks, steps)
}

const fn lcm(a: usize, b: usize) -> usize {
    let (mut x, mut y) = (a, b);
    while y > 0 {
        (x, y) = (y, x % y);
    }
    a / x * b
}

/// Returns the two sides of the grid of `size` ranks that is closest to a square.
#[must_use]
pub fn square(size: usize) -> [usize; 2] {
    let side = (1..=size.isqrt()).rev().find(|side| size.is_multiple_of(*side)).unwrap_or(1);
    [side, size / side]
}
