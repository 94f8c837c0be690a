//! Attention of all heads, forward and backward, in tiles, without storing a matrix of all scores.
//!
//! A task of the forward pass computes one head of queries of one sequence, or all that share a head of keys
//! if there is one token. A task of the backward pass computes all heads of queries that share one head of
//! keys, in order. No sum crosses tasks, so bits do not depend on the number of threads. A task loops over
//! tiles of keys and, for each, over the blocks of queries that attend to it; a block is as high as a
//! register tile. Rows of queries are read in place. Keys and values are packed into panels in the thread's
//! scratch memory. Meanwhile, the rows of the thread's next head are prefetched: they are strided, and
//! hardware prefetchers do not predict them.
//!
//! A task computes the documents of its sequence one after another, each as a head whose first key is the
//! document's. So nothing of other documents is read, and a document has the bits that it has alone. The
//! queries of a document's prefix attend to as many keys as the last of them.
//!
//! Where each query has its own range of keys, a sequence is one head, and a tile of keys meets the queries
//! from the first to the last one whose range has some of it.
//!
//! Within a register tile, masked weights are multiplied as zeros. A NaN in a value can therefore reach up to
//! seven earlier queries.

mod backward;
mod forward;
mod head;
mod over;
mod product;
mod rows;
mod seen;
mod softmax;
mod tiles;
#[cfg(test)]
mod tests;

use std::cell::RefCell;
use std::marker::PhantomData;
use std::ops::Range;

use self::backward::Gradients;
use self::head::Head;
pub(super) use self::over::Over;
use self::rows::{Rows, RowsMut};
use self::seen::{Causal, Ranges, Seen};
use self::tiles::Tiles;
use super::documents::{Document, Documents};
use super::pool::Pool;
use super::simd::Isa;
use crate::{AttendedKeys, Heads, Mask, Shape};

/// Sizes of an attention whose heads are side by side in each token.
#[derive(Debug, Clone, Copy)]
pub(super) struct Layout {
    batch: usize,
    /// Number of queries of each sequence.
    tokens: usize,
    heads: Heads,
    head_dim: usize,
    /// Number of keys up to its own that a query attends to at most.
    window: usize,
}

impl Layout {
    /// Creates the layout of an output of shape `[B, T, C]`. The number of heads of queries must divide `C`.
    pub(super) fn packed(y: Shape, heads: Heads, window: Option<usize>) -> Self {
        let (rows, cols) = (y.rows(), y.cols());
        let tokens = *y.dims().get(1).expect("the output has shape [B, T, C]");
        Self {
            batch: rows.checked_div(tokens).unwrap_or(0),
            tokens,
            heads,
            head_dim: cols.checked_div(heads.query).unwrap_or(0),
            window: window.unwrap_or(usize::MAX).max(1),
        }
    }

    /// Returns the number of floats of one token's output.
    const fn width(self) -> usize {
        self.heads.query * self.head_dim
    }

    /// Returns the number of floats of one token's keys, or of its values.
    const fn kv_width(self) -> usize {
        self.heads.kv * self.head_dim
    }

    /// Returns the number of heads of queries that attend to the same head of keys.
    const fn group(self) -> usize {
        self.heads.query / self.heads.kv
    }

    /// Returns the head of queries of a sequence, counted from the first sequence.
    const fn head(self, index: usize) -> QueryHead {
        let (sequence, query) = (index / self.heads.query, index % self.heads.query);
        QueryHead { sequence, query, kv: query / self.group() }
    }

    /// Returns the sizes of a head with the queries of one document of a sequence, of which `shared` are rows
    /// of each token. The sequence has `keys` keys.
    fn head_of<'s>(
        self,
        isa: Isa,
        (keys, attended): (usize, Attended<'s>),
        (of, document): (QueryHead, &Document),
        shared: usize,
    ) -> Head<'s> {
        let Document { start, first, end, prefix } = *document;
        let tokens = end - first;
        let (keys, seen) = match attended {
            Attended::Before(_) => {
                // Tokens of the sequence before the queries, from the document's first one on.
                let before = keys - self.tokens + first - start;
                let (first, is_shared) = (before + 1, shared > 1);
                let causal = Causal { first, least: prefix.max(first), window: self.window, is_shared };
                (before + tokens, Seen::Causal(causal))
            }
            Attended::Tiles(_, tiles) => {
                let before = keys - self.tokens + first - start;
                (before + tokens, Seen::Tiles(tiles.of_head(of.query, before, tokens)))
            }
            Attended::Ranges(ranges) => {
                let at = of.sequence * self.tokens;
                (keys, Seen::Ranges(ranges.of(at..at + self.tokens)))
            }
        };
        Head { isa, queries: tokens * shared, keys, seen, width: self.head_dim }
    }

    /// Returns whether rows of `operands` matrices of one head can be prefetched without filling too much of L2
    /// cache.
    const fn prefetches(self, operands: usize) -> bool {
        /// Maximum number of prefetched floats: half a MiB.
        const MOST: usize = 128 * 1024;
        operands * self.tokens * self.head_dim <= MOST
    }

    /// Returns the number of heads of queries of all sequences.
    const fn query_heads(self) -> usize {
        if self.tokens == 0 || self.head_dim == 0 { 0 } else { self.batch * self.heads.query }
    }
}

