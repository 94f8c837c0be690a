//! Lookahead: slow weights around a chain.

use farflung_tensor::Value;

use super::{Emit, StateKind, StepInfo, Transform, require};
use crate::OptimError;

/// Keeps slow weights beside the fast ones that the chain before it moves. After every `every` steps,
/// `slow += alpha (fast - slow)`, then `fast = slow`. Must be last in its chain.
///
/// Source: Zhang et al. 2019, "Lookahead Optimizer: k steps forward, 1 step back", Alg. 1. The states of the
/// other links are not reset, which is the authors' default.
#[must_use]
pub fn lookahead(every: u64, alpha: f64) -> impl Transform {
    Lookahead { every, alpha }
}

#[derive(Debug)]
struct Lookahead {
    every: u64,
    alpha: f64,
}

impl Transform for Lookahead {
    fn name(&self) -> &'static str {
        "lookahead"
    }
    fn validate(&self) -> Result<(), OptimError> {
        require(self.every > 0, "lookahead", "every", self.every as f64, "at least 1")?;
        let ok = self.alpha > 0.0 && self.alpha <= 1.0;
        require(ok, "lookahead", "alpha", self.alpha, "above 0 and at most 1")
    }
    fn states(&self) -> &'static [&'static str] {
        &["slow"]
    }
    fn state_kind(&self, _: usize) -> StateKind {
        StateKind::Weights
    }
    fn scalar_count(&self) -> u16 {
        4
    }
    fn scalars(&self, info: StepInfo, out: &mut Vec<f32>) {
        let flag = |on: bool| if on { 1.0 } else { 0.0 };
        let synchronises = (info.step + 1).is_multiple_of(self.every);
        let alpha = if synchronises { self.alpha as f32 } else { 0.0 };
        out.extend([flag(info.step == 0), alpha, flag(synchronises), flag(!synchronises)]);
    }
    fn finishes(&self) -> bool {
        true
    }
    fn finish(&self, e: &mut Emit<'_>, fast: Value) -> Value {
        let p = &mut *e.program;
        let [first, alpha, synchronises, goes_on] = [0, 1, 2, 3].map(|i| p.scalar(e.scalars + i));
        // In the first step the slow weights start as the parameters before that step. The flags are 0 or 1, so
        // that products and sums with them are exact.
        let slow = p.load(e.states);
        let begin = p.sub(e.param, slow);
        let begin = p.mul(first, begin);
        let slow = p.add(slow, begin);
        let apart = p.sub(fast, slow);
        let nearer = p.mul(alpha, apart);
        let slow = p.add(slow, nearer);
        p.store(e.states, slow);
        let (back, on) = (p.mul(synchronises, slow), p.mul(goes_on, fast));
        p.add(back, on)
    }
}
