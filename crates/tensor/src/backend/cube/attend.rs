//! Launches the kernels of attention and its gradient, for packed and for cached keys and values.

use cubecl::prelude::*;

use super::attention::RowsLaunch;
use super::operand::Operand;
use super::storage::Buffer;
use super::{Cube, attention, cubes, u32_of};
use crate::{Heads, Mask, Result, Shape, View};

/// Returns the factor applied to scores: `1 / sqrt(dim)`.
fn scale_of(dim: usize) -> f32 {
    1.0 / (dim as f32).sqrt()
}

/// Sizes of an attention.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sizes {
    batch: usize,
    tokens: usize,
    heads: Heads,
    dim: usize,
}

impl Sizes {
    /// `y` has the shape `[B, T, C]`.
    pub(super) fn new(y: Shape, heads: Heads) -> Self {
        let tokens = y.dims()[1];
        Self { batch: y.rows() / tokens, tokens, heads, dim: y.cols() / heads.query }
    }

    /// Returns the number of heads of queries that share a head of keys and values.
    fn group(self) -> u32 {
        u32_of(self.heads.query / self.heads.kv)
    }

    /// Returns the vector width of the kernels in floats: the largest of 4, 2, 1 that divides the head
    /// dimension.
    fn vector(self) -> usize {
        [4, 2, 1].into_iter().find(|n| self.dim.is_multiple_of(*n)).unwrap_or(1)
    }

    /// Returns the number of vectors in a head's row.
    fn vectors(self) -> u32 {
        u32_of(self.dim / self.vector())
    }

    /// Converts a layout from floats to vectors.
    fn rows(self, at: [usize; 3]) -> RowsLaunch {
        let [stride, batch, start] = at.map(|n| u32_of(n / self.vector()));
        RowsLaunch::new(stride, batch, start)
    }

    /// Returns the number of cubes (workgroups) that gives each of `rows` rows of each head one unit (thread).
    fn cubes(self, heads: usize, rows: usize, units: u32) -> CubeCount {
        cubes(self.batch * heads * rows.div_ceil(units as usize))
    }

    /// Returns the layouts of queries, keys and values in a `[B, T, W]`: token stride, batch stride, start.
    fn packed(self) -> [[usize; 3]; 3] {
        let Heads { query, kv } = self.heads;
        let stride = self.heads.width() * self.dim;
        [0, query, query + kv].map(|first| [stride, self.tokens * stride, first * self.dim])
    }

    /// Returns the layout of rows in a `[B, length, heads D]`.
    fn plain(self, heads: usize, length: usize) -> [usize; 3] {
        [heads * self.dim, length * heads * self.dim, 0]
    }

    /// Returns the layout of the outputs.
    fn outputs(self) -> RowsLaunch {
        self.rows(self.plain(self.heads.query, self.tokens))
    }
}

/// The operands of a mask.
pub(super) struct MaskOperands {
    /// Where the document of each query begins.
    documents: Option<Operand>,
    /// Where its prefix ends.
    prefixes: Option<Operand>,
    window: Option<usize>,
}

impl MaskOperands {
    pub(super) fn read(cube: &Cube, mask: &Mask<'_>) -> Result<Self> {
        let read = |view: &Option<View<'_>>| view.as_ref().map(|view| cube.read(view)).transpose();
        Ok(Self { documents: read(&mask.documents)?, prefixes: read(&mask.prefixes)?, window: mask.window })
    }

    /// Returns the operands, to be released.
    pub(super) fn all(self) -> impl Iterator<Item = Operand> {
        self.documents.into_iter().chain(self.prefixes)
    }
}

/// Keys and values of an attention: operands, layouts, and the number of tokens before the first query.
pub(super) struct KeysValues<'a> {
    keys: &'a Operand,
    values: &'a Operand,
    mask: &'a MaskOperands,
    at: [[usize; 3]; 2],
    past: usize,
}

impl<'a> KeysValues<'a> {
    /// Those of the queries' own tokens, beside the queries.
    pub(super) fn packed(sizes: Sizes, qkv: &'a Operand, mask: &'a MaskOperands) -> Self {
        let [_, keys, values] = sizes.packed();
        Self { keys: qkv, values: qkv, mask, at: [keys, values], past: 0 }
    }

