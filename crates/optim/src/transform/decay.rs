//! Weight decay.

use farflung_tensor::Value;

use super::{Emit, Transform, require};
use crate::OptimError;

/// Adds `decay * parameter` to the update of matrices, not of vectors. A parameter's group can override this.
/// After [`scale_by_adam`](super::scale_by_adam) it is decoupled weight decay (Loshchilov and Hutter 2019);
/// before it, it is l2 regularisation.
#[must_use]
pub fn add_decayed_weights(decay: f64) -> impl Transform {
    AddDecayedWeights { decay }
}

#[derive(Debug)]
struct AddDecayedWeights {
    decay: f64,
}

impl Transform for AddDecayedWeights {
    fn name(&self) -> &'static str {
        "decay"
    }
    fn validate(&self) -> Result<(), OptimError> {
        require(self.decay >= 0.0 && self.decay.is_finite(), "decay", "decay", self.decay, "at least 0")
    }
    fn emit(&self, e: &mut Emit<'_>, update: Value) -> Value {
        let decay = e.group.decay.unwrap_or(self.decay);
        if decay == 0.0 {
            return update;
        }
        let p = &mut *e.program;
        let decay = p.constant(decay as f32);
        let decayed = p.mul(decay, e.param);
        p.add(update, decayed)
    }
}
