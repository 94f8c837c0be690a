//! Update direction of `RMSprop`.

use farflung_tensor::Value;

use super::{Emit, StateKind, Transform, require_eps, require_share};
use crate::OptimError;

/// Divides the gradient by the root of a running average of its squares: `v = rho v + (1 - rho) g^2`,
/// `g / (sqrt(v) + eps)`.
///
/// Source: Tieleman and Hinton 2012, "Lecture 6.5: `RMSprop`", in PyTorch's form, where `rho` is called
/// `alpha`.
#[must_use]
pub fn scale_by_rms(rho: f64, eps: f64) -> impl Transform {
    ScaleByRms { name: "rms", states: &["v"], rho, eps }
}

/// Rescales gradients as [`scale_by_rms`] does, with the variance of the gradient in place of its second
/// moment: `v - mean^2`, where `mean` is the gradient's running average.
///
/// Source: Graves 2013, "Generating Sequences with Recurrent Neural Networks", section 4. Differs from PyTorch:
/// a variance that is negative through rounding counts as 0.
#[must_use]
pub fn scale_by_centered_rms(rho: f64, eps: f64) -> impl Transform {
    ScaleByRms { name: "centered_rms", states: &["v", "mean"], rho, eps }
}

#[derive(Debug)]
struct ScaleByRms {
    name: &'static str,
    states: &'static [&'static str],
    rho: f64,
    eps: f64,
}

impl Transform for ScaleByRms {
    fn name(&self) -> &'static str {
        self.name
    }
    fn validate(&self) -> Result<(), OptimError> {
        require_share(self.name, "rho", self.rho)?;
        require_eps(self.name, self.eps)
    }
    fn states(&self) -> &'static [&'static str] {
        self.states
    }
    fn state_kind(&self, state: usize) -> StateKind {
        if state == 0 { StateKind::SecondMoment } else { StateKind::FirstMoment }
    }
    fn emit(&self, e: &mut Emit<'_>, g: Value) -> Value {
        let v = e.program.load(e.states);
        let gg = e.program.mul(g, g);
        let mut v = e.average(self.rho, v, gg);
        e.program.store(e.states, v);
        if self.states.len() == 2 {
            let mean = e.program.load(e.states + 1);
            let mean = e.average(self.rho, mean, g);
            let p = &mut *e.program;
            p.store(e.states + 1, mean);
            let (square, zero) = (p.mul(mean, mean), p.constant(0.0));
            let variance = p.sub(v, square);
            v = p.max(variance, zero);
        }
        let p = &mut *e.program;
        let (root, eps) = (p.sqrt(v), p.constant(self.eps as f32));
        let under = p.add(root, eps);
        p.div(g, under)
    }
}