    /// Those of caches `[B, capacity, kv D]`.
    pub(super) fn cached(
        sizes: Sizes,
        [keys, values]: [&'a Operand; 2],
        mask: &'a MaskOperands,
        past: usize,
        capacity: usize,
    ) -> Self {
        let at = [sizes.plain(sizes.heads.kv, capacity); 2];
        Self { keys, values, mask, at, past }
    }

    /// Returns the argument for the window: at most the number of all keys.
    fn window(&self, sizes: Sizes) -> u32 {
        let all = self.past + sizes.tokens;
        u32_of(self.mask.window.map_or(all, |window| window.clamp(1, all)))
    }

    /// Returns the argument for the documents. Kernels of sequences that are not divided do not read it.
    fn documents(&self) -> BufferArg {
        self.mask.documents.as_ref().unwrap_or(self.keys).arg()
    }

    /// Returns the argument for the prefixes. Kernels of sequences without prefixes do not read it.
    fn prefixes(&self) -> BufferArg {
        self.mask.prefixes.as_ref().unwrap_or(self.keys).arg()
    }
}

impl Cube {
    pub(super) fn attend(
        &self,
        h: Sizes,
        q: &Operand,
        kv: &KeysValues<'_>,
        y: &Operand,
        lse: Option<&Operand>,
    ) {
        attention::forward::launch(
            &self.client,
            h.cubes(h.heads.query, h.tokens, self.units),
            CubeDim::new_1d(self.units),
            h.vector(),
            q.arg(),
            kv.keys.arg(),
            kv.values.arg(),
            kv.documents(),
            kv.prefixes(),
            y.arg(),
            lse.unwrap_or(y).arg(),
            h.rows(h.packed()[0]),
            h.rows(kv.at[0]),
            h.rows(kv.at[1]),
            h.outputs(),
            u32_of(h.heads.query),
            h.group(),
            u32_of(h.tokens),
            u32_of(kv.past),
            kv.window(h),
            scale_of(h.dim),
            lse.is_some(),
            kv.mask.documents.is_some(),
            kv.mask.prefixes.is_some(),
            h.vectors(),
            self.units,
        );
    }

    /// Launches the gradient of an attention. `d_q` has the layout of the packed queries, `d_kv` that of keys
    /// and values.
    #[expect(clippy::too_many_arguments, reason = "the operands of one op")]
    pub(super) fn attend_grad(
        &self,
        h: Sizes,
        q: &Operand,
        kv: &KeysValues<'_>,
        y: &Operand,
        lse: &Operand,
        dy: &Operand,
        d_q: &Operand,
        d_kv: [&Operand; 2],
        accumulate: bool,
    ) -> Result<()> {
        let stats = h.batch * h.heads.query * h.tokens;
        let scratch: Buffer = self.scratch(stats * 4)?;
        let delta = Self::whole(&scratch);
        let (count, dim) = self.each(stats);
        let (heads, tokens) = (u32_of(h.heads.query), u32_of(h.tokens));
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
            u32_of(h.dim),
        );
        attention::queries::launch(
            &self.client,
            h.cubes(h.heads.query, h.tokens, self.units),
            CubeDim::new_1d(self.units),
            h.vector(),
            q.arg(),
            kv.keys.arg(),
            kv.values.arg(),
            dy.arg(),
            kv.documents(),
            kv.prefixes(),
            lse.arg(),
            delta.arg(),
            d_q.arg(),
            h.rows(h.packed()[0]),
            h.rows(kv.at[0]),
            h.rows(kv.at[1]),
            h.outputs(),
            heads,
            h.group(),
            tokens,
            u32_of(kv.past),
            kv.window(h),
            scale_of(h.dim),
            kv.mask.documents.is_some(),
            kv.mask.prefixes.is_some(),
            h.vectors(),
            self.units,
        );
        attention::keys_values::launch(
            &self.client,
            h.cubes(h.heads.kv, kv.past + h.tokens, self.units),
            CubeDim::new_1d(self.units),
            h.vector(),
            q.arg(),
            kv.keys.arg(),
            kv.values.arg(),
            dy.arg(),
            kv.documents(),
            kv.prefixes(),
            lse.arg(),
            delta.arg(),
            d_kv[0].arg(),
            d_kv[1].arg(),
            h.rows(h.packed()[0]),
            h.rows(kv.at[0]),
            h.rows(kv.at[1]),
            h.outputs(),
            u32_of(h.heads.kv),
            h.group(),
            tokens,
            u32_of(kv.past),
            kv.window(h),
            scale_of(h.dim),
            accumulate,
            kv.mask.documents.is_some(),
            kv.mask.prefixes.is_some(),
            h.vectors(),
            self.units,
        );
        self.pool.give(scratch);
        Ok(())
    }

    pub(super) fn exchange(
        &self,
        h: Sizes,
        qkv: &Operand,
        caches: [&Operand; 2],
        past: usize,
        capacity: usize,
        append: bool,
    ) {
        let width = h.heads.kv * h.dim;
        let len = h.batch * h.tokens * width;
        let (count, dim) = self.each(len);
        attention::exchange::launch(
            &self.client,
            count,
            dim,
            qkv.arg(),
            caches[0].arg(),
            caches[1].arg(),
            u32_of(h.heads.query * h.dim),
            u32_of(width),
            u32_of(h.tokens),
            u32_of(past),
            u32_of(capacity),
            u32_of(len),
            append,
        );
    }
}
