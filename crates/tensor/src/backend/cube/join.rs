//! Joins the heads of queries, keys and values into one row per token, and splits them, with the rotation of
//! queries and keys. One unit (thread) per element.

use cubecl::prelude::*;

use super::operand::Operand;
use super::positions::{Given, Places, PositionOperands};
use super::{Cube, u32_of};
use crate::{Heads, Result, Rotary, Shape, View, ViewMut};

/// Returns the sizes of joined heads; `qkv` is `[B, T, (query + 2 kv) D]` and not empty.
fn joined_sizes(heads: Heads, qkv: Shape, rotary: Option<&Rotary<'_>>) -> JoinedLaunch {
    let dim = qkv.cols() / heads.width();
    let rotated = rotary.map_or(0, |rotary| rotary.table.shape().cols());
    let [len, queries, keys, dim, rotated] =
        [qkv.len(), heads.query * dim, heads.kv * dim, dim, rotated].map(u32_of);
    JoinedLaunch::new(len, queries, keys, dim, rotated)
}

impl Cube {
    /// Reads the table of a rotation, and the positions of the tokens of `qkv`.
    fn rotation(
        &self,
        rotary: Option<&Rotary<'_>>,
        qkv: Shape,
    ) -> Result<(Option<Operand>, PositionOperands)> {
        let tokens = qkv.dims()[1];
        let Some(Rotary { table, positions }) = rotary else {
            return Ok((None, PositionOperands::none(tokens)));
        };
        let at = PositionOperands::read(self, positions, tokens, Some(table.shape().rows()))?;
        Ok((Some(self.read(table)?), at))
    }

    /// `qkv` is not empty.
    pub(super) fn join_heads(
        &self,
        heads: Heads,
        rotary: Option<&Rotary<'_>>,
        from: [&View<'_>; 3],
        qkv: &ViewMut<'_>,
    ) -> Result<()> {
        let (shape, l) = (qkv.shape(), joined_sizes(heads, qkv.shape(), rotary));
        let (table, at) = self.rotation(rotary, shape)?;
        let [q, k, v] = from;
        let (q, k, v, qkv) = (self.read(q)?, self.read(k)?, self.read(v)?, self.write(qkv)?);
        let (count, dim) = self.each(shape.len());
        let angles = table.as_ref().unwrap_or(&q).arg();
        let ([from_q, from_k, from_v], each, to) = ([&q, &k, &v].map(Operand::arg), at.each(&q), qkv.arg());
        let (client, places) = (&self.client, at.places());
        join::launch(client, count, dim, from_q, from_k, from_v, angles, each, to, l, places, at.given);
        self.write_back([q, k, v, qkv].into_iter().chain(table).chain(at.into_operand()));
        Ok(())
    }

    /// `d_qkv` is not empty.
    pub(super) fn split_heads(
        &self,
        heads: Heads,
        rotary: Option<&Rotary<'_>>,
        d_qkv: &View<'_>,
        to: [&ViewMut<'_>; 3],
    ) -> Result<()> {
        let (shape, l) = (d_qkv.shape(), joined_sizes(heads, d_qkv.shape(), rotary));
        let (table, at) = self.rotation(rotary, shape)?;
        let [dq, dk, dv] = to;
        let (d_qkv, dq, dk, dv) = (self.read(d_qkv)?, self.write(dq)?, self.write(dk)?, self.write(dv)?);
        let (count, dim) = self.each(shape.len());
        let angles = table.as_ref().unwrap_or(&d_qkv).arg();
        let (from, each, [q, k, v]) = (d_qkv.arg(), at.each(&d_qkv), [&dq, &dk, &dv].map(Operand::arg));
        let (client, places) = (&self.client, at.places());
        split::launch(client, count, dim, from, angles, each, q, k, v, l, places, at.given);
        self.write_back([d_qkv, dq, dk, dv].into_iter().chain(table).chain(at.into_operand()));
        Ok(())
    }
}

/// Sizes of joined heads.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct Joined {
    /// Number of elements of all rows.
    len: u32,
    /// Widths of a token's queries, and of its keys or values.
    queries: u32,
    keys: u32,
    dim: u32,
    /// Number of values of a head that are rotated; may be 0.
    rotated: u32,
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

    /// Returns the rotation of a column that is rotated, of a token at this position.
    fn turn(&self, table: &[f32], position: u32, col: u32) -> Turn {
        let half = self.rotated / 2;
        let within = col % self.dim;
        let first = within < half;
        let pair = select(first, within, within - half);
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

/// Writes queries, keys and values side by side. `table` is not read if no value is rotated. `each` is what
/// is `given` for each token.
#[cube(launch)]
fn join(
    q: &[f32],
    k: &[f32],
    v: &[f32],
    table: &[f32],
    each: &[u32],
    qkv: &mut [f32],
    l: Joined,
    places: Places,
    #[comptime] given: Given,
) {
    let at = ABSOLUTE_POS as u32;
    if at < l.len {
        let width = l.queries + 2 * l.keys;
        let row = at / width;
        let col = at % width;
        let mut value = element(q, k, v, &l, row, col);
        if l.turns(col) {
            let turn = l.turn(table, places.of(each, row, given), col);
            value = value * turn.cos + element(q, k, v, &l, row, turn.other) * turn.sin;
        }
        qkv[ABSOLUTE_POS] = value;
    }
}

/// The inverse of [`join`]: rotates back and takes apart.
#[cube(launch)]
fn split(
    d_qkv: &[f32],
    table: &[f32],
    each: &[u32],
    dq: &mut [f32],
    dk: &mut [f32],
    dv: &mut [f32],
    l: Joined,
    places: Places,
    #[comptime] given: Given,
) {
    let at = ABSOLUTE_POS as u32;
    if at < l.len {
        let width = l.queries + 2 * l.keys;
        let row = at / width;
        let col = at % width;
        let mut value = d_qkv[ABSOLUTE_POS];
        if l.turns(col) {
            let turn = l.turn(table, places.of(each, row, given), col);
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
