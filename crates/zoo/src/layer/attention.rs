//! Causal attention with its matrices: queries, keys and values of one matrix or of three, rotated or not, each
//! head normed before or not.

use std::sync::Arc;

use farflung_tensor::{AttendedKeys, Heads, Op, Rotary, Tensor, TileMask};

use super::builder::Builder;
use super::context::{Attended, DividedAttention};
use super::linear::{Side, Units};
use super::{Activations, Grads, Kept, Linear, NormLayer, Result, StageContext, Then, dims};
use crate::naming::{HeadsInFiles, Slot};
use crate::spec::{AttentionBias, AttentionSpec, NormSpec};
use crate::tensor_spec::ColumnOrder;

/// An attention layer.
#[derive(Debug, Clone)]
pub struct Attention {
    heads: Heads,
    head_dim: usize,
    inputs: Inputs,
    /// Norms of each head of queries and of keys.
    head_norms: Option<[NormLayer; 2]>,
    out: Linear,
    rotary: Option<Arc<Tensor>>,
    window: Option<usize>,
    /// The tiles of a pattern with which the keys of a query are not one range. `None` without a device.
    tiles: Option<Arc<TileMask>>,
}

/// The matrices that make queries, keys and values.
#[derive(Debug, Clone, Copy)]
enum Inputs {
    Fused(Linear),
    Separate { query: Linear, key: Linear, value: Linear },
}

/// Keys and values `[B, capacity, kv heads * head dim]` of the tokens that a block has processed, or the
/// gradients of both.
#[derive(Debug)]
pub struct KeyValues {
    /// Keys, or their gradients.
    pub keys: Tensor,
    /// Values, or their gradients.
    pub values: Tensor,
}

/// The tokens before those of a forward pass.
#[derive(Debug)]
pub enum Before<'a> {
    /// There are none: the pass has whole sequences.
    Nothing,
    /// Some are in a cache, to which those of the pass are added. The outputs of all parts of a sequence are
    /// bit-identical to those of the whole sequence.
    Cached {
        /// Number of tokens in the cache.
        past: usize,
        /// Their keys and values.
        seen: &'a mut KeyValues,
    },
}

impl Before<'_> {
    const fn past(&self) -> usize {
        match self {
            Self::Nothing => 0,
            Self::Cached { past, .. } => *past,
        }
    }
}

/// The tokens after those of a backward pass, whose queries attended to them. Slices of a sequence run backward
/// from the last to the first.
#[derive(Debug)]
pub enum Later<'a> {
    /// There are none: the pass has whole sequences.
    Nothing,
    /// Their contributions are in `gradients`, to which those of the slice are added; they start as zeros.
    Slices {
        /// Number of tokens before the slice.
        past: usize,
        /// Keys and values of all tokens.
        seen: &'a KeyValues,
        /// Gradients of keys and values.
        gradients: &'a mut KeyValues,
    },
}

impl Later<'_> {
    const fn past(&self) -> usize {
        match self {
            Self::Nothing => 0,
            Self::Slices { past, .. } => *past,
        }
    }
}

