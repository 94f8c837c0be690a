//! How matrices are stored in files: `[inputs, outputs]` as in memory, or transposed.

use std::borrow::Cow;
use std::collections::BTreeSet;

use crate::naming::Names;
use crate::spec::ModelSpec;
use crate::tensor_spec::{TensorKind, TensorSpec};

/// How the matrices of a model are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Layout {
    /// `[inputs, outputs]`, as Hugging Face's GPT-2 has them.
    InputsFirst,
    /// `[outputs, inputs]`, as linear layers of PyTorch have them.
    OutputsFirst,
}

impl Layout {
    /// Returns the layout of a family's files.
    pub(super) const fn of(names: &Names) -> Self {
        if names.outputs_first { Self::OutputsFirst } else { Self::InputsFirst }
    }

    /// Returns the shape of a tensor in a file.
    pub(super) fn shape(self, spec: &TensorSpec) -> Vec<usize> {
        let mut shape = spec.shape.clone();
        if self.transposes(spec) {
            shape.reverse();
        }
        shape
    }

    /// Returns whether a tensor is stored transposed. Its shape does not tell: it may be square.
    pub(super) fn transposes(self, spec: &TensorSpec) -> bool {
        self == Self::OutputsFirst && spec.kind == TensorKind::Matrix
    }
}

/// Transposes a matrix of `rows` rows.
pub(super) fn transpose(values: &[f32], rows: usize) -> Vec<f32> {
    let columns = values.len().checked_div(rows).unwrap_or(0);
    let mut out = Vec::with_capacity(values.len());
    for column in 0..columns {
        out.extend(values[column..].iter().step_by(columns));
    }
    out
}

/// Returns the shape and the values of a tensor as the family's files have them.
#[must_use]
pub fn to_stored<'a>(names: &Names, spec: &TensorSpec, values: &'a [f32]) -> (Vec<usize>, Cow<'a, [f32]>) {
    let layout = Layout::of(names);
    let values = if layout.transposes(spec) {
        Cow::Owned(transpose(values, spec.shape[0]))
    } else {
        Cow::Borrowed(values)
    };
    (layout.shape(spec), values)
}

/// Which tensors of a model its family's files have transposed.
#[derive(Debug)]
pub struct StoredLayout(BTreeSet<String>);

impl StoredLayout {
    /// Returns the layout of a model's files.
    #[must_use]
    pub fn of(model: &ModelSpec) -> Self {
        let layout = Layout::of(model.names);
        let transposed = model.tensors().into_iter().filter(|tensor| layout.transposes(tensor));
        Self(transposed.map(|tensor| tensor.name).collect())
    }

    /// Returns the shape in files of a tensor that has `shape` in memory.
    #[must_use]
    pub fn shape(&self, name: &str, mut shape: Vec<usize>) -> Vec<usize> {
        if self.0.contains(name) {
            shape.reverse();
        }
        shape
    }

    /// Returns the values in files of a tensor that has `shape` in memory.
    #[must_use]
    pub fn values<'a>(&self, name: &str, shape: &[usize], values: &'a [f32]) -> Cow<'a, [f32]> {
        if self.0.contains(name) {
            Cow::Owned(transpose(values, shape.first().copied().unwrap_or(0)))
        } else {
            Cow::Borrowed(values)
        }
    }

    /// Converts a tensor from the layout of files to that in memory. Other tensors stay as they are.
    pub fn from_file(&self, name: &str, shape: &mut [usize], values: &mut Vec<f32>) {
        if self.0.contains(name) {
            *values = transpose(values, shape.first().copied().unwrap_or(0));
            shape.reverse();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_matrix_is_transposed() {
        assert_eq!(transpose(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], 2), [1.0, 4.0, 2.0, 5.0, 3.0, 6.0]);
        assert!(transpose(&[], 0).is_empty());
    }
}
