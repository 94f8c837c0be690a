//! Links that work on whole tensors: on their norms, shapes and matrix products.

use std::fmt::Debug;

use farflung_tensor::{
    Device, Op, Param, Program, ProgramBuilder, Shape, Tensor, TensorError, View, ViewMut,
};

use crate::OptimError;
use crate::norm::norms;

/// Part of a [`Transform`](crate::Transform) that works on whole tensors. It runs before the transform's
/// elementwise instructions.
pub trait PerTensor: Debug + Send {
    /// Checks whether the link can be used for a tensor. Called when the chain is built.
    fn check(&self, _tensor: &Param) -> Result<(), OptimError> {
        Ok(())
    }

    /// Rewrites the updates of the tensors in place. It may be called with only some of a model's tensors, so
    /// the result for one tensor must not depend on another.
    fn rewrite(&self, tensors: &mut Tensors<'_>) -> Result<(), OptimError>;
}

/// Tensors of a layout with their parameters and their current updates.
#[derive(Debug)]
pub struct Tensors<'a> {
    /// The tensors, with their places in `update` and `states`.
    pub(crate) list: &'a [Param],
    /// The element of `params` with which these buffers begin.
    pub(crate) first: usize,
    pub(crate) params: &'a Tensor,
    pub(crate) update: &'a mut Tensor,
    pub(crate) factor: &'a Program,
    /// State buffers of the link.
    pub(crate) states: &'a mut [Tensor],
    /// The step, counted from 0.
    pub(crate) step: u64,
    /// Weight decay of the tensors' group; `None` means the optimizer's own.
    pub(crate) decay: Option<f64>,
}

/// Returns the program of [`Tensors::scale`]: `x = s x`.
pub(crate) fn factor() -> Result<Program, TensorError> {
    let mut p = ProgramBuilder::new();
    let (x, s) = (p.load(0), p.scalar(0));
    let scaled = p.mul(s, x);
    p.store(0, scaled);
    p.build()
}

impl Tensors<'_> {
    /// Returns the number of tensors.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.list.len()
    }

    /// Returns whether there are no tensors.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// Returns the device that holds the tensors.
    #[must_use]
    pub const fn device(&self) -> &Device {
        self.update.device()
    }

    /// Returns the name of tensor `i`. Here and in all other methods `i` is below [`len`](Self::len).
    #[must_use]
    pub fn name(&self, i: usize) -> &str {
        &self.list[i].name
    }

    /// Returns the shape of tensor `i`.
    #[must_use]
    pub fn shape(&self, i: usize) -> Shape {
        self.list[i].shape
    }

    /// Returns the parameters of tensor `i` as they were before the step.
    pub fn param(&self, i: usize) -> Result<View<'_>, OptimError> {
        Ok(self.params.view().part(self.first + self.list[i].start, self.list[i].shape)?)
    }

    /// Returns the update of tensor `i`.
    pub fn update(&self, i: usize) -> Result<View<'_>, OptimError> {
        Ok(self.update.view().part(self.list[i].start, self.list[i].shape)?)
    }

    /// Returns the update of tensor `i` for writing.
    pub fn update_mut(&mut self, i: usize) -> Result<ViewMut<'_>, OptimError> {
        Ok(self.update.view_mut().part(self.list[i].start, self.list[i].shape)?)
    }

    /// Returns the step, counted from 0.
    #[must_use]
    pub const fn step(&self) -> u64 {
        self.step
    }

    /// Returns the weight decay of the tensors' group; `None` means the optimizer's own.
    #[must_use]
    pub const fn decay(&self) -> Option<f64> {
        self.decay
    }

    /// Returns the part of the link's state `number` that belongs to tensor `i`.
    ///
    /// # Panics
    /// If the link has no state of this number.
    pub fn state_mut(&mut self, number: usize, i: usize) -> Result<ViewMut<'_>, OptimError> {
        let Param { start, shape, .. } = self.list[i];
        Ok(self.states[number].view_mut().part(start, shape)?)
    }

    /// Returns the l2 norm of each tensor's parameters.
    pub fn param_norms(&self) -> Result<Vec<f64>, OptimError> {
        Ok(norms(self.params, self.list, self.first)?)
    }

    /// Returns the l2 norm of each tensor's update.
    pub fn update_norms(&self) -> Result<Vec<f64>, OptimError> {
        Ok(norms(self.update, self.list, 0)?)
    }

    /// Multiplies the update of tensor `i` by `factor`.
    pub fn scale(&mut self, i: usize, factor: f32) -> Result<(), OptimError> {
        let (device, program) = (self.device().clone(), self.factor);
        let writes = &mut [self.update_mut(i)?];
        Ok(device.run(Op::Map { program, scalars: &[factor], reads: &[], writes })?)
    }
}
