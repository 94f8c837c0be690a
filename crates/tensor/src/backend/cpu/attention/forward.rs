//! The forward pass of one head, one block of queries at a time. The scores of a block stay in L1 cache.
//!
//! Source: Dao et al. 2022, "`FlashAttention`", algorithm 1: the outer loop is over keys, and the output is
//! kept normalised.

use std::ops::Range;

use super::super::tile::{Full, LINE, Update};
use super::head::{Head, panels, pieces};
use super::product::{Left, Right, Size, multiply, pack, pack_transposed};
use super::rows::{Rows, RowsMut};
use super::seen::{Meeting, Seen};
use super::softmax::{Block, Running, logs, softmax};

/// Number of keys per tile. With their values they use a quarter of L2 cache at the usual head widths.
const KEYS: usize = 256;

struct Pass<'a> {
    head: Head<'a>,
    q: Rows<'a>,
    k: Rows<'a>,
    v: Rows<'a>,
    y: RowsMut<'a>,
    /// Packed panels of the tile's keys, transposed.
    keys: &'a mut [f32],
    /// Packed panels of the tile's values, `values_panel` apart.
    values: &'a mut [f32],
    values_panel: usize,
    /// Scores of a block of queries, in rows `pitch` apart; later their exponentials.
    scores: &'a mut [f32],
    pitch: usize,
    running: Running<'a>,
    /// Rows that the next head will read, to prefetch.
    next: Option<[Rows<'a>; 3]>,
}

impl Head<'_> {
    /// Writes one row of `y` per query and, if `lse` is given, the log-sum-exp of the query's scores. If it
    /// `continues`, both are of other keys before, and of those and these afterwards; of a query that attends
    /// to none of these keys they keep their values.
    ///
    /// Prefetches as many rows of the `next` head as there are queries.
    pub(super) fn forward(
        self,
        [q, k, v]: [Rows<'_>; 3],
        mut y: RowsMut<'_>,
        mut lse: Option<&mut [f32]>,
        continues: bool,
        next: Option<[Rows<'_>; 3]>,
        scratch: &mut Vec<f32>,
    ) {
        let Full { rows, columns } = self.isa.tile();
        let keys = self.keys.min(KEYS).next_multiple_of(columns);
        let (pitch, values_panel) = (keys + LINE, keys * columns);
        let lengths = [
            keys * self.width,
            self.width.div_ceil(columns) * values_panel,
            rows * pitch,
            self.queries,
            self.queries,
        ];
        let [keys, values, scores, tops, sums] = panels(scratch, lengths);
        let mut running = Running { tops, sums };
        match lse.as_deref_mut().filter(|_| continues) {
            Some(lse) => running.resume(lse, self.score_scale()),
            None if self.skips_keys() => {
                running.clear();
                y.clear(self.queries, self.width);
            }
            None => {}
        }
        let mut pass =
            Pass { head: self, q, k, v, y, keys, values, values_panel, scores, pitch, running, next };
        pass.run();
        let (Running { tops, sums }, Some(lse)) = (pass.running, lse) else { return };
        match self.seen {
            Seen::Ranges(ranges) if continues => {
                for query in (0..self.queries).filter(|&query| ranges.meets(query, &(0..self.keys))) {
                    let at = query..query + 1;
                    logs(self.isa, &tops[at.clone()], &sums[at.clone()], self.exponent_scale(), &mut lse[at]);
                }
            }
            _ => logs(self.isa, tops, sums, self.exponent_scale(), lse),
        }
    }
}

impl Pass<'_> {
    fn run(&mut self) {
        let Head { isa, keys, .. } = self.head;
        for tile in pieces(0..keys, KEYS) {
            let mut is_packed = false;
            for queries in self.head.queries_of(&tile) {
                if !is_packed {
                    self.pack(&tile);
                    is_packed = true;
                }
                for block in self.head.blocks(queries, isa.tile().rows) {
                    self.block(&block, &tile);
                }
            }
        }
    }

    /// Packs a tile of keys and their values.
    fn pack(&mut self, tile: &Range<usize>) {
        let Head { isa, width, .. } = self.head;
        let wide = isa.tile().columns;
        pack(isa, self.v, tile, self.values, wide, self.values_panel);
        for (rows, panel) in pieces(tile.clone(), wide).zip(self.keys.chunks_exact_mut(width * wide)) {
            pack_transposed(isa, self.k, &rows, panel, wide);
        }
    }

    /// Processes a block of queries with a tile of keys.
    fn block(&mut self, block: &Range<usize>, tile: &Range<usize>) {
        if tile.start == 0 {
            self.next.iter().flatten().for_each(|next| next.fetch(block));
        }
        for keys in self.head.runs_of_keys(block, tile) {
            self.block_with_keys(block, &keys, tile.start);
        }
    }

    /// Processes a block of queries with keys of a tile that begins at key `origin`.
    fn block_with_keys(&mut self, block: &Range<usize>, tile: &Range<usize>, origin: usize) {
        let Head { isa, width, .. } = self.head;
        let (rows, pitch, wide) = (block.len(), self.pitch, isa.tile().columns);
        let first = tile.start == 0 && !self.head.skips_keys();
        let meeting = Meeting::new(self.head.seen, block, tile);
        if meeting.all == 0 {
            return;
        }

        let q = Left { data: self.q.span(block), row: self.q.stride, col: 1 };
        // A run of keys begins at a multiple of the width of panels.
        let skipped = tile.start - origin;
        let keys = Right { data: &self.keys[skipped * width..], panel: width * wide };
        let size = Size { rows, depth: width, columns: meeting.padded };
        multiply(isa, size, q, keys, RowsMut::new(self.scores, pitch), Update::Overwrite);
        meeting.fill_holes(rows, self.scores, pitch, f32::NEG_INFINITY);

        let scale = self.head.exponent_scale();
        let Running { tops, sums } = &mut self.running;
        let running = Running { tops: &mut tops[block.clone()], sums: &mut sums[block.clone()] };
        let shares = softmax(isa, Block { meeting, products: self.scores, pitch, scale }, running, first);

        let weights = Left { data: self.scores, row: pitch, col: 1 };
        let values = Right { data: &self.values[skipped * wide..], panel: self.values_panel };
        let size = Size { rows, depth: meeting.all, columns: width };
        multiply(isa, size, weights, values, self.y.from(block.start), Update::shares(&shares, first));
    }
}
