//! Causal attention of all heads, forward and backward, in tiles, without storing a matrix of all scores.
//!
//! One task computes one head of one sequence. No sum crosses tasks, so bits do not depend on the number of
//! threads. A task loops over tiles of keys and, for each, over the blocks of queries that attend to it; a
//! block is as high as a register tile. Rows of queries are read in place. Keys and values are packed into
//! panels in the thread's scratch memory. Meanwhile, the rows of the thread's next head are prefetched: they
//! are strided, and hardware prefetchers do not predict them.
//!
//! Within a register tile, masked weights are multiplied as zeros. A NaN in a value can therefore reach up to
//! seven earlier queries.

mod backward;
mod forward;
mod head;
mod product;
mod rows;
mod softmax;
#[cfg(test)]
mod tests;

use std::cell::RefCell;
use std::marker::PhantomData;

use self::backward::Gradients;
use self::head::Head;
use self::rows::{Rows, RowsMut};
use super::pool::Pool;
use super::simd::Isa;
use crate::Shape;

/// Sizes of an attention whose heads are side by side in each token.
#[derive(Debug, Clone, Copy)]
pub(super) struct Layout {
    batch: usize,
    /// Number of queries of each sequence.
    tokens: usize,
    heads: usize,
    head_dim: usize,
}

impl Layout {
    /// Creates the layout of an output of shape `[B, T, C]`. `heads` must divide `C`.
    pub(super) fn packed(y: Shape, heads: usize) -> Self {
        let (rows, cols) = (y.rows(), y.cols());
        let tokens = *y.dims().get(1).expect("the output has shape [B, T, C]");
        Self {
            batch: rows.checked_div(tokens).unwrap_or(0),
            tokens,
            heads,
            head_dim: cols.checked_div(heads).unwrap_or(0),
        }
    }

    /// Returns the number of floats of one token's output.
    const fn width(self) -> usize {
        self.heads * self.head_dim
    }

    /// Returns the sequence and the head of a task.
    const fn head(self, task: usize) -> (usize, usize) {
        (task / self.heads, task % self.heads)
    }

    /// Returns the task whose rows are prefetched while `task` runs: the one that the same thread runs next if
    /// all tasks take equally long. `None` if its rows of `operands` matrices would fill too much of L2 cache.
    fn next(self, task: usize, threads: usize, operands: usize) -> Option<usize> {
        /// Maximum number of prefetched floats: half a MiB.
        const MOST: usize = 128 * 1024;
        let next = task + threads;
        (next < self.tasks() && operands * self.tokens * self.head_dim <= MOST).then_some(next)
    }

    /// Returns the number of tasks: the heads of all sequences.
    const fn tasks(self) -> usize {
        if self.tokens == 0 || self.head_dim == 0 { 0 } else { self.batch * self.heads }
    }
}

/// Layout of heads in a buffer: token `t` of sequence `b` begins at `start + (b * tokens + t) * stride`.
#[derive(Debug, Clone, Copy)]
struct HeadLayout {
    start: usize,
    tokens: usize,
    stride: usize,
}

impl HeadLayout {
    /// Returns the index of the first element of one head of one sequence.
    const fn of(self, l: Layout, b: usize, h: usize) -> usize {
        self.start + b * self.tokens * self.stride + h * l.head_dim
    }

    /// Returns the rows of one head of one sequence.
    fn rows(self, data: &[f32], l: Layout, (b, h): (usize, usize)) -> Rows<'_> {
        Rows::new(&data[self.of(l, b, h)..], self.stride, l.head_dim)
    }

    /// Returns the minimum length of a buffer that contains all heads.
    const fn end(self, l: Layout) -> usize {
        if l.tasks() == 0 { 0 } else { self.start + (l.batch * self.tokens - 1) * self.stride + l.width() }
    }
}

/// An output buffer in which each task writes the rows of its own head.
#[derive(Clone, Copy)]
struct Output<'a> {
    pointer: *mut f32,
    len: usize,
    owner: PhantomData<&'a mut [f32]>,
}

#[expect(unsafe_code, reason = "tasks write disjoint rows of one buffer")]
// SAFETY: the pointer is used only through methods whose callers guarantee disjoint parts.
unsafe impl Sync for Output<'_> {}

