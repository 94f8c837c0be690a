//! A parameter tensor of a model: its name, shape and initial values.

use farflung_base::Philox;

use crate::{AxisShare, Cut};

/// Initial values of a tensor.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Init {
    /// Normally distributed, with mean 0 and this standard deviation.
    Normal(f32),
    /// All zero.
    Zeros,
    /// All one.
    Ones,
}

/// What a tensor is in its layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TensorKind {
    /// A row for each token or position.
    Table,
    /// A matrix `[inputs, outputs]`: `y = x W + b`. Files may have it transposed.
    Matrix,
    /// A gain.
    Gain,
    /// A bias.
    Bias,
}

/// One parameter tensor of the model.
#[derive(Debug, Clone, PartialEq)]
pub struct TensorSpec {
    /// Name, as Hugging Face's model of the family has it.
    pub name: String,
    /// What it is.
    pub kind: TensorKind,
    /// Shape of the whole tensor. A matrix is `[inputs, outputs]`.
    pub shape: Vec<usize>,
    /// How ranks divide it.
    pub cut: Cut,
    /// Initial values.
    pub init: Init,
}

impl TensorSpec {
    /// Returns the number of elements.
    #[must_use]
    pub fn count(&self) -> usize {
        self.shape.iter().product()
    }

    /// Returns the shape of a rank's piece.
    #[must_use]
    pub fn shape_of(&self, share: &AxisShare) -> Vec<usize> {
        self.cut.shape(&self.shape, share)
    }

    /// Fills a rank's piece from the values of the whole tensor, which `whole` writes.
    ///
    /// Errors: those of `whole`.
    pub fn fill_piece<E>(
        &self,
        share: &AxisShare,
        piece: &mut [f32],
        whole: impl FnOnce(&mut [f32]) -> Result<(), E>,
    ) -> Result<(), E> {
        if piece.len() == self.count() {
            return whole(piece);
        }
        let mut values = vec![0.0; self.count()];
        whole(&mut values)?;
        self.cut.take(&self.shape, share, &values, piece);
        Ok(())
    }

    /// Fills `out` with the initial values of the whole tensor. `index` is the tensor's index in
    /// [`ModelSpec::tensors`](crate::ModelSpec::tensors) of the whole model, so that a stage with a part of the
    /// model has the same initial values as the whole model.
    pub fn fill(&self, seed: u64, index: usize, out: &mut [f32]) {
        match self.init {
            Init::Normal(std) => Philox::new(seed, index as u64).fill_normal(std, out),
            Init::Zeros => out.fill(0.0),
            Init::Ones => out.fill(1.0),
        }
    }
}
