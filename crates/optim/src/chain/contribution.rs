//! Computes what replicas average in place of gradients, range by range.

use std::ops::Range;

use farflung_tensor::{Op, Program, ProgramBuilder, Tensor, TensorError};

use crate::OptimError;
use crate::transform::{Contribution, TensorScale};

/// Builds the program of a [`Contribution`]: `keep * state + take * gradient`.
pub(super) fn program() -> Result<Program, TensorError> {
    let mut p = ProgramBuilder::new();
    let (state, gradient, keep, take) = (p.read(0), p.read(1), p.scalar(0), p.scalar(1));
    let (kept, taken) = (p.mul(keep, state), p.mul(take, gradient));
    let blended = p.add(kept, taken);
    p.store(0, blended);
    p.build()
}

/// Flat buffers from which a contribution is computed, and to which it is written.
pub(super) struct Buffers<'a> {
    /// States of the link.
    pub(super) states: &'a [Tensor],
    pub(super) grads: &'a Tensor,
    /// Factor of the state's term: 1 unless several contributions are added up to one.
    pub(super) share: f32,
    pub(super) into: &'a mut Tensor,
}

impl Buffers<'_> {
    /// Writes a range of the contribution, multiplied by `number`.
    pub(super) fn blend(
        &mut self,
        program: &Program,
        of: Contribution,
        range: Range<usize>,
        number: f32,
    ) -> Result<(), OptimError> {
        let state = &self.states[usize::from(of.state)];
        let (start, len) = (range.start, range.len());
        let reads = &[state.view().part(start, len)?, self.grads.view().part(start, len)?];
        let scalars = &[number * (self.share * of.keep), number * of.take];
        let writes = &mut [self.into.view_mut().part(start, len)?];
        Ok(self.grads.device().run(Op::Map { program, scalars, reads, writes })?)
    }

    /// Returns the factor of the tensor that begins at `start`, or 1 if none is stored.
    pub(super) fn number(&self, of: TensorScale, start: usize) -> Result<f32, OptimError> {
        let state = &self.states[usize::from(of.state)];
        let number = state.view().part(start + usize::from(of.element), 1)?.to_vec::<f32>()?[0];
        Ok(if number > 0.0 { number } else { 1.0 })
    }
}
