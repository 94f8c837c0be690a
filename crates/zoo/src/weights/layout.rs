//! How tensors are stored in files: matrices `[inputs, outputs]` as in memory or transposed, and the values of
//! heads in the family's order.

use std::borrow::Cow;
use std::collections::BTreeMap;

use crate::naming::Names;
use crate::spec::ModelSpec;
use crate::tensor_spec::{ColumnOrder, TensorKind, TensorSpec};

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
        match spec.kind {
            TensorKind::Matrix => self == Self::OutputsFirst,
            TensorKind::Router | TensorKind::Expert => true,
            TensorKind::Table | TensorKind::Gain | TensorKind::Bias => false,
        }
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

/// How the values of one tensor are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct StoredForm {
    is_transposed: bool,
    columns: ColumnOrder,
    /// Length of the last dimension in memory.
    width: usize,
}

impl StoredForm {
    pub(super) fn new(layout: Layout, spec: &TensorSpec) -> Self {
        let width = spec.shape.last().copied().unwrap_or(0);
        Self { is_transposed: layout.transposes(spec), columns: spec.columns, width }
    }

    /// Returns the form with another order of the columns, if one is given.
    pub(super) fn with_columns(self, columns: Option<ColumnOrder>) -> Self {
        Self { columns: columns.unwrap_or(self.columns), ..self }
    }

    fn is_that_of_memory(self) -> bool {
        !self.is_transposed && self.columns == ColumnOrder::AsInMemory
    }

    /// Converts values of a whole tensor to the order of files.
    fn values(self, values: &[f32]) -> Cow<'_, [f32]> {
        if self.is_that_of_memory() {
            return Cow::Borrowed(values);
        }
        let mut ordered = Cow::Borrowed(values);
        if self.columns != ColumnOrder::AsInMemory {
            self.columns.to_file(self.width, ordered.to_mut());
        }
        if !self.is_transposed {
            return ordered;
        }
        let rows = values.len().checked_div(self.width).unwrap_or(0);
        Cow::Owned(transpose(&ordered, rows))
    }

    /// Converts values of a whole tensor from the order of files.
    pub(super) fn to_memory(self, values: &mut [f32]) {
        if self.is_transposed {
            values.copy_from_slice(&transpose(values, self.width));
        }
        self.columns.to_memory(self.width, values);
    }
}

/// Returns the shape and the values of a tensor as the family's files have them.
#[must_use]
pub fn to_stored<'a>(names: &Names, spec: &TensorSpec, values: &'a [f32]) -> (Vec<usize>, Cow<'a, [f32]>) {
    let layout = Layout::of(names);
    (layout.shape(spec), StoredForm::new(layout, spec).values(values))
}

/// Which tensors of a model its family's files have in another order than memory.
#[derive(Debug)]
pub struct StoredLayout(BTreeMap<String, StoredForm>);

impl StoredLayout {
    /// Returns the layout of a model's files.
    #[must_use]
    pub fn of(model: &ModelSpec) -> Self {
        let layout = Layout::of(model.names);
        let forms = model.tensors().into_iter().map(|tensor| {
            let form = StoredForm::new(layout, &tensor);
            (tensor.name, form)
        });
        Self(forms.filter(|(_, form)| !form.is_that_of_memory()).collect())
    }

    /// Returns the shape in files of a tensor that has `shape` in memory.
    #[must_use]
    pub fn shape(&self, name: &str, mut shape: Vec<usize>) -> Vec<usize> {
        if self.0.get(name).is_some_and(|form| form.is_transposed) {
            shape.reverse();
        }
        shape
    }

    /// Returns the values in files of a tensor.
    #[must_use]
    pub fn values<'a>(&self, name: &str, values: &'a [f32]) -> Cow<'a, [f32]> {
        self.0.get(name).map_or(Cow::Borrowed(values), |form| form.values(values))
    }

    /// Converts a tensor from the layout of files to that in memory. Other tensors stay as they are, and so do
    /// those that do not have the model's width.
    pub fn from_file(&self, name: &str, shape: &mut [usize], values: &mut [f32]) {
        let Some(form) = self.0.get(name) else { return };
        if form.is_transposed {
            shape.reverse();
        }
        if shape.last() == Some(&form.width) && shape.iter().product::<usize>() == values.len() {
            form.to_memory(values);
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
