//! Joins the heads of queries, keys and values into one row per token, and splits them, with the rotation of
//! queries and keys.

use super::parts::rows_per_task;
use super::pool::Pool;
use super::positions::Positions;
use super::simd::{Isa, simd};
use crate::{Heads, Result, Rotary, Shape};

/// Sizes of joined heads, and the rotation.
#[derive(Clone, Copy)]
pub(super) struct Joined<'a> {
    heads: Heads,
    head_dim: usize,
    /// Values of a row of `table` that are rotated; 0 to only copy.
    rotated: usize,
    table: &'a [f32],
    /// Where the tokens are in the table; `None` to only copy.
    positions: Option<Positions<'a>>,
}

impl<'a> Joined<'a> {
    /// `qkv` is the shape `[B, T, (query + 2 kv) D]`.
    ///
    /// Errors: [`TensorError::Documents`](crate::TensorError::Documents) and
    /// [`TensorError::PositionOutOfRange`](crate::TensorError::PositionOutOfRange) with the name `op`.
    pub(super) fn new(
        op: &'static str,
        heads: Heads,
        qkv: Shape,
        rotary: Option<&Rotary<'a>>,
    ) -> Result<Self> {
        let tokens = *qkv.dims().get(1).expect("joined heads have shape [B, T, W]");
        let read = |rotary: &Rotary<'a>| {
            Positions::read(op, &rotary.positions, tokens, Some(rotary.table.shape().rows()))
        };
        Ok(Self {
            heads,
            head_dim: qkv.cols() / heads.width(),
            rotated: rotary.map_or(0, |rotary| rotary.table.shape().cols()),
            table: rotary.map_or(&[], |rotary| super::floats(&rotary.table)),
            positions: rotary.map(read).transpose()?,
        })
    }

    /// Returns the widths of a token's queries, keys and values.
    fn widths(self) -> [usize; 3] {
        let Heads { query, kv } = self.heads;
        [query, kv, kv].map(|heads| heads * self.head_dim)
    }

    /// Returns the cosines and the sines of token `row`, of all sequences' tokens.
    fn angles(self, row: usize) -> (&'a [f32], &'a [f32]) {
        let at = self.positions.map_or(0, |positions| positions.of(row)) * self.rotated;
        self.table[at..at + self.rotated].split_at(self.rotated / 2)
    }
}

/// Rotates the pairs of one head, by the negative angles if `BACK`, and copies its other values.
#[inline(always)]
#[expect(clippy::inline_always, reason = "inlined into the function that enables the vectors")]
fn rotate_head<const BACK: bool>(x: &[f32], (cos, sin): (&[f32], &[f32]), y: &mut [f32]) {
    let pairs = cos.len();
    let ((x, rest), (y, copied)) = (x.split_at(2 * pairs), y.split_at_mut(2 * pairs));
    copied.copy_from_slice(rest);
    let ((a, b), (first, second)) = (x.split_at(pairs), y.split_at_mut(pairs));
    let (sin, second) = (&sin[..pairs], &mut second[..pairs]);
    for i in 0..pairs {
        let (cos, sin) = (cos[i], if BACK { -sin[i] } else { sin[i] });
        first[i] = a[i] * cos - b[i] * sin;
        second[i] = b[i] * cos + a[i] * sin;
    }
}

simd! {
    /// Rotates heads of width `d` side by side.
    fn rotate<L: Level>(d: usize, back: bool, x: &[f32], angles: (&[f32], &[f32]), y: &mut [f32]) {
        if angles.0.is_empty() {
            return y.copy_from_slice(x);
        }
        for (x, y) in x.chunks_exact(d).zip(y.chunks_exact_mut(d)) {
            if back {
                rotate_head::<true>(x, angles, y);
            } else {
                rotate_head::<false>(x, angles, y);
            }
        }
    }
}

/// Writes each token's queries, keys and values side by side; queries and keys are rotated.
pub(super) fn join(pool: &Pool, l: Joined<'_>, from: [&[f32]; 3], qkv: &mut [f32]) {
    let (widths, isa) = (l.widths(), Isa::detect());
    let width: usize = widths.iter().sum();
    let rows = rows_per_task(width);
    pool.for_chunks([(qkv, rows * width)], |t, [qkv]| {
        for (r, row) in qkv.chunks_exact_mut(width).enumerate() {
            let r = t * rows + r;
            let (q, rest) = row.split_at_mut(widths[0]);
            let (k, v) = rest.split_at_mut(widths[1]);
            let [from_q, from_k, from_v] = [0, 1, 2].map(|i| &from[i][r * widths[i]..][..widths[i]]);
            rotate(isa, l.head_dim, false, from_q, l.angles(r), q);
            rotate(isa, l.head_dim, false, from_k, l.angles(r), k);
            v.copy_from_slice(from_v);
        }
    });
}

/// The inverse of [`join`].
pub(super) fn split(pool: &Pool, l: Joined<'_>, qkv: &[f32], to: [&mut [f32]; 3]) {
    let ([wide, narrow, _], isa) = (l.widths(), Isa::detect());
    let width = wide + 2 * narrow;
    let rows = rows_per_task(width);
    let [q, k, v] = to;
    pool.for_chunks([(q, rows * wide), (k, rows * narrow), (v, rows * narrow)], |t, [q, k, v]| {
        let each = q.chunks_exact_mut(wide).zip(k.chunks_exact_mut(narrow)).zip(v.chunks_exact_mut(narrow));
        for (r, ((q, k), v)) in each.enumerate() {
            let r = t * rows + r;
            let (from_q, rest) = qkv[r * width..][..width].split_at(wide);
            let (from_k, from_v) = rest.split_at(narrow);
            rotate(isa, l.head_dim, true, from_q, l.angles(r), q);
            rotate(isa, l.head_dim, true, from_k, l.angles(r), k);
            v.copy_from_slice(from_v);
        }
    });
}