impl Attention {
    pub(super) fn new(builder: &mut Builder, dim: usize, spec: &AttentionSpec) -> Result<Self> {
        let AttentionSpec { heads, head_dim, bias, pattern, .. } = *spec;
        let (queries, keys) = (heads.query * head_dim, heads.kv * head_dim);
        // Ranks divide key-value heads, each with its query heads.
        let linear = |builder: &mut Builder, slot, side, sections: &[usize], columns| {
            let has_bias = match side {
                Side::Outputs => bias != AttentionBias::None,
                Side::Inputs => bias == AttentionBias::All,
            };
            Linear::new(builder, slot, dim, Units { side, count: heads.kv, sections, columns }, has_bias)
        };
        let plain = ColumnOrder::AsInMemory;
        let rotated = spec.rotary.map_or(0, |rotary| rotary.width);
        let inputs = if spec.fused {
            let columns = match builder.heads_in_files() {
                HeadsInFiles::ByHead => ColumnOrder::ByHead { heads: heads.kv, head_dim },
                HeadsInFiles::AsInMemory | HeadsInFiles::Interleaved => plain,
            };
            Inputs::Fused(linear(builder, Slot::Qkv, Side::Outputs, &[queries, keys, keys], columns))
        } else {
            let columns = match builder.heads_in_files() {
                HeadsInFiles::Interleaved => ColumnOrder::Interleaved { head_dim, rotated },
                HeadsInFiles::AsInMemory | HeadsInFiles::ByHead => plain,
            };
            Inputs::Separate {
                query: linear(builder, Slot::Query, Side::Outputs, &[queries], columns),
                key: linear(builder, Slot::Key, Side::Outputs, &[keys], columns),
                value: linear(builder, Slot::Value, Side::Outputs, &[keys], plain),
            }
        };
        let head_norms = spec.head_norm.map(|norm| {
            let norm = NormSpec { norm, bias: false };
            [Slot::QueryNorm, Slot::KeyNorm].map(|slot| NormLayer::new(builder, slot, head_dim, &norm))
        });
        let out = linear(builder, Slot::AttentionOut, Side::Inputs, &[queries], plain);
        let (own, group) = (builder.units(heads.kv), heads.query / heads.kv);
        let of_queries = own.start as u32 * group as u32..own.end as u32 * group as u32;
        let tiles = builder.tiles(pattern, of_queries)?;
        let heads = Heads { query: group * own.len(), kv: own.len() };
        let rotary = spec.rotary.map(|rotary| builder.rotary(&rotary)).transpose()?.flatten();
        Ok(Self { heads, head_dim, inputs, head_norms, out, rotary, window: pattern.window(), tiles })
    }

    /// Returns the width of a token's keys, and of its values.
    pub(crate) const fn cached_width(&self) -> usize {
        self.heads.kv * self.head_dim
    }

