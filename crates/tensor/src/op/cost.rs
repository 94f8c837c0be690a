//! What an op costs: floating-point operations and bytes of memory traffic.

use super::{AttendedKeys, Fuse, Heads, KeyRanges, Mask, Op, Rotary, TokenPositions};
use crate::{Shape, View, ViewMut, Work};

impl Op<'_> {
    /// Returns both costs.
    pub(crate) fn work(&self) -> Work {
        let (flops, bytes) = (self.flops(), self.bytes());
        match self {
            Self::MatMul { .. } => Work { products: flops, bytes, ..Work::default() },
            Self::Attention { .. }
            | Self::AttentionGrad { .. }
            | Self::AttentionCached { .. }
            | Self::AttentionCachedGrad { .. }
            | Self::AttentionOver { .. }
            | Self::AttentionOverGrad { .. } => Work { attention: flops, bytes, ..Work::default() },
            _ => Work { other: flops, bytes, ..Work::default() },
        }
    }

    /// Returns the number of floating-point operations. A fused multiply-add counts as two and a transcendental
    /// function as one. Attention counts only the pairs of query and key that the mask allows, as if each
    /// sequence were one document without a prefix, or those that [`KeyRanges::pairs`] says. A matrix product
    /// does not count its [`Fuse`].
    #[must_use]
    pub fn flops(&self) -> u64 {
        let n = |v: Shape| v.len() as u128;
        let causal = |y: Shape, past: usize, mask: &Mask<'_>| {
            let rows = n(y).checked_div(length(y) as u128).unwrap_or(0);
            if let Some(tiles) = mask.keys.tiles() {
                let pairs = 2 * u128::from(tiles.computed(past..past.saturating_add(length(y))));
                return (pairs * rows).checked_div(tiles.heads() as u128).unwrap_or(0);
            }
            // y is [B, T, C]. Each of B sequences has T (T + 1) / 2 pairs of query and key among the new
            // tokens, and T * past pairs with the cached tokens. A window of w keys leaves out k (k + 1) / 2
            // pairs of the last k = past + T - w queries, less those of queries that are not new.
            let (t, past) = (length(y) as u128, past as u128);
            let window = mask.keys.window().map_or(u128::MAX, |window| window.max(1) as u128);
            let left_out = |end: u128| {
                let late = end.saturating_sub(window);
                late * (late + 1)
            };
            rows * (t * (2 * past + t + 1) - (left_out(past + t) - left_out(past)))
        };
        // One product over the pairs of query and key in the ranges.
        let over = |y: Shape, ranges: &KeyRanges<'_>| 2 * u128::from(ranges.pairs) * y.cols() as u128;
        let flops = match self {
            Self::Fill { .. } | Self::Cast { .. } => 0,
            Self::MatMul { a, a_t, c, .. } => {
                let k = if *a_t { a.shape().rows() } else { a.shape().cols() };
                2 * n(c.shape()) * k as u128
            }
            Self::SumRows { x, .. } => n(x.shape()),
            Self::Norm { x, .. } => 8 * n(x.shape()),
            Self::NormInput { x, .. } => 11 * n(x.shape()),
            Self::NormWeight { x, .. } => 5 * n(x.shape()),
            Self::JoinHeads { heads, rotary, qkv: all, .. } => rotated(*heads, rotary.as_ref(), all.shape()),
            Self::SplitHeads { heads, rotary, d_qkv: all, .. } => {
                rotated(*heads, rotary.as_ref(), all.shape())
            }
            Self::SwiGlu { y, .. } => 5 * n(y.shape()),
            Self::SwiGluGrad { dy, .. } => 11 * n(dy.shape()),
            Self::Attention { y, mask, .. } => 2 * causal(y.shape(), 0, mask),
            Self::AttentionGrad { y, mask, .. } => 5 * causal(y.shape(), 0, mask),
            Self::AttentionCached { y, past, mask, .. } => 2 * causal(y.shape(), *past, mask),
            Self::AttentionCachedGrad { y, past, mask, .. } => 5 * causal(y.shape(), *past, mask),
            Self::AttentionOver { y, ranges, .. } => 2 * over(y.shape(), ranges),
            Self::AttentionOverGrad { y, ranges, .. } => 5 * over(y.shape(), ranges),
            Self::Embed { y, .. } => n(y.shape()),
            Self::EmbedGrad { dy, .. } => 2 * n(dy.shape()),
            Self::CombineRows { rows, y, .. } => 2 * (rows.len() * y.shape().cols()) as u128,
            Self::RowDots { a, .. } => 2 * n(a.shape()),
            Self::CrossEntropy { logits, .. } => 5 * n(logits.shape()),
            Self::LogitStats { logits, .. } => 3 * n(logits.shape()),
            Self::LogitGrad { logits, .. } => 3 * n(logits.shape()),
            Self::SumSquares { x, .. } => 2 * n(x.shape()),
            Self::Map { program, writes, .. } => {
                program.flops() as u128 * writes.first().map_or(0, |w| n(w.shape()))
            }
        };
        flops.try_into().unwrap_or(u64::MAX)
    }

    /// Returns the bytes of memory traffic with cold caches: each operand read once, each result written once.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        let r = |v: &View<'_>| v.len() as u128 * v.dtype().size() as u128;
        let w = |v: &ViewMut<'_>| v.len() as u128 * v.dtype().size() as u128;
        let rw = |v: &ViewMut<'_>, read: bool| w(v) * (1 + u128::from(read));
        let ids = |ids: &Option<View<'_>>| ids.as_ref().map_or(0, r);
        let bounds = |ranges: &KeyRanges<'_>| r(&ranges.from) + r(&ranges.to);
        let masks = |mask: &Mask<'_>| {
            let tiles = mask.keys.tiles().map_or(0, |tiles| r(&tiles.words()));
            ids(&mask.documents) + ids(&mask.prefixes) + tiles
        };
        // Bytes of cached keys (or values) that the queries of a [B, T, C] output attend to.
        let seen = |y: Shape, past: usize, heads: &Heads, mask: &Mask<'_>| {
            let batch = y.rows().checked_div(length(y)).unwrap_or(0);
            let width = y.cols() / heads.query.max(1) * heads.kv;
            let most = match mask.keys {
                AttendedKeys::All => past,
                AttendedKeys::Window(window) => window.saturating_sub(1),
                AttendedKeys::Tiles(tiles) => tiles.keys_of_each(past..past.saturating_add(length(y))),
            };
            let cached = past.min(most);
            (cached + length(y)) as u128 * (width * batch * size_of::<f32>()) as u128
        };
        let bytes = match self {
            Self::Fill { y, .. } => w(y),
            Self::Cast { x, y } => r(x) + w(y),
            Self::MatMul { a, b, c, accumulate, fuse, .. } => {
                let fused = match fuse {
                    Fuse::None => 0,
                    Fuse::Bias(bias) => r(bias),
                    Fuse::BiasGelu { bias, slope, .. } => r(bias) + slope.as_ref().map_or(0, w),
                    Fuse::Add { residual } => r(residual),
                    Fuse::BiasAdd { bias, residual } => r(bias) + r(residual),
                    Fuse::Times { factor } => r(factor),
                };
                r(a) + r(b) + rw(c, *accumulate) + fused
            }
            Self::SumRows { x, y, accumulate } => r(x) + rw(y, *accumulate),
            Self::Norm { x, gain, bias, y, stats, .. } => {
                r(x) + r(gain) + bias.as_ref().map_or(0, r) + w(y) + w(stats)
            }
            Self::NormInput { x, gain, stats, dy, residual, dx, .. } => {
                r(x) + r(gain) + r(stats) + r(dy) + residual.as_ref().map_or(0, r) + w(dx)
            }
            Self::NormWeight { x, stats, dy, d_gain, d_bias, accumulate } => {
                let d_bias = d_bias.as_ref().map_or(0, |d| rw(d, *accumulate));
                r(x) + r(stats) + r(dy) + rw(d_gain, *accumulate) + d_bias
            }
            Self::JoinHeads { rotary, qkv, .. } => 2 * w(qkv) + angles(rotary.as_ref(), qkv.shape()),
            Self::SplitHeads { rotary, d_qkv, .. } => 2 * r(d_qkv) + angles(rotary.as_ref(), d_qkv.shape()),
            Self::SwiGlu { gate, up, y } => r(gate) + r(up) + w(y),
            Self::SwiGluGrad { gate, up, dy } => 2 * (w(gate) + w(up) + w(dy)),
            Self::Attention { mask, qkv, y, lse, .. } => r(qkv) + w(y) + w(lse) + masks(mask),
            Self::AttentionGrad { mask, qkv, y, lse, dy, d_qkv, .. } => {
                r(qkv) + r(y) + r(lse) + r(dy) + w(d_qkv) + masks(mask)
            }
            Self::AttentionCached { heads, mask, qkv, y, past, lse, .. } => {
                let lse = lse.as_ref().map_or(0, w);
                r(qkv) + w(y) + lse + 2 * seen(y.shape(), *past, heads, mask) + masks(mask)
            }
            Self::AttentionCachedGrad { heads, past, mask, qkv, y, lse, dy, d_qkv, .. } => {
                let read = r(qkv) + r(y) + r(lse) + r(dy) + masks(mask);
                read + w(d_qkv) + 6 * seen(y.shape(), *past, heads, mask)
            }
            Self::AttentionOver { ranges, continues, keys, values, y, lse, .. } => {
                let queries = w(y);
                queries + r(keys) + r(values) + bounds(ranges) + rw(y, *continues) + rw(lse, *continues)
            }
            Self::AttentionOverGrad { ranges, keys, values, y, lse, dy, dq, d_keys, d_values, .. } => {
                let queries = r(y);
                let read = queries + r(keys) + r(values) + bounds(ranges) + r(y) + r(lse) + r(dy);
                read + rw(dq, true) + rw(d_keys, true) + rw(d_values, true)
            }
            Self::Embed { tokens, positions, positions_table, y, .. } => {
                r(tokens) + places(positions) + (2 + u128::from(positions_table.is_some())) * w(y)
            }
            Self::EmbedGrad { tokens, positions, dy, d_positions_table, .. } => {
                r(tokens) + places(positions) + (3 + 2 * u128::from(d_positions_table.is_some())) * r(dy)
            }
            Self::CombineRows { rows, factors, add, y, .. } => {
                let taken = rows.len() as u128 * (y.shape().cols() * y.dtype().size()) as u128;
                taken + r(rows) + factors.as_ref().map_or(0, r) + add.as_ref().map_or(0, r) + w(y)
            }
            Self::RowDots { a, rows, y, .. } => 2 * r(a) + r(rows) + w(y),
            Self::CrossEntropy { logits, targets, weights, losses, grad_scale } => {
                let weights = weights.as_ref().map_or(0, r);
                rw(logits, grad_scale.is_some()) + r(targets) + weights + w(losses)
            }
            Self::LogitStats { logits, targets, stats, .. } => r(logits) + r(targets) + w(stats),
            Self::LogitGrad { logits, targets, weights, log_sums, .. } => {
                rw(logits, true) + r(targets) + weights.as_ref().map_or(0, r) + r(log_sums)
            }
            Self::SumSquares { x, partials } => r(x) + w(partials),
            Self::Map { program, reads, writes, .. } => {
                let loaded = program.instrs().iter().filter(|i| matches!(i, crate::Instr::Load(_))).count();
                let one = writes.first().map_or(0, w);
                reads.iter().map(r).sum::<u128>() + one * (loaded + program.stores().len()) as u128
            }
        };
        bytes.try_into().unwrap_or(u64::MAX)
    }
}

