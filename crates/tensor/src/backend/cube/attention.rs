//! Causal attention and its gradients without the matrix of scores (Dao 2022): a unit keeps a row of queries or
//! keys to itself and walks the rows of the other side, which its neighbours read at the same time. Sums run in
//! the order of the tokens, and nothing is added atomically, so that the same inputs give the same bits. No
//! unit waits for another: a rasteriser on a processor takes minutes to compile barriers between this many
//! values.

#![expect(
    clippy::trivially_copy_pass_by_ref,
    clippy::range_plus_one,
    reason = "kernels know rows of a unit's own by reference, and ranges without their end"
)]

use cubecl::prelude::*;

/// Where queries and keys lie: `[batch, token, head, dim]`, with rows of some stride and a first element; in
/// vectors.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(super) struct Rows {
    /// Elements from a token to the next.
    pub(super) stride: u32,
    /// Elements from a sequence to the next.
    pub(super) batch: u32,
    /// First element.
    pub(super) start: u32,
}

#[cube]
impl Rows {
    /// The first element of a head's row.
    fn at(&self, batch: u32, token: u32, column: u32) -> usize {
        (self.start + batch * self.batch + token * self.stride + column) as usize
    }
}

/// Where a unit works: a row of one head.
#[derive(CubeType, Clone, Copy)]
struct Seat {
    batch: u32,
    head: u32,
    /// The head's first column.
    column: u32,
    /// The unit's own, which may lie behind the last.
    row: u32,
}

#[cube]
impl Seat {
    /// Of a cube that takes `units` of the `rows` rows of a head.
    fn take(heads: u32, rows: u32, #[comptime] dim: u32, #[comptime] units: u32) -> Seat {
        let blocks = rows.div_ceil(units);
        let cube = CUBE_POS as u32;
        let head = cube / blocks % heads;
        let row = cube % blocks * units + UNIT_POS;
        Seat { batch: cube / blocks / heads, head, column: head * dim, row }
    }
}

/// A score that no softmax sees: small enough to vanish, and finite, because not every device computes with
/// infinities.
const MASKED: f32 = -1e30;

/// Keys whose scores a unit holds at a time: the sum so far is rescaled once for all of them.
const BLOCK: u32 = 8;

/// `x . y` of a unit's own row and one in memory, `dim` vectors each.
#[cube]
fn dot<N: Size>(x: &Array<Vector<f32, N>>, y: &[Vector<f32, N>], at: usize, #[comptime] dim: u32) -> f32 {
    let mut sum = Vector::<f32, N>::zeroed();
    #[unroll]
    for d in 0..dim {
        sum += x[d as usize] * y[at + d as usize];
    }
    sum.vector_sum()
}

/// `x += factor y`, of a row in memory.
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

/// A row times a factor, to keep.
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

/// A row of zeros.
#[cube]
fn zeros<N: Size>(#[comptime] dim: u32) -> Array<Vector<f32, N>> {
    let mut row = Array::<Vector<f32, N>>::new(dim as usize);
    #[unroll]
    for d in 0..dim {
        row[d as usize] = Vector::zeroed();
    }
    row
}

/// Writes a row, or adds it.
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

