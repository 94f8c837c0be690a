//! Causal attention and its gradients without the matrix of scores (Dao 2022): a unit keeps a row of queries or keys to
//! itself, and the cube passes tiles of the other side through shared memory. Sums run in the order of the tokens, and
//! nothing is added atomically, so that the same inputs give the same bits.

use cubecl::prelude::*;

/// Where queries and keys lie: `[batch, token, head, dim]`, with rows of some stride and a first element.
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
    /// The cube's first row.
    first: u32,
    /// The unit's own, which may lie behind the last: such units keep step with the others and write nothing.
    row: u32,
}

#[cube]
impl Seat {
    /// Of a cube that takes `units` of the `rows` rows of a head.
    fn take(heads: u32, rows: u32, #[comptime] dim: u32, #[comptime] units: u32) -> Seat {
        let blocks = rows.div_ceil(units);
        let cube = CUBE_POS as u32;
        let head = cube / blocks % heads;
        let first = cube % blocks * units;
        Seat { batch: cube / blocks / heads, head, column: head * dim, first, row: first + UNIT_POS }
    }
}

/// A score that no softmax sees: small enough to vanish, and finite, because not every device computes with infinities.
const MASKED: f32 = -1e30;

/// Copies rows of a head into shared memory, `tile` tokens from `first` on; zeros beyond `end`.
#[cube]
fn load(
    from: &[f32],
    rows: &Rows,
    to: &mut Shared<[f32]>,
    batch: u32,
    column: u32,
    first: u32,
    end: u32,
    #[comptime] dim: u32,
    #[comptime] tile: u32,
    #[comptime] units: u32,
) {
    let mut i = UNIT_POS;
    while i < tile * dim {
        let token = first + i / dim;
        let mut value = 0.0f32;
        if token < end {
            value = from[rows.at(batch, token, column + i % dim)];
        }
        to[i as usize] = value;
        i += units;
    }
}

