//! The last block: final norm, logits by the tied embedding, and the loss. There is one buffer of logits; in
//! training it is overwritten with the gradient of the logits.

use farflung_tensor::{Fuse, Op, Result, Tensor};

use super::{Grads, StageContext, dims};

/// Head: `logits = ln_f(x) wte^T`.
#[derive(Debug, Clone, Copy)]
pub struct Head {
    /// Index of `ln_f.weight` in the layout; `ln_f.bias` follows.
    pub norm: usize,
    /// Index of `wte.weight` in the layout.
    pub table: usize,
    /// Number of tokens in the vocabulary.
    pub vocab: usize,
}

/// Values that a forward pass saves for the backward pass.
#[derive(Debug)]
pub struct HeadSaved {
    x: Tensor,
    stats: Tensor,
    norm: Tensor,
    d_logits: Tensor,
    d_norm: Option<Tensor>,
}

impl Head {
    /// Returns the logits `[B, T, V]`, the normalised hidden states, and the statistics of the norm.
    fn logits_of(&self, cx: &StageContext<'_>, x: &Tensor) -> Result<(Tensor, Tensor, Tensor)> {
        let [gain, bias] = cx.layout.views(cx.params, self.norm)?;
        let wte = cx.layout.view(cx.params, self.table)?;
        let [b, t, c] = dims(x)?;
        let (mut norm, mut stats) = (cx.empty([b, t, c])?, cx.empty([b * t, 2])?);
        cx.device.run(Op::LayerNorm {
            x: x.view(),
            gain,
            bias,
            y: norm.view_mut(),
            stats: stats.view_mut(),
        })?;
        let mut logits = cx.empty([b, t, self.vocab])?;
        cx.device.run(Op::MatMul {
            a: norm.view(),
            a_t: false,
            b: wte,
            b_t: true,
            c: logits.view_mut(),
            accumulate: false,
            scales: [1.0; 2],
            fuse: Fuse::None,
        })?;
        Ok((logits, norm, stats))
    }

    /// Returns the logits `[B, T, V]` of hidden states.
    pub fn logits(&self, cx: &StageContext<'_>, x: &Tensor) -> Result<Tensor> {
        Ok(self.logits_of(cx, x)?.0)
    }

    /// Returns the losses `[B T]` in nats, per token, against `targets` (u32 `[B, T]`).
    pub fn losses(&self, cx: &StageContext<'_>, x: &Tensor, targets: &Tensor) -> Result<Tensor> {
        let (mut logits, ..) = self.logits_of(cx, x)?;
        let mut losses = cx.empty(targets.shape().len())?;
        cx.device.run(Op::CrossEntropy {
            logits: logits.view_mut(),
            targets: targets.view(),
            losses: losses.view_mut(),
            grad_scale: None,
        })?;
        Ok(losses)
    }

    /// Returns the losses `[B T]` per token, and the saved values for the backward pass. The gradient is that
    /// of `scale` times the sum of the losses.
    pub fn forward(
        &self,
        cx: &StageContext<'_>,
        x: Tensor,
        targets: &Tensor,
        scale: f32,
    ) -> Result<(Tensor, HeadSaved)> {
        let (mut d_logits, norm, stats) = self.logits_of(cx, &x)?;
        let mut losses = cx.empty(targets.shape().len())?;
        cx.device.run(Op::CrossEntropy {
            logits: d_logits.view_mut(),
            targets: targets.view(),
            losses: losses.view_mut(),
            grad_scale: Some(scale),
        })?;
        Ok((losses, HeadSaved { x, stats, norm, d_logits, d_norm: None }))
    }

    /// Returns the gradient of the hidden states.
    pub fn backward_input(&self, cx: &StageContext<'_>, saved: &mut HeadSaved) -> Result<Tensor> {
        let gain = cx.layout.view(cx.params, self.norm)?;
        let wte = cx.layout.view(cx.params, self.table)?;
        let mut d_norm = cx.empty(saved.x.shape())?;
        cx.device.run(Op::MatMul {
            a: saved.d_logits.view(),
            a_t: false,
            b: wte,
            b_t: false,
            c: d_norm.view_mut(),
            accumulate: false,
            scales: [cx.gradient_scale, 1.0],
            fuse: Fuse::None,
        })?;
        let mut dx = cx.empty(saved.x.shape())?;
        cx.device.run(Op::LayerNormInput {
            x: saved.x.view(),
            gain,
            stats: saved.stats.view(),
            dy: d_norm.view(),
            residual: None,
            dx: dx.view_mut(),
        })?;
        saved.d_norm = Some(d_norm);
        Ok(dx)
    }

    /// Computes the gradients of the final norm and of the token table.
    ///
    /// # Panics
    /// If [`Head::backward_input`] was not called before.
    pub fn backward_weight(
        &self,
        cx: &StageContext<'_>,
        saved: HeadSaved,
        grads: &mut Grads<'_>,
    ) -> Result<()> {
        let accumulate = grads.accumulate;
        let d_norm = saved.d_norm.expect("`backward_input` is called before `backward_weight`");
        let [wte] = cx.layout.views_mut(grads.flat, self.table)?;
        cx.device.run(Op::MatMul {
            a: saved.d_logits.view(),
            a_t: true,
            b: saved.norm.view(),
            b_t: false,
            c: wte,
            accumulate,
            scales: [cx.gradient_scale, 1.0],
            fuse: Fuse::None,
        })?;
        let [d_gain, d_bias] = cx.layout.views_mut(grads.flat, self.norm)?;
        let (x, stats, dy) = (saved.x.view(), saved.stats.view(), d_norm.view());
        cx.device.run(Op::LayerNormWeight { x, stats, dy, d_gain, d_bias, accumulate })
    }
}