impl<'a> Output<'a> {
    fn new(data: &'a mut [f32]) -> Self {
        Self { pointer: data.as_mut_ptr(), len: data.len(), owner: PhantomData }
    }

    /// Returns the rows of one head of one sequence.
    ///
    /// # Safety
    /// No other code may use these rows during their lifetime.
    #[expect(unsafe_code, reason = "tasks write disjoint rows of one buffer")]
    unsafe fn rows(&self, place: HeadLayout, l: Layout, (b, h): (usize, usize)) -> RowsMut<'a> {
        assert!(place.end(l) <= self.len, "heads must lie within their buffers");
        let start = place.of(l, b, h);
        // SAFETY: within the buffer, which is borrowed exclusively for `'a`; the caller guarantees that the
        // rows are not shared.
        unsafe { RowsMut::shared(self.pointer.add(start), self.len - start, place.stride) }
    }

    /// Returns `len` floats from `start` on.
    ///
    /// # Safety
    /// No other code may use these floats during their lifetime.
    #[expect(unsafe_code, reason = "tasks write disjoint parts of one buffer")]
    unsafe fn part(&self, start: usize, len: usize) -> &'a mut [f32] {
        assert!(start <= self.len && len <= self.len - start, "the part must lie within the buffer");
        // SAFETY: within the buffer, which is borrowed exclusively for `'a`; the caller guarantees that the
        // part is not shared.
        unsafe { std::slice::from_raw_parts_mut(self.pointer.add(start), len) }
    }
}

