//! Adam whose second moment is frozen after a warm-up. The step is then linear in the first moments, so
//! replicas can average these through any codec, and error feedback loses nothing.

use farflung_tensor::{ProgramBuilder, Value};

use super::{Contribution, Emit, StepInfo, Transform, require_eps, require_share};
use crate::OptimError;

/// Settings of [`scale_by_frozen_adam`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FrozenAdam {
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Number of warm-up steps. The second moment changes only in these.
    pub freeze: u64,
    /// Whether both moments are corrected for their start at zero. After the warm-up, the correction of the
    /// second moment stays at that of the last warm-up step.
    pub corrects: bool,
}

/// Rescales gradients as Adam does, `m / (sqrt(v) + eps)`, with a second moment that is frozen after a warm-up.
/// In the first `freeze` steps replicas average gradients, and both moments are Adam's. After them, replicas
/// average `beta1 m + (1 - beta1) g`, which becomes `m`, and `v` does not change.
///
/// Source: Tang et al. 2021, "1-bit Adam", Alg. 1. Differs, because codecs can give momentum to elements that
/// never had a gradient: an element without any gradient in the warm-up, `v = 0`, does not move, and no element
/// moves farther than Adam can ever move it, [`FrozenAdam::longest`].
#[must_use]
pub fn scale_by_frozen_adam(settings: FrozenAdam) -> impl Transform {
    ScaleByFrozenAdam(settings)
}

impl FrozenAdam {
    /// Returns the largest absolute value that Adam's `m / sqrt(v)` can have for any gradients (by the
    /// Cauchy-Schwarz inequality): `(1 - beta1) / sqrt((1 - beta2) (1 - beta1^2 / beta2))`. Infinite where
    /// `beta1^2 >= beta2`.
    #[must_use]
    pub fn longest(&self) -> f64 {
        let left = 1.0 - self.beta1 * self.beta1 / self.beta2;
        if left > 0.0 { (1.0 - self.beta1) / ((1.0 - self.beta2) * left).sqrt() } else { f64::INFINITY }
    }
}

#[derive(Debug)]
struct ScaleByFrozenAdam(FrozenAdam);

impl ScaleByFrozenAdam {
    fn is_warm(&self, step: u64) -> bool {
        step < self.0.freeze
    }
}

impl Transform for ScaleByFrozenAdam {
    fn name(&self) -> &'static str {
        "adam"
    }
    fn validate(&self) -> Result<(), OptimError> {
        let FrozenAdam { beta1, beta2, eps, .. } = self.0;
        require_share("adam", "beta1", beta1)?;
        require_share("adam", "beta2", beta2)?;
        require_eps("adam", eps)
    }
    fn states(&self) -> &'static [&'static str] {
        &["m", "v"]
    }
    fn scalar_count(&self) -> u16 {
        8
    }
    fn scalars(&self, info: StepInfo, out: &mut Vec<f32>) {
        let FrozenAdam { beta1, beta2, freeze, corrects, .. } = self.0;
        let [m, v] = if self.is_warm(info.step) { [beta1, beta2] } else { [0.0, 1.0] };
        out.extend([m, 1.0 - m, v, 1.0 - v].map(|x| x as f32));
        let t = (info.step + 1) as f64;
        let (fix_m, fix_v) = if corrects {
            (1.0 / (1.0 - beta1.powf(t)), 1.0 / (1.0 - beta2.powf(t.min(freeze.max(1) as f64))).sqrt())
        } else {
            (1.0, 1.0)
        };
        let longest = if self.is_warm(info.step) { f64::INFINITY } else { self.0.longest() };
        out.extend([fix_m, fix_v, longest, -longest].map(|x| x as f32));
    }
    fn emit(&self, e: &mut Emit<'_>, x: Value) -> Value {
        let p = &mut *e.program;
        let (m, v) = (p.load(e.states), p.load(e.states + 1));
        let blend = |p: &mut ProgramBuilder, old: Value, new: Value, scalar: u16| {
            let (keep, take) = (p.scalar(scalar), p.scalar(scalar + 1));
            let (old, new) = (p.mul(keep, old), p.mul(take, new));
            p.add(old, new)
        };
        let m = blend(p, m, x, e.scalars);
        let xx = p.mul(x, x);
        let v = blend(p, v, xx, e.scalars + 2);
        p.store(e.states, m);
        p.store(e.states + 1, v);
        let (fix_m, fix_v) = (p.scalar(e.scalars + 4), p.scalar(e.scalars + 5));
        let eps = p.constant(self.0.eps as f32);
        let root = p.sqrt(v);
        let root = p.mul(root, fix_v);
        let under = p.add(root, eps);
        let m = p.mul(m, fix_m);
        let direction = p.div(m, under);
        let (most, least) = (p.scalar(e.scalars + 6), p.scalar(e.scalars + 7));
        let direction = p.min(direction, most);
        let direction = p.max(direction, least);
        let seen = p.sign(v);
        p.mul(direction, seen)
    }
    fn contribution(&self, step: u64) -> Option<Contribution> {
        let (keep, take) = (self.0.beta1 as f32, (1.0 - self.0.beta1) as f32);
        (!self.is_warm(step)).then_some(Contribution { state: 0, keep, take, scale: None })
    }
}
