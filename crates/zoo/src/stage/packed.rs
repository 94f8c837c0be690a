//! What each stage's pass is told of its sequences, besides their tokens or hidden states.

use farflung_tensor::Tensor;

use super::{Input, Stage};
use crate::layer::Borders;
use crate::{Batch, ZooError};

/// Input of a stage, and what it is told of the sequences.
#[derive(Debug)]
pub struct Packed {
    /// Tokens or hidden states.
    pub input: Input,
    /// Where documents begin and their prefixes end.
    pub borders: Borders,
    /// Weight of each sequence in the means of the losses of routers
    /// ([`RouterLosses`](crate::spec::RouterLosses)): one over the number of sequences of a step. 0, the
    /// default, for no such losses.
    pub sequence_weight: f32,
}

impl Input {
    /// Adds where documents begin and prefixes end.
    #[must_use]
    pub const fn with_borders(self, borders: Borders) -> Packed {
        Packed { input: self, borders, sequence_weight: 0.0 }
    }
}

impl Packed {
    /// Sets the weight of each sequence in the means of the losses of routers.
    #[must_use]
    pub fn with_sequence_weight(self, sequence_weight: f32) -> Self {
        Self { sequence_weight, ..self }
    }
}

impl From<Input> for Packed {
    fn from(input: Input) -> Self {
        input.with_borders(Borders::default())
    }
}

impl From<Tensor> for Packed {
    /// Token ids of sequences that are one document each.
    fn from(tokens: Tensor) -> Self {
        Input::Tokens(tokens).into()
    }
}

impl Stage {
    /// Creates the tensors `[B, T]` of where a batch's documents begin and prefixes end. The batch has whole
    /// sequences, also where ranks divide their positions.
    ///
    /// Errors: as [`Stage::tokens`].
    pub fn borders(&self, batch: &Batch) -> Result<Borders, ZooError> {
        if let Some(context) = &self.context {
            return self.divided_borders(context, batch);
        }
        let of = |all: &Option<Vec<u32>>| all.as_ref().map(|all| self.tokens(all, batch.length)).transpose();
        Ok(Borders { documents: of(&batch.documents)?, prefixes: of(&batch.prefixes)?, context: None })
    }
}
