//! All-reduces in groups: within regions and then between them, and along the axes of a grid.

use std::ops::Range;

use farflung_base::Rank;

use crate::ring::{gathered, scattered, whole};
use crate::steps::Program;

/// All-reduce by regions: each `group` scatters its reduction over its members in a ring, the owners of a block
/// in all groups reduce it in a ring between the groups, and each group gathers. What crosses between groups is
/// `2 (m-1)/m` of the buffer for each of `m` groups, however many ranks they have; groups may differ in size.
///
/// The buffer goes in `chunks` chunks, so that one crosses while another is reduced at home. Each rank is in
/// one group.
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
                // Rings of several columns go side by side.
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

/// Of `widest` columns, those of member `l` of a group of `size`.
pub(crate) const fn owned(widest: usize, l: usize, size: usize) -> Range<usize> {
    widest * l / size..widest * (l + 1) / size
}

/// The group that a rank is in, and its number there.
pub(crate) fn place(rank: Rank, groups: &[Vec<Rank>]) -> Option<(usize, usize)> {
    groups.iter().enumerate().find_map(|(g, group)| group.iter().position(|&r| r == rank).map(|l| (g, l)))
}

/// All-reduce over a grid of ranks, the last axis running fastest: a ring along each axis in turn. Everyone has
/// everything after as many rounds as there are axes, and no round needs more than a row of ranks.
///
/// `dims` multiply to the number of ranks.
/// Source: Ryabinin et al. 2021, "Moshpit SGD", on a full grid, where it is exact.
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

/// The two sides of the grid of `size` ranks that is nearest to a square.
#[must_use]
pub fn square(size: usize) -> [usize; 2] {
    let side = (1..=size.isqrt()).rev().find(|side| size.is_multiple_of(*side)).unwrap_or(1);
    [side, size / side]
}