/// `y = softmax(scale q k^T) v` for queries that stand `past` tokens after the first key; `lse` where wanted.
#[cube(launch)]
pub(super) fn forward(
    q: &[f32],
    k: &[f32],
    v: &[f32],
    y: &mut [f32],
    lse: &mut [f32],
    q_rows: Rows,
    k_rows: Rows,
    v_rows: Rows,
    heads: u32,
    tokens: u32,
    past: u32,
    scale: f32,
    #[comptime] keep: bool,
    #[comptime] dim: u32,
    #[comptime] tile: u32,
    #[comptime] units: u32,
) {
    let mut keys = Shared::<[f32]>::new_slice((tile * dim) as usize);
    let mut values = Shared::<[f32]>::new_slice((tile * dim) as usize);
    let mut query = Array::<f32>::new(dim as usize);
    let mut sum = Array::<f32>::new(dim as usize);
    let mut scores = Array::<f32>::new(tile as usize);

    let Seat { batch, head, column, first: cube_row, row } = Seat::take(heads, tokens, dim, units);
    let query_row = u32::min(row, tokens - 1);
    #[unroll]
    for d in 0..dim {
        query[d as usize] = q[q_rows.at(batch, query_row, column + d)] * scale;
        sum[d as usize] = 0.0;
    }
    let mut top = f32::new(MASKED);
    let mut total = 0.0f32;
    let end = past + u32::min(tokens, cube_row + units);
    let mut first = 0u32;
    while first < end {
        load(k, &k_rows, &mut keys, batch, column, first, end, dim, tile, units);
        load(v, &v_rows, &mut values, batch, column, first, end, dim, tile, units);
        sync_cube();
        let mut larger = top;
        for j in 0..tile {
            let mut score = f32::new(MASKED);
            if first + j <= past + query_row {
                score = 0.0f32;
                #[unroll]
                for d in 0..dim {
                    score += query[d as usize] * keys[(j * dim + d) as usize];
                }
            }
            scores[j as usize] = score;
            larger = f32::max(larger, score);
        }
        let shrink = f32::exp(top - larger);
        top = larger;
        total *= shrink;
        #[unroll]
        for d in 0..dim {
            sum[d as usize] *= shrink;
        }
        for j in 0..tile {
            if first + j <= past + query_row {
                let p = f32::exp(scores[j as usize] - top);
                total += p;
                #[unroll]
                for d in 0..dim {
                    sum[d as usize] += p * values[(j * dim + d) as usize];
                }
            }
        }
        sync_cube();
        first += tile;
    }
    if row < tokens {
        let inverse = 1.0 / total;
        let to = ((batch * tokens + row) * heads + head) * dim;
        #[unroll]
        for d in 0..dim {
            y[(to + d) as usize] = sum[d as usize] * inverse;
        }
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

/// Gradient of the queries, in the layout of the queries: a unit a query, tiles of keys and values.
#[cube(launch)]
pub(super) fn queries(
    q: &[f32],
    k: &[f32],
    v: &[f32],
    dy: &[f32],
    lse: &[f32],
    delta: &[f32],
    d_q: &mut [f32],
    q_rows: Rows,
    k_rows: Rows,
    v_rows: Rows,
    heads: u32,
    tokens: u32,
    past: u32,
    scale: f32,
    #[comptime] dim: u32,
    #[comptime] tile: u32,
    #[comptime] units: u32,
) {
    let mut keys = Shared::<[f32]>::new_slice((tile * dim) as usize);
    let mut values = Shared::<[f32]>::new_slice((tile * dim) as usize);
    let mut query = Array::<f32>::new(dim as usize);
    let mut grad = Array::<f32>::new(dim as usize);
    let mut sum = Array::<f32>::new(dim as usize);

    let Seat { batch, head, column, first: cube_row, row } = Seat::take(heads, tokens, dim, units);
    let query_row = u32::min(row, tokens - 1);
    let y_at = ((batch * tokens + query_row) * heads + head) * dim;
    #[unroll]
    for d in 0..dim {
        query[d as usize] = q[q_rows.at(batch, query_row, column + d)] * scale;
        grad[d as usize] = dy[(y_at + d) as usize];
        sum[d as usize] = 0.0;
    }
    let stat = ((batch * heads + head) * tokens + query_row) as usize;
    let log = lse[stat];
    let mine = delta[stat];
    let end = past + u32::min(tokens, cube_row + units);
    let mut first = 0u32;
    while first < end {
        load(k, &k_rows, &mut keys, batch, column, first, end, dim, tile, units);
        load(v, &v_rows, &mut values, batch, column, first, end, dim, tile, units);
        sync_cube();
        for j in 0..tile {
            if first + j <= past + query_row {
                let mut score = 0.0f32;
                let mut dp = 0.0f32;
                #[unroll]
                for d in 0..dim {
                    score += query[d as usize] * keys[(j * dim + d) as usize];
                    dp += grad[d as usize] * values[(j * dim + d) as usize];
                }
                let ds = f32::exp(score - log) * (dp - mine) * scale;
                #[unroll]
                for d in 0..dim {
                    sum[d as usize] += ds * keys[(j * dim + d) as usize];
                }
            }
        }
        sync_cube();
        first += tile;
    }
    if row < tokens {
        #[unroll]
        for d in 0..dim {
            d_q[q_rows.at(batch, row, column + d)] = sum[d as usize];
        }
    }
}

/// Gradients of keys and values, in their layouts: a unit a key, tiles of queries and of the gradients of their results.
#[cube(launch)]
pub(super) fn keys_values(
    q: &[f32],
    k: &[f32],
    v: &[f32],
    dy: &[f32],
    lse: &[f32],
    delta: &[f32],
    d_k: &mut [f32],
    d_v: &mut [f32],
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
    #[comptime] tile: u32,
    #[comptime] units: u32,
) {
    let mut queries = Shared::<[f32]>::new_slice((tile * dim) as usize);
    let mut grads = Shared::<[f32]>::new_slice((tile * dim) as usize);
    let mut key = Array::<f32>::new(dim as usize);
    let mut value = Array::<f32>::new(dim as usize);
    let mut d_key = Array::<f32>::new(dim as usize);
    let mut d_value = Array::<f32>::new(dim as usize);

    let seen = past + tokens;
    let Seat { batch, head, column, first: cube_row, row } = Seat::take(heads, seen, dim, units);
    let key_row = u32::min(row, seen - 1);
    #[unroll]
    for d in 0..dim {
        key[d as usize] = k[k_rows.at(batch, key_row, column + d)] * scale;
        value[d as usize] = v[v_rows.at(batch, key_row, column + d)];
        d_key[d as usize] = 0.0;
        d_value[d as usize] = 0.0;
    }
    // No query before the cube's first key sees any of its keys.
    let mut first = (u32::max(cube_row, past) - past) / tile * tile;
    while first < tokens {
        load(q, &q_rows, &mut queries, batch, column, first, tokens, dim, tile, units);
        load(dy, &y_rows, &mut grads, batch, column, first, tokens, dim, tile, units);
        sync_cube();
        for j in 0..tile {
            let token = first + j;
            if token < tokens && past + token >= key_row {
                let stat = ((batch * heads + head) * tokens + token) as usize;
                let mut score = 0.0f32;
                let mut dp = 0.0f32;
                #[unroll]
                for d in 0..dim {
                    score += key[d as usize] * queries[(j * dim + d) as usize];
                    dp += value[d as usize] * grads[(j * dim + d) as usize];
                }
                let p = f32::exp(score - lse[stat]);
                let ds = p * (dp - delta[stat]) * scale;
                #[unroll]
                for d in 0..dim {
                    d_value[d as usize] += p * grads[(j * dim + d) as usize];
                    d_key[d as usize] += ds * queries[(j * dim + d) as usize];
                }
            }
        }
        sync_cube();
        first += tile;
    }
    if row < seen {
        #[unroll]
        for d in 0..dim {
            let to_k = k_rows.at(batch, row, column + d);
            let to_v = v_rows.at(batch, row, column + d);
            if comptime!(accumulate) {
                d_k[to_k] += d_key[d as usize];
                d_v[to_v] += d_value[d as usize];
            } else {
                d_k[to_k] = d_key[d as usize];
                d_v[to_v] = d_value[d as usize];
            }
        }
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
