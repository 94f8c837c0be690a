//! Momentum.

use farflung_tensor::Value;

use super::{Emit, StepInfo, Transform, require, require_share};
use crate::OptimError;

/// Accumulates momentum as PyTorch's SGD without dampening: `b = mu b + g`. The update is `b`, or `g + mu b`
/// with Nesterov momentum.
#[must_use]
pub fn trace(momentum: f64, nesterov: bool) -> impl Transform {
    trace_with(momentum, 0.0, nesterov)
}

/// Accumulates momentum as [`trace`], but with dampening: `b = mu b + (1 - dampening) g`, and `b = g` in the
/// first step, as in PyTorch's SGD.
#[must_use]
pub fn trace_with(momentum: f64, dampening: f64, nesterov: bool) -> impl Transform {
    Trace { momentum, dampening, nesterov }
}

#[derive(Debug)]
struct Trace {
    momentum: f64,
    dampening: f64,
    nesterov: bool,
}

impl Transform for Trace {
    fn name(&self) -> &'static str {
        "trace"
    }
    fn validate(&self) -> Result<(), OptimError> {
        require_share("trace", "momentum", self.momentum)?;
        let ok = (0.0..=1.0).contains(&self.dampening);
        require(ok, "trace", "dampening", self.dampening, "at least 0 and at most 1")
    }
    fn states(&self) -> &'static [&'static str] {
        &["momentum"]
    }
    fn scalar_count(&self) -> u16 {
        u16::from(self.dampening != 0.0)
    }
    fn scalars(&self, info: StepInfo, out: &mut Vec<f32>) {
        if self.dampening != 0.0 {
            out.push(if info.step == 0 { 1.0 } else { (1.0 - self.dampening) as f32 });
        }
    }
    fn emit(&self, e: &mut Emit<'_>, g: Value) -> Value {
        let p = &mut *e.program;
        let (b, mu) = (p.load(e.states), p.constant(self.momentum as f32));
        let kept = p.mul(mu, b);
        let taken = if self.dampening == 0.0 {
            g
        } else {
            let share = p.scalar(e.scalars);
            p.mul(share, g)
        };
        let b = p.add(kept, taken);
        p.store(e.states, b);
        if !self.nesterov {
            return b;
        }
        let ahead = p.mul(mu, b);
        p.add(g, ahead)
    }
}
