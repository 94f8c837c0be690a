//! Embedding, and its gradient summed in token order.

use cubecl::prelude::*;

/// Records the first id that is not below `bound` as `[op, id, position, bound]`, unless a fault is recorded
/// already. Runs in one cube (workgroup).
#[cube(launch)]
pub(super) fn check_ids(
    ids: &[u32],
    fault: &mut [u32],
    len: u32,
    bound: u32,
    op: u32,
    #[comptime] units: u32,
) {
    let mut shared = Shared::<[u32]>::new_slice(units as usize);
    let unit = UNIT_POS as usize;
    let mut first = len;
    let mut i = UNIT_POS;
    while i < len {
        if ids[i as usize] >= bound {
            first = u32::min(first, i);
        }
        i += units;
    }
    shared[unit] = first;
    sync_cube();
    if UNIT_POS == 0 {
        let mut least = len;
        for u in 0..units {
            least = u32::min(least, shared[u as usize]);
        }
        if least < len && fault[0] == 0 {
            fault[0] = op;
            fault[1] = ids[least as usize];
            fault[2] = least;
            fault[3] = bound;
        }
    }
}

/// Copies the ids' rows of the table, whose first row is that of id `first`, plus the rows of the positions if
/// `add`. If sequences are `divided`, `documents` says where the document of each token begins.
#[cube(launch)]
pub(super) fn gather(
    ids: &[u32],
    table: &[f32],
    positions: &[f32],
    documents: &[u32],
    y: &mut [f32],
    len: u32,
    cols: u32,
    tokens: u32,
    start: u32,
    vocabulary: u32,
    first: u32,
    #[comptime] add: bool,
    #[comptime] divided: bool,
) {
    let at = ABSOLUTE_POS;
    if at < len as usize {
        let cols = cols as usize;
        let row = at / cols;
        let col = at % cols;
        // Of an id below `first` the difference wraps.
        let wanted = ids[row] - first;
        let inside = ids[row] >= first && wanted < vocabulary;
        let id = select(inside, wanted, 0u32) as usize;
        let value = select(inside, table[id * cols + col], 0.0);
        if comptime!(add) {
            let mut position = start as usize + row % tokens as usize;
            if comptime!(divided) {
                position -= usize::min(documents[row] as usize, position);
            }
            y[at] = value + positions[position * cols + col];
        } else {
            y[at] = value;
        }
    }
}

/// Adds the rows of `dy` to their ids' rows of the table, whose first row is that of id `first`. The cube
/// (workgroup) of an id's first row sums all rows of that id, in order.
#[cube(launch)]
pub(super) fn scatter(
    ids: &[u32],
    dy: &[f32],
    d_table: &mut [f32],
    rows: u32,
    cols: u32,
    vocabulary: u32,
    first: u32,
    #[comptime] units: u32,
) {
    let mut seen = Shared::<[u32]>::new_slice(units as usize);
    let row = CUBE_POS as u32;
    if row < rows {
        let id = ids[row as usize];
        let mut earlier = 0u32;
        let mut i = UNIT_POS;
        while i < row {
            earlier += u32::cast_from(ids[i as usize] == id);
            i += units;
        }
        seen[UNIT_POS as usize] = earlier;
        sync_cube();
        let mut before = 0u32;
        for u in 0..units {
            before += seen[u as usize];
        }
        // Of an id below `first` the difference wraps.
        let wanted = id - first;
        if before == 0 && id >= first && wanted < vocabulary {
            let mut col = UNIT_POS;
            while col < cols {
                let to = (wanted * cols + col) as usize;
                let mut sum = d_table[to];
                for r in row..rows {
                    if ids[r as usize] == id {
                        sum += dy[(r * cols + col) as usize];
                    }
                }
                d_table[to] = sum;
                col += units;
            }
        }
    }
}

/// Computes the position of each token in its document.
#[cube(launch)]
pub(super) fn positions(documents: &[u32], to: &mut [u32], rows: u32, tokens: u32, start: u32) {
    let at = ABSOLUTE_POS as u32;
    if at < rows {
        let position = start + at % tokens;
        to[ABSOLUTE_POS] = position - u32::min(documents[ABSOLUTE_POS], position);
    }
}

/// Adds the rows of `dy` to their positions' rows of the table, in order.
#[cube(launch)]
pub(super) fn scatter_positions(dy: &[f32], d_positions: &mut [f32], rows: u32, cols: u32, tokens: u32) {
    let at = ABSOLUTE_POS as u32;
    if at < tokens * cols {
        let mut sum = d_positions[ABSOLUTE_POS];
        let mut row = at / cols;
        while row < rows {
            sum += dy[(row * cols + at % cols) as usize];
            row += tokens;
        }
        d_positions[ABSOLUTE_POS] = sum;
    }
}
