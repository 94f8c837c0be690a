//! The backward pass of one head. Probabilities and gradients of scores are recomputed tile by tile.
//!
//! Source: Dao et al. 2022, "`FlashAttention`", algorithm 4.

use std::ops::Range;

use super::super::tile::{Full, LINE, MOST_ROWS, RowFactors, Update};
use super::head::{Head, panels, pieces};
use super::product::{Left, Right, Size, multiply, pack, pack_transposed};
use super::rows::{Rows, RowsMut};
use super::seen::Meeting;
use super::softmax::{Block, dots, softmax_grad};

/// Number of keys per tile.
const KEYS: usize = u128::BITS as usize;
/// Number of queries per tile: a multiple of both 6 and 8, the heights of register tiles, so that blocks of
/// keys begin where blocks of queries do.
const QUERIES: usize = 144;

/// Destinations of the gradients.
pub(super) struct Gradients<'a> {
    pub(super) q: RowsMut<'a>,
    pub(super) k: RowsMut<'a>,
    pub(super) v: RowsMut<'a>,
    /// Whether to add to the gradients of queries instead of overwriting them. It needs a head that
    /// [skips keys](Head::skips_keys).
    pub(super) accumulate_queries: bool,
    /// Whether to add to the gradients of keys and values instead of overwriting them.
    pub(super) accumulate: bool,
}

struct Pass<'a> {
    head: Head<'a>,
    q: Rows<'a>,
    k: Rows<'a>,
    v: Rows<'a>,
    y: Rows<'a>,
    dy: Rows<'a>,
    lse: &'a [f32],
    gradients: Gradients<'a>,
    /// Rows that the next head will read, to prefetch.
    next: Option<[Rows<'a>; 5]>,
    /// Packed panels of all queries, and of the gradients of their outputs.
    queries: &'a mut [f32],
    outputs: &'a mut [f32],
    /// Packed panels of the tile's keys, of its transposed keys, and of its transposed values.
    keys: &'a mut [f32],
    keys_t: &'a mut [f32],
    values_t: &'a mut [f32],
    /// Inner product of each query's output and its gradient, which is the mean of the gradients of its
    /// probabilities.
    means: &'a mut [f32],
    /// Probabilities of a tile, and gradients of its scores, in rows `pitch` apart.
    p: &'a mut [f32],
    ds: &'a mut [f32],
    pitch: usize,
    /// The keys of the tile whose gradients some queries have added to, one bit for each.
    met_keys: u128,
}

