//! Attention of one head of one sequence, on panels in scratch. It refuses to know batches, threads and who owns the
//! rows that it writes.

use std::ops::Range;

use super::Rows;
use super::micro::{NR, Product, dot, product, scale, scaled, softmax_grad_row, softmax_row, transpose};
use crate::backend::cpu::simd::Isa;

/// Queries of a tile.
const QUERIES: usize = 66;
/// Keys of a tile.
const KEYS: usize = 256;
/// Floats between rows of a tile of scores, and of transposed keys: odd in units of a cache line, so that a column does
/// not fall into few sets of the cache; room for the vectors that the last visible key is rounded up to.
const PITCH: usize = KEYS + NR;

/// Sizes of one head.
#[derive(Debug, Clone, Copy)]
pub(super) struct Head {
    pub(super) isa: Isa,
    pub(super) queries: usize,
    /// At least `queries`; query `i` sees the keys up to `keys - queries + i`.
    pub(super) keys: usize,
    /// Floats of a row.
    pub(super) width: usize,
}

/// Cuts the scratch into panels of the given lengths; what they hold is left over from earlier calls.
fn panels<const N: usize>(scratch: &mut Vec<f32>, lengths: [usize; N]) -> [&mut [f32]; N] {
    let total = lengths.iter().sum();
    if scratch.len() < total {
        scratch.resize(total, 0.0);
    }
    let mut rest = &mut scratch[..];
    lengths.map(|len| {
        let (panel, after) = std::mem::take(&mut rest).split_at_mut(len);
        rest = after;
        panel
    })
}

/// Where one tile of queries meets one tile of keys.
#[derive(Clone, Copy)]
struct Meeting {
    /// Rows of the tile.
    rows: usize,
    /// Keys of the tile.
    keys: usize,
    /// Keys of the tile that the first row sees, if it could be negative or more than the tile has.
    first: isize,
}

impl Meeting {
    /// Keys that row `r` sees.
    fn seen(self, r: usize) -> usize {
        (self.first + r.cast_signed()).clamp(0, self.keys.cast_signed()).cast_unsigned()
    }

    /// Keys that any of `rows` sees.
    fn seen_by(self, rows: &Range<usize>) -> usize {
        self.seen(rows.end - 1)
    }

    /// Rows that see any of `keys`.
    fn seeing(self, keys: &Range<usize>) -> Range<usize> {
        let start = (keys.start.cast_signed() + 1 - self.first).max(0).cast_unsigned();
        start.min(self.rows)..self.rows
    }

    /// Elements of row `r` to go over: those that a block of rows or columns around the diagonal takes in, in whole
    /// vectors.
    fn padded(self, r: usize) -> usize {
        (self.seen(r) + 6).next_multiple_of(8).min(PITCH)
    }
}

impl Head {
    /// Floats between rows of a panel: padded to register tiles, and odd in units of a cache line.
    fn pitch(&self) -> usize {
        (self.width.div_ceil(NR) | 1) * NR
    }

    fn score_scale(&self) -> f32 {
        1.0 / (self.width as f32).sqrt()
    }

    /// The keys in tiles.
    fn key_tiles(&self) -> impl Iterator<Item = Range<usize>> {
        let keys = self.keys;
        (0..keys).step_by(KEYS).map(move |j| j..keys.min(j + KEYS))
    }

    /// The tiles of queries that see some of `keys`, and what they see.
    fn query_tiles(&self, keys: Range<usize>) -> impl Iterator<Item = (Range<usize>, Meeting)> {
        let (queries, past) = (self.queries, self.keys - self.queries);
        (0..queries).step_by(QUERIES).filter_map(move |i| {
            let tile = i..queries.min(i + QUERIES);
            let first = (tile.start + past + 1).cast_signed() - keys.start.cast_signed();
            (tile.end + past > keys.start).then(|| {
                let meeting = Meeting { rows: tile.len(), keys: keys.len(), first };
                (tile, meeting)
            })
        })
    }

