//! Update direction of `AdaBelief`.

use farflung_tensor::Value;

use super::{Emit, StateKind, StepInfo, Transform, require_eps, require_share};
use crate::OptimError;

/// Rescales gradients as `AdaBelief` does. It is Adam with the variance of the gradient around its running
/// average in place of the second moment: `s = b2 s + (1 - b2) (g - m)^2 + eps`, `m^ / (sqrt(s^) + eps)`.
///
/// Source: Zhuang et al. 2020, "`AdaBelief` Optimizer", Alg. 2. `eps` is added twice, as in the authors'
/// package, where its default is 1e-16. Differs from that package: no rectification. The state holds the
/// variance alone: the sum of the added `eps` depends only on the step, so it is a scalar.
#[must_use]
pub fn scale_by_adabelief(beta1: f64, beta2: f64, eps: f64) -> impl Transform {
    ScaleByAdaBelief { beta1, beta2, eps }
}

#[derive(Debug)]
struct ScaleByAdaBelief {
    beta1: f64,
    beta2: f64,
    eps: f64,
}

impl Transform for ScaleByAdaBelief {
    fn name(&self) -> &'static str {
        "adabelief"
    }
    fn validate(&self) -> Result<(), OptimError> {
        require_share("adabelief", "beta1", self.beta1)?;
        require_share("adabelief", "beta2", self.beta2)?;
        require_eps("adabelief", self.eps)
    }
    fn states(&self) -> &'static [&'static str] {
        &["m", "s"]
    }
    fn state_kind(&self, state: usize) -> StateKind {
        if state == 0 { StateKind::FirstMoment } else { StateKind::SecondMoment }
    }
    fn scalar_count(&self) -> u16 {
        3
    }
    fn scalars(&self, info: StepInfo, out: &mut Vec<f32>) {
        let t = (info.step + 1) as f64;
        let left = 1.0 - self.beta2.powf(t);
        out.push((1.0 / (1.0 - self.beta1.powf(t))) as f32);
        out.push((1.0 / left.sqrt()) as f32);
        // Sum of the `eps` added so far: eps (1 + b2 + b2^2 + ...), t terms.
        out.push((self.eps * left / (1.0 - self.beta2)) as f32);
    }
    fn emit(&self, e: &mut Emit<'_>, g: Value) -> Value {
        let (m, s) = (e.program.load(e.states), e.program.load(e.states + 1));
        let m = e.average(self.beta1, m, g);
        let off = e.program.sub(g, m);
        let square = e.program.mul(off, off);
        let s = e.average(self.beta2, s, square);
        let p = &mut *e.program;
        p.store(e.states, m);
        p.store(e.states + 1, s);
        let [fix_m, fix_s, added] = [0, 1, 2].map(|i| p.scalar(e.scalars + i));
        let eps = p.constant(self.eps as f32);
        let s = p.add(s, added);
        let root = p.sqrt(s);
        let root = p.mul(root, fix_s);
        let under = p.add(root, eps);
        let m = p.mul(m, fix_m);
        p.div(m, under)
    }
}
