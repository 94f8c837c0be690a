//! Feed-forward networks: `down(gelu(up x))`, or `down(silu(gate x) * up x)`.

use farflung_tensor::{Gelu, Op, Tensor};

use super::builder::Builder;
use super::linear::{Side, Units};
use super::{Activations, Grads, Kept, Linear, Result, StageContext, Then, dims};
use crate::naming::Slot;
use crate::spec::{Activation, MlpSpec};
use crate::tensor_spec::ColumnOrder;

/// A feed-forward network.
#[derive(Debug, Clone, Copy)]
pub struct Mlp {
    gate: Option<Linear>,
    up: Linear,
    down: Linear,
    width: usize,
    /// The form of GELU, without a gate.
    gelu: Gelu,
}

impl Mlp {
    pub(super) fn new(builder: &mut Builder, dim: usize, spec: &MlpSpec) -> Self {
        let MlpSpec { width, bias, .. } = *spec;
        // Ranks divide the inner columns.
        let columns = ColumnOrder::AsInMemory;
        let mut linear = |slot, side| {
            Linear::new(builder, slot, dim, Units { side, count: width, sections: &[width], columns }, bias)
        };
        let gate = spec.gated.then(|| linear(Slot::Gate, Side::Outputs));
        let up = linear(Slot::Up, Side::Outputs);
        let down = linear(Slot::Down, Side::Inputs);
        let gelu = if spec.activation == Activation::Gelu { Gelu::Erf } else { Gelu::Tanh };
        Self { gate, up, down, width: builder.units(width).len(), gelu }
    }

    /// Returns the index of the last parameter of the network, plus one.
    pub(super) const fn end(&self) -> usize {
        let (first, count) = self.down.params();
        first + count
    }

    /// Returns the output for `x`, and `then` what is added to it.
    pub fn forward(
        &self,
        cx: &StageContext<'_>,
        x: &Tensor,
        then: Then<'_>,
        saved: &mut Activations,
    ) -> Result<Tensor> {
        let [b, t, _] = dims(x)?;
        let Some(gate) = &self.gate else {
            let mut slope = saved.keeps().then(|| cx.empty([b, t, self.width])).transpose()?;
            let activated = self.up.forward(cx, x, Then::Gelu(self.gelu, slope.as_mut()))?;
            let y = self.down.forward(cx, &activated, then)?;
            if let Some(slope) = slope {
                saved.put(Kept::Slope, slope);
            }
            saved.put(Kept::Activated, activated);
            return Ok(y);
        };
        let gate = gate.forward(cx, x, Then::Nothing)?;
        let up = self.up.forward(cx, x, Then::Nothing)?;
        let mut product = cx.empty([b, t, self.width])?;
        cx.device.run(Op::SwiGlu { gate: gate.view(), up: up.view(), y: product.view_mut() })?;
        saved.put(Kept::Gate, gate);
        saved.put(Kept::Up, up);
        self.down.forward(cx, &product, then)
    }

    /// Returns the gradient of the input, given that of the output. If ranks divide the network, it is this
    /// rank's part of the sum.
    pub fn backward_input(
        &self,
        cx: &StageContext<'_>,
        saved: &mut Activations,
        dy: &Tensor,
    ) -> Result<Tensor> {
        let Some(gate) = &self.gate else {
            let d_up = self.down.backward_input(cx, dy, Some(saved.get(Kept::Slope)))?;
            let dx = self.up.backward_input(cx, &d_up, None)?;
            saved.put(Kept::UpGrad, d_up);
            return Ok(dx);
        };
        let mut product = self.down.backward_input(cx, dy, None)?;
        let (mut d_gate, mut d_up) = (saved.take(Kept::Gate), saved.take(Kept::Up));
        let (gates, ups) = (d_gate.view_mut(), d_up.view_mut());
        cx.device.run(Op::SwiGluGrad { gate: gates, up: ups, dy: product.view_mut() })?;
        let mut dx = gate.backward_input(cx, &d_gate, None)?;
        self.up.add_backward_input(cx, &d_up, &mut dx)?;
        saved.put(Kept::Gate, d_gate);
        saved.put(Kept::Up, d_up);
        saved.put(Kept::Activated, product);
        Ok(dx)
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
        self.down.backward_weight(cx, saved.get(Kept::Activated), dy, grads)?;
        let d_up = saved.get(if self.gate.is_some() { Kept::Up } else { Kept::UpGrad });
        self.up.backward_weight(cx, x, d_up, grads)?;
        match &self.gate {
            Some(gate) => gate.backward_weight(cx, x, saved.get(Kept::Gate), grads),
            None => Ok(()),
        }
    }
}
