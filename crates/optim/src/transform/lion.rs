//! Update direction of Lion.

use farflung_tensor::Value;

use super::{Emit, Transform, require_share};
use crate::OptimError;

/// Takes the sign of an interpolated momentum: `sign(b1 m + (1 - b1) g)`, then `m = b2 m + (1 - b2) g`. The
/// sign of 0 is 0.
///
/// Source: Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", Alg. 2.
#[must_use]
pub fn scale_by_lion(beta1: f64, beta2: f64) -> impl Transform {
    ScaleByLion { beta1, beta2 }
}

#[derive(Debug)]
struct ScaleByLion {
    beta1: f64,
    beta2: f64,
}

impl Transform for ScaleByLion {
    fn name(&self) -> &'static str {
        "lion"
    }
    fn validate(&self) -> Result<(), OptimError> {
        require_share("lion", "beta1", self.beta1)?;
        require_share("lion", "beta2", self.beta2)
    }
    fn states(&self) -> &'static [&'static str] {
        &["m"]
    }
    fn emit(&self, e: &mut Emit<'_>, g: Value) -> Value {
        let m = e.program.load(e.states);
        let direction = e.average(self.beta1, m, g);
        let m = e.average(self.beta2, m, g);
        e.program.store(e.states, m);
        e.program.sign(direction)
    }
}