thread_local! {
    /// Packed panels of this thread's current head. The buffer is kept between calls.
    static SCRATCH: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// Forward pass: `y = softmax(q kᵀ / sqrt(head_dim)) v` per head. A query attends to the keys up to its own
/// position.
struct Forward<'a> {
    isa: Isa,
    layout: Layout,
    /// Number of keys of each sequence. The queries are those of the last tokens.
    keys: usize,
    q: (&'a [f32], HeadLayout),
    k: (&'a [f32], HeadLayout),
    v: (&'a [f32], HeadLayout),
}

impl Forward<'_> {
    /// Writes `y` `[B, T, C]` and, if given, `lse` `[B, heads, T]`.
    fn run(&self, pool: &Pool, y: &mut [f32], lse: Option<&mut [f32]>) {
        let l = self.layout;
        let place = HeadLayout { start: 0, tokens: l.tokens, stride: l.width() };
        for (len, place) in [
            (self.q.0.len(), self.q.1),
            (self.k.0.len(), self.k.1),
            (self.v.0.len(), self.v.1),
            (y.len(), place),
        ] {
            assert!(place.end(l) <= len, "heads must lie within their buffers");
        }
        assert!(self.keys >= l.tokens, "every query must have a key");
        let y = Output::new(y);
        let lse = lse.map(Output::new);
        let (y, lse) = (&y, &lse);
        let reads = |task| [self.q, self.k, self.v].map(|(data, place)| place.rows(data, l, l.head(task)));
        pool.run(l.tasks(), |task| {
            let head = Head { isa: self.isa, queries: l.tokens, keys: self.keys, width: l.head_dim };
            SCRATCH.with_borrow_mut(|scratch| {
                #[expect(unsafe_code, reason = "tasks write disjoint rows of one buffer")]
                // SAFETY: each task has its own head, hence its own columns of `y` and its own part of `lse`.
                let (y, lse) = unsafe {
                    let lse = lse.as_ref().map(|lse| lse.part(task * l.tokens, l.tokens));
                    (y.rows(place, l, l.head(task)), lse)
                };
                let next = l.next(task, pool.threads(), 3).map(reads);
                head.forward(reads(task), y, lse, next, scratch);
            });
        });
    }
}

/// Gradient of [`Forward`].
struct Backward<'a> {
    isa: Isa,
    layout: Layout,
    /// Number of keys of each sequence, as in [`Forward`].
    keys: usize,
    q: (&'a [f32], HeadLayout),
    k: (&'a [f32], HeadLayout),
    v: (&'a [f32], HeadLayout),
    /// Output of the forward pass: `[B, T, C]`.
    y: &'a [f32],
    /// Log-sum-exp of the forward pass: `[B, heads, T]`.
    lse: &'a [f32],
    /// Gradient of `y`: `[B, T, C]`.
    dy: &'a [f32],
    /// Whether to add to the gradients of keys and values instead of overwriting them.
    accumulate: bool,
}

impl Backward<'_> {
    /// Writes the gradients of queries, keys and values.
    fn run(&self, pool: &Pool, gradients: [(Output<'_>, HeadLayout); 3]) {
        let l = self.layout;
        let out = HeadLayout { start: 0, tokens: l.tokens, stride: l.width() };
        for (len, place) in [
            (self.q.0.len(), self.q.1),
            (self.k.0.len(), self.k.1),
            (self.v.0.len(), self.v.1),
            (self.y.len().min(self.dy.len()), out),
        ] {
            assert!(place.end(l) <= len, "heads must lie within their buffers");
        }
        assert!(self.keys >= l.tokens, "every query must have a key");
        let gradients = &gradients;
        let reads = |task| {
            [self.q, self.k, self.v, (self.y, out), (self.dy, out)]
                .map(|(data, place)| place.rows(data, l, l.head(task)))
        };
        pool.run(l.tasks(), |task| {
            let lse = &self.lse[task * l.tokens..][..l.tokens];
            let head = Head { isa: self.isa, queries: l.tokens, keys: self.keys, width: l.head_dim };
            #[expect(unsafe_code, reason = "tasks write disjoint rows of one buffer")]
            // SAFETY: each task has its own head, hence its own columns of the three gradients.
            let [q, k, v] =
                gradients.each_ref().map(|(data, place)| unsafe { data.rows(*place, l, l.head(task)) });
            let gradients = Gradients { q, k, v, accumulate: self.accumulate };
            let next = l.next(task, pool.threads(), 5).map(reads);
            SCRATCH.with_borrow_mut(|scratch| head.backward(reads(task), lse, gradients, next, scratch));
        });
    }
}

/// Returns the layouts of the three thirds (queries, keys, values) of a `[B, T, 3 C]` buffer.
const fn thirds(l: Layout) -> [HeadLayout; 3] {
    let (tokens, width) = (l.tokens, l.width());
    let stride = 3 * width;
    [
        HeadLayout { start: 0, tokens, stride },
        HeadLayout { start: width, tokens, stride },
        HeadLayout { start: 2 * width, tokens, stride },
    ]
}

/// Computes attention of `qkv` `[B, T, 3 C]`. Writes `y` `[B, T, C]` and `lse` `[B, heads, T]`, the log-sum-exp
/// of each row of scores, which [`train_backward`] needs.
pub(super) fn train_forward(pool: &Pool, l: Layout, qkv: &[f32], y: &mut [f32], lse: &mut [f32]) {
    forward(Isa::detect(), pool, l, qkv, y, lse);
}

fn forward(isa: Isa, pool: &Pool, l: Layout, qkv: &[f32], y: &mut [f32], lse: &mut [f32]) {
    let [q, k, v] = thirds(l).map(|place| (qkv, place));
    Forward { isa, layout: l, keys: l.tokens, q, k, v }.run(pool, y, Some(lse));
}

/// Computes the gradient of [`train_forward`]: writes `d_qkv` `[B, T, 3 C]`, given `dy` `[B, T, C]` and the
/// inputs and outputs of the forward pass.
pub(super) fn train_backward(
    pool: &Pool,
    l: Layout,
    qkv: &[f32],
    y: &[f32],
    lse: &[f32],
    dy: &[f32],
    d_qkv: &mut [f32],
) {
    backward(Isa::detect(), pool, l, [qkv, y, lse, dy], d_qkv);
}

fn backward(isa: Isa, pool: &Pool, l: Layout, [qkv, y, lse, dy]: [&[f32]; 4], d_qkv: &mut [f32]) {
    let [q, k, v] = thirds(l).map(|place| (qkv, place));
    let d_qkv = Output::new(d_qkv);
    let accumulate = false;
    let pass = Backward { isa, layout: l, keys: l.tokens, q, k, v, y, lse, dy, accumulate };
    pass.run(pool, thirds(l).map(|place| (d_qkv, place)));
}

/// Position of new tokens in the caches of keys and values, which are `[B, capacity, C]`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Cache {
    /// Number of tokens before the new ones.
    pub(super) past: usize,
    pub(super) capacity: usize,
}

impl Cache {
    /// Returns the layout of heads in a cache.
    const fn head_layout(self, l: Layout) -> HeadLayout {
        HeadLayout { start: 0, tokens: self.capacity, stride: l.width() }
    }

    /// For each new token, returns the start of its row in `[B, T, 3 C]` and of its row in a cache.
    fn rows(self, l: Layout) -> impl Iterator<Item = (usize, usize)> {
        let at = move |(b, t)| (3 * (b * l.tokens + t), b * self.capacity + self.past + t);
        let all = (0..l.batch).flat_map(move |b| (0..l.tokens).map(move |t| (b, t)));
        all.map(at).map(move |(qkv, cache)| (qkv * l.width(), cache * l.width()))
    }
}

/// Computes attention of new tokens `qkv` `[B, T, 3 C]` with caches of keys and values `[B, capacity, C]`.
/// Appends the new keys and values, then writes `y` `[B, T, C]` and, if given, `lse` as [`train_forward`] does.
pub(super) fn cached_forward(
    pool: &Pool,
    l: Layout,
    cache: Cache,
    qkv: &[f32],
    [keys, values]: [&mut [f32]; 2],
    y: &mut [f32],
    lse: Option<&mut [f32]>,
) {
    forward_over(Isa::detect(), pool, (l, cache), qkv, [keys, values], y, lse);
}

fn forward_over(
    isa: Isa,
    pool: &Pool,
    (l, cache): (Layout, Cache),
    qkv: &[f32],
    [keys, values]: [&mut [f32]; 2],
    y: &mut [f32],
    lse: Option<&mut [f32]>,
) {
    assert!(cache.past + l.tokens <= cache.capacity, "the cache must have room for the new tokens");
    let c = l.width();
    for (from, to) in cache.rows(l) {
        keys[to..to + c].copy_from_slice(&qkv[from + c..][..c]);
        values[to..to + c].copy_from_slice(&qkv[from + 2 * c..][..c]);
    }
    let (q, k, v) = ((qkv, thirds(l)[0]), (&*keys, cache.head_layout(l)), (&*values, cache.head_layout(l)));
    Forward { isa, layout: l, keys: cache.past + l.tokens, q, k, v }.run(pool, y, lse);
}

/// Computes the gradient of [`cached_forward`], given `dy` `[B, T, C]` and its inputs and outputs. Adds to the
/// gradients of all keys and values that the new tokens attended to, and writes `d_qkv` `[B, T, 3 C]`, which
/// includes the gradients of the new tokens' own keys and values.
pub(super) fn cached_backward(
    pool: &Pool,
    l: Layout,
    cache: Cache,
    [qkv, keys, values, y, lse, dy]: [&[f32]; 6],
    [d_qkv, d_keys, d_values]: [&mut [f32]; 3],
) {
    backward_over(
        Isa::detect(),
        pool,
        (l, cache),
        [qkv, keys, values, y, lse, dy],
        [d_qkv, d_keys, d_values],
    );
}

fn backward_over(
    isa: Isa,
    pool: &Pool,
    (l, cache): (Layout, Cache),
    [qkv, keys, values, y, lse, dy]: [&[f32]; 6],
    [d_qkv, d_keys, d_values]: [&mut [f32]; 3],
) {
    let (q, k, v) = ((qkv, thirds(l)[0]), (keys, cache.head_layout(l)), (values, cache.head_layout(l)));
    let keys = cache.past + l.tokens;
    let pass = Backward { isa, layout: l, keys, q, k, v, y, lse, dy, accumulate: true };
    let [dq, dk, dv] = [&mut *d_qkv, &mut *d_keys, &mut *d_values].map(Output::new);
    pass.run(pool, [(dq, thirds(l)[0]), (dk, cache.head_layout(l)), (dv, cache.head_layout(l))]);
    let c = l.width();
    for (to, from) in cache.rows(l) {
        d_qkv[to + c..][..c].copy_from_slice(&d_keys[from..][..c]);
        d_qkv[to + 2 * c..][..c].copy_from_slice(&d_values[from..][..c]);
    }
}