    fn rotary<'a>(&'a self, cx: &'a StageContext<'a>, start: usize) -> Option<Rotary<'a>> {
        let positions = cx.positions(start);
        self.rotary.as_deref().map(|table| Rotary { table: table.view(), positions })
    }

    /// Returns queries, keys and values side by side.
    fn qkv(
        &self,
        cx: &StageContext<'_>,
        x: &Tensor,
        start: usize,
        saved: &mut Activations,
    ) -> Result<Tensor> {
        match &self.inputs {
            Inputs::Fused(linear) => {
                let qkv = linear.forward(cx, x, Then::Nothing)?;
                if self.rotary.is_none() {
                    return Ok(qkv);
                }
                let parts = self.split(cx, &qkv, None)?;
                drop(qkv);
                self.join(cx, &parts, self.rotary(cx, start))
            }
            Inputs::Separate { query, key, value } => {
                let mut q = query.forward(cx, x, Then::Nothing)?;
                let mut k = key.forward(cx, x, Then::Nothing)?;
                let v = value.forward(cx, x, Then::Nothing)?;
                if let Some([of_queries, of_keys]) = &self.head_norms {
                    for (norm, x, [before, stats]) in [
                        (of_queries, &mut q, [Kept::Queries, Kept::QueryStats]),
                        (of_keys, &mut k, [Kept::Keys, Kept::KeyStats]),
                    ] {
                        let (normed, statistics) = norm.forward_heads(cx, x)?;
                        saved.put(before, std::mem::replace(x, normed));
                        saved.put(stats, statistics);
                    }
                }
                self.join(cx, &[q, k, v], self.rotary(cx, start))
            }
        }
    }

    fn attended_keys(&self) -> AttendedKeys<'_> {
        self.tiles.as_deref().map_or(AttendedKeys::last(self.window), AttendedKeys::Tiles)
    }

    /// Puts queries, keys and values side by side.
    fn join(&self, cx: &StageContext<'_>, parts: &[Tensor; 3], rotary: Option<Rotary<'_>>) -> Result<Tensor> {
        cx.join_heads(parts, (self.heads, self.head_dim), rotary)
    }

    /// Takes queries, keys and values apart, and undoes the rotation.
    fn split(&self, cx: &StageContext<'_>, qkv: &Tensor, rotary: Option<Rotary<'_>>) -> Result<[Tensor; 3]> {
        cx.split_heads(qkv, (self.heads, self.head_dim), rotary)
    }

    /// Returns the output for `x`, plus `residual`; if ranks divide the heads, it is this rank's part of the
    /// sum.
    pub fn forward_part(
        &self,
        cx: &StageContext<'_>,
        x: &Tensor,
        residual: Option<&Tensor>,
        before: &mut Before<'_>,
        saved: &mut Activations,
    ) -> Result<Tensor> {
        let [b, t, _] = dims(x)?;
        let heads = self.heads;
        let qkv = self.qkv(cx, x, before.past(), saved)?;
        if let Some(divided) = DividedAttention::of(cx, (heads, self.head_dim), self.window) {
            let Attended { qkv, by_heads, lse, y } = divided.forward(qkv, saved.keeps())?;
            for (name, kept) in
                [(Kept::LogSumExp, Some(lse)), (Kept::Qkv, Some(qkv)), (Kept::ByHeads, by_heads)]
            {
                if let Some(kept) = kept {
                    saved.put(name, kept);
                }
            }
            return self.leave(cx, y, residual, saved);
        }
        let mut attended = cx.empty([b, t, heads.query * self.head_dim])?;
        let scores = || cx.empty([b, heads.query, t]);
        match before {
            Before::Nothing => {
                let mut lse = scores()?;
                let (qkv, y, lse_) = (qkv.view(), attended.view_mut(), lse.view_mut());
                cx.device.run(Op::Attention {
                    heads,
                    mask: cx.borders.mask(self.attended_keys()),
                    qkv,
                    y,
                    lse: lse_,
                })?;
                saved.put(Kept::LogSumExp, lse);
            }
            Before::Cached { past, seen } => {
                let mut lse = saved.keeps().then(scores).transpose()?;
                cx.device.run(Op::AttentionCached {
                    heads,
                    past: *past,
                    mask: cx.borders.mask(self.attended_keys()),
                    qkv: qkv.view(),
                    keys: seen.keys.view_mut(),
                    values: seen.values.view_mut(),
                    y: attended.view_mut(),
                    lse: lse.as_mut().map(Tensor::view_mut),
                })?;
                if let Some(lse) = lse {
                    saved.put(Kept::LogSumExp, lse);
                }
            }
        }
        saved.put(Kept::Qkv, qkv);
        self.leave(cx, attended, residual, saved)
    }

    /// Multiplies what was attended to by the last matrix.
    fn leave(
        &self,
        cx: &StageContext<'_>,
        attended: Tensor,
        residual: Option<&Tensor>,
        saved: &mut Activations,
    ) -> Result<Tensor> {
        let y = self.out.forward_part(cx, &attended, residual.map_or(Then::Nothing, Then::Add))?;
        saved.put(Kept::Attended, attended);
        Ok(y)
    }

    /// Returns the gradient of queries, keys and values, given that of what was attended to.
    fn d_qkv(
        &self,
        cx: &StageContext<'_>,
        saved: &Activations,
        later: &mut Later<'_>,
        d_attended: Tensor,
    ) -> Result<Tensor> {
        let heads = self.heads;
        let [qkv, y, lse] = [Kept::Qkv, Kept::Attended, Kept::LogSumExp].map(|name| saved.get(name));
        if let Some(divided) = DividedAttention::of(cx, (heads, self.head_dim), self.window) {
            let y = saved.find(Kept::ByHeads).unwrap_or(y);
            return divided.backward([qkv, y, lse], d_attended);
        }
        let mut d_qkv = cx.empty(qkv.shape())?;
        let (qkv, y, lse, dy) = (qkv.view(), y.view(), lse.view(), d_attended.view());
        match later {
            Later::Nothing => {
                let (mask, d_qkv) = (cx.borders.mask(self.attended_keys()), d_qkv.view_mut());
                cx.device.run(Op::AttentionGrad { heads, mask, qkv, y, lse, dy, d_qkv })?;
            }
            Later::Slices { past, seen, gradients } => cx.device.run(Op::AttentionCachedGrad {
                heads,
                past: *past,
                mask: cx.borders.mask(self.attended_keys()),
                qkv,
                keys: seen.keys.view(),
                values: seen.values.view(),
                y,
                lse,
                dy,
                d_qkv: d_qkv.view_mut(),
                d_keys: gradients.keys.view_mut(),
                d_values: gradients.values.view_mut(),
            })?,
        }
        Ok(d_qkv)
    }

    /// Returns the gradient of the input, given that of the output, plus `beside`: another gradient of the same
    /// input, of which this rank has its part of the sum.
    pub fn backward_input(
        &self,
        cx: &StageContext<'_>,
        saved: &mut Activations,
        later: &mut Later<'_>,
        dy: &Tensor,
        beside: Option<Tensor>,
    ) -> Result<Tensor> {
        let d_attended = self.out.backward_input(cx, dy, None)?;
        let mut d_qkv = self.d_qkv(cx, saved, later, d_attended)?;
        let input_gradient = |linear: &Linear, dy: &Tensor, beside: Option<Tensor>| match beside {
            Some(mut dx) => linear.add_backward_input(cx, dy, &mut dx).map(|()| dx),
            None => linear.backward_input(cx, dy, None),
        };
        let dx = match &self.inputs {
            Inputs::Fused(linear) => {
                if self.rotary.is_some() {
                    let parts = self.split(cx, &d_qkv, self.rotary(cx, later.past()))?;
                    d_qkv = self.join(cx, &parts, None)?;
                }
                let dx = input_gradient(linear, &d_qkv, beside)?;
                saved.put(Kept::QkvGrad, d_qkv);
                dx
            }
            Inputs::Separate { query, key, value } => {
                let [mut dq, mut dk, dv] = self.split(cx, &d_qkv, self.rotary(cx, later.past()))?;
                drop(d_qkv);
                if let Some([of_queries, of_keys]) = &self.head_norms {
                    for (norm, d, [before, stats, normed]) in [
                        (of_queries, &mut dq, [Kept::Queries, Kept::QueryStats, Kept::QueryNormedGrad]),
                        (of_keys, &mut dk, [Kept::Keys, Kept::KeyStats, Kept::KeyNormedGrad]),
                    ] {
                        let dx = norm.backward_heads(cx, saved.get(before), saved.get(stats), d)?;
                        saved.put(normed, std::mem::replace(d, dx));
                    }
                }
                let mut dx = input_gradient(query, &dq, beside)?;
                key.add_backward_input(cx, &dk, &mut dx)?;
                value.add_backward_input(cx, &dv, &mut dx)?;
                saved.put(Kept::QueryGrad, dq);
                saved.put(Kept::KeyGrad, dk);
                saved.put(Kept::ValueGrad, dv);
                dx
            }
        };
        cx.reduced(dx)
    }

    /// Computes the weight gradients, given the input `x` and the gradient of the output.
    pub fn backward_weight(
        &self,
        cx: &StageContext<'_>,
        saved: &Activations,
        x: &Tensor,
        dy: &Tensor,
        grads: &mut Grads<'_>,
    ) -> Result<()> {
        self.out.backward_weight(cx, saved.get(Kept::Attended), dy, grads)?;
        if let Some([of_queries, of_keys]) = &self.head_norms {
            for (norm, x, stats, dy) in [
                (of_queries, Kept::Queries, Kept::QueryStats, Kept::QueryNormedGrad),
                (of_keys, Kept::Keys, Kept::KeyStats, Kept::KeyNormedGrad),
            ] {
                norm.backward_weight_heads(cx, saved.get(x), saved.get(stats), saved.get(dy), grads)?;
            }
        }
        match &self.inputs {
            Inputs::Fused(linear) => linear.backward_weight(cx, x, saved.get(Kept::QkvGrad), grads),
            Inputs::Separate { query, key, value } => {
                for (linear, dy) in [(query, Kept::QueryGrad), (key, Kept::KeyGrad), (value, Kept::ValueGrad)]
                {
                    linear.backward_weight(cx, x, saved.get(dy), grads)?;
                }
                Ok(())
            }
        }
    }
}
