//! One pre-norm transformer block of GPT-2: `x + proj(attention(ln_1 x))`, then `x + proj(gelu(fc(ln_2 x)))`.

use farflung_tensor::{Fuse, Op, Result, Shape, Tensor, TensorError};

use super::{Grads, StageContext};

/// A transformer block with twelve parameters, in Hugging Face's order.
#[derive(Debug, Clone, Copy)]
pub struct Transformer {
    /// Index of `ln_1.weight` in the layout; the other parameters follow.
    pub first: usize,
    /// Number of heads.
    pub heads: usize,
}

/// Keys and values `[B, capacity, C]` of the tokens that a block has processed, or the gradients of both.
#[derive(Debug)]
pub struct KeyValues {
    /// Keys, or their gradients.
    pub keys: Tensor,
    /// Values, or their gradients.
    pub values: Tensor,
}

/// Values that a forward pass saves for the backward pass.
#[derive(Debug)]
pub struct TransformerSaved {
    x: Tensor,
    stats_1: Tensor,
    norm_1: Tensor,
    qkv: Tensor,
    lse: Tensor,
    attended: Tensor,
    middle: Tensor,
    stats_2: Tensor,
    norm_2: Tensor,
    /// Derivative of the activation at its input.
    slope: Tensor,
    act: Tensor,
    back: Option<Back>,
}

/// Values that the input half of the backward pass saves for the weight half.
#[derive(Debug)]
struct Back {
    dy: Tensor,
    d_pre: Tensor,
    d_norm_2: Tensor,
    d_middle: Tensor,
    d_qkv: Tensor,
    d_norm_1: Tensor,
}

impl TransformerSaved {
    /// Returns the tensors that the forward pass saved.
    pub(crate) fn into_tensors(self) -> [Tensor; 11] {
        let Self { x, stats_1, norm_1, qkv, lse, attended, middle, stats_2, norm_2, slope, act, back: _ } =
            self;
        [x, stats_1, norm_1, qkv, lse, attended, middle, stats_2, norm_2, slope, act]
    }

    pub(crate) fn from_tensors(tensors: [Tensor; 11]) -> Self {
        let [x, stats_1, norm_1, qkv, lse, attended, middle, stats_2, norm_2, slope, act] = tensors;
        Self { x, stats_1, norm_1, qkv, lse, attended, middle, stats_2, norm_2, slope, act, back: None }
    }

    /// Returns the block's input, from which the forward pass can be run again.
    pub(crate) fn into_input(self) -> Tensor {
        self.x
    }
}

/// Number of parameter tensors of a block.
const PARAMS: usize = 12;

impl Transformer {
    /// Number of parameter tensors.
    pub const PARAMS: usize = PARAMS;

    /// Runs the forward pass, from `[B, T, C]` to `[B, T, C]`.
    pub fn forward(&self, cx: &StageContext<'_>, x: Tensor) -> Result<(Tensor, TransformerSaved)> {
        let heads = self.heads;
        self.forward_by(cx, x, |qkv, y, lse| {
            let (qkv, y, lse) = (qkv.view(), y.view_mut(), lse.view_mut());
            cx.device.run(Op::Attention { heads, qkv, y, lse })
        })
    }

    /// Like [`Transformer::forward`], for a slice of the tokens after `past` others, whose keys and values are
    /// in `seen`. Appends those of the slice. The outputs of all slices are bit-identical to those of the whole
    /// sequence.
    pub fn forward_slice(
        &self,
        cx: &StageContext<'_>,
        x: Tensor,
        past: usize,
        seen: &mut KeyValues,
    ) -> Result<(Tensor, TransformerSaved)> {
        self.forward_by(cx, x, |qkv, y, lse| {
            cx.device.run(Op::AttentionCached {
                heads: self.heads,
                past,
                qkv: qkv.view(),
                keys: seen.keys.view_mut(),
                values: seen.values.view_mut(),
                y: y.view_mut(),
                lse: Some(lse.view_mut()),
            })
        })
    }

