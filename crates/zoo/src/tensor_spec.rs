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
    /// The matrix of a router, as [`TensorKind::Matrix`].
    Router,
    /// A matrix of an expert, as [`TensorKind::Matrix`].
    Expert,
    /// A gain.
    Gain,
    /// A bias.
    Bias,
}

/// The order in which files have the last dimension of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ColumnOrder {
    /// That of memory.
    AsInMemory,
    /// Of each head of `head_dim` values, the first `rotated` are pairs of values that are rotated together. In
    /// memory, the second values follow all first ones.
    Interleaved {
        /// Values per head.
        head_dim: usize,
        /// Number of values that are rotated.
        rotated: usize,
    },
    /// The query, key and value of each of `heads` heads. In memory, all queries come first, then all keys.
    ByHead {
        /// Number of heads.
        heads: usize,
        /// Values per head.
        head_dim: usize,
    },
}

impl ColumnOrder {
    /// Returns the place in files of a column in memory.
    #[must_use]
    pub const fn in_file(self, column: usize) -> usize {
        match self {
            Self::AsInMemory => column,
            Self::Interleaved { head_dim, rotated } => {
                let (head, within) = (column / head_dim, column % head_dim);
                let half = rotated / 2;
                head * head_dim
                    + if within >= rotated {
                        within
                    } else if within < half {
                        2 * within
                    } else {
                        2 * (within - half) + 1
                    }
            }
            Self::ByHead { heads, head_dim } => {
                let (section, within) = (column / (heads * head_dim), column % (heads * head_dim));
                let (head, value) = (within / head_dim, within % head_dim);
                (3 * head + section) * head_dim + value
            }
        }
    }

    /// Converts rows of `width` values from the order of memory to that of files.
    pub(crate) fn to_file(self, width: usize, values: &mut [f32]) {
        self.reorder(width, values, |row, column, before| row[self.in_file(column)] = before[column]);
    }

    /// Converts rows of `width` values from the order of files to that of memory.
    pub(crate) fn to_memory(self, width: usize, values: &mut [f32]) {
        self.reorder(width, values, |row, column, before| row[column] = before[self.in_file(column)]);
    }

    fn reorder(self, width: usize, values: &mut [f32], set: impl Fn(&mut [f32], usize, &[f32])) {
        if self == Self::AsInMemory || width == 0 {
            return;
        }
        let mut before = vec![0.0; width];
        for row in values.chunks_exact_mut(width) {
            before.copy_from_slice(row);
            (0..width).for_each(|column| set(row, column, &before));
        }
    }
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
    /// The order of its last dimension in files.
    pub columns: ColumnOrder,
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_come_back() {
        for order in [
            ColumnOrder::AsInMemory,
            ColumnOrder::Interleaved { head_dim: 6, rotated: 4 },
            ColumnOrder::ByHead { heads: 2, head_dim: 4 },
        ] {
            let memory: Vec<f32> = (0..48_u8).map(f32::from).collect();
            let mut values = memory.clone();
            order.to_file(24, &mut values);
            if let ColumnOrder::Interleaved { .. } = order {
                assert_eq!(values[..8], [0.0, 2.0, 1.0, 3.0, 4.0, 5.0, 6.0, 8.0]);
            }
            if let ColumnOrder::ByHead { .. } = order {
                // A head's query, key and value.
                assert_eq!(
                    values[..12],
                    [0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19].map(|x: u8| f32::from(x))
                );
            }
            order.to_memory(24, &mut values);
            assert_eq!(values, memory);
        }
    }
}
