//! Kernels of attention and its gradients, without storing the matrix of scores (Dao 2022).
//!
//! Each unit (thread) holds one row of queries or keys and loops over the rows of the other side; neighbouring
//! units read the same rows at the same time. Sums run in token order and there are no atomics, so equal inputs
//! give equal bits. There are no barriers: a software rasteriser takes minutes to compile them with this many
//! live values.

#![expect(clippy::trivially_copy_pass_by_ref, reason = "CubeCL kernels take a unit's own rows by reference")]

use cubecl::prelude::*;

use super::seen::{Seen, end_key, first_key, in_range};
use super::tiles::{TILE, eight_bits, has_pair, tiles_of};

/// Layout of `[batch, token, head, dim]` rows in a buffer, in vectors.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(super) struct Rows {
    /// Stride between tokens.
    pub(super) stride: u32,
    /// Stride between sequences.
    pub(super) batch: u32,
    /// Index of the first element.
    pub(super) start: u32,
}

#[cube]
impl Rows {
    /// Returns the index of the first element of a head's row.
    fn at(&self, batch: u32, token: u32, column: u32) -> usize {
        (self.start + batch * self.batch + token * self.stride + column) as usize
    }
}

/// The row of a head that a unit (thread) works on.
#[derive(CubeType, Clone, Copy)]
struct RowIndex {
    batch: u32,
    head: u32,
    /// Row of the unit; may be beyond the last row.
    row: u32,
}

#[cube]
impl RowIndex {
    /// Computes the row of this unit. Each cube (workgroup) covers `units` consecutive rows of one head.
    fn take(heads: u32, rows: u32, #[comptime] units: u32) -> RowIndex {
        let blocks = rows.div_ceil(units);
        let cube = CUBE_POS as u32;
        let head = cube / blocks % heads;
        let row = cube % blocks * units + UNIT_POS;
        RowIndex { batch: cube / blocks / heads, head, row }
    }
}

/// Score of masked positions: its exponential is zero. It is finite because not every device supports
/// infinities.
pub(super) const MASKED: f32 = -1e30;

/// Number of keys per block. The running sum is rescaled once per block.
const BLOCK: u32 = 8;

/// Returns the dot product of a row in registers and a row in memory, `dim` vectors each.
#[cube]
fn dot<N: Size>(x: &Array<Vector<f32, N>>, y: &[Vector<f32, N>], at: usize, #[comptime] dim: u32) -> f32 {
    let mut sum = Vector::<f32, N>::zeroed();
    #[unroll]
    for d in 0..dim {
        sum += x[d as usize] * y[at + d as usize];
    }
    sum.vector_sum()
}

/// Computes `x += factor * y`, where `y` is a row in memory.
#[cube]
fn add_scaled<N: Size>(
    x: &mut Array<Vector<f32, N>>,
    factor: f32,
    y: &[Vector<f32, N>],
    at: usize,
    #[comptime] dim: u32,
) {
    let factor = Vector::<f32, N>::new(factor);
    #[unroll]
    for d in 0..dim {
        x[d as usize] += factor * y[at + d as usize];
    }
}

/// Loads a row into registers, multiplied by `factor`.
#[cube]
fn take<N: Size>(
    x: &[Vector<f32, N>],
    at: usize,
    factor: f32,
    #[comptime] dim: u32,
) -> Array<Vector<f32, N>> {
    let mut row = Array::<Vector<f32, N>>::new(dim as usize);
    #[unroll]
    for d in 0..dim {
        row[d as usize] = x[at + d as usize] * Vector::new(factor);
    }
    row
}

/// Returns a row of zeros.
#[cube]
fn zeros<N: Size>(#[comptime] dim: u32) -> Array<Vector<f32, N>> {
    let mut row = Array::<Vector<f32, N>>::new(dim as usize);
    #[unroll]
    for d in 0..dim {
        row[d as usize] = Vector::zeroed();
    }
    row
}

/// Stores a row, or adds it if `add`.
#[cube]
fn put<N: Size>(
    row: &Array<Vector<f32, N>>,
    to: &mut [Vector<f32, N>],
    at: usize,
    #[comptime] add: bool,
    #[comptime] dim: u32,
) {
    #[unroll]
    for d in 0..dim {
        if comptime!(add) {
            to[at + d as usize] += row[d as usize];
        } else {
            to[at + d as usize] = row[d as usize];
        }
    }
}