    /// Runs the forward pass. `attend` computes attention: from queries, keys and values to outputs and
    /// log-sum-exps.
    fn forward_by(
        &self,
        cx: &StageContext<'_>,
        x: Tensor,
        attend: impl FnOnce(&Tensor, &mut Tensor, &mut Tensor) -> Result<()>,
    ) -> Result<(Tensor, TransformerSaved)> {
        let [ln_1, ln_1_b, w_qkv, b_qkv, w_proj, b_proj, ln_2, ln_2_b, w_fc, b_fc, w_out, b_out] =
            cx.layout.views::<PARAMS>(cx.params, self.first)?;
        let [b, t, c] = dims(&x)?;
        let run = |op: Op<'_>| cx.device.run(op);

        let (mut norm_1, mut stats_1) = (cx.empty([b, t, c])?, cx.empty([b * t, 2])?);
        run(Op::LayerNorm {
            x: x.view(),
            gain: ln_1,
            bias: ln_1_b,
            y: norm_1.view_mut(),
            stats: stats_1.view_mut(),
        })?;
        let mut qkv = cx.empty([b, t, 3 * c])?;
        run(linear(&norm_1, w_qkv, &mut qkv, Fuse::Bias(b_qkv)))?;
        let (mut attended, mut lse) = (cx.empty([b, t, c])?, cx.empty([b, self.heads, t])?);
        attend(&qkv, &mut attended, &mut lse)?;
        let mut middle = cx.empty([b, t, c])?;
        let fuse = Fuse::BiasAdd { bias: b_proj, residual: x.view() };
        run(linear(&attended, w_proj, &mut middle, fuse))?;

        let (mut norm_2, mut stats_2) = (cx.empty([b, t, c])?, cx.empty([b * t, 2])?);
        run(Op::LayerNorm {
            x: middle.view(),
            gain: ln_2,
            bias: ln_2_b,
            y: norm_2.view_mut(),
            stats: stats_2.view_mut(),
        })?;
        let (mut slope, mut act) = (cx.empty([b, t, 4 * c])?, cx.empty([b, t, 4 * c])?);
        let fuse = Fuse::BiasGelu { bias: b_fc, slope: Some(slope.view_mut()) };
        run(linear(&norm_2, w_fc, &mut act, fuse))?;
        let mut y = cx.empty([b, t, c])?;
        let fuse = Fuse::BiasAdd { bias: b_out, residual: middle.view() };
        run(linear(&act, w_out, &mut y, fuse))?;

        let saved = TransformerSaved {
            x,
            stats_1,
            norm_1,
            qkv,
            lse,
            attended,
            middle,
            stats_2,
            norm_2,
            slope,
            act,
            back: None,
        };
        Ok((y, saved))
    }

    /// Returns the gradient of the input, given that of the output. `saved` keeps what the weight gradients
    /// need.
    pub fn backward_input(
        &self,
        cx: &StageContext<'_>,
        saved: &mut TransformerSaved,
        dy: Tensor,
    ) -> Result<Tensor> {
        self.backward_input_by(cx, saved, dy, |s, dy, d_qkv| {
            cx.device.run(Op::AttentionGrad {
                heads: self.heads,
                qkv: s.qkv.view(),
                y: s.attended.view(),
                lse: s.lse.view(),
                dy: dy.view(),
                d_qkv: d_qkv.view_mut(),
            })
        })
    }

    /// Like [`Transformer::backward_input`], for a slice of the tokens, from the last slice to the first. Adds
    /// the contribution of the slice to `gradients`, the gradients of all earlier keys and values, which start
    /// as zeros.
    pub fn backward_input_slice(
        &self,
        cx: &StageContext<'_>,
        saved: &mut TransformerSaved,
        dy: Tensor,
        past: usize,
        (seen, gradients): (&KeyValues, &mut KeyValues),
    ) -> Result<Tensor> {
        self.backward_input_by(cx, saved, dy, |s, dy, d_qkv| {
            cx.device.run(Op::AttentionCachedGrad {
                heads: self.heads,
                past,
                qkv: s.qkv.view(),
                keys: seen.keys.view(),
                values: seen.values.view(),
                y: s.attended.view(),
                lse: s.lse.view(),
                dy: dy.view(),
                d_qkv: d_qkv.view_mut(),
                d_keys: gradients.keys.view_mut(),
                d_values: gradients.values.view_mut(),
            })
        })
    }

