//! The blocks of a GPT, each with an explicit vector-Jacobian product in two halves, so that a pipeline can
//! send, split the backward pass, or run a forward pass again. There is no tape.
//!
//! Shapes: `B` sequences of `T` tokens, width `C`, vocabulary `V`; hidden states are `[B, T, C]`.
//!
//! It refuses to know optimizers, schedules and networks.

mod embedding;
mod head;
mod transformer;

pub use embedding::Embedding;
pub use head::{Head, HeadSaved};
pub(crate) use transformer::dims;
pub use transformer::{KeyValues, Transformer, TransformerSaved};

use farflung_tensor::{DType, Device, ParamLayout, Shape, Tensor};

/// What every block of a stage works with.
#[derive(Debug, Clone, Copy)]
pub struct Cx<'a> {
    /// Where it runs.
    pub device: &'a Device,
    /// Where each parameter lies in the stage's flat buffers.
    pub layout: &'a ParamLayout,
    /// The stage's parameters.
    pub params: &'a Tensor,
    /// What gradients are multiplied with where a product rounds them, and the product divided by; a power of
    /// two.
    pub gradient_scale: f32,
}

impl Cx<'_> {
    /// A result to be written in full.
    pub(crate) fn empty(&self, shape: impl Into<Shape>) -> farflung_tensor::Result<Tensor> {
        self.device.empty(DType::F32, shape)
    }
}

/// The gradients of a stage.
#[derive(Debug)]
pub struct Grads<'a> {
    /// A flat buffer of the stage's layout.
    pub flat: &'a mut Tensor,
    /// Adds to what is there, rather than overwriting it.
    pub accumulate: bool,
}
