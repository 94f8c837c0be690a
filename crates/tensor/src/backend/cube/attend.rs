//! Launches the kernels of attention and its gradient, for packed and for cached keys and values.

use cubecl::prelude::*;

use super::attention::RowsLaunch;
use super::operand::Operand;
use super::seen::Seen;
use super::storage::Buffer;
use super::{Cube, attention, cubes, u32_of};
use crate::op::KeyRanges;
use crate::{AttendedKeys, Heads, Mask, Result, Shape, View, ViewMut};

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

/// The operands of a mask, or of ranges.
pub(super) struct MaskOperands {
    /// Where the document of each query begins, or its range.
    from: Option<Operand>,
    /// Where its prefix ends, or its range; or the words of tiles.
    to: Option<Operand>,
    window: Option<usize>,
    seen: Seen,
}

impl MaskOperands {
    pub(super) fn read(cube: &Cube, mask: &Mask<'_>) -> Result<Self> {
        let read = |view: &Option<View<'_>>| view.as_ref().map(|view| cube.read(view)).transpose();
        let from = read(&mask.documents)?;
        let divided = from.is_some();
        let (to, seen) = match mask.keys {
            AttendedKeys::Tiles(tiles) => (Some(cube.read(&tiles.words())?), Seen::Tiles { divided }),
            AttendedKeys::All | AttendedKeys::Window(_) => {
                let to = read(&mask.prefixes)?;
                let prefixed = to.is_some();
                (to, Seen::Before { divided, prefixed })
            }
        };
        Ok(Self { from, to, window: mask.keys.window(), seen })
    }

    fn of_ranges(cube: &Cube, ranges: &KeyRanges<'_>) -> Result<Self> {
        let [from, to] = [cube.read(&ranges.from)?, cube.read(&ranges.to)?].map(Some);
        Ok(Self { from, to, window: None, seen: Seen::Ranges })
    }

    /// Returns the operands, to be released.
    pub(super) fn all(self) -> impl Iterator<Item = Operand> {
        self.from.into_iter().chain(self.to)
    }
}

/// Keys and values of an attention: operands, layouts, their number, and the number of tokens before the
/// first query.
pub(super) struct KeysValues<'a> {
    keys: &'a Operand,
    values: &'a Operand,
    mask: &'a MaskOperands,
    at: [[usize; 3]; 2],
    count: usize,
    past: usize,
}

impl<'a> KeysValues<'a> {
    /// Those of the queries' own tokens, beside the queries.
    pub(super) fn packed(sizes: Sizes, qkv: &'a Operand, mask: &'a MaskOperands) -> Self {
        let [_, keys, values] = sizes.packed();
        Self { keys: qkv, values: qkv, mask, at: [keys, values], count: sizes.tokens, past: 0 }
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
        Self { keys, values, mask, at, count: past + sizes.tokens, past }
    }

    /// Those of the ranges of queries: `[B, count, kv D]`.
    fn over(sizes: Sizes, [keys, values]: [&'a Operand; 2], mask: &'a MaskOperands, count: usize) -> Self {
        let at = [sizes.plain(sizes.heads.kv, count); 2];
        Self { keys, values, mask, at, count, past: 0 }
    }

    /// Returns the argument for the window: at most the number of all keys.
    fn window(&self) -> u32 {
        u32_of(self.mask.window.map_or(self.count, |window| window.clamp(1, self.count)))
    }

    /// Returns the arguments for where the keys of each query begin and end. Kernels do not read what
    /// [`Seen`] does not tell.
    fn bounds(&self) -> [BufferArg; 2] {
        [&self.mask.from, &self.mask.to].map(|ends| ends.as_ref().unwrap_or(self.keys).arg())
    }
}

impl Cube {
    /// Launches an attention. If it `continues`, `y` and `lse` are of other keys already.
    pub(super) fn attend(
        &self,
        h: Sizes,
        q: &Operand,
        kv: &KeysValues<'_>,
        y: &Operand,
        lse: Option<&Operand>,
        continues: bool,
    ) {
        let [from, to] = kv.bounds();
        attention::forward::launch(
            &self.client,
            h.cubes(h.heads.query, h.tokens, self.units),
            CubeDim::new_1d(self.units),
            h.vector(),
            q.arg(),
            kv.keys.arg(),
            kv.values.arg(),
            from,
            to,
            y.arg(),
            lse.unwrap_or(y).arg(),
            h.rows(h.packed()[0]),
            h.rows(kv.at[0]),
            h.rows(kv.at[1]),
            h.outputs(),
            u32_of(h.heads.query),
            h.group(),
            u32_of(h.tokens),
            u32_of(kv.count),
            u32_of(kv.past),
            kv.window(),
            scale_of(h.dim),
            lse.is_some(),
            kv.mask.seen,
            continues,
            h.vectors(),
            self.units,
        );
    }

