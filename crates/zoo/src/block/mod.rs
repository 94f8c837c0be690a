//! The blocks of a GPT. Each has an explicit backward pass in two halves, so that a pipeline can communicate
//! between the halves, or run them at different times. There is no automatic differentiation.
//!
//! Shapes: `B` sequences of `T` tokens, width `C`, vocabulary `V`. Hidden states are `[B, T, C]`.

mod embedding;
mod head;
mod transformer;

pub use embedding::Embedding;
pub use head::{Head, HeadSaved};
pub(crate) use transformer::dims;
pub use transformer::{KeyValues, Transformer, TransformerSaved};

use farflung_tensor::{DType, Device, ParamLayout, Shape, Tensor};

/// Context that every block of a stage needs.
#[derive(Debug, Clone, Copy)]
pub struct StageContext<'a> {
    /// Device on which the stage runs.
    pub device: &'a Device,
    /// Layout of the parameters in the stage's flat buffers.
    pub layout: &'a ParamLayout,
    /// The stage's parameters.
    pub params: &'a Tensor,
    /// Factor of gradients before a matrix product rounds them; the product is divided by it. A power of two.
    pub gradient_scale: f32,
}

impl StageContext<'_> {
    /// Creates a tensor with unspecified contents, to be overwritten completely.
    pub(crate) fn empty(&self, shape: impl Into<Shape>) -> farflung_tensor::Result<Tensor> {
        self.device.empty(DType::F32, shape)
    }
}

/// The gradients of a stage.
#[derive(Debug)]
pub struct Grads<'a> {
    /// A flat buffer of the stage's layout.
    pub flat: &'a mut Tensor,
    /// Whether to add to the gradients instead of overwriting them.
    pub accumulate: bool,
}