/// Returns the second dimension, which is T of `[B, T, C]`, or 0 if there is none. The op's check rejects
/// shapes that are not `[B, T, C]`.
fn length(y: Shape) -> usize {
    y.dims().get(1).copied().unwrap_or(0)
}

/// Returns the bytes of the rows of a rotation's table that `[B, T, W]` needs, and of what says where tokens
/// are.
fn angles(rotary: Option<&Rotary<'_>>, all: Shape) -> u128 {
    let Some(Rotary { table, positions }) = rotary else { return 0 };
    let each = table.shape().cols() * table.dtype().size();
    length(all) as u128 * each as u128 + places(positions)
}

/// Returns the bytes of what says where tokens are.
fn places(positions: &TokenPositions<'_>) -> u128 {
    let (TokenPositions::At(each) | TokenPositions::From { documents: Some(each), .. }) = positions else {
        return 0;
    };
    each.len() as u128 * each.dtype().size() as u128
}

/// Returns the operations of the rotation of queries and keys in `[B, T, W]`: three for each rotated value.
fn rotated(heads: Heads, rotary: Option<&Rotary<'_>>, all: Shape) -> u128 {
    let each = rotary.map_or(0, |rotary| rotary.table.shape().cols());
    3 * all.rows() as u128 * (heads.query + heads.kv) as u128 * each as u128
}
