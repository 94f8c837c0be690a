//! A linear layer: `y = x W + b`, with what follows it computed in the same pass. Ranks can divide its outputs,
//! or its inputs: then each has a part of the sum, and the bias and what follows are added by one of them.

use farflung_base::Axis;
use farflung_tensor::{Fuse, Gelu, Op, Tensor, View, ViewMut};

use super::builder::Builder;
use super::{Grads, Result, StageContext, dims};
use crate::cut::Cut;
use crate::naming::Slot;
use crate::tensor_spec::{ColumnOrder, TensorKind};

/// A linear layer with weights `[inputs, outputs]`.
#[derive(Debug, Clone, Copy)]
pub struct Linear {
    /// Index of the weights in the layout; the bias follows if there is one.
    weight: usize,
    bias: bool,
    inputs: usize,
    outputs: usize,
    /// Whether ranks divide the inputs, so that each has a part of the sum.
    partial: bool,
}

/// How ranks divide a linear layer: in this many units, such as heads, of each section of the dimension.
#[derive(Debug, Clone, Copy)]
pub(super) struct Units<'a> {
    pub(super) side: Side,
    pub(super) count: usize,
    pub(super) sections: &'a [usize],
    /// The order of the outputs in files.
    pub(super) columns: ColumnOrder,
}

/// The dimension of a linear layer that ranks divide.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Side {
    Inputs,
    Outputs,
}

