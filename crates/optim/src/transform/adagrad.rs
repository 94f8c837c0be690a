//! Update direction of `AdaGrad`.

use farflung_tensor::Value;

use super::{Emit, StateKind, StepInfo, Transform, require, require_eps};
use crate::OptimError;

/// Divides the gradient by the root of the sum of all its squares: `s += g^2`,
/// `g / (sqrt(s) + eps) / (1 + t lr_decay)` in step `t`, counted from 0.
///
/// Source: Duchi et al. 2011, "Adaptive Subgradient Methods", in PyTorch's form.
#[must_use]
pub fn scale_by_adagrad(lr_decay: f64, eps: f64) -> impl Transform {
    ScaleByAdaGrad { lr_decay, eps }
}

#[derive(Debug)]
struct ScaleByAdaGrad {
    lr_decay: f64,
    eps: f64,
}

impl Transform for ScaleByAdaGrad {
    fn name(&self) -> &'static str {
        "adagrad"
    }
    fn validate(&self) -> Result<(), OptimError> {
        let decay = self.lr_decay;
        require(decay >= 0.0 && decay.is_finite(), "adagrad", "lr-decay", decay, "at least 0")?;
        require_eps("adagrad", self.eps)
    }
    fn states(&self) -> &'static [&'static str] {
        &["sum"]
    }
    fn state_kind(&self, _: usize) -> StateKind {
        StateKind::SecondMoment
    }
    fn scalar_count(&self) -> u16 {
        1
    }
    fn scalars(&self, info: StepInfo, out: &mut Vec<f32>) {
        out.push((1.0 / (1.0 + info.step as f64 * self.lr_decay)) as f32);
    }
    fn emit(&self, e: &mut Emit<'_>, g: Value) -> Value {
        let p = &mut *e.program;
        let sum = p.load(e.states);
        let gg = p.mul(g, g);
        let sum = p.add(sum, gg);
        p.store(e.states, sum);
        let (slower, eps) = (p.scalar(e.scalars), p.constant(self.eps as f32));
        let root = p.sqrt(sum);
        let under = p.add(root, eps);
        let direction = p.div(g, under);
        p.mul(direction, slower)
    }
}