/// Computes `y = softmax(scale q k^T) v`. The first query is at position `past`. `lse` is written if `keep`.
/// `group` heads of queries share a head of keys and values. [`Seen`] tells what `from` and `to` say of each
/// query. If it `continues`, `y` and `lse` are of other keys before, and of those and these afterwards.
#[cube(launch)]
pub(super) fn forward<N: Size>(
    q: &[Vector<f32, N>],
    k: &[Vector<f32, N>],
    v: &[Vector<f32, N>],
    from: &[u32],
    to: &[u32],
    y: &mut [Vector<f32, N>],
    lse: &mut [f32],
    q_rows: Rows,
    k_rows: Rows,
    v_rows: Rows,
    y_rows: Rows,
    heads: u32,
    group: u32,
    tokens: u32,
    keys: u32,
    past: u32,
    window: u32,
    scale: f32,
    #[comptime] keep: bool,
    #[comptime] seen: Seen,
    #[comptime] continues: bool,
    #[comptime] dim: u32,
    #[comptime] units: u32,
) {
    let RowIndex { batch, head, row } = RowIndex::take(heads, tokens, units);
    if row < tokens {
        let column = head * dim;
        let shared = head / group * dim;
        let query = take(q, q_rows.at(batch, row, column), scale, dim);
        let mut sum = zeros::<N>(dim);
        let mut scores = Array::<f32>::new(BLOCK as usize);
        let mut top = f32::new(MASKED);
        let mut total = 0.0f32;
        let at = batch * tokens + row;
        let stat = ((batch * heads + head) * tokens + row) as usize;
        let mut first = first_key(from, at, past + row, window, seen);
        let end = end_key(to, at, past + row, keys, seen);
        if comptime!(continues) {
            if first >= end {
                // The query attends to none of these keys and keeps what it has.
                terminate!();
            }
            // As if the query had attended to one key with this score.
            if lse[stat] > MASKED {
                top = lse[stat];
                total = 1.0;
                let before = y_rows.at(batch, row, column);
                #[unroll]
                for d in 0..dim {
                    sum[d as usize] = y[before + d as usize];
                }
            }
        }
        // Without tiles the keys are one range, with them one for each tile.
        let origin = first;
        let position = past + row - origin;
        let tiles = tiles_of(to, head, position, false, seen);
        let mut tile = tiles.at;
        while tile < tiles.end {
            let mut stop = end;
            if comptime!(seen.has_tiles()) {
                first = origin + to[tile as usize] * TILE;
                stop = u32::min(end, first + TILE);
            }
            while first < stop {
                let mut bits = 255u32;
                if comptime!(seen.has_tiles()) {
                    bits = eight_bits(to, tile, position % TILE, (first - origin) % TILE);
                }
                if bits != 0 {
                    let mut larger = top;
                    #[unroll]
                    for j in 0..BLOCK {
                        let mut score = f32::new(MASKED);
                        if first + j < stop && (bits >> j) & 1 == 1 {
                            score = dot(&query, k, k_rows.at(batch, first + j, shared), dim);
                        }
                        scores[j as usize] = score;
                        larger = f32::max(larger, score);
                    }
                    let shrink = f32::exp(top - larger);
                    top = larger;
                    total *= shrink;
                    #[unroll]
                    for d in 0..dim {
                        sum[d as usize] *= Vector::new(shrink);
                    }
                    #[unroll]
                    for j in 0..BLOCK {
                        if first + j < stop && (bits >> j) & 1 == 1 {
                            let p = f32::exp(scores[j as usize] - top);
                            total += p;
                            add_scaled(&mut sum, p, v, v_rows.at(batch, first + j, shared), dim);
                        }
                    }
                }
                first += BLOCK;
            }
            tile += 2;
        }
        if comptime!(seen.is_ranges() || seen.has_tiles()) {
            // A query without keys keeps its sum of zeros, and the masked score as its log-sum-exp.
            total = select(top > MASKED, total, 1.0);
        }
        let inverse = Vector::new(1.0 / total);
        #[unroll]
        for d in 0..dim {
            sum[d as usize] *= inverse;
        }
        put(&sum, y, y_rows.at(batch, row, column), false, dim);
        if comptime!(keep) {
            lse[stat] = top + f32::ln(total);
        }
    }
}