/// Which keys the queries of all sequences attend to.
#[derive(Debug, Clone, Copy)]
pub(super) enum Attended<'a> {
    /// Those of their document, up to their own or to the end of their prefix. The queries are those of the
    /// last tokens that have keys.
    Before(Option<&'a Documents>),
    /// A range of keys for each query of all sequences.
    Ranges(Ranges<'a>),
    /// Of the keys of their document up to their own, those of tiles. The queries are those of the last tokens.
    Tiles(Option<&'a Documents>, Tiles<'a>),
}

impl<'a> Attended<'a> {
    /// Returns what a mask says of queries of `documents`.
    pub(super) fn of(mask: &Mask<'a>, documents: Option<&'a Documents>) -> Self {
        match mask.keys {
            AttendedKeys::Tiles(tiles) => Self::Tiles(documents, Tiles::new(tiles)),
            AttendedKeys::All | AttendedKeys::Window(_) => Self::Before(documents),
        }
    }

    /// Returns the documents of a sequence: `whole`, if nothing divides it.
    fn documents(self, whole: &'a Document, sequence: usize) -> &'a [Document] {
        match self {
            Self::Before(Some(documents)) | Self::Tiles(Some(documents), _) => documents.of(sequence),
            Self::Before(None) | Self::Tiles(None, _) | Self::Ranges(_) => std::slice::from_ref(whole),
        }
    }

    /// Panics unless `keys` keys are enough for as many queries.
    fn check(self, keys: usize, queries: usize) {
        let is_enough = keys >= queries || matches!(self, Self::Ranges(_));
        assert!(is_enough, "every query must have a key");
    }
}

/// A head of queries of a sequence, and the head of keys and values that it attends to.
#[derive(Debug, Clone, Copy)]
struct QueryHead {
    sequence: usize,
    query: usize,
    kv: usize,
}

/// Layout of heads in a buffer: token `t` of sequence `b` begins at `start + (b * tokens + t) * stride`.
#[derive(Debug, Clone, Copy)]
struct HeadLayout {
    start: usize,
    tokens: usize,
    stride: usize,
    /// Number of heads side by side.
    heads: usize,
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
        if l.query_heads() == 0 {
            return 0;
        }
        self.start + (l.batch * self.tokens - 1) * self.stride + self.heads * l.head_dim
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

/// Forward pass: `y = softmax(q kᵀ / sqrt(head_dim)) v` per head.
struct Forward<'a> {
    isa: Isa,
    layout: Layout,
    /// Number of keys of each sequence.
    keys: usize,
    q: (&'a [f32], HeadLayout),
    k: (&'a [f32], HeadLayout),
    v: (&'a [f32], HeadLayout),
    attended: Attended<'a>,
    /// Whether `y` and `lse` are of other keys already.
    continues: bool,
}

impl<'a> Forward<'a> {
    /// Writes `y` `[B, T, C]` and, if given, `lse` `[B, query, T]`.
    fn run(&self, pool: &Pool, y: &mut [f32], lse: Option<&mut [f32]>) {
        let l = self.layout;
        let place = outputs(l);
        for (len, place) in [
            (self.q.0.len(), self.q.1),
            (self.k.0.len(), self.k.1),
            (self.v.0.len(), self.v.1),
            (y.len(), place),
        ] {
            assert!(place.end(l) <= len, "heads must lie within their buffers");
        }
        self.attended.check(self.keys, l.tokens);
        let y = Output::new(y);
        let lse = lse.map(Output::new);
        let (y, lse) = (&y, &lse);
        // If each sequence has one new token, the queries that share keys and values are the rows of one head,
        // so that keys and values are packed once for all of them. All of its rows attend to all keys.
        let is_before = matches!(self.attended, Attended::Before(_));
        let shared = if l.tokens == 1 && is_before { l.group() } else { 1 };
        let whole = Document::whole(l.tokens);
        let stride = |place: HeadLayout| if shared > 1 { l.head_dim } else { place.stride };
        let reads = |task| {
            let QueryHead { sequence, query, kv } = l.head(task * shared);
            let rows = |(data, place): (&'a [f32], HeadLayout), head| place.rows(data, l, (sequence, head));
            [rows(self.q, query).spaced(stride(self.q.1)), rows(self.k, kv), rows(self.v, kv)]
        };
        let tasks = l.query_heads() / shared;
        pool.run(tasks, |task| {
            SCRATCH.with_borrow_mut(|scratch| {
                #[expect(unsafe_code, reason = "tasks write disjoint rows of one buffer")]
                // SAFETY: each task has its own heads of queries, hence its own columns of `y` and its own part
                // of `lse`.
                let (mut y, mut lse) = unsafe {
                    let rows = l.tokens * shared;
                    let lse = lse.as_ref().map(|lse| lse.part(task * rows, rows));
                    let QueryHead { sequence, query, .. } = l.head(task * shared);
                    (y.rows(place, l, (sequence, query)).spaced(stride(place)), lse)
                };
                // The task that this thread runs next if all tasks take equally long.
                let next = task + pool.threads();
                let next = (next < tasks && l.prefetches(3)).then(|| reads(next));
                let of_task = l.head(task * shared);
                for document in self.attended.documents(&whole, of_task.sequence) {
                    let Document { start, first, end, .. } = *document;
                    let of = |[q, k, v]: [Rows<'a>; 3]| [q.after(first), k.after(start), v.after(start)];
                    let lse = lse.as_deref_mut().map(|lse| &mut lse[first * shared..end * shared]);
                    let keys = (self.keys, self.attended);
                    let head = l.head_of(self.isa, keys, (of_task, document), shared);
                    let (read, next) = (of(reads(task)), next.map(of));
                    head.forward(read, y.from(first), lse, self.continues, next, scratch);
                }
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
    /// Log-sum-exp of the forward pass: `[B, query, T]`.
    lse: &'a [f32],
    /// Gradient of `y`: `[B, T, C]`.
    dy: &'a [f32],
    attended: Attended<'a>,
    /// Whether to add to the gradients of queries instead of overwriting them.
    accumulate_queries: bool,
    /// Whether to add to the gradients of keys and values instead of overwriting them.
    accumulate: bool,
}

impl<'a> Backward<'a> {
    /// Writes the gradients of queries, keys and values.
    fn run(&self, pool: &Pool, gradients: [(Output<'_>, HeadLayout); 3]) {
        let l = self.layout;
        let out = outputs(l);
        for (len, place) in [
            (self.q.0.len(), self.q.1),
            (self.k.0.len(), self.k.1),
            (self.v.0.len(), self.v.1),
            (self.y.len().min(self.dy.len()), out),
        ] {
            assert!(place.end(l) <= len, "heads must lie within their buffers");
        }
        self.attended.check(self.keys, l.tokens);
        let gradients = &gradients;
        let reads = |index| {
            let QueryHead { sequence, query, kv } = l.head(index);
            let heads = [
                (self.q, query),
                (self.k, kv),
                (self.v, kv),
                ((self.y, out), query),
                ((self.dy, out), query),
            ];
            heads.map(|((data, place), head): ((&'a [f32], HeadLayout), usize)| {
                place.rows(data, l, (sequence, head))
            })
        };
        let whole = Document::whole(l.tokens);
        let group = l.group();
        pool.run(l.query_heads() / group, |task| {
            for index in task * group..(task + 1) * group {
                let QueryHead { sequence, query, kv } = l.head(index);
                let lse = &self.lse[index * l.tokens..][..l.tokens];
                let rows = |i: usize, head: usize| {
                    let (data, place) = gradients[i];
                    #[expect(unsafe_code, reason = "tasks write disjoint rows of one buffer")]
                    // SAFETY: each task has its own head of keys and its own heads of queries, hence its own
                    // columns of the three gradients.
                    unsafe {
                        data.rows(place, l, (sequence, head))
                    }
                };
                let accumulate = self.accumulate || index > task * group;
                let [mut dq, mut dk, mut dv] = [rows(0, query), rows(1, kv), rows(2, kv)];
                // The next head of this task, or the first of the task that this thread runs next if all tasks
                // take equally long.
                let next =
                    if index + 1 < (task + 1) * group { index + 1 } else { (task + pool.threads()) * group };
                let next = (next < l.query_heads() && l.prefetches(5)).then(|| reads(next));
                for document in self.attended.documents(&whole, sequence) {
                    let Document { start, first, end, .. } = *document;
                    let of = |[q, k, v, y, dy]: [Rows<'a>; 5]| {
                        [q.after(first), k.after(start), v.after(start), y.after(first), dy.after(first)]
                    };
                    let [q, k, v] = [dq.from(first), dk.from(start), dv.from(start)];
                    let accumulate_queries = self.accumulate_queries;
                    let gradients = Gradients { q, k, v, accumulate_queries, accumulate };
                    let (keys, lse) = ((self.keys, self.attended), &lse[first..end]);
                    let head = l.head_of(self.isa, keys, (l.head(index), document), 1);
                    SCRATCH.with_borrow_mut(|scratch| {
                        head.backward(of(reads(index)), lse, gradients, next.map(of), scratch);
                    });
                }
            }
        });
    }
}

/// Returns the layout of the outputs `[B, T, C]`, and of their gradients.
const fn outputs(l: Layout) -> HeadLayout {
    HeadLayout { start: 0, tokens: l.tokens, stride: l.width(), heads: l.heads.query }
}

/// Returns the layouts of queries, keys and values in a `[B, T, W]` buffer.
const fn packed(l: Layout) -> [HeadLayout; 3] {
    let (tokens, Heads { query, kv }) = (l.tokens, l.heads);
    let stride = l.width() + 2 * l.kv_width();
    [
        HeadLayout { start: 0, tokens, stride, heads: query },
        HeadLayout { start: l.width(), tokens, stride, heads: kv },
        HeadLayout { start: l.width() + l.kv_width(), tokens, stride, heads: kv },
    ]
}

/// Computes attention of `qkv` `[B, T, W]`. Writes `y` `[B, T, C]` and `lse` `[B, query, T]`, the log-sum-exp
/// of each row of scores, which [`train_backward`] needs.
pub(super) fn train_forward(
    pool: &Pool,
    l: Layout,
    attended: Attended<'_>,
    qkv: &[f32],
    y: &mut [f32],
    lse: &mut [f32],
) {
    forward(Isa::detect(), pool, (l, attended), qkv, y, lse);
}

fn forward(
    isa: Isa,
    pool: &Pool,
    (l, attended): (Layout, Attended<'_>),
    qkv: &[f32],
    y: &mut [f32],
    lse: &mut [f32],
) {
    let [q, k, v] = packed(l).map(|place| (qkv, place));
    let pass = Forward { isa, layout: l, keys: l.tokens, q, k, v, attended, continues: false };
    pass.run(pool, y, Some(lse));
}

/// Computes the gradient of [`train_forward`]: writes `d_qkv` `[B, T, W]`, given `qkv`, `y` and `lse` of the
/// forward pass, and `dy` `[B, T, C]`.
pub(super) fn train_backward(
    pool: &Pool,
    l: Layout,
    attended: Attended<'_>,
    read: [&[f32]; 4],
    d_qkv: &mut [f32],
) {
    backward(Isa::detect(), pool, (l, attended), read, d_qkv);
}

fn backward(
    isa: Isa,
    pool: &Pool,
    (l, attended): (Layout, Attended<'_>),
    [qkv, y, lse, dy]: [&[f32]; 4],
    d_qkv: &mut [f32],
) {
    let [q, k, v] = packed(l).map(|place| (qkv, place));
    let d_qkv = Output::new(d_qkv);
    let keys = l.tokens;
    let (accumulate_queries, accumulate) = (false, false);
    let pass =
        Backward { isa, layout: l, keys, q, k, v, y, lse, dy, attended, accumulate_queries, accumulate };
    pass.run(pool, packed(l).map(|place| (d_qkv, place)));
}

/// Position of new tokens in the caches of keys and values, which are `[B, capacity, kv D]`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Cache {
    /// Number of tokens before the new ones.
    pub(super) past: usize,
    pub(super) capacity: usize,
}

impl Cache {
    /// Returns the layout of heads in a cache.
    const fn head_layout(self, l: Layout) -> HeadLayout {
        HeadLayout { start: 0, tokens: self.capacity, stride: l.kv_width(), heads: l.heads.kv }
    }

    /// For each new token, returns the ranges of its keys and of its values in `[B, T, W]`, and their range in
    /// a cache.
    fn rows(self, l: Layout) -> impl Iterator<Item = [Range<usize>; 3]> {
        let [_, keys, values] = packed(l);
        let all = (0..l.batch).flat_map(move |b| (0..l.tokens).map(move |t| (b, t)));
        all.map(move |(b, t)| {
            let at = [keys, values].map(|place| place.start + (b * place.tokens + t) * place.stride);
            let cached = (b * self.capacity + self.past + t) * l.kv_width();
            [at[0], at[1], cached].map(|start| start..start + l.kv_width())
        })
    }
}

/// New tokens, which attend to cached ones.
#[derive(Clone, Copy)]
pub(super) struct NewTokens<'a> {
    pub(super) layout: Layout,
    pub(super) cache: Cache,
    pub(super) attended: Attended<'a>,
}

/// Computes attention of new tokens `qkv` `[B, T, W]` with caches of keys and values `[B, capacity, kv D]`.
/// Appends the new keys and values, then writes `y` `[B, T, C]` and, if given, `lse` as [`train_forward`] does.
pub(super) fn cached_forward(
    pool: &Pool,
    tokens: NewTokens<'_>,
    qkv: &[f32],
    [keys, values]: [&mut [f32]; 2],
    y: &mut [f32],
    lse: Option<&mut [f32]>,
) {
    forward_over(Isa::detect(), pool, tokens, qkv, [keys, values], y, lse);
}

fn forward_over(
    isa: Isa,
    pool: &Pool,
    NewTokens { layout: l, cache, attended }: NewTokens<'_>,
    qkv: &[f32],
    [keys, values]: [&mut [f32]; 2],
    y: &mut [f32],
    lse: Option<&mut [f32]>,
) {
    assert!(cache.past + l.tokens <= cache.capacity, "the cache must have room for the new tokens");
    for [key, value, cached] in cache.rows(l) {
        keys[cached.clone()].copy_from_slice(&qkv[key]);
        values[cached].copy_from_slice(&qkv[value]);
    }
    let (q, k, v) = ((qkv, packed(l)[0]), (&*keys, cache.head_layout(l)), (&*values, cache.head_layout(l)));
    let keys = cache.past + l.tokens;
    Forward { isa, layout: l, keys, q, k, v, attended, continues: false }.run(pool, y, lse);
}

/// Computes the gradient of [`cached_forward`], given `qkv`, keys, values, `y`, `lse` and `dy`. Adds to the
/// gradients of all keys and values that the new tokens attended to, and writes `d_qkv` `[B, T, W]`, which
/// includes the gradients of the new tokens' own keys and values.
pub(super) fn cached_backward(
    pool: &Pool,
    tokens: NewTokens<'_>,
    read: [&[f32]; 6],
    written: [&mut [f32]; 3],
) {
    backward_over(Isa::detect(), pool, tokens, read, written);
}

fn backward_over(
    isa: Isa,
    pool: &Pool,
    NewTokens { layout: l, cache, attended }: NewTokens<'_>,
    [qkv, keys, values, y, lse, dy]: [&[f32]; 6],
    [d_qkv, d_keys, d_values]: [&mut [f32]; 3],
) {
    let (q, k, v) = ((qkv, packed(l)[0]), (keys, cache.head_layout(l)), (values, cache.head_layout(l)));
    let keys = cache.past + l.tokens;
    let (accumulate_queries, accumulate) = (false, true);
    let pass =
        Backward { isa, layout: l, keys, q, k, v, y, lse, dy, attended, accumulate_queries, accumulate };
    let [dq, dk, dv] = [&mut *d_qkv, &mut *d_keys, &mut *d_values].map(Output::new);
    pass.run(pool, [(dq, packed(l)[0]), (dk, cache.head_layout(l)), (dv, cache.head_layout(l))]);
    for [key, value, cached] in cache.rows(l) {
        d_qkv[key].copy_from_slice(&d_keys[cached.clone()]);
        d_qkv[value].copy_from_slice(&d_values[cached]);
    }
}
