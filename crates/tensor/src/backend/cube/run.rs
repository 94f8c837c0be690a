//! Launches the kernels of each op.

use cubecl::prelude::*;

use super::attend::{KeysValues, MaskOperands, Sizes};
use super::operand::Operand;
use super::{Cube, bytes, cubes, embed, grid, loss, map, norm, reduce, swiglu, u32_of};
use crate::op::Op;
use crate::{DType, NormKind, Precision, Result, TensorError, View, ViewMut};

/// Ops that look up ids. The fault buffer stores the index in this list plus one.
pub(super) const FAULTING: [&str; 3] = ["embed", "embed_grad", "cross_entropy"];

/// Number of rows in one partial sum of a column.
const COLUMN_CHUNK: usize = 64;
impl Cube {
    pub(super) fn each(&self, elements: usize) -> (CubeCount, CubeDim) {
        grid(elements, self.units)
    }

    pub(super) fn row_each(&self, rows: usize) -> (CubeCount, CubeDim) {
        (cubes(rows), CubeDim::new_1d(self.units))
    }

    /// Records an id that is not below `bound`; the next fence reports it.
    pub(super) fn check_ids(&self, op: &'static str, ids: &Operand, len: usize, bound: usize) {
        let code = FAULTING.iter().position(|&name| name == op).map_or(0, |i| u32_of(i) + 1);
        embed::check_ids::launch(
            &self.client,
            CubeCount::Static(1, 1, 1),
            CubeDim::new_1d(self.units),
            ids.arg(),
            Self::whole(&self.fault).arg(),
            u32_of(len),
            u32_of(bound),
            code,
            self.units,
        );
    }

    pub(super) fn fill(&self, y: &Operand, len: usize, value: f32) {
        let (count, dim) = self.each(len);
        bytes::fill::launch(&self.client, count, dim, y.arg(), value);
    }

    pub(super) fn cast(&self, x: &View<'_>, y: &ViewMut<'_>) -> Result<()> {
        if x.dtype() == y.dtype() {
            let view = y.as_view();
            let (a, b) = (x.raw(), view.raw());
            let (from, to) = (Self::buffer(&a), Self::buffer(&b));
            let from = (&from.handle, from.bytes, a.range.start);
            self.copy(from, (&to.handle, to.bytes, b.range.start), a.range.len());
            return Ok(());
        }
        let len = x.len();
        let (from, to) = (self.read(x)?, self.write(y)?);
        let bf16 = |d| d == DType::Bf16;
        match (x.dtype(), y.dtype()) {
            (DType::F32, half @ (DType::F16 | DType::Bf16)) => {
                let (count, dim) = self.each(len.div_ceil(2));
                bytes::narrow::launch(
                    &self.client,
                    count,
                    dim,
                    from.arg(),
                    to.arg(),
                    1.0,
                    u32_of(len),
                    bf16(half),
                );
            }
            (half @ (DType::F16 | DType::Bf16), DType::F32) => {
                let (count, dim) = self.each(len);
                bytes::widen::launch(&self.client, count, dim, from.arg(), to.arg(), u32_of(len), bf16(half));
            }
            _ => unreachable!("`Op::check` accepts no other pair of types"),
        }
        self.write_back([from, to]);
        Ok(())
    }

    /// Sums chunks of `chunk` rows of `x` for some columns. `size` is rows, columns, row stride, first column.
    fn columns(&self, x: &Operand, y: &Operand, size: [usize; 4], chunk: usize, accumulate: bool) {
        let [rows, cols, stride, start] = size.map(u32_of);
        let (count, dim) = self.each(size[0].div_ceil(chunk) * size[1]);
        let chunk = u32_of(chunk);
        let (x, y) = (x.arg(), y.arg());
        reduce::sum_columns::launch(
            &self.client,
            count,
            dim,
            x,
            y,
            rows,
            cols,
            stride,
            start,
            chunk,
            accumulate,
        );
    }

    fn sum_rows(&self, x: &View<'_>, y: &ViewMut<'_>, accumulate: bool) -> Result<()> {
        let (rows, cols) = (x.shape().rows(), x.shape().cols());
        let (from, to) = (self.read(x)?, self.write(y)?);
        let chunks = rows.div_ceil(COLUMN_CHUNK).max(1);
        let scratch = self.scratch(chunks * cols * 4)?;
        let parts = Self::whole(&scratch);
        if rows > 0 {
            self.columns(&from, &parts, [rows, cols, cols, 0], COLUMN_CHUNK, false);
            self.columns(&parts, &to, [chunks, cols, cols, 0], chunks, accumulate);
        } else if !accumulate {
            self.fill(&to, cols, 0.0);
        }
        self.pool.give(scratch);
        self.write_back([from, to]);
        Ok(())
    }

