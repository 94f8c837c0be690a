//! Checks of the operands of ops. They run once, here, so that backends can rely on them.

use crate::op::{Fuse, Heads, KeyRanges, Op, Rotary, TokenPositions};
use crate::{DType, Device, Mask, Result, Shape, TensorError, View, ViewMut};

pub(crate) struct Check<'a> {
    pub(crate) device: &'a Device,
    pub(crate) op: &'static str,
}

/// Access to what both kinds of view have in common.
pub(crate) trait Operand {
    fn facts(&self) -> (&Device, DType, Shape);
}

impl Operand for View<'_> {
    fn facts(&self) -> (&Device, DType, Shape) {
        (self.device(), self.dtype(), self.shape())
    }
}

impl Operand for ViewMut<'_> {
    fn facts(&self) -> (&Device, DType, Shape) {
        (self.device(), self.dtype(), self.shape())
    }
}

impl Check<'_> {
    /// Checks that the operand is on this device and has this element type. Returns its shape.
    pub(crate) fn typed(&self, v: &dyn Operand, expected: DType) -> Result<Shape> {
        let (device, found, shape) = v.facts();
        if !self.device.same(device) {
            return Err(TensorError::DeviceMismatch {
                op: self.op,
                expected: self.device.name().to_owned(),
                found: device.name().to_owned(),
            });
        }
        if found != expected {
            return Err(TensorError::DTypeMismatch { op: self.op, expected, found });
        }
        Ok(shape)
    }

    pub(crate) fn mismatch<T>(&self, lhs: Shape, rhs: Shape) -> Result<T> {
        Err(TensorError::ShapeMismatch { op: self.op, lhs, rhs })
    }

    /// Checks that the operand is f32 and has `rows` rows and `cols` columns as a matrix.
    fn matrix(&self, v: &dyn Operand, rows: usize, cols: usize) -> Result<()> {
        let shape = self.typed(v, DType::F32)?;
        if (shape.rows(), shape.cols()) == (rows, cols) {
            Ok(())
        } else {
            self.mismatch(shape, Shape::from([rows, cols]))
        }
    }

    /// Checks that the operand has this type and as many elements as `like`.
    pub(crate) fn flat(&self, v: &dyn Operand, dtype: DType, like: impl Into<Shape>) -> Result<()> {
        let (shape, like) = (self.typed(v, dtype)?, like.into());
        if shape.len() == like.len() { Ok(()) } else { self.mismatch(shape, like) }
    }

    /// Checks that the operand is f32 with three dimensions, `[B, T, width]`, and returns them.
    fn tokens(&self, v: &dyn Operand) -> Result<[usize; 3]> {
        let shape = self.typed(v, DType::F32)?;
        match *shape.dims() {
            [b, t, c] => Ok([b, t, c]),
            _ => self.mismatch(shape, Shape::from([0, 0, 0])),
        }
    }

    /// Checks that the operand is f32 and `[B, T, width]`.
    fn is_tokens(&self, v: &dyn Operand, expected: [usize; 3]) -> Result<()> {
        let found = self.tokens(v)?;
        if found == expected { Ok(()) } else { self.mismatch(Shape::from(found), Shape::from(expected)) }
    }

    /// Checks that `queries` is `[B, T, query D]`, and `qkv` `[B, T, (query + 2 kv) D]`. Returns `[B, T, D]`.
    fn heads(&self, queries: &dyn Operand, qkv: &dyn Operand, heads: Heads) -> Result<[usize; 3]> {
        let [b, t, width] = self.tokens(queries)?;
        let Heads { query, kv } = heads;
        if query == 0 || kv == 0 || !query.is_multiple_of(kv) || !width.is_multiple_of(query) {
            return Err(TensorError::Heads { op: self.op, query, kv, width });
        }
        let d = width / query;
        self.is_tokens(qkv, [b, t, heads.width().saturating_mul(d)])?;
        Ok([b, t, d])
    }

    /// Checks the operands of joining or splitting heads: `q`, `k` and `v`, and all of them side by side.
    fn joined(
        &self,
        heads: Heads,
        rotary: Option<&Rotary<'_>>,
        [q, k, v, qkv]: [&dyn Operand; 4],
    ) -> Result<()> {
        let [b, t, d] = self.heads(q, qkv, heads)?;
        for keys_or_values in [k, v] {
            self.is_tokens(keys_or_values, [b, t, heads.kv.saturating_mul(d)])?;
        }
        let Some(Rotary { table, positions }) = rotary else { return Ok(()) };
        let rows = self.places(positions, [b, t])?;
        let shape = self.typed(table, DType::F32)?;
        let cols = shape.cols().min(d) / 2 * 2;
        if shape.cols() != cols || shape.rows() < rows {
            return self.mismatch(shape, Shape::from([rows, cols]));
        }
        Ok(())
    }

    /// Checks that the borders of documents, if there are any, are u32 and as many as `[B, T]`.
    fn documents(&self, documents: Option<&View<'_>>, tokens: [usize; 2]) -> Result<()> {
        documents.map_or(Ok(()), |documents| self.flat(documents, DType::U32, tokens))
    }

    /// Checks that what a mask says of tokens is u32 and as many as `[B, T]`, and that tiles are those of
    /// `heads` and have the tokens with `past` others before them.
    fn mask(&self, mask: &Mask<'_>, heads: Heads, tokens: [usize; 2], past: usize) -> Result<()> {
        self.documents(mask.documents.as_ref(), tokens)?;
        self.documents(mask.prefixes.as_ref(), tokens)?;
        let Some(tiles) = mask.keys.tiles() else { return Ok(()) };
        self.typed(&tiles.words(), DType::U32)?;
        let refuse = |what, found, bound| Err(TensorError::Tiles { op: self.op, what, found, bound });
        if tiles.heads() != heads.query {
            return refuse("heads", tiles.heads(), heads.query);
        }
        let end = past.saturating_add(tokens[1]);
        if end > tiles.tokens() {
            return refuse("tokens", tiles.tokens(), end);
        }
        if mask.prefixes.is_some() { refuse("masks with prefixes", 1, 0) } else { Ok(()) }
    }

    /// Checks that what says where tokens are is u32 and as many as `[B, T]`. Returns the least number of
    /// rows of a table of positions.
    fn places(&self, positions: &TokenPositions<'_>, tokens: [usize; 2]) -> Result<usize> {
        match positions {
            TokenPositions::From { start, documents } => {
                self.documents(documents.as_ref(), tokens)?;
                Ok(start.saturating_add(tokens[1]))
            }
            TokenPositions::At(positions) => {
                self.flat(positions, DType::U32, tokens)?;
                Ok(usize::from(!positions.is_empty()))
            }
        }
    }

    /// Checks the operands of attention to given keys that both passes have: `y` is `[B, T, C]`, `keys` and
    /// `like_keys` are `[B, K, kv D]`.
    fn over<const N: usize>(
        &self,
        heads: Heads,
        ranges: &KeyRanges<'_>,
        [qkv, y, lse, keys]: [&dyn Operand; 4],
        like_keys: [&dyn Operand; N],
    ) -> Result<()> {
        let [b, t, d] = self.heads(y, qkv, heads)?;
        self.flat(&ranges.from, DType::U32, [b, t])?;
        self.flat(&ranges.to, DType::U32, [b, t])?;
        self.flat(lse, DType::F32, [b, heads.query, t])?;
        let expected = [b, self.tokens(keys)?[1], heads.kv.saturating_mul(d)];
        self.is_tokens(keys, expected)?;
        like_keys.into_iter().try_for_each(|keys_or_values| self.is_tokens(keys_or_values, expected))
    }

    /// Checks that a table of positions has at least `rows` rows of `width` values.
    fn positions(&self, table: &dyn Operand, rows: usize, width: usize) -> Result<()> {
        let found = self.typed(table, DType::F32)?;
        if found.cols() != width || found.rows() < rows {
            return self.mismatch(found, Shape::from([rows, width]));
        }
        Ok(())
    }

    /// Checks that the caches of keys and values, or their gradients, are all `[B, capacity, width]`, with room
    /// for `tokens` tokens.
    fn caches<const N: usize>(
        &self,
        caches: [&dyn Operand; N],
        [b, tokens, width]: [usize; 3],
    ) -> Result<()> {
        let capacity = self.tokens(caches[0])?[1].max(tokens);
        for cache in caches {
            self.is_tokens(cache, [b, capacity, width])?;
        }
        Ok(())
    }
}

