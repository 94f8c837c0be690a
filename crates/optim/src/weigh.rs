//! Scales a buffer by a replica's weight in a mean.

use std::ops::Range;

use farflung_tensor::{Op, ProgramBuilder, Tensor};

use crate::OptimError;

/// Multiplies all elements by a replica's weight in a mean. A weight of 1 is an equal share and changes no bit.
///
/// Errors: those of the buffer's device.
pub fn weigh(x: &mut Tensor, weight: f64) -> Result<(), OptimError> {
    weigh_part(x, 0..x.shape().len(), weight)
}

/// Multiplies a range of a buffer, as [`weigh`] does.
pub(crate) fn weigh_part(x: &mut Tensor, range: Range<usize>, weight: f64) -> Result<(), OptimError> {
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
    let part = x.view_mut().part(range.start, range.len())?;
    Ok(device.run(Op::Map { program, scalars, reads: &[], writes: &mut [part] })?)
}
