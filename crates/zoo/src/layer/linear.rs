//! A linear layer: `y = x W + b`, with what follows it computed in the same pass.

use farflung_tensor::{Fuse, Op, Result, Tensor};

use super::builder::Builder;
use super::{Grads, StageContext, dims};
use crate::naming::Slot;
use crate::tensor_spec::TensorKind;

/// A linear layer with weights `[inputs, outputs]`.
#[derive(Debug, Clone, Copy)]
pub struct Linear {
    /// Index of the weights in the layout; the bias follows if there is one.
    weight: usize,
    bias: bool,
    inputs: usize,
    outputs: usize,
}

/// What is done with a linear layer's output.
#[derive(Debug)]
pub enum Then<'a> {
    /// Nothing.
    Nothing,
    /// A residual is added.
    Add(&'a Tensor),
    /// GELU is applied; its derivative is written if a backward pass follows. The layer must have a bias.
    Gelu(Option<&'a mut Tensor>),
}

impl Linear {
    pub(super) fn new(builder: &mut Builder, slot: Slot, inputs: usize, outputs: usize, bias: bool) -> Self {
        let weight = builder.tensor(slot, TensorKind::Matrix, &[inputs, outputs]);
        if bias {
            builder.tensor(slot, TensorKind::Bias, &[outputs]);
        }
        Self { weight, bias, inputs, outputs }
    }

    /// Returns the index of the first parameter, and their number.
    pub(super) const fn params(&self) -> (usize, usize) {
        (self.weight, 1 + self.bias as usize)
    }

    /// Returns `[B, T, outputs]` of `[B, T, inputs]`.
    pub fn forward(&self, cx: &StageContext<'_>, x: &Tensor, then: Then<'_>) -> Result<Tensor> {
        let [b, t, _] = dims(x)?;
        let mut y = cx.empty([b, t, self.outputs])?;
        let bias = self.bias.then(|| cx.layout.view(cx.params, self.weight + 1)).transpose()?;
        let fuse = match (then, bias) {
            (Then::Nothing, None) => Fuse::None,
            (Then::Nothing, Some(bias)) => Fuse::Bias(bias),
            (Then::Add(residual), None) => Fuse::Add { residual: residual.view() },
            (Then::Add(residual), Some(bias)) => Fuse::BiasAdd { bias, residual: residual.view() },
            (Then::Gelu(slope), bias) => Fuse::BiasGelu {
                bias: bias.expect("a layer before GELU has a bias"),
                slope: slope.map(Tensor::view_mut),
            },
        };
        cx.device.run(Op::MatMul {
            a: x.view(),
            a_t: false,
            b: cx.layout.view(cx.params, self.weight)?,
            b_t: false,
            c: y.view_mut(),
            accumulate: false,
            scales: [1.0; 2],
            fuse,
        })?;
        Ok(y)
    }

    /// Returns the gradient of the input, multiplied by `factor` if there is one.
    pub fn backward_input(
        &self,
        cx: &StageContext<'_>,
        dy: &Tensor,
        factor: Option<&Tensor>,
    ) -> Result<Tensor> {
        let [b, t, _] = dims(dy)?;
        let mut dx = cx.empty([b, t, self.inputs])?;
        let fuse = factor.map_or(Fuse::None, |factor| Fuse::Times { factor: factor.view() });
        self.input_gradient(cx, dy, &mut dx, false, fuse)?;
        Ok(dx)
    }

    /// Adds the gradient of the input to `dx`.
    pub fn add_backward_input(&self, cx: &StageContext<'_>, dy: &Tensor, dx: &mut Tensor) -> Result<()> {
        self.input_gradient(cx, dy, dx, true, Fuse::None)
    }

    fn input_gradient(
        &self,
        cx: &StageContext<'_>,
        dy: &Tensor,
        dx: &mut Tensor,
        accumulate: bool,
        fuse: Fuse<'_>,
    ) -> Result<()> {
        cx.device.run(Op::MatMul {
            a: dy.view(),
            a_t: false,
            b: cx.layout.view(cx.params, self.weight)?,
            b_t: true,
            c: dx.view_mut(),
            accumulate,
            scales: [cx.gradient_scale, 1.0],
            fuse,
        })
    }

    /// Computes the gradients of the weights and the bias.
    pub fn backward_weight(
        &self,
        cx: &StageContext<'_>,
        x: &Tensor,
        dy: &Tensor,
        grads: &mut Grads<'_>,
    ) -> Result<()> {
        let accumulate = grads.accumulate;
        let [dw] = cx.layout.views_mut(grads.flat, self.weight)?;
        cx.device.run(Op::MatMul {
            a: x.view(),
            a_t: true,
            b: dy.view(),
            b_t: false,
            c: dw,
            accumulate,
            scales: [1.0, cx.gradient_scale],
            fuse: Fuse::None,
        })?;
        if self.bias {
            let [db] = cx.layout.views_mut(grads.flat, self.weight + 1)?;
            cx.device.run(Op::SumRows { x: dy.view(), y: db, accumulate })?;
        }
        Ok(())
    }
}
