//! Causal attention with its matrices: queries, keys and values of one matrix or of three, rotated or not.

use std::sync::Arc;

use farflung_tensor::{Heads, Op, Rotary, Tensor};

use super::builder::Builder;
use super::linear::{Side, Units};
use super::{Activations, Grads, Kept, Linear, Result, StageContext, Then, dims};
use crate::naming::Slot;
use crate::spec::AttentionSpec;

/// An attention layer.
#[derive(Debug, Clone)]
pub struct Attention {
    heads: Heads,
    head_dim: usize,
    inputs: Inputs,
    out: Linear,
    rotary: Option<Arc<Tensor>>,
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
        let AttentionSpec { heads, head_dim, bias, .. } = *spec;
        let (queries, keys) = (heads.query * head_dim, heads.kv * head_dim);
        // Ranks divide key-value heads, each with its query heads.
        let linear = |builder: &mut Builder, slot, side, sections: &[usize]| {
            Linear::new(builder, slot, dim, Units { side, count: heads.kv, sections }, bias)
        };
        let inputs = if spec.fused {
            Inputs::Fused(linear(builder, Slot::Qkv, Side::Outputs, &[queries, keys, keys]))
        } else {
            Inputs::Separate {
                query: linear(builder, Slot::Query, Side::Outputs, &[queries]),
                key: linear(builder, Slot::Key, Side::Outputs, &[keys]),
                value: linear(builder, Slot::Value, Side::Outputs, &[keys]),
            }
        };
        let out = linear(builder, Slot::AttentionOut, Side::Inputs, &[queries]);
        let own = builder.units(heads.kv).len();
        let heads = Heads { query: heads.query / heads.kv * own, kv: own };
        let rotary = spec.rotary.map(|rotary| builder.rotary(&rotary)).transpose()?.flatten();
        Ok(Self { heads, head_dim, inputs, out, rotary })
    }

    /// Returns the width of a token's keys, and of its values.
    pub(crate) const fn cached_width(&self) -> usize {
        self.heads.kv * self.head_dim
    }

    fn rotary<'a>(&'a self, cx: &StageContext<'a>, start: usize) -> Option<Rotary<'a>> {
        let documents = cx.documents();
        self.rotary.as_deref().map(|table| Rotary { table: table.view(), start, documents })
    }

    /// Returns queries, keys and values side by side.
    fn qkv(&self, cx: &StageContext<'_>, x: &Tensor, start: usize) -> Result<Tensor> {
        let [b, t, _] = dims(x)?;
        match &self.inputs {
            Inputs::Fused(linear) => linear.forward(cx, x, Then::Nothing),
            Inputs::Separate { query, key, value } => {
                let q = query.forward(cx, x, Then::Nothing)?;
                let k = key.forward(cx, x, Then::Nothing)?;
                let v = value.forward(cx, x, Then::Nothing)?;
                let mut qkv = cx.empty([b, t, self.heads.width() * self.head_dim])?;
                cx.device.run(Op::JoinHeads {
                    heads: self.heads,
                    rotary: self.rotary(cx, start),
                    q: q.view(),
                    k: k.view(),
                    v: v.view(),
                    qkv: qkv.view_mut(),
                })?;
                Ok(qkv)
            }
        }
    }

    /// Returns the output for `x`, plus `residual`.
    pub fn forward(
        &self,
        cx: &StageContext<'_>,
        x: &Tensor,
        residual: &Tensor,
        before: &mut Before<'_>,
        saved: &mut Activations,
    ) -> Result<Tensor> {
        let [b, t, _] = dims(x)?;
        let heads = self.heads;
        let qkv = self.qkv(cx, x, before.past())?;
        let mut attended = cx.empty([b, t, heads.query * self.head_dim])?;
        let scores = || cx.empty([b, heads.query, t]);
        match before {
            Before::Nothing => {
                let mut lse = scores()?;
                let (qkv, y, lse_) = (qkv.view(), attended.view_mut(), lse.view_mut());
                cx.device.run(Op::Attention { heads, documents: cx.documents(), qkv, y, lse: lse_ })?;
                saved.put(Kept::LogSumExp, lse);
            }
            Before::Cached { past, seen } => {
                let mut lse = saved.keeps().then(scores).transpose()?;
                cx.device.run(Op::AttentionCached {
                    heads,
                    past: *past,
                    documents: cx.documents(),
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
        let y = self.out.forward(cx, &attended, Then::Add(residual))?;
        saved.put(Kept::Attended, attended);
        Ok(y)
    }

    /// Returns the gradient of the input, given that of the output.
    pub fn backward_input(
        &self,
        cx: &StageContext<'_>,
        saved: &mut Activations,
        later: &mut Later<'_>,
        dy: &Tensor,
    ) -> Result<Tensor> {
        let heads = self.heads;
        let d_attended = self.out.backward_input(cx, dy, None)?;
        let qkv = saved.get(Kept::Qkv);
        let mut d_qkv = cx.empty(qkv.shape())?;
        let (y, lse) = (saved.get(Kept::Attended).view(), saved.get(Kept::LogSumExp).view());
        let (qkv, dy) = (qkv.view(), d_attended.view());
        match later {
            Later::Nothing => {
                let (documents, d_qkv) = (cx.documents(), d_qkv.view_mut());
                cx.device.run(Op::AttentionGrad { heads, documents, qkv, y, lse, dy, d_qkv })?;
            }
            Later::Slices { past, seen, gradients } => cx.device.run(Op::AttentionCachedGrad {
                heads,
                past: *past,
                documents: cx.documents(),
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
        drop(d_attended);
        match &self.inputs {
            Inputs::Fused(linear) => {
                let mut dx = linear.backward_input(cx, &d_qkv, None)?;
                cx.sum(&mut dx)?;
                saved.put(Kept::QkvGrad, d_qkv);
                Ok(dx)
            }
            Inputs::Separate { query, key, value } => {
                let [b, t, _] = dims(&d_qkv)?;
                let mut dq = cx.empty([b, t, heads.query * self.head_dim])?;
                let [mut dk, mut dv] =
                    [cx.empty([b, t, self.cached_width()])?, cx.empty([b, t, self.cached_width()])?];
                cx.device.run(Op::SplitHeads {
                    heads,
                    rotary: self.rotary(cx, later.past()),
                    d_qkv: d_qkv.view(),
                    dq: dq.view_mut(),
                    dk: dk.view_mut(),
                    dv: dv.view_mut(),
                })?;
                drop(d_qkv);
                let mut dx = query.backward_input(cx, &dq, None)?;
                key.add_backward_input(cx, &dk, &mut dx)?;
                value.add_backward_input(cx, &dv, &mut dx)?;
                cx.sum(&mut dx)?;
                saved.put(Kept::QueryGrad, dq);
                saved.put(Kept::KeyGrad, dk);
                saved.put(Kept::ValueGrad, dv);
                Ok(dx)
            }
        }
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
