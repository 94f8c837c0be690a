//! Clipping by the global norm.

use farflung_tensor::Value;

use super::{Emit, StepInfo, Transform, require};
use crate::OptimError;

/// Scales the gradient down so that its global l2 norm is at most `max`: `g * min(1, max / (norm + 1e-6))`, as
/// PyTorch's `clip_grad_norm_`. Must be first in its chain.
#[must_use]
pub fn clip_by_global_norm(max: f64) -> impl Transform {
    ClipByGlobalNorm { max, until: u64::MAX }
}

/// Clips as [`clip_by_global_norm`] in the first `until` steps, and does nothing after them. For a chain that
/// takes gradients in these steps and other values later.
#[must_use]
pub fn clip_by_global_norm_until(max: f64, until: u64) -> impl Transform {
    ClipByGlobalNorm { max, until }
}

#[derive(Debug)]
struct ClipByGlobalNorm {
    max: f64,
    until: u64,
}

impl Transform for ClipByGlobalNorm {
    fn name(&self) -> &'static str {
        "clip"
    }
    fn validate(&self) -> Result<(), OptimError> {
        require(self.max > 0.0, "clip", "max", self.max, "above 0")
    }
    fn needs_norm(&self) -> bool {
        true
    }
    fn scalar_count(&self) -> u16 {
        1
    }
    fn scalars(&self, info: StepInfo, out: &mut Vec<f32>) {
        let factor = if info.step < self.until { self.max / (info.norm + 1e-6) } else { 1.0 };
        out.push(factor.min(1.0) as f32);
    }
    fn emit(&self, e: &mut Emit<'_>, update: Value) -> Value {
        let factor = e.program.scalar(e.scalars);
        e.program.mul(update, factor)
    }
}
