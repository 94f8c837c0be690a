//! Links that see whole tensors: their norms, their shapes, products of them.

use std::fmt::Debug;

use farflung_tensor::{
    Device, Op, Param, Program, ProgramBuilder, Shape, Tensor, TensorError, View, ViewMut,
};

use crate::OptimError;
use crate::norm::norms;

/// What a [`Transform`](crate::Transform) does with whole tensors, before its instructions.
pub trait PerTensor: Debug + Send {
    /// Whether it can be used for a tensor; asked when the chain is built.
    fn check(&self, _tensor: &Param) -> Result<(), OptimError> {
        Ok(())
    }

    /// Rewrites the updates of the tensors in place. It may run for some of a model's tensors at a time, so
    /// that no tensor's result may depend on another's.
    fn rewrite(&self, tensors: &mut Tensors<'_>) -> Result<(), OptimError>;
}

/// Tensors of a layout, with their parameters and their updates so far.
#[derive(Debug)]
pub struct Tensors<'a> {
    pub(crate) list: &'a [Param],
    pub(crate) params: &'a Tensor,
    pub(crate) update: &'a mut Tensor,
    pub(crate) factor: &'a Program,
    /// The states of the link.
    pub(crate) states: &'a mut [(String, Tensor)],
    /// The step, counted from 0.
    pub(crate) step: u64,
    /// Weight decay of their group; `None` is the optimizer's own.
    pub(crate) decay: Option<f64>,
}

/// The program of [`Tensors::scale`]: `x = s x`.
pub(crate) fn factor() -> Result<Program, TensorError> {
    let mut p = ProgramBuilder::new();
    let (x, s) = (p.load(0), p.scalar(0));
    let scaled = p.mul(s, x);
    p.store(0, scaled);
    p.build()
}

impl Tensors<'_> {
    /// Their number.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.list.len()
    }

    /// Whether there are none.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// Where they are.
    #[must_use]
    pub const fn device(&self) -> &Device {
        self.update.device()
    }

    /// The name of tensor `i`, below [`len`](Self::len) here and in all other methods.
    #[must_use]
    pub fn name(&self, i: usize) -> &str {
        &self.list[i].name
    }

    /// The shape of tensor `i`.
    #[must_use]
    pub fn shape(&self, i: usize) -> Shape {
        self.list[i].shape
    }

    /// The parameters of tensor `i`, as they were before the step.
    pub fn param(&self, i: usize) -> Result<View<'_>, OptimError> {
        Ok(self.params.view().part(self.list[i].start, self.list[i].shape)?)
    }

    /// The update of tensor `i`.
    pub fn update(&self, i: usize) -> Result<View<'_>, OptimError> {
        Ok(self.update.view().part(self.list[i].start, self.list[i].shape)?)
    }

    /// The update of tensor `i`, to rewrite.
    pub fn update_mut(&mut self, i: usize) -> Result<ViewMut<'_>, OptimError> {
        Ok(self.update.view_mut().part(self.list[i].start, self.list[i].shape)?)
    }

    /// The step, counted from 0.
    #[must_use]
    pub const fn step(&self) -> u64 {
        self.step
    }

    /// Weight decay of the tensors' group; `None` is the optimizer's own.
    #[must_use]
    pub const fn decay(&self) -> Option<f64> {
        self.decay
    }

    /// State `number` of the link, for tensor `i`.
    ///
    /// # Panics
    /// For a state that the link does not have.
    pub fn state_mut(&mut self, number: usize, i: usize) -> Result<ViewMut<'_>, OptimError> {
        let Param { start, shape, .. } = self.list[i];
        Ok(self.states[number].1.view_mut().part(start, shape)?)
    }

    /// The l2 norm of each tensor's parameters.
    pub fn param_norms(&self) -> Result<Vec<f64>, OptimError> {
        Ok(norms(self.params, self.list)?)
    }

    /// The l2 norm of each tensor's update.
    pub fn update_norms(&self) -> Result<Vec<f64>, OptimError> {
        Ok(norms(self.update, self.list)?)
    }

    /// Multiplies the update of tensor `i` by `factor`.
    pub fn scale(&mut self, i: usize, factor: f32) -> Result<(), OptimError> {
        let (device, program) = (self.device().clone(), self.factor);
        let writes = &mut [self.update_mut(i)?];
        Ok(device.run(Op::Map { program, scalars: &[factor], reads: &[], writes })?)
    }
}
