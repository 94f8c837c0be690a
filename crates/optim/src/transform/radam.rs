//! Update direction of `RAdam`.

use farflung_tensor::Value;

use super::{Emit, StateKind, StepInfo, Transform, require_eps, require_share};
use crate::OptimError;

/// Rescales gradients as `RAdam` does: Adam's direction times a rectification factor once the variance of the
/// adaptive learning rate is tractable; before that, the first moment alone.
///
/// Source: Liu et al. 2020, "On the Variance of the Adaptive Learning Rate and Beyond", Alg. 2. As in PyTorch,
/// the second moment is used once its effective length exceeds 5, and `eps` is added to the root before bias
/// correction.
#[must_use]
pub fn scale_by_radam(beta1: f64, beta2: f64, eps: f64) -> impl Transform {
    ScaleByRAdam { beta1, beta2, eps }
}

#[derive(Debug)]
struct ScaleByRAdam {
    beta1: f64,
    beta2: f64,
    eps: f64,
}

impl ScaleByRAdam {
    /// Returns the rectification factor of step `t`, counted from 1, or `None` while the variance is not
    /// tractable.
    fn rectification(&self, t: f64) -> Option<f64> {
        let most = 2.0 / (1.0 - self.beta2) - 1.0;
        let power = self.beta2.powf(t);
        let length = most - 2.0 * t * power / (1.0 - power);
        let ratio = (length - 4.0) * (length - 2.0) * most / ((most - 4.0) * (most - 2.0) * length);
        (length > 5.0).then(|| ratio.sqrt())
    }
}

impl Transform for ScaleByRAdam {
    fn name(&self) -> &'static str {
        "radam"
    }
    fn validate(&self) -> Result<(), OptimError> {
        require_share("radam", "beta1", self.beta1)?;
        require_share("radam", "beta2", self.beta2)?;
        require_eps("radam", self.eps)
    }
    fn states(&self) -> &'static [&'static str] {
        &["m", "v"]
    }
    fn state_kind(&self, state: usize) -> StateKind {
        if state == 0 { StateKind::FirstMoment } else { StateKind::SecondMoment }
    }
    fn scalar_count(&self) -> u16 {
        4
    }
    fn scalars(&self, info: StepInfo, out: &mut Vec<f32>) {
        let t = (info.step + 1) as f64;
        let rectification = self.rectification(t);
        out.push((rectification.unwrap_or(1.0) / (1.0 - self.beta1.powf(t))) as f32);
        out.push((1.0 / (1.0 - self.beta2.powf(t)).sqrt()) as f32);
        // One program for both cases: the denominator is `adaptive x + plain`. One of the two is 1 and the
        // other 0, so this is exact.
        let adaptive = if rectification.is_some() { 1.0 } else { 0.0 };
        out.extend([adaptive, 1.0 - adaptive]);
    }
    fn emit(&self, e: &mut Emit<'_>, g: Value) -> Value {
        let (m, v) = e.moments(self.beta1, self.beta2, g);
        let p = &mut *e.program;
        let [fix_m, fix_v, adaptive, plain] = [0, 1, 2, 3].map(|i| p.scalar(e.scalars + i));
        let eps = p.constant(self.eps as f32);
        let root = p.sqrt(v);
        let under = p.add(root, eps);
        let under = p.mul(under, fix_v);
        let under = p.mul(under, adaptive);
        let under = p.add(under, plain);
        let m = p.mul(m, fix_m);
        p.div(m, under)
    }
}