    fn norm_weight(
        &self,
        x: &View<'_>,
        stats: &View<'_>,
        dy: &View<'_>,
        (d_gain, d_bias): (&ViewMut<'_>, Option<&ViewMut<'_>>),
        accumulate: bool,
    ) -> Result<()> {
        let (rows, cols) = (x.shape().rows(), x.shape().cols());
        let (gain, bias) = (self.write(d_gain)?, d_bias.map(|d| self.write(d)).transpose()?);
        if rows == 0 {
            for to in [&gain].into_iter().chain(&bias).filter(|_| !accumulate) {
                self.fill(to, cols, 0.0);
            }
            self.write_back([gain].into_iter().chain(bias));
            return Ok(());
        }
        let (x, stats, dy) = (self.read(x)?, self.read(stats)?, self.read(dy)?);
        let chunks = rows.div_ceil(COLUMN_CHUNK);
        let width = if bias.is_some() { 2 * cols } else { cols };
        let scratch = self.scratch(chunks * width * 4)?;
        let parts = Self::whole(&scratch);
        let (count, dim) = self.each(chunks * cols);
        norm::weight_parts::launch(
            &self.client,
            count,
            dim,
            x.arg(),
            stats.arg(),
            dy.arg(),
            parts.arg(),
            u32_of(rows),
            u32_of(cols),
            u32_of(COLUMN_CHUNK),
            bias.is_some(),
        );
        self.columns(&parts, &gain, [chunks, cols, width, 0], chunks, accumulate);
        if let Some(bias) = &bias {
            self.columns(&parts, bias, [chunks, cols, width, cols], chunks, accumulate);
        }
        self.pool.give(scratch);
        self.write_back([x, stats, dy, gain].into_iter().chain(bias));
        Ok(())
    }
}