    /// Launches the gradient of an attention. `d_q` has the layout of the packed queries, or that of the
    /// outputs if queries have ranges; `d_kv` has that of keys and values.
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
        let [from, to] = kv.bounds();
        attention::queries::launch(
            &self.client,
            h.cubes(h.heads.query, h.tokens, self.units),
            CubeDim::new_1d(self.units),
            h.vector(),
            q.arg(),
            kv.keys.arg(),
            kv.values.arg(),
            dy.arg(),
            from,
            to,
            lse.arg(),
            delta.arg(),
            d_q.arg(),
            h.rows(h.packed()[0]),
            h.rows(kv.at[0]),
            h.rows(kv.at[1]),
            h.outputs(),
            if kv.mask.seen.is_ranges() { h.outputs() } else { h.rows(h.packed()[0]) },
            heads,
            h.group(),
            tokens,
            u32_of(kv.count),
            u32_of(kv.past),
            kv.window(),
            scale_of(h.dim),
            kv.mask.seen,
            h.vectors(),
            self.units,
        );
        let [from, to] = kv.bounds();
        attention::keys_values::launch(
            &self.client,
            h.cubes(h.heads.kv, kv.count, self.units),
            CubeDim::new_1d(self.units),
            h.vector(),
            q.arg(),
            kv.keys.arg(),
            kv.values.arg(),
            dy.arg(),
            from,
            to,
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
            u32_of(kv.count),
            u32_of(kv.past),
            kv.window(),
            scale_of(h.dim),
            accumulate,
            kv.mask.seen,
            h.vectors(),
            self.units,
        );
        self.pool.give(scratch);
        Ok(())
    }

    /// `y` is not empty.
    pub(super) fn attention_over(
        &self,
        heads: Heads,
        ranges: &KeyRanges<'_>,
        continues: bool,
        [qkv, keys, values]: [&View<'_>; 3],
        [y, lse]: [&ViewMut<'_>; 2],
    ) -> Result<()> {
        let h = Sizes::new(y.shape(), heads);
        let (of_y, of_lse) = (y.len(), lse.len());
        if keys.is_empty() {
            if !continues {
                let (y, lse) = (self.write(y)?, self.write(lse)?);
                self.fill(&y, of_y, 0.0);
                self.fill(&lse, of_lse, attention::MASKED);
                self.write_back([y, lse]);
            }
            return Ok(());
        }
        let count = keys.shape().dims()[1];
        let (qkv, keys, values) = (self.read(qkv)?, self.read(keys)?, self.read(values)?);
        let (y, lse) = (self.write(y)?, self.write(lse)?);
        let mask = MaskOperands::of_ranges(self, ranges)?;
        let kv = KeysValues::over(h, [&keys, &values], &mask, count);
        self.attend(h, &qkv, &kv, &y, Some(&lse), continues);
        self.write_back([qkv, keys, values, y, lse].into_iter().chain(mask.all()));
        Ok(())
    }

    /// `y` and `keys` are not empty.
    pub(super) fn attention_over_grad(
        &self,
        heads: Heads,
        ranges: &KeyRanges<'_>,
        read: [&View<'_>; 6],
        written: [&ViewMut<'_>; 3],
    ) -> Result<()> {
        let [qkv, keys, values, y, lse, dy] = read;
        let (h, count) = (Sizes::new(y.shape(), heads), keys.shape().dims()[1]);
        let (qkv, keys, values) = (self.read(qkv)?, self.read(keys)?, self.read(values)?);
        let (y, lse, dy) = (self.read(y)?, self.read(lse)?, self.read(dy)?);
        let [dq, d_keys, d_values] = written;
        let (dq, d_keys, d_values) = (self.write(dq)?, self.write(d_keys)?, self.write(d_values)?);
        let mask = MaskOperands::of_ranges(self, ranges)?;
        let kv = KeysValues::over(h, [&keys, &values], &mask, count);
        self.attend_grad(h, &qkv, &kv, &y, &lse, &dy, &dq, [&d_keys, &d_values], true)?;
        let operands = [qkv, keys, values, y, lse, dy, dq, d_keys, d_values];
        self.write_back(operands.into_iter().chain(mask.all()));
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
