//! Update directions of Adam and `AMSGrad`.

use farflung_tensor::Value;

use super::{Emit, StateKind, StepInfo, Transform, require_eps, require_share};
use crate::OptimError;

/// Rescales gradients as Adam does, with bias correction: `m^ / (sqrt(v^) + eps)`.
///
/// Source: Kingma and Ba 2015, Alg. 1. `eps` is added after bias correction and root, as in PyTorch.
#[must_use]
pub fn scale_by_adam(beta1: f64, beta2: f64, eps: f64) -> impl Transform {
    ScaleByAdam { name: "adam", states: &["m", "v"], beta1, beta2, eps }
}

/// Rescales gradients as `AMSGrad` does. It is Adam with the largest second moment so far in place of the
/// current one.
///
/// Source: Reddi et al. 2018, "On the Convergence of Adam and Beyond", Alg. 2, with PyTorch's bias correction,
/// which is applied after the maximum.
#[must_use]
pub fn scale_by_amsgrad(beta1: f64, beta2: f64, eps: f64) -> impl Transform {
    ScaleByAdam { name: "amsgrad", states: &["m", "v", "largest_v"], beta1, beta2, eps }
}

#[derive(Debug)]
struct ScaleByAdam {
    name: &'static str,
    states: &'static [&'static str],
    beta1: f64,
    beta2: f64,
    eps: f64,
}

impl Transform for ScaleByAdam {
    fn name(&self) -> &'static str {
        self.name
    }
    fn validate(&self) -> Result<(), OptimError> {
        require_share(self.name, "beta1", self.beta1)?;
        require_share(self.name, "beta2", self.beta2)?;
        require_eps(self.name, self.eps)
    }
    fn states(&self) -> &'static [&'static str] {
        self.states
    }
    fn state_kind(&self, state: usize) -> StateKind {
        if state == 0 { StateKind::FirstMoment } else { StateKind::SecondMoment }
    }
    fn scalar_count(&self) -> u16 {
        2
    }
    fn scalars(&self, info: StepInfo, out: &mut Vec<f32>) {
        let t = (info.step + 1) as f64;
        out.push((1.0 / (1.0 - self.beta1.powf(t))) as f32);
        out.push((1.0 / (1.0 - self.beta2.powf(t)).sqrt()) as f32);
    }
    fn emit(&self, e: &mut Emit<'_>, g: Value) -> Value {
        let (m, mut v) = e.moments(self.beta1, self.beta2, g);
        let p = &mut *e.program;
        if self.states.len() == 3 {
            let largest = p.load(e.states + 2);
            v = p.max(largest, v);
            p.store(e.states + 2, v);
        }
        let (fix_m, fix_v, eps) = (p.scalar(e.scalars), p.scalar(e.scalars + 1), p.constant(self.eps as f32));
        let root = p.sqrt(v);
        let root = p.mul(root, fix_v);
        let under = p.add(root, eps);
        let m = p.mul(m, fix_m);
        p.div(m, under)
    }
}
