//! Scales a buffer by a replica's weight in a mean.

use farflung_tensor::{Op, ProgramBuilder, Tensor};

use crate::OptimError;

/// Multiplies all elements by a replica's weight in a mean. A weight of 1 is an equal share and changes no bit.
///
/// Errors: those of the buffer's device.
pub fn weigh(x: &mut Tensor, weight: f64) -> Result<(), OptimError> {
    #[expect(clippy::float_cmp, reason = "the weight of an equal share is exactly 1")]
    if weight == 1.0 {
        return Ok(());
    }
    let mut p = ProgramBuilder::new();
    let (value, factor) = (p.load(0), p.scalar(0));
    let product = p.mul(value, factor);
    p.store(0, product);
    let program = &p.build()?;
    let (scalars, device) = (&[weight as f32], x.device().clone());
    Ok(device.run(Op::Map { program, scalars, reads: &[], writes: &mut [x.view_mut()] })?)
}