/// `y = softmax(scale q k^T) v` for queries that stand `past` tokens after the first key; `lse` where wanted.
#[cube(launch)]
pub(super) fn forward<N: Size>(
    q: &[Vector<f32, N>],
    k: &[Vector<f32, N>],
    v: &[Vector<f32, N>],
    y: &mut [Vector<f32, N>],
    lse: &mut [f32],
    q_rows: Rows,
    k_rows: Rows,
    v_rows: Rows,
    y_rows: Rows,
    heads: u32,
    tokens: u32,
    past: u32,
    scale: f32,
    #[comptime] keep: bool,
    #[comptime] dim: u32,
    #[comptime] units: u32,
) {
    let Seat { batch, head, column, row } = Seat::take(heads, tokens, dim, units);
    if row < tokens {
        let query = take(q, q_rows.at(batch, row, column), scale, dim);
        let mut sum = zeros::<N>(dim);
        let mut scores = Array::<f32>::new(BLOCK as usize);
        let mut top = f32::new(MASKED);
        let mut total = 0.0f32;
        let end = past + row + 1;
        let mut first = 0u32;
        while first < end {
            let mut larger = top;
            #[unroll]
            for j in 0..BLOCK {
                let mut score = f32::new(MASKED);
                if first + j < end {
                    score = dot(&query, k, k_rows.at(batch, first + j, column), dim);
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
                if first + j < end {
                    let p = f32::exp(scores[j as usize] - top);
                    total += p;
                    add_scaled(&mut sum, p, v, v_rows.at(batch, first + j, column), dim);
                }
            }
            first += BLOCK;
        }
        let inverse = Vector::new(1.0 / total);
        #[unroll]
        for d in 0..dim {
            sum[d as usize] *= inverse;
        }
        put(&sum, y, y_rows.at(batch, row, column), false, dim);
        if comptime!(keep) {
            lse[((batch * heads + head) * tokens + row) as usize] = top + f32::ln(total);
        }
    }
}

/// `delta[batch, head, token] = y . dy` of each row of a head.
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

/// Gradient of the queries, in the layout of the queries: a unit a query.
#[cube(launch)]
pub(super) fn queries<N: Size>(
    q: &[Vector<f32, N>],
    k: &[Vector<f32, N>],
    v: &[Vector<f32, N>],
    dy: &[Vector<f32, N>],
    lse: &[f32],
    delta: &[f32],
    d_q: &mut [Vector<f32, N>],
    q_rows: Rows,
    k_rows: Rows,
    v_rows: Rows,
    y_rows: Rows,
    heads: u32,
    tokens: u32,
    past: u32,
    scale: f32,
    #[comptime] dim: u32,
    #[comptime] units: u32,
) {
    let Seat { batch, head, column, row } = Seat::take(heads, tokens, dim, units);
    if row < tokens {
        let query = take(q, q_rows.at(batch, row, column), scale, dim);
        let grad = take(dy, y_rows.at(batch, row, column), 1.0, dim);
        let mut sum = zeros::<N>(dim);
        let stat = ((batch * heads + head) * tokens + row) as usize;
        for token in 0..past + row + 1 {
            let key = k_rows.at(batch, token, column);
            let score = dot(&query, k, key, dim);
            let dp = dot(&grad, v, v_rows.at(batch, token, column), dim);
            let ds = f32::exp(score - lse[stat]) * (dp - delta[stat]) * scale;
            add_scaled(&mut sum, ds, k, key, dim);
        }
        put(&sum, d_q, q_rows.at(batch, row, column), false, dim);
    }
}

/// Gradients of keys and values, in their layouts: a unit a key.
#[cube(launch)]
pub(super) fn keys_values<N: Size>(
    q: &[Vector<f32, N>],
    k: &[Vector<f32, N>],
    v: &[Vector<f32, N>],
    dy: &[Vector<f32, N>],
    lse: &[f32],
    delta: &[f32],
    d_k: &mut [Vector<f32, N>],
    d_v: &mut [Vector<f32, N>],
    q_rows: Rows,
    k_rows: Rows,
    v_rows: Rows,
    y_rows: Rows,
    heads: u32,
    tokens: u32,
    past: u32,
    scale: f32,
    #[comptime] accumulate: bool,
    #[comptime] dim: u32,
    #[comptime] units: u32,
) {
    let seen = past + tokens;
    let Seat { batch, head, column, row } = Seat::take(heads, seen, dim, units);
    if row < seen {
        let key = take(k, k_rows.at(batch, row, column), scale, dim);
        let value = take(v, v_rows.at(batch, row, column), 1.0, dim);
        let mut d_key = zeros::<N>(dim);
        let mut d_value = zeros::<N>(dim);
        // No query before the key sees it.
        for token in u32::max(row, past) - past..tokens {
            let stat = ((batch * heads + head) * tokens + token) as usize;
            let query = q_rows.at(batch, token, column);
            let grad = y_rows.at(batch, token, column);
            let p = f32::exp(dot(&key, q, query, dim) - lse[stat]);
            let ds = p * (dot(&value, dy, grad, dim) - delta[stat]) * scale;
            add_scaled(&mut d_value, p, dy, grad, dim);
            add_scaled(&mut d_key, ds, q, query, dim);
        }
        put(&d_key, d_k, k_rows.at(batch, row, column), accumulate, dim);
        put(&d_value, d_v, v_rows.at(batch, row, column), accumulate, dim);
    }
}

/// Copies the keys and values of new tokens to their caches, or what the caches have of them back.
#[cube(launch)]
pub(super) fn exchange(
    qkv: &mut [f32],
    keys: &mut [f32],
    values: &mut [f32],
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
        let packed = (batch * tokens + token) * 3 * width + col;
        let key = (packed + width) as usize;
        let value = (packed + 2 * width) as usize;
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