/// What is done with a linear layer's output.
#[derive(Debug)]
pub enum Then<'a> {
    /// Nothing.
    Nothing,
    /// A residual is added.
    Add(&'a Tensor),
    /// The output of another layer is added, of which each rank has a part as of this one.
    AddPart(&'a Tensor),
    /// GELU is applied, in this form; its derivative is written if a backward pass follows. The layer must have
    /// a bias.
    Gelu(Gelu, Option<&'a mut Tensor>),
}

impl Linear {
    /// Adds a layer that maps `width` values to or from the sections that ranks divide.
    pub(super) fn new(builder: &mut Builder, slot: Slot, width: usize, cut: Units<'_>, bias: bool) -> Self {
        Self::of_kind(builder, (slot, TensorKind::Matrix), width, cut, bias)
    }

    /// As [`Linear::new`], of a matrix of another kind.
    pub(super) fn of_kind(
        builder: &mut Builder,
        (slot, kind): (Slot, TensorKind),
        width: usize,
        cut: Units<'_>,
        bias: bool,
    ) -> Self {
        let Units { side, count, sections, columns } = cut;
        let along = |dim| Cut::Along { axis: Axis::Tensor, dim, units: count, sections: sections.to_vec() };
        let all: usize = sections.iter().sum();
        let own = all / count * builder.units(count).len();
        let partial = side == Side::Inputs;
        let (shape, dim, bias_cut) =
            if partial { ([all, width], 0, Cut::Whole) } else { ([width, all], 1, along(0)) };
        let weight = builder.cut_tensor((slot, kind), &shape, along(dim), columns);
        if bias {
            builder.cut_tensor((slot, TensorKind::Bias), &shape[1..], bias_cut, columns);
        }
        let (inputs, outputs) = if partial { (own, width) } else { (width, own) };
        Self { weight, bias, inputs, outputs, partial }
    }

    /// Returns the index of the first parameter, and their number.
    pub(super) const fn params(&self) -> (usize, usize) {
        (self.weight, 1 + self.bias as usize)
    }

    /// Returns `[B, T, outputs]` of `[B, T, inputs]`.
    pub fn forward(&self, cx: &StageContext<'_>, x: &Tensor, then: Then<'_>) -> Result<Tensor> {
        if !self.partial {
            return self.forward_part(cx, x, then);
        }
        let (then, beside) = match then {
            Then::Add(beside) => (cx.before_sum(beside).map_or(Then::Nothing, Then::Add), Some(beside)),
            then => (then, None),
        };
        let mut y = cx.reduced(self.forward_part(cx, x, then)?)?;
        beside.map_or(Ok(()), |beside| cx.after_sum(&mut y, beside))?;
        Ok(y)
    }

    /// As [`Linear::forward`]; if ranks divide the inputs, it is this rank's part of the sum.
    pub fn forward_part(&self, cx: &StageContext<'_>, x: &Tensor, then: Then<'_>) -> Result<Tensor> {
        let [b, t, _] = dims(x)?;
        let mut y = cx.empty([b, t, self.outputs])?;
        let adds = !self.partial || cx.exchange.rank(Axis::Tensor) == 0;
        let bias = (self.bias && adds).then(|| cx.param(self.weight + 1)).transpose()?;
        let then = match then {
            Then::Add(_) if !adds => Then::Nothing,
            then => then,
        };
        let fuse = match (then, bias) {
            (Then::Nothing, None) => Fuse::None,
            (Then::Nothing, Some(bias)) => Fuse::Bias(bias),
            (Then::Add(residual) | Then::AddPart(residual), None) => Fuse::Add { residual: residual.view() },
            (Then::Add(residual) | Then::AddPart(residual), Some(bias)) => {
                Fuse::BiasAdd { bias, residual: residual.view() }
            }
            (Then::Gelu(gelu, slope), bias) => Fuse::BiasGelu {
                gelu,
                bias: bias.expect("a layer before GELU has a bias"),
                slope: slope.map(Tensor::view_mut),
            },
        };
        self.product(cx, x.view(), y.view_mut(), fuse)?;
        Ok(y)
    }

    fn product(&self, cx: &StageContext<'_>, x: View<'_>, y: ViewMut<'_>, fuse: Fuse<'_>) -> Result<()> {
        let b = cx.param(self.weight)?;
        let (scales, accumulate) = ([1.0; 2], false);
        Ok(cx.device.run(Op::MatMul { a: x, a_t: false, b, b_t: false, c: y, accumulate, scales, fuse })?)
    }

    /// Writes the output for some rows `x`, without a bias. If ranks divide the inputs, it is this rank's part
    /// of the sum.
    pub(super) fn rows_forward(&self, cx: &StageContext<'_>, x: View<'_>, y: ViewMut<'_>) -> Result<()> {
        self.product(cx, x, y, Fuse::None)
    }

    /// Writes the gradient of the input for some rows, or adds it.
    pub(super) fn rows_backward(
        &self,
        cx: &StageContext<'_>,
        dy: View<'_>,
        dx: ViewMut<'_>,
        accumulate: bool,
    ) -> Result<()> {
        self.input_gradient(cx, dy, dx, accumulate, Fuse::None)
    }

    /// Computes the gradient of the weights for some rows; without rows it is 0.
    pub(super) fn rows_weight(
        &self,
        cx: &StageContext<'_>,
        x: View<'_>,
        dy: View<'_>,
        grads: &mut Grads<'_>,
    ) -> Result<()> {
        if !x.is_empty() {
            return self.weight_gradient(cx, x, dy, grads);
        }
        if !grads.accumulate() {
            let [y] = grads.of(cx.layout, self.weight)?;
            cx.device.run(Op::Fill { value: 0.0, y })?;
        }
        Ok(())
    }

    /// Returns the gradient of the input, multiplied by `factor` if there is one. If ranks divide the outputs,
    /// it is this rank's part of the sum.
    pub fn backward_input(
        &self,
        cx: &StageContext<'_>,
        dy: &Tensor,
        factor: Option<&Tensor>,
    ) -> Result<Tensor> {
        let [b, t, _] = dims(dy)?;
        let mut dx = cx.empty([b, t, self.inputs])?;
        let fuse = factor.map_or(Fuse::None, |factor| Fuse::Times { factor: factor.view() });
        self.input_gradient(cx, dy.view(), dx.view_mut(), false, fuse)?;
        Ok(dx)
    }

    /// Adds the gradient of the input to `dx`.
    pub fn add_backward_input(&self, cx: &StageContext<'_>, dy: &Tensor, dx: &mut Tensor) -> Result<()> {
        self.input_gradient(cx, dy.view(), dx.view_mut(), true, Fuse::None)
    }

    fn input_gradient(
        &self,
        cx: &StageContext<'_>,
        dy: View<'_>,
        dx: ViewMut<'_>,
        accumulate: bool,
        fuse: Fuse<'_>,
    ) -> Result<()> {
        cx.device.run(Op::MatMul {
            a: dy,
            a_t: false,
            b: cx.param(self.weight)?,
            b_t: true,
            c: dx,
            accumulate,
            scales: [cx.gradient_scale, 1.0],
            fuse,
        })?;
        Ok(())
    }

    /// Computes the gradients of the weights and the bias.
    pub fn backward_weight(
        &self,
        cx: &StageContext<'_>,
        x: &Tensor,
        dy: &Tensor,
        grads: &mut Grads<'_>,
    ) -> Result<()> {
        self.weight_gradient(cx, x.view(), dy.view(), grads)?;
        if self.bias && self.partial && !cx.has_gradient_of_whole() {
            // The first rank adds the bias.
            if !grads.accumulate() {
                let [y] = grads.of(cx.layout, self.weight + 1)?;
                cx.device.run(Op::Fill { value: 0.0, y })?;
            }
        } else if self.bias {
            let accumulate = grads.accumulate();
            let [db] = grads.of(cx.layout, self.weight + 1)?;
            cx.device.run(Op::SumRows { x: dy.view(), y: db, accumulate })?;
        }
        Ok(())
    }

    fn weight_gradient(
        &self,
        cx: &StageContext<'_>,
        x: View<'_>,
        dy: View<'_>,
        grads: &mut Grads<'_>,
    ) -> Result<()> {
        let accumulate = grads.accumulate();
        let [dw] = grads.of(cx.layout, self.weight)?;
        cx.device.run(Op::MatMul {
            a: x,
            a_t: true,
            b: dy,
            b_t: false,
            c: dw,
            accumulate,
            scales: [1.0, cx.gradient_scale],
            fuse: Fuse::None,
        })?;
        Ok(())
    }
}