    /// Runs the input half of the backward pass. `attend` computes the gradient of queries, keys and values
    /// from the gradient of attention's output.
    fn backward_input_by(
        &self,
        cx: &StageContext<'_>,
        saved: &mut TransformerSaved,
        dy: Tensor,
        attend: impl FnOnce(&TransformerSaved, &Tensor, &mut Tensor) -> Result<()>,
    ) -> Result<Tensor> {
        let [ln_1, _, w_qkv, _, w_proj, _, ln_2, _, w_fc, _, w_out, _] =
            cx.layout.views::<PARAMS>(cx.params, self.first)?;
        let [b, t, c] = dims(&dy)?;
        let run = |op: Op<'_>| cx.device.run(op);
        let s = &*saved;
        let scale = cx.gradient_scale;

        let mut d_pre = cx.empty([b, t, 4 * c])?;
        run(linear_t(scale, &dy, w_out, &mut d_pre, Fuse::Times { factor: s.slope.view() }))?;
        let mut d_norm_2 = cx.empty([b, t, c])?;
        run(linear_t(scale, &d_pre, w_fc, &mut d_norm_2, Fuse::None))?;
        let mut d_middle = cx.empty([b, t, c])?;
        run(Op::LayerNormInput {
            x: s.middle.view(),
            gain: ln_2,
            stats: s.stats_2.view(),
            dy: d_norm_2.view(),
            residual: Some(dy.view()),
            dx: d_middle.view_mut(),
        })?;
        let mut d_attended = cx.empty([b, t, c])?;
        run(linear_t(scale, &d_middle, w_proj, &mut d_attended, Fuse::None))?;
        let mut d_qkv = cx.empty([b, t, 3 * c])?;
        attend(s, &d_attended, &mut d_qkv)?;
        drop(d_attended);
        let mut d_norm_1 = cx.empty([b, t, c])?;
        run(linear_t(scale, &d_qkv, w_qkv, &mut d_norm_1, Fuse::None))?;
        let mut dx = cx.empty([b, t, c])?;
        run(Op::LayerNormInput {
            x: s.x.view(),
            gain: ln_1,
            stats: s.stats_1.view(),
            dy: d_norm_1.view(),
            residual: Some(d_middle.view()),
            dx: dx.view_mut(),
        })?;
        saved.back = Some(Back { dy, d_pre, d_norm_2, d_middle, d_qkv, d_norm_1 });
        Ok(dx)
    }

    /// Computes the weight gradients.
    ///
    /// # Panics
    /// If [`Transformer::backward_input`] was not called before.
    pub fn backward_weight(
        &self,
        cx: &StageContext<'_>,
        saved: TransformerSaved,
        grads: &mut Grads<'_>,
    ) -> Result<()> {
        let [ln_1, ln_1_b, w_qkv, b_qkv, w_proj, b_proj, ln_2, ln_2_b, w_fc, b_fc, w_out, b_out] =
            cx.layout.views_mut::<PARAMS>(grads.flat, self.first)?;
        let accumulate = grads.accumulate;
        let run = |op: Op<'_>| cx.device.run(op);
        let s = saved;
        let back = s.back.expect("`backward_input` is called before `backward_weight`");

        for (x, dy, dw, db) in [
            (&s.act, &back.dy, w_out, b_out),
            (&s.norm_2, &back.d_pre, w_fc, b_fc),
            (&s.attended, &back.d_middle, w_proj, b_proj),
            (&s.norm_1, &back.d_qkv, w_qkv, b_qkv),
        ] {
            run(Op::MatMul {
                a: x.view(),
                a_t: true,
                b: dy.view(),
                b_t: false,
                c: dw,
                accumulate,
                scales: [1.0, cx.gradient_scale],
                fuse: Fuse::None,
            })?;
            run(Op::SumRows { x: dy.view(), y: db, accumulate })?;
        }
        for (x, stats, dy, d_gain, d_bias) in [
            (&s.middle, &s.stats_2, &back.d_norm_2, ln_2, ln_2_b),
            (&s.x, &s.stats_1, &back.d_norm_1, ln_1, ln_1_b),
        ] {
            let (x, stats, dy) = (x.view(), stats.view(), dy.view());
            run(Op::LayerNormWeight { x, stats, dy, d_gain, d_bias, accumulate })?;
        }
        Ok(())
    }

