//! Update direction of `AdaBound`.

use farflung_tensor::Value;

use super::{Emit, StateKind, StepInfo, Transform, require, require_eps, require_share};
use crate::OptimError;

/// Bounds of `AdaBound` on the rate of each element.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Bound {
    /// Limit of both bounds, in multiples of the learning rate: the authors' `final_lr / lr`.
    pub last: f64,
    /// Speed at which the bounds approach that limit. The bounds of step `t`, counted from 1, are
    /// `last (1 - 1 / (gamma t + 1))` and `last (1 + 1 / (gamma t))`.
    pub gamma: f64,
}

/// Rescales gradients as `AdaBound` does. It is Adam with the rate of each element clipped:
/// `clip(r, low, high) m` with `r = sqrt(1 - b2^t) / (1 - b1^t) / (sqrt(v) + eps)`.
///
/// Source: Luo et al. 2019, "Adaptive Gradient Methods with Dynamic Bound of Learning Rate", Alg. 1, with the
/// bias correction of the authors' package. Rates and bounds are in multiples of the learning rate, so a
/// schedule scales the bounds too, as in that package.
#[must_use]
pub fn scale_by_adabound(beta1: f64, beta2: f64, eps: f64, bound: Bound) -> impl Transform {
    ScaleByAdaBound { beta1, beta2, eps, bound }
}

#[derive(Debug)]
struct ScaleByAdaBound {
    beta1: f64,
    beta2: f64,
    eps: f64,
    bound: Bound,
}

impl Transform for ScaleByAdaBound {
    fn name(&self) -> &'static str {
        "adabound"
    }
    fn validate(&self) -> Result<(), OptimError> {
        let Bound { last, gamma } = self.bound;
        require_share("adabound", "beta1", self.beta1)?;
        require_share("adabound", "beta2", self.beta2)?;
        require_eps("adabound", self.eps)?;
        require(last >= 0.0 && last.is_finite(), "adabound", "final-lr", last, "at least 0")?;
        require((0.0..1.0).contains(&gamma) && gamma > 0.0, "adabound", "gamma", gamma, "above 0 and below 1")
    }
    fn states(&self) -> &'static [&'static str] {
        &["m", "v"]
    }
    fn state_kind(&self, state: usize) -> StateKind {
        if state == 0 { StateKind::FirstMoment } else { StateKind::SecondMoment }
    }
    fn scalar_count(&self) -> u16 {
        3
    }
    fn scalars(&self, info: StepInfo, out: &mut Vec<f32>) {
        let t = (info.step + 1) as f64;
        let Bound { last, gamma } = self.bound;
        out.push(((1.0 - self.beta2.powf(t)).sqrt() / (1.0 - self.beta1.powf(t))) as f32);
        out.push((last * (1.0 - 1.0 / (gamma * t + 1.0))) as f32);
        out.push((last * (1.0 + 1.0 / (gamma * t))) as f32);
    }
    fn emit(&self, e: &mut Emit<'_>, g: Value) -> Value {
        let (m, v) = e.moments(self.beta1, self.beta2, g);
        let p = &mut *e.program;
        let [fix, low, high] = [0, 1, 2].map(|i| p.scalar(e.scalars + i));
        let eps = p.constant(self.eps as f32);
        let root = p.sqrt(v);
        let under = p.add(root, eps);
        let rate = p.div(fix, under);
        let rate = p.max(rate, low);
        let rate = p.min(rate, high);
        p.mul(rate, m)
    }
}