/// Computes `delta[batch, head, token] = y . dy` for each row of a head.
#[cube(launch)]
pub(super) fn deltas(
    y: &[f32],
    dy: &[f32],
    delta: &mut [f32],
    heads: u32,
    tokens: u32,
    len: u32,
    #[comptime] dim: u32,
) {
    let at = ABSOLUTE_POS as u32;
    if at < len {
        let token = at % tokens;
        let head = at / tokens % heads;
        let batch = at / tokens / heads;
        let from = ((batch * tokens + token) * heads + head) * dim;
        let mut sum = 0.0f32;
        for d in 0..dim {
            sum += y[(from + d) as usize] * dy[(from + d) as usize];
        }
        delta[ABSOLUTE_POS] = sum;
    }
}

/// Computes the gradient of the queries, with one unit (thread) per query. If queries have ranges, it is
/// added.
#[cube(launch)]
pub(super) fn queries<N: Size>(
    q: &[Vector<f32, N>],
    k: &[Vector<f32, N>],
    v: &[Vector<f32, N>],
    dy: &[Vector<f32, N>],
    from: &[u32],
    to: &[u32],
    lse: &[f32],
    delta: &[f32],
    d_q: &mut [Vector<f32, N>],
    q_rows: Rows,
    k_rows: Rows,
    v_rows: Rows,
    y_rows: Rows,
    d_q_rows: Rows,
    heads: u32,
    group: u32,
    tokens: u32,
    keys: u32,
    past: u32,
    window: u32,
    scale: f32,
    #[comptime] seen: Seen,
    #[comptime] dim: u32,
    #[comptime] units: u32,
) {
    let RowIndex { batch, head, row } = RowIndex::take(heads, tokens, units);
    if row < tokens {
        let column = head * dim;
        let shared = head / group * dim;
        let query = take(q, q_rows.at(batch, row, column), scale, dim);
        let grad = take(dy, y_rows.at(batch, row, column), 1.0, dim);
        let mut sum = zeros::<N>(dim);
        let stat = ((batch * heads + head) * tokens + row) as usize;
        let at = batch * tokens + row;
        let first = first_key(from, at, past + row, window, seen);
        let end = end_key(to, at, past + row, keys, seen);
        let position = past + row - first;
        let tiles = tiles_of(to, head, position, false, seen);
        let mut tile = tiles.at;
        while tile < tiles.end {
            let mut begin = first;
            let mut stop = end;
            if comptime!(seen.has_tiles()) {
                begin = first + to[tile as usize] * TILE;
                stop = u32::min(end, begin + TILE);
            }
            for token in begin..stop {
                let mut is_pair = true;
                if comptime!(seen.has_tiles()) {
                    is_pair = has_pair(to, tile, position % TILE, token - begin);
                }
                if is_pair {
                    let key = k_rows.at(batch, token, shared);
                    let score = dot(&query, k, key, dim);
                    let dp = dot(&grad, v, v_rows.at(batch, token, shared), dim);
                    let ds = f32::exp(score - lse[stat]) * (dp - delta[stat]) * scale;
                    add_scaled(&mut sum, ds, k, key, dim);
                }
            }
            tile += 2;
        }
        put(&sum, d_q, d_q_rows.at(batch, row, column), comptime!(seen.is_ranges()), dim);
    }
}