/// Launches the kernels of an op. An op without output elements launches none.
#[expect(clippy::too_many_lines, reason = "one arm per op")]
pub(super) fn run(cube: &Cube, op: Op<'_>, precision: Precision) -> Result<()> {
    let name = op.name();
    let client = &cube.client;
    match op {
        Op::Fill { value, y } => {
            if y.is_empty() {
                return Ok(());
            }
            let to = cube.write(&y)?;
            cube.fill(&to, y.len(), value);
            cube.write_back([to]);
        }
        Op::Cast { x, y } => {
            if !y.is_empty() {
                cube.cast(&x, &y)?;
            }
        }
        Op::MatMul { a, a_t, b, b_t, c, accumulate, scales, fuse } => {
            if !c.is_empty() {
                cube.matmul([(&a, a_t), (&b, b_t)], precision, scales, &c, accumulate, fuse)?;
            }
        }
        Op::SumRows { x, y, accumulate } => {
            if !y.is_empty() {
                cube.sum_rows(&x, &y, accumulate)?;
            }
        }
        Op::Norm { norm, x, gain, bias, y, stats } => {
            let (rows, cols) = (x.shape().rows(), x.shape().cols());
            if x.is_empty() {
                return Ok(());
            }
            let (x, gain) = (cube.read(&x)?, cube.read(&gain)?);
            let bias = bias.map(|b| cube.read(&b)).transpose()?;
            let (y, stats) = (cube.write(&y)?, cube.write(&stats)?);
            let (count, dim) = cube.row_each(rows);
            norm::forward::launch(
                client,
                count,
                dim,
                x.arg(),
                gain.arg(),
                bias.as_ref().unwrap_or(&gain).arg(),
                y.arg(),
                stats.arg(),
                u32_of(rows),
                u32_of(cols),
                norm.eps,
                norm.kind == NormKind::Rms,
                bias.is_some(),
                cube.units,
            );
            cube.write_back([x, gain, y, stats].into_iter().chain(bias));
        }
        Op::NormInput { norm, x, gain, stats, dy, residual, dx } => {
            let (rows, cols) = (x.shape().rows(), x.shape().cols());
            if x.is_empty() {
                return Ok(());
            }
            let (x, gain, stats, dy) =
                (cube.read(&x)?, cube.read(&gain)?, cube.read(&stats)?, cube.read(&dy)?);
            let add = residual.is_some();
            let residual = residual.map(|r| cube.read(&r)).transpose()?;
            let dx = cube.write(&dx)?;
            let (count, dim) = cube.row_each(rows);
            norm::input::launch(
                client,
                count,
                dim,
                x.arg(),
                gain.arg(),
                stats.arg(),
                dy.arg(),
                residual.as_ref().unwrap_or(&x).arg(),
                dx.arg(),
                u32_of(rows),
                u32_of(cols),
                norm.kind == NormKind::Rms,
                add,
                cube.units,
            );
            cube.write_back([x, gain, stats, dy, dx].into_iter().chain(residual));
        }
        Op::NormWeight { x, stats, dy, d_gain, d_bias, accumulate } => {
            if !d_gain.is_empty() {
                cube.norm_weight(&x, &stats, &dy, (&d_gain, d_bias.as_ref()), accumulate)?;
            }
        }
        Op::JoinHeads { heads, rotary, q, k, v, qkv } => {
            if !qkv.is_empty() {
                cube.join_heads(heads, rotary.as_ref(), [&q, &k, &v], &qkv)?;
            }
        }
        Op::SplitHeads { heads, rotary, d_qkv, dq, dk, dv } => {
            if !d_qkv.is_empty() {
                cube.split_heads(heads, rotary.as_ref(), &d_qkv, [&dq, &dk, &dv])?;
            }
        }
        Op::SwiGlu { gate, up, y } => {
            let len = y.len();
            if len == 0 {
                return Ok(());
            }
            let (gate, up, y) = (cube.read(&gate)?, cube.read(&up)?, cube.write(&y)?);
            let (count, dim) = cube.each(len);
            swiglu::forward::launch(client, count, dim, gate.arg(), up.arg(), y.arg(), u32_of(len));
            cube.write_back([gate, up, y]);
        }
        Op::SwiGluGrad { gate, up, dy } => {
            let len = dy.len();
            if len == 0 {
                return Ok(());
            }
            let (gate, up, dy) = (cube.write(&gate)?, cube.write(&up)?, cube.write(&dy)?);
            let (count, dim) = cube.each(len);
            swiglu::backward::launch(client, count, dim, gate.arg(), up.arg(), dy.arg(), u32_of(len));
            cube.write_back([gate, up, dy]);
        }
        Op::Attention { heads, mask, qkv, y, lse } => {
            if y.is_empty() {
                return Ok(());
            }
            let h = Sizes::new(y.shape(), heads);
            let (qkv, y, lse) = (cube.read(&qkv)?, cube.write(&y)?, cube.write(&lse)?);
            let mask = MaskOperands::read(cube, &mask)?;
            let kv = KeysValues::packed(h, &qkv, &mask);
            cube.attend(h, &qkv, &kv, &y, Some(&lse), false);
            cube.write_back([qkv, y, lse].into_iter().chain(mask.all()));
        }
        Op::AttentionGrad { heads, mask, qkv, y, lse, dy, d_qkv } => {
            if y.is_empty() {
                return Ok(());
            }
            let h = Sizes::new(y.shape(), heads);
            let (qkv, y, lse, dy) = (cube.read(&qkv)?, cube.read(&y)?, cube.read(&lse)?, cube.read(&dy)?);
            let d = cube.write(&d_qkv)?;
            let mask = MaskOperands::read(cube, &mask)?;
            let kv = KeysValues::packed(h, &qkv, &mask);
            cube.attend_grad(h, &qkv, &kv, &y, &lse, &dy, &d, [&d, &d], false)?;
            cube.write_back([qkv, y, lse, dy, d].into_iter().chain(mask.all()));
        }
        Op::AttentionCached { heads, past, mask, qkv, keys, values, y, lse } => {
            if y.is_empty() {
                return Ok(());
            }
            let h = Sizes::new(y.shape(), heads);
            let capacity = keys.shape().dims()[1];
            let (qkv, keys, values, y) =
                (cube.read(&qkv)?, cube.write(&keys)?, cube.write(&values)?, cube.write(&y)?);
            let lse = lse.map(|l| cube.write(&l)).transpose()?;
            let mask = MaskOperands::read(cube, &mask)?;
            cube.exchange(h, &qkv, [&keys, &values], past, capacity, true);
            let kv = KeysValues::cached(h, [&keys, &values], &mask, past, capacity);
            cube.attend(h, &qkv, &kv, &y, lse.as_ref(), false);
            cube.write_back([qkv, keys, values, y].into_iter().chain(lse).chain(mask.all()));
        }
        Op::AttentionCachedGrad {
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
            if y.is_empty() {
                return Ok(());
            }
            let h = Sizes::new(y.shape(), heads);
            let capacity = keys.shape().dims()[1];
            let (qkv, keys, values) = (cube.read(&qkv)?, cube.read(&keys)?, cube.read(&values)?);
            let (y, lse, dy) = (cube.read(&y)?, cube.read(&lse)?, cube.read(&dy)?);
            let (d, d_keys, d_values) = (cube.write(&d_qkv)?, cube.write(&d_keys)?, cube.write(&d_values)?);
            let mask = MaskOperands::read(cube, &mask)?;
            let kv = KeysValues::cached(h, [&keys, &values], &mask, past, capacity);
            cube.attend_grad(h, &qkv, &kv, &y, &lse, &dy, &d, [&d_keys, &d_values], true)?;
            cube.exchange(h, &d, [&d_keys, &d_values], past, capacity, false);
            let operands = [qkv, keys, values, y, lse, dy, d, d_keys, d_values];
            cube.write_back(operands.into_iter().chain(mask.all()));
        }
        Op::AttentionOver { heads, ranges, continues, qkv, keys, values, y, lse } => {
            if !y.is_empty() {
                cube.attention_over(heads, &ranges, continues, [&qkv, &keys, &values], [&y, &lse])?;
            }
        }
        Op::AttentionOverGrad { heads, ranges, qkv, keys, values, y, lse, dy, dq, d_keys, d_values } => {
            if !y.is_empty() && !keys.is_empty() {
                let read = [&qkv, &keys, &values, &y, &lse, &dy];
                cube.attention_over_grad(heads, &ranges, read, [&dq, &d_keys, &d_values])?;
            }
        }
        Op::Embed { tokens, first, positions, tokens_table, positions_table, y } => {
            if !y.is_empty() {
                cube.embed((&tokens, first), &positions, &tokens_table, positions_table.as_ref(), &y)?;
            }
        }
        Op::EmbedGrad { tokens, first, positions, dy, d_tokens_table, d_positions_table } => {
            if !dy.is_empty() {
                let to = (&d_tokens_table, d_positions_table);
                cube.embed_grad((&tokens, first), &positions, &dy, to)?;
            }
        }
        Op::CombineRows { x, rows, factors, add, y } => {
            if !y.is_empty() {
                cube.combine_rows([&x, &rows], [factors.as_ref(), add.as_ref()], &y)?;
            }
        }
        Op::RowDots { a, b, rows, y } => {
            if !y.is_empty() {
                cube.row_dots([&a, &b, &rows], &y)?;
            }
        }
        Op::CrossEntropy { logits, targets, weights, losses, grad_scale } => {
            let (rows, cols) = (logits.shape().rows(), logits.shape().cols());
            if rows == 0 {
                return Ok(());
            }
            if cols == 0 {
                return Err(TensorError::IdOutOfRange { op: name, id: 0, position: 0, bound: 0 });
            }
            let (logits, ids, losses) = (cube.write(&logits)?, cube.read(&targets)?, cube.write(&losses)?);
            let weighted = weights.is_some();
            // Without weights, the kernel reads no second buffer of floats.
            let weights = weights.map(|weights| cube.read(&weights)).transpose()?;
            cube.check_ids(name, &ids, rows, cols);
            let (count, dim) = cube.row_each(rows);
            loss::cross_entropy::launch(
                client,
                count,
                dim,
                logits.arg(),
                ids.arg(),
                weights.as_ref().unwrap_or(&ids).arg(),
                losses.arg(),
                u32_of(rows),
                u32_of(cols),
                grad_scale.unwrap_or(0.0),
                weighted,
                grad_scale.is_some(),
                cube.units,
            );
            cube.write_back([logits, ids, losses].into_iter().chain(weights));
        }
        Op::LogitStats { logits, first, targets, stats } => {
            cube.logit_stats([&logits, &targets], first, &stats)?;
        }
        Op::LogitGrad { logits, first, targets, weights, log_sums, scale } => {
            cube.logit_grad(&logits, first, [&targets, &log_sums], weights.as_ref(), scale)?;
        }
        Op::SumSquares { x, partials } => {
            if x.is_empty() {
                return Ok(());
            }
            let (len, parts) = (x.len(), partials.len());
            let (x, partials) = (cube.read(&x)?, cube.write(&partials)?);
            let (count, dim) = cube.row_each(parts);
            let chunk = u32_of(Op::SQUARES_CHUNK);
            reduce::sum_squares::launch(
                client,
                count,
                dim,
                x.arg(),
                partials.arg(),
                u32_of(len),
                chunk,
                cube.units,
            );
            cube.write_back([x, partials]);
        }
        Op::Map { program, scalars, reads, writes } => {
            let len = writes.first().map_or(0, ViewMut::len);
            if len == 0 {
                return Ok(());
            }
            let reads: Vec<Operand> = reads.iter().map(|v| cube.read(v)).collect::<Result<_>>()?;
            let writes: Vec<Operand> = writes.iter().map(|v| cube.write(v)).collect::<Result<_>>()?;
            let (count, dim) = cube.each(len);
            map::map::launch(
                client,
                count,
                dim,
                reads.iter().map(|r| map::LaneLaunch::new(r.arg())).collect(),
                writes.iter().map(|w| map::LaneLaunch::new(w.arg())).collect(),
                scalars.iter().copied().collect(),
                u32_of(len),
                map::Source::from(program),
            );
            cube.write_back(reads.into_iter().chain(writes));
        }
    }
    Ok(())
}
