//! A norm over the last dimension, with gain and perhaps bias.

use farflung_tensor::{Norm, Op, Tensor};

use super::builder::Builder;
use super::{Grads, Result, StageContext, dims};
use crate::naming::Slot;
use crate::spec::NormSpec;
use crate::tensor_spec::TensorKind;

/// A norm.
#[derive(Debug, Clone, Copy)]
pub struct NormLayer {
    norm: Norm,
    /// Index of the gain in the layout; the bias follows if there is one.
    gain: usize,
    bias: bool,
    width: usize,
}

impl NormLayer {
    pub(super) fn new(builder: &mut Builder, slot: Slot, dim: usize, spec: &NormSpec) -> Self {
        let gain = builder.tensor(slot, TensorKind::Gain, &[dim]);
        if spec.bias {
            builder.tensor(slot, TensorKind::Bias, &[dim]);
        }
        Self { norm: spec.norm, gain, bias: spec.bias, width: dim }
    }

    /// Returns the index of the first parameter, and their number.
    pub(super) const fn params(&self) -> (usize, usize) {
        (self.gain, 1 + self.bias as usize)
    }

    /// Returns the output, and the statistics `[B T, 2]` that the backward pass needs.
    pub fn forward(&self, cx: &StageContext<'_>, x: &Tensor) -> Result<(Tensor, Tensor)> {
        let [b, t, c] = dims(x)?;
        self.forward_rows(cx, x, [b * t, c])
    }

    /// Returns the output for each head of `x`, and the statistics.
    pub(super) fn forward_heads(&self, cx: &StageContext<'_>, x: &Tensor) -> Result<(Tensor, Tensor)> {
        self.forward_rows(cx, x, self.rows_of_heads(x))
    }

    /// Returns the number of heads of all tokens, and their width.
    fn rows_of_heads(&self, x: &Tensor) -> [usize; 2] {
        [x.shape().len().checked_div(self.width).unwrap_or(0), self.width]
    }

    fn forward_rows(
        &self,
        cx: &StageContext<'_>,
        x: &Tensor,
        [rows, width]: [usize; 2],
    ) -> Result<(Tensor, Tensor)> {
        let (mut y, mut stats) = (cx.empty(x.shape())?, cx.empty([rows, 2])?);
        let bias = self.bias.then(|| cx.param(self.gain + 1)).transpose()?;
        cx.device.run(Op::Norm {
            norm: self.norm,
            x: x.view().reshape([rows, width])?,
            gain: cx.param(self.gain)?,
            bias,
            y: y.view_mut().reshape([rows, width])?,
            stats: stats.view_mut(),
        })?;
        Ok((y, stats))
    }

    /// Returns the gradient of the input `x`, plus that of the residual branch if there is one.
    pub fn backward_input(
        &self,
        cx: &StageContext<'_>,
        x: &Tensor,
        stats: &Tensor,
        dy: &Tensor,
        residual: Option<&Tensor>,
    ) -> Result<Tensor> {
        let mut dx = cx.empty(x.shape())?;
        cx.device.run(Op::NormInput {
            norm: self.norm,
            x: x.view(),
            gain: cx.param(self.gain)?,
            stats: stats.view(),
            dy: dy.view(),
            residual: residual.map(Tensor::view),
            dx: dx.view_mut(),
        })?;
        Ok(dx)
    }

    /// Returns the gradient of the input `x` of [`NormLayer::forward_heads`].
    pub(super) fn backward_heads(
        &self,
        cx: &StageContext<'_>,
        x: &Tensor,
        stats: &Tensor,
        dy: &Tensor,
    ) -> Result<Tensor> {
        let rows = self.rows_of_heads(x);
        let mut dx = cx.empty(x.shape())?;
        cx.device.run(Op::NormInput {
            norm: self.norm,
            x: x.view().reshape(rows)?,
            gain: cx.param(self.gain)?,
            stats: stats.view(),
            dy: dy.view().reshape(rows)?,
            residual: None,
            dx: dx.view_mut().reshape(rows)?,
        })?;
        Ok(dx)
    }

    /// Computes the gradient of the gain of [`NormLayer::forward_heads`]. Ranks that divide the heads have the
    /// same gain: its gradient is summed over them, unless those of all whole tensors are.
    pub(super) fn backward_weight_heads(
        &self,
        cx: &StageContext<'_>,
        x: &Tensor,
        stats: &Tensor,
        dy: &Tensor,
        grads: &mut Grads<'_>,
    ) -> Result<()> {
        let [rows, width] = self.rows_of_heads(x);
        let mut sum = cx.empty([1, width])?;
        cx.device.run(Op::NormWeight {
            x: x.view().reshape([rows, width])?,
            stats: stats.view(),
            dy: dy.view().reshape([rows, width])?,
            d_gain: sum.view_mut().reshape(width)?,
            d_bias: None,
            accumulate: false,
        })?;
        if cx.sequence.is_none() {
            cx.sum(&mut sum)?;
        }
        let accumulate = grads.accumulate();
        let [gain] = grads.of(cx.layout, self.gain)?;
        cx.device.run(Op::SumRows { x: sum.view(), y: gain, accumulate })?;
        Ok(())
    }

    /// Computes the gradients of gain and bias.
    pub fn backward_weight(
        &self,
        cx: &StageContext<'_>,
        x: &Tensor,
        stats: &Tensor,
        dy: &Tensor,
        grads: &mut Grads<'_>,
    ) -> Result<()> {
        let accumulate = grads.accumulate();
        let (d_gain, d_bias) = if self.bias {
            let [gain, bias] = grads.of(cx.layout, self.gain)?;
            (gain, Some(bias))
        } else {
            let [gain] = grads.of(cx.layout, self.gain)?;
            (gain, None)
        };
        let (x, stats, dy) = (x.view(), stats.view(), dy.view());
        cx.device.run(Op::NormWeight { x, stats, dy, d_gain, d_bias, accumulate })?;
        Ok(())
    }
}