    /// Runs the block on new tokens only. The cache `seen` contains the keys and values of the `past` tokens
    /// before them; those of the new ones are appended.
    pub fn decode(
        &self,
        cx: &StageContext<'_>,
        x: &Tensor,
        past: usize,
        seen: &mut KeyValues,
    ) -> Result<Tensor> {
        let [ln_1, ln_1_b, w_qkv, b_qkv, w_proj, b_proj, ln_2, ln_2_b, w_fc, b_fc, w_out, b_out] =
            cx.layout.views::<PARAMS>(cx.params, self.first)?;
        let [b, t, c] = dims(x)?;
        let run = |op: Op<'_>| cx.device.run(op);
        let mut stats = cx.empty([b * t, 2])?;
        let mut norm = cx.empty([b, t, c])?;
        let (y, s) = (norm.view_mut(), stats.view_mut());
        run(Op::LayerNorm { x: x.view(), gain: ln_1, bias: ln_1_b, y, stats: s })?;
        let mut qkv = cx.empty([b, t, 3 * c])?;
        run(linear(&norm, w_qkv, &mut qkv, Fuse::Bias(b_qkv)))?;
        let mut attended = cx.empty([b, t, c])?;
        run(Op::AttentionCached {
            heads: self.heads,
            past,
            qkv: qkv.view(),
            keys: seen.keys.view_mut(),
            values: seen.values.view_mut(),
            y: attended.view_mut(),
            lse: None,
        })?;
        let mut middle = cx.empty([b, t, c])?;
        let fuse = Fuse::BiasAdd { bias: b_proj, residual: x.view() };
        run(linear(&attended, w_proj, &mut middle, fuse))?;
        let (y, s) = (norm.view_mut(), stats.view_mut());
        run(Op::LayerNorm { x: middle.view(), gain: ln_2, bias: ln_2_b, y, stats: s })?;
        let mut act = cx.empty([b, t, 4 * c])?;
        run(linear(&norm, w_fc, &mut act, Fuse::BiasGelu { bias: b_fc, slope: None }))?;
        let mut y = cx.empty([b, t, c])?;
        let fuse = Fuse::BiasAdd { bias: b_out, residual: middle.view() };
        run(linear(&act, w_out, &mut y, fuse))?;
        Ok(y)
    }
}

/// Returns the three dimensions of hidden states.
pub(crate) fn dims(x: &Tensor) -> Result<[usize; 3]> {
    let rhs = Shape::from([0, 0, 0]);
    let mismatch = |_| TensorError::ShapeMismatch { op: "hidden states [B, T, C]", lhs: x.shape(), rhs };
    x.shape().dims().try_into().map_err(mismatch)
}

/// Returns the op `y = x w`, then `fuse`.
fn linear<'a>(x: &'a Tensor, w: farflung_tensor::View<'a>, y: &'a mut Tensor, fuse: Fuse<'a>) -> Op<'a> {
    Op::MatMul {
        a: x.view(),
        a_t: false,
        b: w,
        b_t: false,
        c: y.view_mut(),
        accumulate: false,
        scales: [1.0; 2],
        fuse,
    }
}

/// Returns the op `dx = dy w^T`, then `fuse`.
fn linear_t<'a>(
    scale: f32,
    dy: &'a Tensor,
    w: farflung_tensor::View<'a>,
    dx: &'a mut Tensor,
    fuse: Fuse<'a>,
) -> Op<'a> {
    Op::MatMul {
        a: dy.view(),
        a_t: false,
        b: w,
        b_t: true,
        c: dx.view_mut(),
        accumulate: false,
        scales: [scale, 1.0],
        fuse,
    }
}