    /// Copies rows times `factor` into a panel; the padding is zero.
    fn pack(&self, panel: &mut [f32], from: Rows<'_>, rows: Range<usize>, factor: f32) {
        for (to, t) in panel.chunks_exact_mut(self.pitch()).zip(rows) {
            let (to, padding) = to.split_at_mut(self.width);
            scaled(self.isa, to, from.row(t), factor);
            padding.fill(0.0);
        }
    }

    /// Copies at most `KEYS` rows into the columns of a panel of `PITCH` floats a row; columns up to a whole register tile
    /// are zero.
    fn pack_transposed(&self, panel: &mut [f32], from: Rows<'_>, rows: Range<usize>) {
        let n = rows.len();
        transpose(self.isa, &from.data[rows.start * from.stride..], from.stride, n, self.width, panel, PITCH);
        for row in panel.chunks_exact_mut(PITCH).take(self.width) {
            row[n..n.next_multiple_of(NR)].fill(0.0);
        }
    }

    /// `c = a bᵀ` up to the diagonal, for rows of `a` and `b` transposed.
    fn scores(&self, meeting: Meeting, a: &[f32], b: &[f32], c: &mut [f32]) {
        let p = Product {
            rows: meeting.rows,
            a,
            a_row: self.pitch(),
            a_col: 1,
            b,
            b_row: PITCH,
            c,
            c_row: PITCH,
            accumulate: false,
        };
        product(self.isa, p, &|rows| (0..self.width, meeting.seen_by(&rows)));
    }

    /// `c += weights b`, from scores to queries.
    fn onto_queries(&self, meeting: Meeting, weights: &[f32], b: &[f32], c: &mut [f32]) {
        let p = Product {
            rows: meeting.rows,
            a: weights,
            a_row: PITCH,
            a_col: 1,
            b,
            b_row: self.pitch(),
            c,
            c_row: self.pitch(),
            accumulate: true,
        };
        product(self.isa, p, &|rows| (0..meeting.seen_by(&rows), self.width));
    }

    /// `c += weightsᵀ b`, from scores to keys.
    fn onto_keys(&self, meeting: Meeting, weights: &[f32], b: &[f32], c: &mut [f32]) {
        let p = Product {
            rows: meeting.seen(meeting.rows - 1),
            a: weights,
            a_row: 1,
            a_col: PITCH,
            b,
            b_row: self.pitch(),
            c,
            c_row: self.pitch(),
            accumulate: true,
        };
        product(self.isa, p, &|keys| (meeting.seeing(&keys), self.width));
    }

    /// `write(t)` is the output row of query `t`, and where its log of the sum of exponentials goes, if anywhere.
    pub(super) fn forward<'a>(
        &self,
        [q, k, v]: [Rows<'_>; 3],
        scratch: &mut Vec<f32>,
        write: impl Fn(usize) -> (&'a mut [f32], Option<&'a mut f32>),
    ) {
        let (pitch, tile_keys) = (self.pitch(), self.keys.min(KEYS));
        let lengths = [
            self.queries * pitch,
            self.queries,
            self.queries,
            QUERIES * pitch,
            self.width * PITCH,
            tile_keys * pitch,
            QUERIES * PITCH,
        ];
        let [out, tops, sums, q_tile, k_t, v_tile, s] = panels(scratch, lengths);
        out.fill(0.0);
        tops.fill(f32::NEG_INFINITY);
        sums.fill(0.0);

        for keys in self.key_tiles() {
            self.pack_transposed(k_t, k, keys.clone());
            self.pack(v_tile, v, keys.clone(), 1.0);
            for (queries, meeting) in self.query_tiles(keys) {
                self.pack(q_tile, q, queries.clone(), self.score_scale());
                self.scores(meeting, q_tile, k_t, s);
                for (r, t) in queries.clone().enumerate() {
                    let row = &mut s[r * PITCH..][..meeting.padded(r)];
                    let seen = meeting.seen(r);
                    if seen == 0 {
                        row.fill(0.0);
                        continue;
                    }
                    row[seen..].fill(f32::NEG_INFINITY);
                    let (top, sum) = softmax_row(self.isa, row, tops[t]);
                    if top > tops[t] && sums[t] > 0.0 {
                        let shrink = (tops[t] - top).exp();
                        sums[t] *= shrink;
                        scale(self.isa, &mut out[t * pitch..][..self.width], shrink);
                    }
                    tops[t] = top;
                    sums[t] += sum;
                }
                self.onto_queries(meeting, s, v_tile, &mut out[queries.start * pitch..]);
            }
        }
        for t in 0..self.queries {
            let (row, lse) = write(t);
            scaled(self.isa, row, &out[t * pitch..][..self.width], 1.0 / sums[t]);
            if let Some(lse) = lse {
                *lse = tops[t] + sums[t].ln();
            }
        }
    }