impl Op<'_> {
    /// Checks that all operands are on `device` and have the types and shapes that the op requires.
    #[expect(clippy::too_many_lines, reason = "one arm per op")]
    pub(crate) fn check(&self, device: &Device) -> Result<()> {
        let c = Check { device, op: self.name() };
        match self {
            Self::Fill { y, .. } => c.typed(y, DType::F32).map(drop),
            Self::Cast { x, y } => {
                let shape = c.typed(x, x.dtype())?;
                let half = |d| matches!(d, DType::F16 | DType::Bf16);
                let (from, to) = (x.dtype(), y.dtype());
                if from != to && !(from == DType::F32 && half(to) || half(from) && to == DType::F32) {
                    let found = if to == DType::F32 { from } else { to };
                    return Err(TensorError::DTypeMismatch { op: c.op, expected: DType::F32, found });
                }
                c.flat(y, to, shape)
            }
            Self::MatMul { a, a_t, b, b_t, c: out, fuse, .. } => {
                let transposed =
                    |s: Shape, t: bool| if t { (s.cols(), s.rows()) } else { (s.rows(), s.cols()) };
                let (sa, sb) = (c.typed(a, DType::F32)?, c.typed(b, DType::F32)?);
                let ((m, k), (k2, n)) = (transposed(sa, *a_t), transposed(sb, *b_t));
                if k != k2 {
                    return c.mismatch(sa, sb);
                }
                c.matrix(out, m, n)?;
                match fuse {
                    Fuse::None => Ok(()),
                    Fuse::Bias(bias) => c.flat(bias, DType::F32, n),
                    Fuse::BiasGelu { bias, slope, .. } => {
                        c.flat(bias, DType::F32, n)?;
                        slope.as_ref().map_or(Ok(()), |slope| c.matrix(slope, m, n))
                    }
                    Fuse::Add { residual } => c.matrix(residual, m, n),
                    Fuse::BiasAdd { bias, residual } => {
                        c.flat(bias, DType::F32, n)?;
                        c.matrix(residual, m, n)
                    }
                    Fuse::Times { factor } => c.matrix(factor, m, n),
                }
            }
            Self::SumRows { x, y, .. } => {
                let cols = c.typed(x, DType::F32)?.cols();
                c.flat(y, DType::F32, cols)
            }
            Self::Norm { norm: _, x, gain, bias, y, stats } => {
                let s = c.typed(x, DType::F32)?;
                c.flat(gain, DType::F32, s.cols())?;
                if let Some(bias) = bias {
                    c.flat(bias, DType::F32, s.cols())?;
                }
                c.matrix(y, s.rows(), s.cols())?;
                c.flat(stats, DType::F32, s.rows().saturating_mul(2))
            }
            Self::NormInput { norm: _, x, gain, stats, dy, residual, dx } => {
                let s = c.typed(x, DType::F32)?;
                c.flat(gain, DType::F32, s.cols())?;
                c.flat(stats, DType::F32, s.rows().saturating_mul(2))?;
                c.matrix(dy, s.rows(), s.cols())?;
                if let Some(r) = residual {
                    c.matrix(r, s.rows(), s.cols())?;
                }
                c.matrix(dx, s.rows(), s.cols())
            }
            Self::NormWeight { x, stats, dy, d_gain, d_bias, .. } => {
                let s = c.typed(x, DType::F32)?;
                c.flat(stats, DType::F32, s.rows().saturating_mul(2))?;
                c.matrix(dy, s.rows(), s.cols())?;
                c.flat(d_gain, DType::F32, s.cols())?;
                d_bias.as_ref().map_or(Ok(()), |d_bias| c.flat(d_bias, DType::F32, s.cols()))
            }
            Self::JoinHeads { heads, rotary, q, k, v, qkv } => {
                c.joined(*heads, rotary.as_ref(), [q, k, v, qkv])
            }
            Self::SplitHeads { heads, rotary, d_qkv, dq, dk, dv } => {
                c.joined(*heads, rotary.as_ref(), [dq, dk, dv, d_qkv])
            }
            Self::SwiGlu { gate, up, y } => {
                let shape = c.typed(gate, DType::F32)?;
                c.flat(up, DType::F32, shape)?;
                c.flat(y, DType::F32, shape)
            }
            Self::SwiGluGrad { gate, up, dy } => {
                let shape = c.typed(gate, DType::F32)?;
                c.flat(up, DType::F32, shape)?;
                c.flat(dy, DType::F32, shape)
            }
            Self::Attention { heads, mask, qkv, y, lse } => {
                let [b, t, _] = c.heads(y, qkv, *heads)?;
                c.mask(mask, *heads, [b, t], 0)?;
                c.flat(lse, DType::F32, [b, heads.query, t])
            }
            Self::AttentionGrad { heads, mask, qkv, y, lse, dy, d_qkv } => {
                let [b, t, _] = c.heads(y, qkv, *heads)?;
                c.mask(mask, *heads, [b, t], 0)?;
                c.flat(lse, DType::F32, [b, heads.query, t])?;
                c.matrix(dy, y.shape().rows(), y.shape().cols())?;
                c.matrix(d_qkv, qkv.shape().rows(), qkv.shape().cols())
            }
            Self::AttentionCached { heads, past, mask, qkv, keys, values, y, lse } => {
                let [b, t, d] = c.heads(y, qkv, *heads)?;
                c.mask(mask, *heads, [b, t], *past)?;
                c.caches([keys, values], [b, past.saturating_add(t), heads.kv.saturating_mul(d)])?;
                lse.as_ref().map_or(Ok(()), |lse| c.flat(lse, DType::F32, [b, heads.query, t]))
            }
            Self::AttentionCachedGrad {
                heads,
                past,
                mask,
                qkv,
                keys,
                values,
                y,
                lse,
                dy,
                d_qkv,
                d_keys,
                d_values,
            } => {
                let [b, t, d] = c.heads(y, qkv, *heads)?;
                c.mask(mask, *heads, [b, t], *past)?;
                let width = heads.kv.saturating_mul(d);
                c.caches([keys, values, d_keys, d_values], [b, past.saturating_add(t), width])?;
                c.flat(lse, DType::F32, [b, heads.query, t])?;
                c.matrix(dy, y.shape().rows(), y.shape().cols())?;
                c.matrix(d_qkv, qkv.shape().rows(), qkv.shape().cols())
            }
            Self::AttentionOver { heads, ranges, continues: _, qkv, keys, values, y, lse } => {
                c.over(*heads, ranges, [qkv, y, lse, keys], [values])
            }
            Self::AttentionOverGrad {
                heads,
                ranges,
                qkv,
                keys,
                values,
                y,
                lse,
                dy,
                dq,
                d_keys,
                d_values,
            } => {
                c.over(*heads, ranges, [qkv, y, lse, keys], [values, d_keys, d_values])?;
                c.matrix(dy, y.shape().rows(), y.shape().cols())?;
                c.matrix(dq, y.shape().rows(), y.shape().cols())
            }
            Self::Embed { tokens, positions, tokens_table, positions_table, y, .. } => {
                let [b, t, width] = c.tokens(y)?;
                c.flat(tokens, DType::U32, [b, t])?;
                let rows = c.places(positions, [b, t])?;
                let table = c.typed(tokens_table, DType::F32)?;
                c.matrix(tokens_table, table.rows(), width)?;
                positions_table.as_ref().map_or(Ok(()), |table| c.positions(table, rows, width))
            }
            Self::EmbedGrad { tokens, positions, dy, d_tokens_table, d_positions_table, .. } => {
                let [b, t, width] = c.tokens(dy)?;
                c.flat(tokens, DType::U32, [b, t])?;
                let rows = c.places(positions, [b, t])?;
                let table = c.typed(d_tokens_table, DType::F32)?;
                c.matrix(d_tokens_table, table.rows(), width)?;
                d_positions_table.as_ref().map_or(Ok(()), |table| c.positions(table, rows, width))
            }
            Self::CombineRows { x, rows, factors, add, y } => {
                let (n, cols) = (y.shape().rows(), c.typed(x, DType::F32)?.cols());
                let numbers = c.typed(rows, DType::U32)?;
                c.matrix(y, numbers.rows(), cols)?;
                factors.as_ref().map_or(Ok(()), |factors| c.flat(factors, DType::F32, numbers))?;
                add.as_ref().map_or(Ok(()), |add| c.matrix(add, n, cols))
            }
            Self::RowDots { a, b, rows, y } => {
                let shape = c.typed(a, DType::F32)?;
                c.matrix(b, b.shape().rows(), shape.cols())?;
                c.flat(rows, DType::U32, shape.rows())?;
                c.flat(y, DType::F32, shape.rows())
            }
            Self::CrossEntropy { logits, targets, weights, losses, .. } => {
                let s = c.typed(logits, DType::F32)?;
                c.flat(targets, DType::U32, s.rows())?;
                weights.as_ref().map_or(Ok(()), |weights| c.flat(weights, DType::F32, s.rows()))?;
                c.flat(losses, DType::F32, s.rows())
            }
            Self::LogitStats { logits, targets, stats, .. } => {
                let s = c.typed(logits, DType::F32)?;
                if s.cols() == 0 && s.rows() > 0 {
                    return Err(TensorError::IdOutOfRange { op: self.name(), id: 0, position: 0, bound: 0 });
                }
                c.flat(targets, DType::U32, s.rows())?;
                c.matrix(stats, s.rows(), 3)
            }
            Self::LogitGrad { logits, targets, weights, log_sums, .. } => {
                let rows = c.typed(logits, DType::F32)?.rows();
                c.flat(targets, DType::U32, rows)?;
                weights.as_ref().map_or(Ok(()), |weights| c.flat(weights, DType::F32, rows))?;
                c.flat(log_sums, DType::F32, rows)
            }
            Self::SumSquares { x, partials } => {
                let len = c.typed(x, DType::F32)?.len();
                c.flat(partials, DType::F32, len.div_ceil(Self::SQUARES_CHUNK))
            }
            Self::Map { program, scalars, reads, writes } => {
                for (what, found, bound) in [
                    ("number of scalars", scalars.len(), program.scalars()),
                    ("number of read buffers", reads.len(), program.reads()),
                    ("number of updated buffers", writes.len(), program.writes()),
                ] {
                    if found != bound {
                        return Err(TensorError::BadProgram { what, found, relation: "exactly", bound });
                    }
                }
                let like = writes.first().map_or(Shape::from(0), ViewMut::shape);
                reads.iter().try_for_each(|v| c.flat(v, DType::F32, like))?;
                writes.iter().try_for_each(|v| c.flat(v, DType::F32, like))
            }
        }
    }
}

impl Device {
    /// Checks the op's shapes, types and devices, then runs it.
    ///
    /// Errors: those of the check and of the device; [`TensorError::Interrupted`] while the handle's
    /// [interrupt](Device::with_interrupt) is raised.
    pub fn run(&self, op: Op<'_>) -> Result<()> {
        if self.is_interrupted() {
            return Err(TensorError::Interrupted);
        }
        op.check(self)?;
        self.backend().run(op, self.precision())
    }
}
