//! Joins the heads of queries, keys and values into one row per token, and splits them, with the rotation of
//! queries and keys. One unit (thread) per element.

use cubecl::prelude::*;

/// Sizes of joined heads.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(super) struct Joined {
    /// Number of elements of all rows.
    pub(super) len: u32,
    /// Widths of a token's queries, and of its keys or values.
    pub(super) queries: u32,
    pub(super) keys: u32,
    pub(super) dim: u32,
    /// Number of tokens of each sequence, and the position of the first.
    pub(super) tokens: u32,
    pub(super) start: u32,
    /// Number of values of a head that are rotated; may be 0.
    pub(super) rotated: u32,
}

/// Cosine and sine of an element's rotation, and the distance to the other element of its pair.
#[derive(CubeType, Clone, Copy)]
struct Turn {
    cos: f32,
    /// Negative for the first element of the pair.
    sin: f32,
    /// Column of the other element.
    other: u32,
}

#[cube]
impl Joined {
    /// Returns whether this column is rotated.
    fn turns(&self, col: u32) -> bool {
        col < self.queries + self.keys && col % self.dim < self.rotated
    }

    /// Returns the rotation of a column that is rotated. If sequences are `divided`, `documents` says where the
    /// document of each token begins.
    fn turn(&self, table: &[f32], documents: &[u32], row: u32, col: u32, #[comptime] divided: bool) -> Turn {
        let half = self.rotated / 2;
        let within = col % self.dim;
        let first = within < half;
        let pair = select(first, within, within - half);
        let mut position = self.start + row % self.tokens;
        if comptime!(divided) {
            position -= u32::min(documents[row as usize], position);
        }
        let at = (position * self.rotated + pair) as usize;
        let cos = table[at];
        let sin = table[at + half as usize];
        Turn { cos, sin: select(first, -sin, sin), other: select(first, col + half, col - half) }
    }
}

/// Returns the element of a token's queries, keys or values in this column of its row.
#[cube]
fn element(q: &[f32], k: &[f32], v: &[f32], l: &Joined, row: u32, col: u32) -> f32 {
    if col < l.queries {
        q[(row * l.queries + col) as usize]
    } else if col < l.queries + l.keys {
        k[(row * l.keys + col - l.queries) as usize]
    } else {
        v[(row * l.keys + col - l.queries - l.keys) as usize]
    }
}

/// Writes queries, keys and values side by side. `table` is not read if no value is rotated.
#[cube(launch)]
pub(super) fn join(
    q: &[f32],
    k: &[f32],
    v: &[f32],
    table: &[f32],
    documents: &[u32],
    qkv: &mut [f32],
    l: Joined,
    #[comptime] divided: bool,
) {
    let at = ABSOLUTE_POS as u32;
    if at < l.len {
        let width = l.queries + 2 * l.keys;
        let row = at / width;
        let col = at % width;
        let mut value = element(q, k, v, &l, row, col);
        if l.turns(col) {
            let turn = l.turn(table, documents, row, col, divided);
            value = value * turn.cos + element(q, k, v, &l, row, turn.other) * turn.sin;
        }
        qkv[ABSOLUTE_POS] = value;
    }
}

/// The inverse of [`join`]: rotates back and takes apart.
#[cube(launch)]
pub(super) fn split(
    d_qkv: &[f32],
    table: &[f32],
    documents: &[u32],
    dq: &mut [f32],
    dk: &mut [f32],
    dv: &mut [f32],
    l: Joined,
    #[comptime] divided: bool,
) {
    let at = ABSOLUTE_POS as u32;
    if at < l.len {
        let width = l.queries + 2 * l.keys;
        let row = at / width;
        let col = at % width;
        let mut value = d_qkv[ABSOLUTE_POS];
        if l.turns(col) {
            let turn = l.turn(table, documents, row, col, divided);
            value = value * turn.cos - d_qkv[(row * width + turn.other) as usize] * turn.sin;
        }
        if col < l.queries {
            dq[(row * l.queries + col) as usize] = value;
        } else if col < l.queries + l.keys {
            dk[(row * l.keys + col - l.queries) as usize] = value;
        } else {
            dv[(row * l.keys + col - l.queries - l.keys) as usize] = value;
        }
    }
}