    /// `write(i, t)` is row `t` of the gradient of the queries (0), keys (1) or values (2).
    pub(super) fn backward<'a>(
        &self,
        [q, k, v]: [Rows<'_>; 3],
        [y, dy]: [Rows<'_>; 2],
        lse: &[f32],
        scratch: &mut Vec<f32>,
        write: impl Fn(usize, usize) -> &'a mut [f32],
    ) {
        let (pitch, tile_keys) = (self.pitch(), self.keys.min(KEYS));
        let (whole, tile, across) = (self.queries * pitch, tile_keys * pitch, self.width * PITCH);
        let lengths = [
            whole,
            whole,
            whole,
            self.queries,
            tile,
            tile,
            tile,
            across,
            across,
            QUERIES * PITCH,
            QUERIES * PITCH,
        ];
        let [qs, dys, dq, means, k_tile, dk, dv, k_t, v_t, s, dp] = panels(scratch, lengths);
        self.pack(qs, q, 0..self.queries, self.score_scale());
        self.pack(dys, dy, 0..self.queries, 1.0);
        dq.fill(0.0);
        for (t, mean) in means.iter_mut().enumerate() {
            *mean = dot(self.isa, y.row(t), dy.row(t));
        }

        for keys in self.key_tiles() {
            self.pack(k_tile, k, keys.clone(), 1.0);
            self.pack_transposed(k_t, k, keys.clone());
            self.pack_transposed(v_t, v, keys.clone());
            dk.fill(0.0);
            dv.fill(0.0);
            for (queries, meeting) in self.query_tiles(keys.clone()) {
                let at = queries.start * pitch;
                self.scores(meeting, &qs[at..], k_t, s);
                self.scores(meeting, &dys[at..], v_t, dp);
                for (r, t) in queries.enumerate() {
                    let (seen, part) = (meeting.seen(r), r * PITCH..r * PITCH + meeting.padded(r));
                    let (s, dp) = (&mut s[part.clone()], &mut dp[part]);
                    s[seen..].fill(f32::NEG_INFINITY);
                    dp[seen..].fill(0.0);
                    softmax_grad_row(self.isa, s, dp, lse[t], means[t]);
                }
                self.onto_keys(meeting, s, &dys[at..], dv);
                self.onto_keys(meeting, dp, &qs[at..], dk);
                self.onto_queries(meeting, dp, k_tile, &mut dq[at..]);
            }
            for (r, t) in keys.enumerate() {
                // The queries were scaled when they were packed, so the keys' gradient already is.
                write(1, t).copy_from_slice(&dk[r * pitch..][..self.width]);
                write(2, t).copy_from_slice(&dv[r * pitch..][..self.width]);
            }
        }
        for t in 0..self.queries {
            scaled(self.isa, write(0, t), &dq[t * pitch..][..self.width], self.score_scale());
        }
    }
}
