//! The sign of an update.

use farflung_tensor::Value;

use super::{Emit, Transform};

/// Takes the sign of each element: 1, -1 or 0. After [`super::trace`] it is Signum's direction, alone it is
/// `signSGD`'s.
///
/// Source: Bernstein et al. 2018, "signSGD: Compressed Optimisation for Non-Convex Problems", Alg. 1 and 2.
#[must_use]
pub fn sign() -> impl Transform {
    Sign
}

#[derive(Debug)]
struct Sign;

impl Transform for Sign {
    fn name(&self) -> &'static str {
        "sign"
    }
    fn emit(&self, e: &mut Emit<'_>, update: Value) -> Value {
        e.program.sign(update)
    }
}