impl Head<'_> {
    /// Writes the gradients of queries, keys and values, or adds to them, given the inputs and outputs of the
    /// forward pass and the gradient of `y`. Prefetches as many rows of the `next` head as there are queries.
    pub(super) fn backward(
        self,
        [q, k, v, y, dy]: [Rows<'_>; 5],
        lse: &[f32],
        gradients: Gradients<'_>,
        next: Option<[Rows<'_>; 5]>,
        scratch: &mut Vec<f32>,
    ) {
        let Full { columns, .. } = self.isa.tile();
        let keys = self.keys.min(KEYS).next_multiple_of(columns);
        let width = self.width.next_multiple_of(columns);
        let pitch = keys + LINE;
        let (whole, across, tile) =
            (self.queries * width, keys * self.width, self.queries.min(QUERIES) * pitch);
        let lengths = [whole, whole, keys * width, across, across, self.queries, tile, tile];
        let [queries, outputs, keys, keys_t, values_t, means, p, ds] = panels(scratch, lengths);
        let head = self;
        let mut pass = Pass {
            head,
            q,
            k,
            v,
            y,
            dy,
            lse,
            gradients,
            next,
            queries,
            outputs,
            keys,
            keys_t,
            values_t,
            means,
            p,
            ds,
            pitch,
            met_keys: 0,
        };
        pass.run();
    }
}

impl Pass<'_> {
    fn run(&mut self) {
        let Head { isa, queries, keys, width, .. } = self.head;
        let (all, past, rows) = (0..queries, self.head.common(), isa.tile().rows);
        if self.head.skips_keys() && !self.gradients.accumulate_queries {
            self.gradients.q.clear(queries, width);
        }
        if !self.head.has_tiles() && self.head.meets(&all, &(0..keys)).is_empty() {
            return;
        }
        self.pack_queries();
        for tile in pieces(0..keys, KEYS) {
            self.met_keys = 0;
            let met = self.head.queries_of(&tile);
            if met.clone().next().is_some() {
                self.pack_keys(&tile);
            }
            // End of the keys that are not of the queries' own tokens. After it, blocks of keys begin where
            // blocks of queries do.
            let common = past.clamp(tile.start, tile.end);
            for queries in met.flat_map(|meets| pieces(meets, QUERIES)) {
                for block in pieces(queries.clone(), rows) {
                    self.block_of_queries(&block, &queries, &tile);
                }
                // Where a prefix ends, or a range, blocks of keys and of queries are not aligned: all weights
                // are written.
                let ahead = self.head.looks_ahead(tile.start);
                let seen = if ahead { tile.end } else { tile.end.min(past + queries.end) };
                for block in pieces(tile.start..common, rows).chain(pieces(common..seen, rows)) {
                    self.block_of_keys(&block, &queries, &tile);
                }
            }
            self.clear_keys(&tile);
        }
    }

    /// Packs all queries and the gradients of their outputs.
    fn pack_queries(&mut self) {
        let Head { isa, queries, .. } = self.head;
        let (all, wide) = (0..queries, isa.tile().columns);
        pack(isa, self.q, &all, self.queries, wide, queries * wide);
        pack(isa, self.dy, &all, self.outputs, wide, queries * wide);
        dots(isa, self.y, self.dy, &all, self.means);
    }

    /// Sets the gradients of keys that no query attends to, and of their values, to 0, where gradients are
    /// overwritten and a mask of tiles leaves keys out.
    fn clear_keys(&mut self, tile: &Range<usize>) {
        if self.gradients.accumulate || !self.head.has_tiles() {
            return;
        }
        for key in tile.clone().filter(|key| self.met_keys >> (key - tile.start) & 1 == 0) {
            for gradients in [&mut self.gradients.k, &mut self.gradients.v] {
                gradients.from(key).clear(1, self.head.width);
            }
        }
    }

    /// Packs a tile of keys and their values.
    fn pack_keys(&mut self, tile: &Range<usize>) {
        let Head { isa, width, .. } = self.head;
        let wide = isa.tile().columns;
        pack(isa, self.k, tile, self.keys, wide, tile.len() * wide);
        for (of, panels) in [(self.k, &mut *self.keys_t), (self.v, &mut *self.values_t)] {
            for (rows, panel) in pieces(tile.clone(), wide).zip(panels.chunks_exact_mut(width * wide)) {
                pack_transposed(isa, of, &rows, panel, wide);
            }
        }
    }

    /// Processes a block of queries with a tile of keys: computes its rows of `p` and `ds`, and adds the
    /// contribution of these keys to the gradients of the queries.
    fn block_of_queries(&mut self, block: &Range<usize>, queries: &Range<usize>, tile: &Range<usize>) {
        let Head { isa, width, .. } = self.head;
        if tile.start == 0 {
            self.next.iter().flatten().for_each(|next| next.fetch(block));
        }
        let (rows, pitch, wide) = (block.len(), self.pitch, isa.tile().columns);
        let mut meeting = Meeting::new(self.head.seen, block, tile);
        if self.head.looks_ahead(tile.start) {
            meeting = meeting.with_all();
        }
        let at = (block.start - queries.start) * pitch;
        let (p, ds) = (&mut self.p[at..], &mut self.ds[at..]);

        let size = Size { rows, depth: width, columns: meeting.padded };
        for (of, panels, to) in [(self.q, &*self.keys_t, &mut *p), (self.dy, &*self.values_t, &mut *ds)] {
            let rows = Left { data: of.span(block), row: of.stride, col: 1 };
            let panels = Right { data: panels, panel: width * wide };
            multiply(isa, size, rows, panels, RowsMut::new(to, pitch), Update::Overwrite);
        }
        let products = Block { meeting, products: p, pitch, scale: self.head.exponent_scale() };
        products.meeting.fill_holes(rows, products.products, pitch, f32::NEG_INFINITY);
        products.meeting.fill_holes(rows, ds, pitch, 0.0);
        softmax_grad(isa, products, ds, &self.lse[block.clone()], &self.means[block.clone()]);

        if meeting.all == 0 {
            return;
        }
        let shares = [RowFactors { old: 1.0, new: self.head.score_scale() }; MOST_ROWS];
        let first = tile.start == 0 && !self.head.skips_keys();
        for keys in self.head.runs_of_keys(block, tile) {
            let (skipped, end) = (keys.start - tile.start, meeting.all.min(keys.end - tile.start));
            let weights = Left { data: &self.ds[at + skipped..], row: pitch, col: 1 };
            let keys = Right { data: &self.keys[skipped * wide..], panel: tile.len() * wide };
            let size = Size { rows, depth: end - skipped, columns: width };
            let dq = self.gradients.q.from(block.start);
            multiply(isa, size, weights, keys, dq, Update::shares(&shares, first));
        }
    }

    /// Adds the contribution of a tile of queries to the gradients of a block of keys and their values.
    fn block_of_keys(&mut self, block: &Range<usize>, queries: &Range<usize>, tile: &Range<usize>) {
        let Head { isa, width, .. } = self.head;
        let Range { start: from, end: to } = self.head.meets(queries, block);
        if from >= to {
            return;
        }
        let at = (from - queries.start) * self.pitch + block.start - tile.start;
        let wide = isa.tile().columns;
        let panel = self.head.queries * wide;
        let size = Size { rows: block.len(), depth: to - from, columns: width };
        let products = [
            (&*self.p, &*self.outputs, &mut self.gradients.v, 1.0),
            (&*self.ds, &*self.queries, &mut self.gradients.k, self.head.score_scale()),
        ];
        let first = !self.gradients.accumulate
            && if self.head.has_tiles() {
                self.met_keys >> (block.start - tile.start) & 1 == 0
            } else {
                self.head.meets(&(0..self.head.queries), block).start == from
            };
        self.met_keys |= (u128::MAX >> (KEYS - block.len())) << (block.start - tile.start);
        for (weights, panels, to, new) in products {
            let weights = Left { data: &weights[at..], row: 1, col: self.pitch };
            let right = Right { data: &panels[from * wide..], panel };
            let shares = [RowFactors { old: 1.0, new }; MOST_ROWS];
            multiply(isa, size, weights, right, to.from(block.start), Update::shares(&shares, first));
        }
    }
}
