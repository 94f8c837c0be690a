//! A parameter tensor of a model: its name, shape and initial values.

use farflung_base::Philox;

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
    /// Shape. A matrix is `[inputs, outputs]`.
    pub shape: Vec<usize>,
    /// Initial values.
    pub init: Init,
}

impl TensorSpec {
    /// Returns the number of elements.
    #[must_use]
    pub fn count(&self) -> usize {
        self.shape.iter().product()
    }

    /// Fills `out` with the initial values. `index` is the tensor's index in
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