/// Computes the gradients of keys and values, in their layouts, with one unit (thread) per key. It sums over
/// the `group` heads of queries that share the head, in order; `heads` is the number of heads of keys.
#[cube(launch)]
pub(super) fn keys_values<N: Size>(
    q: &[Vector<f32, N>],
    k: &[Vector<f32, N>],
    v: &[Vector<f32, N>],
    dy: &[Vector<f32, N>],
    from: &[u32],
    to: &[u32],
    lse: &[f32],
    delta: &[f32],
    d_k: &mut [Vector<f32, N>],
    d_v: &mut [Vector<f32, N>],
    q_rows: Rows,
    k_rows: Rows,
    v_rows: Rows,
    y_rows: Rows,
    heads: u32,
    group: u32,
    tokens: u32,
    keys: u32,
    past: u32,
    window: u32,
    scale: f32,
    #[comptime] accumulate: bool,
    #[comptime] seen: Seen,
    #[comptime] dim: u32,
    #[comptime] units: u32,
) {
    let RowIndex { batch, head, row } = RowIndex::take(heads, keys, units);
    if row < keys {
        let column = head * dim;
        let key = take(k, k_rows.at(batch, row, column), scale, dim);
        let value = take(v, v_rows.at(batch, row, column), 1.0, dim);
        let mut d_key = zeros::<N>(dim);
        let mut d_value = zeros::<N>(dim);
        // Queries before the key do not attend to it, but for those of its prefix.
        let mut begin = u32::max(row, past) - past;
        // Nor do those whose window begins later, or whose document does.
        let mut end = u32::min(tokens, u32::max(row + window, past) - past);
        if comptime!(seen.is_ranges()) {
            begin = tokens;
            end = 0u32;
            for token in 0..tokens {
                if in_range(from, to, batch * tokens + token, row) {
                    begin = u32::min(begin, token);
                    end = token + 1;
                }
            }
        } else {
            if comptime!(seen.is_prefixed()) {
                let own = begin;
                for token in 0..own {
                    let end = end_key(to, batch * tokens + token, past + token, keys, seen);
                    if begin == own && end > row {
                        begin = token;
                    }
                }
            }
            if comptime!(seen.is_divided()) {
                let last = end;
                end = begin;
                for token in begin..last {
                    if first_key(from, batch * tokens + token, past + token, window, seen) <= row {
                        end = token + 1;
                    }
                }
            }
        }
        // Where the key's document begins: that of the first query that may attend to it. If none does, the
        // place is not used.
        let mut origin = 0u32;
        if comptime!(seen.has_tiles() && seen.is_divided()) {
            let at = u32::min(begin, tokens - 1);
            origin = u32::min(from[(batch * tokens + at) as usize], past + at);
        }
        let position = row - u32::min(row, origin);
        for member in 0..group {
            let of_queries = head * group + member;
            let tiles = tiles_of(to, of_queries, position, true, seen);
            let mut tile = tiles.at;
            while tile < tiles.end {
                let mut next = begin;
                let mut stop = end;
                let mut first_query = 0u32;
                if comptime!(seen.has_tiles()) {
                    // Positions of the tile's queries in the sequence.
                    first_query = origin + to[tile as usize] * TILE;
                    next = u32::max(begin, u32::max(first_query, past) - past);
                    stop = u32::min(end, u32::max(first_query + TILE, past) - past);
                }
                for token in next..stop {
                    let mut is_pair = true;
                    if comptime!(seen.has_tiles()) {
                        is_pair = has_pair(to, tile, past + token - first_query, position % TILE);
                    }
                    if is_pair {
                        let stat = ((batch * heads * group + of_queries) * tokens + token) as usize;
                        let query = q_rows.at(batch, token, of_queries * dim);
                        let grad = y_rows.at(batch, token, of_queries * dim);
                        let mut p = f32::exp(dot(&key, q, query, dim) - lse[stat]);
                        if comptime!(seen.is_ranges()) {
                            p = select(in_range(from, to, batch * tokens + token, row), p, 0.0);
                        }
                        let ds = p * (dot(&value, dy, grad, dim) - delta[stat]) * scale;
                        add_scaled(&mut d_value, p, dy, grad, dim);
                        add_scaled(&mut d_key, ds, q, query, dim);
                    }
                }
                tile += 2;
            }
        }
        put(&d_key, d_k, k_rows.at(batch, row, column), accumulate, dim);
        put(&d_value, d_v, v_rows.at(batch, row, column), accumulate, dim);
    }
}

/// Copies the keys and values of new tokens from `qkv` to the caches if `append`, else from the caches to
/// `qkv`. A row of `qkv` has queries, then `width` floats of keys, then as many of values.
#[cube(launch)]
pub(super) fn exchange(
    qkv: &mut [f32],
    keys: &mut [f32],
    values: &mut [f32],
    queries: u32,
    width: u32,
    tokens: u32,
    past: u32,
    capacity: u32,
    len: u32,
    #[comptime] append: bool,
) {
    let at = ABSOLUTE_POS as u32;
    if at < len {
        let col = at % width;
        let token = at / width % tokens;
        let batch = at / width / tokens;
        let key = (batch * tokens + token) * (queries + 2 * width) + queries + col;
        let value = (key + width) as usize;
        let key = key as usize;
        let cached = ((batch * capacity + past + token) * width + col) as usize;
        if comptime!(append) {
            keys[cached] = qkv[key];
            values[cached] = qkv[value];
        } else {
            qkv[key] = keys[cached];
            qkv[value] = values[cached];
        }
    }
}
