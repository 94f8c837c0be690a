//! Launches the kernels of attention and its gradient, for packed and for cached keys and values.

use cubecl::prelude::*;

use super::attention::RowsLaunch;
use super::operand::Operand;
use super::storage::Buffer;
use super::{Cube, attention, cubes, u32_of};
use crate::Result;

/// Returns the factor applied to scores: `1 / sqrt(dim)`.
fn scale_of(dim: usize) -> f32 {
    1.0 / (dim as f32).sqrt()
}

/// Shapes of an attention: `[batch, tokens, width]` and the number of heads.
#[derive(Debug, Clone, Copy)]
pub(super) struct Heads {
    batch: usize,
    tokens: usize,
    width: usize,
    count: usize,
}

impl Heads {
    pub(super) fn new(y: &[usize], heads: usize) -> Self {
        Self { batch: y[0], tokens: y[1], width: y[2], count: heads }
    }

    fn dim(self) -> usize {
        self.width / self.count
    }

    /// Returns the vector width of the kernels in floats: the largest of 4, 2, 1 that divides the head
    /// dimension.
    fn vector(self) -> usize {
        [4, 2, 1].into_iter().find(|n| self.dim().is_multiple_of(*n)).unwrap_or(1)
    }

    /// Returns the number of vectors in a head's row.
    fn vectors(self) -> u32 {
        u32_of(self.dim() / self.vector())
    }

    /// Converts a layout from floats to vectors.
    fn rows(self, at: [usize; 3]) -> RowsLaunch {
        let [stride, batch, start] = at.map(|n| u32_of(n / self.vector()));
        RowsLaunch::new(stride, batch, start)
    }

    /// Returns the number of cubes (workgroups) that gives each of `rows` rows of each head one unit (thread).
    fn cubes(self, rows: usize, units: u32) -> CubeCount {
        cubes(self.batch * self.count * rows.div_ceil(units as usize))
    }

    /// Returns the layout of queries (0), keys (1) or values (2) in a packed `[B, T, 3 C]`: token stride, batch
    /// stride, start.
    pub(super) fn packed(self, which: usize) -> [usize; 3] {
        [3 * self.width, self.tokens * 3 * self.width, which * self.width]
    }

    /// Returns the layout of rows in a `[B, length, C]`.
    pub(super) fn plain(self, length: usize) -> [usize; 3] {
        [self.width, length * self.width, 0]
    }
}

/// Keys and values of an attention: operands, layouts, and the number of tokens before the first query.
pub(super) struct Cached<'a> {
    pub(super) keys: &'a Operand,
    pub(super) values: &'a Operand,
    pub(super) at: [[usize; 3]; 2],
    pub(super) past: usize,
}

impl Cube {
    pub(super) fn attend(&self, h: Heads, q: &Operand, kv: &Cached<'_>, y: &Operand, lse: Option<&Operand>) {
        attention::forward::launch(
            &self.client,
            h.cubes(h.tokens, self.units),
            CubeDim::new_1d(self.units),
            h.vector(),
            q.arg(),
            kv.keys.arg(),
            kv.values.arg(),
            y.arg(),
            lse.unwrap_or(y).arg(),
            h.rows(h.packed(0)),
            h.rows(kv.at[0]),
            h.rows(kv.at[1]),
            h.rows(h.plain(h.tokens)),
            u32_of(h.count),
            u32_of(h.tokens),
            u32_of(kv.past),
            scale_of(h.dim()),
            lse.is_some(),
            h.vectors(),
            self.units,
        );
    }

    /// Launches the gradient of an attention. `d_q` has the layout of the packed queries, `d_kv` that of keys
    /// and values.
    #[expect(clippy::too_many_arguments, reason = "the operands of one op")]
    pub(super) fn attend_grad(
        &self,
        h: Heads,
        q: &Operand,
        kv: &Cached<'_>,
        y: &Operand,
        lse: &Operand,
        dy: &Operand,
        d_q: &Operand,
        d_kv: [&Operand; 2],
        accumulate: bool,
    ) -> Result<()> {
        let stats = h.batch * h.count * h.tokens;
        let scratch: Buffer = self.scratch(stats * 4)?;
        let delta = Self::whole(&scratch);
        let (count, dim) = self.each(stats);
        let (heads, tokens) = (u32_of(h.count), u32_of(h.tokens));
        attention::deltas::launch(
            &self.client,
            count,
            dim,
            y.arg(),
            dy.arg(),
            delta.arg(),
            heads,
            tokens,
            u32_of(stats),
            u32_of(h.dim()),
        );
        attention::queries::launch(
            &self.client,
            h.cubes(h.tokens, self.units),
            CubeDim::new_1d(self.units),
            h.vector(),
            q.arg(),
            kv.keys.arg(),
            kv.values.arg(),
            dy.arg(),
            lse.arg(),
            delta.arg(),
            d_q.arg(),
            h.rows(h.packed(0)),
            h.rows(kv.at[0]),
            h.rows(kv.at[1]),
            h.rows(h.plain(h.tokens)),
            heads,
            tokens,
            u32_of(kv.past),
            scale_of(h.dim()),
            h.vectors(),
            self.units,
        );
        attention::keys_values::launch(
            &self.client,
            h.cubes(kv.past + h.tokens, self.units),
            CubeDim::new_1d(self.units),
            h.vector(),
            q.arg(),
            kv.keys.arg(),
            kv.values.arg(),
            dy.arg(),
            lse.arg(),
            delta.arg(),
            d_kv[0].arg(),
            d_kv[1].arg(),
            h.rows(h.packed(0)),
            h.rows(kv.at[0]),
            h.rows(kv.at[1]),
            h.rows(h.plain(h.tokens)),
            heads,
            tokens,
            u32_of(kv.past),
            scale_of(h.dim()),
            accumulate,
            h.vectors(),
            self.units,
        );
        self.pool.give(scratch);
        Ok(())
    }

    pub(super) fn exchange(
        &self,
        h: Heads,
        qkv: &Operand,
        caches: [&Operand; 2],
        past: usize,
        capacity: usize,
        append: bool,
    ) {
        let len = h.batch * h.tokens * h.width;
        let (count, dim) = self.each(len);
        attention::exchange::launch(
            &self.client,
            count,
            dim,
            qkv.arg(),
            caches[0].arg(),
            caches[1].arg(),
            u32_of(h.width),
            u32_of(h.tokens),
            u32_of(past),
            u32_of(capacity),
            u32_of(len),
            append,
        );
    }
}
